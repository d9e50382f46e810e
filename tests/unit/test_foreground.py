"""The parent's side of a run: what it makes of the child's records, and which orders it gives."""

import os
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from flatout.api import Ran
from flatout.child.orders import SessionSpec, decode
from flatout.cli.foreground import closing_line, run_summary
from flatout.errors import UsageError
from flatout.machine import energy_counters
from flatout.machine.energy_counters import Counter, Found
from flatout.records import trace_file
from flatout.records.facts import Facts
from flatout.records.plan import Trial
from flatout.records.trace import End, Failure, Header, Ready, Window
from flatout.run import choice, foreground
from flatout.run.child_process import session_files
from flatout.run.choice import Engagement
from flatout.run.controller import CHECK_PAIRS, MOST_SLOW, untoggled
from flatout.run.foreground import Foreground
from flatout.run.outcome import Outcome
from flatout.trials.learn import Learned
from handmade import MACHINE, lever, registry

PLAN = {"bf16": {}, "workers": {"num": 2}}
KEPT = {"workers": {"num": 2}}
REGISTRY = registry(
    lever("bf16"), lever("threads", parameter="num", settings=lambda self, facts, machine: ({"num": 1},)),
    lever("workers", toggles="epoch", partners=("threads",)),
)  # fmt: skip
HEADER = Header(
    format=1, flatout="", started_unix_s=0.0, script="", arguments=(), python="", framework="", framework_version="",
    pid=1,
)  # fmt: skip


@pytest.fixture
def watched(tmp_path):
    """A watch over a child that is played by the test."""

    def build(levers=PLAN, **settings):
        what = Foreground(
            command=(),
            script="train.py",
            arguments=(),
            run_folder=tmp_path,
            levers=levers,
            registry=REGISTRY,
            **settings,
        )
        session = SessionSpec(mode="run", **session_files(tmp_path, "run"))
        os.mkfifo(session.orders)
        orders = os.open(session.orders, os.O_RDWR | os.O_NONBLOCK)
        watch = foreground._Listener(what, session, orders)
        return Played(watch, session.trace, orders)

    return build


class Played:
    """A child as the parent sees it."""

    def __init__(self, watch, trace, orders):
        self.watch = watch
        self.orders = orders
        self.trace = trace
        self.outcome = watch._outcome

    def says(self, *records):
        for record in records:
            trace_file.append(record, self.trace)
        self.watch._listen()

    def order(self):
        try:
            return decode(os.read(self.orders, 65536).decode())
        except BlockingIOError:
            return None

    def settles(self, **what):
        facts = Facts(device="cpu", models=(), optimizers=(), loaders=(), num_threads=1, warm_up_step_s=0.01, **what)
        self.says(HEADER, facts, Ready(order=-1, num_steps=6))

    def answers(self, order, step_s, **what):
        self.says(window(order.number, step_s, order.levers, **what), Ready(order=order.number, num_steps=9))


def window(number, step_s, levers=PLAN, start_s=0.0, num=10, **what):
    return Window(
        index=0, purpose="check", levers=levers, observe="ends", step_s=(step_s,) * num, outside_s=(0.0,) * num,
        start_s=start_s, order=number, **what,
    )  # fmt: skip


def rests(order):
    """Whether it is what the plan runs on for between two pairs."""
    return order.purpose == "run" and order.num_steps > 1


def checked(child, plan_s, plain_s, **what):
    """Answer every order of the check; returns the sides in their order."""
    sides = []
    while (order := child.order()) is not None and (order.purpose == "check" or rests(order)):
        if order.purpose == "check":
            sides.append(dict(order.levers))
        step_s = plan_s if order.levers == PLAN else plain_s
        child.answers(order, step_s * (1 + 0.001 * (order.number % 5)), **what)  # no machine repeats itself exactly
    return sides, order


def next_of_check(child):
    """The next order that is part of the check; the plan's windows between pairs are answered."""
    order = child.order()
    while rests(order):
        child.answers(order, 0.01)
        order = child.order()
    return order


def test_where_no_step_can_be_measured_nothing_is_asked_of_a_run(watched):
    child = watched()
    child.settles(not_measured="the clock of `mps` is not known here")
    assert child.order() is None


def test_between_pairs_the_plan_runs_on_so_that_a_check_costs_a_short_run_little(watched):
    child = watched()
    child.settles()
    levers = []
    while (order := child.order()) is not None and len(levers) < 200:
        levers += [dict(order.levers)] * order.num_steps
        child.answers(order, 0.01 if order.levers == PLAN else 0.02, num=order.num_steps)
    assert levers.count(KEPT) / len(levers) < 0.2


