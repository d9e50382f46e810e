"""How is the whole script run once, with or without a plan, with a seed of its own? Isolated, as trials are.

In: a script, levers, a seed, where the metric is found. Out: a `WholeRun`; a script that fails is one with a problem.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flatout.child.orders import SessionSpec
from flatout.errors import RecordError
from flatout.frameworks.contract import Settings
from flatout.frameworks.lever import Lever
from flatout.judge import metric as metrics
from flatout.judge import metric_file
from flatout.judge.metric import Reading
from flatout.judge.proof import Asked, Side, WholeRun
from flatout.machine import foreign_cpu
from flatout.machine.energy_counters import EnergyMeter
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.trace import End, Failure, Header, Inputs, Record, Toggle, Window
from flatout.run import choice, isolation
from flatout.run.child_process import Child, Launch, session_files
from flatout.run.script import Script
from flatout.run.trackers import QUIET_TRACKERS
from flatout.trials.proving import inputs

POLL_S = 0.05
"""How often output is looked at: so sure is the moment at which a line came."""

LOOK_S = 1.0
"""How often the use of the CPU is looked at."""

KEPT_READINGS = 400

NO_EFFECT = "no effect of it was seen before the run was over"

_Lines = list[tuple[float, str]]
"""What a run printed, line by line, with the seconds since its start at which it came."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all runs have in common.

    Attributes:
        script: What is run.
        asked: What is to be proved.
        registry: All levers by name.
        run_folder: Where records go.
        machine: Where it is run.
        isolate: Whether files of the user are kept from the runs.
    """

    script: Script
    asked: Asked
    registry: Mapping[str, Lever]
    run_folder: Path
    machine: Machine
    isolate: bool = True

    def output(self, side: Side, seed: int) -> Path:
        """The file with all that a run prints."""
        return self.run_folder / f"output-{side}-{seed}.log"


def run_whole(setting: Setting, side: Side, seed: int, tick: Callable[[], None]) -> WholeRun:
    """Run the script from its start to its end.

    Args:
        setting: What all runs have in common.
        side: With the plan or without.
        seed: Number of the seed.
        tick: Called while it runs.

    Raises:
        FlatoutError: The run could not be started, or a file that it reads was edited meanwhile.
    """
    scratch = setting.run_folder / f"scratch-{side}-{seed}"
    launch = _launch(setting, side, seed, scratch)
    output = setting.output(side, seed)
    for file in (Path(launch.session.trace), output):  # those of an interrupted run, which may be writing still
        file.unlink(missing_ok=True)
    begun_unix_s, begun_s = time.time(), time.perf_counter()
    try:
        with EnergyMeter() as meter, Child(launch) as child:
            lines, foreign = _watched(child, output, tick, setting.machine.cores_quota)
            wall_s = time.perf_counter() - begun_s
            exit_code, records = child.exit_code, child.rest()
        if setting.isolate and (refusal := isolation.refusal(scratch)) is not None:
            raise refusal
        readings, missing = _readings(setting, scratch, lines, records, (begun_unix_s, begun_s))
    finally:
        if scratch.exists():
            isolation.discard(scratch)
    facts = next((r for r in reversed(records) if isinstance(r, Facts)), None)
    end = next((r for r in reversed(records) if isinstance(r, End)), None)
    losses = [loss for r in records if isinstance(r, Window) for loss in r.losses]
    faults = [f"{r.stage}: {r.error}: {r.message}" for r in records if isinstance(r, Failure) and r.stage != "script"]
    problem = _problem(exit_code, lines, records) or missing
    pattern = setting.asked.metric.pattern
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
        fault=faults[0][:200] if faults else "",
        idle=_idle(setting, facts, records) if side == "plan" else {},
        doubled=next((line.strip()[:120] for _, line in lines if len(re.findall(pattern, line)) > 1), "")
        if pattern is not None and readings  # else it may be one whose search does not end
        else "",
        inputs=_inputs(setting, records, begun_unix_s),
        foreign_fraction=foreign,
        joules=(meter.joules(facts.device, gpus=facts.gpus) if facts is not None else meter.joules()).joules,
    )


def _launch(setting: Setting, side: Side, seed: int, scratch: Path) -> Launch:
    levers = setting.asked.levers if side == "plan" else {}
    script, option, name = setting.script, setting.asked.seed_option, f"{side}-{seed}"
    command = [*script.command, option, str(seed)] if option else script.command
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
        seed_run=None if option else seed,
        keep_losses=True,
        list_read=tuple({str(Path.cwd()), str(script.folder or Path.cwd())}),
    )
    environment: dict[str, str | None] = {"PYTHONHASHSEED": str(seed), **QUIET_TRACKERS}
    for lever, chosen in levers.items():
        environment.update(setting.registry[lever].environment(chosen))
    return Launch(command=command, session=session, run_folder=setting.run_folder, name=name, environment=environment)


def _watched(child: Child, output: Path, tick: Callable[[], None], cores: float | None) -> tuple[_Lines, float | None]:
    """Listen until it ends: its lines, and what others used of the CPU meanwhile."""
    begun_s = time.perf_counter()
    first = last = foreign_cpu.take(child.session_id)
    lines: _Lines = []
    alive, looked_s, rest = True, 0.0, b""
    with open(output, "rb") as printed:
        while alive:
            alive = child.alive
            now_s = time.perf_counter() - begun_s
            *whole, rest = re.split(rb"[\r\n]+", rest + printed.read() + (b"" if alive else b"\n"))
            lines += [(now_s, line.decode("utf-8", "replace")) for line in whole if line]
            tick()
            if alive and now_s - looked_s > LOOK_S:  # what it used itself is known only while it lives
                last, looked_s = foreign_cpu.take(child.session_id), now_s
            if alive:
                time.sleep(POLL_S)
    return lines, foreign_cpu.fraction(first, last, cores=cores)


def _readings(
    setting: Setting, scratch: Path, lines: _Lines, records: Sequence[Record], begun: tuple[float, float]
) -> tuple[list[Reading], str]:
    """The metric, and why it was not found; `begun` is when the run did, on the wall clock and on that of traces."""
    metric = setting.asked.metric
    try:
        if metric.file is not None:
            place = isolation.seen(scratch, Path(metric.file)) if setting.isolate else Path(metric.file)
            return metric_file.in_file(place, metric.key, metric.file, since_unix_s=begun[0]), ""
        if metric.pattern is not None:
            found = metrics.in_lines(metric.pattern, lines)
            printed = f"{len(lines)} line{'s' * (len(lines) != 1)} that it printed"
            return found, "" if found else f"the metric was not found: `{metric.pattern}` is in none of {printed}"
    except RecordError as problem:
        return [], f"{problem.error} ({problem.cause})"
    found = metrics.in_losses(_losses(records, begun[1]))
    return found, "" if found else "no losses were recorded: nothing that looks like a loss had `backward` called"


def _losses(records: Sequence[Record], begun_s: float) -> list[tuple[float, float]]:
    """Seconds since the start of the run, and the loss, of each step that has one."""
    header = next((r for r in records if isinstance(r, Header)), None)
    if header is None or header.zero_monotonic_s is None:
        return []
    found = []
    for window in (r for r in records if isinstance(r, Window) and len(r.losses) == len(r.step_s)):
        at_s = header.zero_monotonic_s - begun_s + window.start_s  # one clock for all processes of a machine
        for step_s, loss in zip(window.step_s, window.losses, strict=True):
            at_s += step_s
            found.append((at_s, loss))
    return found


def _inputs(setting: Setting, records: Sequence[Record], begun_unix_s: float) -> dict[str, str]:
    """Marks of the files that it read.

    Raises:
        ScriptError: One was edited meanwhile, and by whom else than the user: an isolated run writes elsewhere.
    """
    paths = next((r.paths for r in records if isinstance(r, Inputs)), ())
    edited = inputs.edited_since(paths, begun_unix_s)
    if edited and setting.isolate:
        raise inputs.changed(setting.script.name, edited)
    return inputs.marks(path for path in paths if path not in edited)


def _idle(setting: Setting, facts: Facts | None, records: Sequence[Record]) -> dict[str, str]:
    """Levers that were not at work, and why: what shows no effect had none, whatever it was told to do."""
    levers = setting.asked.levers
    toggles = [r for r in records if isinstance(r, Toggle)]
    shown = {name for toggle in toggles for name in toggle.evidence}
    missing = {name: why for toggle in toggles for name, why in toggle.missing.items()}
    reasons, _ = choice.idle(levers, facts, setting.registry, lambda: setting.machine, missing)
    return {n: reasons.get(n) or NO_EFFECT for n in levers if n not in shown}


def _problem(exit_code: int, lines: _Lines, records: Sequence[Record]) -> str:
    if exit_code == 0:
        return "" if any(isinstance(r, End) and r.num_steps for r in records) else "made no training step"
    raised = next((r for r in reversed(records) if isinstance(r, Failure) and r.stage == "script"), None)
    last = f"the last it printed is `{lines[-1][1].strip()[:160]}`" if lines else "it printed nothing"
    said = f"{raised.error}: {raised.message.splitlines()[0] if raised.message else ''}" if raised else last
    return f"ended with exit code {exit_code}: {said}" if exit_code > 0 else f"killed by signal {-exit_code}: {said}"
