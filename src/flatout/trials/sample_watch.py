"""How is a short run waited for, and when is it given up? One that writes nothing any more makes no steps.

In: a launch, limits. Out: how it ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from flatout.run.launch import Child, Launch

LOOK_S = 0.05


class Limits(NamedTuple):
    """How long a run may write nothing, and how long it may take."""

    still_s: float
    whole_s: float


class End(NamedTuple):
    """How a run ended: its exit code, where it ended by itself; after how long it was ended, where it took too long."""

    exit_code: int | None = None
    hung_s: float | None = None


def watched(launch: Launch, is_over: Callable[[], bool], limits: Limits, wait: Callable[[], None]) -> End:
    """Wait until it ends, and end what is left of it."""
    begun_s = came_s = time.perf_counter()
    written = 0
    with Child(launch) as child:
        while child.alive:
            if is_over():
                return End()
            now_s = time.perf_counter()
            if (size := _written(launch.run_folder)) != written:
                written, came_s = size, now_s
            if now_s - came_s > limits.still_s or now_s - begun_s > limits.whole_s:
                return End(hung_s=now_s - begun_s)
            wait()
            time.sleep(LOOK_S)
        return End(exit_code=child.exit_code)


def _written(place: Path) -> int:
    """How much the traces hold: it grows while steps are made."""
    return sum(path.stat().st_size for path in place.glob("trace-run*.jsonl"))
