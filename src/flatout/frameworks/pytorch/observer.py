"""When does each part of a step begin and end? The patches that tell, and the clock that they drive.

Two depths: *ends* sees step ends, outermost calls (for evaluation between steps) and `torch.save`; *phases* also sees
fetches, backward, the optimizer, copies and synchronisations. Patches of the deeper level are there only while a
window asks for them. In: events of the training thread. Out: seconds by phase for each step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from threading import get_ident
from time import perf_counter
from typing import Any

import torch

from flatout.frameworks.pytorch.calls import Calls, OuterCall
from flatout.frameworks.pytorch.clock import PhaseClock
from flatout.frameworks.pytorch.device_clock import DeviceClock
from flatout.frameworks.pytorch.loaders import Loaders

SYNCS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")
"""Tensor methods that wait for the device."""

COPIES = ("to", "cuda")


class Observer:
    """Accounts for each step's time at the depth that is asked for."""

    def __init__(self, calls: Calls, loaders: Loaders, device: str) -> None:
        self.calls = calls
        self.loaders = loaders
        self.clock = PhaseClock()
        self.device_clock = DeviceClock() if device == "cuda" else None
        self.depth = "off"
        self.evaluation_is_training = False
        """Whether calls without gradients belong to each step (sampling, targets) instead of lying between steps."""
        self.num_steps_with_evaluation = 0
        self.losses: list[Any] = []
        self.outside_s = 0.0
        self._thread = get_ident()
        self._undo: list[Callable[[], None]] = []
        self._undo_save: Callable[[], None] | None = None
        self._started_step_s = 0.0
        self._trained_in_step = False
        self._evaluated_in_step = False

    # -- depth ---------------------------------------------------------------------------------------------------

    def observe(self, depth: str) -> None:
        """Observe at `off`, `ends` or `phases` from here on."""
        if depth == self.depth:
            return
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        self.depth = depth
        self.calls.observer = None if depth == "off" else self
        self.loaders.observer = self if depth == "phases" else None
        if depth == "off":
            self._restore_save()
            return
        if self._undo_save is None:
            self._undo_save = self._replace(torch, "save", self._around("checkpoint"))
        if depth == "phases":
            self._patch_phases()

    def _restore_save(self) -> None:
        if self._undo_save is not None:
            self._undo_save()
            self._undo_save = None

    def _patch_phases(self) -> None:
        add = self._undo.append
        add(self._replace(torch.autograd, "backward", self._around_backward))
        add(self._replace(torch.autograd, "grad", self._around("backward")))
        add(self._replace(torch.optim.Optimizer, "zero_grad", self._around("optimizer")))
        if self.device_clock is not None:  # on a CPU nothing is copied to a device and nothing waits for one
            for name in SYNCS:
                add(self._replace(torch.Tensor, name, self._around("sync")))
            for name in COPIES:
                add(self._replace(torch.Tensor, name, self._around("copy")))
            add(self._replace(torch.cuda, "synchronize", self._around("sync")))

    def _replace(self, holder: Any, name: str, make: Callable[[Any], Any]) -> Callable[[], None]:
        own = name in vars(holder)
        original = getattr(holder, name)
        replacement = make(original)
        setattr(holder, name, replacement)

        def undo() -> None:
            if vars(holder).get(name) is replacement:  # else somebody patched on top of us: leave theirs
                if own:
                    setattr(holder, name, original)
                else:
                    delattr(holder, name)

        return undo

    def _around(self, phase: str) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            @wraps(original)
            def timed(*args: Any, **kwargs: Any) -> Any:
                if torch.compiler.is_compiling() or get_ident() != self._thread:
                    return original(*args, **kwargs)
                self.push(phase)
                try:
                    return original(*args, **kwargs)
                finally:
                    self.pop(phase)

            return timed

        return make

    def _around_backward(self, original: Any) -> Any:
        timed = self._around("backward")(original)

        @wraps(original)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensors, torch.Tensor) and tensors.numel() == 1 and not torch.compiler.is_compiling():
                self.losses.append(tensors.detach())
            self.clock.between("unattributed")
            return timed(tensors, *args, **kwargs)

        return backward

    # -- events --------------------------------------------------------------------------------------------------

    def push(self, phase: str) -> None:
        """A part of the step begins."""
        self.clock.push(phase)
        if self.device_clock is not None and self.depth == "phases":
            self.device_clock.push(phase)

    def pop(self, phase: str) -> None:
        """It ends; checkpoints lie outside the step whatever the depth."""
        if phase == "checkpoint":
            before = self.clock.last
            self.clock.pop()
            self.outside_s += self.clock.last - before
        else:
            self.clock.pop()
        if self.device_clock is not None and self.depth == "phases":
            self.device_clock.pop(phase)

    def before_fetch(self) -> None:
        """A batch is asked for."""
        self.push("data")

    def after_fetch(self) -> None:
        """The batch is there."""
        self.pop("data")

    def before_call(self, call: OuterCall, training: bool) -> None:
        """An outermost model call begins."""
        if self.depth == "phases":
            self.push("forward")

    def after_call(self, call: OuterCall, training: bool) -> None:
        """An outermost model call is over; one without gradients before the step's own was an evaluation."""
        if training:
            self._trained_in_step = True
        if self.depth == "phases":
            self.pop("forward")
            if training:
                self.clock.between("loss")
        if not training and not self._trained_in_step:
            self._evaluated_in_step = True
            if not self.evaluation_is_training:
                if self.depth == "phases":
                    self.clock.reassign("evaluation")
                self.outside_s = perf_counter() - self._started_step_s

    # -- steps ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A step begins here."""
        self.clock.start()
        self._started_step_s = perf_counter()
        self._forget()

    def end_step(self) -> tuple[dict[str, float], float]:
        """A step ends here: its seconds by phase and those that lay outside it; the next begins."""
        spent = self.clock.end()
        self._started_step_s = self.clock.last
        outside_s = self.outside_s
        if self._evaluated_in_step:
            self.num_steps_with_evaluation += 1
        self._forget()
        if self.device_clock is not None and self.depth == "phases":
            self.device_clock.end_step()
        return spent, outside_s

    def _forget(self) -> None:
        self.outside_s = 0.0
        self._trained_in_step = False
        self._evaluated_in_step = False
