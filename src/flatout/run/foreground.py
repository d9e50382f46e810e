"""How does the user's own run go on under a plan? In the foreground, as the very process that plain Python would be.

In: a script and levers. Out: the exit code of the script, its trace, and what was measured on the way. The parent
only listens: it passes windows to who watches over the levers (`watch`), and to the run what is asked. Signals,
terminal and exit status are the script's.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flatout.child.orders import Order, SessionSpec, encode
from flatout.errors import MachineError
from flatout.frameworks.contract import Settings
from flatout.frameworks.lever import Lever
from flatout.machine.energy_counters import RUN_EVERY_S, EnergyMeter
from flatout.records.facts import Facts
from flatout.records.ranks import RankConfig
from flatout.records.trace import Agreement, End, Failure, Header, Levers, Ready, Record, Remark, Toggle, Window
from flatout.records.trace_file import Follower
from flatout.run import child_process as launching
from flatout.run.child_process import POLL_S, Launch, discard_channels, environment_for, session_files, write_session
from flatout.run.controller import Controller, Learner
from flatout.run.outcome import Outcome
from flatout.run.rank_start import Start
from flatout.run.rank_watch import RankWatch
from flatout.run.run_windows import WindowRequest, WindowResult
from flatout.run.script import cannot_start
from flatout.run.signals import Signals

LISTEN_EVERY_S = 0.25
"""How often to look for news when no answer is awaited; the end of the process is noticed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreground:
    """What to run, and how."""

    command: tuple[str, ...]
    """What is executed."""
    script: str
    """What the trace calls the script."""
    arguments: tuple[str, ...]
    """The script's own."""
    run_folder: Path | None
    """Where its trace goes; None where nothing can be written, then the script runs plainly."""
    levers: Levers
    registry: Mapping[str, Lever]
    toggle: bool = True
    """Whether levers may be toggled to check the plan in this very run."""
    cores_quota: float | None = None
    """How many cores the control group grants; None without a quota."""
    settings: Settings = field(default_factory=Settings)
    """What the framework is told."""
    learner: Learner | None = None
    """Who tries levers on the run; then there is no plan."""
    launcher: bool = False
    """Whether the command starts the training processes, of which each writes a trace of its own."""
    ranks: RankConfig | None = None
    """How the script is run on many ranks; None: it is one process."""
    script_folder: Path | None = None
    """Where the script lies, where it is a file."""
    devices: tuple[str, ...] = ()
    """For each rank the GPU that is its own; empty without GPUs."""


def run(what: Foreground) -> Outcome:
    """Run the script to its end, whatever becomes of the recording.

    Raises:
        UsageError: There is no such launcher.
        FlatoutError: The script cannot be run on many ranks.
    """
    if what.ranks is not None:
        return _run_ranks(what, what.ranks)
    prepared = _prepare(what)
    if prepared is None:
        return _Listener(what, None).watch(None)
    launch, environment = prepared
    orders = os.open(launch.session.orders or "", os.O_RDWR | os.O_CLOEXEC)
    try:
        return _Listener(what, launch.session, orders).watch(environment)
    finally:
        os.close(orders)
        discard_channels(launch.session)


def _run_ranks(what: Foreground, terms: RankConfig) -> Outcome:
    if what.run_folder is None:
        raise MachineError(
            "ranks need a folder to meet in",
            cause="no run folder can be written",
            hint="go to a folder you may write to",
        )
    terms = dataclasses.replace(terms, folder=str(what.run_folder.resolve()))
    what = dataclasses.replace(what, ranks=terms, launcher=True)
    prepared = _prepare(what)
    if prepared is None:
        raise MachineError("ranks cannot be told what to do", cause="the disk is full", hint="free some space")
    launch, environment = prepared
    added = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    start = Start(
        command=what.command, environment=added, terms=terms, script_folder=what.script_folder, devices=what.devices
    )
    watch = RankWatch(terms)
    try:
        listener = _Listener(dataclasses.replace(what, command=tuple(start.launcher())), launch.session, ranks=watch)
        outcome = listener.watch(None)
        outcome.exchanges = watch.exchanges()
        outcome.ranks_problem = start.problem() or watch.problem()
        if watch.hang is not None:
            outcome.ranks_problem, outcome.stacks = watch.hang.error, watch.hang.stacks
        elif outcome.ranks_problem is None:
            outcome.failed_rank = start.failed(watch.ends())
        return outcome
    finally:
        start.clean()
        discard_channels(launch.session)


