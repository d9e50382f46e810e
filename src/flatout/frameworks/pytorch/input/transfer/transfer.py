"""A script copies its batches to a device: which copies are begun early, which are made beside what is computed?

Under `device_prefetch` every copy of a tensor on the CPU goes through page-locked memory and a stream of its own; for
batches that worker processes have ready it is begun one batch ahead. Under `device_store` a batch of kept items is put
together on the device. Whatever is not plain takes PyTorch's own way. In: batches of loaders, and what the script asks
of `to` and `cuda`. Out: the same tensors.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, MutableMapping
from threading import get_ident
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from flatout.frameworks.pytorch.input.items.shadow import EVERY, NUM_FIRST, difference
from flatout.frameworks.pytorch.input.transfer.ahead import Fetch, Habit, Known, Line, TensorInfo
from flatout.frameworks.pytorch.input.transfer.device import CudaDevices, Device
from flatout.frameworks.pytorch.input.transfer.rows import Rows
from flatout.frameworks.pytorch.input.transfer.seams import Seams, Target
from flatout.frameworks.pytorch.input.transfer.staging import Copy, Staging
from flatout.frameworks.pytorch.seams.trees import tensors_of
from flatout.guest.interruptions import let_through
from flatout.machine.control_groups import free_memory_bytes

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.input.items.item_cache import Column, Places

Part: TypeAlias = Literal["prefetch", "store"]

MOST_PINNED_BYTES = 2**30
"""Page-locked memory that may be taken for each device."""

PINNED_SHARE = 1 / 16
"""How much of the memory that is free may be locked."""

MOST_FAILURES = 4
"""Copies that could not be made, after which none is tried."""

Way: TypeAlias = Literal["staged", "early", "gathered"]


class Transfer:
    """All copies to devices of one process.

    Args:
        devices: Gives the device that is meant.
    """

    def __init__(self, devices: Callable[[torch.device], Device | None] | None = None) -> None:
        self.parts: set[Part] = set()
        self.num: dict[Way, int] = {"staged": 0, "early": 0, "gathered": 0}
        """Tensors that were handed over, since the first part was engaged."""
        self.why_not: str | None = None
        """Why copies are made as plain makes them, for good."""
        self._devices = devices or CudaDevices()
        self._stagings: dict[int, Staging] = {}
        self._known = Known()
        self._awaited = False
        """Whether the script may rely on it that copies which the host awaits come after all others."""
        self._seams = Seams(self.arrive, self.leaves)
        self._lines: MutableMapping[Any, Line] = WeakIdKeyDictionary()  # one of the script's may have no hash
        self._habits: weakref.WeakKeyDictionary[DataLoader[Any], Habit] = weakref.WeakKeyDictionary()
        self._checked: dict[Way, int] = {"staged": 0, "early": 0, "gathered": 0}
        self._num_failures = 0
        self._thread, self._pid = get_ident(), os.getpid()

    def engage(self, part: Part, on: bool, passes: Iterable[Any] = ()) -> None:
        """From the next fetch or copy on, or no longer; `passes`: those that are under way."""
        if not self.parts:
            self.num = dict.fromkeys(self.num, 0)
        if on:
            self.parts.add(part)
        else:
            self.parts.discard(part)
        if self.parts:
            self._seams.install()
        else:
            self._seams.remove()
            self._known.forget()
            self._stagings.clear()
        for one in passes:
            if one.inner is not None and one.inner not in self._lines:
                self.attach(one.loader, one.inner)

    # -- batches -------------------------------------------------------------------------------------------------

    def attach(self, loader: DataLoader[Any], iterator: Any) -> None:
        """A pass begins, or one is under way: its batches are watched."""
        if self.parts and iterator is not None:
            with contextlib.suppress(TypeError):  # an iterator of the script's that nobody can refer to weakly
                self._lines[iterator] = Line(loader, self._habits.setdefault(loader, {}))

    def following(self, iterator: Any, fetch: Fetch) -> Any:
        """The next batch of an iterator, one after it being on its way."""
        if iterator not in self._lines:  # `get` raises where nothing can refer weakly to an iterator
            return fetch(iterator)
        line = self._lines[iterator]
        for leaf in line.given:  # what was begun and nobody wanted would hold memory of the device
            leaf.copy = None
        taken = len(line) > 0
        batch = line.next(iterator, fetch)
        line.given, line.begun = line.begun, []
        if not self._works:
            return batch
        if not taken:
            self._know(batch, line.habit)
        if "prefetch" in self.parts:
            for early in line.early(iterator, fetch):
                line.begun = self._know(early, line.habit, begin=True)
        return batch

    def _know(self, batch: Any, habit: Habit, *, begin: bool = False) -> list[TensorInfo]:
        """Remember the tensors of a batch; `begin`: and begin to copy those that the script is used to copy."""
        leaves = []
        try:
            for place, tensor in enumerate(tensors_of(batch)):
                if not _is_plain(tensor):
                    continue
                leaf = self._known.take(tensor) or TensorInfo()
                leaf.habit, leaf.place = habit, place
                leaves.append(leaf)
                self._known.know(tensor, leaf)
                named = habit.get(place) if begin else None
                device = self._devices(named) if named is not None else None
                if device is not None and not device.capturing():
                    leaf.copy = self._staging(device).begin(tensor, early=True)
        except Exception as problem:  # noqa: BLE001  a batch of any kind may come, and plain is always there
            let_through(problem)
            self._failed(problem)
        return leaves

    def gathered(self, tensor: torch.Tensor, column: Column, places: Places) -> None:
        """A tensor consists of kept rows."""
        if "store" in self.parts and _is_plain(tensor):
            self._known.know(tensor, TensorInfo(rows=Rows(column, places)))

    # -- copies --------------------------------------------------------------------------------------------------

    @property
    def _works(self) -> bool:
        here = self._thread == get_ident() and self._pid == os.getpid()
        return here and bool(self.parts) and self.why_not is None and not torch.is_inference_mode_enabled()

    def leaves(self) -> None:
        """A tensor leaves a device and the host does not wait; perhaps it does with the next copy that it waits for."""
        self._awaited = True

    def arrive(self, tensor: torch.Tensor, target: Target, plain: Callable[[], Any]) -> Any:
        """The tensor on the device that is asked for; None where plain is to copy it."""
        if not self._works or not _is_plain(tensor) or not _is_usual():
            return None
        named, goes_on = target
        if self._awaited and not goes_on:
            return None
        try:
            device = self._devices(named)
            if device is None or device.capturing():
                return None
            begun = self._begun(tensor, device, named, goes_on=goes_on)
            if begun is None:
                return None
            way, copy = begun
            found = self._staging(device).hand_over(copy, waits=not goes_on)
            self.num[way] += 1
        except Exception as problem:  # noqa: BLE001  no memory on the device, for example: plain is there
            let_through(problem)
            self._failed(problem)
            return None
        return self._watched(way, found, plain)

    def _begun(
        self, tensor: torch.Tensor, device: Device, named: torch.device, *, goes_on: bool
    ) -> tuple[Way, Copy] | None:
        """A copy that was begun, or is now, and in which way."""
        leaf, staging = self._known.take(tensor), self._staging(device)
        if leaf is not None:
            early, leaf.copy = leaf.copy, None
            if leaf.habit is not None:
                leaf.habit[leaf.place] = named
            if early is not None and early.device is device:
                return "early", early
        rows = leaf.rows if leaf is not None and "store" in self.parts else None
        mirror = rows.look(device) if rows is not None else None
        if rows is not None and mirror is not None and mirror.covers(rows.places):
            copy = staging.gather(tensor, mirror, rows.places)
            return None if copy is None else ("gathered", copy)
        if mirror is None and "prefetch" not in self.parts:
            return None
        if device.is_pinned(tensor) and (leaf is None or goes_on):
            return None  # plain's copy does not wait already, or comes after others that write there
        copy = staging.begin(tensor, rows=rows if mirror is not None else None)
        return None if copy is None else ("staged", copy)

    def _staging(self, device: Device) -> Staging:
        found = self._stagings.get(id(device))
        if found is None:
            free_bytes = free_memory_bytes() or 0
            found = Staging(device, min(MOST_PINNED_BYTES, int(free_bytes * PINNED_SHARE)))
            self._stagings[id(device)] = found
        return found

    def _watched(self, way: Way, found: torch.Tensor, plain: Callable[[], Any]) -> Any:
        """What is given: plain's own where both are compared, the first times and now and then after that."""
        self._checked[way] += 1
        if self._checked[way] > NUM_FIRST and self._checked[way] % EVERY:
            return found
        own = plain()
        if why := difference(found, own):
            self._set_aside(f"copies differ ({way}): {why}")
        return own

    # -- the end of it -------------------------------------------------------------------------------------------

    def _failed(self, problem: Exception) -> None:
        self._num_failures += 1
        if self._num_failures >= MOST_FAILURES:
            self._set_aside(f"{self._num_failures} copies could not be made: {problem}")

    def _set_aside(self, why: str) -> None:
        """Never again; batches that were taken early are still given."""
        if self.why_not is None:
            self.why_not = why
        self._known.forget()


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of the kind of which a copy has one possible form."""
    if type(tensor) is not torch.Tensor or not tensor.is_cpu or tensor.layout is not torch.strided:
        return False
    if tensor.requires_grad or tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.is_quantized or not tensor.numel() or any(getattr(tensor, "names", ())):
        return False
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def _is_usual() -> bool:
    """Whether nobody else looks into operations just now: modes, transforms of functions, a trace."""
    return (
        not torch._C._len_torch_function_stack()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._get_tracing_state() is None
    )
