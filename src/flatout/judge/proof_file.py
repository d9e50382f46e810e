"""How is a proof kept in its run folder? Each finished run as a line at once, the proof in the end.

In: a `WholeRun` or a `Proof`. Out: lines in `runs.jsonl`, and `proof.json`; and both read again.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from flatout.errors import RecordError, cannot_write
from flatout.judge.proof import Proof, WholeRun
from flatout.records import files
from flatout.records.as_json import from_json, to_json

RUNS = "runs.jsonl"
FILE = "proof.json"


def save(proof: Proof, folder: Path) -> None:
    """Write a proof beside its runs.

    Raises:
        MachineError: The disk is full, or the folder gone.
    """
    files.write(proof, folder / FILE)


def load(folder: Path) -> Proof:
    """The proof of a run folder.

    Raises:
        RecordError: There is none, or it cannot be read.
    """
    found = files.read(Proof, folder / FILE, missing=f"no proof in `{folder}`", hint="`flatout prove SCRIPT`")
    return replace(found, runs=tuple(_with_nan(run) for run in found.runs))


def append(run: WholeRun, folder: Path) -> None:
    """Add a finished run to those of a folder.

    Raises:
        MachineError: The disk is full, or the folder gone.
    """
    try:
        with open(folder / RUNS, "a", encoding="utf-8") as file:
            # begins with an end: behind a line that was cut off it would be lost with that
            file.write("\n" + json.dumps(to_json(run), allow_nan=False) + "\n")
    except OSError as problem:
        raise cannot_write(folder / RUNS, problem) from None


def finished_runs(folder: Path) -> list[WholeRun]:
    """The runs of a folder, in order; a line that an interruption cut off is left out."""
    try:
        lines = (folder / RUNS).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(_with_nan(from_json(WholeRun, json.loads(line), where=RUNS)))
        except (ValueError, RecordError):
            continue
    return found


def _with_nan(run: WholeRun) -> WholeRun:
    """The run as it was written: JSON holds a metric of NaN as one that is not known."""
    came_to_nan = run.value is None and not run.problem and run.num_readings > 0
    return replace(run, value=float("nan")) if came_to_nan else run
