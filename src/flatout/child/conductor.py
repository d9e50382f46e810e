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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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
from flatout.records.ranks import RankPlace, leave, refuse
from flatout.records.trace import FORMAT, End, Failure, Header, Inputs, Ready, Refused, Remark, Toggle
from flatout.records.trace_file import Writer

if TYPE_CHECKING:
    from flatout.child.files_read import FilesRead
    from flatout.child.sample_run import SampleRun
    from flatout.records.ranks import Terms

SETTLING_STEPS = 3
"""Steps before anything is measured: allocators, caches and lazily made state."""

MEASURED_SETTLING_STEPS = 3
"""Steps whose mean gives the parent a first idea of the step time."""

EARLY_S = 10.0
"""Until this age of a run its steps are written down every second, later every 5 s: a run that is killed counts."""

STEPS_APART = 8
"""Steps of a window in a run whose steps are taken apart."""

EFFECT_STEPS = 2
"""So many steps after a run's levers were engaged their effect is looked for first; a run may be over soon."""

MOST_SKIP_S = 2.0
"""In a check steps are left out for so long at most, whatever their number."""

CATCH_UP_EVERY_S = 0.05
"""So long ends of steps are only collected where nothing but their time is wanted; orders are looked for as often."""

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
    Conductor(spec, framework, place).begin()


def _join(framework: Framework, place: RankPlace, terms: Terms) -> None:
    """Become one of the ranks; a rank that cannot would train alone, and so ends here."""
    try:
        framework.join(place, terms)
    except Exception as problem:  # noqa: BLE001
        error, cause = "a rank could not join the others", f"{type(problem).__name__}: {problem}"
        refuse(terms, place.rank, error, cause=cause, hint="`--hang-timeout` says how long ranks wait for each other")


