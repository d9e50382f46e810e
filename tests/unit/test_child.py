"""The conductor at a step boundary, with a framework, a clock and a pipe that do as they are told."""

import contextlib
import errno
import functools
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest

from conducting import Ended, FakePipe, in_this_process, records
from flatout.child import conductor, problems
from flatout.child import run as run_of_child
from flatout.child.enter import conductor_of
from flatout.child.first_trainer import claim
from flatout.child.orders import Order, SessionSpec
from flatout.frameworks.contract import Step
from flatout.guest import tracebacks
from flatout.records import trace_file
from flatout.records.facts import Facts
from flatout.records.trace import Agreement, Census, End, Failure, Header, Ready, Remark, Scaling, Toggle, Window
from flatout.run.child_process import session_files

BF16 = {"bf16": {}}
THREADS = {"threads": {"num": 1}}


_this_process = in_this_process


class FakeFramework:
    """A framework that notes what is asked of it, and breaks where it is told to."""

    name = "fake"
    version = "1.0"

    def __init__(self, *, settles_after=2, distributed=False, breaks=()):
        self.breaks = set(breaks)
        self.calls = []
        self.levers = {}
        self.depth = "off"
        self.attached = False
        self.distributed = distributed
        self.now_s = 0.0
        self.since_s = None
        self.num_steps = 0
        self.settles_after = settles_after
        self.capturing = False
        self.listener = None

    def _note(self, name, *what):
        self.calls.append((name, *what))
        if name in self.breaks or (name, *map(str, what)) in self.breaks:
            raise RuntimeError(f"{name} is broken")

    def prepare(self, levers, *, trial, learns=False):
        self._note("prepare")

    def attach(self, listener):
        self._note("attach")
        self.listener, self.attached = listener, True

    def detach(self):
        self.attached = False
        self.levers = {}
        self._note("detach")

    def training_since_s(self):
        return self.since_s

    def num_missed_steps(self):
        return 2

    def settled(self):
        self._note("settled")
        return self.num_steps >= self.settles_after

    def facts(self):
        self._note("facts")
        return Facts(device="cpu", models=(), optimizers=(), loaders=(), num_threads=1, distributed=self.distributed)

    def engage(self, levers):
        self._note("engage", *levers)
        released = tuple(name for name in self.levers if name not in levers)
        new = {name: settings for name, settings in levers.items() if name not in self.levers}
        self.levers = dict(levers)
        return Toggle(engaged=new, released=released, took_s=0.0, step=-1)

    def coast(self):
        self._note("coast")
        self.depth = "off"

    def evidence(self):
        self._note("evidence")
        return dict.fromkeys(self.levers, "seen"), {}

    def observe(self, depth):
        self._note("observe", depth)
        self.depth = depth

    def start_window(self):
        self._note("start_window")
        return self.now_s

    def end_window(self):
        self._note("end_window")
        return {"losses": [1.0], "recompilations": 0, "peak_memory_bytes": 7, "new_epochs": 0}

    def begin_capture(self):
        self._note("begin_capture")
        self.capturing = True

    def compare(self, levers, checks):
        self._note("compare", *checks)
        self.capturing = False
        return Agreement(levers=levers, differences=())

    def scale(self):
        self._note("scale")
        self.capturing = False
        return None

    def begin_census(self):
        self._note("begin_census")

    def end_census(self):
        self._note("end_census")
        return Census(num_operations=1, num_syncs=0, flops=2, moved_bytes=3, operations=(), uncounted=())

    def counterfactual(self, name, engaged):
        self._note("counterfactual", name, engaged)

    def patched(self):
        return ["Loader.__iter__"]

    def remarks(self):
        self._note("remarks")
        return ["kept"]

    def engaged(self):
        return dict(self.levers)

    # -- the script ---

    def step(self, num=1, *, step_s=0.5):
        """The script makes steps; the last update of each is announced."""
        for _ in range(num):
            self.now_s += step_s
            self.num_steps += 1
            if self.attached and self.capturing:
                self.listener.on_update()
            if self.attached:
                plain = self.depth == "off"
                parts, outside_s = ({}, 0.0) if plain else ({"forward": 0.4, "unattributed": 0.1}, 0.25)
                self.listener.on_step(Step(self.now_s, parts, outside_s))


