"""What broke in a child, and what follows? Levers that raised, or could not be taken back; a process that was killed.

In: how it ended, and what it wrote. Out: a failed candidate, warnings, or whether the child is started again.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from flatout.errors import FlatoutError, ScriptError
from flatout.records.trace import Failure, Levers, Record
from flatout.run.launch import Ended
from flatout.trials.sample_ends import Hung, NotReached

MOST_KILLED = 3
"""So many times a plain script that has trained is started again after it was killed: a machine that runs out of memory
kills somebody, and minutes of measuring should not end with that; one that is killed always cannot be measured."""

KILLED = "the script was killed by SIGKILL"


class CandidateFailed(Exception):
    """The script broke while a candidate was engaged; says how."""


@dataclass(slots=True)
class Kills:
    """How often the plain script was killed from outside, as far as it is forgiven."""

    num: int = 0

    def forgives(self, end: Ended, *, has_trained: bool) -> bool:
        """Whether a plain script that was killed is started again; one that never trained is told at once."""
        if end.exit_code != -signal.SIGKILL or end.hung or not has_trained or self.num >= MOST_KILLED:
            return False
        self.num += 1
        return True

    def note(self, warnings: dict[str, None]) -> dict[str, None]:
        """The warnings with one line about it."""
        times = f"{self.num} times" if self.num > 1 else "once"
        line = f"{KILLED} {times} (perhaps the machine ran out of memory), and was started again"
        return {**{text: None for text in warnings if not text.startswith(KILLED)}, line: None}


def not_released(records: Iterable[Record]) -> str:
    """What broke when a child was to take a lever back, after which it ends; empty where nothing."""
    return next((sentence(r) for r in records if isinstance(r, Failure) and r.stage == "release"), "")


def raise_failures(records: Iterable[Record], levers: Levers) -> dict[str, None]:
    """Warnings of what broke in a child that goes on.

    Raises:
        CandidateFailed: It broke under levers.
    """
    found: dict[str, None] = {}
    for record in records:
        if isinstance(record, Failure) and record.stage != "recorder":
            if levers:
                raise CandidateFailed(sentence(record))
            found[f"{record.stage}: {record.error}: {record.message[:200]}"] = None
    return found


def sentence(failure: Failure) -> str:
    """Where and how something broke, in one line."""
    kind = "out of memory" if failure.out_of_memory else failure.error
    return f"{failure.stage}: {kind}: {(failure.message.splitlines() or [''])[0]}"[:300]


def launcher_failed(words: Sequence[str], problem: FlatoutError) -> FlatoutError:
    """What to say of a launcher whose ranks do not train."""
    if isinstance(problem, NotReached | Hung):
        return problem
    command = shlex.join(words)
    return ScriptError(f"`{command}` failed", cause=problem.cause, hint=f"`{command}` shows the same")
