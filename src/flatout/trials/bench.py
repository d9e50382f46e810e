"""How is a script measured in throwaway children? One bench: a child that is started again whenever it is needed.

In: a script, levers, how many steps. Out: windows, agreements and counts as records. The script may end, crash or
hang at any moment; each is told apart, and only a plain script that cannot be measured is an error.
"""

from __future__ import annotations

import contextlib
import errno
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from flatout.child.orders import SessionSpec
from flatout.errors import Inconclusive, ScriptError, cannot_write
from flatout.frameworks.contract import Settings
from flatout.frameworks.lever import Lever
from flatout.judge.uneven_steps import usual_calls
from flatout.machine import foreign_cpu
from flatout.records.exported_models import ModelExport
from flatout.records.facts import Facts
from flatout.records.plan import Candidate
from flatout.records.trace import (
    FOREIGN_LIMIT,
    Agreement,
    Census,
    Header,
    Levers,
    Ready,
    Record,
    Refused,
    Scaling,
    Setting,
    Toggle,
    Window,
)
from flatout.run import isolation
from flatout.run.child_process import Child, Ended, Launch, session_files
from flatout.run.folder import NEEDED_BYTES
from flatout.run.script import Script
from flatout.run.trackers import QUIET_TRACKERS
from flatout.trials.budget import MAX_STEPS, WINDOW_S, Size, compiling_s, size_for
from flatout.trials.child_failures import (
    CandidateFailed,
    cannot_measure,
    cannot_record,
    cannot_release,
    not_released,
    raise_failures,
)
from flatout.trials.serving import Client
from flatout.trials.terms import Terms

WARM_UP_STEPS = 30
"""Gradients of a freshly initialised network say little about rounding (bf16 on a ResNet: slope 0.95 at step 0, 0.996
at step 36)."""

WARM_UP_LIMIT_S, WARM_UP_REST_S = 15.0, 3.0
FAR_TOO_LONG = 4
"""A window that takes so many times as long as it was to ends there, and the next ones are made shorter."""

MAX_RESTARTS = 200
MANY_ENDS = 3
"""After so many runs that were over it is said that they are short."""
COMPILE_LIMIT_S = 240.0
EXPORT_LIMIT_S = 900.0
TOO_LONG = 4
"""What compiles for so many times as long as it is expected to take is given up."""

MIN_LIMIT_S = 20.0


R = TypeVar("R", bound=Record)


