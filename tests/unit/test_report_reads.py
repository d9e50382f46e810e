"""Is each line where a value is read said with what it takes?"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.judge import result as results
from flatout.records.as_json import from_json, to_json
from flatout.report import tables
from shown import on_page, on_screen

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))

import report_examples as examples

PRINTED = examples.read_site("train.py", 41, "print(loss.item())", 0.4, on_device=True)
STOPS = examples.read_site("train.py", 47, "if loss.item() > 9:", 0.3, on_device=True)


def said(*sites, command="why", **options):
    result = replace(examples.why(), command=command, reads=examples.reads(*sites))
    return " ".join(on_screen(result, width=200, **options).split())


@pytest.mark.parametrize("command", ["tune", "why"])
def test_each_line_is_said_with_how_often_and_how_long(command):
    text = said(PRINTED, STOPS, command=command)
    assert "train.py:41 `print(loss.item())` 1 a step, 400 µs" in text
    assert "train.py:47 `if loss.item() > 9:` 1 a step, 300 µs" in text


def test_tune_says_those_alone_that_wait_for_a_device():
    on_host = replace(STOPS, on_device=False)
    text = said(PRINTED, on_host, command="tune")
    assert "train.py:41" in text and "train.py:47" not in text
    assert "train.py:47" in said(PRINTED, on_host, command="tune", verbose=True)


def test_where_the_code_is_not_known_the_call_stands_for_it():
    assert "train.py:41 `item` 1 a step" in said(replace(PRINTED, code=""))


def test_many_places_are_cut():
    sites = [replace(PRINTED, line=number) for number in range(10, 20)]
    text = said(*sites)
    assert "train.py:13" in text and "train.py:14" not in text and "6 more: --verbose" in text
    assert "train.py:19" in said(*sites, verbose=True)


def test_without_them_the_places_of_the_census_are_shown():
    result = examples.why()
    for found in (None, examples.reads()):
        assert "reads at" in on_screen(replace(result, reads=found))


def test_the_page_has_a_row_for_each_and_says_how_it_was_obtained():
    result = replace(examples.why(), reads=examples.reads(PRINTED, STOPS))
    rows = tables.read_sites(result).rows
    assert [(row[0], row[-1]) for row in rows] == [("train.py:41", "400 µs"), ("train.py:47", "300 µs")]
    page = on_page(result)
    assert "Where values are read on the host" in page and 'id="raw-reads"' in page
    assert 'id="raw-reads"' not in on_page(replace(result, reads=None))


@pytest.mark.parametrize("command", ["tune", "why"])
def test_json_has_each_line_and_null_where_nobody_looked(command):
    result = replace(examples.lenet(), command=command, reads=examples.reads(PRINTED, STOPS))
    assert [(one["line"], one["waited_s"]) for one in results.summary_of(result)["reads"]] == [(41, 4e-4), (47, 3e-4)]
    assert results.summary_of(replace(result, reads=None))["reads"] is None


def test_a_result_of_a_former_version_has_none_and_a_new_one_survives_its_file():
    result = replace(examples.lenet(), reads=examples.reads(PRINTED))
    value = to_json(result)
    assert from_json(results.Result, value, where="result").reads == result.reads
    del value["reads"]
    assert from_json(results.Result, value, where="result").reads is None
