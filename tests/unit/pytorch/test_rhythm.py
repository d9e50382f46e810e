"""Does the rhythm find the step in the order in which optimizers update?"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.frameworks.pytorch.seams.step_period import GIVE_UP, StepPeriod


def ends(order, expected=0):
    rhythm = StepPeriod()
    rhythm.expect(expected)
    return "".join("|" if rhythm.update(name) else "." for name in order), rhythm


def test_with_one_optimizer_every_update_ends_a_step_from_the_third_on():
    marks, rhythm = ends("A" * 8)
    assert marks == "..||||||"
    assert rhythm.num_updates == 1


def test_a_gan_makes_a_step_of_two_updates():
    marks, rhythm = ends("DG" * 6)
    assert marks == ".....|.|.|.|"
    assert rhythm.num_updates == 2


def test_a_wgan_makes_a_step_of_five_critic_updates_and_one_of_the_generator():
    marks, rhythm = ends("DDDDDG" * 6, expected=2)
    assert rhythm.num_updates == 6
    assert marks[-18:] == ".....|.....|.....|"
    assert marks.count("|") == 4, "no critic update alone was taken for a step"


def test_a_wgan_is_found_even_when_the_generator_was_not_known_to_exist():
    marks, rhythm = ends("DDDDDG" * 6)
    assert rhythm.num_updates == 6
    assert marks.endswith(".....|.....|")


@pytest.mark.parametrize("critic", [1, 2, 5, 10, 11, 20])
def test_any_number_of_critic_updates_is_found_and_ends_with_the_generators(critic):
    order = ("D" * critic + "G") * 12
    marks, rhythm = ends(order, expected=2)
    assert rhythm.num_updates == critic + 1
    assert marks[-(critic + 1) :] == "." * critic + "|"


def test_two_models_one_after_the_other_each_have_their_own_step():
    marks, rhythm = ends("A" * 60 + "B" * 60)
    assert marks == ".." + "|" * 58 + ".." + "|" * 58
    assert rhythm.num_updates == 1


def test_a_gan_after_a_pretraining_of_its_generator():
    marks, rhythm = ends("G" * 50 + "DG" * 10, expected=2)
    assert rhythm.num_updates == 2
    assert marks.endswith(".|.|.|")


def test_an_odd_prelude_does_not_shift_the_step():
    marks, rhythm = ends("P" + "DG" * 8)
    assert rhythm.num_updates == 2
    assert marks.endswith(".|.|.|")
    marks, rhythm = ends("PPP" + "DG" * 8)
    assert marks.endswith(".|.|.|")


def test_an_optimizer_for_each_of_many_parameters_makes_one_step_of_all():
    marks, rhythm = ends([*range(200)] * 6)
    assert rhythm.num_updates == 200
    assert [k for k, mark in enumerate(marks) if mark == "|"] == [599, 799, 999, 1199]


def test_a_random_order_falls_back_to_a_step_for_each_update():
    rolled = random.Random(0)
    marks, rhythm = ends(rolled.choice("DG") for _ in range(600))
    assert rhythm.num_updates == 1
    assert set(marks[2 * GIVE_UP :]) == {"|"}
    assert rhythm.next_ends()


def test_phases_of_training_that_alternate_by_epoch_keep_giving_steps():
    marks, _ = ends(("A" * 200 + "B" * 200) * 4)
    assert marks.count("|") > 0.8 * len(marks)


def test_the_last_update_of_a_step_is_foreseen():
    rhythm = StepPeriod()
    foreseen = []
    for name in "DDG" * 8:
        foreseen.append(rhythm.next_ends())
        assert rhythm.update(name) <= (foreseen[-1] or rhythm.num_updates > 0)
    assert foreseen[-3:] == [False, False, True]


@pytest.mark.parametrize(
    "period", ["AABB", "AAABB", "AAABBB", "AAAABB", "AABAB", "AABBCC", "ABAC", "AAAAABBBBB", "ABBABBB"]
)
def test_a_period_in_which_every_optimizer_updates_more_than_once_is_found(period):
    order = period * 40
    marks, rhythm = ends(order, expected=len(set(period)))
    assert rhythm.num_updates == len(period)
    assert marks[-2 * len(period) :] == ("." * (len(period) - 1) + "|") * 2
    assert abs(marks.count("|") + rhythm.num_missed - 40) <= len(period)


def test_steps_are_counted_once_also_when_no_order_is_found():
    for num in (5, 20, 40):  # optimizers that never come back
        order = [epoch for epoch in range(60) for _ in range(num)]
        marks, rhythm = ends(order)
        assert marks.count("|") + rhythm.num_missed == len(order)


@given(st.lists(st.sampled_from("ABC"), max_size=400))
def test_whatever_the_order_a_step_comes_at_the_latest_after_so_many_updates(order):
    rhythm = StepPeriod()
    since = 0
    for name in order:
        since = 0 if rhythm.update(name) else since + 1
        assert since <= 4 * GIVE_UP


@given(st.lists(st.sampled_from("ABCD"), min_size=1, max_size=12), st.integers(0, 3))
def test_every_repeating_order_is_found_and_its_steps_are_equally_long(period, prelude):
    marks, rhythm = ends("P" * prelude + "".join(period) * 40)
    positions = [k for k, mark in enumerate(marks) if mark == "|"][-3:]
    assert rhythm.num_updates <= len(period) or rhythm.num_updates == 1
    assert positions, "no step was found"
    if rhythm.num_updates > 1 and len(positions) == 3:
        assert positions[2] - positions[1] == positions[1] - positions[0] == rhythm.num_updates
        assert len(period) % rhythm.num_updates == 0


@pytest.mark.parametrize(
    ("order", "missed", "num_steps"),
    [
        ("", 0, 0),
        ("AA", 2, 2),  # too few to know, and two steps all the same
        ("DGD", 1, 1),
        ("AAAA", 2, 4),
        ("DG" * 6, 2, 6),
        ("DDDDDG" * 6, 2, 6),
    ],
)
def test_steps_made_while_the_order_was_learned_are_counted_afterwards(order, missed, num_steps):
    marks, rhythm = ends(order, expected=len(set(order)))
    assert rhythm.num_missed == missed
    assert marks.count("|") + missed == num_steps


def test_updates_without_an_order_are_each_a_step_from_the_first_on():
    order = "".join(random.Random(7).choice("ABCDEFG") for _ in range(2 * GIVE_UP))
    marks, rhythm = ends(order)
    assert marks.count("|") + rhythm.num_missed == len(order)
