"""What cannot be divided, and why? In: the finding. Out: an exception that ends the run, which could only go wrong."""

from __future__ import annotations

from flatout.errors import ScriptError

ON_ONE_RANK = "run it on one rank: `flatout run` without `--ranks`"
FEWER_RANKS = "fewer ranks, at most one for each sample; or `flatout run` without `--ranks`"


class NotDivided(ScriptError):
    """A script, or one of its models, cannot be run on ranks as one process would run it."""

    def __init__(self, error: str, *, cause: str, hint: str = ON_ONE_RANK) -> None:
        super().__init__(error, cause=cause, hint=hint)


class ChangesOutside(NotDivided):
    """A call changes what is outside of its module: computed once more it would change nothing any more."""
