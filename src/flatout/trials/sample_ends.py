"""Why has a short run of a script not made its steps?

In: what its processes have written, and what was printed. Out: an error.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from flatout.errors import ScriptError
from flatout.frameworks import kind
from flatout.records.trace import End, Failure, Header, Record
from flatout.run.launch import tail

_LOST_PEER = re.compile(r"connection (closed|reset)|broken pipe|nccl|timed out waiting|heartbeat", re.IGNORECASE)
"""What a rank raises because another one has ended."""

_RAISED = re.compile(r"(?:\[rank\d+\]: ?)?((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:: .*)?)$")
"""The last line of a traceback: an exception's name and what it says."""

_REFUSED = re.compile(r"\S+: error: .*")
"""What a parser of arguments says."""


MOST_BYTES = 1 << 16
"""Of what was printed: launchers print pages after the ranks have."""


class NotReached(ScriptError):
    """A launcher's command ended well, and no process of it was seen to train."""


class Hung(ScriptError):
    """A run made no steps any more, or much slower ones than were to be expected."""


def not_reached(words: Sequence[str]) -> NotReached:
    """What to say of a launcher whose ranks start with another environment."""
    return NotReached(
        f"no process that trains was reached through `{shlex.join(words)}`",
        cause=f"the command ended well, and {kind().label} was imported in no process that it passed its "
        "environment on to",
        hint="what starts ranks may extend `PYTHONPATH`, and must not replace it or start with an environment of its "
        "own",
    )


def raised(processes: Sequence[Sequence[Record]]) -> Failure | None:
    """What the script raised: of several processes not what only says that another one has ended."""
    found = [r for records in processes for r in reversed(records) if isinstance(r, Failure) and r.stage == "script"]
    return next((one for one in found if not _LOST_PEER.search(one.message)), found[0] if found else None)


def why_ended(place: Path, num_steps: int, processes: Sequence[Sequence[Record]], *, launched: bool) -> ScriptError:
    """The error.

    Args:
        place: The run's folder.
        num_steps: What it was to make.
        processes: What each process has written, that of rank 0 first.
        launched: Whether the script's ranks are those of a launcher, which prints more after they have failed.
    """
    problem = raised(processes)
    ends = [r for records in processes[:1] for r in reversed(records) if isinstance(r, End)]
    error = f"the script did not make {num_steps} steps"
    if problem is not None:
        headers = [r for records in processes if problem in records for r in records if isinstance(r, Header)]
        who = f"rank {headers[0].rank}: " if headers and headers[0].rank else ""
        where = f" ({problem.place})" if problem.place else ""
        error, cause = "the script failed", who + ": ".join([problem.error, *problem.message.splitlines()[:1]]) + where
    elif ends:
        cause = f"it ended after {ends[0].num_steps} steps"
    else:
        lines = [line.strip() for line in tail(place / "output-run.log", MOST_BYTES).splitlines() if line.strip(" =-")]
        cause = (told(lines) if launched else "") or (lines or ["it printed nothing"])[-1][:200]
    return ScriptError(error, cause=cause, hint="`flatout run` shows what it prints")


def told(lines: Sequence[str]) -> str:
    """What the first traceback or the first parser of arguments says; empty where there is neither.

    >>> told(["[rank1]: Traceback (most recent call last):", '[rank1]:   File "a.py"', "[rank1]: KeyError: 'A'"])
    "KeyError: 'A'"
    >>> told(["usage: a.py [-h]", "a.py: error: unrecognized arguments: --b", "Traceback (most recent call last):"])
    'a.py: error: unrecognized arguments: --b'
    """
    within = False
    for line in lines:
        if _REFUSED.fullmatch(line) and not within:
            return line[:200]
        if "Traceback (most recent call last)" in line:
            within = True
        elif within and (found := _RAISED.fullmatch(line)):
            return found.group(1)[:200]
    return ""