def test_a_plan_is_checked_in_pairs_of_windows_and_kept_where_it_is_faster(watched):
    child = watched()
    child.settles()
    sides, last = checked(child, 0.01, 0.0201)
    pairs = list(zip(sides[::2], sides[1::2], strict=True))
    assert all(PLAN in pair and KEPT in pair for pair in pairs), "each window has its other side beside it"
    assert {pair[0] == PLAN for pair in pairs} == {True, False}, "the lot says which of them goes first"
    assert len(sides) == 2 * CHECK_PAIRS
    assert (dict(last.levers), last.purpose) == (PLAN, "run")
    assert (len(child.outcome.plan_s), len(child.outcome.plain_s)) == (CHECK_PAIRS, CHECK_PAIRS)
    assert not child.outcome.released
    child.answers(last, 0.01)
    assert child.order() is None


def test_a_plan_that_is_slower_here_is_released(watched):
    child = watched()
    child.settles()
    _, last = checked(child, 0.0201, 0.01)
    assert dict(last.levers) == KEPT
    assert child.outcome.released


def free(child, step_s, start_s, levers=PLAN):
    """A window that nobody asked for, two seconds long."""
    child.says(window(-1, step_s, levers, start_s=start_s, num=int(2 / step_s)))


def test_after_the_check_a_jump_of_the_step_time_has_the_plan_looked_at_and_released(watched):
    child = watched()
    child.settles()
    _, last = checked(child, 0.01, 0.02)
    child.answers(last, 0.01)
    reasons = []
    for number in range(40):
        free(child, 0.01 if number < 6 else 0.05, start_s=2.0 * number)
        while (order := child.order()) is not None:
            reasons.append(order.reason)
            child.answers(
                order, (0.05 if order.levers == PLAN else 0.02), start_s=2.0 * number + 2, num=order.num_steps
            )
    first = child.outcome.decisions[0]
    assert first.kind == "released" and first.ratio == pytest.approx(0.4)
    assert any(text.startswith("released at 0.40x") for text in reasons), "the trace shall have it"
    assert not child.outcome.is_engaged and not child.outcome.released
    assert f"from step {first.num_steps:,} on released, 0.40x" in closing_line(ran_of(child))
    assert run_summary(ran_of(child))["decisions"][0]["kind"] == "released"


def test_a_check_in_which_the_plan_was_far_slower_and_others_ran_is_followed_by_a_look_at_once(watched):
    child = watched()
    child.settles()
    sides, last = checked(child, 0.05, 0.02, foreign_fraction=0.5)
    assert len(sides) == 2 * MOST_SLOW and (dict(last.levers), last.purpose) == (PLAN, "run")
    child.answers(last, 0.05)
    free(child, 0.05, start_s=2.0)
    assert child.order().purpose == "check"


def test_a_plan_that_compiles_anew_at_each_step_is_released_after_few_of_them(watched):
    """Each of its steps takes seconds, and is lost: no rests between such pairs, and the next one may be the last."""
    child = watched()
    child.settles()
    num_plan, start_s, released = 0, 0.0, False
    for _ in range(30):
        while (order := child.order()) is not None:
            assert not rests(order), "the plan does not run on between such pairs"
            released = order.reason.startswith("released")
            num_plan += order.levers == PLAN and order.purpose == "check"
            on_plan = order.levers == PLAN
            start_s += 1.0
            child.answers(order, 8.0 if on_plan else 0.02, num=1, start_s=start_s, recompilations=3 * on_plan)
        if released:
            break
        start_s += 16.0
        child.says(window(-1, 8.0, start_s=start_s, num=1))
    assert released and num_plan <= 3
    assert "something was compiled in them" in child.outcome.decisions[0].text


def ran_of(child):
    levers = Engagement(levers=PLAN, line="")
    return Ran(engagement=levers, outcome=child.outcome, registry=REGISTRY, run="")


@pytest.mark.parametrize(
    "settings", [{"toggle": False}, {"levers": KEPT}, {"levers": {}}], ids=["fixed", "no toggles", "no levers"]
)
def test_nothing_is_toggled_where_nothing_can_or_may_be(watched, settings):
    child = watched(**settings)
    child.settles()
    assert child.order() is None


def test_one_rank_of_several_does_not_toggle_alone(watched):
    child = watched()
    facts = Facts(device="cpu", models=(), optimizers=(), loaders=(), num_threads=1, distributed=True)
    child.says(HEADER, facts, Ready(order=-1, num_steps=6))
    assert child.order() is None
    assert child.outcome.engaged


