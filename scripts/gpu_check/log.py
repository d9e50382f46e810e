"""One JSON line for each item, on the disk the moment it is known: a run that is cut still yields all before."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_CHARACTERS = 3000


class Log:
    """Appends lines to `gpu_check.jsonl`."""

    def __init__(self, out: Path, group: str) -> None:
        self.out = out
        self._group = group

    def item(self, name: str, make: Callable[[], dict[str, Any]]) -> None:
        """Run one item. Its `ok` is True or False where there is a tolerance, None where something is only noted."""
        begun_s = time.perf_counter()
        line: dict[str, Any] = {"group": self._group, "item": name, "unix_s": round(time.time(), 1), "ok": None}
        try:
            line |= make()
        except BaseException as problem:  # noqa: BLE001  a broken item is a finding, and the next ones are wanted
            line |= {"ok": False, "error": type(problem).__name__, "message": str(problem)[:MOST_CHARACTERS]}
            line["trace"] = traceback.format_exc()[-MOST_CHARACTERS:]
        line["took_s"] = round(time.perf_counter() - begun_s, 3)
        with open(self.out / "gpu_check.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())
        print(f"{self._group:12} {name:34} ok={line['ok']!s:5} {line['took_s']:6.1f} s", flush=True)
