"""Do the numbers agree? Judged from measurements made by hand."""

import math
from dataclasses import replace

import pytest

from flatout.judge.agreement import POINTS_FOR_SCATTER, judge, needs_more_points
from flatout.records.difference import Difference
from handmade import gradients, measured

BATCHES = Difference(check="batches", error=0.0)
UPDATES = Difference(check="updates", error=2e-7)
OUTPUTS = Difference(check="outputs", error=2e-7, rounding=2e-7, multiple=1.0, multiple_of="Net")


def verdict(class_, *differences, checks=None):
    names = tuple(dict.fromkeys(d.check for d in differences)) if checks is None else checks
    return judge([measured(*differences)], class_, names)


@pytest.mark.parametrize("class_", ["exact", "rounding", "precision", "statistical", "lossy", "semantics"])
def test_nothing_measured_never_agrees_where_a_check_is_named(class_):
    for points in ([], [measured()], [measured(missing="one step's inputs are too large")]):
        found = judge(points, class_, ("gradients",))
        assert found.verdict == "inconclusive" and "gradients not compared" in found.detail
    assert "too large" in found.detail


def test_a_lever_that_changes_numbers_and_names_no_check_never_agrees():
    for class_ in ("rounding", "precision", "statistical", "semantics"):
        assert judge([], class_, ()).verdict == "inconclusive"
        assert judge([measured()], class_, ("none",)).verdict == "inconclusive"


def test_a_lever_that_changes_no_number_needs_no_check():
    assert judge([], "exact", ("none",)).verdict == "agrees"
    assert judge([], "exact", ()).verdict == "agrees"


def test_each_named_check_must_have_been_made():
    found = verdict("rounding", gradients(), checks=("gradients", "updates"))
    assert found.verdict == "inconclusive" and found.detail.startswith("updates not compared")


def test_a_disagreement_is_said_even_where_another_check_could_not_be_made():
    found = verdict("rounding", gradients(0.5), checks=("gradients", "updates"))
    assert found.verdict == "disagrees"


def test_small_errors_agree_with_the_numbers_behind_it():
    found = verdict("rounding", gradients(3e-5), UPDATES, BATCHES)
    assert found.verdict == "agrees"
    assert found.detail == "gradient error 3.0e-05, noise 0.7; update error 2.0e-07; items and random streams equal"


@pytest.mark.parametrize("class_", ["exact", "rounding", "precision", "statistical"])
@pytest.mark.parametrize("error", [math.nan, math.inf])
def test_errors_that_are_no_numbers_disagree(class_, error):
    assert verdict(class_, gradients(error)).verdict == "disagrees"
    assert verdict(class_, replace(UPDATES, error=error)).verdict == "disagrees"


def test_nan_in_the_numbers_of_the_lever_disagrees_whatever_the_error():
    found = verdict("precision", gradients(0.0, finite=False))
    assert found.verdict == "disagrees" and "plain does not have" in found.detail


@pytest.mark.parametrize("slope", [1.03, 0.97, math.nan, math.inf])
def test_a_gradient_that_is_scaled_disagrees_under_precision_however_noisy_the_script(slope):
    assert verdict("precision", gradients(0.05, slope=slope, noise=100.0)).verdict == "disagrees"


@pytest.mark.parametrize("slope", [1.0, 0.996, 1.015])
def test_a_gradient_that_is_hardly_scaled_agrees_under_precision(slope):
    assert verdict("precision", gradients(0.06, slope=slope, noise=0.9)).verdict == "agrees"


def at_points(*slopes):
    return [measured(gradients(0.06, slope=slope, noise=0.9)) for slope in slopes]


def test_slopes_that_scatter_around_one_are_noise_and_ones_that_stay_off_it_are_not():
    """bfloat16 scales the gradient of a batch with few examples that matter: by 0.944 here, by 1.06 there."""
    words = ("gradients",)
    assert judge(at_points(0.944, 1.06, 0.98, 1.03, 0.95, 1.04), "precision", words).verdict == "agrees"
    for off in (0.95, 1.05):
        stays = judge(at_points(*(off + d for d in (0.01, -0.01, 0.0, 0.012, -0.012, 0.003))), "precision", words)
        assert stays.verdict == "disagrees"


