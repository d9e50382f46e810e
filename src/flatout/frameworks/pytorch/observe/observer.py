"""When does each part of a step begin and end? The patches that tell, and the clock that they drive.

Five depths: *ends* sees step ends, outermost calls (for evaluation between steps) and `torch.save`; *phases* also
sees fetches, backward, the optimizer, copies, synchronisations and the collection of garbage; *stacks* looks at what
the thread does as well, *profile* with PyTorch's profiler; *reads* sees ends, and where values are read on the host.
What a deeper level needs is there only while a window asks for it. In: events of the training thread. Out: seconds by
phase for each step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import wraps
from inspect import getattr_static
from threading import get_ident
from time import perf_counter
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from flatout.frameworks.pytorch.input.loaders import Loaders
from flatout.frameworks.pytorch.observe import devices
from flatout.frameworks.pytorch.observe.clock import BASE, PhaseClock
from flatout.frameworks.pytorch.observe.device_clock import DeviceClock
from flatout.frameworks.pytorch.seams.calls import Calls
from flatout.frameworks.pytorch.seams.outer_call import OuterCall
from flatout.frameworks.pytorch.seams.patches import Patch, remove_all
from flatout.guest.tracebacks import hide_ours
from flatout.records.host_reads import HostReads
from flatout.records.profile import Profile
from flatout.records.stacks import Stacks

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.observe.profile_recorder import ProfileRecorder
    from flatout.frameworks.pytorch.observe.read_recorder import ReadRecorder
    from flatout.frameworks.pytorch.observe.stack_samples import StackSampler

SYNCS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__")
"""Tensor methods that wait for the device, where the tensor lies on one."""

COPIES = {"to": devices.copies, "cuda": devices.to_device}
"""Those that may copy to a device, each with what tells whether it does."""

DEEP = ("phases", "stacks", "profile")
"""Depths at which the parts of a step are timed."""


class Observer:
    """Accounts for each step's time at the depth that is asked for."""

    def __init__(self, calls: Calls, loaders: Loaders) -> None:
        self.calls = calls
        self.loaders = loaders
        self.clock = PhaseClock()
        self.push: Callable[[str], None] = self.clock.push
        """A part of the step begins."""
        self.pop: Callable[..., None] = self.clock.pop
        """It ends."""
        self.device_clock: DeviceClock | None = None
        """While anything is observed on a device with a queue."""
        self._device_clock: DeviceClock | None = None
        """The last one, with its events."""
        self.depth = "off"
        self.losses: list[Any] = []
        """The loss that `backward` was last given in each step of the window."""
        self.keeps_losses = False
        """Whether losses are kept although no phases are observed."""
        self.on_failure: Callable[[str, BaseException], None] | None = None
        self._loss: Any = None
        self.outside_s = self._saved_s = 0.0
        self._save_began_s = 0.0
        self._sampler: StackSampler | None = None
        self._reads: ReadRecorder | None = None
        self._profile: ProfileRecorder | None = None
        self._patches: list[Patch] = []
        self._met: set[type] = set()
        """Classes of optimizers whose `step` is patched."""
        self._started_step_s = 0.0
        self._evaluated_until_s = 0.0

    @property
    def is_deep(self) -> bool:
        """Whether the parts of a step are observed."""
        return self.depth in DEEP

    # -- depth ---------------------------------------------------------------------------------------------------

    def observe(self, depth: str) -> None:
        """Observe at `off`, `ends`, `phases`, `stacks`, `reads` or `profile` from here on."""
        if depth == self.depth:
            return
        self.noted_reads()
        self.end_profile()
        self._collections(depth in DEEP)
        remove_all(self._patches)
        self._met.clear()
        self.depth = depth
        self._use_device_clock(None)
        self.calls.observer = None if depth == "off" else self
        self.calls.training_observer = self if depth in DEEP else None
        self.loaders.observer = self if depth in DEEP else None
        if depth != "off":
            around = self._around("checkpoint", self._begin_save, self._end_save)
            self._patches.append(Patch(torch, "save", around))
        if self.is_deep:
            self._patch_phases()
        elif depth == "ends" and self.keeps_losses:
            self._patches.append(Patch(torch.autograd, "backward", self._around(BASE, self._begin_backward)))

    def _patch_phases(self) -> None:
        add = self._patches.append
        add(Patch(torch.autograd, "backward", self._around("backward", self._begin_backward)))
        add(Patch(torch.autograd, "grad", self._around("backward")))
        add(Patch(torch.optim.Optimizer, "zero_grad", self._around("optimizer")))
        if devices.has_queue(self.calls.where):  # on a CPU nothing is copied to a device and nothing waits for one
            for name in SYNCS:
                add(Patch(torch.Tensor, name, self._around("sync", concerns=devices.reads)))
            for name, concerns in COPIES.items():
                add(Patch(torch.Tensor, name, self._around("copy", concerns=concerns)))
            for holder, name in devices.waits(self.calls.where):
                add(Patch(holder, name, self._around("sync")))

    def _around(
        self,
        phase: str,
        begun: Callable[..., None] | None = None,
        over: Callable[[], None] | None = None,
        concerns: Callable[[tuple[Any, ...], dict[str, Any]], bool] | None = None,
    ) -> Callable[[Any, Patch], Any]:
        """Time what is patched as a part of the step; `begun` is told of its arguments, `over` of its end.

        It passes through unseen where the patch is taken away, something is traced, or another thread calls; and, where
        its arguments decide what it `concerns`, where they do not, or it only serves to make a batch.
        """
        calls, is_compiling = self.calls, torch.compiler.is_compiling

        def make(original: Any, patch: Patch) -> Any:
            @wraps(original)
            def timed(*args: Any, **kwargs: Any) -> Any:
                if not patch.active or is_compiling() or get_ident() != calls.thread:
                    return original(*args, **kwargs)
                if concerns is not None and (self.clock.top == "data" or not concerns(args, kwargs)):
                    return original(*args, **kwargs)
                self.push(phase)
                try:
                    if begun is not None:
                        begun(*args)
                    return original(*args, **kwargs)
                except BaseException as problem:
                    hide_ours(problem)
                    raise
                finally:
                    self.pop(phase)
                    if over is not None:
                        over()

            return timed

        return make

    def _begin_backward(self, loss: Any = None, *_: Any) -> None:
        self.clock.end_base()
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._loss = loss.detach()

    def _begin_save(self, *_: Any) -> None:
        self._save_began_s = self.clock.last

    def _end_save(self) -> None:
        """A checkpoint lies outside the step whatever the depth."""
        self._saved_s += self.clock.last - self._save_began_s
        self.outside_s += self.clock.last - self._save_began_s

    # -- events --------------------------------------------------------------------------------------------------

    def _use_device_clock(self, device_clock: DeviceClock | None) -> None:
        """Stamp on the device's own clock as well, or on the host's alone."""
        self.device_clock, self.push, self.pop = device_clock, self.clock.push, self.clock.pop
        if device_clock is None:
            return

        def push(phase: str) -> None:
            self.clock.push(phase)
            self._on_device(device_clock.mark, self.clock.top)

        def pop(phase: str, *, base: str | None = None) -> None:
            self.clock.pop(phase, base=base)
            self._on_device(device_clock.mark, self.clock.top)

        self.push, self.pop = push, pop

    def _on_device(self, stamp: Callable[..., None], *phases: str) -> None:
        """Stamp on the device's own clock; where it fails, its times are not observed any more."""
        try:
            stamp(*phases)
        except Exception as problem:  # noqa: BLE001  training goes on without a device clock
            self._use_device_clock(None)
            if self.on_failure is not None:
                self.on_failure("recorder", problem)

    def device_steps(self) -> list[dict[str, float]] | None:
        """Seconds by phase of each step since `start` on the device's own clock; None where there is none.

        Raises:
            RuntimeError: It failed, and the host's alone would say how long giving orders took.
        """
        if self.depth == "off" or not devices.has_queue(self.calls.where):
            return None
        if self.device_clock is None:
            raise RuntimeError(f"the clock of `{self.calls.where}` failed, so that its steps were not measured")
        return self.device_clock.read()

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer updates while phases are observed: from its next update on, all of `step` is seen.

        Hooks are told of what lies within; PyTorch's own wrapper around them costs a small script several percent.
        """
        kind = type(optimizer)
        if kind in self._met:
            return
        self._met.add(kind)
        if isinstance(getattr_static(kind, "step"), FunctionType):  # another descriptor binds in a way of its own
            self._patches.append(Patch(kind, "step", self._around("optimizer")))

    def before_fetch(self) -> None:
        """A batch is asked for."""
        if get_ident() == self.calls.thread:
            self.push("data")

    def after_fetch(self) -> None:
        """The batch is there."""
        if get_ident() == self.calls.thread:
            self.pop("data")

    def before_call(self, call: OuterCall, training: bool) -> None:
        """An outermost model call begins."""
        if self.is_deep:
            self.push(call.phase)

    def after_call(self, call: OuterCall, training: bool) -> None:
        """An outermost model call is over; one without gradients before the step's own was an evaluation."""
        if self.is_deep:
            self.pop(call.phase, base="loss" if training else None)
        if not (call.in_step or self.calls.has_trained):
            if self.is_deep:
                self.clock.reassign("evaluation")
            if self.device_clock is not None:
                self._on_device(self.device_clock.reassign, "evaluation", self.clock.top)
            self._evaluated_until_s = perf_counter()
            self.outside_s, self._saved_s = self._evaluated_until_s - self._started_step_s, 0.0

    def _collections(self, wanted: bool) -> None:
        """Time the collection of garbage as well, or no longer."""
        if wanted and self._on_collection not in gc.callbacks:
            gc.callbacks.append(self._on_collection)
        elif not wanted and self._on_collection in gc.callbacks:
            gc.callbacks.remove(self._on_collection)

    def _on_collection(self, moment: str, details: dict[str, int]) -> None:
        """The collector begins or ends, in whichever thread it was set off."""
        if get_ident() == self.calls.thread:
            (self.push if moment == "start" else self.pop)("garbage")

    def sample_stacks(self) -> None:
        """Look at what the thread does from here on, where one alone calls models."""
        if not self.calls.thread:
            return
        from flatout.frameworks.pytorch.observe.stack_samples import StackSampler  # trials alone ask for it

        collates = [getattr(one.loader.collate_fn, "__code__", None) for one in self.loaders.passes]
        codes = [code for code in collates if code is not None]
        self._sampler = StackSampler(self.calls.thread, lambda: self.clock.top.partition(": ")[0], codes)
        self._sampler.start()

    def sampled_stacks(self) -> Stacks | None:
        """What was seen since; None where nobody looked."""
        sampler, self._sampler = self._sampler, None
        return None if sampler is None else sampler.stop()

    def note_reads(self) -> None:
        """Note where values are read on the host from here on."""
        from flatout.frameworks.pytorch.observe.read_recorder import ReadRecorder  # trials alone ask for it

        self.noted_reads()
        self._reads = ReadRecorder(self.calls.thread, device=self.calls.where, on_failure=self.on_failure)
        self._reads.start()

    def noted_reads(self) -> HostReads | None:
        """What was noted since; None where nobody looked."""
        recorder, self._reads = self._reads, None
        return None if recorder is None else recorder.stop()

    def begin_profile(self) -> None:
        """Have PyTorch's profiler look from here on, where one thread alone calls models."""
        if not self.calls.thread:
            return
        from flatout.frameworks.pytorch.observe.profile_recorder import ProfileRecorder  # trials alone ask for it

        self._profile = ProfileRecorder(self.calls.where, self.on_failure)
        self._profile.start()

    def end_profile(self) -> Profile | None:
        """What it has seen since; None where it did not look, or failed."""
        recorder, self._profile = self._profile, None
        return None if recorder is None else recorder.stop()

    def _note_phases(self, recorder: ProfileRecorder) -> None:
        """Tell it where Python is from here on."""
        pushed, popped = self.push, self.pop

        def push(phase: str) -> None:
            pushed(phase)
            recorder.note(self.clock.top, self.clock.last)

        def pop(phase: str, *, base: str | None = None) -> None:
            popped(phase, base=base)
            recorder.note(self.clock.top, self.clock.last)

        self.push, self.pop = push, pop
        recorder.note(self.clock.top, self.clock.last)

    # -- steps ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A step begins here."""
        self.clock.start()
        where = self.calls.where
        if self.depth != "off" and devices.has_queue(where):
            kept = self._device_clock
            self._device_clock = kept if kept is not None and kept.device == where else DeviceClock(where)
            self._use_device_clock(self._device_clock)
            self._on_device(self._device_clock.start, self.clock.top)
        if self._profile is not None:
            self._note_phases(self._profile)
        self._started_step_s = self.clock.last
        self.losses.clear()
        self._forget()

    def end_step(self) -> tuple[dict[str, float], float]:
        """A step ends here: its seconds by phase and those that lay outside it; the next begins."""
        spent = self.clock.end() if self.is_deep else self.clock.mark()
        self._started_step_s = self.clock.last
        outside_s = self.outside_s
        if outside_s and not self.is_deep:
            spent = {"evaluation": outside_s - self._saved_s, "checkpoint": self._saved_s}
        if self._loss is not None:
            self.losses.append(self._loss)
        if self._reads is not None:
            self._reads.end_step(self._evaluated_until_s)
        if self._profile is not None:
            self._profile.end_step(self.clock.last)
        self._forget()
        if self.device_clock is not None:
            self._on_device(self.device_clock.end_step, "recorder" if self.is_deep else self.clock.top)
        return spent, outside_s

    def _forget(self) -> None:
        self.outside_s = self._saved_s = 0.0
        self._evaluated_until_s = 0.0
        self._loss = None
        self.calls.has_trained = False
