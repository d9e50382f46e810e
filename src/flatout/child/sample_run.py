"""How does a run end of which a sample is enough? After so many steps, wherever the script is, with its state kept.

In: a session that says after how many steps, and steps. Out: the files of `states` beside the trace, each rank's memory
step by step, and the word that the run is over. Imported in the user's process, in trials only: standard library.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from flatout.child.orders import SessionSpec
from flatout.frameworks.contract import Framework, Trained
from flatout.records.ranks import ended_file

OUTLIVES_S = 10.0
"""So long a rank above 0 waits for rank 0, which may be writing, and which it would cut off an exchange."""


def state_file(trace: str | Path, moment: str) -> Path:
    """Where the state of a run lies, from the path of its trace."""
    return Path(trace).with_suffix(f".{moment}.pt")


def memory_file(trace: str | Path, rank: int) -> Path:
    """Where a rank's memory step by step lies, from the path of the run's trace."""
    return Path(trace).with_suffix(f".memory-{rank}.json")


def environment_file(trace: str | Path) -> Path:
    """Where the environment of the first rank lies, from the path of the run's trace."""
    return Path(trace).with_suffix(".environment.json")


class SampleRun:
    """The end of one such run."""

    def __init__(self, spec: SessionSpec, framework: Framework, rank: int) -> None:
        self._spec, self._framework, self._rank = spec, framework, rank
        self._num_told = 0
        self._trained: Trained | None = None
        self._memory_bytes: list[int] = []

    def is_over(self, on_failure: Callable[[str, BaseException], None]) -> bool:
        """Called after each step: keep what is to be kept; whether this was the last."""
        spec, framework = self._spec, self._framework
        assert spec.stop_after is not None
        self._num_told += 1
        over = self._num_told + framework.num_missed_steps() >= spec.stop_after
        try:
            if spec.keep_environment and self._num_told == 1 and not self._rank:
                _keep_environment(environment_file(spec.trace))
            if spec.keep_states or spec.nudge:
                self._trained = self._trained or framework.trained()
            if self._trained is not None and spec.keep_states:
                self._keep_state(self._trained, over)
            if self._trained is not None and spec.nudge and not over:
                self._trained.nudge(self._num_told)
        except Exception as problem:  # noqa: BLE001  it is noted, and nothing can be compared
            on_failure("state", problem)
        if over:
            self._wait_for_first()
        return over

    def _keep_state(self, trained: Trained, over: bool) -> None:
        """After the first step and the last, with the memory of each between them."""
        if (found := trained.memory_of_step()) is not None:
            self._memory_bytes.append(found)
        if self._num_told == 1:
            self._keep(trained, "first")
            trained.memory_of_step()  # what keeping took is no step's
        if over:
            memory_file(self._spec.trace, self._rank).write_text(json.dumps(self._memory_bytes), encoding="utf-8")
            self._keep(trained, "last")

    def _keep(self, trained: Trained, moment: str) -> None:
        trained.keep(None if self._rank else str(state_file(self._spec.trace, moment)))

    def _wait_for_first(self) -> None:
        if self._spec.ranks is None or not self._rank:
            return
        ended = ended_file(Path(self._spec.ranks.folder), 0)
        until_s = time.monotonic() + OUTLIVES_S
        while time.monotonic() < until_s and not ended.exists():
            time.sleep(0.02)


def _keep_environment(path: Path) -> None:
    """Write what this process was started with, for the eyes of its user alone."""
    words = Path("/proc/self/environ").read_bytes().split(b"\0")
    pairs = (os.fsdecode(word).partition("=") for word in words if b"=" in word)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump({name: value for name, _, value in pairs}, file)
