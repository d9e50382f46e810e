"""Run a script under `torch.profiler` and say where its steps go: `profile_script.py OUT SCRIPT [ARGUMENTS]...`.

An oracle that shares no code with flatout: the profiler's own spans of loaders and optimizers, and of the autograd
engine. 30 updates are left out, then some are profiled, then the script is ended. What recording its events costs is
measured in the same process, and taken off: a data set of many small operations a batch would look slower than it is.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import os
import runpy
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile

SKIPPED, PROFILED = 30, 31
"""Updates. Between the first and the last that are profiled lie whole steps, also where two optimizers make one."""


class Oracle:
    """Counts updates, profiles some steps, writes what it saw and ends the process."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.num = 0
        self.profiler = profile(activities=[ProfilerActivity.CPU])

    def __call__(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.num += 1
        if self.num == SKIPPED:
            self.profiler.start()
        elif self.num == SKIPPED + PROFILED:
            self.profiler.stop()
            self.out.write_text(json.dumps(spans(self.profiler.events(), event_s())), encoding="utf-8")
            os._exit(0)


def event_s(num: int = 5000) -> float:
    """Seconds that recording one event takes: small additions with the profiler and without, by turns."""
    one = torch.ones(1)
    costs = []
    for _ in range(5):
        seconds = []
        for profiled in (False, True):
            with profile(activities=[ProfilerActivity.CPU]) if profiled else contextlib.nullcontext():
                begin = time.perf_counter()
                for _ in range(num):
                    torch.add(one, one)
                seconds.append(time.perf_counter() - begin)
        costs.append((seconds[1] - seconds[0]) / num)
    return statistics.median(costs)


def spans(events: Any, cost_s: float) -> dict[str, float]:
    """Seconds by phase over the profiled steps, of the thread that makes updates, less `cost_s` for each event."""
    found = [(e.name, e.thread, e.time_range.start / 1e6, e.time_range.end / 1e6) for e in events]
    thread = next(thread for name, thread, _, _ in found if name.startswith("Optimizer.step"))
    found = sorted((start, end, name) for name, one, start, end in found if one == thread)
    updates = [end for start, end, name in found if name.startswith("Optimizer.step")]
    first, last = updates[0], updates[-1]
    inside = [(start, end, name) for start, end, name in found if start >= first and end <= last]
    special = {
        "data": [(s, e) for s, e, n in inside if n.startswith("enumerate(DataLoader)")],
        "optimizer": [(s, e) for s, e, n in inside if n.startswith(("Optimizer.step", "Optimizer.zero_grad"))],
        "backward": backward(inside, updates),
    }
    special["forward and loss"] = between([span for some in special.values() for span in some], inside)
    num_steps = len(updates) - 1
    total = {"step": (last - first - cost_s * len(inside)) / num_steps}
    for name, some in special.items():
        num_events = sum(any(a <= s and e <= b for a, b in some) for s, e, _ in inside)
        total[name] = (covered(some) - cost_s * num_events) / num_steps
    return total


def between(taken: list[tuple[float, float]], inside: list[tuple[float, float, str]]) -> list[tuple[float, float]]:
    """From the first to the last operation of every stretch in which no other phase is seen."""
    bounds = [end for _, end in sorted(taken)]
    found: dict[int, tuple[float, float]] = {}
    for start, end, _ in inside:
        if not any(a <= start and end <= b for a, b in taken):
            stretch = bisect.bisect(bounds, start)
            first, last = found.get(stretch, (start, end))
            found[stretch] = (min(first, start), max(last, end))
    return list(found.values())


def backward(inside: list[tuple[float, float, str]], updates: list[float]) -> list[tuple[float, float]]:
    """From the first to the last function that the autograd engine evaluates in each step."""
    engine = [(s, e) for s, e, n in inside if n.startswith("autograd::engine::evaluate_function")]
    found = []
    for begin, end in itertools.pairwise(updates):
        step = [(s, e) for s, e in engine if s >= begin and e <= end]
        if step:
            found.append((min(s for s, _ in step), max(e for _, e in step)))
    return found


def covered(some: list[tuple[float, float]]) -> float:
    """Length of the union of spans."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(some):
        if stop > end:
            total += stop - max(start, end)
            end = stop
    return total


if __name__ == "__main__":
    register_optimizer_step_post_hook(Oracle(Path(sys.argv[1])))
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    torch.set_num_threads(int(os.environ.get("ORACLE_THREADS", torch.get_num_threads())))
    runpy.run_path(sys.argv[0], run_name="__main__")
