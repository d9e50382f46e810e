"""How does a trace lie on disk? As JSON lines: the `Header` first, then one record a line, named by its `kind`.

A line is written whole or not at all, and a reader stops before a torn last line, so that a killed child leaves a
readable trace. In: records, or a path. Out: lines, or records as they come.

This module is imported in the user's process: it needs the standard library only.
"""

from __future__ import annotations

import contextlib
import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flatout.errors import RecordError
from flatout.records.as_json import from_json, to_json
from flatout.records.trace import FORMAT, Header, Record

KINDS: dict[str, type[Any]] = {
    re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower(): kind for kind in typing.get_args(Record)
}
"""A line's `kind`: the record's name, as in `host_reads`."""

_NAMES = {kind: name for name, kind in KINDS.items()}


def encode(record: Record) -> str:
    """One line of a trace, without its newline.

    >>> encode(KINDS["end"](num_steps=3, wall_s=0.5))
    '{"kind": "end", "num_steps": 3, "wall_s": 0.5, "training_s": 0.0, "exit_code": null}'
    """
    return json.dumps({"kind": _NAMES[type(record)], **to_json(record)}, allow_nan=False)


def decode(line: str, *, where: str = "trace") -> Record | None:
    """The record of one line, or None where its kind is not known to this version.

    Raises:
        RecordError: The line is not a record.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise RecordError(
            f"{where} is not a record",
            cause="the file was cut or edited, or is no trace",
            hint="measure again, or restore the file",
        )
    if isinstance(found := value.get("format"), int) and found > FORMAT:  # said before a field that has changed
        raise RecordError(
            f"{where.partition(' line ')[0]} has format {found}, this version reads up to {FORMAT}",
            cause="a newer flatout wrote it",
            hint="`pip install --upgrade flatout`",
        )
    kind = KINDS.get(value["kind"])
    record: Record | None = from_json(kind, value, where=where) if kind else None
    return record


def append(record: Record, path: Path) -> None:
    """Write one record behind the others, in one unbuffered write, so that threads and forks never mix lines.

    The file is opened for each record, which are rare: a descriptor kept open could be closed by the script and
    become a file of its own, into which we would then write.

    Raises:
        OSError: The disk is full; the line may be torn, so write no further.
    """
    line = encode(record).encode() + b"\n"
    with open(path, "ab", buffering=0) as file:
        while line:  # a signal, or the last free bytes of the disk: the next one says which
            line = line[file.write(line) :]


class Follower:
    """Reads a trace that is still being written: each `new()` returns the whole lines that have come since."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._position = 0
        self._rest = b""

    def new(self) -> list[Record]:
        """Records written since the last call; empty where the file does not exist yet. A broken line is left out."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._position)
                chunk = file.read()
        except FileNotFoundError:
            return []
        self._position += len(chunk)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        found: list[Record] = []
        for line in filter(bytes.strip, lines):
            with contextlib.suppress(RecordError):
                record = decode(line.decode("utf-8", "replace"))
                found += [] if record is None else [record]
        return found


class Reader:
    """Yields the records of a trace one by one, the header first, so that a trace of any length fits the memory.

    Attributes:
        torn: Whether the last line was cut and left out; known when all of it was read.

    Raises:
        RecordError: While it is read: no such file, no header, a newer format, or a broken line before the last.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.torn = False

    def __iter__(self) -> Iterator[Record]:
        headed = False
        try:
            with open(self.path, "rb") as file:
                for number, line in enumerate(file, 1):
                    if not line.strip():
                        continue
                    if not line.endswith(b"\n"):
                        self.torn = True
                        break
                    record = decode(line.decode("utf-8", "replace"), where=f"`{self.path}` line {number}")
                    if record is None:
                        continue
                    if not headed and not isinstance(record, Header):
                        break
                    headed = True
                    yield record
        except OSError as problem:
            raise RecordError(
                f"cannot read `{self.path}`",
                cause=str(problem.strerror or problem),
                hint="`flatout why SCRIPT` records a trace",
            ) from None
        if not headed:
            raise RecordError(
                f"`{self.path}` has no header",
                cause="the run ended before anything was recorded, or this is no trace",
                hint="`flatout why SCRIPT` records a trace",
            )
