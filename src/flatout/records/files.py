"""How is a record kept as a file of its own? In: a record, a path. Out: the file; and the record read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from flatout.errors import RecordError, cannot_write
from flatout.records.as_json import from_json, to_json
from flatout.records.output_file import write_whole

R = TypeVar("R")


def write(record: object, path: Path) -> None:
    """Write it as one line of JSON, whole or not at all.

    Raises:
        MachineError: The disk is full, or the folder gone.
    """
    try:
        write_whole([json.dumps(to_json(record), allow_nan=False) + "\n"], path)
    except OSError as problem:
        raise cannot_write(path, problem) from None


def read(kind: type[R], path: Path, *, missing: str, hint: str, newest: int | None = None) -> R:
    """Read it again.

    Args:
        kind: The record's class.
        path: The file.
        missing: The error where there is none.
        hint: What makes one.
        newest: The newest `format` that this version reads; None for a record without.

    Raises:
        RecordError: There is none, it cannot be read, or a newer version wrote it.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        raise RecordError(missing, cause=f"`{path.name}` cannot be read: {problem}", hint=hint) from None
    except (ValueError, RecursionError) as problem:
        raise RecordError(
            f"`{path}` is torn", cause=f"it is not complete JSON: {problem}", hint="measure again, or restore the file"
        ) from None
    found = value.get("format") if isinstance(value, dict) else None
    if newest is not None and isinstance(found, int) and found > newest:  # said before a field that has changed
        raise RecordError(
            f"`{path}` has format {found}, this version reads up to {newest}",
            cause="a newer flatout wrote it",
            hint="`pip install --upgrade flatout`",
        )
    return from_json(kind, value, where=str(path))