def test_a_plan_that_could_not_be_engaged_is_not_checked(watched):
    child = watched()
    child.says(Failure(stage="engage", error="RuntimeError", message="no"))
    child.settles()
    assert child.order() is None
    assert not child.outcome.engaged


@pytest.mark.parametrize("stage", ["engage", "release", "step"])
def test_a_plan_that_breaks_in_the_check_is_not_engaged_again(watched, stage):
    child = watched()
    child.settles()
    order = child.order()
    child.says(Failure(stage=stage, error="RuntimeError", message="no"), Ready(order=order.number, num_steps=9))
    assert dict(child.order().levers) == KEPT
    assert not child.outcome.engaged
    assert child.outcome.plan_s == child.outcome.plain_s == []


def test_disturbed_compiling_and_missing_windows_cost_their_pair_alone(watched):
    child = watched()
    child.settles()
    odd = [{"foreign_fraction": 0.5}, {}, {"recompilations": 1}, {}]
    for what in odd:
        child.answers(next_of_check(child), 0.01, **what)
    child.says(Ready(order=next_of_check(child).number, num_steps=9))  # no window at all
    child.answers(next_of_check(child), 0.01)
    checked(child, 0.01, 0.02)
    assert child.outcome.num_busy == 1
    assert len(child.outcome.plan_s) == len(child.outcome.plain_s) == CHECK_PAIRS - 3
    assert max(child.outcome.plan_s) < min(child.outcome.plain_s)


def test_the_partners_of_what_is_not_toggled_are_not_toggled_either():
    threads = {"threads": {"num": 1}}
    assert untoggled({**PLAN, **threads}, REGISTRY) == {**KEPT, **threads}
    assert untoggled({"bf16": {}, **threads}, REGISTRY) == {}


PLAIN_S = [0.02, 0.02001, 0.02, 0.01999, 0.02, 0.02]


@pytest.mark.parametrize(
    ("levers", "released", "line"),
    [
        ({"bf16": {}}, False, ", 2.00x [2.00, 2.00] against its own plain windows"),
        (PLAN, False, "; bf16 2.00x [2.00, 2.00] in its own windows, workers as recorded"),
        (PLAN, True, "; bf16 made it slower here, 2.00x [2.00, 2.00] against its own plain windows, and was released"),
        ({"bf16": {}}, True, "; the plan made it slower here, 2.00x [2.00, 2.00] against its own plain windows, and was"
                             " released"),
    ],
)  # fmt: skip
def test_the_closing_line_says_which_levers_were_compared(levers, released, line):
    outcome = Outcome(
        num_steps=20, ended=True, steps_s=1.0, engaged=True, released=released, plan_s=[0.01] * 6, plain_s=PLAIN_S
    )
    ran = Ran(engagement=Engagement(levers=levers), outcome=outcome, registry=REGISTRY, run="")
    assert closing_line(ran) == f"20 steps in 1 s{line}"


def test_which_levers_are_at_work_is_said_and_why_the_others_are_not():
    levers = {"bf16": {}, "workers": {"num": 1}, "threads": {"num": 1}}
    ran = Ran(
        engagement=Engagement(levers=levers),
        outcome=Outcome(num_steps=2, ended=True, engaged=True),
        registry=REGISTRY,
        run="",
        inapplicable={"bf16": "no such type", "workers": "no loader", "threads": "no loader"},
        in_part={"workers": "computes batches at once"},
    )
    assert closing_line(ran).splitlines()[1:] == [
        "  at work: workers (computes batches at once)",
        "  not at work, or not as a whole: no such type: bf16; no loader: workers, threads",
    ]


def test_what_a_run_said_of_a_lever_without_effect_counts_as_why_it_is_not_at_work():
    missing = {"fused_fetch": "its items read a file", "bf16": "another run's"}
    idle, in_part = choice.idle({"fused_fetch": {}}, None, {}, lambda: MACHINE, missing)
    assert idle == {"fused_fetch": "its items read a file"} and not in_part


def test_a_lever_that_shows_its_effect_is_at_work_though_nothing_is_to_be_gained_by_it():
    ran = Ran(
        engagement=Engagement(levers={"bf16": {}, "workers": {"num": 1}}),
        outcome=Outcome(num_steps=2, ended=True, engaged=True, evidence={"bf16": "outputs in bfloat16"}),
        registry=REGISTRY,
        run="",
        inapplicable={"bf16": "no instructions", "workers": "no loader"},
    )
    assert closing_line(ran).splitlines()[1:] == [
        "  at work: none",
        "  at work, with nothing to be gained: no instructions: bf16",
        "  not at work, or not as a whole: no loader: workers",
    ]


