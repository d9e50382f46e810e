"""How does the user's own run go on under a plan? In the foreground, as the very process that plain Python would be.

In: a script and levers. Out: the exit code of the script, its trace, and what was measured on the way. The parent
only listens: it has the first windows alternate between plan and plain where levers can be toggled, and has the plan
released where it is slower. Signals, terminal and exit status are the script's.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flatout.energy import Energy
from flatout.errors import RecordError, UsageError
from flatout.plan import Lever
from flatout.run.energy_counters import RUN_EVERY_S, EnergyMeter
from flatout.run.launch import POLL_S, Launch, discard_channels, environment_for, session_files, write_session
from flatout.run.orders import Order, SessionSpec, encode, settling_steps
from flatout.run.signals import Signals
from flatout.trace import FOREIGN_LIMIT, End, Facts, Failure, Header, Levers, Ready, Record, Remark, Window
from flatout.trace_file import Follower

CHECK_PAIRS = 8
"""The fewest that can be judged whatever the noise, see `flatout.stats.RANKED_PAIRS`."""

CHECK_WINDOW_S = 0.3
CHECK_LIMIT_S = 1.0
"""A window of the check ends here at the latest: plain may be many times slower than the plan."""

REST_WINDOWS = 6
"""After each pair the plan runs on for so many windows, so that the check costs a slow script or a short run little."""

COMPILE_SKIP_STEPS = 3
LISTEN_EVERY_S = 0.25
"""How often to look for news when no answer is awaited; the end of the process is noticed at once."""


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
        remarks: What the process had to say in the end.
        num_processes: Processes that trained, under a launcher.
        energy: What the machine used meanwhile, from the start of the process to its end.
    """

    num_processes: int = 0
    num_busy: int = 0
    """Windows of the check that others disturbed."""
    exit_code: int = 0
    num_steps: int = 0
    began: bool = False
    """Whether a first step was made."""
    ended: bool = False
    """Whether the script said at its end how many steps it made; else there may have been more of them."""
    steps_s: float = 0.0
    plan_s: list[float] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)
    released: bool = False
    engaged: bool = False
    recorded: bool = True
    """Whether there was a folder for the trace; else the script ran plainly."""
    failures: list[Failure] = field(default_factory=list)
    facts: Facts | None = None
    evidence: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    energy: Energy = field(default_factory=Energy)


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreground:
    """What to run, and how.

    Attributes:
        command: What is executed.
        script: What the trace calls the script.
        arguments: The script's own.
        run_folder: Where its trace goes; None where nothing can be written, then the script runs plainly.
        levers: What to engage.
        registry: All levers by name.
        toggle: Whether levers may be toggled to check the plan in this very run.
        cores_quota: How many cores the control group grants; None without a quota.
    """

    command: tuple[str, ...]
    script: str
    arguments: tuple[str, ...]
    run_folder: Path | None
    levers: Levers
    registry: Mapping[str, Lever]
    toggle: bool = True
    cores_quota: float | None = None
    cache_folder: str | None = None
    """Where the trials kept compiled kernels."""
    store_folders: tuple[str, ...] = ()
    """Where items are kept on the disk."""
    store_memory_bytes: int | None = None
    launcher: bool = False
    """Whether the command starts the training processes, of which each writes a trace of its own."""


def run(what: Foreground) -> Outcome:
    """Run the script to its end, whatever becomes of the recording.

    Raises:
        UsageError: There is no such launcher.
    """
    prepared = _prepare(what)
    if prepared is None:
        return _Watch(what, None).watch(None)
    launch, environment = prepared
    orders = os.open(launch.session.orders or "", os.O_RDWR | os.O_CLOEXEC)
    try:
        return _Watch(what, launch.session, orders).watch(environment)
    finally:
        os.close(orders)
        discard_channels(launch.session)


def _prepare(what: Foreground) -> tuple[Launch, dict[str, str]] | None:
    """The session's files and the environment; None where they cannot be written."""
    if what.run_folder is None:
        return None
    session = SessionSpec(
        mode="run",
        **session_files(what.run_folder, "run"),  # type: ignore[arg-type]
        levers=what.levers,
        per_process=what.launcher,
        script=what.script,
        arguments=what.arguments,
        cache_folder=what.cache_folder,
        store_folders=what.store_folders,
        store_memory_bytes=what.store_memory_bytes,
        cores_quota=what.cores_quota,
        flatout_started_unix_s=time.time(),
    )
    variables: dict[str, str] = {}
    for name, settings in what.levers.items():
        variables.update(what.registry[name].environment(settings))
    launch = Launch(command=what.command, session=session, run_folder=what.run_folder, name="run", folder=Path())
    try:
        environment = environment_for(write_session(launch), variables)
        os.mkfifo(session.orders or "")
    except OSError:  # the disk is full, or knows no pipes
        return None
    return launch, environment


