"""How is a script run for some steps, as one process or on ranks, through what `flatout run` uses, leaving nothing?

In: a script, how it is divided, how many steps. Out: a `Sample`: its step times, losses and memory, where its state
lies, or why it did not get there. Rank 0 is isolated as well, and nobody hears what the script prints.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from flatout.child.orders import SessionSpec
from flatout.child.sample_run import environment_file, memory_file, state_file
from flatout.errors import FlatoutError, ScriptError
from flatout.frameworks.contract import Settings
from flatout.frameworks.lever import Lever
from flatout.judge import stats
from flatout.records.ceilings import Machine
from flatout.records.ranks import RankConfig as RankTerms
from flatout.records.trace import End, Header, Levers, Window
from flatout.records.trace_file import Follower
from flatout.run import isolation
from flatout.run.child_process import Child, Launch, environment_for, session_files, session_path
from flatout.run.rank_start import Start, devices_for
from flatout.run.rank_watch import Exchanges, RankWatch
from flatout.run.script import Script
from flatout.run.trackers import QUIET_TRACKERS
from flatout.trials.child_failures import Hung, not_reached, raised, why_ended
from flatout.trials.terms import Terms

LEFT_OUT_STEPS = 2
"""Steps after settling that are not counted: models are found, calls confirmed, levers engaged."""

FEWEST_STEPS = 4
"""With fewer settled steps a run has no step time."""

LOOK_S = 0.05

SLOW = 20.0
"""A run that takes so many times as long as it should is given up."""

PATIENCE = 4
"""A run that writes nothing for so many start limits is given up: it writes first when some steps have settled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all samples have in common; each has a folder of its own in the run folder."""

    script: Script
    registry: Mapping[str, Lever]
    run_folder: Path
    terms: Terms
    machine: Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """One sample.

    Attributes:
        num_ranks: 1 for one process.
        mode: How ranks divide the work.
        num_steps: Steps after which it ends.
        step_guess_s: About what a step takes; None where nobody knows.
        levers: What is engaged.
        keeps: Whether what was trained is kept.
        nudged: Whether parameters are moved in their last places after each step.
        takes_apart: Whether the parts of steps are timed, which costs time.
        launcher: The command that starts ranks of the script's own; empty: flatout starts what there is.
    """

    num_ranks: int = 1
    mode: str = "auto"
    num_steps: int
    step_guess_s: float | None = None
    levers: Levers = field(default_factory=dict)
    keeps: bool = False
    nudged: bool = False
    takes_apart: bool = False
    launcher: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortRun:
    """What a short run gave.

    Attributes:
        folder: Where its files are.
        num_steps: Steps that it made.
        step_s: Each settled training step of rank 0, without evaluation and checkpoints.
        losses: Of its last steps, as far as they were given to `backward`.
        peak_memory_bytes: Highest memory of a rank.
        step_memory_bytes: The same within a step, median over the steps; where what was trained is kept.
        exchanges: What exchanges cost.
        header: Of rank 0.
        problem: Why it did not get to its last step, or to a step time; None where it did.
        ended: Whether the script ended by itself before.
        took_s: Wall seconds.
        windows: Of each rank, in the order of ranks, what its trace holds.
        num_trained: Processes that made steps.
    """

    folder: Path
    num_steps: int = 0
    step_s: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    peak_memory_bytes: int | None = None
    step_memory_bytes: int | None = None
    exchanges: Exchanges | None = None
    header: Header | None = None
    problem: FlatoutError | None = None
    ended: bool = False
    took_s: float = 0.0
    windows: tuple[tuple[Window, ...], ...] = ()
    num_trained: int = 0

    @property
    def is_timed(self) -> bool:
        """Whether it has a step time: of a script that has fewer steps than were wanted as well."""
        return (self.problem is None or self.ended) and len(self.step_s) >= FEWEST_STEPS

    @property
    def median_step_s(self) -> float:
        """The median settled step."""
        return stats.summarize(self.step_s).median

    def state(self, moment: str) -> Path:
        """The file with what was trained."""
        return state_file(_trace(self.folder), moment)

    def environment(self) -> dict[str, str]:
        """What a launcher has started the first rank with.

        Raises:
            OSError: It was not kept.
        """
        found: dict[str, str] = json.loads(environment_file(_trace(self.folder)).read_text(encoding="utf-8"))
        return found

    def forget(self) -> None:
        """Remove its folder."""
        for scratch in self.folder.glob("scratch*"):
            with contextlib.suppress(FlatoutError):
                isolation.discard(scratch)
        shutil.rmtree(self.folder, ignore_errors=True)


def forget_all(run_folder: Path) -> None:
    """Remove what samples have left in a run folder."""
    for left in run_folder.glob("sample-*"):
        ShortRun(folder=left).forget()


def take(setting: Setting, wanted: Wanted, number: int, wait: Callable[[], None]) -> ShortRun:
    """Run the script for some steps.

    Raises:
        FlatoutError: It could not be started, for a reason that is not the ranks'.
    """
    place = setting.run_folder.resolve() / f"sample-{number}"
    place.mkdir()
    begun_s = time.perf_counter()
    if wanted.num_ranks == 1:
        found = _as_plain(setting, wanted, place, wait)
    else:
        found = _on_ranks(setting, wanted, place, wait)
    return replace(found, took_s=time.perf_counter() - begun_s)


def _trace(place: Path) -> Path:
    return place / "trace-run.jsonl"


def _session(setting: Setting, wanted: Wanted, place: Path) -> SessionSpec:
    files = session_files(place, "run")
    return SessionSpec(
        mode="run",
        trace=files["trace"],
        claim=files["claim"],
        levers=wanted.levers,
        script=setting.script.name,
        arguments=setting.script.arguments,
        settings=Settings(cache_folder=str(setting.run_folder.resolve() / "compiled")),
        cores_quota=setting.machine.cores_quota,
        flatout_started_s=time.perf_counter(),
        seed_run=0,  # what nobody seeds is the same in each
        keep_losses=True,
        stop_after=wanted.num_steps,
        keep_states=wanted.keeps,
        keep_environment=bool(wanted.launcher),
        nudge=wanted.nudged,
        takes_apart=wanted.takes_apart,
    )


def _variables(setting: Setting, wanted: Wanted) -> dict[str, str]:
    found = {"PYTHONHASHSEED": "1"}
    for name, settings in wanted.levers.items():
        found.update(setting.registry[name].environment(settings))
    return found


def _waited(
    launch: Launch, setting: Setting, wanted: Wanted, wait: Callable[[], None], is_over: Callable[[], bool] = bool
) -> tuple[int | None, Hung | None]:
    """Wait until a run ends, and end what is left of it; one that writes nothing any more makes no steps.

    Returns its exit code, where it ended by itself, and what to say of it, where it took too long.
    """
    start_s, guess_s = setting.terms.start_limit_s * wanted.num_ranks, wanted.step_guess_s
    still_s = max(PATIENCE * start_s, SLOW * (guess_s or 0.0))
    whole_s = start_s + SLOW * (setting.terms.start_limit_s if guess_s is None else wanted.num_steps * guess_s)
    begun_s = came_s = time.perf_counter()
    written = 0
    with Child(launch) as child:
        while child.alive:
            if is_over():
                return None, None
            now_s = time.perf_counter()
            size = sum(path.stat().st_size for path in launch.run_folder.glob("trace-run*.jsonl"))
            if size != written:
                written, came_s = size, now_s
            if now_s - came_s > still_s or now_s - begun_s > whole_s:
                on = f" on {wanted.num_ranks} ranks" if wanted.num_ranks > 1 else ""
                who = f"`{setting.script.name}`{on}"
                who = f"the ranks of `{shlex.join(wanted.launcher)}`" if wanted.launcher else who
                return None, Hung(
                    f"{who} did not make {wanted.num_steps} steps in {now_s - begun_s:.0f} s",
                    cause="no step was made any more, or much slower ones than were to be expected",
                    hint="`--start-limit` says how long the first steps may take",
                )
            wait()
            time.sleep(LOOK_S)
        return child.exit_code, None


# -- one process, or a launcher's ------------------------------------------------------------------------------------


def _as_plain(setting: Setting, wanted: Wanted, place: Path, wait: Callable[[], None]) -> ShortRun:
    """The very command of a plain run: the script, or what launches its ranks."""
    launched = bool(wanted.launcher)
    scratch = place / "scratch"
    command = isolation.isolate(
        wanted.launcher or setting.script.command,
        folder=Path.cwd(),
        script_folder=setting.script.folder,
        run_folder=place,
        scratch=scratch,
    )  # also with `--allow-writes`, for ranks cannot do without
    launch = Launch(
        command=command, session=replace(_session(setting, wanted, place), per_process=launched), run_folder=place,
        name="run", environment={**QUIET_TRACKERS, **_variables(setting, wanted)}, passed_on=launched,
    )  # fmt: skip
    try:
        exit_code, hung = _waited(launch, setting, wanted, wait)
        if (refusal := isolation.refusal(scratch)) is not None:
            raise refusal
    finally:
        isolation.discard(scratch)
    found = _found(place, wanted, sorted(place.glob("trace-run.*.jsonl")) if launched else [_trace(place)])
    if found.problem is not None and hung is not None:
        return replace(found, problem=hung)
    if found.problem is not None and launched and exit_code == 0 and found.header is None:
        return replace(found, problem=not_reached(wanted.launcher))
    return found


# -- ranks -----------------------------------------------------------------------------------------------------------


def _on_ranks(setting: Setting, wanted: Wanted, place: Path, wait: Callable[[], None]) -> ShortRun:
    terms = RankTerms(
        num_ranks=wanted.num_ranks, mode=wanted.mode, folder=str(place), hang_timeout_s=setting.terms.start_limit_s
    )
    session = replace(_session(setting, wanted, place), per_process=True, ranks=terms)
    launch = Launch(
        command=(), session=session, run_folder=place, name="run", environment={}, through_launcher=True
    )  # fmt: skip
    environment = environment_for(session_path(launch), dict(_variables(setting, wanted)))
    start = Start(
        command=setting.script.command,
        environment={name: value for name, value in environment.items() if os.environ.get(name) != value},
        terms=terms,
        script_folder=setting.script.folder,
        devices=devices_for(wanted.num_ranks, setting.machine, os.environ.get("CUDA_VISIBLE_DEVICES")),
        apart=True,
    )
    watch = RankWatch(terms)

    def is_over() -> bool:
        return watch.look() or len(watch.ends()) == wanted.num_ranks

    try:
        _, hung = _waited(replace(launch, command=start.launcher()), setting, wanted, wait, is_over)
        found = _found(place, wanted, sorted(place.glob("trace-run.*.jsonl")))
        found = replace(found, exchanges=watch.exchanges())
        if found.problem is None:
            return found
        problem = watch.hang.error if watch.hang is not None else start.problem() or watch.ended_early() or hung
        if problem is None and (failed := start.failed(watch.ends())) is not None:
            rank, how, told = failed
            last = told.strip().splitlines()[-1:] or ["it said nothing"]
            problem = ScriptError(f"rank {rank} {how}", cause=last[0][:200], hint=found.problem.hint)
        return replace(found, problem=problem or found.problem)
    finally:
        start.clean()


# -- what it wrote ---------------------------------------------------------------------------------------------------


def _found(place: Path, wanted: Wanted, traces: list[Path]) -> ShortRun:
    """The sample as its traces tell it."""
    records = [read for path in traces if (read := Follower(path).new())]
    wanted_steps, launched = wanted.num_steps, bool(wanted.launcher)
    first = next((r for r in records if isinstance(r[0], Header) and r[0].rank == 0), None)
    if first is None:
        unclaimed = Follower(_trace(place)).new()  # of processes that failed before they trained
        return ShortRun(folder=place, problem=why_ended(place, wanted_steps, [*records, unclaimed], launched=launched))
    by_rank = {r[0].rank: tuple(w for w in r if isinstance(w, Window)) for r in records if isinstance(r[0], Header)}
    windows = by_rank[0]
    peaks = [w.peak_memory_bytes for seen in by_rank.values() for w in seen if w.peak_memory_bytes is not None]
    end = next((r for r in reversed(first) if isinstance(r, End)), None)
    steps = [step - outside for w in windows for step, outside in zip(w.step_s, w.outside_s, strict=True)]
    whole = all(len(w.losses) == len(w.step_s) for w in windows)
    found = ShortRun(
        folder=place, num_steps=end.num_steps if end is not None else 0, step_s=tuple(steps[LEFT_OUT_STEPS:]),
        losses=tuple(loss for w in windows for loss in w.losses) if whole else (),
        peak_memory_bytes=max(peaks, default=None), step_memory_bytes=_step_memory(place, wanted.num_ranks),
        header=first[0] if isinstance(first[0], Header) else None,
        windows=tuple(by_rank[rank] for rank in sorted(by_rank)),
        num_trained=sum(any(isinstance(one, Window) for one in r) for r in records),
        ended=end is not None and end.num_steps < wanted.num_steps and raised([first]) is None,
    )  # fmt: skip
    if end is not None and end.num_steps >= wanted_steps:
        return found
    told = sorted(records, key=lambda one: one is not first)
    return replace(found, problem=why_ended(place, wanted_steps, told, launched=launched))


def _step_memory(place: Path, num_ranks: int) -> int | None:
    """Of the rank with the most: the median over its steps; None where one of them did not tell."""
    found = []
    for rank in range(num_ranks):
        try:
            steps = json.loads(memory_file(_trace(place), rank).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not steps:
            return None
        found.append(int(stats.summarize(steps).median))
    return max(found)
