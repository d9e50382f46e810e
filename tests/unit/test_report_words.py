"""How numbers read."""

import doctest
import math
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.report import tried, verdict, words
from handmade import trial
from shown import on_page, on_screen

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))

import report_examples as examples

positive = st.floats(min_value=1e-9, max_value=1e18, allow_nan=False)
any_float = st.one_of(positive, positive.map(lambda x: -x), st.sampled_from([0.0, math.nan, math.inf, -math.inf]))


def read(text):
    """The number at the start of a text."""
    return float(re.match(r"-?[\d,.]+", text).group().replace(",", ""))


def test_the_examples_in_the_docstrings_hold():
    assert doctest.testmod(words).failed == doctest.testmod(tried).failed == 0


@given(positive)
def test_three_digits_are_within_half_a_percent_and_have_no_exponent(value):
    text = words.three(value)
    assert "e" not in text
    assert read(text) == pytest.approx(value, rel=0.0051)


@given(positive)
def test_three_digits_are_stable_when_read_again(value):
    assert words.three(read(words.three(value))) == words.three(value)


@given(st.floats(min_value=1e-9, max_value=900))
def test_seconds_have_one_to_three_digits_before_the_point(value):
    text = words.seconds(value)
    number, unit = text.split()
    size = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}[unit]
    assert 0.99 <= read(number) <= 1000
    assert read(number) * size == pytest.approx(value, rel=0.006)


@given(st.floats(min_value=0, max_value=4e7))
def test_a_duration_is_read_back_within_its_smallest_unit(value):
    text = words.duration(value)
    sizes = {"s": 1, "min": 60, "h": 3600, "days": 86400}
    parts = re.findall(r"([\d.]+) (s|min|h|days)", text)
    total = sum(float(number) * sizes[unit] for number, unit in parts)
    # the finest unit that a duration of this length is given in
    finest = 0.1 if value < 9.95 else 1 if value < 7200 else 60 if value < 48 * 3600 else 3600
    assert abs(total - value) <= finest * 0.51
    assert all(float(number) > 0 for number, _ in parts[1:])


@given(any_float)
def test_nothing_that_is_not_a_number_is_shown_as_one(value):
    shown = [
        words.seconds(value), words.duration(value), words.rate(value), words.scaled(value, "B/s"),
        words.memory(value), words.percent(value), words.share(value), words.ratio(value), words.times(value),
    ]  # fmt: skip
    assert not any("nan" in text or "inf" in text for text in shown)
    if not math.isfinite(value):
        assert {*shown} <= {words.MISSING, "", "?"}


@given(st.floats(min_value=0, max_value=1))
def test_a_share_is_never_rounded_to_nothing(value):
    assert (words.percent(value) == "0 %") == (value == 0)


@pytest.mark.parametrize(
    ("value", "wanted"), [(1.0, "1.00x"), (1.04, "1.04x"), (1.096, "1.1x"), (9.96, "10x"), (0.5, "0.50x")]
)
def test_ratios_near_one_keep_two_decimals(value, wanted):
    assert words.times(value) == wanted


@given(st.text())
def test_text_of_a_record_cannot_move_the_cursor_or_turn_around(text):
    shown = words.printable(text)
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in shown)
    assert not any(c in shown for c in "\u202e\u2066\u200f")
    shown.encode("utf-8")


@given(st.text())
def test_making_text_printable_twice_changes_nothing(text):
    assert words.printable(words.printable(text)) == words.printable(text)


def test_a_bell_an_escape_and_a_lone_surrogate_become_visible():
    assert words.printable("a\x07b\x1b[0m\udc80") == "a\\x07b\\x1b[0m\\udc80"


def test_two_spaces_inside_an_argument_stay_two():
    assert words.printable("'a  b'") == "'a  b'"


def test_a_newline_in_a_message_becomes_one_space():
    assert words.printable("RuntimeError\n    at line 3") == "RuntimeError at line 3"


def one_pair(num_pairs=1, low=1.28, high=1.28):
    alone = trial(
        {"bf16": {}}, 1.28, outcome="inconclusive", ratio_low=low, ratio_high=high, num_pairs=num_pairs,
        reason="1 of at least 4 pairs of windows that are needed",
    )  # fmt: skip
    return replace(examples.nothing(), trials=(alone,), verdict="inconclusive", remeasured=None)


def everywhere(found):
    return on_screen(found, verbose=True, width=100) + on_page(found)


def test_a_single_pair_has_a_ratio_and_no_interval_on_the_terminal_and_the_page():
    said = everywhere(one_pair())
    assert "1.28" in said and "[1.28" not in said
    assert verdict.headline(one_pair()).unit == "too few pairs of windows for an interval"


def test_two_pairs_are_called_so_and_not_an_interval():
    said = everywhere(one_pair(num_pairs=2, low=1.2, high=1.36))
    assert "1.28  2 pairs " in said and "1.36" not in said
