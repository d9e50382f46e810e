"""A closed account of the step."""

import math
from dataclasses import replace

import pytest

from flatout.errors import Inconclusive
from flatout.judge.anatomy import dissect
from flatout.records.trace import PHASES
from handmade import anatomy, window


def test_what_no_phase_claims_is_a_row_of_its_own():
    found = dissect([window((0.010, 0.010), {"forward": 0.003, "backward": 0.005})])
    assert found.step_s == pytest.approx(0.010)
    assert found.phases_s == pytest.approx({"backward": 0.005, "forward": 0.003, "unattributed": 0.002})


def test_the_largest_phase_stands_first_and_the_remainder_last():
    found = dissect([window((1.0,), {"data": 0.1, "forward": 0.3, "backward": 0.2})])
    assert list(found.phases_s) == ["forward", "backward", "data", "unattributed"]


def test_phases_sum_to_the_step():
    windows = [
        window((0.011, 0.013, 0.012), {"data": (0.001, 0.002, 0.0015), "forward": 0.004}),
        window((0.010, 0.014), {"forward": 0.005, "optimizer": (0.0, 0.001)}),
    ]
    found = dissect(windows)
    assert math.fsum(found.phases_s.values()) == pytest.approx(found.step_s, rel=1e-12)
    assert found.num_steps == 5 and found.num_windows == 2


def test_a_remainder_of_rounding_is_no_time():
    found = dissect([window((0.3,), {"data": 0.1, "forward": 0.2})])
    assert found.phases_s["unattributed"] == 0.0


def test_time_that_was_counted_twice_shows_as_a_negative_remainder():
    found = dissect([window((0.010,), {"data": 0.008, "forward": 0.005})])
    assert found.phases_s["unattributed"] == pytest.approx(-0.003)
    assert math.fsum(found.phases_s.values()) == pytest.approx(found.step_s)


def test_a_remainder_that_the_recorder_names_itself_is_not_counted_twice():
    found = dissect([window((0.010,), {"forward": 0.006, "unattributed": 0.004})])
    assert found.phases_s == pytest.approx({"forward": 0.006, "unattributed": 0.004})


def test_phases_that_were_not_observed_are_absent_and_named_and_never_zero():
    found = dissect([window((0.010,), {"forward": 0.006})])
    for name in ("data", "copy", "backward", "optimizer", "sync", "communication"):
        assert name in found.not_observed and name not in found.phases_s and found.share(name) is None
    assert "forward" not in found.not_observed
    assert set(found.not_observed) | set(found.phases_s) <= set(PHASES)


def test_a_phase_that_was_seen_and_took_no_time_is_zero_and_observed():
    found = dissect([window((0.010,), {"forward": 0.006, "sync": 0.0})])
    assert found.phases_s["sync"] == 0.0 and "sync" not in found.not_observed


def test_a_phase_that_only_some_windows_saw_is_spread_over_all_steps():
    found = dissect([window((0.010,), {"data": 0.004}), window((0.010,), {"forward": 0.006})])
    assert found.phases_s["data"] == pytest.approx(0.002)


def test_a_phase_that_nobody_knows_yet_is_kept():
    assert dissect([window((0.010,), {"dispatch": 0.006})]).phases_s["dispatch"] == pytest.approx(0.006)


def test_models_that_are_not_trained_are_told_by_name_and_a_step():
    first, second = (window((0.010, 0.010), {"forward": 0.006}) for _ in range(2))
    found = dissect([replace(first, not_trained_s={"Teacher": 0.008}), replace(second, not_trained_s={"Other": 0.002})])
    assert found.not_trained_s == pytest.approx({"Teacher": 0.002, "Other": 0.0005})
    assert found.share("forward") == pytest.approx(0.6), "they are part of it"


