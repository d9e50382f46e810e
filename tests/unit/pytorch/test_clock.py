"""Does the clock keep a closed account, however parts nest and whatever raises within them?"""

import math

from hypothesis import given
from hypothesis import strategies as st

from flatout.frameworks.pytorch.observe.clock import BASE, PhaseClock

PHASES = ("data", "forward", "backward", "optimizer", BASE)


class FakeTime:
    """A clock that moves by what each reading is given."""

    def __init__(self, steps):
        self.steps = iter(steps)
        self.now = 0.0

    def __call__(self):
        self.now += next(self.steps, 0.0)
        return self.now


def test_time_belongs_to_the_innermost_part_alone():
    clock = PhaseClock(now=FakeTime([0, 1, 2, 4, 8]))
    clock.start()
    clock.push("forward")
    clock.push("data")
    clock.pop("data")
    clock.pop("forward")
    assert clock.end() == {"unattributed": 1.0, "forward": 2.0 + 8.0, "data": 4.0}


def test_time_after_the_model_call_is_the_loss_until_backward():
    clock = PhaseClock(now=FakeTime([0, 1, 1, 5, 1, 1]))
    clock.start()
    clock.push("forward")
    clock.pop("forward", base="loss")
    clock.push("backward")
    clock.end_base()
    clock.pop("backward")
    assert clock.end() == {"unattributed": 2.0, "forward": 1.0, "loss": 5.0, "backward": 1.0}


def test_a_closure_within_an_update_is_outside_the_update():
    clock = PhaseClock(now=FakeTime([0, 1, 1, 10, 1, 1]))
    clock.start()
    clock.push("optimizer")
    clock.push(BASE)
    clock.pop(BASE)
    clock.pop("optimizer")
    assert clock.end() == {"unattributed": 1.0 + 10.0 + 1.0, "optimizer": 2.0}


def test_what_an_exception_left_open_is_closed_by_the_part_around_it():
    clock = PhaseClock(now=FakeTime([0, 1, 1, 1, 1]))
    clock.start()
    clock.push("forward")
    clock.push("optimizer")  # never popped: its update raised
    clock.pop("forward")
    assert clock.end()["unattributed"] == 2.0


def test_a_pop_without_its_push_changes_nothing():
    clock = PhaseClock(now=FakeTime([0, 1, 1, 1]))
    clock.start()
    clock.push("forward")
    clock.pop("data")
    clock.pop("forward")
    assert clock.end() == {"unattributed": 1.0, "forward": 2.0}


def test_an_evaluation_takes_over_all_that_came_before_it_in_the_step():
    clock = PhaseClock(now=FakeTime([0, 1, 2, 3, 4]))
    clock.start()
    clock.push("data")
    clock.pop("data")
    clock.reassign("evaluation")
    assert clock.end() == {"evaluation": 6.0, "unattributed": 4.0}


# what happens in a step: nested parts, some of which raise in the middle
parts = st.recursive(
    st.just([]),
    lambda inner: st.lists(st.tuples(st.sampled_from(PHASES), inner, st.booleans()), max_size=4),
    max_leaves=12,
)


class Raised(Exception):
    pass


def play(clock, tree):
    for phase, inner, raises in tree:
        clock.push(phase)
        try:
            play(clock, inner)
            if raises:
                raise Raised
        except Raised:
            pass
        finally:
            clock.pop(phase, base="loss" if phase == "forward" else None)
        if phase == "backward":
            clock.end_base()


@given(st.lists(parts, min_size=1, max_size=5), st.lists(st.floats(0, 10), min_size=200, max_size=200))
def test_the_parts_of_every_step_sum_to_its_wall_time(steps, readings):
    time = FakeTime(readings)
    clock = PhaseClock(now=time)
    clock.start()
    for tree in steps:
        begun = clock.last
        play(clock, tree)
        spent = clock.end()
        assert math.isclose(sum(spent.values()), clock.last - begun, rel_tol=1e-9, abs_tol=1e-9)
        assert all(seconds >= 0 for seconds in spent.values())
        assert BASE not in spent


@given(parts, parts, st.lists(st.floats(0, 10), min_size=200, max_size=200))
def test_a_step_that_ends_within_a_part_leaves_the_account_closed(first, second, readings):
    clock = PhaseClock(now=FakeTime(readings))
    clock.start()
    begun = clock.last
    clock.push("backward")  # an optimizer that updates within backward ends the step there
    play(clock, first)
    one = clock.end()
    play(clock, second)
    clock.pop("backward")
    two = clock.end()
    total = sum(one.values()) + sum(two.values())
    assert math.isclose(total, clock.last - begun, rel_tol=1e-9, abs_tol=1e-9)
