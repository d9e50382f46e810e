"""How does the user's own run go on under a plan? In the foreground, as the very process that plain Python would be.

In: a script and levers. Out: the exit code of the script, its trace, and what was measured on the way. The parent
only listens: it passes windows to whoever watches over the plan (`check` at first, then `guard`), and their asks to
the run. Signals, terminal and exit status are the script's.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flatout.energy import Energy
from flatout.errors import RecordError, UsageError
from flatout.plan import Lever
from flatout.run.check import Check
from flatout.run.energy_counters import RUN_EVERY_S, EnergyMeter
from flatout.run.guard import Decision, Guard
from flatout.run.launch import POLL_S, Launch, discard_channels, environment_for, session_files, write_session
from flatout.run.orders import Order, SessionSpec, encode
from flatout.run.pairs_in_run import Ask, Sides
from flatout.run.signals import Signals
from flatout.trace import End, Facts, Failure, Header, Levers, Ready, Record, Remark, Toggle, Window
from flatout.trace_file import Follower

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
        released: Whether the check at the start released the plan because it was slower here.
        decisions: What was decided about the plan later on.
        looking_s: What looking at it later on has cost the run, seconds.
        engaged: What was engaged in the end.
        failures: What went wrong on our side.
        raised: What the script itself raised in the end, where it did.
        facts: What the script turned out to do.
        evidence: Lever to proof.
        remarks: What the process had to say in the end.
        num_processes: Processes that trained, under a launcher.
        energy: What the machine used meanwhile, from the start of the process to its end.
    """

    num_processes: int = 0
    num_busy: int = 0
    """Pairs of windows of the check that others disturbed."""
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
    decisions: list[Decision] = field(default_factory=list)
    looking_s: float = 0.0
    engaged: bool = False
    recorded: bool = True
    """Whether there was a folder for the trace; else the script ran plainly."""
    failures: list[Failure] = field(default_factory=list)
    raised: Failure | None = None
    facts: Facts | None = None
    evidence: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    energy: Energy = field(default_factory=Energy)

    @property
    def out_of_memory(self) -> bool:
        """Whether memory ran out under the levers: in a call that was made again without them, or for the script."""
        ended_so = self.raised is not None and self.raised.out_of_memory and self.is_engaged
        return ended_so or any(failure.out_of_memory for failure in self.failures)

    @property
    def is_engaged(self) -> bool:
        """Whether the plan was at work in the end."""
        changes = [decision.kind for decision in self.decisions if decision.kind != "kept"]
        return self.engaged and (changes[-1] == "engaged again" if changes else not self.released)


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
        flatout_started_s=time.perf_counter(),
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
        self._check: Check | None = None
        self._guard: Guard | None = None
        self._awaited = -1
        """Number of the order whose answer is awaited."""
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
                signals.wait(process, POLL_S if self._awaited >= 0 else LISTEN_EVERY_S)
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
            self._follower = self._check = self._guard = None

    def _note(self, record: Record) -> None:
        outcome = self._outcome
        if isinstance(record, Header):
            self._begin_process()
        elif isinstance(record, Window):
            self._note_window(record)
        elif isinstance(record, Facts):
            outcome.facts = record
        elif isinstance(record, Toggle):
            self._note_toggle(record)
        elif isinstance(record, Failure):
            if record.stage == "script":
                outcome.raised = record
            else:
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
        self._check = self._guard = None
        self._awaited = -1
        self._outcome.ended = False
        self._outcome.began = True

    def _note_window(self, window: Window) -> None:
        self._last = window
        self._outcome.num_steps += window.num_steps
        if self._begun_s is None:
            self._begun_s = window.start_s
        self._outcome.steps_s = self._former_s + window.start_s + sum(window.step_s) - self._begun_s
        if self._guard is not None and self._awaited < 0 and window.order < 0:
            self._do(self._guard.free(window))

    def _note_toggle(self, toggle: Toggle) -> None:
        if self._guard is not None:
            self._guard.toggled(toggle.took_s)
            self._outcome.looking_s = self._guard.cost_s

    # -- watching over the plan ----------------------------------------------------------------------------------

    def _settled(self) -> None:
        """The levers have been engaged: check them, where that is wanted and possible."""
        what, facts = self._what, self._outcome.facts
        self._outcome.engaged = bool(what.levers) and not any(f.stage == "engage" for f in self._outcome.failures)
        distributed = facts is not None and facts.distributed  # one rank cannot decide
        if what.toggle and self._outcome.engaged and not distributed and set(self._kept) != set(what.levers):
            compiles = any(what.registry[name].compiles for name in what.levers)
            sides = Sides(plan=what.levers, without=self._kept, compiles=compiles)
            step_s = facts.warm_up_step_s if facts is not None else 0.0
            self._check = Check(sides, step_s if step_s > 0 else 0.1)  # not a number fails this, too
            self._do(self._check.begin())

    def _answered(self, ready: Ready) -> None:
        if ready.order < 0:
            self._settled()
        if ready.order < 0 or ready.order != self._awaited:
            return
        self._awaited = -1
        if not self._outcome.engaged:  # the plan broke while it was being looked at
            if self._check is not None or self._guard is not None:
                self._check = self._guard = None
                self._do(Ask(levers=self._kept, purpose="run"))
            return
        window = self._last if self._last is not None and self._last.order == ready.order else None
        if self._check is not None:
            self._do(self._check.answered(window))
            self._note_check(self._check)
        elif self._guard is not None:
            self._do(self._guard.answered(window))
            self._outcome.decisions = self._guard.decisions
            self._outcome.looking_s = self._guard.cost_s

    def _note_check(self, check: Check) -> None:
        """What the check has come to; when it is over, the guard takes its place."""
        outcome = self._outcome
        outcome.plan_s, outcome.plain_s, outcome.num_busy = check.plan_s, check.plain_s, check.num_busy
        if not check.over:
            return
        outcome.released = check.released
        gaps = [plain_s - plan_s for plain_s, plan_s in zip(check.plain_s, check.plan_s, strict=True)]
        gap_s = sum(gaps) / len(gaps) * (-1 if check.released else 1) if gaps else None
        self._check = None
        self._guard = Guard(
            check.sides,
            engaged=not check.released,
            num_steps=lambda: outcome.num_steps,
            gap_s=gap_s,
            alarm=check.alarm,
        )

    def _do(self, ask: Ask | None) -> None:
        if ask is None:
            return
        order = Order(
            number=self._number,
            kind="window",
            purpose=ask.purpose,
            levers=ask.levers,
            num_steps=ask.num_steps,
            skip_steps=ask.skip_steps,
            limit_s=ask.limit_s,
            reason=ask.reason,
        )
        self._awaited = order.number
        self._number += 1
        try:
            os.write(self._orders, encode(order).encode())
        except OSError:
            self._check = self._guard = None
            self._awaited = -1


def untoggled(levers: Levers, registry: Mapping[str, Lever]) -> Levers:
    """Levers that the check leaves engaged: those that wait for an epoch or a process, and the partners of these.

    One thread is there because a worker takes a core: with the worker and without it is nothing that plain ever is.
    """
    held = {name for name in levers if registry[name].toggles != "step"}
    held |= {name for name in levers for other in held if name in registry[other].partners}
    return {name: settings for name, settings in levers.items() if name in held}