def test_a_plan_of_which_nothing_was_at_work_rests_on_no_ratio():
    outcome = Outcome(num_steps=2, ended=True, engaged=True)
    chosen = Engagement(levers={"bf16": {}}, plan=SimpleNamespace(ratio=1.35))
    ran = Ran(engagement=chosen, outcome=outcome, registry=REGISTRY, run="")
    assert "rests on the recorded 1.35x" in closing_line(ran)
    assert "1.35x" not in closing_line(replace(ran, inapplicable={"bf16": "no float32 parameters"}))


def test_what_a_run_has_learned_is_told_with_what_it_brings_and_what_became_of_it():
    trial = Trial(levers={"bf16": {}}, outcome="faster", ratio=1.5)
    learned = Learned(levers={"bf16": {}}, trials=(trial,), took_s=60.0, lost_s=4.0, stopped="90 s were tried")
    outcome = Outcome(num_steps=20, ended=True, engaged=True, learned=learned)
    ran = Ran(engagement=Engagement(), outcome=outcome, registry=REGISTRY, run="", learning=True)
    assert closing_line(ran).splitlines()[1:] == [
        "  1 set of levers tried in 60 s of training, which cost 4 s of it: bf16 1.50x when it was tried, "
        "engaged to the end",
        "  not all was tried: 90 s were tried",
    ]
    gone = replace(outcome, engaged=False)
    assert "bf16 1.50x when it was tried, released again" in closing_line(replace(ran, outcome=gone))


def test_a_loader_that_is_left_to_its_workers_is_no_failure():
    found = Failure(stage="step", error="SetAsideError", message="OSError in an item")
    outcome = Outcome(num_steps=2, ended=True, failures=[found])
    ran = Ran(engagement=Engagement(levers={"bf16": {}}), outcome=outcome, registry=REGISTRY, run="")
    assert closing_line(ran).endswith("a loader was left to the script's own way: OSError in an item")


def test_a_plan_that_is_slower_but_not_surely_is_kept_and_that_is_said():
    plain_s = [0.0086, 0.0092, 0.0079, 0.0094, 0.0099, 0.0083]
    outcome = Outcome(num_steps=20, ended=True, steps_s=1.0, engaged=True, plan_s=[0.01] * 6, plain_s=plain_s)
    ran = Ran(engagement=Engagement(levers={"bf16": {}}), outcome=outcome, registry=REGISTRY, run="")
    assert closing_line(ran).endswith("against its own plain windows; perhaps slower, but not surely: it was kept")


def test_why_a_plan_was_not_checked_is_said():
    outcome = Outcome(num_steps=20, ended=True, steps_s=1.0, engaged=True)
    plan = SimpleNamespace(ratio=1.35)
    ran = Ran(engagement=Engagement(levers={"bf16": {}}, plan=plan), outcome=outcome, registry=REGISTRY, run="")
    assert closing_line(ran) == "20 steps in 1 s; rests on the recorded 1.35x: the run was too short"
    assert closing_line(replace(ran, fixed=True)).endswith("1.35x: nothing is toggled")
    held = replace(ran, engagement=Engagement(levers={"workers": {"num": 1}}, plan=plan))
    assert closing_line(held).endswith("1.35x: its levers cannot be toggled within a run")


def test_a_script_that_ends_in_the_middle_of_a_check_has_a_summary(watched):
    child = watched()
    child.settles()
    child.answers(child.order(), 0.01)
    child.says(End(num_steps=20, wall_s=1.0))
    ran = Ran(engagement=Engagement(levers=PLAN), outcome=child.outcome, registry=REGISTRY, run="somewhere")
    assert closing_line(ran) == "20 steps in 0.1 s; not checked: the run was too short"
    assert run_summary(ran)["ratio"] is None


def test_windows_of_other_orders_and_free_windows_answer_nothing(watched):
    child = watched()
    child.settles()
    first = child.order()
    child.says(window(-1, 5.0), Ready(order=first.number + 7, num_steps=9))
    assert child.order() is None
    child.says(window(-1, 5.0), Ready(order=first.number, num_steps=9))
    assert child.outcome.plan_s == []


def test_steps_and_seconds_run_from_the_first_step_to_the_last_also_over_gaps(watched):
    child = watched(levers={})
    child.says(HEADER, window(-1, 0.1, start_s=1.0), window(-1, 0.1, start_s=5.0))
    assert child.outcome.num_steps == 20
    assert child.outcome.steps_s == pytest.approx(5.0)
    assert not child.outcome.ended
    child.says(End(num_steps=27, wall_s=9.0))
    assert (child.outcome.num_steps, child.outcome.ended) == (27, True)
    child.says(HEADER, window(-1, 0.1, start_s=2.0))  # the script trains again, in another process
    assert (child.outcome.num_steps, child.outcome.ended) == (37, False)
    assert child.outcome.steps_s == pytest.approx(6.0)
    child.says(End(num_steps=12, wall_s=9.0))
    assert child.outcome.num_steps == 39


