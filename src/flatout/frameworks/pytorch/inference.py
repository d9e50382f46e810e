"""Does a script call models and train none, and when is such a call over?

Until something trains, modules that are put into evaluation mode are followed, and the parts that a script may call in
their place; after a few calls of them without a backward pass, and without an optimizer in the process, they are what
the script is about, and a call is its step. In: modules, calls. Out: ends of steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import wraps
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

from flatout.frameworks.pytorch.seams.outer_call import OuterCall
from flatout.frameworks.pytorch.seams.owners import num_optimizers
from flatout.frameworks.pytorch.seams.patches import Patch, remove_all
from flatout.frameworks.pytorch.seams.step_period import StepPeriod
from flatout.guest.tracebacks import hide_ours

CALLS_WITHOUT_TRAINING = 8
"""After so many calls of models, with nothing in sight that trains, they are what the script is about."""

TRAINS = "backward"
"""A name in the code of a script that trains, perhaps after it has called models for something else."""


class Inference:
    """Looks whether a script infers; `framework` is the adapter, which stands above and is told."""

    def __init__(self, framework: Any) -> None:
        self._framework = framework
        self.rhythm = StepPeriod()
        self._patches: list[Patch] = []
        self._is_inside = False
        """Whether a module is putting its parts into a mode."""
        self._order: list[OuterCall] = []
        """The calls so far, until it is known what they are."""
        self._took_s = 0.0
        """In calls since the last step ended."""
        self._num_untold = 0
        """Steps within the calls after which it was known that they are steps."""

    @property
    def begun(self) -> bool:
        """Whether calls are steps."""
        return bool(self._framework.calls.infers)

    @property
    def num_missed(self) -> int:
        """Steps of which no end was told."""
        return self.rhythm.num_missed + self._num_untold

    def install(self) -> None:
        """Begin to look."""
        self._patches = [  # `eval` calls `train`
            Patch(nn.Module, "train", self._watched), Patch(torch, "compile", self._compiling)
        ]  # fmt: skip

    def end(self) -> None:
        """Something trains, now or after all: calls are no steps."""
        if not self._patches and not self.begun:
            return
        self._look_no_longer()
        self._framework.calls.train()

    def _look_no_longer(self) -> None:
        remove_all(self._patches)
        self._order.clear()

    def _watched(self, original: Any, patch: Patch) -> Any:
        @wraps(original)
        def train(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if not patch.active or self._is_inside:
                return original(module, *args, **kwargs)
            self._is_inside = True
            try:
                found = original(module, *args, **kwargs)
            except BaseException as problem:
                hide_ours(problem)
                raise
            finally:
                self._is_inside = False
            if not module.training:
                self._follow(module)
            return found

        return train

    def _compiling(self, original: Any, patch: Patch) -> Any:
        """The script compiles a model: what it is given in its place is called, and nothing within may be ours."""

        @wraps(original)
        def compile(*args: Any, **kwargs: Any) -> Any:
            if not patch.active:
                return original(*args, **kwargs)
            for module in args[:1]:
                if isinstance(module, nn.Module):
                    self._framework.calls.leave(module)
            found = original(*args, **kwargs)
            if isinstance(found, nn.Module) and not found.training:
                self._follow(found)
            return found

        return compile

    def _follow(self, module: nn.Module) -> None:
        try:
            self._framework.calls.follow(module, self._called)
        except Exception as problem:  # noqa: BLE001  the script goes on
            self._framework.fail("recorder", problem)

    def _called(self, call: OuterCall, took_s: float | None) -> None:
        """A call of a model that is followed is over; where it is the last of the order in which they come, a step."""
        try:
            if not self.begun:
                self._note(call)
                return
            self._took_s += took_s or 0.0
            if not self.rhythm.update(id(call)):
                return
            step_s, self._took_s = self._took_s, 0.0
            if took_s is None:
                self._num_untold += 1
            else:
                self._framework.end_of_call(step_s)
        except Exception as problem:  # noqa: BLE001
            self._framework.fail("recorder", problem)

    def _note(self, call: OuterCall) -> None:
        if call.feeds_loader:
            return
        self._order.append(call)
        if len(self._order) < CALLS_WITHOUT_TRAINING:
            return
        order = self._order[:]
        if not self._framework.infers and (num_optimizers() or trains(sys.modules.get("__main__"))):
            self.end()
            return
        self._look_no_longer()
        self._framework.infer()
        self._num_untold = sum(self.rhythm.update(id(one)) for one in order)  # how they come in turn shows already


def trains(main: Any) -> bool:
    """Whether the code of a script takes gradients somewhere: then it is a script that trains, which has yet to begin.

    Its functions and classes are looked through, and what of it runs now, not the libraries that it uses.
    """
    file = getattr(main, "__file__", None)
    codes = [code for value in list(vars(main).values()) for code in _codes(value)] if main is not None else []
    codes += _running()
    return any(TRAINS in one.co_names for code in codes if code.co_filename == file for one in _within(code))


def _codes(value: Any) -> Iterator[CodeType]:
    for one in (value, *(vars(value).values() if isinstance(value, type) else ())):
        code = getattr(one, "__code__", None)
        if isinstance(code, CodeType):
            yield code


def _running() -> Iterator[CodeType]:
    """What all threads are in: the script itself, which no name of it holds, among it."""
    for inner in sys._current_frames().values():
        frame: FrameType | None = inner
        while frame is not None:
            yield frame.f_code
            frame = frame.f_back


def _within(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _within(constant)
