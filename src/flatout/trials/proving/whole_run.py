"""How is the whole script run once, with or without a plan, with a seed of its own? Isolated, as trials are.

In: a script, levers, a seed, where the metric is found. Out: a `WholeRun`; a script that fails is one with a problem.
"""

from __future__ import annotations

import hashlib
import re
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from flatout.child.orders import SessionSpec
from flatout.errors import FlatoutError, RecordError
from flatout.frameworks.contract import Settings
from flatout.judge import metric as metrics
from flatout.judge import metric_file
from flatout.judge.metric import Metric, Reading
from flatout.judge.proof import Side, WholeRun
from flatout.machine import foreign_cpu
from flatout.machine.energy_counters import EnergyMeter
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.plan import Lever
from flatout.records.trace import End, Failure, Header, Inputs, Levers, Record, Toggle, Window
from flatout.run import choice, isolation
from flatout.run.launch import Child, Launch, session_files
from flatout.run.script import Script
from flatout.run.trackers import QUIET_TRACKERS
from flatout.trials.proving import inputs

POLL_S = 0.05
"""How often output is looked at: so sure is the moment at which a line came."""

LOOK_S = 1.0
"""How often the use of the CPU is looked at."""

KEPT_READINGS = 400

NO_EFFECT = "no effect of it was seen before the run was over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all runs have in common.

    Attributes:
        script: What is run.
        levers: The plan's.
        registry: All levers by name.
        metric: Where the metric is found.
        run_folder: Where records go.
        isolate: Whether files of the user are kept from the runs.
        seed_option: The script's option for a seed, or empty.
        machine: Where it is run.
    """

    script: Script
    levers: Levers
    registry: Mapping[str, Lever]
    metric: Metric
    run_folder: Path
    machine: Machine
    isolate: bool = True
    seed_option: str = ""


@dataclass(slots=True)
class _Output:
    """What a run prints, line by line, with the seconds at which it came."""

    path: Path
    lines: list[tuple[float, str]] = field(default_factory=list)
    _file: BinaryIO | None = None
    _rest: bytes = b""

    def read(self, at_s: float) -> None:
        """Take what has come since."""
        if self._file is None:
            try:
                self._file = open(self.path, "rb")  # noqa: SIM115  closed by `close`
            except OSError:
                return
        chunk = self._file.read()
        parts = re.split(rb"[\r\n]+", self._rest + chunk)
        self._rest = parts.pop()
        self.lines += [(at_s, part.decode("utf-8", "replace")) for part in parts if part]

    def close(self, at_s: float) -> None:
        """Take the rest, a last line without an end too."""
        self.read(at_s)
        if self._rest:
            self.lines.append((at_s, self._rest.decode("utf-8", "replace")))
        if self._file is not None:
            self._file.close()


@dataclass(frozen=True, slots=True)
class _Begun:
    """When a run began, on both clocks, and what the metric's file was then."""

    unix_s: float
    monotonic_s: float
    file: tuple[int, ...] | None


def run_whole(setting: Setting, side: Side, seed: int, wait: Callable[[float], None]) -> WholeRun:
    """Run the script from its start to its end.

    Args:
        setting: What all runs have in common.
        side: With the plan or without.
        seed: Number of the seed.
        wait: Called while it runs, with the seconds since its start.

    Raises:
        FlatoutError: The run could not be started, or the metric's file is not what was said.
    """
    name = f"{side}-{seed}"
    scratch = setting.run_folder / f"scratch-{name}"
    launch = _launch(setting, side, seed, name, scratch)
    output = _Output(setting.run_folder / f"output-{name}.log")
    for file in (Path(launch.session.trace), output.path):  # those of an interrupted run, which may be writing still
        file.unlink(missing_ok=True)
    begun = _Begun(time.time(), time.perf_counter(), _state(Path(setting.metric.file or "")))
    try:
        with EnergyMeter() as meter, Child(launch) as child:
            wall_s, foreign = _watched(child, output, wait, setting.machine.cores_quota)
            exit_code = child.exit_code
            records = child.rest()
        output.close(wall_s)
        if setting.isolate and (refusal := isolation.refusal(scratch)) is not None:
            raise refusal
        found = _readings(setting, scratch, output, records, begun)
    finally:
        if scratch.exists():
            isolation.discard(scratch)
    told = _told(setting, side, seed, (exit_code, wall_s, foreign), (output, records, found))
    told = replace(told, inputs=_inputs(setting, records, begun.unix_s), environment=inputs.environment())
    facts = next((r for r in records if isinstance(r, Facts)), None)
    energy = meter.joules(facts.device if facts is not None else None)
    return replace(told, joules=energy.joules, why_no_energy=energy.why_not)


