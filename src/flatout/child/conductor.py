"""What happens at a step boundary in the user's process? The conductor of one child.

In: the session (`session.json`) and orders from the parent. Out: the trace. What a trial and a run share is here: a
trial (`trial.py`) waits at a step boundary for its next order and is killed there in the end; a run (`run.py`) never
waits. Whatever goes wrong here is written down and training goes on.

Imported in the user's process: the standard library, and the framework that the script itself imported.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flatout import __version__
from flatout.child.claim import claim
from flatout.child.open_window import OpenWindow
from flatout.child.orders import Order, SessionSpec, decode
from flatout.child.pipe import OrderPipe
from flatout.child.problems import failure
from flatout.frameworks import kind_of_module
from flatout.frameworks.contract import Framework, NotReleased, Settings, Step
from flatout.guest import lifeline
from flatout.guest.interruptions import raised_by_handler
from flatout.guest.tracebacks import hide_ours
from flatout.machine import foreign_cpu
from flatout.records.as_json import from_json
from flatout.records.ranks import RankPlace, refuse
from flatout.records.trace import FORMAT, End, Failure, Header, Inputs, Ready, Remark, Toggle
from flatout.records.trace_file import Writer

if TYPE_CHECKING:
    from flatout.child.files_read import FilesRead
    from flatout.records.ranks import Terms

SETTLING_STEPS = 3
"""Steps before anything is measured: allocators, caches and lazily made state."""

MEASURED_SETTLING_STEPS = 3
"""Steps whose mean gives the parent a first idea of the step time."""

EFFECT_STEPS = 2
"""So many steps after a run's levers were engaged their effect is looked for first; a run may be over soon."""

MOST_SKIP_S = 2.0
"""In a check steps are left out for so long at most, whatever their number."""

MAX_PROBLEMS = 20
"""After so many failures of our own the script is left to itself."""


def enter(session: str, module: str, rank: bytes | None = None) -> None:
    """Called once a framework has been imported, as `module`: attach to it as the session says.

    Args:
        session: Path of `session.json`.
        module: What was imported.
        rank: What launched us; None where we are no rank.
    """
    spec = from_json(SessionSpec, json.loads(Path(session).read_text(encoding="utf-8")), where="session")
    if spec.lives_with is not None:
        lifeline.hold(spec.lives_with)
    if spec.ranks is not None and rank is None:  # a process that a rank has started
        return
    framework = kind_of_module(module).make(
        Settings(
            cache_folder=spec.cache_folder,
            capture_bytes=spec.capture_bytes,
            store_memory_bytes=spec.store_memory_bytes,
            admits_random=spec.admits_random,
        )
    )
    if spec.seed_run is not None:
        framework.vary_seeds(spec.seed_run)
    if spec.keep_losses:
        framework.keep_losses()
    place = None if rank is None else RankPlace.of(rank.decode())
    if place is not None and spec.ranks is not None:
        _join(framework, place, spec.ranks)
    conductor_of(spec, framework, place).begin()


def conductor_of(spec: SessionSpec, framework: Framework, rank: RankPlace | None = None) -> Conductor:
    """The conductor of a trial, or of a run."""
    if spec.mode == "trial":
        from flatout.child.trial import Trial

        return Trial(spec, framework, rank)
    from flatout.child.run import Run

    return Run(spec, framework, rank)


def _join(framework: Framework, place: RankPlace, terms: Terms) -> None:
    """Become one of the ranks; a rank that cannot would train alone, and so ends here."""
    try:
        framework.join(place, terms)
    except Exception as problem:  # noqa: BLE001
        error, cause = "a rank could not join the others", f"{type(problem).__name__}: {problem}"
        refuse(terms, place.rank, error, cause=cause, hint="`--hang-timeout` says how long ranks wait for each other")


