"""Which readings of a metric stand in a file that a script wrote? JSON, JSON lines, CSV, TensorBoard's events.

In: a file and a key, a column or a tag. Out: `Reading`s in their order. TensorBoard's own reader is used for its files.
"""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

from flatout.errors import MachineError, RecordError
from flatout.metric import Reading, number_of


def in_file(file: Path, key: str, shown: str) -> list[Reading]:
    """What stands in a file that the script wrote.

    Args:
        file: Where it lies now.
        key: What to read.
        shown: How the user calls the file.

    Raises:
        RecordError: It is not there, half written, or holds no such number.
        MachineError: It is TensorBoard's, and TensorBoard is not installed.
    """
    if file.is_dir() or file.name.startswith("events.out.tfevents"):
        return _in_events(file, key, shown)
    try:
        text = file.read_text(encoding="utf-8-sig", errors="replace")  # `-sig`: as Windows' programs begin
    except OSError as problem:
        raise RecordError(
            f"no metric: `{shown}` was not written",
            cause=str(problem.strerror or problem),
            hint="name a file that the script writes, as it is seen from the working folder",
        ) from None
    return _in_csv(text, key, shown) if file.suffix.lower() in (".csv", ".tsv") else _in_json(text, key, shown)


def _in_json(text: str, key: str, shown: str) -> list[Reading]:
    """One object, or one a line (JSON lines); a list of numbers is their order."""
    try:
        rows = [json.loads(text)]
    except (ValueError, RecursionError) as problem:  # the latter: lists in lists in lists
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            rows = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            raise RecordError(
                f"`{shown}` is not JSON: half written, perhaps",
                cause=str(problem),
                hint="the script should write it whole before it ends",
            ) from None
        if not rows:
            raise _without(key, shown, "the file is empty") from None
    found = [value for row in rows for value in _under(row, key)]
    if not found:
        raise _without(key, shown, f"keys are {', '.join(_keys(rows[-1])) or 'none'}")
    return [Reading(value=number_of(value, f"`{shown}`")) for value in found]


def _under(row: Any, key: str) -> list[Any]:
    """The values of a key with dots, of one object or of a list of them."""
    if isinstance(row, list) and not key:
        return row
    if isinstance(row, list):
        return [value for one in row for value in _under(one, key)]
    if isinstance(row, dict) and key in row:
        value = row[key]
        return value if isinstance(value, list) else [value]
    first, _, rest = key.partition(".")
    return _under(row[first], rest) if rest and isinstance(row, dict) and first in row else []


def _keys(row: Any) -> list[str]:
    row = row[-1] if isinstance(row, list) and row else row
    return [f"`{key}`" for key in list(row)[:12]] if isinstance(row, dict) else []


def _in_csv(text: str, column: str, shown: str) -> list[Reading]:
    """The column's values; an empty cell says nothing, nor does a last line that is cut.

    A last line without an end is whole where it has all its cells and does not break off at a sign: many scripts join
    their lines, and a script that came to its own end has written what it wrote.
    """
    sample = text.partition("\n")[0]
    delimiter = max((",", ";", "\t"), key=sample.count)
    if not text.endswith("\n") and not _is_whole(text.rpartition("\n")[2], sample.count(delimiter), delimiter):
        text = text.rpartition("\n")[0] + "\n"
    reader = csv.DictReader(io.StringIO(text), delimiter=delimiter)
    try:
        rows, fields = list(reader), reader.fieldnames or ()
    except csv.Error as problem:
        raise RecordError(
            f"`{shown}` is not CSV", cause=str(problem), hint="name a file of lines with one number a column"
        ) from None
    names = {name.strip(): name for name in fields}
    if column not in names:
        raise _without(column, shown, f"columns are {', '.join(f'`{n}`' for n in names) or 'none'}")
    cells = [(row.get(names[column]) or "").strip() for row in rows]
    found = [Reading(value=number_of(cell, f"`{shown}`")) for cell in cells if cell]
    if not found:
        raise _without(column, shown, "the column is empty")
    return found


def _is_whole(line: str, num_delimiters: int, delimiter: str) -> bool:
    return line.count(delimiter) == num_delimiters and re.search(r"[\w\"%]\s*$", line) is not None


def _in_events(place: Path, tag: str, shown: str) -> list[Reading]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise MachineError(
            f"`{shown}` holds TensorBoard's events, which only TensorBoard reads",
            cause="the package `tensorboard` is not installed here",
            hint="`pip install tensorboard`",
        ) from None
    files = sorted(place.rglob("events.out.tfevents.*")) if place.is_dir() else [place]
    if not files:
        raise RecordError(
            f"no metric: `{shown}` has no event files",
            cause="none was written in this run",
            hint="name the folder that the script's `SummaryWriter` writes to",
        )
    events, tags = [], set()
    for file in files:
        reader = EventAccumulator(str(file), size_guidance={"scalars": 0, "tensors": 0})
        reader.Reload()
        tags |= {*reader.Tags()["scalars"]}
        if tag in reader.Tags()["scalars"]:
            events += [(event.wall_time, float(event.value)) for event in reader.Scalars(tag)]
    if not tags:
        raise RecordError(
            f"`{shown}` holds no readable events with numbers",
            cause="its event files are empty or damaged, or hold no scalars",
            hint="the script should close its `SummaryWriter`, or flush it, before it ends",
        )
    if not events:
        raise _without(tag, shown, f"tags are {', '.join(f'`{t}`' for t in sorted(tags)[:12])}")
    return [Reading(value=value, at_s=wall_s) for wall_s, value in sorted(events)]


def _without(key: str, shown: str, cause: str) -> RecordError:
    return RecordError(f"`{shown}` has no `{key}`", cause=cause, hint="`--metric NAME` names one of them")
