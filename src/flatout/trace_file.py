"""How does a trace lie on disk? As JSON lines: the `Header` first, then one record a line, named by its `kind`.

A line is written whole or not at all, and a reader stops before a torn last line, so that a killed child leaves a
readable trace. In: records, or a path. Out: a path, records as they come, or a `Trace`.

This module is imported in the user's process: it needs the standard library only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, Any

from flatout.errors import RecordError
from flatout.records import from_json, to_json
from flatout.trace import (
    FORMAT,
    Agreement,
    Census,
    End,
    Facts,
    Failure,
    Header,
    Ready,
    Record,
    Refused,
    Scaling,
    Toggle,
    Trace,
    Window,
)

KINDS: dict[str, type[Any]] = {
    "header": Header,
    "facts": Facts,
    "window": Window,
    "census": Census,
    "scaling": Scaling,
    "agreement": Agreement,
    "toggle": Toggle,
    "failure": Failure,
    "refused": Refused,
    "end": End,
    "ready": Ready,
}
_NAMES = {kind: name for name, kind in KINDS.items()}


def encode(record: Record) -> str:
    """One line of a trace, without its newline.

    >>> encode(End(num_steps=3, wall_s=0.5))
    '{"kind": "end", "num_steps": 3, "wall_s": 0.5, "exit_code": null}'
    """
    return json.dumps({"kind": _NAMES[type(record)], **to_json(record)})


def decode(line: str, *, where: str = "trace") -> Record | None:
    """The record of one line, or None where its kind is not known to this version.

    Raises:
        RecordError: The line is not a record.
    """
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if not isinstance(value, dict) or "kind" not in value:
        raise RecordError(
            f"{where} is not a record",
            cause="the file was cut or edited, or is no trace",
            hint="measure again, or restore the file",
        )
    kind = KINDS.get(value["kind"])
    record: Record | None = from_json(kind, value, where=where) if kind else None
    return record


class Writer:
    """Appends records to a trace file, each in one `write`, so that a reader never sees half a line for long."""

    def __init__(self, path: Path | str) -> None:
        self._file: IO[str] = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115

    def write(self, record: Record) -> None:
        """Append one record."""
        self._file.write(encode(record) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; further writes raise."""
        self._file.close()


class Follower:
    """Reads a trace that is still being written: each `new()` returns the whole lines that have come since."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._position = 0
        self._rest = b""

    def new(self) -> list[Record]:
        """Records written since the last call; empty where the file does not exist yet."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._position)
                chunk = file.read()
        except FileNotFoundError:
            return []
        self._position += len(chunk)
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        found = [decode(line.decode("utf-8", "replace"), where=f"`{self.path}`") for line in lines if line.strip()]
        return [record for record in found if record is not None]


def read(path: Path | str) -> Trace:
    """The trace in a file; a torn last line is left out and said (`torn`).

    Raises:
        RecordError: No such file, no header, a newer format, or a broken line before the last.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as problem:
        raise RecordError(
            f"cannot read `{path}`", cause=str(problem.strerror or problem), hint="`flatout why SCRIPT` records a trace"
        ) from None
    lines = text.split("\n")
    torn = bool(lines.pop().strip())
    records: list[Record] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        if number == 1:
            _check_format(line, path)
        record = decode(line, where=f"`{path}` line {number}")
        if record is not None:
            records.append(record)
    if not records or not isinstance(records[0], Header):
        raise RecordError(
            f"`{path}` has no header",
            cause="the run ended before anything was recorded, or this is no trace",
            hint="`flatout why SCRIPT` records a trace",
        )
    return Trace(header=records[0], records=tuple(records[1:]), torn=torn)


def _check_format(line: str, path: Path) -> None:
    try:
        found = json.loads(line).get("format", 0)
    except (ValueError, AttributeError):
        return
    if isinstance(found, int) and found > FORMAT:
        raise RecordError(
            f"`{path}` has format {found}, this version reads up to {FORMAT}",
            cause="a newer flatout wrote it",
            hint="`pip install --upgrade flatout`",
        )
