"""What can go wrong, said in three parts: what happened, why, and what to do next.

    FlatoutError
    ├── UsageError        the command line or a file given on it is wrong           exit code 2
    ├── ScriptError       the user's script failed, or never trained                exit code 3
    ├── RecordError       a file is missing, torn or newer, or lacks what was asked exit code 4
    ├── MachineError      the machine refuses something that is needed              exit code 5
    ├── Inconclusive      there was not enough to judge by                          exit code 6
    └── InternalError     flatout itself failed in a way that nobody foresaw        exit code 7

In: plain strings. Out: an exception that prints itself as `error:`, `cause:`, `hint:`.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable


class FlatoutError(Exception):
    """An error that a user can act on.

    Args:
        error: What happened, lower case, literals in backticks, no final stop.
        cause: Why it happened.
        hint: What to type or change next.
    """

    exit_code = 1

    def __init__(self, error: str, *, cause: str, hint: str) -> None:
        super().__init__(error)
        self.error = error
        self.cause = cause
        self.hint = hint

    def __str__(self) -> str:
        """The three lines as they are printed.

        >>> print(UsageError("no such script `train.py`", cause="the file does not exist", hint="check the path"))
        error: no such script `train.py`
        cause: the file does not exist
        hint:  check the path
        """
        return f"error: {self.error}\ncause: {self.cause}\nhint:  {self.hint}"


class UsageError(FlatoutError):
    """The command line, or a file named on it, is wrong."""

    exit_code = 2


class ScriptError(FlatoutError):
    """The user's script failed, was killed, or never trained."""

    exit_code = 3


class RecordError(FlatoutError):
    """A file does not hold what it should.

    One that flatout wrote is missing, torn, from a newer version, or not for here; one that was named as a plan is
    none; or what a script printed or wrote has no such metric.
    """

    exit_code = 4


class MachineError(FlatoutError):
    """The machine refuses something that is needed: no namespaces, a full disk, an unwritable folder."""

    exit_code = 5


class Inconclusive(FlatoutError):
    """There was not enough to judge by."""

    exit_code = 6


class InternalError(FlatoutError):
    """Flatout itself failed in a way that nobody foresaw; neither the script nor its user is to blame."""

    exit_code = 7


def cannot_write(place: object, problem: OSError) -> MachineError:
    """The error for a folder or file that cannot be written."""
    full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
    cause = "the disk is full" if full else str(problem.strerror or problem)
    hint = "go to a folder that you may write to, and name the script by its path"
    if full:
        hint = "free some space"
    elif problem.errno == errno.ENOENT:
        hint = "make its folder first"
    return MachineError(f"cannot write `{place}`", cause=cause, hint=hint)


def did_you_mean(name: str, known: Iterable[str], otherwise: str, *, before: str = "") -> str:
    """The hint for a name that there is not: the nearest of those that are known, or what else helps.

    >>> did_you_mean("tun", ["tune", "run"], "`flatout --help`", before="flatout ")
    'did you mean `flatout tune`?'
    >>> did_you_mean("x", ["tune", "run"], "`flatout --help`")
    '`flatout --help`'
    """
    import difflib  # where a name is wrong, and not wherever an error might be

    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean `{before}{near[0]}`?" if near else otherwise
