"""Which readings of a metric stand in a file that a script wrote? JSON, JSON lines, CSV, TensorBoard's events.

In: a file and a key, a column or a tag. Out: `Reading`s in their order. TensorBoard's own reader is used for its files.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flatout.errors import MachineError, RecordError
from flatout.judge.metric import Reading, number_of

_CUT = re.compile(r"^[+-]?\.?$|[\d.][.eE]$|[\d.][eE][+-]$")
"""How a number begins that goes on, or is still to come."""


def in_file(file: Path, key: str, shown: str, since_unix_s: float = 0.0) -> list[Reading]:
    """What stands in a file that the script wrote.

    Args:
        file: Where it lies now.
        key: What to read.
        shown: How the user calls the file.
        since_unix_s: When the run began: an older file, or event in a folder of TensorBoard's, is of a former run.

    Raises:
        RecordError: It is not there, half written, or holds no such number.
        MachineError: It is TensorBoard's, and TensorBoard is not installed.
    """
    if file.is_dir() or file.name.startswith("events.out.tfevents"):
        return _in_events(file, key, shown, since_unix_s)
    cause = "what lies there is older than this run"
    try:
        text = file.read_text(encoding="utf-8-sig", errors="replace")  # `-sig`: as Windows' programs begin
        is_old = file.stat().st_mtime < since_unix_s
    except OSError as problem:
        is_old, cause = True, str(problem.strerror or problem)
    if is_old:
        raise RecordError(
            f"no metric: `{shown}` was not written",
            cause=cause,
            hint="name a file that the script writes, as it is seen from the working folder",
        )
    in_csv = file.suffix.lower() in (".csv", ".tsv")
    found = _in_csv(text, key, shown) if in_csv else _in_json(text, key, shown)
    return [Reading(value=number_of(value, f"`{shown}`")) for value in found]


def _in_json(text: str, key: str, shown: str) -> list[Any]:
    """One object, or one a line (JSON lines); a list of numbers is their order."""
    try:
        rows = [json.loads(text)]
    except (ValueError, RecursionError) as problem:  # the latter: lists in lists in lists
        rows, cause = [], str(problem)
        for number, line in enumerate(text.split("\n"), 1):  # `splitlines` splits at what may stand in a text as well
            try:
                rows += [json.loads(line)] if line.strip() else []
            except (ValueError, RecursionError) as broken:
                raise RecordError(
                    f"`{shown}` is not JSON: half written, perhaps",
                    cause=f"line {number}: {broken}" if rows else cause,
                    hint="the script should write it whole before it ends",
                ) from None
    found = [value for row in rows for value in _under(row, key)]
    if not found:
        last = rows[-1][-1] if rows and isinstance(rows[-1], list) and rows[-1] else rows[-1] if rows else None
        raise _without(key, shown, "keys", list(last) if isinstance(last, dict) else [])
    return found


def _under(row: Any, key: str) -> list[Any]:
    """The values of a key with dots, of one object or of a list of them."""
    if isinstance(row, list):
        return [value for one in row for value in _under(one, key)]
    if not isinstance(row, dict):
        return []
    if key in row:
        return row[key] if isinstance(row[key], list) else [row[key]]
    first, _, rest = key.partition(".")
    return _under(row[first], rest) if rest and first in row else []


def _in_csv(text: str, column: str, shown: str) -> list[str]:
    """The column's values; an empty cell says nothing.

    Raises:
        RecordError: There is no such column, or a row ends before it has all its cells: what it holds is not known.
    """
    head = re.sub(r'"[^"]*"', "", text.partition("\n")[0])
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=max((",", ";", "\t"), key=head.count), strict=True)
    try:
        rows = [row for row in reader if row]
        names = [name.strip() for name in rows[0]] if rows else []
        if any(len(row) < len(names) for row in rows):
            raise csv.Error(f"a row that is cut: fewer than {len(names)} cells")
        if rows[1:] and not text.endswith("\n") and _CUT.search(rows[-1][-1]):
            raise csv.Error(f"a row that is cut: it ends in `{rows[-1][-1]}`")
    except csv.Error as problem:
        hint = "the script should write each row whole, and flush the file before it ends"
        raise RecordError(f"`{shown}` is not CSV", cause=f"line {reader.line_num}: {problem}", hint=hint) from None
    at = max((number for number, name in enumerate(names) if name == column), default=None)
    found = [] if at is None else [row[at].strip() for row in rows[1:] if row[at].strip()]
    if not found:
        raise _without(column, shown, "columns" if at is None else "the column is empty; columns", names)
    return found


def _in_events(place: Path, tag: str, shown: str, since_unix_s: float) -> list[Reading]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise MachineError(
            f"`{shown}` holds TensorBoard's events, which only TensorBoard reads",
            cause="the package `tensorboard` is not installed here",
            hint="`pip install tensorboard`",
        ) from None
    events: dict[Path, list[tuple[float, float]]] = {}
    tags: set[str] = set()
    for file in sorted(place.rglob("events.out.tfevents.*")) if place.is_dir() else [place]:
        reader = EventAccumulator(str(file), size_guidance={"scalars": 0, "tensors": 0})
        reader.Reload()
        tags |= {*reader.Tags()["scalars"]}
        told = reader.Scalars(tag) if tag in reader.Tags()["scalars"] else ()
        if found := [(one.wall_time, float(one.value)) for one in told if one.wall_time >= since_unix_s]:
            events.setdefault(file.parent, []).extend(found)
    if not tags:
        raise RecordError(
            f"`{shown}` holds no readable events with numbers",
            cause="there are no event files, or they are empty or damaged, or hold no scalars",
            hint="name the folder that the script's `SummaryWriter` writes to, which it should close before it ends",
        )
    if not events:
        raise _without(tag, shown, "tags", sorted(tags))
    if len(events) > 1:
        names = [str(Path(shown) / folder.relative_to(place)) for folder in events]
        raise RecordError(
            f"`{tag}` stands in {len(names)} folders of `{shown}`",
            cause=f"{', '.join(f'`{name}`' for name in names[:4])}: one metric is asked for, not a mixture",
            hint=f"`--metric-file {names[0]}`",
        )
    return [Reading(value=value, at_s=wall_s - since_unix_s) for wall_s, value in sorted(*events.values())]


def _without(key: str, shown: str, what: str, names: Iterable[str]) -> RecordError:
    there = ", ".join(f"`{name}`" for name in list(names)[:12]) or "none"
    return RecordError(
        f"`{shown}` has no `{key}`", cause=f"{what} are {there}", hint="`--metric NAME` names one of them"
    )