class Bench:
    """A script under measurement."""

    def __init__(self, script: Script, run_folder: Path, levers: Mapping[str, Lever], terms: Terms) -> None:
        self.script = script
        self.run_folder = run_folder
        self.levers = levers
        self.terms = terms
        self.on_wait: Callable[[], None] | None = None
        self.cores_quota: float | None = None
        self.size = Size(num_steps=1, skip_steps=1, loader_skip_steps=3)
        self.header: Header | None = None
        self.facts: Facts | None = None
        self.windows: list[tuple[str, Window]] = []
        """Every window with the name of the child that measured it."""
        self.zero_s: dict[str, float | None] = {}
        """Where the clock of each child begins, on our own."""
        self.refused: dict[str, None] = {}
        self.written: dict[str, None] = {}
        self.warnings: dict[str, None] = {}
        self.longest_run_steps: int | None = None
        self.start_s: float | None = None
        self._child: Child | None = None
        self._client = Client(script, terms, run_folder, "")
        self._name, self._num_children, self._num_ends = "", 0, 0
        self._warm: set[str] = set()
        """Levers that have had the steps that they take for themselves."""
        self._num_steps = 0
        """Steps that the child had made when it last answered."""
        self._process_levers: dict[str, Mapping[str, Setting]] = {}
        self._scratch: Path | None = None
        self.step_guess_s = 0.5
        """What passes with a step, evaluation and checkpoints included."""
        self._training_guess_s = self.step_guess_s  # without them
        self.usual_calls: float | None = None
        """Calls of a usual step, where steps differ in time because they differ in calls."""
        self.lots = random.Random(0)
        """Draws which side of a pair goes first; the same in every run, and unrelated to what the machine does."""
        self.noise = 0.0
        """Standard deviation of the log ratio of two plain windows."""
        self.deadline_s = math.inf
        """`time.perf_counter` up to which a candidate may keep us waiting."""
        self.last_evidence: dict[str, str] = {}
        self.last_missing: dict[str, str] = {}
        self.unreleased = ""
        """What broke when a lever was to be taken back, until whoever engaged it has seen it."""
        self.answer: list[Record] = []
        """The records of the latest answer."""

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self, process_levers: Levers | None = None) -> None:
        """Start a child, with levers that need a new process, and wait for its first boundary.

        Raises:
            ScriptError: The plain script failed, or never trained.
            Inconclusive: What it does could not be recorded.
            CandidateFailed: It failed under process levers.
        """
        self.end()
        self._warm = set()
        self._process_levers = dict(process_levers or {})
        environment: dict[str, str] = {}
        for name, settings in self._process_levers.items():
            environment.update(self.levers[name].environment(settings))
        self._launch(environment)
        child = self._child
        assert child is not None
        try:
            records = child.ready(self.terms.start_limit_s, self._wait)
        except Ended as end:
            problem = self._no_start(end)
            self._after_end()
            if process_levers:
                raise CandidateFailed(end.sentence()) from None
            raise problem from None
        self._note(records)
        if self.header is None or self.facts is None:
            raise cannot_record(self.script, "what it does", records)
        if self.facts.not_measured:
            raise Inconclusive(
                f"steps on `{self.facts.device}` are not measured here",
                cause=self.facts.not_measured,
                hint="train on a CPU or a CUDA device; `flatout run` runs the script as it is",
            )
        for note in isolation.notes(self._scratch) if self._scratch is not None else ():
            self.warnings[note] = None

    def _launch(self, environment: Mapping[str, str]) -> None:
        self._num_children += 1
        if self._num_children > MAX_RESTARTS:
            raise Inconclusive(
                f"`{self.script.name}` ended {MAX_RESTARTS} times before enough was measured",
                cause="one run of it makes too few training steps",
                hint="give it more epochs for `tune`; the plan then serves the shorter run as well",
            )
        self._name = str(self._num_children)
        self._client = Client(self.script, self.terms, self.run_folder, self._name)
        command, self._scratch = self._client.beside(self.script.command), None
        if self.terms.isolate:
            self._scratch = self.run_folder / f"scratch-{self._name}"
            command = isolation.isolate(
                command, folder=Path.cwd(), script_folder=self.script.folder, run_folder=self.run_folder,
                scratch=self._scratch,
            )  # fmt: skip
        session = SessionSpec(
            mode="trial",
            **session_files(self.run_folder, self._name),  # type: ignore[arg-type]
            levers=self._process_levers,
            script=self.script.name,
            arguments=self.script.arguments,
            writable=isolation.writable(self._scratch) if self._scratch is not None else (),
            settings=Settings(
                cache_folder=str(self.run_folder.resolve() / "compiled"),
                store_memory_bytes=self.terms.store_memory_bytes,
                infers=self.terms.infers,
                goal=self.terms.compared_by,
            ),
            cores_quota=self.cores_quota,
            flatout_started_s=time.perf_counter(),
        )
        variables = {**QUIET_TRACKERS, **self.terms.environment, **environment}
        told: dict[str, Any] = {"session": session, "environment": variables}
        self._child = Child(Launch(command=command, run_folder=self.run_folder, name=self._name, **told)).__enter__()

    def end(self) -> None:
        """End the child, and discard what it wrote."""
        if self._child is not None:
            self._child.end()
        self._after_end()

    def taken_now(self) -> float | None:
        """The share of the CPU that others use while the child waits for an order; None where it is not known."""
        own = self._child.session_id if self._child is not None and self._child.alive else None
        return foreign_cpu.at_this_moment(own, cores=self.cores_quota)

    def leave(self) -> None:
        """End the child; whoever asks next has one without levers that need a process."""
        self.end()
        self._process_levers = {}

    def _after_end(self) -> None:
        child, self._child, self._num_steps = self._child, None, 0
        self.refused |= {r.path: None for r in child.records if isinstance(r, Refused)} if child is not None else {}
        scratch, self._scratch = self._scratch, None
        if scratch is not None and scratch.exists():
            for write in isolation.written(scratch):
                if len(self.written) < 1000:
                    self.written[write.path] = None
            isolation.discard(scratch)

    def _raise_if_full(self) -> None:
        """A full disk ends a child in many ways, and none of them says so."""
        with contextlib.suppress(OSError):
            if shutil.disk_usage(self.run_folder).free < NEEDED_BYTES:
                raise cannot_write(self.run_folder, OSError(errno.ENOSPC, ""))

    def _no_start(self, end: Ended) -> Exception:
        self._raise_if_full()
        told = self._scratch is not None and self._scratch.exists() and not end.cut_off
        refusal = isolation.refusal(self._scratch) if told and self._scratch is not None else None
        if refusal is not None:
            return refusal
        return self._not_measured(end)

    def _wait(self) -> None:
        self._client.look()
        if self.on_wait is not None:
            self.on_wait()

    def _not_measured(self, end: Ended) -> ScriptError:
        """Why the plain script gave nothing; of one that was too slow also whether others kept it from the CPU."""
        taken = self.taken_now() if end.hung else None
        return self._client.why_no_calls(end) or cannot_measure(self.script, end, self.terms.start_limit_s, taken)

    def _note(self, records: list[Record]) -> None:
        for record in records:
            if isinstance(record, Header):
                self.header = record
                self.start_s = record.start_s
                self.zero_s[self._name] = record.zero_monotonic_s
            elif isinstance(record, Facts):
                self.facts = record
            elif isinstance(record, Window):
                self.windows.append((self._name, self._at_usual_work(record)))
            elif isinstance(record, Ready):
                self._num_steps = record.num_steps

    def _at_usual_work(self, window: Window) -> Window:
        """The window, with how much its steps had to do where that tells how long they took."""
        if self.usual_calls is None or not window.num_steps:
            return window
        num = math.fsum(window.num_calls) or window.num_steps  # empty where each step makes one
        return replace(window, work=num / window.num_steps / self.usual_calls)

    # -- orders --------------------------------------------------------------------------------------------------

    def _ask(self, levers: Levers, limit_s: float, /, **what: Any) -> list[Record]:
        """Give an order; a script that has merely ended is started again, one that broke under levers has failed."""
        unreleased = ""
        for _attempt in range(3):
            if self._child is None or not self._child.alive:
                self.start(self._process_levers)
            child = self._child
            assert child is not None
            try:
                pause_s = self._limited(levers, self.terms.start_limit_s)
                records = child.ask(limit_s, self.on_wait, pause_s, levers=levers, **what)
            except Ended as end:
                unreleased = not_released(child.records)
                self._ended(end, levers)
                if "num_steps" in what:
                    what["num_steps"] = min(what["num_steps"], self.size.num_steps)
                continue
            self._note(records)
            self.answer = records
            self.warnings |= raise_failures(records, levers)
            return records
        if unreleased:
            raise cannot_release(self.script, unreleased)
        raise Inconclusive(
            f"`{self.script.name}` ends before {self.size.num_steps} steps can be measured",
            cause="one run of it makes too few training steps",
            hint="give it more epochs for `tune`; the plan then serves the shorter run as well",
        )

    def _ended(self, end: Ended, levers: Levers) -> None:
        self._raise_if_full()
        unreleased = not_released(self._child.records if self._child is not None else ())
        self._after_end()
        if end.finished:
            self.longest_run_steps = max(self.longest_run_steps or 0, end.num_steps)
            self._fit_into_a_run()
            self._told_of_end()
            return
        self.unreleased = unreleased or self.unreleased
        if levers and set(levers) != {"free_data"}:
            raise CandidateFailed(unreleased or end.sentence(), in_doubt=end.hung or end.out_of_memory)
        if unreleased:  # a fresh child is plain; whose lever it was is judged by whoever engaged it
            return
        raise self._not_measured(end)

    def window(
        self,
        levers: Levers,
        *,
        purpose: str,
        observe: str = "ends",
        skip: int | None = None,
        num_steps: int | None = None,
        patience_s: float = 0.0,
    ) -> Window:
        """Measure one window, of the usual size without a number of steps.

        `patience_s` is how long to wait at least, where nothing is known of the steps yet.

        Raises:
            CandidateFailed: The script broke under the levers.
            Inconclusive: It always ends too early, or its plain steps could not be recorded.
        """
        self._warm_up(levers)
        num_steps, skip = num_steps or self.size.num_steps, self.size.skip_steps if skip is None else skip
        self._make_room(num_steps + skip)
        records = self._ask(
            levers,
            self._limit_s(levers, max(30.0 + 20 * self.size.num_steps * self.step_guess_s, patience_s)),
            kind="window", purpose=purpose, observe=observe, num_steps=num_steps, skip_steps=skip,
            limit_s=FAR_TOO_LONG * max(num_steps * self._training_guess_s, WINDOW_S),
        )  # fmt: skip
        found = self.windows[-1][1] if any(isinstance(r, Window) for r in records) else None
        if found is None and not levers:
            raise cannot_record(self.script, "its steps", records)
        if found is None:
            raise CandidateFailed("could not be engaged")
        self.last_evidence = {k: v for r in records if isinstance(r, Toggle) for k, v in r.evidence.items()}
        self.last_missing = {k: v for r in records if isinstance(r, Toggle) for k, v in r.missing.items()}
        return found

    def _limit_s(self, levers: Levers, plain_s: float) -> float:
        """How long an answer may take: with levers no longer than the budget lasts."""
        if any(self.levers[name].compiles for name in levers if name in self.levers):
            plain_s += min(COMPILE_LIMIT_S, TOO_LONG * compiling_s(Candidate(levers=levers), self.levers, self.facts))
        return self._limited(levers, plain_s)

    def _limited(self, levers: Levers, plain_s: float) -> float:
        return min(plain_s, max(self.deadline_s - time.perf_counter(), MIN_LIMIT_S)) if levers else plain_s

    def _warm_up(self, levers: Levers) -> None:
        """Steps that a lever takes for itself in each process, before anything is measured under it."""
        new = {n for n in levers if n in self.levers and self.levers[n].warm_up_steps} - self._warm
        self._warm |= new
        if num_steps := max((self.levers[name].warm_up_steps for name in new), default=0):
            self.window(levers, purpose="warm-up", skip=0, num_steps=num_steps)

    def agreement(self, levers: Levers, checks: tuple[str, ...]) -> Agreement:
        """Compare the levers with plain at the next step; of a process that was started again, after its warm-up."""
        half_a_run = WARM_UP_STEPS if self.longest_run_steps is None else self.longest_run_steps // 2
        wanted = min(WARM_UP_STEPS, int(WARM_UP_LIMIT_S / self.step_guess_s), half_a_run)
        if self._num_steps < wanted:
            self.window({}, purpose="warm-up", skip=0, num_steps=wanted - self._num_steps)
        found = self._told(Agreement, levers, kind="compare", purpose=" ".join(checks))
        return found or Agreement(levers=levers, differences=(), missing="the comparison gave no answer")

    @property
    def infers(self) -> bool:
        """Whether the script trains nothing, so that its steps are calls."""
        return self.facts is not None and self.facts.infers

    def census(self) -> Census | None:
        """Count one step's operations."""
        return self._told(Census, {}, kind="census")

    def scaling(self) -> Scaling | None:
        """Replay one step's calls at half the batch."""
        return self._told(Scaling, {}, kind="scaling")

    def exported(self, to: str) -> ModelExport | None:
        """Have files of the models written for another runtime, in `EXPORTED` within the run folder."""
        records = self._ask({}, EXPORT_LIMIT_S, kind="export", purpose=to)
        return next((r for r in reversed(records) if isinstance(r, ModelExport)), None)

    def _told(self, wanted: type[R], levers: Levers, **what: Any) -> R | None:
        records = self._ask(levers, self._limit_s(levers, 60.0 + 100 * self.step_guess_s), **what)
        return next((r for r in reversed(records) if isinstance(r, wanted)), None)

    def settle(self) -> None:
        """Warm up, and choose the window size from the step time seen."""
        assert self.facts is not None
        fitting = int(WARM_UP_LIMIT_S / max(self.facts.warm_up_step_s, 1e-5))
        self.size = Size(num_steps=min(max(fitting, 1), 5), skip_steps=0, loader_skip_steps=3)
        first = self.window({}, purpose="warm-up", patience_s=self.terms.start_limit_s)
        self.guess(first.training_step_s)
        rest = WARM_UP_STEPS - 5
        affordable = int(WARM_UP_REST_S / self.step_guess_s)  # numbers are compared later, after many more steps
        if min(rest, affordable) > 0:
            self.size = replace(self.size, num_steps=min(rest, affordable))
            first = self.window({}, purpose="warm-up")
        self.usual_calls = usual_calls([window for _, window in self.windows])
        if self.usual_calls is not None:
            self.warnings[
                f"steps differ in how often they call the model: times are those of {self.usual_calls:.0f} calls"
            ] = None
        self._resize(self._at_usual_work(first).training_step_s)

    def guess(self, training_step_s: float) -> None:
        """Expect a training step to take so long, and what lies between steps as long as in all windows so far."""
        num_steps = sum(window.num_steps for _, window in self.windows)
        outside_s = math.fsum(math.fsum(window.outside_s) for _, window in self.windows)
        self._training_guess_s = max(training_step_s, 1e-5)
        self.step_guess_s = self._training_guess_s + outside_s / max(num_steps, 1)

    def _resize(self, training_step_s: float) -> None:
        self.guess(training_step_s)
        loaders = self.facts.loaders if self.facts is not None else ()
        num_batches = loaders[0].num_batches if loaders else None
        self.size = size_for(self._training_guess_s, num_batches, self.step_guess_s - self._training_guess_s)
        if self.facts is not None and self.facts.device != "cpu":  # one step fills the device's queue again
            self.size = replace(self.size, skip_steps=max(self.size.skip_steps, 1))
        self._fit_into_a_run()

    def _fit_into_a_run(self) -> None:
        if self.longest_run_steps is not None:
            self.size = self.size.within(self.longest_run_steps)

    def _make_room(self, num_steps: int) -> None:
        """Start the script again where it will have ended before it has made so many more steps."""
        longest = self.longest_run_steps
        if longest is not None and longest - self._num_steps < num_steps <= longest // 2:
            self.end()
            self._told_of_end()

    @property
    def starting_step_s(self) -> float:
        """What starting the script again costs each step, where its runs are over before enough is measured."""
        return (self.start_s or 0.0) / self.longest_run_steps if self.longest_run_steps else 0.0

    def pair_s(self, skip_steps: int | None = None) -> float:
        """Seconds that a pair of windows takes, with its part of the starts that a short script needs."""
        num_steps = self.size.num_steps + (self.size.skip_steps if skip_steps is None else skip_steps)
        return 2 * num_steps * (self.step_guess_s + self.starting_step_s)

    def hindrances(self) -> list[str]:
        """What has made measuring slow beside the steps themselves: starts of the script, others on the machine."""
        found, taken = [], [w.foreign_fraction for _, w in self.windows if w.foreign_fraction is not None]
        if self.starting_step_s > self.step_guess_s:
            found.append(f"a run of it has {self.longest_run_steps} steps, and each start takes {self.start_s:.1f} s")
        if taken and math.fsum(taken) / len(taken) > FOREIGN_LIMIT:
            found.append(f"others used {100 * math.fsum(taken) / len(taken):.0f} % of the CPU")
        return found

    def _told_of_end(self) -> None:
        self._num_ends += 1
        if self._num_ends == MANY_ENDS:
            self.warnings[
                "one run of it is short, so it was started again and again: more epochs, and more is seen"
            ] = None

    def resize_after(self, window: Window) -> bool:
        """Give windows other numbers of steps where this plain one came out far too short or long; whether that was so.

        A machine that is busy while the script warms up lets its steps look longer than they are; one that becomes busy
        later would have us wait for windows of minutes.
        """
        took_s, planned_s = sum(window.step_s), self.size.num_steps * self.step_guess_s
        too_short = took_s < WINDOW_S / 2 and self.size.num_steps < MAX_STEPS
        if not too_short and took_s <= FAR_TOO_LONG * max(planned_s, WINDOW_S):
            return False
        former = self.size.num_steps
        self._resize(window.training_step_s)
        return self.size.num_steps > former if too_short else self.size.num_steps < former


@contextlib.contextmanager
def opened(bench: Bench) -> Iterator[Bench]:
    """The bench, ended whatever happens."""
    try:
        yield bench
    finally:
        bench.end()
