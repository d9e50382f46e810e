"""Watching over a plan while a run goes on, on a clock of its own: what it decides, how soon, and what that costs."""

import random

import pytest

from flatout.judge.sequential import BettingTest, needed
from flatout.records.trace import Window
from flatout.run.monitor import ERROR, MOST_COST, Monitor
from flatout.run.run_windows import WINDOW_S, Sides
from tiers import some

PLAN, WITHOUT = {"bf16": {}}, {}


class Played:
    """A run whose step times are given, with the plan and without it, as functions of the time since its start."""

    def __init__(self, plan_s, without_s, *, noise=0.03, seed=0, engaged=True, free_s=5.0, shape=None, **seen):
        self.times = {True: plan_s, False: without_s}
        self.noise, self.free_s, self.seen = noise, free_s, seen
        self.shape = shape
        """For the number of a step what it takes beside the usual, as a factor and seconds more."""
        self.lots = random.Random(seed)
        self.now_s, self.num_steps = 0.0, 0
        self.seconds = {True: 0.0, False: 0.0}
        self.under = engaged
        self.guard = Monitor(
            Sides(plan=PLAN, without=WITHOUT), engaged=engaged, num_steps=lambda: self.num_steps, gap_s=None
        )

    def window(self, limit_s, num_steps=10**9, order=-1):
        steps, start_s = [], self.now_s
        slow = 1.0 + self.noise * self.lots.gauss(0, 1)  # windows differ more than their steps
        while len(steps) < num_steps and self.now_s - start_s < limit_s:
            step_s = self.times[self.under](self.now_s) * max(slow, 0.5)
            factor, more_s = self.shape(self.num_steps) if self.shape else (1.0, 0.0)
            step_s = step_s * factor + more_s
            many = (
                1 if self.shape or num_steps < 10**9 else max(int(0.1 / step_s), 1)
            )  # quick, where nobody counts steps
            steps += [step_s] * many
            self.now_s += step_s * many
            self.num_steps += many
        self.seconds[self.under] += sum(steps)
        seen = {name: value(self.now_s, self.under) for name, value in self.seen.items()}
        return Window(
            index=0, purpose="run", levers={}, observe="ends", step_s=tuple(steps), outside_s=(0.0,) * len(steps),
            start_s=start_s, order=order, **seen,
        )  # fmt: skip

    def until(self, end_s):
        while self.now_s < end_s:
            ask = self.guard.free(self.window(self.free_s))
            while ask is not None:
                self.under = ask.levers == PLAN
                if ask.skip_steps:
                    self.window(1e9, ask.skip_steps)
                ask = self.guard.answered(self.window(ask.limit_s, ask.num_steps, order=0))
            assert self.under == self.guard.engaged, "between its looks the run is where the guard thinks it is"
        return [decision.kind for decision in self.guard.decisions]


def always(step_s):
    return lambda now_s: step_s


def after(change_s, before, then):
    return lambda now_s: then if now_s >= change_s else before


def changes(run):
    return [decision for decision in run.guard.decisions if decision.kind != "kept"]


@pytest.mark.parametrize("step_s", [0.001, 0.01, 0.2, 4.0])
@pytest.mark.parametrize("slower", [1.1, 1.5, 20.0])
def test_a_plan_that_becomes_slower_than_plain_is_released_in_time(step_s, slower):
    run = Played(after(120, step_s, 2 * step_s * slower), always(2 * step_s))
    run.until(120)
    assert changes(run) == []
    before = run.num_steps
    while not changes(run) and run.now_s < 3000:
        run.until(run.now_s + 1)
    (released,) = changes(run)
    assert released.kind == "released" and released.ratio == pytest.approx(1 / slower, rel=0.1)
    assert run.now_s - 120 <= 60 or released.num_steps - before <= 200
    assert "its steps took" in released.why


def every_tenth_is_long(number):
    return (5.0 if number % 10 == 0 else 1.0), 0.0


