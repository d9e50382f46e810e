"""A run that tries levers on itself, played by the test: what it tries, what it keeps, and what that costs."""

import random

import pytest

from flatout.records.plan import Trial
from flatout.records.trace import Agreement, Failure, Window
from flatout.run.run_windows import WindowResult
from flatout.trials.learn import MOST_LOST_S, MOST_TOOK_S, MOST_WAITS, Learning
from flatout.trials.search.space import Choice
from handmade import FACTS, MACHINE, lever, registry

LEVERS = registry(
    lever("quick", shortens=("forward", "backward")),
    lever("good", class_="exact", check="none", shortens=("forward",)),
    lever("slow", shortens=("backward",)),
    lever("wide", class_="precision", shortens=("forward",)),
    lever("later", toggles="epoch", shortens=("data",)),
)
SPEED = {"quick": 1.5, "good": 1.2, "slow": 0.6, "wide": 2.0}


class Played:
    """A run whose step takes 10 ms, divided by what each engaged lever brings."""

    def __init__(self, *, speed=SPEED, step_s=0.01, accept="rounding", levers=LEVERS, noise=0.005, busy=None, **odd):
        self.learning = Learning(levers, MACHINE, Choice(accept=accept), FACTS)
        self.speed, self.plain_s, self.noise = speed, step_s, noise
        self.busy = busy or (lambda now_s: 0.0)
        self.odd = odd
        self.lots = random.Random(0)
        self.now_s, self.num_steps, self.asked = 0.0, 6, []

    def step_s(self, levers):
        product = 1.0
        for name in levers:
            product *= self.speed[name]
        return self.plain_s / product * (1 + self.noise * self.lots.gauss(0, 1))

    def goes_on(self, ask):
        self.asked.append(ask)
        if ask.kind == "compare":
            self.now_s += 2 * self.plain_s
            self.num_steps += 2
            given = self.odd.get("agreement", lambda levers: Agreement(levers=levers, differences=(), missing="no"))
            return WindowResult(window=None, num_steps=self.num_steps, agreement=given(ask.levers))
        step_s = self.step_s(ask.levers)
        self.now_s += ask.skip_steps * step_s
        num = max(min(ask.num_steps, int(ask.limit_s / step_s)), 1)
        window = Window(
            index=0, purpose=ask.purpose, levers=ask.levers, observe=ask.observe, step_s=(step_s,) * num,
            outside_s=(0.0,) * num, start_s=self.now_s, foreign_fraction=self.busy(self.now_s),
        )  # fmt: skip
        self.now_s += num * step_s
        self.num_steps += num + ask.skip_steps
        failures = tuple(self.odd["failure"](name) for name in ask.levers if "failure" in self.odd)
        failures = tuple(f for f in failures if f is not None)
        return WindowResult(
            window=window, num_steps=self.num_steps, evidence=dict.fromkeys(ask.levers, "x"), failures=failures
        )

    def to_the_end(self):
        asking = self.learning.asking()
        ask = next(asking)
        try:
            while True:
                ask = asking.send(self.goes_on(ask))
        except StopIteration as end:
            return end.value


@pytest.fixture
def agreeing(monkeypatch):
    """Numbers agree, whatever was compared: how they are judged is looked at elsewhere."""
    from flatout.judge import agreement

    def judge(points, class_, checks):
        return agreement.Judgement(verdict="agrees", detail="as if")

    monkeypatch.setattr("flatout.judge.agreement.judge", judge)


@pytest.mark.usefixtures("agreeing")
def test_the_best_set_is_found_and_costs_little():
    run = Played()
    learned = run.to_the_end()
    assert set(learned.levers) == {"quick", "good"}
    assert learned.stopped == "" and 0 < learned.lost_s < MOST_LOST_S
    assert learned.took_s == pytest.approx(run.now_s, rel=0.1)
    ideal_s = learned.num_steps * 0.01 / (1.5 * 1.2)
    assert learned.lost_s == pytest.approx(learned.took_s - ideal_s, rel=0.1)


