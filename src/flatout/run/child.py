"""What happens at a step boundary in the user's process? The conductor of one child.

In: the session (`session.json`) and, in a trial, orders from the parent. Out: the trace. In a trial the child waits at
a step boundary for its next order and is killed there in the end; in a run it never waits. Whatever goes wrong here
is written down and training goes on.

Imported in the user's process: the standard library, and the framework that the script itself imported.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from flatout import __version__
from flatout.frameworks.contract import Framework
from flatout.records import from_json
from flatout.run import foreign_cpu
from flatout.run.orders import Order, SessionSpec, decode
from flatout.run.pipe import OrderPipe
from flatout.trace import FORMAT, End, Failure, Header, Ready, Refused, Window
from flatout.trace_file import Writer

SETTLING_STEPS = 3
"""Steps before anything is measured: allocators, caches and lazily made state."""

MEASURED_SETTLING_STEPS = 3
"""Steps whose mean gives the parent a first idea of the step time."""

T = TypeVar("T")


def enter(session: str) -> None:
    """Called once the framework has been imported: attach to it as the session says."""
    spec = from_json(SessionSpec, json.loads(Path(session).read_text(encoding="utf-8")), where="session")
    from flatout.frameworks.pytorch.adapter import PyTorch

    conductor = Conductor(spec, PyTorch(spec.cache_folder))
    conductor.begin()


class Conductor:
    """Measures windows, engages levers and answers orders, at step boundaries only."""

    def __init__(self, spec: SessionSpec, framework: Framework) -> None:
        self.spec = spec
        self.framework = framework
        self.num_steps = 0
        self._writer: Writer | None = None
        self._pipe = OrderPipe(spec.orders)
        self._order: Order | None = None
        self._awaiting: Callable[[], None] | None = None
        self._window: OpenWindow | None = None
        self._num_windows = 0
        self._skip = 0
        self._settled_at: int | None = None
        self._first_step_s: list[float] = []
        self._last_step_at_s = 0.0
        self._started_s = time.perf_counter()
        self._num_problems = 0
        self._pid = os.getpid()
        self._sleeping = False

    # -- start ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Attach; the trace is claimed at the first step, so that a helper process claims none."""
        os.register_at_fork(after_in_child=self._forget_in_fork)
        if self.spec.mode == "trial":
            self._watch_writes()
        self.framework.prepare(self.spec.levers, endless=self.spec.endless, trial=self.spec.mode == "trial")
        self.framework.attach(self)

    def _forget_in_fork(self) -> None:
        self._sleeping = True

    def _claim(self) -> bool:
        trace = Path(self.spec.trace)
        try:
            if self.spec.per_process:
                trace = trace.with_suffix(f".{os.environ.get('RANK', '0')}.{self._pid}.jsonl")
            else:
                os.close(os.open(self.spec.claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            self._writer = Writer(trace)
        except OSError:
            self._sleeping = True
            self.framework.detach()
            return False
        affinity = tuple(sorted(os.sched_getaffinity(0))) if hasattr(os, "sched_getaffinity") else None
        self._writer.write(
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
                rank=_number("RANK", 0),
                world_size=_number("WORLD_SIZE", 1),
                num_threads=self.framework.facts().num_threads,
                affinity=affinity,
                start_s=time.time() - self.spec.flatout_started_unix_s,
            )
        )
        if not self.spec.per_process:
            self._pipe.open()
        self._watch_end()
        return True

    def _watch_end(self) -> None:
        former = sys.excepthook

        def excepthook(kind: type[BaseException], problem: BaseException, traceback: Any) -> None:
            sys.excepthook = former
            self._write(failure("script", problem))
            former(kind, problem, without_ours(traceback))

        sys.excepthook = excepthook
        atexit.register(self._at_exit)

    def _at_exit(self) -> None:
        if self._sleeping or os.getpid() != self._pid:
            return
        self._close_window()
        self._write(End(num_steps=self.num_steps, wall_s=time.perf_counter() - self._started_s))

    def _watch_writes(self) -> None:
        """List writes that the isolation will refuse."""
        writable = tuple(os.path.realpath(folder) + os.sep for folder in (*self.spec.writable, "/dev", "/proc"))
        seen: set[str] = set()

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            if event != "open" or self._sleeping or not isinstance(arguments[0], str):
                return
            flags = arguments[2] if isinstance(arguments[2], int) else 0
            if not flags & (os.O_WRONLY | os.O_RDWR) or len(seen) >= 20:
                return
            path = os.path.realpath(arguments[0])
            if path not in seen and not (path + os.sep).startswith(writable):
                seen.add(path)
                self._write(Refused(path=path))

        if writable:
            sys.addaudithook(audit)

    # -- steps ---------------------------------------------------------------------------------------------------

    def on_step(self, now_s: float) -> None:
        """A step has ended."""
        if self._sleeping:
            return
        self.num_steps += 1
        if self._writer is None and not self._claim():
            return
        try:
            self._at_boundary(now_s)
        except Exception as problem:  # noqa: BLE001  training goes on, whatever broke here
            self.on_failure("recorder", problem)

    def on_update(self) -> None:
        """Gradients are complete: answer an order that waits for them."""
        if self._sleeping or self._awaiting is None:
            return
        answer, self._awaiting = self._awaiting, None
        try:
            answer()
        except Exception as problem:  # noqa: BLE001
            self.on_failure("compare", problem)
        self._finish_order()

    def on_failure(self, stage: str, problem: BaseException) -> None:
        """Note it; after several of our own failures, stop recording for good."""
        self._num_problems += 1
        self._write(failure(stage, problem, order=self._order.number if self._order else -1))
        if self._num_problems >= 20 and self.spec.mode != "trial":
            self._sleeping = True
            self.framework.detach()

    def _at_boundary(self, now_s: float) -> None:
        window = self._window
        if window is not None:
            phases, outside_s = self.framework.end_step()
            window.add(now_s, phases, outside_s)
            if window.complete:
                self._close_window()
                if self._order is not None:
                    self._finish_order()
        elif self._settled_at is None:
            self._settle(now_s)
        elif self._skip > 0:
            self._skip -= 1
            if self._skip == 0 and self._order is not None:
                self._open_window(self._order)
        if self._settled_at is not None:
            self._next()

    def _settle(self, now_s: float) -> None:
        if self.num_steps > SETTLING_STEPS:
            self._first_step_s.append(now_s - self._last_step_at_s)
        self._last_step_at_s = now_s
        if not self.framework.settled() or len(self._first_step_s) < MEASURED_SETTLING_STEPS:
            return
        self._settled_at = self.num_steps
        warm_up_step_s = sum(self._first_step_s) / len(self._first_step_s)
        self._write(dataclasses.replace(self.framework.facts(), warm_up_step_s=warm_up_step_s))
        if self.spec.mode == "run" and self.spec.levers:
            self._toggle(self.spec.levers, "plan")
        if self.spec.mode != "trial":
            self._open_free_window()
        self._write(Ready(order=-1, num_steps=self.num_steps))

    # -- orders --------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        waits = self.spec.mode == "trial"
        while self._order is None and not self._sleeping:
            line = self._pipe.read(wait=waits)
            if line is None:
                if waits and self._pipe.closed:
                    os._exit(0)  # the parent is gone: a trial has no other purpose
                return
            self._begin_order(decode(line))

    def _begin_order(self, order: Order) -> None:
        if order.kind == "stop":
            os._exit(0)
        self._close_window()
        self._order = order
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
        if self.spec.mode != "trial":
            self._open_free_window()

    def _begin_window(self, order: Order) -> None:
        levers = {name: settings for name, settings in order.levers.items() if name != "free_data"}
        if not self._toggle(levers, order.purpose):
            self._finish_order()
            return
        self.framework.observe("off")
        self._skip = order.skip_steps
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

    def _toggle(self, levers: Any, reason: str) -> bool:
        try:
            toggle = self.framework.engage(levers)
        except Exception as problem:  # noqa: BLE001
            self.on_failure("engage", problem)
            self.framework.engage({})
            return False
        if toggle.engaged or toggle.released:
            self._write_numbered(toggle, self._order.number if self._order else -1, reason=reason, step=self.num_steps)
        return True

    # -- windows -------------------------------------------------------------------------------------------------

    def _open_window(self, order: Order) -> None:
        window = OpenWindow(order, index=self._num_windows, started_s=0.0)
        window.foreign = foreign_cpu.take(os.getsid(0))
        self._num_windows += 1
        self._window = window
        self.framework.observe(order.observe)
        now_s = self.framework.start_window()
        window.restart(now_s, now_s - self._started_s)

    def _open_free_window(self) -> None:
        """In a run: windows without an order, so that the trace shows the whole run at little cost."""
        if self._window is None and self._writer is not None and self._order is None:
            engaged = self.framework.engaged()
            order = Order(number=-1, kind="window", purpose="run", levers=engaged, num_steps=2000, limit_s=5.0)
            self._open_window(order)

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
            fraction = foreign_cpu.fraction(window.foreign, after) if after is not None else None
        evidence, missing = self.framework.evidence()
        self._write(window.record(found, fraction))
        if window.order.purpose == "trial" and (evidence or missing):
            from flatout.trace import Toggle

            self._write(
                Toggle(
                    engaged={},
                    released=(),
                    took_s=0.0,
                    step=self.num_steps,
                    evidence=evidence,
                    missing=missing,
                    reason="evidence",
                    order=window.order.number,
                )
            )

    # -- writing -------------------------------------------------------------------------------------------------

    def _write_numbered(self, record: Any, number: int, **changes: Any) -> None:
        if record is not None:
            self._write(dataclasses.replace(record, order=number, **changes))

    def _write(self, record: Any) -> None:
        if self._writer is None or self._sleeping:
            return
        try:
            self._writer.write(record)
        except OSError:  # a full disk must not stop training
            self._sleeping = True
            self.framework.detach()


class OpenWindow:
    """A window that is being measured."""

    def __init__(
        self, order: Order, *, index: int, started_s: float, when_done: Callable[[], None] | None = None
    ) -> None:
        self.order = order
        self.index = index
        self.when_done = when_done
        self.foreign: Any = None
        self.step_s: list[float] = []
        self._outside_s: list[float] = []
        self._phases: dict[str, list[float]] = {}
        self._last_s = started_s
        self._begun_s = started_s
        self._start_on_trace_s = 0.0

    def restart(self, now_s: float, on_trace_s: float) -> None:
        """The first step begins now."""
        self._last_s = self._begun_s = now_s
        self._start_on_trace_s = on_trace_s

    def add(self, now_s: float, phases: dict[str, float], outside_s: float) -> None:
        """A step has ended."""
        self.step_s.append(now_s - self._last_s)
        self._outside_s.append(outside_s)
        self._last_s = now_s
        if self.order.observe == "phases":
            number = len(self.step_s) - 1
            for name, seconds in phases.items():
                if name != "unattributed":
                    row = self._phases.setdefault(name, [])
                    row.extend([0.0] * (number - len(row)))
                    row.append(seconds)

    @property
    def complete(self) -> bool:
        """Whether it has its steps, or its time is over."""
        return len(self.step_s) >= self.order.num_steps or self._last_s - self._begun_s >= self.order.limit_s

    def record(self, found: Any, foreign_fraction: float | None) -> Window:
        """The window as it goes into the trace."""
        num = len(self.step_s)
        return Window(
            index=self.index,
            purpose=self.order.purpose,
            levers=self.order.levers,
            observe=self.order.observe,
            step_s=tuple(self.step_s),
            outside_s=tuple(self._outside_s),
            start_s=self._start_on_trace_s,
            phases={name: tuple(row + [0.0] * (num - len(row))) for name, row in self._phases.items()},
            device_phases=found.get("device_phases", {}),
            losses=tuple(found.get("losses", ())),
            foreign_fraction=foreign_fraction,
            recompilations=found.get("recompilations", 0),
            peak_memory_bytes=found.get("peak_memory_bytes"),
            new_epochs=found.get("new_epochs", 0),
            order=self.order.number,
        )


def _number(variable: str, otherwise: int) -> int:
    """What a launcher set, as far as it is a number."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else otherwise


def failure(stage: str, problem: BaseException, order: int = -1) -> Failure:
    """The record of an exception."""
    return Failure(
        stage=stage,
        error=type(problem).__name__,
        message=str(problem)[:2000],
        order=order,
        filename=str(problem.filename) if isinstance(problem, OSError) and problem.filename else None,
        out_of_memory=isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError",
    )


def without_ours(traceback: Any) -> Any:
    """The traceback with flatout's own frames taken out."""
    here = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    kept = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(here):
            kept.append(traceback)
        traceback = traceback.tb_next
    for this, following in zip(kept, [*kept[1:], None], strict=True):
        this.tb_next = following
    return kept[0] if kept else None
