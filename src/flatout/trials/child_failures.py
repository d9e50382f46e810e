"""What broke in a child, and what follows? Levers that raised or stayed; a script that cannot be measured.

In: how it ended, and what it wrote. Out: a failed candidate, warnings, or an error in three parts.
"""

from __future__ import annotations

import errno
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from flatout.errors import FlatoutError, Inconclusive, ScriptError
from flatout.frameworks import kind
from flatout.records.trace import FOREIGN_LIMIT, End, Failure, Header, Levers, Record
from flatout.report.words import nearby, printable
from flatout.run.child_process import Ended, tail
from flatout.run.script import Script

COLOUR = re.compile(r"\x1b\[[0-9;]*m")

_LOST_PEER = re.compile(r"connection (closed|reset)|broken pipe|nccl|timed out waiting|heartbeat", re.IGNORECASE)
"""What a rank raises because another one has ended."""

_RAISED = re.compile(r"(?:\[rank\d+\]: ?)?((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:: .*)?)$")
"""The last line of a traceback: an exception's name and what it says."""

_REFUSED = re.compile(r"\S+: error: .*")
"""What a parser of arguments says."""


MOST_BYTES = 1 << 16
"""Of what was printed: launchers print pages after the ranks have."""


class CandidateFailed(Exception):
    """The script broke while a candidate was engaged, or was compared; says how.

    Args:
        how: In words.
        in_doubt: Whether that says nothing of its numbers: memory or time ran out.
    """

    def __init__(self, how: str, *, in_doubt: bool = False) -> None:
        super().__init__(how)
        self.in_doubt = in_doubt


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
                raise CandidateFailed(sentence(record), in_doubt=record.out_of_memory)
            found[f"{record.stage}: {record.error}: {record.message[:200]}"] = None
    return found


def sentence(failure: Failure) -> str:
    """Where and how something broke, in one line."""
    what = "out of memory" if failure.out_of_memory else failure.error
    return f"{failure.stage}: {what}: {(failure.message.splitlines() or [''])[0]}"[:300]


def launcher_failed(words: Sequence[str], problem: FlatoutError) -> FlatoutError:
    """What to say of a launcher whose ranks do not train."""
    if isinstance(problem, NotReached | Hung):
        return problem
    command = shlex.join(words)
    return ScriptError(f"`{command}` failed", cause=problem.cause, hint=f"`{command}` shows the same")


# -- a plain script that cannot be measured -------------------------------------------------------------------------


def cannot_measure(script: Script, end: Ended, limit_s: float, taken: float | None = None) -> ScriptError:
    """The error for a plain script that gave nothing to measure; `taken` is what others use of the CPU."""
    again = _seen_again(script, end)
    printed = end.output.strip().splitlines()
    last = f"the last line it printed: `{_plain(printed[-1])[:160]}`" if printed else "it printed nothing"
    if (taken or 0.0) > FOREIGN_LIMIT:
        last = f"the machine is busy: others use {100 * (taken or 0.0):.0f} % of the CPU; {last}"
    if end.hung and end.num_steps:
        return ScriptError(
            f"`{script.name}` stopped making training steps",
            cause=f"after {end.num_steps} steps none came in time; {last}",
            hint=f"{again}; if its steps only take long, `--start-limit 10m` waits longer for the first ones",
        )
    if end.hung and end.trained:
        return ScriptError(
            f"`{script.name}` did not make its first few training steps within {limit_s:.0f} s",
            cause=f"its steps take very long, or it stopped; {last}",
            hint="`--start-limit 10m` waits longer",
        )
    if end.hung:
        return ScriptError(
            f"`{script.name}` made no training step within {limit_s:.0f} s",
            cause=f"no optimizer update was seen; {last}",
            hint=f"`--start-limit 10m` waits longer; steps are seen through {kind().steps_show_in}",
        )
    if end.finished:
        few = f"after {end.num_steps} training steps" if end.num_steps else "without a training step"
        return ScriptError(
            f"`{script.name}` ended {few}",
            cause="that is too few to measure"
            if end.num_steps
            else "no optimizer update was seen, nor enough backward passes, or calls of models in evaluation mode",
            hint="give it more epochs or more data"
            if end.num_steps
            else "is this the script, and long enough? If it trains as well, `--infer` measures its calls of models",
        )
    if end.exit_code is not None and end.exit_code < 0:
        return ScriptError(f"`{script.name}` was {end.sentence()}", cause=last, hint=again)
    kept = f"; all that it printed is in `{nearby(Path(end.output_path))}`" if end.output_path and printed else ""
    return ScriptError(
        f"`{script.name}` failed: {_plain(end.sentence())}", cause=_raised(end) or last, hint=f"{again}{kept}"
    )


def cannot_release(script: Script, broke: str) -> Inconclusive:
    """The error for a plain script of which nothing was seen because a lever stayed: that is no fault of the script's.

    Args:
        script: The script.
        broke: What was raised as the lever was to be taken back.
    """
    return Inconclusive(
        f"`{script.name}` could not be measured plainly: a lever could not be released",
        cause=printable(broke),
        hint="`--without LEVER` leaves it out",
    )


def cannot_record(script: Script, what: str, records: Iterable[Record]) -> Inconclusive:
    """The error for a script that trains, of which `what` is not among the records: that is flatout's own fault."""
    broke = [sentence(one) for one in records if isinstance(one, Failure) and one.stage != "script"]
    return Inconclusive(
        f"`{script.name}` trains, but {what} could not be recorded",
        cause=printable(broke[-1]) if broke else "the record is not there, and nothing says why",
        hint="the script is not to blame: please report it, with the newest folder in `.flatout`",
    )


def _seen_again(script: Script, end: Ended) -> str:
    """How to see the same without flatout, or, of what a trial alone brings about, what to do about it."""
    failure = end.failure
    if failure is not None and f"Errno {errno.EXDEV}" in failure.message:
        return "in a trial folders cannot be renamed, only files: `shutil.move` does both, or pass `--allow-writes`"
    if failure is not None and f"Errno {errno.EROFS}" in failure.message:
        return (
            "a trial may write to the working folder, the script's, home and temporary ones, where it leaves no trace; "
            "elsewhere with `--allow-writes`, for good"
        )
    if failure is not None and failure.error == "EOFError":
        return "in a trial nobody answers questions: give the script what it asks for as an argument"
    return f"`python {script.typed}` shows the same"


def _raised(end: Ended) -> str:
    """Where in the script's own code the exception was raised; empty where that is not known."""
    file, _, line = (end.failure.place if end.failure is not None else "").rpartition(":")
    return f"it came from line {line} of `{_plain(str(nearby(Path(file))))}`" if file else ""


def _plain(text: str) -> str:
    """A script's own words, without what would colour or move on the terminal."""
    return printable(COLOUR.sub("", text))


# -- a short run that has not made its steps -------------------------------------------------------------------------


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