@pytest.fixture
def conducted(tmp_path):
    """Builds a conductor over a fake framework."""

    def build(*orders, mode="run", **settings):
        fake = {key: settings.pop(key) for key in ("settles_after", "distributed", "breaks") if key in settings}
        framework = FakeFramework(**fake)
        spec = SessionSpec(mode=mode, **{**session_files(tmp_path, "x"), **settings})
        conductor = conductor_of(spec, framework)
        conductor._pipe = FakePipe(orders)
        conductor.begin()
        return SimpleNamespace(
            conductor=conductor, framework=framework, pipe=conductor._pipe, trace=tmp_path / "trace-x.jsonl"
        )

    return build


def order(number, kind="window", **what):
    return Order(number=number, kind=kind, **what)


def ready(here):
    return [record.order for record in records(here, Ready)]


# -- start ---------------------------------------------------------------------------------------------------------


def test_a_process_that_makes_no_step_claims_nothing(conducted, tmp_path):
    conducted()
    assert list(tmp_path.iterdir()) == []


def test_the_first_step_claims_the_trace_and_the_header_says_who_we_are(conducted):
    here = conducted(script="train.py", arguments=("--lr", "1"))
    here.framework.step()
    (header,) = records(here)
    assert isinstance(header, Header)
    assert (header.script, header.arguments, header.framework, header.pid) == (
        "train.py",
        ("--lr", "1"),
        "fake",
        os.getpid(),
    )


def test_a_rank_that_is_no_number_does_not_matter(conducted, monkeypatch):
    monkeypatch.setenv("RANK", "²")
    here = conducted()
    here.framework.step()
    assert records(here, Header)[0].rank == 0


def test_the_second_process_of_a_script_is_left_alone(conducted, tmp_path):
    (tmp_path / "claim-x").write_text(str(os.getppid()))
    here = conducted(levers=BF16)
    here.framework.step(20)
    assert not here.framework.attached
    assert not here.trace.exists()
    assert ("engage", "bf16") not in here.framework.calls


def test_the_other_ranks_of_a_job_engage_the_levers_without_a_word(conducted, tmp_path):
    (tmp_path / "claim-x").write_text(str(os.getppid()))
    here = conducted(levers=BF16, distributed=True)
    here.framework.step(20)
    assert here.framework.levers == BF16
    assert here.framework.depth == "off"
    assert not here.trace.exists()


def test_the_claim_of_a_process_that_has_ended_is_taken_over_in_a_run_only(tmp_path):
    place = tmp_path / "claim"
    gone = os.fork()
    if gone == 0:
        os.execv("/bin/true", ["true"])
    os.waitpid(gone, 0)
    place.write_text(str(gone))
    assert not claim(str(place), 5, again=False)
    assert claim(str(place), os.getpid(), again=True)
    assert not claim(str(place), 7, again=True)
    place.write_text("")
    assert not claim(str(place), 7, again=True)