def test_at_few_points_the_worst_slope_decides_and_more_are_asked_for():
    points = at_points(0.944, 1.06)
    found = judge(points, "precision", ("gradients",))
    assert found.verdict == "disagrees" and needs_more_points(points, found)
    points = at_points(*[0.9] * POINTS_FOR_SCATTER)
    assert not needs_more_points(points, judge(points, "precision", ("gradients",)))
    assert not needs_more_points(at_points(1.0), judge(at_points(1.0), "precision", ("gradients",)))


def test_the_error_of_a_precision_lever_is_judged_against_the_noise_between_batches():
    assert verdict("precision", gradients(0.05, noise=0.6)).verdict == "agrees"
    found = verdict("precision", gradients(0.3, noise=0.6))
    assert found.verdict == "disagrees" and "noise between batches" in found.detail


@pytest.mark.parametrize("noise", [None, math.nan, math.inf])
def test_without_the_noise_a_precision_error_is_inconclusive(noise):
    assert verdict("precision", gradients(0.05, noise=noise)).verdict == "inconclusive"


def test_a_script_without_any_noise_leaves_no_room_for_a_precision_error():
    assert verdict("precision", gradients(0.05, noise=0.0)).verdict == "disagrees"


def test_rounding_explains_errors_up_to_its_limit_and_names_the_worst_parameter_beyond():
    assert verdict("rounding", gradients(1e-3)).verdict == "agrees"
    found = verdict("rounding", gradients(2e-3, worst="fc.weight"))
    assert found.verdict == "disagrees" and "`fc.weight`" in found.detail


def test_exact_means_not_a_bit():
    assert verdict("exact", gradients(0.0)).verdict == "agrees"
    found = verdict("exact", gradients(1e-12))
    assert found.verdict == "disagrees" and "not a bit" in found.detail


def test_a_lever_differs_no_more_than_plain_differs_from_plain():
    assert verdict("exact", gradients(2e-6, baseline_error=1e-6)).verdict == "agrees"
    assert verdict("exact", gradients(4e-6, baseline_error=1e-6)).verdict == "disagrees"


@pytest.mark.parametrize("baseline_error", [0.5, math.inf, math.nan])
def test_where_plain_does_not_repeat_itself_nothing_can_agree_bit_for_bit(baseline_error):
    for class_ in ("exact", "rounding"):
        for error in (0.0, 1e-7, 1.4):
            assert verdict(class_, gradients(error, baseline_error=baseline_error)).verdict == "inconclusive"


def test_where_plain_does_not_repeat_itself_precision_is_still_judged_by_slope_and_noise():
    assert verdict("precision", gradients(0.05, baseline_error=0.04, noise=0.7)).verdict == "agrees"
    assert verdict("precision", gradients(0.1, baseline_error=0.04, noise=0.7, slope=0.9)).verdict == "disagrees"
    assert verdict("precision", gradients(1.2, baseline_error=0.5, noise=0.7)).verdict == "disagrees"


def test_other_random_states_disagree_even_with_equal_gradients():
    for class_ in ("exact", "rounding", "precision"):
        found = verdict(class_, gradients(0.0, random_states_equal=False))
        assert found.verdict == "disagrees" and "random generators" in found.detail


def test_a_class_that_draws_other_random_numbers_is_not_judged_by_equal_gradients():
    found = verdict("statistical", gradients(0.4, random_states_equal=False))
    assert found.verdict == "inconclusive" and "several seeds" in found.detail


@pytest.mark.parametrize("cosine", [0.9, -1.0, math.nan])
def test_gradients_that_bypass_the_outputs_are_inconclusive(cosine):
    found = verdict("rounding", gradients(1e-7, explained_cosine=cosine))
    assert found.verdict == "inconclusive" and "bypass" in found.detail


def test_gradients_that_the_replay_explains_are_judged():
    assert verdict("rounding", gradients(1e-7, explained_cosine=0.99999)).verdict == "agrees"


def test_updates_from_the_same_gradients_may_only_round():
    assert verdict("rounding", UPDATES).verdict == "agrees"
    assert verdict("precision", replace(UPDATES, error=0.01, noise=1.0)).verdict == "disagrees"