def _inputs(setting: Setting, records: list[Record], begun_unix_s: float) -> dict[str, str]:
    """Marks of the files that it read.

    Raises:
        ScriptError: One was edited meanwhile, and by whom else than the user: an isolated run writes elsewhere.
    """
    paths = next((r.paths for r in records if isinstance(r, Inputs)), ())
    edited = inputs.edited_since(paths, begun_unix_s)
    if edited and setting.isolate:
        raise inputs.changed(setting.script.name, edited)
    return inputs.marks(path for path in paths if path not in edited)


def _watched(
    child: Child, output: _Output, wait: Callable[[float], None], cores: float | None
) -> tuple[float, float | None]:
    """Listen until it ends: its wall seconds, and what others used of the CPU meanwhile."""
    begun_s = time.perf_counter()
    first = last = foreign_cpu.take(child.session_id)
    looked_s = 0.0
    while child.alive:
        now_s = time.perf_counter() - begun_s
        output.read(now_s)
        wait(now_s)
        if now_s - looked_s > LOOK_S:  # what it used itself is known only while it lives
            last, looked_s = foreign_cpu.take(child.session_id), now_s
        time.sleep(POLL_S)
    return time.perf_counter() - begun_s, foreign_cpu.fraction(first, last, cores=cores)


def _launch(setting: Setting, side: Side, seed: int, name: str, scratch: Path) -> Launch:
    levers = setting.levers if side == "plan" else {}
    script = setting.script
    command = [*script.command, setting.seed_option, str(seed)] if setting.seed_option else script.command
    if setting.isolate:
        command = isolation.isolate(
            command,
            folder=Path.cwd(),
            script_folder=script.folder,
            run_folder=setting.run_folder,
            scratch=scratch,
        )
    files = session_files(setting.run_folder, name)
    session = SessionSpec(
        mode="run",
        trace=files["trace"],
        claim=files["claim"],
        levers=levers,
        script=script.name,
        arguments=script.arguments,
        settings=Settings(cache_folder=str(setting.run_folder.resolve() / "compiled")),
        cores_quota=setting.machine.cores_quota,
        flatout_started_s=time.perf_counter(),
        seed_run=None if setting.seed_option else seed,
        keep_losses=True,
        list_read=tuple({str(Path.cwd()), str(script.folder or Path.cwd())}),
    )
    environment: dict[str, str | None] = {"PYTHONHASHSEED": str(seed), **QUIET_TRACKERS}
    for lever, chosen in levers.items():
        environment.update(setting.registry[lever].environment(chosen))
    return Launch(command=command, session=session, run_folder=setting.run_folder, name=name, environment=environment)


def _readings(
    setting: Setting, scratch: Path, output: _Output, records: list[Record], begun: _Begun
) -> list[Reading] | RecordError:
    """The metric, or why it was not found in this run."""
    metric = setting.metric
    try:
        if metric.file is not None:
            place = isolation.seen(scratch, Path(metric.file)) if setting.isolate else Path(metric.file)
            _check_new(place, metric.file, begun.file)
            found = metric_file.in_file(place, metric.key, metric.file, since_unix_s=begun.unix_s)
            return [r if r.at_s is None else Reading(value=r.value, at_s=r.at_s - begun.unix_s) for r in found]
        if metric.pattern is not None:
            return metrics.in_lines(metric.pattern, output.lines)
    except RecordError as problem:
        return problem
    return metrics.in_losses(_losses(records, begun.monotonic_s))


def _check_new(place: Path, shown: str, before: tuple[int, ...] | None) -> None:
    """A file that is what it was before the run is not of this run: without isolation it lies there still."""
    if before is not None and _state(place) == before:
        raise RecordError(
            f"no metric: `{shown}` was not written",
            cause="what lies there is older than this run",
            hint="name a file that the script writes, as it is seen from the working folder",
        )


