"""What happens at a step boundary in the user's process? The conductor of one child.

In: the session (`session.json`) and orders from the parent. Out: the trace. What a trial and a run share is here: a
trial (`trial.py`) waits at a step boundary for its next order and is killed there in the end; a run (`run.py`) never
waits. Whatever goes wrong here is written down and training goes on.

Imported in the user's process: the standard library, and the framework that the script itself imported.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flatout import __version__
from flatout.child.first_trainer import claim
from flatout.child.open_window import OpenWindow
from flatout.child.orders import Order, SessionSpec, answer, decode
from flatout.child.pipe import OrderPipe
from flatout.child.problems import failure
from flatout.frameworks.contract import Framework, NotReleased, Step
from flatout.guest.interruptions import raised_by_handler
from flatout.guest.tracebacks import hide_ours
from flatout.machine import foreign_cpu
from flatout.machine.gpu_watch import GpuWatch
from flatout.records.ranks import RankPlace
from flatout.records.trace import FORMAT, End, Failure, Header, Inputs, Ready, Remark, Toggle
from flatout.records.trace_file import append

if TYPE_CHECKING:
    from flatout.child.files_read import FilesRead

SETTLING_STEPS = 3
"""Steps before anything is measured: allocators, caches and lazily made state."""

MEASURED_SETTLING_STEPS = 3
"""Steps after these whose mean gives the parent a first idea of the step time."""

EFFECT_STEPS = 2
"""So many steps after a run's levers were engaged their effect is looked for first; a run may be over soon."""

MOST_SKIP_S = 2.0
"""In a check steps are left out for so long at most, whatever their number."""

MAX_PROBLEMS = 20
"""After so many failures of our own the script is left to itself."""