@pytest.mark.usefixtures("agreeing")
def test_precision_is_tried_where_it_was_asked_for():
    assert "wide" not in Played().to_the_end().levers
    assert "wide" in Played(accept="precision").to_the_end().levers


def test_what_cannot_be_toggled_between_two_steps_is_never_asked_of_the_run():
    run = Played()
    run.to_the_end()
    assert {name for ask in run.asked for name in ask.levers} == {"quick", "good", "slow"}


def test_a_set_whose_numbers_were_not_compared_is_not_kept():
    learned = Played(levers=registry(lever("quick", shortens=("forward",)))).to_the_end()
    (trial,) = learned.trials
    assert trial.outcome == "inconclusive" and trial.agreement == "inconclusive"
    assert trial.ratio == pytest.approx(1.5, rel=0.02)
    assert learned.levers == {}


@pytest.mark.usefixtures("agreeing")
def test_a_lever_that_fails_costs_its_trial_alone():
    def failure(name):
        return Failure(stage="engage", error="RuntimeError", message="no\nmore") if name == "quick" else None

    learned = Played(failure=failure).to_the_end()
    assert set(learned.levers) == {"good"}
    assert [(t.outcome, t.reason) for t in learned.trials if t.levers == {"quick": {}}] == [("failed", "no")]


@pytest.mark.usefixtures("agreeing")
def test_trying_ends_when_it_has_cost_what_it_may():
    names = [f"even{n}" for n in range(12)]
    evens = [lever(name, shortens=("backward",)) for name in names]
    speed = {"quick": 3.0, **dict.fromkeys(names, 1.001)}
    quick_first = registry(lever("quick", shortens=("forward", "backward")), *evens)
    learned = Played(levers=quick_first, speed=speed, noise=0.15, step_s=0.4).to_the_end()
    assert learned.stopped and learned.lost_s < 1.2 * MOST_LOST_S and "quick" in learned.levers
    never = Played(levers=registry(*evens), speed=speed, noise=0.15, step_s=0.4).to_the_end()
    assert never.stopped and never.took_s < 1.2 * MOST_TOOK_S and never.lost_s < 1.2 * MOST_LOST_S


@pytest.mark.usefixtures("agreeing")
def test_while_others_use_the_cpu_nothing_is_tried():
    run = Played(busy=lambda now_s: 0.5 if now_s < 40 else 0.0)
    learned = run.to_the_end()
    assert set(learned.levers) == {"quick", "good"}
    never = Played(busy=lambda now_s: 0.5)
    learned = never.to_the_end()
    assert learned.stopped == "other processes used the CPU" and learned.trials == ()
    assert sum(ask.limit_s == 3.0 for ask in never.asked) == MOST_WAITS


@pytest.mark.usefixtures("agreeing")
def test_what_others_take_is_not_what_trying_has_cost():
    """They come and go: for a second and a half in four each step takes ten times as long."""
    run = Played()
    run.busy = lambda now_s: 0.5 if now_s > 4 and now_s % 4 < 1.5 else 0.0
    calm = run.step_s
    run.step_s = lambda levers: calm(levers) * (10 if run.busy(run.now_s) else 1)
    learned = run.to_the_end()
    assert set(learned.levers) == {"quick", "good"} and learned.stopped == ""
    assert learned.lost_s < 10 < MOST_LOST_S


def test_a_run_whose_windows_cannot_be_measured_learns_nothing():
    run = Played()
    run.goes_on = lambda ask: WindowResult(window=None, num_steps=7)
    learned = run.to_the_end()
    assert learned.levers == {} and learned.stopped == "its windows do not tell the levers apart"


def test_trials_of_a_run_are_like_those_of_tune():
    learned = Played(levers=registry(lever("quick", shortens=("forward",)))).to_the_end()
    assert all(isinstance(trial, Trial) for trial in learned.trials)
