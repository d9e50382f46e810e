"""How does the user's own run go on under a plan? In the foreground, as the very process that plain Python would be.

In: a script and levers. Out: the exit code of the script, its trace, and what was measured on the way. The parent
only listens: it has the first windows alternate between plan and plain where levers can be toggled, and has the plan
released where it is slower. Signals, terminal and exit status are the script's.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from flatout.errors import RecordError
from flatout.plan import Lever
from flatout.run.launch import POLL_S, Launch, environment_for, session_files, write_session
from flatout.run.orders import Order, SessionSpec, encode
from flatout.trace import End, Facts, Failure, Levers, Ready, Record, Window
from flatout.trace_file import Follower

CHECK_PAIRS = 6
CHECK_WINDOW_S = 0.3
CHECK_LIMIT_S = 1.0
"""A window of the check ends here at the latest: plain may be many times slower than the plan."""

FOREIGN_LIMIT = 0.10
"""A window in which others used more than this share of the cores says nothing about the plan."""

COMPILE_SKIP_STEPS = 3
FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT)
PR_SET_PDEATHSIG = 1


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run in the foreground came to.

    Attributes:
        exit_code: As `subprocess` reports it; negative for a signal.
        num_steps: Training steps made.
        steps_s: Wall seconds from the first to the last of them.
        plan_s: Step times of the windows under the plan, paired with `plain_s`.
        plain_s: Step times of the windows without it.
        released: Whether the plan was released because it was slower here.
        engaged: What was engaged in the end.
        failures: What went wrong on our side.
        facts: What the script turned out to do.
        evidence: Lever to proof.
        num_processes: Processes that trained, under a launcher.
    """

    num_processes: int = 0
    num_busy: int = 0
    """Windows of the check that others disturbed."""
    exit_code: int = 0
    num_steps: int = 0
    steps_s: float = 0.0
    plan_s: list[float] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)
    released: bool = False
    engaged: bool = False
    failures: list[Failure] = field(default_factory=list)
    facts: Facts | None = None
    evidence: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreground:
    """What to run, and how.

    Attributes:
        command: What is executed.
        key: What the plan file calls the script.
        arguments: The script's own.
        run_folder: Where its trace goes.
        levers: What to engage.
        registry: All levers by name.
        toggle: Whether levers may be toggled to check the plan in this very run.
    """

    command: tuple[str, ...]
    key: str
    arguments: tuple[str, ...]
    run_folder: Path
    levers: Levers
    registry: Mapping[str, Lever]
    toggle: bool = True
    cache_folder: str | None = None
    """Where the trials kept compiled kernels."""
    launcher: bool = False
    """Whether the command starts the training processes, of which each writes a trace of its own."""


def run(what: Foreground) -> Outcome:
    """Run the script to its end."""
    session = SessionSpec(
        mode="run",
        **session_files(what.run_folder, "run"),  # type: ignore[arg-type]
        levers=what.levers,
        per_process=what.launcher,
        script=what.key,
        arguments=what.arguments,
        cache_folder=what.cache_folder,
        flatout_started_unix_s=time.time(),
    )
    environment: dict[str, str] = {}
    for name, settings in what.levers.items():
        environment.update(what.registry[name].environment(settings))
    launch = Launch(
        command=what.command, session=session, run_folder=what.run_folder, name="run", environment=environment
    )
    session_path = write_session(launch)
    os.mkfifo(session.orders or "")
    orders = os.open(session.orders or "", os.O_RDWR | os.O_CLOEXEC)
    try:
        return _Watch(what, session, orders).watch(launch, session_path)
    finally:
        os.close(orders)


