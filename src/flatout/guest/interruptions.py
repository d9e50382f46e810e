"""Was an error raised from outside, in the middle of whatever ran? Ctrl-C, and what handlers of signals raise.

Such an error belongs to the script, there and then; to go on in another way would swallow it. In: an error. Out:
whether it is one. Imported in the user's process: standard library only.
"""

from __future__ import annotations

import signal
import traceback
from types import CodeType, FunctionType, MethodType


def is_interruption(problem: BaseException) -> bool:
    """Whether an error comes from outside the code that was running.

    >>> is_interruption(KeyboardInterrupt()), is_interruption(OSError())
    (True, False)
    """
    return isinstance(problem, KeyboardInterrupt) or raised_by_handler(problem)


def let_through(problem: BaseException) -> None:
    """Raise an error again that comes from outside; come back from any other.

    Raises:
        BaseException: The error itself.
    """
    if is_interruption(problem):
        raise problem


def raised_by_handler(problem: BaseException) -> bool:
    """Whether an error came out of a handler of the script's (a time limit, an end that was asked for)."""
    codes = _handlers()
    return any(frame.f_code in codes for frame, _ in traceback.walk_tb(problem.__traceback__))


def _handlers() -> set[CodeType]:
    """The code of the script's handlers of signals."""
    found = set()
    for number in signal.valid_signals():
        handler = signal.getsignal(number)
        handler = getattr(handler, "func", handler)  # of a `partial`
        called = handler if isinstance(handler, FunctionType | MethodType) else vars(type(handler)).get("__call__")
        for one in (handler, called):
            code = getattr(getattr(one, "__func__", one), "__code__", None)
            if isinstance(code, CodeType):
                found.add(code)
    return found