def _prepare(what: Foreground) -> tuple[Launch, dict[str, str]] | None:
    """The session's files and the environment; None where they cannot be written."""
    if what.run_folder is None:
        return None
    session = SessionSpec(
        mode="run",
        **session_files(what.run_folder, "run"),  # type: ignore[arg-type]
        levers=what.levers,
        learns=what.learner is not None,
        per_process=what.launcher,
        ranks=what.ranks,
        script=what.script,
        arguments=what.arguments,
        settings=what.settings,
        cores_quota=what.cores_quota,
        flatout_started_s=time.perf_counter(),
    )
    variables: dict[str, str] = {}
    if what.ranks is not None and not os.environ.get("PYTHONHASHSEED"):
        variables["PYTHONHASHSEED"] = "1"  # sets are gone through in the same order on all ranks
    for name, settings in what.levers.items():
        variables.update(what.registry[name].environment(settings))
    launch = Launch(command=what.command, session=session, run_folder=what.run_folder, name="run", folder=Path())
    try:
        environment = environment_for(write_session(launch), variables, passed_on=what.launcher and what.ranks is None)
        os.mkfifo(session.orders or "")
    except OSError:  # the disk is full, or knows no pipes
        return None
    return launch, environment


class _Listener:
    """Listens to one run, and passes on what it says and what is asked of it."""

    def __init__(
        self, what: Foreground, session: SessionSpec | None, orders: int = -1, ranks: RankWatch | None = None
    ) -> None:
        self._what = what
        self._ranks = ranks
        self._orders = orders
        self._follower = Follower(session.trace) if session is not None else None
        self._outcome = Outcome(recorded=session is not None)
        self._number = 0
        self._watch: Controller | None = None
        self._awaited = -1
        """Number of the order whose answer is awaited."""
        self._answer: list[Record] = []
        """What has come since the last answer."""
        self._last: Window | None = None
        self._begun_s: float | None = None
        self._former_steps = 0
        self._former_s = 0.0
        self._meter = EnergyMeter()

    def watch(self, environment: Mapping[str, str] | None) -> Outcome:
        """Start the process, listen until it ends, and take over its exit status."""
        with Signals() as signals:
            command = list(self._what.command)
            try:  # descriptors that the shell gave us (`<(command)`) are for the script
                process = launching.start(command, env=environment, preexec_fn=signals.in_child(), close_fds=False)
            except OSError as problem:
                raise cannot_start(command, str(problem.strerror or problem)) from None
            self._meter.open()  # now, not before: the process needs its first second for its imports
            while process.poll() is None:
                self._listen()
                if self._ranks is not None and self._ranks.look():
                    process.terminate()
                self._meter.note(at_most_every_s=RUN_EVERY_S)
                signals.wait(process, POLL_S if self._awaited >= 0 else LISTEN_EVERY_S)
            self._meter.note()
            self._listen()
            if self._what.launcher:
                self._gather()
        self._outcome.exit_code = process.returncode
        facts = self._outcome.facts
        known = (facts.device, facts.gpus) if facts is not None else (None, ())
        self._outcome.energy = self._meter.joules(known[0], gpus=known[1])
        return self._outcome

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
        except Exception:  # noqa: BLE001  what breaks here costs the summary: if we ended, the run would end with us
            self._follower = self._watch = None

    def _note(self, record: Record) -> None:
        outcome = self._outcome
        self._answer.append(record)
        if isinstance(record, Header):
            self._begin_process(record)
        elif isinstance(record, Window):
            self._note_window(record)
        elif isinstance(record, Facts):
            outcome.facts = record
        elif isinstance(record, Toggle):
            outcome.evidence.update(record.evidence)
            outcome.missing.update(record.missing)
            if self._watch is not None and self._watch.guard is not None:
                self._watch.guard.toggled(record.took_s)
        elif isinstance(record, Failure):
            self._note_failure(record)
        elif isinstance(record, Remark):
            (outcome.details if record.verbose else outcome.remarks).append(record.text)
        elif isinstance(record, End):
            outcome.num_steps = self._former_steps + record.num_steps
            if record.training_s:
                outcome.steps_s = self._former_s + record.training_s
            outcome.ended = True
        elif isinstance(record, Ready):
            self._answered(record)

    def _note_failure(self, failure: Failure) -> None:
        if failure.stage == "script":
            self._outcome.raised = failure
            return
        if self._watch is not None and self._watch.is_learning:  # a candidate's affair: it stands in its trial
            return
        self._outcome.failures.append(failure)
        if failure.stage in ("engage", "release", "step"):  # the levers are off now
            self._outcome.engaged = False

    def _begin_process(self, header: Header) -> None:
        """A process that trains has begun; the script may start one after the other."""
        self._former_steps, self._former_s = self._outcome.num_steps, self._outcome.steps_s
        self._begun_s = self._last = None
        self._watch = None
        self._awaited, self._answer = -1, []
        self._outcome.ended = False
        self._outcome.began = True
        self._outcome.header = header

    def _note_window(self, window: Window) -> None:
        self._last = window
        self._outcome.num_steps += window.num_steps
        if self._begun_s is None:
            self._begun_s = window.start_s
        self._outcome.steps_s = self._former_s + window.start_s + sum(window.step_s) - self._begun_s
        if self._watch is not None and self._awaited < 0 and window.order < 0:
            self._answer = []
            self._do(self._watch.free(window))

    def _settled(self) -> None:
        """The levers have been engaged: watch over them, where that is wanted and possible."""
        what, outcome = self._what, self._outcome
        outcome.engaged = bool(what.levers) and not any(f.stage == "engage" for f in outcome.failures)
        distributed = outcome.facts is not None and outcome.facts.distributed  # one rank cannot decide
        wanted = what.learner is not None or (what.toggle and outcome.engaged)
        if wanted and not distributed:
            self._watch = Controller(
                what.levers, what.registry, learner=what.learner, num_steps=lambda: self._outcome.num_steps
            )
            self._do(self._watch.begin(outcome.facts))

    def _answered(self, ready: Ready) -> None:
        found, self._answer = self._answer, []
        if ready.order < 0:
            self._settled()
            return
        if ready.order != self._awaited:
            return
        self._awaited = -1
        watch = self._watch
        if watch is None:
            return
        if not self._outcome.engaged and not watch.is_learning:  # the plan broke while it was being looked at
            self._do(watch.broken())
            return
        self._do(watch.answered(_answer(ready, found)))
        outcome = self._outcome
        pairs, guard = watch.pairs, watch.guard
        outcome.plan_s, outcome.plain_s, outcome.num_busy = pairs.candidate_s, pairs.baseline_s, pairs.num_busy
        outcome.released = watch.released
        if guard is not None:
            outcome.decisions, outcome.looking_s = guard.decisions, guard.cost_s
        if watch.learned is not None and outcome.learned is None:
            outcome.learned, outcome.engaged = watch.learned, bool(watch.plan)

    def _do(self, ask: WindowRequest | None) -> None:
        if ask is None:
            return
        order = Order(number=self._number, **dataclasses.asdict(ask))
        self._awaited = order.number
        self._number += 1
        try:
            os.write(self._orders, encode(order).encode())
        except OSError:
            self._watch, self._awaited = None, -1


def _answer(ready: Ready, found: list[Record]) -> WindowResult:
    """What came back with the answer to an order."""
    mine = [record for record in found if getattr(record, "order", -1) == ready.order]
    toggles = [record for record in mine if isinstance(record, Toggle)]
    return WindowResult(
        window=next((record for record in reversed(mine) if isinstance(record, Window)), None),
        num_steps=ready.num_steps,
        agreement=next((record for record in reversed(mine) if isinstance(record, Agreement)), None),
        evidence={name: proof for toggle in toggles for name, proof in toggle.evidence.items()},
        missing={name: why for toggle in toggles for name, why in toggle.missing.items()},
        failures=tuple(record for record in found if isinstance(record, Failure)),
    )