def test_evaluation_and_checkpoints_never_enter():
    windows = [
        window(
            (0.010, 2.010),
            {"forward": 0.006, "evaluation": (0.0, 1.5), "checkpoint": (0.0, 0.5)},
            outside_s=(0.0, 2.0),
        )
    ]
    found = dissect(windows)
    assert found.step_s == pytest.approx(0.010)
    assert found.phases_s == pytest.approx({"forward": 0.006, "unattributed": 0.004})
    assert found.outside_s == pytest.approx({"evaluation": 0.75, "checkpoint": 0.25})
    assert "evaluation" not in found.not_observed and "checkpoint" not in found.not_observed


def test_what_lies_between_steps_is_counted_in_all_windows_because_few_see_it():
    seen = window((0.010, 0.010), {"forward": 0.006})
    beside = [window((0.010, 0.110), {"evaluation": (0.0, 0.1)}, outside_s=(0.0, 0.1), observe="ends"), seen, seen]
    found = dissect([seen], beside)
    assert found.outside_s == pytest.approx({"evaluation": 0.1 / 6}) and found.step_s == pytest.approx(0.010)
    assert found.all_s == pytest.approx(0.16 / 6)
    assert found.spread_fraction["evaluation"] == pytest.approx(0.625 * 0.375), "one evaluation says little"


def test_shares_are_of_the_training_step():
    found = dissect([window((0.010,), {"forward": 0.004})])
    assert found.share("forward") == pytest.approx(0.4) and found.share("unattributed") == pytest.approx(0.6)


def test_a_step_without_duration_has_no_shares():
    assert anatomy({"forward": 0.0}).share("forward") is None


def test_windows_that_saw_step_ends_alone_are_left_out():
    found = dissect([window((0.5,), observe="ends"), window((0.010,), {"forward": 0.004})])
    assert found.num_windows == 1 and found.step_s == pytest.approx(0.010)


def test_the_spread_is_between_windows_and_unknown_for_one():
    many = dissect([window((0.010,), {"data": x}) for x in (0.001, 0.002, 0.003, 0.004, 0.005)])
    assert many.spread_fraction["data"] == pytest.approx(0.1)
    assert math.isnan(dissect([window((0.010,), {"data": 0.001})]).spread_fraction["data"])


ON_DEVICE = {"forward": (0.003, 0.003), "backward": (0.006, 0.006), "unattributed": (0.001, 0.001)}


def test_the_account_is_the_devices_own_and_where_python_was_is_kept_apart():
    found = dissect([window((0.010, 0.010), {"forward": 0.0005, "sync": 0.008}, device_phases=ON_DEVICE)])
    assert found.phases_s == pytest.approx({"backward": 0.006, "forward": 0.003, "unattributed": 0.001})
    assert found.host_s == pytest.approx({"forward": 0.0005, "sync": 0.008}) and found.step_s == pytest.approx(0.010)


def test_an_old_window_that_was_as_long_as_launching_is_as_long_as_its_device_says():
    found = dissect([window((0.001, 0.001), {"forward": 0.0005}, device_phases=ON_DEVICE)])
    assert found.step_s == pytest.approx(0.010) and found.share("backward") == pytest.approx(0.6)


def test_what_lies_between_steps_is_the_devices_too():
    plain = {"outside_s": (0.0, 0.5), "device_phases": {**ON_DEVICE, "evaluation": (0.0, 0.5)}}
    found = dissect([window((0.010, 0.510), {"evaluation": (0.0, 0.1)}, **plain)])
    assert found.outside_s == pytest.approx({"evaluation": 0.25}) and found.step_s == pytest.approx(0.010)


@pytest.mark.parametrize(
    "windows",
    [
        [],
        [window(observe="ends")],
        [window(())],
        [window((2.0,), outside_s=(2.0,))],
        [window((math.nan,), {"forward": 0.1})],
    ],
    ids=["none", "ends alone", "no step", "evaluation alone", "no numbers"],
)
def test_without_a_step_that_was_taken_apart_nothing_is_said(windows):
    with pytest.raises(Inconclusive) as caught:
        dissect(windows)
    assert caught.value.cause and caught.value.hint