def test_the_worst_point_of_training_decides():
    points = [measured(gradients(1e-6)), measured(gradients(0.5))]
    assert judge(points, "rounding", ("gradients",)).verdict == "disagrees"
    assert judge(points[::-1], "rounding", ("gradients",)).verdict == "disagrees"
    unclear = [measured(gradients(1e-6)), measured(gradients(1e-6, explained_cosine=0.5))]
    assert judge(unclear, "rounding", ("gradients",)).verdict == "inconclusive"


def test_equal_items_and_random_streams_agree():
    assert verdict("exact", BATCHES).verdict == "agrees"


def test_other_items_need_the_class_that_admits_them():
    other = replace(BATCHES, error=1.0)
    found = verdict("exact", other)
    assert found.verdict == "disagrees" and "`--accept statistical`" in found.detail
    assert verdict("rounding", other).verdict == verdict("precision", other).verdict == "disagrees"
    admitted = verdict("statistical", other)
    assert admitted.verdict == "agrees" and "other items" in admitted.detail and "equal" not in admitted.detail


def test_equal_items_with_other_random_streams_disagree():
    found = verdict("exact", replace(BATCHES, random_states_equal=False))
    assert found.verdict == "disagrees" and "same items" in found.detail


def test_a_loader_that_does_not_repeat_itself_cannot_be_judged_exact_but_may_be_statistical():
    loose = replace(BATCHES, error=1.0, baseline_error=1.0)
    assert verdict("exact", loose).verdict == "inconclusive"
    assert verdict("statistical", loose).verdict == "agrees"
    assert verdict("exact", replace(loose, error=math.nan, baseline_error=math.nan)).verdict == "inconclusive"


def test_the_summary_shows_the_worst_of_several_points():
    points = [measured(gradients(0.01, slope=0.999)), measured(gradients(0.05, slope=0.99))]
    assert judge(points, "precision", ("gradients",)).detail == "gradient error 0.05, noise 0.7, slope 0.990"


def test_no_error_at_all_is_written_as_zero():
    assert verdict("exact", gradients(0.0)).detail == "gradient error 0, noise 0.7"


# -- beside the error ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("class_", ["exact", "rounding", "precision", "statistical"])
@pytest.mark.parametrize("check", ["gradients", "updates", "batches"])
def test_a_fault_disagrees_whatever_the_error(class_, check):
    found = verdict(class_, Difference(check=check, error=0.0, fault="`SGD.zero_grad` leaves gradients"))
    assert found.verdict == "disagrees" and "zero_grad" in found.detail


def test_a_small_layer_that_is_wrong_disagrees_although_the_whole_hardly_differs():
    assert verdict("rounding", gradients(1e-6, rounding=3e-7, multiple=13.4)).verdict == "agrees"
    found = verdict("rounding", gradients(1e-6, rounding=3e-7, multiple=851.0, multiple_of="head.bias"))
    assert found.verdict == "disagrees" and "`head.bias`" in found.detail and "851 times" in found.detail


@pytest.mark.parametrize("multiple", [math.inf, math.nan])
def test_multiples_that_are_no_numbers_disagree(multiple):
    assert verdict("rounding", gradients(1e-6, multiple=multiple)).verdict == "disagrees"


def test_a_layer_under_precision_is_held_against_what_bfloat16_moves_there():
    assert verdict("precision", gradients(0.05, rounding=0.1, multiple=0.8)).verdict == "agrees"
    found = verdict("precision", gradients(0.05, rounding=0.1, multiple=6.0, multiple_of="norm.weight"))
    assert found.verdict == "disagrees" and "bfloat16" in found.detail


def test_nondeterminism_of_plain_does_not_excuse_a_layer():
    lost = gradients(2e-7, baseline_error=1e-7, multiple=1e5, multiple_of="norm.bias")
    for class_ in ("exact", "rounding"):
        assert verdict(class_, lost).verdict == "disagrees"
    assert verdict("exact", replace(lost, multiple=1.3)).verdict == "agrees"


def test_moments_that_end_elsewhere_disagree_under_exact_although_no_parameter_moved_otherwise():
    found = verdict("exact", replace(UPDATES, error=0.0, multiple=1.0, multiple_of="fc.weight (exp_avg)"))
    assert found.verdict == "disagrees" and "`fc.weight (exp_avg)`" in found.detail