class Conductor:
    """Measures windows, engages levers and answers orders, at step boundaries only."""

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
        self._unproven = set(spec.levers) if spec.mode == "run" else set()
        """Levers of the run that have shown no effect yet."""
        self._files = _files_read(spec)
        self._sample = _sample(spec, framework, self._rank)

    # -- start ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Attach; the trace is claimed at the first step, so that a helper process claims none."""
        os.register_at_fork(after_in_child=self._forget_in_fork)
        if self._files is not None:
            self._files.watch()
        if self.spec.mode == "trial":
            self._watch_writes()
            self._watch_end()  # a script that fails before it trains is not measured, and the reason is wanted
        self.framework.prepare(
            self.spec.levers, endless=self.spec.endless, trial=self.spec.mode == "trial", learns=self.spec.learns
        )
        self.framework.attach(self)

    def _forget_in_fork(self) -> None:
        self._sleeping = True
        self._catch_up_s = 0.0

    def _claim(self) -> bool:
        """Become the process that is recorded; False where another one is."""
        try:
            records = self.spec.per_process or claim(self.spec.claim, self._pid, again=self.spec.mode != "trial")
        except OSError:  # no run folder any more: the levers are engaged all the same
            records = False
        else:
            # The ranks of one training job go together, so the others engage the levers too, without a word.
            if not records and (self.spec.mode == "trial" or not self.framework.facts().distributed):
                self._give_up()
                return False
        self._claimed = True
        if records:
            self._begin_record()
        if self.spec.mode != "trial":
            self._watch_end()
        return True

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
            try:
                path = os.path.realpath(arguments[0])
                if path not in seen and not (path + os.sep).startswith(writable):
                    seen.add(path)
                    self._write(Refused(path=path))
            except Exception:  # noqa: BLE001  what an audit hook raises would refuse the script's own open()
                return

        if self.spec.writable:
            sys.addaudithook(audit)

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
        if self._trace is None and self._settled_at is not None:
            self._rest()
        elif self._may_only_collect():
            self._catch_up_s = now_s + CATCH_UP_EVERY_S
        if self._sample is not None and self._sample.is_over(self.on_failure):
            self._at_exit()
            leave(0)

    def _may_only_collect(self) -> bool:
        """Whether of the next steps nothing but their ends is wanted."""
        window, settled_at = self._window, self._settled_at
        if window is None or settled_at is None or self._order is not None or self._sleeping:
            return False
        return window.order.observe == "off" and self.num_steps >= settled_at + EFFECT_STEPS

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
        if stage == "release" and self.spec.mode == "trial":  # nothing measured here from now on would mean anything
            os._exit(1)
        if self._num_problems >= MAX_PROBLEMS and self.spec.mode != "trial":
            self._give_up()
        elif self._num_problems >= MAX_PROBLEMS and self._settled_at is None:
            self._write(Ready(order=-1, num_steps=self.num_steps))  # it would be waited for in vain, and why is known

    def _abandon_order(self) -> None:
        """Answer an order that broke, so that the parent does not wait for it; what it began is forgotten."""
        order, self._order = self._order, None
        self._window, self._awaiting, self._skip = None, None, 0
        if order is not None:
            self._write(Ready(order=order.number, num_steps=self.num_steps))

    def _rest(self) -> None:
        """Nothing is recorded (any more): go on under the run's levers, without a look at steps."""
        try:
            if self._checking:
                self.framework.engage(self.spec.levers)
            self.framework.coast()
            self._sleeping = True
        except Exception:  # noqa: BLE001
            self._give_up()

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
            if self.spec.mode == "run" and self.spec.levers:
                self._toggle(self.spec.levers, "plan")
            if self.spec.mode != "trial":
                self._open_free_window()
        finally:  # whatever broke: a parent that waits must learn that we stand here
            self._write(Ready(order=-1, num_steps=self.num_steps))

    def _write_facts(self, warm_up_step_s: float) -> None:
        try:
            self._write(dataclasses.replace(self.framework.facts(), warm_up_step_s=warm_up_step_s))
        except Exception as problem:  # noqa: BLE001  the rest is recorded, and the levers of a run do not depend on it
            self.on_failure("recorder", problem)

    # -- orders --------------------------------------------------------------------------------------------------

    def _next(self) -> None:
        waits = self.spec.mode == "trial"
        while self._order is None and self._trace is not None and not self._sleeping:
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
        if self.spec.mode != "trial":
            self._open_free_window()

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

    def _open_free_window(self) -> None:
        """In a run: windows without an order, so that the trace shows the whole run at little cost."""
        if self._window is None and self._trace is not None and self._order is None:
            engaged = self.framework.engaged()
            age_s = time.perf_counter() - self._started_s
            limit_s = 1.0 if age_s < EARLY_S else 5.0
            observe: Literal["phases", "ends", "off"] = "ends" if self._expects_orders() else "off"
            if self.spec.takes_apart:
                observe = "phases"
            order = Order(
                number=-1, kind="window", purpose="run", levers=engaged, limit_s=limit_s, observe=observe,
                num_steps=STEPS_APART if self.spec.takes_apart else 2000,
            )  # fmt: skip
            self._open_window(order)

    def _expects_orders(self) -> bool:
        """Whether more than the time of steps is wanted of the run, or orders are to be expected at any moment."""
        awaits_first = bool(self.spec.levers or self.spec.learns) and not self._num_windows
        return self.spec.keep_losses or awaits_first

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
            if self.spec.mode == "trial":  # a throwaway process, and nobody can hear it
                print(f"flatout: the trace cannot be written: {problem}", file=sys.stderr, flush=True)
                os._exit(1)


def _files_read(spec: SessionSpec) -> FilesRead | None:
    """What lists the files that the script reads, where that is wanted."""
    if not spec.list_read:
        return None
    from flatout.child.files_read import FilesRead

    return FilesRead(spec.list_read, without=(str(Path(spec.trace).parent),))


def _sample(spec: SessionSpec, framework: Framework, rank: int) -> SampleRun | None:
    """What ends a run that is only a sample of the script's."""
    if spec.stop_after is None:
        return None
    from flatout.child.sample_run import SampleRun

    return SampleRun(spec, framework, rank)


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
