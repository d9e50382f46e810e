"""Items, and one JSON line for each, on the disk the moment it is known: a run that is cut still yields all before."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_CHARACTERS = 3000

LINES = "gpu_check.jsonl"


@dataclass(frozen=True)
class Item:
    """One thing that only a device can show."""

    name: str
    shows: str
    """What must come out, or what is noted."""
    make: Callable[[], dict[str, Any]]
    """Its `ok` is True or False where there is a tolerance, None where something is only noted."""
    rehearsed: str = "CPU"
    """On what a rehearsal runs it."""
    cannot: str = ""
    """Why a rehearsal cannot."""


class Log:
    """Appends lines to `gpu_check.jsonl`.

    Args:
        out: The folder.
        group: Of the items.
        about: What every line says besides: device and commit.
        rehearses: Items that a CPU cannot run are not.
    """

    def __init__(self, out: Path, group: str, about: dict[str, Any], *, rehearses: bool) -> None:
        self._file = out / LINES
        self.now = out / f"{group}.now"
        """Names the item that runs, for who has to cut it off."""
        self._group = group
        self._about = about
        self._rehearses = rehearses

    def run(self, item: Item) -> None:
        """Run it, and write down what came out."""
        self.now.write_text(item.name, "utf-8")
        print(f"{self._group:10} {item.name:30}", end=" ", flush=True)
        if not self._rehearses:
            self.note(item.name, item.make)
        elif item.cannot:
            self.note(item.name, lambda: {"skipped": item.cannot})
        else:
            self.note(item.name, lambda: {**item.make(), "rehearsed": item.rehearsed})

    def note(self, name: str, make: Callable[[], dict[str, Any]]) -> None:
        """Write down what comes out, or what was raised."""
        begun_s = time.perf_counter()
        line: dict[str, Any] = {"group": self._group, "item": name, "unix_s": round(time.time(), 1), **self._about}
        line["ok"] = None
        try:
            line |= make()
        except BaseException as problem:  # noqa: BLE001  a broken item is a finding, and the next ones are wanted
            line |= {"ok": False, "error": type(problem).__name__, "message": str(problem)[:MOST_CHARACTERS]}
            line["trace"] = traceback.format_exc()[-MOST_CHARACTERS:]
        line["took_s"] = round(time.perf_counter() - begun_s, 3)
        with open(self._file, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(f"ok={line['ok']!s:5} {line['took_s']:6.1f} s {line.get('skipped', line.get('error', ''))}", flush=True)