class _Watch:
    """Listens to one run, and checks its plan."""

    def __init__(self, what: Foreground, session: SessionSpec | None, orders: int = -1) -> None:
        self._what = what
        self._orders = orders
        self._follower = Follower(session.trace) if session is not None else None
        self._outcome = Outcome(recorded=session is not None)
        self._number = 0
        self._sides: list[Levers] = []
        self._resting = False
        self._awaited = -1
        """Number of the order whose answer is awaited."""
        self._pair: dict[bool, float | None] = {}
        """Step times of the pair of windows under way: with the plan (True) and without it."""
        self._last: Window | None = None
        self._begun_s: float | None = None
        self._former_steps = 0
        self._former_s = 0.0
        self._kept = untoggled(what.levers, what.registry)
        self._meter = EnergyMeter()

    def watch(self, environment: Mapping[str, str] | None) -> Outcome:
        """Start the process, listen until it ends, and take over its exit status."""
        with Signals() as signals:
            process = self._start(signals, environment)
            self._meter.open()  # now, not before: the process needs its first second for its imports
            while process.poll() is None:
                self._listen()
                self._meter.note(at_most_every_s=RUN_EVERY_S)
                signals.wait(process, POLL_S if self._sides else LISTEN_EVERY_S)
            self._meter.note()
            self._listen()
            if self._what.launcher:
                self._gather()
        self._outcome.exit_code = process.returncode
        facts = self._outcome.facts
        self._outcome.energy = self._meter.joules(facts.device if facts is not None else None)
        return self._outcome

    def _start(self, signals: Signals, environment: Mapping[str, str] | None) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                list(self._what.command), env=environment, preexec_fn=signals.in_child(), close_fds=False
            )  # descriptors that the shell gave us (`<(command)`) are for the script
        except OSError as problem:
            raise UsageError(
                f"cannot start `{self._what.command[0]}`",
                cause=str(problem.strerror or problem),
                hint="check the command; `flatout exec -- COMMAND` takes what the shell would",
            ) from None

    def _gather(self) -> None:
        """A launcher's children have each written a trace: the steps of the first stand for all, failures do not."""
        if self._what.run_folder is None:
            return
        for path in sorted(self._what.run_folder.glob("trace-run.*.jsonl")):
            self._outcome.num_processes += 1
            self._follower = Follower(path)
            self._listen(all_records=self._outcome.num_processes == 1)

    def _listen(self, *, all_records: bool = True) -> None:
        if self._follower is None:
            return
        try:
            for record in self._follower.new():
                if all_records or isinstance(record, Failure):
                    self._note(record)
        except RecordError:  # a torn line costs what stood in it
            return
        except Exception:  # noqa: BLE001  what breaks here costs the summary: if we ended, the run would end with us
            self._follower = None
            self._sides = []

    def _note(self, record: Record) -> None:
        outcome = self._outcome
        if isinstance(record, Header):
            self._begin_process()
        elif isinstance(record, Window):
            self._note_window(record)
        elif isinstance(record, Facts):
            outcome.facts = record
        elif isinstance(record, Failure):
            if record.stage != "script":
                outcome.failures.append(record)
                if record.stage in ("engage", "release", "step"):  # the levers are off now
                    outcome.engaged = False
        elif isinstance(record, Remark):
            outcome.remarks.append(record.text)
        elif isinstance(record, End):
            outcome.num_steps = self._former_steps + record.num_steps
            if record.training_s:
                outcome.steps_s = self._former_s + record.training_s
            outcome.ended = True
        elif isinstance(record, Ready):
            self._answered(record)

    def _begin_process(self) -> None:
        """A process that trains has begun; the script may start one after the other."""
        self._former_steps, self._former_s = self._outcome.num_steps, self._outcome.steps_s
        self._begun_s = self._last = None
        self._sides, self._awaited, self._resting = [], -1, False
        self._outcome.ended = False
        self._outcome.began = True

    def _note_window(self, window: Window) -> None:
        self._last = window
        self._outcome.num_steps += window.num_steps
        if self._begun_s is None:
            self._begun_s = window.start_s
        self._outcome.steps_s = self._former_s + window.start_s + sum(window.step_s) - self._begun_s

    # -- the check -----------------------------------------------------------------------------------------------

    def _answered(self, ready: Ready) -> None:
        if ready.order < 0:
            self._settled()
        if ready.order < 0 or ready.order != self._awaited or not self._sides:
            return
        resting, self._resting = self._resting, False
        if not self._outcome.engaged:  # the plan broke while it was being checked
            self._sides = []
            self._send(self._kept, "run", num_steps=1, skip_steps=0)
            return
        if resting:
            self._order_next()
            return
        side = self._sides.pop(0)
        self._keep(side)
        if not self._sides:
            self._conclude()
        elif len(self._sides) % 2 == 0:
            self._rest()
        else:
            self._order_next()

    def _settled(self) -> None:
        """The levers have been engaged: check them, where that is wanted and possible."""
        what = self._what
        self._outcome.engaged = bool(what.levers) and not any(f.stage == "engage" for f in self._outcome.failures)
        distributed = self._outcome.facts is not None and self._outcome.facts.distributed  # one rank cannot decide
        if what.toggle and self._outcome.engaged and not distributed and set(self._kept) != set(what.levers):
            lots = random.Random(0)  # unrelated to what the machine does, which is all that is asked of it
            for _ in range(CHECK_PAIRS):
                self._sides += [what.levers, self._kept][:: 1 if lots.random() < 0.5 else -1]
            self._order_next()

    def _keep(self, side: Levers) -> None:
        """The step time of the window that has just been measured; a pair counts where both of its windows do."""
        window, step_s = self._last, None
        if window is not None and window.order == self._awaited and not window.recompilations:
            if (window.foreign_fraction or 0.0) > FOREIGN_LIMIT:
                self._outcome.num_busy += 1
            else:
                step_s = window.training_step_s
        self._pair[side == self._what.levers] = step_s
        if len(self._sides) % 2 == 0:
            plain_s, plan_s = self._pair[False], self._pair[True]
            if plain_s is not None and plan_s is not None:
                self._outcome.plain_s.append(plain_s)
                self._outcome.plan_s.append(plan_s)

    def _order_next(self) -> None:
        step_s = self._step_s()
        skip = settling_steps(step_s)
        if any(self._what.registry[n].compiles for n in self._what.levers):
            skip = COMPILE_SKIP_STEPS
        self._send(self._sides[0], "check", num_steps=_steps_in(CHECK_WINDOW_S, step_s), skip_steps=skip)

    def _rest(self) -> None:
        """Between two pairs the plan runs on."""
        self._resting = True
        num_steps = REST_WINDOWS * _steps_in(CHECK_WINDOW_S, self._step_s())
        limit_s = REST_WINDOWS * CHECK_LIMIT_S
        self._send(self._what.levers, "run", num_steps=num_steps, skip_steps=0, limit_s=limit_s)

    def _step_s(self) -> float:
        facts = self._outcome.facts
        step_s = self._last.training_step_s if self._last is not None else (facts.warm_up_step_s if facts else 0.1)
        return step_s if step_s > 0 else 0.1  # not a number fails this, too

    def _conclude(self) -> None:
        from flatout import stats

        outcome = self._outcome
        compared = stats.compare(outcome.plain_s, outcome.plan_s)
        outcome.released = compared.verdict == "slower"
        self._send(self._kept if outcome.released else self._what.levers, "run", num_steps=1, skip_steps=0)

    def _send(
        self, levers: Levers, purpose: str, *, num_steps: int, skip_steps: int, limit_s: float = CHECK_LIMIT_S
    ) -> None:
        order = Order(
            number=self._number,
            kind="window",
            purpose=purpose,
            levers=levers,
            num_steps=num_steps,
            skip_steps=skip_steps,
            limit_s=limit_s,
        )
        self._awaited = order.number
        self._number += 1
        try:
            os.write(self._orders, encode(order).encode())
        except OSError:
            self._sides, self._resting = [], False


def untoggled(levers: Levers, registry: Mapping[str, Lever]) -> Levers:
    """Levers that the check leaves engaged: those that wait for an epoch or a process, and the partners of these.

    One thread is there because a worker takes a core: with the worker and without it is nothing that plain ever is.
    """
    held = {name for name in levers if registry[name].toggles != "step"}
    held |= {name for name in levers for other in held if name in registry[other].partners}
    return {name: settings for name, settings in levers.items() if name in held}


def _steps_in(seconds: float, step_s: float) -> int:
    return max(int(seconds / step_s), 1)
