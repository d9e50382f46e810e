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

from flatout import metric as metrics
from flatout import metric_file
from flatout.errors import FlatoutError, RecordError
from flatout.metric import Metric, Reading
from flatout.plan import Lever
from flatout.proof import Side, WholeRun
from flatout.run import foreign_cpu, isolation
from flatout.run.energy_counters import EnergyMeter
from flatout.run.launch import QUIET_TRACKERS, Child, Launch, session_files
from flatout.run.orders import SessionSpec
from flatout.run.script import Script
from flatout.trace import End, Facts, Failure, Header, Levers, Record, Toggle, Window

POLL_S = 0.05
"""How often output is looked at: so sure is the moment at which a line came."""

LOOK_S = 1.0
"""How often the use of the CPU is looked at."""

KEPT_READINGS = 400

CLOCK_TICK_S = 2.0
"""File systems keep times of modification as coarsely as that."""


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
        cores_quota: How many cores the control group grants; None without a quota.
    """

    script: Script
    levers: Levers
    registry: Mapping[str, Lever]
    metric: Metric
    run_folder: Path
    isolate: bool = True
    seed_option: str = ""
    cores_quota: float | None = None


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
    begun_unix_s, begun_s = time.time(), time.perf_counter()
    try:
        with EnergyMeter() as meter, Child(launch) as child:
            wall_s, foreign = _watched(child, output, wait, setting.cores_quota)
            exit_code = child.exit_code
            records = child.rest()
        output.close(wall_s)
        if setting.isolate and (refusal := isolation.refusal(scratch)) is not None:
            raise refusal
        found = _readings(setting, scratch, output, records, (begun_unix_s, begun_s))
    finally:
        if scratch.exists():
            isolation.discard(scratch)
    told = _told(setting, side, seed, (exit_code, wall_s, foreign), (output, records, found))
    facts = next((r for r in records if isinstance(r, Facts)), None)
    energy = meter.joules(facts.device if facts is not None else None)
    return replace(told, joules=energy.joules, why_no_energy=energy.why_not)


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
        cache_folder=str(setting.run_folder.resolve() / "compiled"),
        cores_quota=setting.cores_quota,
        flatout_started_unix_s=time.time(),
        seed_run=None if setting.seed_option else seed,
        keep_losses=True,
    )
    environment = {"PYTHONHASHSEED": str(seed), **QUIET_TRACKERS}
    for lever, chosen in levers.items():
        environment.update(setting.registry[lever].environment(chosen))
    return Launch(command=command, session=session, run_folder=setting.run_folder, name=name, environment=environment)


def _readings(
    setting: Setting, scratch: Path, output: _Output, records: list[Record], begun: tuple[float, float]
) -> list[Reading] | RecordError:
    """The metric, or why it was not found in this run; `begun` on the wall clock and on `time.perf_counter`."""
    metric = setting.metric
    try:
        if metric.file is not None:
            place = isolation.seen(scratch, Path(metric.file)) if setting.isolate else Path(metric.file)
            _check_new(place, metric.file, begun[0])
            found = metric_file.in_file(place, metric.key, metric.file)
            timed = [r if r.at_s is None else Reading(value=r.value, at_s=r.at_s - begun[0]) for r in found]
            return [r for r in timed if r.at_s is None or r.at_s >= 0]  # a folder of events keeps those of former runs
        if metric.pattern is not None:
            return metrics.in_lines(metric.pattern, output.lines)
    except RecordError as problem:
        return problem
    return metrics.in_losses(_losses(records, begun[1]))


def _check_new(place: Path, shown: str, begun_unix_s: float) -> None:
    """A file that is older than the run was written by another one: without isolation it lies there still."""
    try:
        written = place.stat()
    except OSError:  # which reading it says
        return
    if stat.S_ISREG(written.st_mode) and written.st_mtime < begun_unix_s - CLOCK_TICK_S:
        raise RecordError(
            f"no metric: `{shown}` was not written",
            cause="what lies there is older than this run",
            hint="name a file that the script writes, as it is seen from the working folder",
        )


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
            problem = "the metric was not found" if setting.metric.pattern else "no losses were recorded"
    losses = [loss for r in records if isinstance(r, Window) for loss in r.losses]
    faults = [
        f"{r.stage}: {r.error}: {r.message}"[:200] for r in records if isinstance(r, Failure) and r.stage != "script"
    ]
    toggles = [r for r in records if isinstance(r, Toggle)]
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
        engaged=side == "plain" or not setting.levers or (bool(toggles) and not faults),
        foreign_fraction=foreign,
    )


def _problem(exit_code: int, output: _Output, records: list[Record]) -> str:
    if exit_code == 0:
        return "" if any(isinstance(r, End) and r.num_steps for r in records) else "made no training step"
    raised = next((r for r in reversed(records) if isinstance(r, Failure) and r.stage == "script"), None)
    last = f"the last it printed is `{output.lines[-1][1].strip()[:160]}`" if output.lines else "it printed nothing"
    said = f"{raised.error}: {raised.message.splitlines()[0] if raised.message else ''}" if raised else last
    return f"ended with exit code {exit_code}: {said}" if exit_code > 0 else f"killed by signal {-exit_code}: {said}"
