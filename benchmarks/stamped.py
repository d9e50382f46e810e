"""How fast is a script, seen from outside? Its own progress lines are stamped as they arrive.

In: a command and what its lines look like. Out: one window of training, and what came before it. Nothing is put into
the process, so every side is watched in the same way. The process is ended once the window is over: end to end means
from its start to that line.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from flatout.machine import foreign_cpu

GOODBYE_S = 15.0
TAIL = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """What is timed.

    Attributes:
        line: A regular expression for progress lines; a group in it is the work since the line before.
        work_per_line: Work units of a line without a group.
        work: So many units are timed, up to the line that completes them.
        settle_s: After the first progress line so many seconds are not timed.
        limit_s: When to give up.
    """

    line: str
    work_per_line: float
    work: float
    settle_s: float
    limit_s: float = 600.0


@dataclass(slots=True, kw_only=True)
class Stamped:
    """One process.

    Attributes:
        first_s: From its start to its first progress line.
        begin_s: To the first line of the window.
        end_s: To the last line of the window.
        short_s: To the line with which as much work as the window has was done since the first one: a short run.
        work: Units within the window.
        foreign_fraction: The share of the CPU that others took during the window.
        failed: Why there is no window; empty where there is one.
        said: The end of its standard error.
        output: The end of its standard output, where it failed.
    """

    first_s: float | None = None
    begin_s: float | None = None
    end_s: float | None = None
    short_s: float | None = None
    work: float = 0.0
    foreign_fraction: float | None = None
    failed: str = ""
    said: str = field(repr=False, default="")
    output: str = field(repr=False, default="")

    @property
    def unit_s(self) -> float:
        """Seconds of one work unit."""
        if self.begin_s is None or self.end_s is None:
            raise ValueError(self.failed)
        return (self.end_s - self.begin_s) / self.work


def stamped(command: Sequence[str], folder: Path, env: Mapping[str, str], stretch: Stretch) -> Stamped:
    """Run a command until its window is over."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        begun_s = time.perf_counter()
        process = subprocess.Popen(
            list(command), cwd=folder, env={**os.environ, **env, "PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE,
            stderr=errors, text=True, errors="replace", start_new_session=True,
        )  # fmt: skip
        assert process.stdout is not None
        ended_by_us = threading.Event()
        too_long = threading.Timer(stretch.limit_s, _give_up, (process, ended_by_us))
        too_long.start()
        last: list[str] = []
        lines = _stamps(process.stdout, begun_s, last)
        try:
            found = watch(lines, stretch, lambda: foreign_cpu.take(process.pid))
            if found.failed and ended_by_us.is_set():
                found.failed = f"no window within {stretch.limit_s:.0f} s"
        finally:
            too_long.cancel()
            _goodbye(process)
        found.output = "".join(last)[-TAIL:] if found.failed else ""
        errors.seek(0)
        found.said = errors.read()[-TAIL:]
    return found


def watch(
    lines: Iterator[tuple[float, str]], stretch: Stretch, snapshot: Callable[[], foreign_cpu.Snapshot | None]
) -> Stamped:
    """Find the window in stamped lines; the lines after it are not read."""
    pattern = re.compile(stretch.line)
    found = Stamped()
    before: foreign_cpu.Snapshot | None = None
    in_all = 0.0
    for at_s, text in lines:
        match = pattern.search(text)
        if match is None:
            continue
        work = float(match.group(1)) if pattern.groups else stretch.work_per_line
        if found.first_s is None:
            found.first_s = at_s
        else:
            in_all += work
        if found.short_s is None and in_all >= stretch.work:
            found.short_s = at_s
        if found.begin_s is None:
            if at_s >= found.first_s + stretch.settle_s:
                found.begin_s, before = at_s, snapshot()
            continue
        found.work += work
        if found.work >= stretch.work:
            found.end_s = at_s
            found.foreign_fraction = foreign_cpu.fraction(before, snapshot())
            return found
    found.failed = "it ended before its window was over" if found.first_s is not None else "no progress line was seen"
    return found


def _stamps(output: IO[str], begun_s: float, last: list[str]) -> Iterator[tuple[float, str]]:
    for text in output:
        last.append(text)
        del last[:-40]
        yield time.perf_counter() - begun_s, text


def _give_up(process: subprocess.Popen[str], ended_by_us: threading.Event) -> None:
    ended_by_us.set()
    _end(process, signal.SIGKILL)


def _goodbye(process: subprocess.Popen[str]) -> None:
    """End the session: politely, so that `flatout run` says what it found; then whatever is left of it."""
    assert process.stdout is not None
    if process.poll() is None:
        _end(process, signal.SIGTERM)
        reader = threading.Thread(target=process.stdout.read, daemon=True)  # a full pipe would keep it from ending
        reader.start()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GOODBYE_S)
    _end(process, signal.SIGKILL)
    process.wait()


def _end(process: subprocess.Popen[str], number: int) -> None:
    try:
        os.killpg(process.pid, number)  # the group of its session; loaders' workers are in it
    except ProcessLookupError:
        return