def test_a_check_begins_anew_in_the_next_process(watched):
    child = watched()
    child.settles()
    child.answers(child.order(), 0.01)
    child.order()
    child.settles()
    sides, _ = checked(child, 0.01, 0.02)
    assert len(sides) == 2 * CHECK_PAIRS


def test_lines_that_are_no_records_cost_no_more_than_themselves(watched):
    child = watched(levers={})
    with open(child.trace, "w") as file:
        file.write("no record\n")
    child.says(End(num_steps=3, wall_s=1.0))
    child.watch._listen()
    assert child.outcome.num_steps == 3


def test_whatever_breaks_in_listening_does_not_break_the_run(watched, monkeypatch):
    child = watched()
    monkeypatch.setattr(foreground._Listener, "_answered", lambda *_: 1 / 0)
    child.settles()
    child.watch._listen()
    assert not child.outcome.engaged


def test_under_a_launcher_the_first_process_counts_the_steps_and_each_tells_of_failures(watched, tmp_path):
    child = watched(launcher=True)
    for rank in (0, 1):
        path = tmp_path / f"trace-run.{rank}.77.jsonl"
        trace_file.append(HEADER, path)
        trace_file.append(window(-1, 0.1), path)
        if rank:
            trace_file.append(Failure(stage="engage", error="RuntimeError", message="on one rank"), path)
        trace_file.append(End(num_steps=12, wall_s=1.0), path)
    child.watch._gather()
    assert (child.outcome.num_processes, child.outcome.num_steps) == (2, 12)
    assert [failure.message for failure in child.outcome.failures] == ["on one rank"]


def plain(tmp_path, command, **settings):
    return Foreground(command=command, script="", arguments=(), run_folder=tmp_path, levers={}, registry={}, **settings)


def test_a_launcher_that_is_not_there_is_a_usage_error_and_leaves_nothing(tmp_path):
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(UsageError, match="cannot start `/no/such`"):
        foreground.run(plain(tmp_path, ("/no/such",), launcher=True))
    assert sorted(os.listdir("/proc/self/fd")) == before
    assert not (tmp_path / "orders-run").exists()


def test_a_run_without_a_folder_or_with_a_broken_one_is_a_plain_run(tmp_path):
    code = "import os, sys; sys.exit(3 if 'FLATOUT_SESSION' in os.environ else 4)"
    for place in (None, tmp_path / "gone"):
        outcome = foreground.run(plain(place, (sys.executable, "-S", "-c", code)))
        assert (outcome.exit_code, outcome.recorded) == (4, False)


def test_a_run_knows_what_the_machine_used_meanwhile(tmp_path, monkeypatch):
    watts = Counter(
        name="package-0", device="cpu", source="RAPL", update_s=1e-3, read=lambda: 40.0 * time.perf_counter()
    )
    monkeypatch.setattr(energy_counters, "find", lambda: Found(counters=(watts,)))
    begun_s = time.perf_counter()
    outcome = foreground.run(plain(tmp_path, (sys.executable, "-S", "-c", "import time; time.sleep(0.5)")))
    assert 40.0 * 0.3 < outcome.energy.joules < 40.0 * (time.perf_counter() - begun_s)


@pytest.mark.parametrize(
    ("outcome", "line"),
    [
        ({}, "no training step was seen"),
        ({"num_steps": 1, "ended": True}, "1 step"),
        ({"num_steps": 12345, "ended": True, "steps_s": 1234.5}, "12,345 steps in 1,234 s"),
        ({"num_steps": 20, "steps_s": 1.0}, "at least 20 steps in 1 s"),
        ({"num_steps": 20, "ended": True, "num_processes": 2}, "2 processes, 20 steps"),
        ({"recorded": False}, "nothing was recorded"),
        (
            {"failures": [Failure(stage="enter", error="ImportError", message="a\nb")]},
            "no training step was seen; enter failed, running on without: ImportError: a",
        ),
        (
            {"failures": [Failure(stage="enter", error="ImportError", message="")]},
            "no training step was seen; enter failed, running on without: ImportError: ",
        ),
    ],
)
def test_the_closing_line_says_what_was_seen(outcome, line):
    ran = Ran(engagement=Engagement(), outcome=Outcome(**outcome), registry={}, run="")
    assert closing_line(ran) == line
