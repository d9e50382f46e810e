"""What does `prove` do, in order? Whole runs seed by seed, plain and under the plan in an order drawn by lot.

In: what is to be proved. Out: a `Proof`. Each finished run is kept at once; the same command goes on where it was
stopped.
"""

from __future__ import annotations

import datetime
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from flatout.errors import RecordError, ScriptError
from flatout.judge import proof, proof_file
from flatout.judge.proof import SIDES, Aim, Asked, Proof, Side, WholeRun
from flatout.judge.proof_file import RUNS
from flatout.records.as_json import from_json, to_json
from flatout.records.ceilings import Machine
from flatout.run import sources
from flatout.trials.proving import inputs
from flatout.trials.proving.whole_run import Setting, run_whole

ASKED = "asked.json"

ANEW = "`--fresh` runs them anew"


@dataclass(slots=True, kw_only=True)
class Show:
    """Who is told what is going on; the terminal's progress, or nobody."""

    stage: Callable[[str, float], None] = lambda text, share: None
    tick: Callable[[], None] = lambda: None
    remark: Callable[[str], None] = lambda text: None
    run: Callable[[WholeRun], None] = lambda run: None


class Proving:
    """One `prove`, from start to proof."""

    def __init__(self, asked: Asked, setting: Setting, aim: Aim, machine: Machine, show: Show) -> None:
        self.asked = asked
        self.setting = setting
        self.aim = aim
        self.machine = machine
        self.show = show
        self.runs = proof_file.finished_runs(setting.run_folder)
        self.stopped = ""
        self.notes = self._of_former_runs()
        self.source_hash = sources.hash_of(setting.script)
        self.typed = ("", "")
        """What names the levers, and what else is to be typed again."""

    def run(self) -> Proof:
        """All of it; Ctrl-C ends it and keeps what is there, if there is a pair.

        Raises:
            ScriptError: The plain script fails.
            RecordError: The metric is not where it was said to be.
            FlatoutError: See `flatout.errors`.
        """
        (self.setting.run_folder / ASKED).write_text(json.dumps(to_json(self.asked)) + "\n", encoding="utf-8")
        try:
            for seed, side in self._missing():
                self._one(seed, side)
                self._stop_where_it_is_vain()
                if self._is_paired() and (proof.seeds_ignored(self._wanted()) or self._is_idle()):
                    self.stopped = "more seeds would bring nothing new"
                    break
        except KeyboardInterrupt:
            self.stopped = proof.INTERRUPTED
            if not self.runs:
                raise
        self.show.stage("done", 1.0)
        return self.judged()

    def estimate(self, usual_s: float | None) -> str:
        """How long it will take, before it starts; from the runs that are there, else from what one usually takes."""
        missing = self._num_missing()
        if not self.runs:
            return estimate(missing, usual_s)
        are = "run is" if len(self.runs) == 1 else "runs are"
        there = f"{len(self.runs)} {are} there already, in `{self.setting.run_folder}`"
        mean_s = _mean([run.wall_s for run in self._wanted()]) or usual_s
        return f"{there}; {estimate(missing, mean_s)}" if missing else f"{there}: nothing is left to run"

    def judged(self) -> Proof:
        """What the runs so far come to."""
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        judged = proof.prove(self.asked, self.aim, self._wanted(), self.machine, created, self.stopped)
        place = self.setting.run_folder
        bare = tuple(replace(run, inputs={}, environment={}) for run in judged.runs)  # kept with the runs, once
        notes = (*judged.notes, *self.notes)
        options, metric_options = self.typed
        found = replace(judged, runs=bare, notes=notes, options=options, metric_options=metric_options, run=str(place))
        proof_file.save(found, place)
        return found

    def _wanted(self) -> list[WholeRun]:
        """The newest run of each seed and side."""
        return list({(run.seed, run.side): run for run in self.runs if run.seed < self.aim.num_seeds}.values())

    def _is_paired(self) -> bool:
        """Whether each seed that was begun has both of its runs."""
        sides = [run.side for run in self._wanted()]
        return sides.count("plain") == sides.count("plan")

    def _is_idle(self) -> bool:
        """Whether nothing of the plan was at work in its latest run."""
        last = next((run for run in reversed(self.runs) if run.side == "plan"), None)
        return last is not None and not last.problem and 0 < len(self.asked.levers) == len(last.idle)

    def _of_former_runs(self) -> tuple[str, ...]:
        """What is to be said of runs that an earlier command made."""
        if not self.runs:
            return ()
        notes = []
        if names := inputs.changed_variables(self.runs, inputs.environment()):
            notes.append(f"earlier runs saw another environment than now: {inputs.named(names)}; {ANEW}")
        if not self._num_missing():
            made = datetime.datetime.fromtimestamp((self.setting.run_folder / RUNS).stat().st_mtime)
            notes.append(f"all runs are earlier ones, the latest of {made:%Y-%m-%d %H:%M}; {ANEW}")
        return tuple(notes)

    def _missing(self) -> Iterator[tuple[int, Side]]:
        there = {(run.seed, run.side) for run in self.runs if not run.problem}
        for seed in range(self.aim.num_seeds):
            plain_first = seed == 0 or random.Random(seed).random() < 0.5  # a script that fails should do so at once
            sides = SIDES if plain_first else SIDES[::-1]
            yield from ((seed, side) for side in sides if (seed, side) not in there)

    def _num_missing(self, *of: Side) -> int:
        """Runs that are still to be made; of these sides, of both without any."""
        sides = of or SIDES
        there = {(r.seed, r.side) for r in self.runs if not r.problem and r.seed < self.aim.num_seeds}
        return len(sides) * self.aim.num_seeds - sum(side in sides for _, side in there)

    def _one(self, seed: int, side: Side) -> None:
        share = len(self._wanted()) / (2 * self.aim.num_seeds)
        text = f"seed {seed}, {proof.side_name(side, self.asked.levers)}{self._left()}"
        self.show.stage(text, share)
        found = run_whole(self.setting, side, seed, lambda seconds: self.show.tick())
        if sources.hash_of(self.setting.script) != self.source_hash:
            raise inputs.changed(self.setting.script.name)
        if edited := inputs.changed_files([*self.runs, found], since=False):
            raise inputs.changed(self.setting.script.name, edited)
        proof_file.append(found, self.setting.run_folder)
        self.runs.append(found)
        self.show.run(found)

    def _left(self) -> str:
        """How long the rest takes, from the runs that are there."""
        means = {side: _mean([r.wall_s for r in self._wanted() if r.side == side]) for side in SIDES}
        known = [m for m in means.values() if m is not None]
        if not known:
            return ""
        num_left = self._num_missing()
        rest_s = sum((means[side] or max(known)) * self._num_missing(side) for side in SIDES)
        return f"; about {_minutes(rest_s)} left for {num_left} run{'' if num_left == 1 else 's'}"

    def _stop_where_it_is_vain(self) -> None:
        """Without a metric, or with a script that fails, more runs bring nothing."""
        last = self.runs[-1]
        if not last.problem:
            return
        log = self.setting.run_folder / f"output-{last.side}-{last.seed}.log"
        if last.exit_code != 0 or "training step" in last.problem:
            if last.side == "plan":
                return  # that the plan breaks the script is a finding
            raise ScriptError(
                f"`{self.setting.script.name}` {last.problem.partition(':')[0]}",
                cause=last.problem.partition(": ")[2] or "no optimizer update was seen",
                hint=f"{self._seen_again(last.seed)}; what it printed: `{log}`",
            )
        if any(run.value is not None for run in self.runs):
            return
        typed = (
            "`--metric NAME` is a key, a column or a tag of the file"
            if self.asked.metric.file
            else "`--metric 'accuracy: ([0-9.]+)'`, or `--metric-file`"
        )
        raise RecordError(
            f"no value of `{self.asked.metric.name}` in the first run",
            cause=last.problem,
            hint=typed if self.asked.metric.file else f"see what it printed: `{log}`; {typed}",
        )

    def _seen_again(self, seed: int) -> str:
        """How to see a plain run fail once more; what is there already is judged with fewer seeds."""
        typed = self.setting.script.typed
        if seed == 0 and not self.setting.seed_option:
            return f"`python {typed}` shows the same"
        option = self.setting.seed_option
        again = f"`python {typed} {option} {seed}` shows the same" if option else f"it fails with seed {seed}"
        return again if seed == 0 else f"{again}; `--seeds {seed}` judges the runs before"


def former(folders: Sequence[Path], asked: Asked) -> tuple[Path | None, list[str]]:
    """The newest folder whose runs answer the same question; and what was edited since newer ones were made."""
    found = []
    for folder in folders:
        try:
            value = json.loads((folder / ASKED).read_text(encoding="utf-8"))
            if from_json(Asked, value, where=ASKED) == asked:
                found.append((folder.stat().st_mtime, folder))
        except (OSError, ValueError, RecordError):
            continue
    edited: dict[str, None] = {}
    for _, folder in sorted(found, reverse=True):
        changed = inputs.changed_files(proof_file.finished_runs(folder), since=True)
        if not changed:
            return folder, list(edited)
        edited |= dict.fromkeys(changed)
    return None, list(edited)


def estimate(num_runs: int, run_s: float | None) -> str:
    """How long it will take, before it starts."""
    if run_s is None:
        return f"{num_runs} whole runs; how long one takes is not known before the first has ended"
    return f"{num_runs} whole runs of about {_minutes(run_s)}: about {_minutes(num_runs * run_s)}"


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _minutes(seconds: float) -> str:
    from flatout.report.words import duration

    return duration(seconds)
