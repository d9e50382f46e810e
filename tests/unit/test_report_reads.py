"""Is each place where a value is read said with its line, and is nothing promised of a value that is needed?"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.judge import result as results
from flatout.records.as_json import from_json, to_json
from flatout.report import html, screen, tables, terminal

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))

import report_examples as examples

PRINTED = examples.read_site("train.py", 41, "loss.item()", 0.4, "printed", ratio=1.0126, on_device=True)
STOPS = examples.read_site("train.py", 47, "loss.item()", 0.4, "used", "steers `if`, line 48", on_device=True)
UNTOLD = examples.read_site(
    "train.py", 50, "scheduler.step(loss)", 0.1, "not told", "what `scheduler.step` does with it"
)


def said(*sites, command="why", together=None, **options):
    result = replace(examples.why(), command=command, reads=examples.reads(*sites, together=together))
    make = terminal.why if command == "why" else terminal.tune
    return " ".join(screen.plain(make(result, **options), width=200).split())


def test_a_printed_value_has_its_bound_and_a_needed_one_its_reason():
    text = said(PRINTED, STOPS, UNTOLD)
    assert "train.py:41 `loss.item()` 1 a step, 400 µs; only printed: deferring it brings at most 1.01x" in text
    assert "train.py:47 `loss.item()` 1 a step, 400 µs; its value is used: steers `if`, line 48" in text
    assert "whether its value is needed is not told: what `scheduler.step` does with it" in text


def test_on_the_host_nothing_is_deferred_but_read_less_often():
    assert "reading it less often brings at most 1.01x" in said(replace(PRINTED, on_device=False))


def test_tune_says_those_alone_that_are_worth_a_change():
    text = said(PRINTED, STOPS, replace(PRINTED, line=60, ratio=1.001), command="tune")
    assert "train.py:41" in text and "train.py:47" not in text and "train.py:60" not in text
    assert "train.py:47" in said(PRINTED, STOPS, command="tune", verbose=True)


def test_many_places_are_cut_and_together_is_said_of_several():
    text = said(*(replace(PRINTED, line=number) for number in range(10, 20)), together=1.2)
    assert "train.py:13" in text and "train.py:14" not in text and "6 more: --verbose" in text
    assert "all that are only printed together: at most 1.2x" in text
    assert "together" not in said(PRINTED, together=1.2)


def test_without_them_the_places_of_the_census_are_shown():
    result = examples.why()
    for found in (None, examples.reads()):
        assert "reads at" in screen.plain(terminal.why(replace(result, reads=found)))


def test_the_page_has_a_row_for_each_with_the_windows_behind_it():
    result = replace(examples.why(), reads=examples.reads(PRINTED, STOPS))
    rows = tables.read_sites(result).rows
    assert [(row[0], row[-1]) for row in rows] == [("train.py:41", "1.01"), ("train.py:47", "")]
    page = html.html_text(result)
    assert "Where values are read on the host" in page and 'id="raw-reads"' in page
    assert 'id="raw-reads"' not in html.html_text(replace(result, reads=None))


@pytest.mark.parametrize("command", ["tune", "why"])
def test_json_has_no_bound_for_a_value_that_is_needed_and_null_where_nobody_looked(command):
    result = replace(examples.lenet(), command=command, reads=examples.reads(PRINTED, STOPS))
    printed, stops = results.summary_of(result)["reads"]
    assert (printed["line"], printed["use"], printed["at_most"]) == (41, "printed", 1.0126)
    assert (stops["line"], stops["why"], stops["at_most"]) == (47, "steers `if`, line 48", None)
    assert results.summary_of(replace(result, reads=None))["reads"] is None


def test_a_result_of_a_former_version_has_none_and_a_new_one_survives_its_file():
    result = replace(examples.lenet(), reads=examples.reads(PRINTED, together=1.0126))
    value = to_json(result)
    assert from_json(results.Result, value, where="result").reads == result.reads
    del value["reads"]
    assert from_json(results.Result, value, where="result").reads is None