class Conductor:
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
        self._awaiting: Callable[[], bool] | None = None
        self._window: OpenWindow | None = None
        self._awaited: Order | None = None
        """The window that is opened when so many steps have been skipped."""
        self._least_skip = 0
        """Where a device has a queue, 1: it was waited for, and a step that fills it again takes longer than others."""
        self._num_windows = self._skip = self._num_problems = 0
        self._settled_at: int | None = None
        self._first_end_s = self._last_end_s = self._settling_since_s = self._skips_since_s = 0.0
        self._started_s = time.perf_counter()
        self._early: list[Failure] = []
        """Failures from before the first step that was seen."""
        self._pid, self._sleeping = os.getpid(), False
        self._unproven: set[str] = set()
        """Levers of a run that have shown no effect yet."""
        self._files: FilesRead | None = None
        self._gpus: GpuWatch | None = None
        self._gpu_names: tuple[str, ...] = ()

    # -- start ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Attach; the trace is claimed at the first step, so that a helper process claims none."""
        os.register_at_fork(after_in_child=self._forget_in_fork)
        if self.spec.list_read:
            from flatout.child.files_read import FilesRead

            self._files = FilesRead(self.spec.list_read, without=(str(Path(self.spec.trace).parent),))
        self.framework.prepare(self.spec.levers, trial=self.waits, learns=self.spec.learns)
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

    # What a trial and a run do in their own ways.

    def _on_claimed(self) -> None:
        """This process is the one that is recorded."""

    def _on_settled(self) -> None:
        """The first steps are over, and facts are written."""

    def _on_answered(self) -> None:
        """An order has been carried out."""

    def _on_boundary(self) -> None:
        """All of a step's work is done."""

    def _on_not_released(self) -> None:
        """A lever could not be taken back."""

    def _on_full_disk(self, problem: OSError) -> None:
        """The trace cannot be written any more."""

    def _on_many_problems(self) -> None:
        """Too much of ours has failed."""

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
                start_s=time.perf_counter() - self.spec.flatout_started_s,
                zero_monotonic_s=self._started_s,
            )
        )
        early, self._early = self._early, []
        for record in early:
            self._write(record)

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
            since_s = self.framework.training_since_s()  # the first step was perhaps one that was missed
            self._write(
                End(
                    num_steps=self.num_steps + self.framework.num_missed_steps(),
                    wall_s=time.perf_counter() - self._started_s,
                    training_s=self._last_end_s
                    - min(self._first_end_s, self._first_end_s if since_s is None else since_s),
                )
            )
            if self._files is not None:
                self._write(Inputs(paths=self._files.found()))
            for text in self.framework.remarks():
                self._write(Remark(text=text))
        except Exception:  # noqa: BLE001  the script has ended well, and nothing more is to be said
            return

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
            if not answer():
                self._awaiting = answer  # it needs a further step
                return
        except Exception as problem:  # noqa: BLE001
            self.on_failure("compare", problem)
        try:
            self._finish_order()
        except Exception as problem:  # noqa: BLE001
            self.on_failure("recorder", problem)

    def on_pass_end(self) -> None:
        """Nothing: nobody waits for the next step."""

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
        self._window, self._awaiting, self._awaited = None, None, None
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
        elif self._awaited is not None:
            for_long = self._checking and step.ended_s - self._skips_since_s > MOST_SKIP_S  # each may compile anew
            self._skip = 0 if for_long else self._skip - 1
            if self._skip <= 0:
                self._open_window(self._awaited)
        if self._unproven and self._settled_at is not None and self.num_steps == self._settled_at + EFFECT_STEPS:
            self._note_effects(*self.framework.evidence(), order=-1)
        if self._settled_at is not None:
            self._next()

    def _settle(self, now_s: float) -> None:
        num_measured = self.num_steps - SETTLING_STEPS
        if num_measured <= 0:
            self._settling_since_s = now_s
        if not self.framework.settled() or num_measured < MEASURED_SETTLING_STEPS:
            return
        self._settled_at = self.num_steps
        try:
            step_s = (now_s - self._settling_since_s) / num_measured
            try:
                facts = self.framework.facts()
                self._least_skip, self._gpu_names = int(facts.device != "cpu"), facts.gpus
                self._write(dataclasses.replace(facts, warm_up_step_s=facts.warm_up_step_s or step_s))
            except Exception as problem:  # noqa: BLE001  the rest is recorded, and a run's levers do not depend on it
                self.on_failure("recorder", problem)
            self._on_settled()
        finally:  # whatever broke: a parent that waits must learn that we stand here
            self._write(Ready(order=-1, num_steps=self.num_steps))

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
        self._close_window()
        self._order, self._awaited = order, None
        self._checking = order.purpose == "check"
        self.framework.counterfactual("free_data", order.kind == "window" and "free_data" in order.levers)
        if order.kind == "window":
            self._begin_window(order)
            return
        self._toggle({}, order.kind)
        if order.kind == "census":
            self.framework.observe("off")
            self.framework.begin_census()
            self._window = OpenWindow(
                order,
                index=-1,
                started_s=time.perf_counter(),
                when_done=lambda: self._write_numbered(self.framework.end_census(), order.number),
            )
        else:
            self.framework.begin_capture()
            self._awaiting = lambda: self._answer(order)

    def _answer(self, order: Order) -> bool:
        found = answer(order, self.framework, Path(self.spec.trace))
        self._write_numbered(found, order.number)
        return found is not None or order.kind == "scaling"

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
        self._await_window(order)

    def _toggle(self, levers: Any, reason: str, *, noted: bool = False) -> bool:
        """Engage exactly these; `noted`: it is written down also where nothing had to be changed."""
        try:
            toggle = self.framework.engage(levers)
        except Exception as problem:  # noqa: BLE001
            self.on_failure("release" if isinstance(problem, NotReleased) else "engage", problem)
            try:
                self.framework.engage({})
            except Exception as further:  # noqa: BLE001
                self.on_failure("release", further)
                self._give_up()
            return False
        if toggle.engaged or toggle.released or noted:
            self._write_numbered(toggle, self._order.number if self._order else -1, reason=reason, step=self.num_steps)
        return True

    # -- windows -------------------------------------------------------------------------------------------------

    def _await_window(self, order: Order) -> None:
        """Open it after the steps that are to be skipped."""
        self._skip, self._skips_since_s = max(order.skip_steps, self._least_skip), self._last_end_s
        self._awaited = order
        if self._skip <= 0:
            self._open_window(order)

    def _open_window(self, order: Order) -> None:
        self._awaited = None
        window = OpenWindow(order, index=self._num_windows, started_s=0.0)
        if order.number >= 0:  # nobody judges by free windows, and a look at all processes is not free
            window.foreign = foreign_cpu.take(os.getsid(0))
            window.gpus = self._gpus = self._gpus or GpuWatch(gpus=self._gpu_names)
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
        self._write_numbered(found.get("profile"), number)
        if window.order.purpose in ("trial", "learn", "check") or self._unproven & {*evidence}:
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
        try:
            append(record, self._trace)
        except OSError as problem:  # a full disk must not stop training
            self._trace = None
            self._on_full_disk(problem)


def _number(variable: str, otherwise: int) -> int:
    """What a launcher set, as far as it is a number."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else otherwise