@pytest.mark.parametrize("step_s", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_long_steps_between_short_ones_hide_no_slower_plan(step_s, seed):
    """Windows hold whole rows of ten, so that it is not chance which of them has a long step more."""
    run = Played(after(120, step_s, 3 * step_s), always(2 * step_s), shape=every_tenth_is_long, seed=seed)
    run.until(120)
    before = run.num_steps
    while not changes(run) and run.now_s < 3000:
        run.until(run.now_s + 1)
    (released,) = changes(run)
    assert released.kind == "released" and released.ratio == pytest.approx(1 / 1.5, rel=0.1)
    assert run.now_s - 120 <= 120 or released.num_steps - before <= 300


def test_an_evaluation_that_nobody_can_tell_from_a_step_hides_no_slower_plan():
    def evaluates(number):
        return 1.0, 20.0 if number % 500 == 499 else 0.0

    run = Played(after(400, 0.01, 0.03), always(0.02), shape=evaluates)
    run.until(400)
    assert changes(run) == []
    run.until(460)
    assert [d.kind for d in changes(run)] == ["released"]


def test_on_a_noisy_machine_what_leans_is_pursued():
    """Windows differ by 10 %, and the plan is 15 % slower: it takes more pairs, and they are made."""
    late = 0
    for seed in range(10):
        run = Played(after(200, 0.01, 0.023), always(0.02), noise=0.1, seed=seed)
        run.until(320)
        late += [d.kind for d in changes(run)] != ["released"]
    assert late <= 1


def test_steps_of_some_microseconds_are_followed_too():
    guard = Monitor(Sides(plan=PLAN, without=WITHOUT), engaged=True, num_steps=lambda: 0, gap_s=0.0)

    def window(step_s, number):
        return Window(
            index=number, purpose="run", levers={}, observe="ends", step_s=(step_s,) * 2000, outside_s=(0.0,) * 2000,
            start_s=0.1 * number,
        )  # fmt: skip

    assert [guard.free(window(40e-6, number)) for number in range(6)] == [None] * 6
    asked = [guard.free(window(80e-6, number)) for number in range(6, 9)]
    assert any(ask is not None for ask in asked)


def test_it_is_engaged_again_when_conditions_return():
    run = Played(lambda now_s: 0.02 if 100 <= now_s < 400 else 0.005, always(0.01))
    assert [d.kind for d in changes(run)] == []
    run.until(2000)
    assert [d.kind for d in changes(run)] == ["released", "engaged again"]
    assert run.seconds[True] > 1200


def test_conditions_that_return_for_plain_as_well_are_seen_at_once():
    """A process took a core from both sides, and has ended: plain's own step time falls, which costs nothing to see."""
    run = Played(
        lambda now_s: 0.05 if 100 <= now_s < 900 else 0.005, lambda now_s: 0.02 if 100 <= now_s < 900 else 0.01
    )
    run.until(1000)
    released, again = changes(run)
    assert released.kind == "released" and again.kind == "engaged again"
    assert again.why.startswith("its steps took ")
    now_ms, before_ms = (float(word) for word in again.why.split() if word[0].isdigit())
    assert before_ms > 1.1 * now_ms


@pytest.mark.parametrize("factor", some([1.02, 2.0, 30.0], 1.02, 30.0))
@pytest.mark.parametrize("step_s", some([0.001, 0.05, 3.0], 0.05))
def test_looking_costs_at_most_one_percent(factor, step_s):
    run = Played(always(step_s), always(step_s * factor), noise=0.02)
    run.until(4000)
    assert changes(run) == []
    lost_s = run.seconds[False] * (1 - 1 / factor)
    one_look_s = (max(WINDOW_S, step_s) + 3 * step_s) * factor
    assert lost_s <= MOST_COST * run.now_s + one_look_s
    assert run.guard.decisions, "it does look"


def test_looks_come_at_rising_distances():
    run = Played(always(0.01), always(0.0101))
    run.until(20_000)
    assert 5 < len(run.guard.decisions) < 20


@pytest.mark.slow
def test_noise_alone_changes_next_to_nothing():
    """Equal sides, so that each change is an error: of 200 runs of an hour at most what is allowed, with its spread."""
    runs = [Played(always(0.05), always(0.05), noise=0.08, seed=seed) for seed in range(200)]
    for run in runs:
        run.until(3600)
    assert sum(bool(changes(run)) for run in runs) <= 8


def test_a_jump_of_both_sides_releases_nothing():
    run = Played(after(200, 0.01, 0.03), after(200, 0.02, 0.06))
    run.until(400)
    assert changes(run) == []
    assert any("its steps took" in d.why for d in run.guard.decisions), "it has looked"


def test_one_slow_window_is_no_jump():
    slow = Played(lambda now_s: 0.05 if 200 <= now_s < 201 else 0.01, always(0.02))
    slow.until(300)
    assert not any("its steps took" in d.why for d in slow.guard.decisions)


def test_what_was_seen_beside_a_change_is_said():
    def after_100(value, otherwise):
        return lambda now_s, engaged: value if now_s > 100 and engaged else otherwise

    run = Played(
        after(100, 0.01, 0.1), always(0.02), recompilations=after_100(3, 0), foreign_fraction=after_100(0.5, 0.0)
    )
    run.until(300)
    (released,) = changes(run)
    assert released.beside == "other processes used the CPU; something was compiled in them"
    assert released.text.startswith("released at 0.2") and released.beside in released.text


def test_windows_that_never_come_end_a_look_without_a_change():
    guard = Monitor(Sides(plan=PLAN, without=WITHOUT), engaged=True, num_steps=lambda: 0, gap_s=0.0)
    run = Played(always(0.01), always(0.02))
    run.guard = guard
    ask = None
    while ask is None:
        ask = guard.free(run.window(5.0))
    num = 0
    while ask is not None and ask.purpose == "check" and num < 1000:
        ask, num = guard.answered(None), num + 1
        if ask is not None and ask.purpose == "run" and not guard.decisions:  # it waits for what looks may cost
            guard.answered(None)
            ask = guard.free(run.window(5.0))
    assert num < 1000
    assert [d.kind for d in guard.decisions] == ["kept"] and guard.decisions[0].ratio is None
    assert "kept in 0 pairs" in guard.decisions[0].text


def test_bets_are_rarely_won_by_chance_however_often_one_looks():
    lots = random.Random(1)
    won = 0
    for _ in range(2000):
        bets = BettingTest()
        for _ in range(300):
            bets.place(won=lots.random() < 0.5)
            if bets.wealth >= 20:
                won += 1
                break
    assert won / 2000 <= 1 / 20 + 0.015


def test_what_all_questions_spend_sums_to_the_error():
    assert sum(1 / needed(ERROR, n) for n in range(1, 10_000)) == pytest.approx(ERROR, rel=1e-3)