class Conductor(ABC):
    """Measures windows, engages levers and answers orders, at step boundaries only."""

    waits: ClassVar[bool]
    """Whether it waits at each boundary for its next order; else it takes what has come."""

    def __init__(self, spec: SessionSpec, framework: Framework, rank: RankPlace | None = None) -> None:
        self.spec = spec
        self._rank = _number("RANK", 0) if rank is None else rank.rank
        self._world = _number("WORLD_SIZE", 1) if rank is None else rank.world
        self.framework = framework
        self.num_steps = 0
        self._claimed = False
        self._trace: Path | None = None
        """Where records go; None where nothing is recorded (any more)."""
        self._pipe = OrderPipe(None if spec.per_process else spec.orders)
        self._order: Order | None = None
        self._checking = False
        """Whether the levers may be other than the run's own, because the plan is being checked."""
        self._ends_s: list[float] = []
        """Ends of steps of the present window that are not yet in it."""
        self._catch_up_s = 0.0
        """Until this moment steps are only counted; 0 where each is looked at."""
        self._awaiting: Callable[[], None] | None = None
        self._window: OpenWindow | None = None
        self._num_windows = 0
        self._skip = 0
        self._skips_since_s = 0.0
        self._settled_at: int | None = None
        self._first_step_s: list[float] = []
        self._first_end_s = self._last_end_s = self._former_end_s = 0.0
        self._started_s = time.perf_counter()
        self._num_problems = 0
        self._early: list[Failure] = []
        """Failures from before the first step that was seen."""
        self._pid = os.getpid()
        self._sleeping = False
        self._unproven: set[str] = set()
        """Levers of a run that have shown no effect yet."""
        self._files = _files_read(spec)

    # -- start ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Attach; the trace is claimed at the first step, so that a helper process claims none."""
        os.register_at_fork(after_in_child=self._forget_in_fork)
        if self._files is not None:
            self._files.watch()
        self.framework.prepare(self.spec.levers, endless=self.spec.endless, trial=self.waits, learns=self.spec.learns)
        self.framework.attach(self)

    def _forget_in_fork(self) -> None:
        self._sleeping = True
        self._catch_up_s = 0.0

    def _claim(self) -> bool:
        """Become the process that is recorded; False where another one is."""
        try:
            records = self.spec.per_process or claim(self.spec.claim, self._pid, again=not self.waits)
        except OSError:  # no run folder any more: the levers are engaged all the same
            records = False
        else:
            # The ranks of one training job go together, so the others engage the levers too, without a word.
            if not records and (self.waits or not self.framework.facts().distributed):
                self._give_up()
                return False
        self._claimed = True
        if records:
            self._begin_record()
        self._on_claimed()
        return True

    def _on_claimed(self) -> None:  # noqa: B027  a trial has nothing to do
        """This process is the one that is recorded."""

    @abstractmethod
    def _on_settled(self) -> None:
        """The first steps are over, and facts are written."""

    @abstractmethod
    def _on_answered(self) -> None:
        """An order has been carried out."""

    @abstractmethod
    def _on_full_disk(self, problem: OSError) -> None:
        """The trace cannot be written any more."""

    @abstractmethod
    def _on_many_problems(self) -> None:
        """Too much of ours has failed."""

    def _on_not_released(self) -> None:  # noqa: B027  a run goes on
        """A lever could not be taken back."""

    def _on_boundary(self) -> None:  # noqa: B027  a trial waits within it
        """All of a step's work is done."""

    def _begin_record(self) -> None:
        trace = Path(self.spec.trace)
        if self.spec.per_process:
            trace = trace.with_suffix(f".{self._rank}.{self._pid}.jsonl")
        self._trace = trace
        self._write(
            Header(
                format=FORMAT,
                flatout=__version__,
                started_unix_s=time.time(),
                script=self.spec.script,
                arguments=self.spec.arguments,
                python=sys.version.split()[0],
                framework=self.framework.name,
                framework_version=self.framework.version,
                pid=self._pid,
                rank=self._rank,
                world_size=self._world,
                num_threads=self._num_threads(),
                affinity=_affinity(),
                start_s=time.perf_counter() - self.spec.flatout_started_s,
                zero_monotonic_s=self._started_s,
            )
        )
        early, self._early = self._early, []
        for record in early:
            self._write(record)
        self._pipe.open()

    def _num_threads(self) -> int:
        """0 where the facts cannot be told; that is said where they are due, behind the header."""
        try:
            return self.framework.facts().num_threads
        except Exception as problem:
            if raised_by_handler(problem):
                raise
            return 0

    def _watch_end(self) -> None:
        former = sys.excepthook

        def excepthook(kind: type[BaseException], problem: BaseException, traceback: Any) -> None:
            try:
                if not self._claimed and not os.path.exists(self.spec.claim):
                    self._trace = Path(self.spec.trace)
                self._write(failure("script", problem))
                hide_ours(problem)
                traceback = problem.__traceback__
            except Exception:  # noqa: BLE001  the user's own problem is what must be shown
                pass
            former(kind, problem, traceback)

        sys.excepthook = excepthook
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        if self._sleeping or os.getpid() != self._pid:
            return
        try:
            self._catch_up()
            self._close_window()
            num_steps = self.num_steps + self.framework.num_missed_steps()
            wall_s = time.perf_counter() - self._started_s
            self._write(End(num_steps=num_steps, wall_s=wall_s, training_s=self._training_s()))
            if self._files is not None:
                self._write(Inputs(paths=self._files.found()))
            for text in self.framework.remarks():
                self._write(Remark(text=text))
        except Exception:  # noqa: BLE001  the script has ended well, and nothing more is to be said
            return

    def _training_s(self) -> float:
        """From the end of the first step to the end of the last; the first was perhaps one that was missed."""
        since_s = self.framework.training_since_s()
        return self._last_end_s - min(self._first_end_s, self._first_end_s if since_s is None else since_s)

    # -- steps ---------------------------------------------------------------------------------------------------

    def on_step(self, step: Step) -> None:
        """A step has ended."""
        now_s = step.ended_s
        if now_s < self._catch_up_s:
            self._ends_s.append(now_s)
            return
        if self._sleeping:
            return
        self._catch_up()
        self.num_steps += 1
        self._last_end_s = now_s
        if self.num_steps == 1:
            self._first_end_s = now_s
        try:
            if self._claimed or self._claim():
                self._at_boundary(step)
        except Exception as problem:  # noqa: BLE001  training goes on, whatever broke here
            try:
                self.on_failure("recorder", problem)
            finally:
                self._abandon_order()
        except BaseException:  # Ctrl-C, which the script may catch and go on
            self._abandon_order()
            raise
        self._on_boundary()

    def _catch_up(self) -> None:
        """Put into the window what was only collected."""
        self._catch_up_s = 0.0
        if self._ends_s:
            ends_s, self._ends_s = self._ends_s, []
            self.num_steps += len(ends_s)
            self._last_end_s = ends_s[-1]
            if self._window is not None:
                self._window.add_all(ends_s)

    def on_update(self) -> None:
        """Gradients are complete: answer an order that waits for them."""
        if self._sleeping or self._awaiting is None:
            return
        answer, self._awaiting = self._awaiting, None
        try:
            answer()
        except Exception as problem:  # noqa: BLE001
            self.on_failure("compare", problem)
        try:
            self._finish_order()
        except Exception as problem:  # noqa: BLE001
            self.on_failure("recorder", problem)

    def on_failure(self, stage: str, problem: BaseException) -> None:
        """Note it; after several of our own failures, stop recording for good.

        Raises:
            Exception: The problem itself, where it is the script's: a signal handler of its own raised it while our
                code was running.
        """
        if raised_by_handler(problem):
            raise problem
        self._num_problems += 1
        self._write(failure(stage, problem, order=self._order.number if self._order else -1))
        if stage == "release":
            self._on_not_released()
        if self._num_problems >= MAX_PROBLEMS:
            self._on_many_problems()

    def _abandon_order(self) -> None:
        """Answer an order that broke, so that the parent does not wait for it; what it began is forgotten."""
        order, self._order = self._order, None
        self._window, self._awaiting, self._skip = None, None, 0
        if order is not None:
            self._write(Ready(order=order.number, num_steps=self.num_steps))

    def _give_up(self) -> None:
        """Leave the script to itself."""
        self._sleeping = True
        try:
            self.framework.detach()
        except Exception:  # noqa: BLE001  nothing is left to try
            return

    def _at_boundary(self, step: Step) -> None:
        window = self._window
        if window is not None:
            window.add(step)
            if window.complete:
                self._close_window()
                self._finish_order()
        elif self._settled_at is None:
            self._settle(step.ended_s)
        elif self._skip > 0:
            self._skip = 0 if self._has_skipped_long(step.ended_s) else self._skip - 1
            if self._skip == 0 and self._order is not None:
                self._open_window(self._order)
        if self._unproven and self._settled_at is not None and self.num_steps == self._settled_at + EFFECT_STEPS:
            self._note_effects(*self.framework.evidence(), order=-1)
        if self._settled_at is not None:
            self._next()

    def _has_skipped_long(self, now_s: float) -> bool:
        """Whether the steps of the user's run that are not measured have taken long: each may compile anew."""
        return self._checking and now_s - self._skips_since_s > MOST_SKIP_S

    def _settle(self, now_s: float) -> None:
        if self.num_steps > SETTLING_STEPS:
            self._first_step_s.append(now_s - self._former_end_s)
        self._former_end_s = now_s
        if not self.framework.settled() or len(self._first_step_s) < MEASURED_SETTLING_STEPS:
            return
        self._settled_at = self.num_steps
        try:
            self._write_facts(warm_up_step_s=sum(self._first_step_s) / len(self._first_step_s))
            self._on_settled()
        finally:  # whatever broke: a parent that waits must learn that we stand here
            self._write(Ready(order=-1, num_steps=self.num_steps))

    def _write_facts(self, warm_up_step_s: float) -> None:
        try:
            self._write(dataclasses.replace(self.framework.facts(), warm_up_step_s=warm_up_step_s))
        except Exception as problem:  # noqa: BLE001  the rest is recorded, and the levers of a run do not depend on it
            self.on_failure("recorder", problem)

    # -- orders --------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        while self._order is None and self._trace is not None and not self._sleeping:
            line = self._pipe.read(wait=self.waits)
            if line is None:
                if self.waits and self._pipe.closed:
                    os._exit(0)  # the parent is gone: a trial has no other purpose
                return
            self._begin_order(decode(line))

    def _begin_order(self, order: Order) -> None:
        if order.kind == "stop":
            os._exit(0)
        self._close_window()
        self._order = order
        self._checking = order.purpose == "check"
        self.framework.counterfactual("free_data", order.kind == "window" and "free_data" in order.levers)
        begin = {
            "window": self._begin_window,
            "compare": self._begin_compare,
            "scaling": self._begin_scaling,
            "census": self._begin_census,
            "release": self._begin_release,
        }[order.kind]
        begin(order)

    def _finish_order(self) -> None:
        if self._order is not None:
            self._write(Ready(order=self._order.number, num_steps=self.num_steps))
            self._order = None
        self._on_answered()

    def _begin_window(self, order: Order) -> None:
        levers = {name: settings for name, settings in order.levers.items() if name != "free_data"}
        if not self._toggle(levers, order.reason or order.purpose, noted=bool(order.reason)):
            self._finish_order()
            return
        self.framework.observe("off")
        self._skip, self._skips_since_s = order.skip_steps, self._last_end_s
        if self._skip <= 0:
            self._open_window(order)

    def _begin_compare(self, order: Order) -> None:
        self._toggle({}, "compare")
        self.framework.begin_capture()
        checks = tuple(order.purpose.split())
        self._awaiting = lambda: self._write_numbered(self.framework.compare(order.levers, checks), order.number)

    def _begin_scaling(self, order: Order) -> None:
        self._toggle({}, "scaling")
        self.framework.begin_capture()
        self._awaiting = lambda: self._write_numbered(self.framework.scale(), order.number)

    def _begin_census(self, order: Order) -> None:
        self._toggle({}, "census")
        self.framework.observe("off")
        self.framework.begin_census()
        self._awaiting = None
        self._window = OpenWindow(
            order, index=-1, started_s=time.perf_counter(), when_done=lambda: self._end_census(order)
        )

    def _end_census(self, order: Order) -> None:
        self._write_numbered(self.framework.end_census(), order.number)

    def _begin_release(self, order: Order) -> None:
        self._toggle({}, order.purpose or "release")
        self._finish_order()

    def _toggle(self, levers: Any, reason: str, *, noted: bool = False) -> bool:
        """Engage exactly these; `noted`: it is written down also where nothing had to be changed."""
        try:
            toggle = self.framework.engage(levers)
        except Exception as problem:  # noqa: BLE001
            self.on_failure("release" if isinstance(problem, NotReleased) else "engage", problem)
            self._release_all()
            return False
        if toggle.engaged or toggle.released or noted:
            self._write_numbered(toggle, self._order.number if self._order else -1, reason=reason, step=self.num_steps)
        return True

    def _release_all(self) -> None:
        try:
            self.framework.engage({})
        except Exception as problem:  # noqa: BLE001
            self.on_failure("release", problem)
            self._give_up()

    # -- windows -------------------------------------------------------------------------------------------------

    def _open_window(self, order: Order) -> None:
        window = OpenWindow(order, index=self._num_windows, started_s=0.0)
        if order.number >= 0:  # nobody judges by free windows, and a look at all processes is not free
            window.foreign = foreign_cpu.take(os.getsid(0))
        self._num_windows += 1
        self._window = window
        if order.observe == "off":
            self.framework.coast()
        else:
            self.framework.observe(order.observe)
        now_s = self.framework.start_window()
        window.restart(now_s, now_s - self._started_s)

    def _close_window(self) -> None:
        window, self._window = self._window, None
        if window is None:
            return
        if window.when_done is not None:
            window.when_done()
            return
        if not window.step_s:
            return
        found = self.framework.end_window()
        fraction = None
        if window.foreign is not None:
            after = foreign_cpu.take(os.getsid(0))
            fraction = foreign_cpu.fraction(window.foreign, after, cores=self.spec.cores_quota)
        evidence, missing = self.framework.evidence()
        record = window.record(found, fraction)
        self._write(record)
        number, num_steps = window.order.number, record.num_steps
        if found.get("stacks") is not None:
            wall_s, levers = sum(record.step_s), window.order.levers
            self._write_numbered(found["stacks"], number, num_steps=num_steps, wall_s=wall_s, levers=levers)
        if found.get("host_reads") is not None:
            self._write_numbered(found["host_reads"], number, num_steps=num_steps, wall_s=record.training_s)
        if window.order.purpose in ("trial", "learn") or self._unproven & {*evidence}:
            self._note_effects(evidence, missing, window.order.number)

    def _note_effects(self, evidence: Mapping[str, str], missing: Mapping[str, str], order: int) -> None:
        self._unproven -= {*evidence}
        if evidence or missing:
            self._write(
                Toggle(
                    engaged={},
                    released=(),
                    took_s=0.0,
                    step=self.num_steps,
                    evidence=evidence,
                    missing=missing,
                    reason="evidence",
                    order=order,
                )
            )

    # -- writing -------------------------------------------------------------------------------------------------

    def _write_numbered(self, record: Any, number: int, **changes: Any) -> None:
        if record is not None:
            self._write(dataclasses.replace(record, order=number, **changes))

    def _write(self, record: Any) -> None:
        if self._trace is None and not self._claimed and isinstance(record, Failure) and not self._sleeping:
            self._early.append(record)  # before the first step; written when it is known that there is a trace
        if self._trace is None or self._sleeping:
            return
        # Opened for each record, which are rare: a descriptor kept open could be closed by the script and become a
        # file of its own, into which we would then write.
        try:
            writer = Writer(self._trace)
            try:
                writer.write(record)
            finally:
                writer.close()
        except OSError as problem:  # a full disk must not stop training
            self._trace = None
            self._on_full_disk(problem)


def _files_read(spec: SessionSpec) -> FilesRead | None:
    """What lists the files that the script reads, where that is wanted."""
    if not spec.list_read:
        return None
    from flatout.child.files_read import FilesRead

    return FilesRead(spec.list_read, without=(str(Path(spec.trace).parent),))


def _affinity() -> tuple[int, ...] | None:
    """The logical processors of this process; None where there is no such thing, or none may be asked for."""
    try:
        return tuple(sorted(os.sched_getaffinity(0)))
    except (OSError, AttributeError):
        return None


def _number(variable: str, otherwise: int) -> int:
    """What a launcher set, as far as it is a number."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else otherwise
