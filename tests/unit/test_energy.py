"""Does a log of counters say how much was used between two instants, and when does it refuse to?"""

import itertools
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flatout.errors import RecordError
from flatout.records.as_json import from_json, to_json
from flatout.records.energy import Counter, Curve, Curves, Log, Series, Span, load, save, unwrapped


def counter(name="package-0", device="cpu", *, resolution_s=1e-3, range_joules=None):
    return Counter(
        name=name, device=device, source="RAPL", resolution_s=resolution_s, resolution_joules=1e-6,
        range_joules=range_joules,
    )  # fmt: skip


def series(watts=10.0, *, every_s=0.01, until_s=10.0, begin=0.0, what=None):
    """A counter under constant power."""
    number = round(until_s / every_s) + 1
    at_s = tuple(every_s * n for n in range(number))
    return Series(counter=what or counter(), at_s=at_s, joules=tuple(begin + watts * s for s in at_s))


def curves(*found, devices=None):
    return Curves(Log(series=found), devices)


def test_constant_power_for_a_time_is_their_product():
    energy = curves(series(12.0)).between(1.0, 3.5)
    assert energy.joules == pytest.approx(30.0)
    assert energy.parts == {"package-0": pytest.approx(30.0)} and energy.why_not == ""


def test_a_counter_that_begins_anew_goes_on_where_it_was():
    watts, full = 50.0, 65.0
    found = series(watts, what=counter(range_joules=full))
    wrapped = Series(counter=found.counter, at_s=found.at_s, joules=tuple(j % full for j in found.joules))
    assert curves(wrapped).between(0.5, 9.5).joules == pytest.approx(450.0)
    assert unwrapped(wrapped.joules, full) == pytest.approx(list(found.joules))


def test_a_counter_that_went_back_and_should_not_have_tells_nothing():
    found = Series(counter=counter(), at_s=(0.0, 1.0, 2.0), joules=(5.0, 9.0, 1.0))
    energy = curves(found).between(0.0, 2.0)
    assert energy.joules is None and "went back" in energy.why_not


@pytest.mark.parametrize("after", [99.9, 0.0])
def test_a_counter_that_is_reset_has_not_gone_round_once_more(after):
    shown = tuple(100.0 + n for n in range(5)) + tuple(after + n for n in range(5))
    found = Series(counter=counter(range_joules=262_143.0), at_s=tuple(map(float, range(10))), joules=shown)
    energy = curves(found).between(0.0, 9.0, min_updates=2)
    assert energy.joules is None and "went back" in energy.why_not


def test_a_range_that_is_no_range_is_not_gone_round():
    found = Series(counter=counter(range_joules=0.0), at_s=(0.0, 1.0, 2.0), joules=(5.0, 9.0, 1.0))
    assert "went back" in curves(found).between(0.0, 2.0, min_updates=2).why_not


def test_a_counter_that_stands_still_has_not_measured_that_nothing_was_used():
    found = Series(counter=counter(), at_s=tuple(map(float, range(10))), joules=(7.0,) * 10)
    energy = curves(found).between(0.0, 9.0, min_updates=2)
    assert energy.joules is None and energy.why_not == "package-0 stood still"


def test_packages_and_memory_are_added_up_and_named():
    found = curves(series(20.0), series(30.0, what=counter("package-1")), series(4.0, what=counter("dram-0", "memory")))
    energy = found.between(1.0, 2.0)
    assert energy.joules == pytest.approx(54.0)
    assert energy.parts == {
        "package-0": pytest.approx(20.0),
        "package-1": pytest.approx(30.0),
        "dram-0": pytest.approx(4),
    }


def test_an_idle_gpu_is_not_part_of_what_runs_on_the_processor():
    gpu = series(80.0, what=counter("gpu-0", "gpu", resolution_s=0.1))
    assert curves(series(20.0), gpu, devices=("cpu", "memory")).between(1.0, 2.0).joules == pytest.approx(20.0)
    assert curves(series(20.0), gpu, devices=("cpu", "gpu")).between(1.0, 2.0).joules == pytest.approx(100.0)
    assert "no counter counts" in curves(gpu, devices=("cpu",)).between(1.0, 2.0).why_not


