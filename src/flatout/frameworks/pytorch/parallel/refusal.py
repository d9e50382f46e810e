"""What cannot be divided, and why? In: the finding. Out: an exception that ends the run before anything was trained."""

from __future__ import annotations


class NotDivided(Exception):
    """A script, or one of its models, cannot be run on ranks as one process would run it.

    Args:
        error: What cannot be done.
        cause: Why.
        hint: What helps.
    """

    def __init__(self, error: str, *, cause: str, hint: str) -> None:
        super().__init__(f"{error}: {cause}")
        self.error, self.cause, self.hint = error, cause, hint