def _state(place: Path) -> tuple[int, ...] | None:
    """What changes when a file is written; None of what is no file."""
    try:
        found = place.stat()
    except OSError:  # which reading it says
        return None
    return (found.st_ino, found.st_size, found.st_mtime_ns) if stat.S_ISREG(found.st_mode) else None


def _losses(records: list[Record], begun_s: float) -> list[tuple[float, float]]:
    """Seconds since the start of the run, and the loss, of each step that has one."""
    header = next((r for r in records if isinstance(r, Header)), None)
    if header is None or header.zero_monotonic_s is None:
        return []
    zero_s = header.zero_monotonic_s - begun_s  # one clock for all processes of a machine
    found = []
    for window in (r for r in records if isinstance(r, Window) and len(r.losses) == len(r.step_s)):
        at_s = zero_s + window.start_s
        for step_s, loss in zip(window.step_s, window.losses, strict=True):
            at_s += step_s
            found.append((at_s, loss))
    return found


def _told(
    setting: Setting, side: Side, seed: int, ended: tuple[int, float, float | None],
    seen: tuple[_Output, list[Record], list[Reading] | RecordError],
) -> WholeRun:  # fmt: skip
    (exit_code, wall_s, foreign), (output, records, found) = ended, seen
    end = next((r for r in reversed(records) if isinstance(r, End)), None)
    problem = _problem(exit_code, output, records)
    readings: list[Reading] = []
    if isinstance(found, FlatoutError):
        problem = problem or f"{found.error} ({found.cause})"
    else:
        readings = found
        if not readings and not problem:
            problem = _not_found(setting.metric, output)
    losses = [loss for r in records if isinstance(r, Window) for loss in r.losses]
    faults = [
        f"{r.stage}: {r.error}: {r.message}"[:200] for r in records if isinstance(r, Failure) and r.stage != "script"
    ]
    idle = _idle(setting, side, records)
    return WholeRun(
        seed=seed,
        side=side,
        exit_code=exit_code,
        wall_s=wall_s,
        training_s=end.training_s if end else 0.0,
        num_steps=end.num_steps if end else 0,
        value=readings[-1].value if readings and not problem else None,
        num_readings=len(readings),
        readings=tuple(readings[:: max(len(readings) // KEPT_READINGS, 1)]),
        losses_hash=hashlib.sha256(repr(losses).encode()).hexdigest()[:16] if losses else "",
        problem=problem,
        remarks=tuple(faults),
        engaged=not (side == "plan" and setting.levers) or not (faults or idle),
        idle=idle,
        doubled=metrics.doubled_in(setting.metric.pattern, output.lines) if setting.metric.pattern and readings else "",
        foreign_fraction=foreign,
    )


def _not_found(metric: Metric, output: _Output) -> str:
    if metric.pattern is None:
        return "no losses were recorded: nothing that looks like a loss had `backward` called"
    num = len(output.lines)
    return f"the metric was not found: `{metric.pattern}` is in none of {num} line{'s' * (num != 1)} that it printed"


def _idle(setting: Setting, side: Side, records: list[Record]) -> dict[str, str]:
    """Levers that were not at work, and why: what shows no effect had none, whatever it was told to do."""
    if side == "plain":
        return {}
    shown = {name for r in records if isinstance(r, Toggle) for name in r.evidence}
    missing = {name: why for r in records if isinstance(r, Toggle) for name, why in r.missing.items()}
    facts = next((r for r in reversed(records) if isinstance(r, Facts)), None)
    reasons, _ = choice.idle(setting.levers, facts, setting.registry, lambda: setting.machine)
    return {n: reasons.get(n) or missing.get(n) or NO_EFFECT for n in setting.levers if n not in shown}


def _problem(exit_code: int, output: _Output, records: list[Record]) -> str:
    if exit_code == 0:
        return "" if any(isinstance(r, End) and r.num_steps for r in records) else "made no training step"
    raised = next((r for r in reversed(records) if isinstance(r, Failure) and r.stage == "script"), None)
    last = f"the last it printed is `{output.lines[-1][1].strip()[:160]}`" if output.lines else "it printed nothing"
    said = f"{raised.error}: {raised.message.splitlines()[0] if raised.message else ''}" if raised else last
    return f"ended with exit code {exit_code}: {said}" if exit_code > 0 else f"killed by signal {-exit_code}: {said}"