def test_a_window_of_fewer_than_ten_updates_is_too_short_to_tell():
    found = curves(series(10.0, every_s=0.05))
    energy = found.between(1.01, 1.26)
    assert energy.joules is None and "package-0 was seen to change 5 times in 0.25 s" in energy.why_not
    assert found.between(1.01, 1.61).joules == pytest.approx(6.0)


def test_updates_count_and_not_readings():
    """A GPU's counter that changes every 0.1 s, read every 10 ms."""
    at_s = tuple(0.01 * n for n in range(501))
    steps = tuple(100.0 * (n // 10) * 0.1 for n in range(501))
    found = curves(Series(counter=counter("gpu-0", "gpu", resolution_s=0.1), at_s=at_s, joules=steps))
    assert found.between(1.0, 1.5).joules is None
    energy = found.between(1.0, 3.0)
    assert energy.joules == pytest.approx(200.0, rel=0.01)


def test_between_two_changes_the_power_is_taken_to_be_constant():
    found = Series(counter=counter(), at_s=(0.0, 1.0, 2.0, 3.0, 4.0), joules=(0.0, 0.0, 0.0, 30.0, 30.0))
    curve = Curve(found)
    assert [curve.at(s) for s in (0.0, 1.5, 3.0, 4.0)] == [0.0, 15.0, 30.0, 30.0]


def test_what_was_not_covered_by_readings_is_not_known():
    found = curves(series(10.0, until_s=5.0))
    assert "not read before and after" in found.between(4.0, 6.0).why_not
    assert "not read before and after" in found.between(-1.0, 3.0).why_not


def test_without_any_counter_the_reason_is_said():
    assert curves().between(0.0, 1.0).why_not == "no energy counter could be read"


def test_a_step_is_the_mean_over_windows_however_many_steps_each_has():
    found = curves(series(10.0))
    energy = found.per_step([
        Span(start_s=1.0, end_s=2.0, num_steps=10), Span(start_s=3.0, end_s=6.0, num_steps=10)
    ])  # fmt: skip
    assert energy.joules == pytest.approx(2.0) and energy.num_windows == 2
    assert energy.parts == {"package-0": pytest.approx(2.0)}


def test_windows_that_are_too_short_are_left_out_of_the_mean_and_alone_they_say_why():
    found = curves(series(10.0))
    short = Span(start_s=1.0, end_s=1.02, num_steps=1)
    assert found.per_step([short, Span(start_s=3.0, end_s=4.0, num_steps=5)]).joules == pytest.approx(2.0)
    assert "tells too little" in found.per_step([short]).why_not
    assert found.per_step([]).why_not == "no window was measured"


@given(
    watts=st.lists(st.floats(0.1, 500.0), min_size=30, max_size=80),
    cuts=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8),
    full=st.one_of(st.none(), st.floats(600.0, 5000.0)),
)
@example(watts=[1.0] * 28 + [5.0, 1.0], cuts=[0.9999999999999999], full=None)  # a window of one rounding
def test_consecutive_windows_sum_to_the_run(watts, cuts, full):
    joules, total = [], 0.0
    for power in watts:
        joules.append(total % full if full else total)
        total += power
    found = Series(counter=counter(range_joules=full), at_s=tuple(map(float, range(len(watts)))), joules=tuple(joules))
    end_s = float(len(watts) - 1)
    marks = [0.0, *sorted(end_s * c for c in cuts), end_s]
    whole = curves(found).between(0.0, end_s)
    parts = [curves(found).between(a, b, min_updates=0).joules for a, b in itertools.pairwise(marks)]
    assert math.fsum(parts) == pytest.approx(whole.joules)
    assert all(part >= -1e-9 for part in parts)


def test_a_log_survives_its_file(tmp_path):
    log = Log(series=(series(until_s=0.1), series(what=counter("dram-0", "memory"), until_s=0.1)), missing=("GPU: no",))
    save(log, tmp_path / "energy.json")
    again = load(tmp_path / "energy.json")
    assert again.series == log.series and again.missing == log.missing
    assert from_json(Log, to_json(log)).counters == log.counters


def test_a_torn_log_is_said_to_be_torn(tmp_path):
    (tmp_path / "energy.json").write_text("{")
    with pytest.raises(RecordError, match="no energy log"):
        load(tmp_path / "energy.json")
