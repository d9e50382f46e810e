"""How does one follow the updates of every optimizer, and stop, while PyTorch is calling the hooks that do?

PyTorch goes through its registries of hooks while it calls them, and raises into the script where one was added or
taken away meanwhile and another one, of the script's own, follows. Ours may go within one of them: then one that does
nothing takes its place, which the registries bear. Here as well: what a compilation of the script's own shall pass
over, as it meets a hook. In: functions. Out: hooks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

if TYPE_CHECKING:
    from types import FrameType

Hook = Callable[[Optimizer, Any, Any], Any]


class UpdateHook:
    """One hook for all optimizers."""

    def __init__(self, register: Callable[[Any], Any], hook: Hook) -> None:
        """`register` is PyTorch's function for hooks before updates, or that for hooks after them."""
        self._handle = register(hook)

    def remove(self) -> None:
        """Take it away; within an update, where another one follows, nothing is left to be called instead."""
        hooks = self._handle.hooks_dict_ref()
        if hooks and next(reversed(hooks)) != self._handle.id and within_update(sys._getframe()):
            hooks[self._handle.id] = nothing
        else:
            self._handle.remove()


def nothing(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """A hook that does nothing."""


_UPDATE = getattr(Optimizer.profile_hook_step(lambda *_: None), "__code__", None)
"""What PyTorch runs for every `step`: its wrapper, which calls the hooks."""


def within_update(frame: FrameType | None) -> bool:
    """Whether `frame` is part of an update; for a hook, that above its caller tells of an update around its own.

    The stack tells, where a count would go wrong after an update that raised: no hook is told of its end.
    """
    while frame is not None:
        if frame.f_code is _UPDATE:
            return True
        frame = frame.f_back
    return False


def leave_uncompiled(function: Any) -> None:
    """Let a compilation of the script's own that reaches `function` call it, instead of tracing into it.

    What `torch.compiler.disable` does, which would import the compiler.
    """
    function._torchdynamo_disable = True
    try:
        from torch._C._dynamo import eval_frame

        skip = eval_frame._FrameAction.SKIP
        eval_frame.set_code_exec_strategy(function.__code__, eval_frame._FrameExecStrategy(skip, skip))
    except (ImportError, AttributeError):  # other versions of PyTorch: it is traced, and breaks the graph
        return
