"""Where does the script read a tensor's value on the host, and how long does it wait there?

In: the calls that read, made by the training thread from `start` to `stop`. Out: `HostReads`, a row for each line of
the script. Loaded in trials only, for their own windows.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from time import perf_counter
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch.overrides import handle_torch_function, has_torch_function

from flatout.frameworks.pytorch.observe import devices
from flatout.frameworks.pytorch.seams.patches import Patch, remove_all
from flatout.frameworks.pytorch.seams.script_code import script_frame
from flatout.frameworks.pytorch.seams.update_hooks import leave_uncompiled
from flatout.guest.tracebacks import HERE, hide_ours
from flatout.records.host_reads import HostRead, HostReads

READS = ("item", "tolist", "numpy", "__float__", "__int__", "__bool__", "__index__", "__format__", "__repr__")
"""Methods of a tensor that need its value on the host."""

FROM_DEVICE = ("cpu", "to", "nonzero", "masked_select")
"""The same where it lies on a device only.

Indexing by a mask waits as well and is left out: whoever replaces `__getitem__` cannot put back what a C extension sees
of it. So are `torch.nonzero` and its like, by whose identity `torch.jit.script` knows them. The census counts both.
"""

MOST_ROWS = 60

Key: TypeAlias = tuple[str, int, str, bool]
"""File and line of the script, what read, whether from a device."""


class ReadRecorder:
    """Notes reads of one thread.

    Args:
        thread: Its `threading.get_ident`.
        device: On which the script trains; for one with a queue some further calls wait.
        on_failure: Told where noting fails; what reads goes on unnoted.
        now: The clock, in seconds.
    """

    def __init__(
        self,
        thread: int,
        *,
        device: torch.device,
        on_failure: Callable[[str, BaseException], None] | None = None,
        now: Callable[[], float] = perf_counter,
    ) -> None:
        self._thread = thread
        self._device = device
        self._on_failure = on_failure
        self._now = now
        self._patches: list[Patch] = []
        self._reading = False
        """Whether a read is under way: what it calls in turn is part of it."""
        self._waits_s: dict[Key, list[float]] = {}
        """Seconds that each read waited."""
        self._of_step: list[tuple[Key, float, float]] = []
        """Of each read of this step, until it is known to belong to a step: where, when it began, when it ended."""

    def start(self) -> None:
        """Begin to note."""
        holders: list[tuple[Any, str]] = [(torch.Tensor, name) for name in READS]
        if devices.has_queue(self._device):
            holders += [(torch.Tensor, name) for name in FROM_DEVICE]
            holders += devices.waits(self._device)
        for holder, name in holders:
            self._patches.append(Patch(holder, name, self._noting(name)))

    def stop(self, num_steps: int = 0, wall_s: float = 0.0) -> HostReads:
        """End, and leave nothing behind: what was noted."""
        remove_all(self._patches)
        rows = [_row(key, waits_s) for key, waits_s in self._waits_s.items()]
        rows.sort(key=lambda row: -row.waited_s)
        return HostReads(rows=tuple(rows[:MOST_ROWS]), num_steps=num_steps, wall_s=wall_s)

    def end_step(self, evaluated_until_s: float = 0.0) -> None:
        """A step has ended; what was read in an evaluation before it is no part of it."""
        for key, began_s, ended_s in self._of_step:
            if ended_s > evaluated_until_s:
                self._waits_s.setdefault(key, []).append(ended_s - began_s)
        self._of_step.clear()

    def _noting(self, name: str) -> Callable[[Any, Patch], Any]:
        is_compiling = torch.compiler.is_compiling

        def make(original: Any, patch: Patch) -> Any:
            @wraps(original)
            def read(*args: Any, **kwargs: Any) -> Any:
                if not patch.active or self._reading or is_compiling() or get_ident() != self._thread:
                    return _passed_on(original, args, kwargs)
                self._reading = True
                began_s = self._now()
                try:
                    result = _passed_on(original, args, kwargs)
                except BaseException as problem:
                    hide_ours(problem)
                    raise
                finally:
                    ended_s = self._now()
                    self._reading = False
                try:
                    on_device = _from_device(name, args, kwargs, result)
                    if on_device is not None:
                        self._note(sys._getframe(1), name, began_s, ended_s, on_device)
                except Exception as problem:  # noqa: BLE001  the script goes on unnoted
                    self._thread = 0
                    if self._on_failure is not None:
                        self._on_failure("recorder", problem)
                return result

            leave_uncompiled(read)
            return read

        return make

    def _note(self, frame: FrameType, name: str, began_s: float, ended_s: float, on_device: bool) -> None:
        if frame.f_code.co_filename.startswith(HERE):
            return  # our own
        script = script_frame(frame, on_device=on_device)
        if script is not None:
            self._of_step.append(((script.f_code.co_filename, script.f_lineno, name, on_device), began_s, ended_s))


def _row(key: Key, waits_s: list[float]) -> HostRead:
    file, line, name, on_device = key
    return HostRead(
        file=file if file.startswith("<") else os.path.abspath(file),
        line=line,
        read=name,
        on_device=on_device,
        num=len(waits_s),
        waited_s=round(math.fsum(waits_s), 9),
    )


def _passed_on(original: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the original gives; a subclass or a mode is told of it, where C would tell of what replaced it."""
    if args and isinstance(args[0], torch.Tensor) and has_torch_function(args[:1]):
        return handle_torch_function(original, args[:1], *args, **kwargs)
    return original(*args, **kwargs)


def _from_device(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> bool | None:
    """Whether the value came from a device; None where nothing was read."""
    if name == "synchronize":
        return True
    on_device = _on_device(args[0])
    if name not in FROM_DEVICE:
        return on_device
    # told not to wait: by name, or by the first of its arguments that is a truth value
    told = kwargs.get("non_blocking", next((a for a in args[1:] if isinstance(a, bool)), False))
    if name == "to" and (_on_device(result) or told):
        return None
    return on_device or None


def _on_device(value: Any) -> bool:
    with torch._C.DisableTorchFunction():  # who is told of functions is not told that we ask
        return isinstance(value, torch.Tensor) and value.device.type != "cpu"
