"""What does `prove` do, in order? Whole runs seed by seed, plain and under the plan in an order drawn by lot.

In: what is to be proved. Out: a `Proof`. Each finished run is kept at once; the same command goes on where it was
stopped.
"""

from __future__ import annotations

import datetime
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from flatout.errors import RecordError, ScriptError
from flatout.judge import proof
from flatout.judge.proof import RUNS, SIDES, Aim, Asked, Proof, Side, WholeRun
from flatout.records.as_json import from_json, to_json
from flatout.report import words
from flatout.report.proof_words import number
from flatout.run import sources
from flatout.trials.proving import inputs
from flatout.trials.proving.whole_run import Setting, run_whole
from flatout.trials.terms import Show

ASKED = "asked.json"


class Proving:
    """One `prove`, from start to proof; `typed` is what names the levers, and what else is to be typed again."""

    def __init__(self, setting: Setting, aim: Aim, typed: tuple[str, str], show: Show) -> None:
        self.setting = setting
        self.asked = setting.asked
        self.aim = aim
        self.typed = typed
        self.show = show
        self.source_hash = sources.hash_of(setting.script)
        self.runs = proof.finished_runs(setting.run_folder)
        self.notes: tuple[str, ...] = ()
        if self.runs:
            made = datetime.datetime.fromtimestamp((setting.run_folder / RUNS).stat().st_mtime)
            earlier = (
                f"{words.plural(len(self.runs), 'run')} made by an earlier command, the latest {made:%Y-%m-%d %H:%M}"
            )
            self.notes = (f"{earlier}; `--fresh` makes all anew",)

    def run(self) -> Proof:
        """All of it; Ctrl-C ends it and keeps what is there, if there is a pair.

        Raises:
            ScriptError: The plain script fails.
            RecordError: The metric is not where it was said to be.
            FlatoutError: See `flatout.errors`.
        """
        (self.setting.run_folder / ASKED).write_text(json.dumps(to_json(self.asked)) + "\n", encoding="utf-8")
        there = f"{words.plural(len(self.runs), 'run')} there already, in `{self.setting.run_folder}`; "
        self.show.remark((there if self.runs else "") + self._left())
        stopped = ""
        try:
            for seed, side in self._missing():
                self._one(seed, side)
                wanted = self._wanted()
                idle = proof.idle_levers(wanted, self.asked.levers)
                is_idle = 0 < len(self.asked.levers) == len(idle)
                if len(wanted) % 2 == 0 and (proof.seeds_ignored(wanted) or is_idle):
                    stopped = "more seeds would bring nothing new"
                    break
        except KeyboardInterrupt:
            stopped = proof.INTERRUPTED
            if not self.runs:
                raise
        self.show.stage("done", 1.0)
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        judged = proof.prove(self.asked, self.aim, self._wanted(), self.setting.machine, created, stopped)
        found = replace(
            judged,
            runs=tuple(replace(run, inputs={}) for run in judged.runs),  # kept with the runs, once
            notes=(*judged.notes, *self.notes),
            options=self.typed[0],
            metric_options=self.typed[1],
            run=str(self.setting.run_folder),
        )
        proof.save(found, self.setting.run_folder)
        return found

    def _wanted(self) -> list[WholeRun]:
        """The newest run of each seed and side."""
        return list({(run.seed, run.side): run for run in self.runs if run.seed < self.aim.num_seeds}.values())

    def _missing(self) -> Iterator[tuple[int, Side]]:
        there = {(run.seed, run.side) for run in self.runs if not run.problem}
        for seed in range(self.aim.num_seeds):
            plain_first = seed == 0 or random.Random(seed).random() < 0.5  # a script that fails should do so at once
            sides = SIDES if plain_first else SIDES[::-1]
            yield from ((seed, side) for side in sides if (seed, side) not in there)

    def _left(self) -> str:
        """How many runs are still to be made, and how long that takes, from those that are there."""
        done = [run for run in self._wanted() if not run.problem]
        num_left = 2 * self.aim.num_seeds - len(done)
        if not num_left:
            return "nothing is left to run"
        mean_s = sum(run.wall_s for run in done) / len(done) if done else None
        about = f", about {words.duration(mean_s * num_left)}" if mean_s else ""
        return f"{words.plural(num_left, 'whole run')} left{about}"

    def _one(self, seed: int, side: Side) -> None:
        name, script = proof.side_name(side, self.asked.levers), self.setting.script.name
        self.show.stage(f"seed {seed}, {name}; {self._left()}", len(self._wanted()) / (2 * self.aim.num_seeds))
        found = run_whole(self.setting, side, seed, self.show.tick)
        edited = inputs.differing([*(run.inputs for run in self.runs), found.inputs])
        if edited or sources.hash_of(self.setting.script) != self.source_hash:
            raise inputs.changed(script, edited)
        proof.append(found, self.setting.run_folder)
        self.runs.append(found)
        value = words.printable(found.problem) or number(found.value)
        self.show.remark(f"seed {seed:<2} {name:<14} {words.duration(found.wall_s):>8}  {words.shortened(value, 90)}")
        self._check_sense(found)

    def _check_sense(self, last: WholeRun) -> None:
        """Without a metric, or with a script that fails plain, more runs bring nothing."""
        log = f"what it printed: `{self.setting.output(last.side, last.seed)}`"
        if last.exit_code != 0 or "training step" in last.problem:
            if last.side == "plan":
                return  # that the plan breaks the script is a finding
            others = (
                f"it fails with seed {last.seed}; `--seeds {last.seed}` judges the runs before; " if last.seed else ""
            )
            raise ScriptError(
                f"`{self.setting.script.name}` {last.problem.partition(':')[0]}",
                cause=last.problem.partition(": ")[2] or "no optimizer update was seen",
                hint=others + log,
            )
        if last.problem and all(run.value is None for run in self.runs):
            name = "`--metric NAME` is a key, a column or a tag of the file"
            typed = "`--metric 'accuracy: ([0-9.]+)'`, or `--metric-file`"
            raise RecordError(
                f"no value of `{self.asked.metric.name}` in the first run",
                cause=last.problem,
                hint=name if self.asked.metric.file else f"{log}; {typed}",
            )


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
        seen = [run.inputs for run in proof.finished_runs(folder)]
        changed = inputs.differing([*seen, inputs.marks({path for one in seen for path in one})])
        if not changed:
            return folder, list(edited)
        edited |= dict.fromkeys(changed)
    return None, list(edited)
