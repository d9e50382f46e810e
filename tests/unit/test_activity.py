"""What does the training thread do, and how even are its steps? With samples and windows made by hand."""

import pytest

from flatout.judge.activity import activity_of, slow_steps
from flatout.records.stacks import StackRow, Stacks
from handmade import window


def row(phase, kind, wall_s, waiting_s=0.0, place="train.py:3 in main"):
    return StackRow(
        phase=phase, kind=kind, place=place, wall_s=wall_s, waiting_s=waiting_s, num_samples=int(500 * wall_s)
    )


def stacks(*rows, wall_s=1.0, num_samples=500, **changes):
    return Stacks(rows=rows, num_steps=100, wall_s=wall_s, num_samples=num_samples, **changes)


def test_parts_of_fetching_sum_to_it_and_waiting_for_items_is_storage():
    found = activity_of([
        stacks(row("data", "decode", 0.3, 0.02), row("data", "code", 0.2, 0.15), row("data", "collate", 0.1, 0.01),
               row("forward", "code", 0.4)),
    ])  # fmt: skip
    parts = found.data_parts
    assert sum(parts.values()) == pytest.approx(1.0)
    assert parts["decode"] == pytest.approx(0.28 / 0.6) and parts["storage"] == pytest.approx(0.17 / 0.6)
    assert parts["transform"] == pytest.approx(0.05 / 0.6) and parts["collate"] == pytest.approx(0.1 / 0.6)
    assert parts["worker start-up"] == 0.0


def test_what_workers_do_is_seen_without_them_and_starting_them_with_them():
    seen = stacks(row("data", "workers", 0.2), row("data", "queue", 0.6, 0.6), row("forward", "code", 0.2))
    without = stacks(row("data", "decode", 0.9), row("data", "collate", 0.1))
    parts = activity_of([seen], without).data_parts
    assert parts["worker start-up"] == pytest.approx(0.25)
    assert parts["decode"] == pytest.approx(0.75 * 0.9) and parts["collate"] == pytest.approx(0.75 * 0.1)
    assert sum(parts.values()) == pytest.approx(1.0)


def test_waiting_for_workers_beyond_what_fetching_costs_without_them_is_their_start():
    seen = stacks(row("data", "workers", 0.1), row("data", "queue", 0.7, 0.7), row("forward", "code", 0.2))
    without = stacks(row("data", "code", 0.2), row("forward", "code", 0.2), wall_s=0.4)
    parts = activity_of([seen], without).data_parts
    assert parts["worker start-up"] == pytest.approx((0.1 + 0.7 - 0.2) / 0.8)
    assert parts["transform"] == pytest.approx(0.2 / 0.8)


def test_workers_that_are_not_started_anew_are_not_blamed_for_their_start():
    seen = stacks(row("data", "queue", 0.8, 0.8), row("forward", "code", 0.2))
    without = stacks(row("data", "code", 0.2), row("forward", "code", 0.2), wall_s=0.4)
    assert activity_of([seen], without).data_parts["worker start-up"] == 0.0


def test_a_line_that_waits_for_a_good_part_of_its_time_is_stalled_as_a_whole():
    found = activity_of([
        stacks(row("unattributed", "code", 0.3, 0.15), row("backward", "code", 0.4, 0.1, place="train.py:9 in main")),
        stacks(row("data", "code", 0.3, 0.3), row("unattributed", "output", 0.1, 0.1, place="train.py:5 in main")),
    ])  # fmt: skip
    assert found.stalled_share == pytest.approx(0.3 / 2)


def test_output_and_waiting_outside_of_fetching_are_shares_of_the_step():
    found = activity_of([
        stacks(row("unattributed", "output", 0.25, 0.05), row("backward", "code", 0.5, 0.1), row("data", "code", 0.2)),
    ])  # fmt: skip
    assert found.output_share == pytest.approx(0.25) and found.waiting_share == pytest.approx(0.1)
    assert [p.step_share for p in found.places] == pytest.approx([0.5, 0.25, 0.2])


def test_too_few_samples_say_nothing():
    assert activity_of([stacks(row("data", "code", 0.01), num_samples=10)]) is None
    assert activity_of([]) is None
    assert activity_of([stacks(wall_s=0.0)]) is None


def test_pages_are_counted_by_step():
    assert activity_of([stacks(major_faults=250), stacks(major_faults=150)]).faults_per_step == 2.0


def steps(*times, phases=None):
    return window(times, observe="phases" if phases else "ends", phases=phases or {})


def test_one_slow_step_in_ten_is_seen_with_its_phase():
    times = ([0.001] * 9 + [0.011]) * 5
    unattributed = [0.0] * 50
    forward = [0.0008] * 50
    found = slow_steps([steps(*times)], [steps(*times, phases={"forward": tuple(forward)})])
    assert found.every == 10.0 and found.times == pytest.approx(11.0)
    assert found.excess_share == pytest.approx(0.05 / 0.1)
    assert found.phase == "unattributed" and unattributed
    slow_forward = tuple(0.0105 if t > 0.01 else 0.0005 for t in times)
    assert slow_steps([steps(*times)], [steps(*times, phases={"forward": slow_forward})]).phase == "forward"


def test_even_steps_few_steps_and_two_speeds_are_no_exception():
    assert slow_steps([steps(*([0.001, 0.0012] * 20))], []) is None
    assert slow_steps([steps(0.001, 0.02)], []) is None
    assert slow_steps([steps(*([0.001] * 20 + [0.004] * 18))], []) is None, "too many for an exception"


def test_checkpoints_between_steps_make_no_step_slow():
    times = [0.001] * 19 + [0.5]
    quiet = window(tuple(times * 2), observe="ends", outside_s=tuple(([0.0] * 19 + [0.499]) * 2))
    assert slow_steps([quiet], []) is None
