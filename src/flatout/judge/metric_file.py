"""Which readings of a metric stand in a file that a script wrote? JSON, JSON lines, CSV, TensorBoard's events.

In: a file and a key, a column or a tag. Out: `Reading`s in their order. TensorBoard's own reader is used for its files.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.errors import MachineError, RecordError
from flatout.judge.metric import Reading, number_of

_WHOLE = "the script should write each row whole, and flush the file before it ends"


Event = tuple[float, float]
"""When it was written, on the wall clock, and its value."""


def in_file(file: Path, key: str, shown: str, since_unix_s: float = 0.0) -> list[Reading]:
    """What stands in a file that the script wrote.

    Args:
        file: Where it lies now.
        key: What to read.
        shown: How the user calls the file.
        since_unix_s: Events before this moment are of former runs, which leave theirs in the same folder.

    Raises:
        RecordError: It is not there, half written, or holds no such number.
        MachineError: It is TensorBoard's, and TensorBoard is not installed.
    """
    if file.is_dir() or file.name.startswith("events.out.tfevents"):
        return _in_events(file, key, shown, since_unix_s)
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
        rows = _rows(text, shown, problem)
        if not rows:
            raise _without(key, shown, "the file is empty") from None
    found = [value for row in rows for value in _under(row, key)]
    if not found:
        raise _without(key, shown, f"keys are {', '.join(_keys(rows[-1])) or 'none'}")
    return [Reading(value=number_of(value, f"`{shown}`")) for value in found]


def _rows(text: str, shown: str, problem: Exception) -> list[Any]:
    """One object a line; `problem` is why all together are none."""
    rows = []
    for number, line in enumerate(text.split("\n"), 1):  # `splitlines` splits at what may stand in a text as well
        try:
            rows += [json.loads(line)] if line.strip() else []
        except (ValueError, RecursionError) as broken:
            cause = f"line {number}: {broken}" if rows else str(problem)
            raise RecordError(
                f"`{shown}` is not JSON: half written, perhaps",
                cause=cause,
                hint="the script should write it whole before it ends",
            ) from None
    return rows


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
    """The column's values; an empty cell says nothing.

    Raises:
        RecordError: There is no such column, or a row ends before it has all its cells: what it holds is not known.
    """
    head = text.partition("\n")[0]
    bare = re.sub(r'"[^"]*"', "", head)
    delimiter = max((",", ";", "\t"), key=bare.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        rows = [row for row in reader if row]
    except csv.Error as problem:
        raise RecordError(f"`{shown}` is not CSV", cause=f"line {reader.line_num}: {problem}", hint=_WHOLE) from None
    names = [name.strip() for name in rows[0]] if rows else []
    if column not in names:
        raise _without(column, shown, f"columns are {', '.join(f'`{n}`' for n in names) or 'none'}")
    _check_rows(rows, text, delimiter, shown)
    at = len(names) - 1 - names[::-1].index(column)  # of two columns of one name the last, as dictionaries have it
    cells = [row[at].strip() for row in rows[1:]]
    found = [Reading(value=number_of(cell, f"`{shown}`")) for cell in cells if cell]
    if not found:
        raise _without(column, shown, "the column is empty")
    return found


def _check_rows(rows: list[list[str]], text: str, delimiter: str, shown: str) -> None:
    """All rows have all cells; a last one without an end is whole where it does not break off within a number."""
    for number, row in enumerate(rows[1:], 2):
        last = number == len(rows)
        if len(row) < len(rows[0]) or (last and not re.search(r"[\w\"%\n]\s*$", text)):
            raise RecordError(
                f"`{shown}` has a row that is cut" + (": it is half written" if last else ""),
                cause=f"row {number}, with {len(row)} of {len(rows[0])} cells: `{delimiter.join(row)[:80]}`",
                hint=_WHOLE,
            )


def _in_events(place: Path, tag: str, shown: str, since_unix_s: float) -> list[Reading]:
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
    events: dict[Path, list[Event]] = {}
    tags: set[str] = set()
    for file in files:
        reader = EventAccumulator(str(file), size_guidance={"scalars": 0, "tensors": 0})
        reader.Reload()
        tags |= {*reader.Tags()["scalars"]}
        told = reader.Scalars(tag) if tag in reader.Tags()["scalars"] else ()
        if found := [(one.wall_time, float(one.value)) for one in told if one.wall_time >= since_unix_s]:
            events.setdefault(file.parent, []).extend(found)
    if not tags:
        raise RecordError(
            f"`{shown}` holds no readable events with numbers",
            cause="its event files are empty or damaged, or hold no scalars",
            hint="the script should close its `SummaryWriter`, or flush it, before it ends",
        )
    if not events:
        raise _without(tag, shown, f"tags are {', '.join(f'`{t}`' for t in sorted(tags)[:12])}")
    return [Reading(value=value, at_s=wall_s) for wall_s, value in sorted(_of_one_folder(events, place, tag, shown))]


def _of_one_folder(events: Mapping[Path, list[Event]], place: Path, tag: str, shown: str) -> list[Event]:
    """The events, where all are of one folder; of several they are several metrics."""
    if len(events) == 1:
        return next(iter(events.values()))
    names = [str(Path(shown) / folder.relative_to(place)) for folder in events]
    raise RecordError(
        f"`{tag}` stands in {len(names)} folders of `{shown}`",
        cause=f"{', '.join(f'`{name}`' for name in names[:4])}: one metric is asked for, not a mixture",
        hint=f"`--metric-file {names[0]}`",
    )


def _without(key: str, shown: str, cause: str) -> RecordError:
    return RecordError(f"`{shown}` has no `{key}`", cause=cause, hint="`--metric NAME` names one of them")