def test_updates_below_the_last_place_of_the_parameters_are_rounding_unless_they_are_scaled():
    tiny = replace(UPDATES, error=0.01, multiple=1.3)
    assert verdict("rounding", tiny).verdict == "agrees"
    assert verdict("rounding", replace(tiny, slope=2.0)).verdict == "inconclusive"
    assert verdict("rounding", replace(tiny, multiple=74.0)).verdict == "disagrees"


def test_a_script_as_coarse_as_bfloat16_is_judged_by_slope_and_noise_under_rounding_too():
    coarse = gradients(0.02, rounding=0.05, multiple=0.4, noise=0.9)
    assert verdict("rounding", coarse).verdict == "agrees"
    assert verdict("rounding", replace(coarse, slope=1.05)).verdict == "disagrees"
    assert verdict("rounding", gradients(0.02, noise=0.9)).verdict == "disagrees"


def test_a_lever_that_is_closer_to_float64_than_plain_is_never_refused_for_its_error():
    closer = gradients(
        0.25, slope=0.95, multiple=1e6, truth_error=2e-5, baseline_truth_error=0.25, truth_multiple=0.3, noise=0.9
    )
    for class_ in ("rounding", "precision"):
        found = verdict(class_, closer)
        assert found.verdict == "agrees" and "closer to float64 than plain" in found.detail
    assert verdict("exact", closer).verdict == "disagrees", "exact means the script's own bits"
    assert verdict("rounding", replace(closer, random_states_equal=False)).verdict == "disagrees"
    assert verdict("rounding", replace(closer, truth_error=0.26)).verdict == "disagrees"
    assert verdict("rounding", replace(closer, truth_multiple=1e4)).verdict == "disagrees", "one layer is far off"


def with_multiples(*multiples):
    return [measured(gradients(0.03, rounding=0.1, multiple=m, noise=0.9, multiple_of="fc2.weight")) for m in multiples]


def test_one_batch_in_which_a_value_changes_sides_asks_for_more_points_and_does_not_decide():
    words = ("gradients",)
    points = with_multiples(6.8, 0.8)
    found = judge(points, "precision", words)
    assert found.verdict == "disagrees" and needs_more_points(points, found)
    assert judge(with_multiples(6.8, 0.8, 0.5, 0.7, 1.1, 0.6), "precision", words).verdict == "agrees"
    points = with_multiples(6.8, 5.9, 7.0, 2.9, 6.1, 8.0)
    found = judge(points, "precision", words)
    assert found.verdict == "disagrees" and not needs_more_points(points, found)


def test_a_bug_under_rounding_that_both_points_have_needs_no_more_of_them():
    words = ("gradients",)
    points = with_multiples(5000.0, 4000.0)
    found = judge(points, "rounding", words)
    assert found.verdict == "disagrees" and not needs_more_points(points, found)
    points = with_multiples(5000.0, 1.0)
    assert needs_more_points(points, judge(points, "rounding", words))


def test_a_counter_that_stands_elsewhere_at_one_point_decides():
    points = with_multiples(*[0.5] * 5, math.inf)
    assert judge(points, "precision", ("gradients",)).verdict == "disagrees"


def test_one_batch_of_six_in_which_bfloat16_errs_as_much_as_the_noise_does_not_decide_and_three_do():
    """At a low loss one example makes up the gradient: errors of 0.27 and 0.36 in one batch of a hundred were seen."""

    def errors(*values):
        return [measured(gradients(e, noise=0.9)) for e in values]

    words = ("gradients",)
    points = errors(0.36, 0.03)
    found = judge(points, "precision", words)
    assert found.verdict == "disagrees" and needs_more_points(points, found)
    assert judge(errors(0.36, 0.03, 0.02, 0.05, 0.31, 0.04), "precision", words).verdict == "agrees"
    points = errors(0.36, 0.4, 0.02, 0.05, 0.37, 0.04)
    found = judge(points, "precision", words)
    assert found.verdict == "disagrees" and not needs_more_points(points, found)


# -- outputs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("class_", ["exact", "rounding", "precision"])
@pytest.mark.parametrize("error", [1.0, 2.0, math.inf, math.nan])
def test_outputs_that_are_others_disagree_although_every_gradient_is_right(class_, error):
    wrong = replace(OUTPUTS, error=error, multiple=error * 5e6, slope=1 + error)
    found = verdict(class_, gradients(0.0), wrong, checks=("gradients",))
    assert found.verdict == "disagrees" and "outputs" in found.detail


