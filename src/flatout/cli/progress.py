"""How does a measurement look while it goes on? In: the call. Out: a line of progress on stderr, then the report."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

from flatout.records.plan import Trial
from flatout.report.tried import remark
from flatout.report.words import printable, shortened
from flatout.trials.terms import Show

Found = TypeVar("Found")

FEW = 0.05
"""Below this share nothing is said of the time left."""

REASON = 80
"""Characters of why a trial has no ratio."""


def measured(
    call: Callable[[Show], Found],
    shown: Callable[[Found], object],
    stopped: str = "a shorter `--budget` takes less time",
) -> None:
    """Make the call with live progress on stderr, and show its result; `stopped` is said where Ctrl-C left nothing."""
    end_children_when_told_to_end()
    progress = Progress()
    with progress:
        try:
            result = call(progress.show)
        except KeyboardInterrupt:
            raise progress.stopped(f"the same command begins anew; {stopped}") from None
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # who stopped it twice still wants to see what it came to
    shown(result)


def end_children_when_told_to_end() -> None:
    """Make SIGTERM an exception, which leaves every context on its way: children are ended, their files removed.

    A terminal that is closed says the same by SIGHUP, unless `nohup` has seen to it that nobody listens.
    """
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, _stop)


def _stop(number: int, frame: FrameType | None) -> None:
    for one in (signal.SIGTERM, signal.SIGHUP):  # both may come, each twice: none may stop what it has begun
        signal.signal(one, signal.SIG_IGN)
    raise SystemExit(128 + number)


def trial_line(trial: Trial) -> str:
    """What a trial came to; without a ratio the reason stands in its place.

    >>> trial_line(Trial(levers={"bf16": {}}, outcome="failed", reason="no room")).split("  ")[-1].strip()
    'failed: no room'
    """
    again = " (measured again)" if trial.remeasured else ""
    levers = shortened(trial.label, 52)
    if trial.ratio is not None:
        return f"  {levers:<52} {f'{trial.ratio:.2f}x':>8}  {trial.outcome}{again}"
    reason = printable(remark(trial))
    said = reason if reason.startswith(trial.outcome) else f"{trial.outcome}: {reason}"
    return f"  {levers:<52} {shortened(said, REASON)}{again}"


class Progress:
    """What is being done, how far, and how long it has taken: one line that renews itself on a terminal."""

    def __init__(self) -> None:
        self.show = Show(stage=self._stage, trial=self._trial, tick=self._tick, remark=self._remark)
        self._terminal = sys.stderr.isatty()
        self._begun_s = time.perf_counter()
        self._text = ""
        self._share = 0.0
        self._end_s: float | None = None
        self._drawn_s = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def _stage(self, text: str, share: float) -> None:
        changed = text != self._text
        self._text, self._share = text, share
        now_s = time.perf_counter()
        self._end_s = self._begun_s + (now_s - self._begun_s) / share if share > FEW else None
        if self._terminal:
            self._draw()
        elif changed:
            print(f"flatout: {text}", file=sys.stderr, flush=True)

    def _trial(self, trial: Trial) -> None:
        self.line(trial_line(trial))

    def stopped(self, hint: str) -> KeyboardInterrupt:
        """Ctrl-C before there was anything to keep: at what, and what to do."""
        at = f"at the stage `{self._text}`" if self._text else "before the script was started"
        return KeyboardInterrupt(f"before there was anything to keep\ncause: Ctrl-C came {at}\nhint:  {hint}")

    def line(self, text: str) -> None:
        """A line that stays, above the one that renews itself."""
        self.clear()
        print(text, file=sys.stderr, flush=True)

    def _remark(self, text: str) -> None:
        self.line(f"flatout: {text}")

    def _tick(self) -> None:
        if self._terminal and time.perf_counter() - self._drawn_s > 0.5:
            self._draw()

    def _draw(self) -> None:
        self._drawn_s = time.perf_counter()
        spent_s = self._drawn_s - self._begun_s
        width = 20
        done = round(width * self._share)
        bar = "█" * done + "░" * (width - done)
        left = f", at most {max(self._end_s - self._drawn_s, 0):.0f} s left" if self._end_s is not None else ""
        line = f"{bar} {spent_s:3.0f} s{left}  {self._text}"
        print(f"\r\x1b[2K{shortened(line, 110)}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Take the line away, so that another can be printed in its place."""
        if self._terminal:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