def test_under_a_launcher_each_process_has_a_trace_of_its_own_and_takes_no_orders(conducted, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    spec = SessionSpec(mode="run", **session_files(tmp_path, "x"), per_process=True, levers=BF16)
    framework = FakeFramework()
    conductor_of(spec, framework).begin()
    framework.step(60)
    header, *rest = trace_file.Reader(tmp_path / f"trace-x.3.{os.getpid()}.jsonl")
    assert header.rank == 3
    assert not any(isinstance(record, Failure) for record in rest)
    assert framework.levers == BF16


# -- windows -------------------------------------------------------------------------------------------------------


def test_a_child_settles_before_it_is_ready_and_says_what_it_found(conducted):
    here = conducted(mode="trial", settles_after=8)
    here.framework.step(7)
    assert not records(here, Ready)
    here.framework.step()
    facts, answer = records(here)[-2:]
    assert isinstance(facts, Facts) and facts.warm_up_step_s == pytest.approx(0.5)
    assert (answer.order, answer.num_steps) == (-1, 8)


def test_a_window_has_exactly_the_ordered_steps_after_the_skipped_ones(conducted):
    here = conducted(order(0, levers=THREADS, num_steps=4, skip_steps=3, purpose="trial"), mode="trial")
    here.framework.step(6)
    assert ready(here) == [-1]
    here.framework.step(6)
    assert ready(here) == [-1]
    here.framework.step()
    (window,) = records(here, Window)
    assert (window.num_steps, window.order, window.levers, window.purpose) == (4, 0, THREADS, "trial")
    assert window.step_s == (0.5,) * 4
    assert window.outside_s == (0.25,) * 4
    assert ready(here) == [-1, 0]


@pytest.mark.parametrize(("step_s", "num_skipped"), [(0.4, 3), (1.5, 2), (8.0, 1)])
def test_in_a_check_no_more_steps_are_left_out_than_two_seconds_hold(conducted, step_s, num_skipped):
    """Each of them may compile anew."""
    here = conducted(order(0, levers=THREADS, num_steps=1, skip_steps=3, purpose="check"), levers=BF16)
    here.framework.step(20, step_s=step_s)
    window = next(w for w in records(here, Window) if w.order == 0)
    toggled = next(t for t in records(here, Toggle) if t.order == 0)
    done = next(r for r in records(here, Ready) if r.order == 0)
    assert done.num_steps - toggled.step - window.num_steps == num_skipped


def test_a_window_without_skipped_steps_begins_at_once(conducted):
    here = conducted(order(0, num_steps=2, skip_steps=0), mode="trial")
    here.framework.step(8)
    assert ready(here) == [-1, 0]


def test_a_window_ends_at_its_time_limit_at_a_step_end_and_evaluation_does_not_count(conducted):
    here = conducted(order(0, num_steps=1000, limit_s=0.7, skip_steps=0), mode="trial")
    here.framework.step(9)  # of each second half a second is training
    assert records(here, Window)[0].num_steps == 3


def test_phases_are_written_where_they_were_asked_for(conducted):
    here = conducted(
        order(0, num_steps=2, skip_steps=0, observe="phases"), order(1, num_steps=1, skip_steps=0), mode="trial"
    )
    here.framework.step(10)
    first, second = records(here, Window)
    assert first.phases == {"forward": (0.4, 0.4)}
    assert second.phases == {}


def test_windows_of_a_run_start_where_the_one_before_ended(conducted, monkeypatch):
    monkeypatch.setattr(run_of_child, "EARLY_S", 0.0)
    here = conducted()
    here.framework.step(6)
    here.framework.step(40, step_s=0.5)
    windows = records(here, Window)
    assert [w.num_steps for w in windows] == [10, 10, 10, 10]
    starts = [w.start_s for w in windows]
    assert starts == pytest.approx([starts[0] + 5.0 * n for n in range(4)])


def test_a_run_without_levers_only_counts_steps_once_it_has_settled(conducted):
    here = conducted()
    here.framework.step(200)
    assert ("coast",) in here.framework.calls and ("observe", "ends") not in here.framework.calls
    assert here.framework.depth == "off"
    here.conductor._at_exit()
    assert sum(len(window.step_s) for window in records(here, Window)) >= 190
    assert records(here, End)[0].num_steps == 202  # two were missed before it was known what a step is


def test_a_run_with_levers_is_observed_until_its_first_window_is_over_and_then_only_when_somebody_asks(conducted):
    here = conducted(levers=BF16)
    here.framework.step(7)
    assert here.framework.depth == "ends", "an order may come at any moment"
    here.framework.step(30)
    assert here.framework.depth == "off" and {w.observe for w in records(here, Window)} == {"ends", "off"}
    here.pipe.waiting.append(order(0, num_steps=3, purpose="check"))
    here.framework.step(2)
    assert here.framework.depth == "ends"
    here.framework.step(3)
    assert ready(here) == [-1, 0] and here.framework.depth == "off"


@pytest.mark.parametrize("how", [{"mode": "trial"}, {"keep_losses": True}])
def test_a_trial_and_a_run_whose_losses_are_wanted_are_observed_to_the_end(conducted, how):
    here = conducted(**how)
    here.pipe.closed = True
    with contextlib.suppress(Ended):
        here.framework.step(200)
    assert ("coast",) not in here.framework.calls


@pytest.mark.parametrize("levers", [{}, BF16])
def test_steps_that_are_only_collected_are_all_in_the_windows_and_in_the_end(conducted, levers):
    here = conducted(levers=levers)
    here.framework.step(40)
    here.framework.step(3000, step_s=0.001)
    here.framework.step(1, step_s=0.5)
    here.framework.step(123, step_s=0.003)
    here.conductor._at_exit()
    (end,), windows = records(here, End), records(here, Window)
    assert end.num_steps == 40 + 3000 + 1 + 123 + 2
    assert sum(w.num_steps for w in windows) == end.num_steps - 2 - windows_begin(here)
    assert end.training_s == pytest.approx(39 * 0.5 + 3000 * 0.001 + 0.5 + 123 * 0.003)
    steps = [step_s for w in windows for step_s in w.step_s]
    assert steps[-123:] == pytest.approx([0.003] * 123) and steps[-124] == pytest.approx(0.5)
    assert all(len(w.outside_s) == w.num_steps for w in windows)


def windows_begin(here):
    """The step after which the first window of a run begins."""
    return records(here, Ready)[0].num_steps


def test_orders_are_looked_for_while_steps_are_only_collected(conducted):
    here = conducted()
    here.framework.step(40)
    here.framework.step(200, step_s=0.001)
    here.pipe.waiting.append(order(7, num_steps=2))
    here.framework.step(120, step_s=0.001)
    assert 7 in ready(here)


def test_a_young_run_writes_its_steps_down_every_second(conducted):
    here = conducted()
    here.framework.step(6)
    here.framework.step(20, step_s=0.25)
    assert [w.num_steps for w in records(here, Window)] == [4, 4, 4, 4, 4]


def test_orders_are_answered_one_after_the_other(conducted):
    orders = (
        order(0, num_steps=2),
        order(1, "census"),
        order(2, "compare", levers=BF16, purpose="gradients updates"),
        order(3, "scaling"),
        order(4, levers={"free_data": {}}, num_steps=1),
    )
    here = conducted(*orders, mode="trial")
    here.framework.step(30)
    assert ready(here) == [-1, 0, 1, 2, 3, 4]
    assert [r.order for r in records(here, Census)] == [1]
    assert [r.order for r in records(here, Agreement)] == [2]
    assert ("compare", "gradients", "updates") in here.framework.calls
    assert not records(here, Scaling)  # it could not be halved
    assert [c for c in here.framework.calls if c[0] == "counterfactual"][-1] == ("counterfactual", "free_data", True)


def test_a_trial_waits_for_orders_and_a_run_never_does(conducted):
    run = conducted()
    run.framework.step(20)
    assert run.pipe.num_waits == 0
    trial = conducted(mode="trial", trace=str(run.trace) + "2", claim=str(run.trace) + "3")
    trial.framework.step(20)
    assert trial.pipe.num_waits > 0


def test_a_trial_ends_when_it_is_left_alone(conducted):
    left = conducted(mode="trial")
    left.pipe.closed = True
    with pytest.raises(Ended):
        left.framework.step(6)


def test_the_seconds_of_the_end_are_those_of_its_steps_and_so_of_the_missed_ones(conducted):
    """Of a loop that updates by hand the first twenty steps are known only afterwards."""
    here = conducted()
    here.framework.since_s, here.framework.now_s = 2.0, 90.0
    here.framework.step(10)
    here.conductor._at_exit()
    (end,) = records(here, End)
    assert end.num_steps == 12 and end.training_s == pytest.approx(here.framework.now_s - 2.0)


def test_a_run_says_what_is_replaced_in_its_process_to_who_asks_for_everything(conducted):
    here = conducted()
    here.framework.step(15)
    (told,) = records(here, Remark)
    assert told == Remark(text="replaced in its process: `Loader.__iter__`", verbose=True)


def test_the_end_of_the_script_closes_the_window_and_says_how_many_steps_there_were(conducted, monkeypatch):
    at_exit = []
    monkeypatch.setattr(conductor.atexit, "register", at_exit.append)
    monkeypatch.setattr(run_of_child, "EARLY_S", 0.0)
    here = conducted()
    here.framework.step(15)
    at_exit[0]()
    window, end, remark = records(here)[-3:]
    assert remark == Remark(text="kept")
    assert (window.num_steps, end.num_steps) == (9, 17)
    assert end.training_s > 0
    assert isinstance(end, End)


def test_a_fork_of_the_script_writes_nothing(conducted):
    here = conducted()
    here.framework.step(8)
    num = len(records(here))
    here.conductor._forget_in_fork()
    here.framework.step(30)
    here.conductor._at_exit()
    assert len(records(here)) == num
    assert here.framework.attached  # what the parent had is inherited as it is


# -- levers --------------------------------------------------------------------------------------------------------


def test_a_run_engages_its_levers_when_it_has_settled(conducted):
    here = conducted(levers=BF16)
    here.framework.step(5)
    assert not here.framework.levers
    here.framework.step()
    assert here.framework.levers == BF16
    (toggle,) = records(here, Toggle)
    assert (toggle.engaged, toggle.reason, toggle.step) == (BF16, "plan", 6)


def test_levers_that_cannot_be_engaged_fall_back_to_plain_and_this_is_recorded(conducted):
    here = conducted(levers=BF16, breaks={("engage", "bf16")})
    here.framework.step(20)
    (failure,) = records(here, Failure)
    assert (failure.stage, failure.error, failure.message) == ("engage", "RuntimeError", "engage is broken")
    assert not here.framework.levers
    assert here.framework.attached
    assert ready(here) == [-1]


def test_a_window_under_levers_that_cannot_be_engaged_is_answered_without_a_window(conducted):
    here = conducted(order(0, levers=BF16), order(1, num_steps=1), mode="trial", breaks={("engage", "bf16")})
    here.framework.step(12)
    assert ready(here) == [-1, 0, 1]
    assert [(f.stage, f.order) for f in records(here, Failure)] == [("engage", 0)]
    assert [w.order for w in records(here, Window)] == [1]


def test_levers_that_can_neither_be_engaged_nor_released_end_our_part(conducted):
    here = conducted(levers=BF16, breaks={("engage", "bf16"), ("engage",)})
    here.framework.step(20)
    assert [f.stage for f in records(here, Failure)] == ["engage", "release"]
    assert not here.framework.attached


# -- failures of our own -------------------------------------------------------------------------------------------

BOUNDARIES = ["settled", "facts", "evidence", "observe", "start_window", "end_window", "engage", "detach"]


@pytest.mark.parametrize("broken", BOUNDARIES)
def test_training_goes_on_wherever_we_break(conducted, broken):
    here = conducted(order(0, levers=THREADS, num_steps=2), order(1, num_steps=2), levers=BF16, breaks={broken})
    here.framework.step(100)
    assert here.framework.num_steps == 100
    here.conductor._at_exit()


@pytest.mark.parametrize(
    "broken", [*BOUNDARIES, "begin_capture", "compare", "scale", "begin_census", "end_census", "counterfactual"]
)
def test_a_trial_answers_every_order_wherever_it_breaks(conducted, broken):
    orders = (
        order(0, levers=THREADS),
        order(1, "census"),
        order(2, "compare"),
        order(3, "scaling"),
        order(4, num_steps=1),
    )
    here = conducted(*orders, mode="trial", breaks={broken})
    if broken == "engage":  # what cannot even be released cannot be measured
        with pytest.raises(Ended):
            here.framework.step(100)
        assert [f.stage for f in records(here, Failure)] == ["engage", "release"]
        return
    here.framework.step(100)
    if broken == "settled":  # it never stands at its first boundary, and nobody waits for that: why is said before
        assert {f.message for f in records(here, Failure)} == {"settled is broken"}
        assert {*ready(here)} == {-1} and len(records(here, Failure)) > conductor.MAX_PROBLEMS
        return
    if broken == "facts":
        assert [f.message for f in records(here, Failure)] == ["facts is broken"] and not records(here, Facts)
    assert ready(here) == [-1, 0, 1, 2, 3, 4]


class NoNumber:
    pass


@pytest.mark.parametrize("mode", ["run", "trial"])
def test_facts_that_cannot_be_written_are_named_and_all_else_is_recorded(conducted, monkeypatch, mode):
    here = conducted(order(0, levers=BF16, num_steps=2), mode=mode, levers=BF16)
    found = Facts(device="cpu", models=(), optimizers=(), loaders=(), num_threads=1, rank_mode=NoNumber())
    monkeypatch.setattr(here.framework, "facts", lambda: found)
    here.framework.step(100)
    (failed,) = records(here, Failure)
    assert (failed.stage, failed.error) == ("recorder", "TypeError")
    assert failed.message == f"Facts: `rank_mode` is `{__name__}.NoNumber`, not a plain number or text"
    here.conductor._at_exit()
    assert records(here, Window) and not records(here, Facts)
    assert here.framework.levers == BF16


def test_after_many_failures_of_our_own_the_script_is_left_to_itself(conducted):
    here = conducted()
    here.framework.step(8)
    for _ in range(conductor.MAX_PROBLEMS):
        here.conductor.on_failure("step", ValueError("again"))
    assert not here.framework.attached
    assert len(records(here, Failure)) == conductor.MAX_PROBLEMS


class Alarm:
    def __call__(self, number, frame):
        raise TimeoutError("the script's own limit")

    def method(self, number, frame):
        self(number, frame)


def handler(number, frame, more=None):
    raise TimeoutError("the script's own limit")


@pytest.mark.parametrize(
    "own",
    [handler, Alarm(), Alarm().method, functools.partial(handler, more=1)],
    ids=["function", "object", "method", "partial"],
)
def test_what_a_signal_handler_of_the_script_raises_while_we_are_at_it_is_the_scripts(conducted, monkeypatch, own):
    here = conducted(levers=BF16)
    former = signal.signal(signal.SIGALRM, own)
    monkeypatch.setattr(here.framework, "facts", lambda: signal.raise_signal(signal.SIGALRM))
    try:
        with pytest.raises(TimeoutError):
            here.framework.step(8)
    finally:
        signal.signal(signal.SIGALRM, former)


@pytest.mark.parametrize("raised", [TimeoutError, KeyboardInterrupt])
def test_an_order_during_which_the_script_is_interrupted_is_answered_and_the_next_one_carried_out(
    conducted, monkeypatch, raised
):
    here = conducted(levers=BF16)
    here.framework.step(10)

    def interrupt(number, frame):
        raise raised

    former = signal.signal(signal.SIGALRM, interrupt)
    engage = here.framework.engage
    monkeypatch.setattr(here.framework, "engage", lambda levers: engage(levers) and signal.raise_signal(signal.SIGALRM))
    here.pipe.waiting.append(order(0, num_steps=2, purpose="check"))
    try:
        with pytest.raises(raised):
            here.framework.step(1)
    finally:
        signal.signal(signal.SIGALRM, former)
    monkeypatch.setattr(here.framework, "engage", engage)
    here.pipe.waiting.append(order(1, levers=BF16, num_steps=2, purpose="check"))
    here.framework.step(10)
    assert ready(here) == [-1, 0, 1] and here.framework.levers == BF16


def test_an_exception_whose_text_breaks_is_recorded_by_its_name():
    class Nasty(Exception):
        def __str__(self):
            raise RuntimeError

    assert problems.failure("script", Nasty()).error == "Nasty"


@pytest.mark.parametrize(
    ("problem", "is_memory"),
    [
        (MemoryError(), True),
        (type("OutOfMemoryError", (RuntimeError,), {})("none is left"), True),
        (type("AcceleratorError", (RuntimeError,), {})("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("NCCL Error 1: unhandled cuda error, Cuda failure 2 'out of memory'"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: 9 bytes"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (OSError(errno.ENOENT, "out of memory"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (ValueError("this shop is out of memory"), False),
    ],
)
def test_an_error_that_says_that_memory_ran_out_is_recorded_as_such(problem, is_memory):
    assert problems.failure("step", problem).out_of_memory == is_memory


def test_an_exception_without_words_is_told_by_its_place():
    def check():
        raise AssertionError

    with pytest.raises(AssertionError) as raised:
        check()
    line = check.__code__.co_firstlineno + 1
    assert problems.failure("script", raised.value).message == f"line {line} of `test_child.py`"
    assert problems.failure("script", AssertionError()).message == ""


def test_the_place_of_an_exception_is_the_last_line_of_the_scripts_own_code_not_of_what_it_called():
    def own():
        json.loads("{")

    with pytest.raises(ValueError, match="Expecting") as raised:
        own()
    line = own.__code__.co_firstlineno + 1
    assert problems.failure("script", raised.value).place == f"{__file__}:{line}"
    assert problems.failure("script", ValueError()).place == ""


def test_the_place_of_a_syntax_error_is_where_it_is_written():
    with pytest.raises(SyntaxError) as raised:
        compile("x = 1\ny = (", "/home/me/train.py", "exec")
    assert problems.failure("script", raised.value).place == "/home/me/train.py:2"


# -- a record that cannot be kept ----------------------------------------------------------------------------------


def test_a_run_keeps_its_levers_when_its_folder_is_gone_before_the_first_step(conducted, tmp_path):
    here = conducted(levers=BF16, claim=str(tmp_path / "no" / "claim"), trace=str(tmp_path / "no" / "trace"))
    here.framework.step(20)
    assert here.framework.levers == BF16
    assert here.framework.depth == "off"


def test_a_run_keeps_its_levers_when_its_trace_can_no_longer_be_written(conducted):
    here = conducted(levers=BF16)
    here.framework.step(8)
    here.trace.unlink()
    here.trace.mkdir()
    here.framework.step(100)
    assert here.framework.levers == BF16
    assert here.framework.depth == "off"
    num = len(here.framework.calls)
    here.framework.step(100)
    assert len(here.framework.calls) == num  # nothing is looked at any more


def test_a_run_that_loses_its_trace_in_the_middle_of_a_check_goes_back_to_its_levers(conducted):
    here = conducted(order(0, levers={}, num_steps=50, purpose="check"), levers=BF16)
    here.framework.step(7)
    assert not here.framework.levers
    here.trace.unlink()
    here.trace.mkdir()
    here.framework.step(100)
    assert here.framework.levers == BF16


def test_a_plan_that_was_released_stays_released_when_the_trace_is_lost(conducted):
    here = conducted(order(0, levers={}, num_steps=1, skip_steps=0, purpose="run"), levers=BF16)
    here.framework.step(9)
    here.trace.unlink()
    here.trace.mkdir()
    here.framework.step(100)
    assert not here.framework.levers


def test_a_trial_that_cannot_write_ends_for_nobody_would_hear_it(conducted, capsys):
    here = conducted(mode="trial")
    here.framework.step(3)
    here.trace.unlink()
    here.trace.mkdir()
    with pytest.raises(Ended):
        here.framework.step(20)
    assert "the trace cannot be written" in capsys.readouterr().err


# -- the script's exceptions ---------------------------------------------------------------------------------------


def test_the_scripts_exception_is_recorded_and_shown_without_our_frames(conducted, capsys):
    here = conducted()
    here.framework.step()
    try:
        problems.failure(None, None, *"too many arguments")  # a frame of ours below the script's
    except TypeError as problem:
        here_frame = problem
    inner = _through_ours(ValueError("the script's own"), here_frame)
    sys.excepthook(type(inner), inner, inner.__traceback__)
    shown = capsys.readouterr().err
    assert shown.endswith("ValueError: the script's own\n")
    assert str(Path(problems.__file__).parent) not in shown
    assert [(f.stage, f.error) for f in records(here, Failure)] == [("script", "ValueError")]


def test_a_trial_that_fails_before_it_trains_says_why(conducted, tmp_path, capsys):
    here = conducted(mode="trial")
    sys.excepthook(ValueError, ValueError("too early"), None)
    assert [(f.stage, f.message) for f in records(here)] == [("script", "too early")]
    sys.excepthook = sys.__excepthook__
    (tmp_path / "claim-x").touch()  # and a helper of a script that trains says nothing
    helper = conducted(mode="trial")
    sys.excepthook(ValueError, ValueError("of a helper"), None)
    assert len(records(helper)) == 1
    assert "of a helper" in capsys.readouterr().err


def test_a_run_leaves_the_excepthook_alone_until_it_trains(conducted):
    here = conducted()
    assert sys.excepthook is sys.__excepthook__
    here.framework.step()
    assert sys.excepthook is not sys.__excepthook__


def _through_ours(problem, cause):
    """Raise an exception through a function that stands in a file of ours."""
    source = compile("def ours(call):\n    call()\n", problems.__file__, "exec")
    names = {}
    exec(source, names)

    def users():
        raise problem from cause

    try:
        names["ours"](users)
    except ValueError as raised:
        assert any(f.filename == problems.__file__ for f in traceback.extract_tb(raised.__traceback__))
        return raised


def test_our_frames_are_hidden_in_causes_contexts_and_groups_also_in_a_ring():
    first = _through_ours(ValueError("first"), None)
    second = _through_ours(ValueError("second"), first)
    first.__context__ = second
    group = ExceptionGroup("both", [second, _through_ours(ValueError("third"), None)])
    tracebacks.hide_ours(group)
    for problem in (first, second, *group.exceptions):
        names = [frame.filename for frame in traceback.extract_tb(problem.__traceback__)]
        assert names and problems.__file__ not in names


def test_an_excepthook_of_the_script_is_called_with_the_exception(conducted, monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "excepthook", lambda *what: seen.append(what))
    here = conducted()
    here.framework.step()
    problem = _through_ours(ValueError("x"), None)
    sys.excepthook(ValueError, problem, problem.__traceback__)
    assert seen[0][:2] == (ValueError, problem)
    assert all(f.filename != problems.__file__ for f in traceback.extract_tb(seen[0][2]))


def test_writes_outside_the_folders_of_a_trial_are_listed_once(conducted, monkeypatch, tmp_path):
    hooks = []
    monkeypatch.setattr(sys, "addaudithook", hooks.append)
    here = conducted(mode="trial", writable=(str(tmp_path / "mine"),))
    here.framework.step()
    for path in (tmp_path / "mine" / "a", tmp_path / "other", tmp_path / "other", "/dev/null"):
        hooks[0]("open", (str(path), "w", os.O_WRONLY))
    hooks[0]("open", (str(tmp_path / "read"), "r", os.O_RDONLY))
    hooks[0]("open", ("with\0nul", "w", os.O_WRONLY))
    hooks[0]("open", (7, "w", os.O_WRONLY))
    hooks[0]("exec", ())
    assert [json.loads(line)["path"] for line in here.trace.read_text().splitlines()[1:]] == [str(tmp_path / "other")]