def test_outputs_are_held_against_what_rounding_moves_in_them_and_the_whole_against_its_limit():
    near, far = replace(OUTPUTS, multiple=1.9), replace(OUTPUTS, multiple=591.0)
    assert verdict("rounding", gradients(), near, checks=()).verdict == "agrees"
    found = verdict("rounding", gradients(), far, checks=())
    assert found.verdict == "disagrees" and "outputs of `Net` differ by 591 times what rounding" in found.detail
    assert verdict("exact", gradients(0.0), near, checks=()).verdict == "disagrees", "exact means not a bit"
    coarse = replace(OUTPUTS, error=0.01, multiple=0.5)
    assert verdict("rounding", gradients(), coarse, checks=()).verdict == "agrees", "the script's own is as coarse"
    assert verdict("rounding", gradients(), replace(coarse, slope=1.03), checks=()).verdict == "disagrees"
    assert verdict("rounding", gradients(), replace(coarse, multiple=None), checks=()).verdict == "disagrees"


def test_outputs_under_precision_are_held_against_bfloat16_and_need_no_noise_between_batches():
    rounded = replace(OUTPUTS, error=4e-3, multiple=0.7)
    found = verdict("precision", gradients(0.05), rounded, checks=())
    assert found.verdict == "agrees" and "output error 4.0e-03" in found.detail
    far = verdict("precision", gradients(0.05), replace(rounded, multiple=49.0), checks=())
    assert far.verdict == "disagrees" and "what bfloat16 moves" in far.detail
    assert verdict("precision", gradients(0.05), replace(rounded, slope=1.03), checks=()).verdict == "disagrees"


def test_on_a_device_a_lever_may_be_a_tenth_farther_from_float64_than_plain():
    near = gradients(0.3, slope=0.9, multiple=1e5)
    near = replace(near, truth_error=0.21, baseline_truth_error=0.2, truth_multiple=1.2)
    assert verdict("rounding", near).verdict == "disagrees"
    assert verdict("rounding", replace(near, on_device=True)).verdict == "agrees"
    assert verdict("rounding", replace(near, on_device=True, truth_error=0.23)).verdict == "disagrees"
    assert verdict("exact", replace(near, on_device=True)).verdict == "disagrees"


def test_outputs_closer_to_float64_than_plains_are_never_refused_but_for_exact():
    closer = replace(OUTPUTS, error=0.2, multiple=1e5, slope=0.9)
    closer = replace(closer, truth_error=1e-6, baseline_truth_error=0.2, truth_multiple=0.1)
    for class_ in ("rounding", "precision"):
        assert verdict(class_, gradients(), closer, checks=()).verdict == "agrees"
        assert verdict(class_, gradients(), replace(closer, truth_error=0.3), checks=()).verdict == "disagrees"
    assert verdict("exact", gradients(0.0), closer, checks=()).verdict == "disagrees"


def test_outputs_differ_no_more_than_plains_own_do():
    loose = replace(OUTPUTS, error=2e-6, baseline_error=1e-6, multiple=None)
    assert verdict("exact", gradients(0.0), loose, checks=()).verdict == "agrees"
    assert verdict("exact", gradients(0.0), replace(loose, error=4e-6), checks=()).verdict == "disagrees"
    assert verdict("exact", gradients(0.0), replace(loose, baseline_error=0.5), checks=()).verdict == "inconclusive"


def test_one_batch_of_six_in_which_outputs_change_sides_does_not_decide_and_gradients_are_counted_apart():
    def points(*multiples):
        return [
            measured(gradients(), replace(OUTPUTS, multiple_of="Net", error=4e-3, multiple=multiple))
            for multiple in multiples
        ]

    words = ("gradients",)
    few = judge(points(6.0, 0.5), "precision", words)
    assert few.verdict == "disagrees" and needs_more_points(points(6.0, 0.5), few)
    assert judge(points(6.0, 0.5, 0.4, 0.6, 0.5, 0.7), "precision", words).verdict == "agrees"
    assert judge(points(6.0, 5.0, 4.0, 0.6, 7.0, 5.5), "precision", words).verdict == "disagrees"


def test_what_was_recorded_before_outputs_were_judged_is_still_judged():
    assert judge([measured(gradients(3e-5))], "rounding", ("gradients",)).verdict == "agrees"