class _Watch:
    """Listens to one run, and checks its plan."""

    def __init__(self, what: Foreground, session: SessionSpec, orders: int) -> None:
        self._what = what
        self._orders = orders
        self._follower = Follower(session.trace)
        self._outcome = Outcome()
        self._number = 0
        self._sides: list[Levers] = []
        self._last: Window | None = None
        self._kept: Levers = {n: s for n, s in what.levers.items() if what.registry[n].toggles != "step"}

    def watch(self, launch: Launch, session_path: Path) -> Outcome:
        """Start the process, listen until it ends, and take over its exit status."""
        process = subprocess.Popen(
            list(launch.command),
            cwd=launch.folder,
            env=environment_for(session_path, launch.environment),
            preexec_fn=_die_with_parent,
        )
        restore = _forward_signals(process)
        try:
            while process.poll() is None:
                self._listen()
                time.sleep(POLL_S if self._sides else 5 * POLL_S)
        finally:
            restore()
        self._listen()
        if self._what.launcher:
            self._gather()
        self._outcome.exit_code = process.returncode
        return self._outcome

    def _gather(self) -> None:
        """A launcher's children have each written a trace: the steps of the first stand for all."""
        for path in sorted(self._what.run_folder.glob("trace-run.*.jsonl")):
            self._outcome.num_processes += 1
            if self._outcome.num_processes == 1:
                self._follower = Follower(path)
                self._listen()

    def _listen(self) -> None:
        try:
            for record in self._follower.new():
                self._note(record)
        except RecordError:  # a torn trace costs the summary, not the run
            return

    def _note(self, record: Record) -> None:
        outcome = self._outcome
        if isinstance(record, Window):
            outcome.num_steps = max(outcome.num_steps, 0) + record.num_steps
            outcome.steps_s += sum(record.step_s)
            self._last = record
        elif isinstance(record, Facts):
            outcome.facts = record
        elif isinstance(record, Failure):
            if record.stage != "script":
                outcome.failures.append(record)
        elif isinstance(record, End):
            outcome.num_steps = record.num_steps
        elif isinstance(record, Ready):
            self._answered(record)

    # -- the check -----------------------------------------------------------------------------------------------

    def _answered(self, ready: Ready) -> None:
        if ready.order < 0:
            self._outcome.engaged = bool(self._what.levers) and not self._outcome.failures
            if self._what.toggle and self._outcome.engaged and set(self._kept) != set(self._what.levers):
                plan, plain = self._what.levers, self._kept
                for number in range(CHECK_PAIRS):
                    self._sides += [plan, plain] if number % 2 == 0 else [plain, plan]
                self._order_next()
            return
        if not self._sides:
            return
        side = self._sides.pop(0)
        if self._last is not None and not self._last.recompilations:
            if (self._last.foreign_fraction or 0.0) > FOREIGN_LIMIT:
                self._outcome.num_busy += 1
            else:
                times = self._outcome.plan_s if side == self._what.levers else self._outcome.plain_s
                times.append(self._last.training_step_s)
        if self._sides:
            self._order_next()
        else:
            self._conclude()

    def _order_next(self) -> None:
        facts = self._outcome.facts
        step_s = self._last.training_step_s if self._last is not None else (facts.warm_up_step_s if facts else 0.1)
        step_s = step_s if step_s > 0 else 0.1
        skip = COMPILE_SKIP_STEPS if any(self._what.registry[n].compiles for n in self._what.levers) else 2
        self._send("window", self._sides[0], num_steps=max(int(CHECK_WINDOW_S / step_s), 1), skip_steps=skip)

    def _conclude(self) -> None:
        from flatout import stats

        outcome = self._outcome
        num = min(len(outcome.plan_s), len(outcome.plain_s))
        outcome.plan_s, outcome.plain_s = outcome.plan_s[:num], outcome.plain_s[:num]
        compared = stats.compare(outcome.plain_s, outcome.plan_s)
        if compared.verdict == "slower":
            outcome.released = True
            self._send("window", self._kept, num_steps=1, skip_steps=0)
        else:
            self._send("window", self._what.levers, num_steps=1, skip_steps=0)

    def _send(self, kind: str, levers: Levers, *, num_steps: int, skip_steps: int) -> None:
        order = Order(
            number=self._number,
            kind="window",
            purpose="run",
            levers=levers,
            num_steps=num_steps,
            skip_steps=skip_steps,
            limit_s=CHECK_LIMIT_S,
        )
        self._number += 1
        try:
            os.write(self._orders, encode(order).encode())
        except OSError:
            self._sides = []


def _die_with_parent() -> None:
    """If flatout is killed, the run dies as it would have under plain Python."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _forward_signals(process: subprocess.Popen[bytes]) -> Callable[[], None]:
    """Pass signals on; the terminal sends its own (Ctrl-C) to both, and the script alone decides about it."""

    def forward(number: int, frame: FrameType | None) -> None:
        process.send_signal(number)

    former = {number: signal.signal(number, forward) for number in FORWARDED}
    former[signal.SIGINT] = signal.signal(signal.SIGINT, signal.SIG_IGN)

    def restore() -> None:
        for number, handler in former.items():
            signal.signal(number, handler)

    return restore


def leave_as(exit_code: int) -> None:
    """End this process as the script ended: with its exit code, or by the same signal."""
    if exit_code < 0:
        signal.signal(-exit_code, signal.SIG_DFL)
        if -exit_code != signal.SIGKILL:
            import resource

            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        os.kill(os.getpid(), -exit_code)
    sys.stdout.flush()
    os._exit(exit_code)
