"""How do ranks talk, unseen by the script?

Through process groups of PyTorch's that are nobody's default: `torch.distributed.is_initialized()` stays false, for
half of the public scripts become distributed when it is true, and a script may be made distributed once. In: a rank,
the world and where the others meet; what levers say of sums. Out: collectives, each with a time limit and a name.
"""

from __future__ import annotations

import copy
import itertools
import math
import os
import pickle
import socket
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from threading import get_ident
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

from flatout.guest.rank_status import StatusPage
from flatout.records.ranks import RankPlace

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.observe.observer import Observer


class Communication:
    """What all sums of gradients of a run have in common."""

    def __init__(self) -> None:
        self.bucket_bytes = (1 << 20, 25 << 20)
        """Of the first one, which is to be under way early, and of the others; as `DistributedDataParallel` has it."""
        self.in_bf16 = False
        """Whether float32 gradients are sent and summed as bfloat16."""
        self.num_bytes = self.num_sent_bytes = 0
        """Of gradients that were to be summed as bfloat16, and as which they were sent."""

    @contextmanager
    def in_full(self) -> Iterator[None]:
        """Within, gradients are summed as they are: to be compared with those of one process."""
        former, self.in_bf16 = self.in_bf16, False
        try:
            yield
        finally:
            self.in_bf16 = former

    def narrows(self, dtype: torch.dtype | None) -> bool:
        """Whether gradients of this type are sent narrower: others are narrow already, or meant to be wide."""
        return self.in_bf16 and dtype == torch.float32

    def to_send(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is sent of a tensor in its place: bfloat16, or a copy."""
        if not self.narrows(tensor.dtype):
            return tensor.clone()
        sent = tensor.to(torch.bfloat16)
        self.note(sent)
        return sent

    def note(self, sent: torch.Tensor) -> None:
        """Something was sent as bfloat16 that is float32."""
        self.num_sent_bytes += sent.numel() * sent.element_size()
        self.num_bytes += sent.numel() * torch.float32.itemsize


dist: Any = torch.distributed  # whose parts are not all known to be its own


LETTING_GO_S = 0.2
"""So long the end of a process waits for threads that exchange."""


class Lost(RuntimeError):
    """A collective broke: another rank is gone, or did not come in time."""


class Group:
    """All ranks of a run, as seen by one of them."""

    def __init__(self, me: RankPlace, page: StatusPage, *, limit_s: float) -> None:
        self.me, self.page = me, page
        self.rank, self.world = me.rank, me.world
        self.name, self.ranks = "world", list(range(me.world))
        self.communication = Communication()  # of groups of some ranks as well
        self.limit = timedelta(seconds=limit_s)
        """How long an exchange may take."""
        with warnings.catch_warnings(action="ignore"):
            store = dist.TCPStore(me.host, me.port, me.world, is_master=False, timeout=self.limit)
        self.store = dist.PrefixStore("flatout", store)
        self._processes: Any = None
        self._has_cuda = False
        self._last: list[torch.Tensor] = []
        self.observer: Observer | None = None
        """Told of the exchanges in which nothing is computed, while the parts of steps are observed."""
        self.on_lost: Callable[[Lost], None] | None = None
        """Told when a collective broke; it may end the process."""
        self.on_child: Callable[[], None] = lambda: None
        """Told when a process that a rank has forked would exchange, which would take the place of the rank's."""
        self._pid = os.getpid()

    @property
    def processes(self) -> Any:
        """The process group, with gloo for the CPU; made when it is needed first, which all ranks wait for."""
        self._keep_children_out()
        if self._processes is None:
            self.page.begin("meeting of all ranks")
            options = dist.ProcessGroupGloo._Options()
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(self.me))]
            options._timeout = self.limit
            backend = dist.ProcessGroupGloo(self.store, self.rank, self.world, options)
            self._processes = dist.ProcessGroup(self.store, self.rank, self.world)
            kind = dist.ProcessGroup.BackendType.GLOO
            self._processes._register_backend(torch.device("cpu"), kind, backend)
            self._processes._set_default_backend(kind)
            self.page.end(waiting=True)
        return self._processes

    def _keep_children_out(self) -> None:
        if os.getpid() != self._pid:
            self.on_child()

    def of_ranks(self, name: str, ranks: list[int]) -> Group:
        """Some of the ranks, this one among them, as a group of its own."""
        part = copy.copy(self)
        part.name, part.ranks = name, ranks
        part.rank, part.world = ranks.index(self.rank), len(ranks)
        part.store = dist.PrefixStore(name, self.store)
        part._processes, part._has_cuda = None, False
        return part

    def close(self) -> None:
        """Nothing is exchanged any more.

        A thread of gloo's lets go of the last tensors a moment after they have come. If Python had let go of them
        before, that thread would have to free a Python object, for which it would be killed where the interpreter has
        begun to end, and the process aborts with it.
        """
        until_s = time.monotonic() + LETTING_GO_S
        last: list[Any] = self._last  # how many hold a tensor is not known to type checkers
        while any(tensor._use_count() > 1 for tensor in last) and time.monotonic() < until_s:
            time.sleep(0.001)
        self._last.clear()
        self._processes = None

    def keep(self, *tensors: torch.Tensor) -> None:
        """Hold what is exchanged until the next exchange: see `close`."""
        self._last[:] = tensors

    def of_first(self, make: Callable[[], Any], name: str) -> Any:
        """A value of rank 0's, which the others wait for; the ranks need not have met."""
        if self.rank == 0:
            value = make()
            self.store.set(name, pickle.dumps(value))
            return value
        return pickle.loads(self.store.get(name))

    def serve(self, device: torch.device) -> None:
        """Make sure that tensors of this device can be exchanged."""
        if device.type == "cuda" and not self._has_cuda:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.limit  # its own is ten minutes, whatever an evaluation of rank 0 takes
            store = dist.PrefixStore("nccl", self.store)
            backend = dist.ProcessGroupNCCL(store, self.rank, self.world, options)
            self.processes._register_backend(device, dist.ProcessGroup.BackendType.NCCL, backend)
            self._has_cuda = True

    # -- collectives -----------------------------------------------------------------------------------------------

    @contextmanager
    def named(self, name: str, *, waiting: bool = True) -> Iterator[None]:
        """What is exchanged within has this name; `Lost` where it breaks. `waiting`: nothing is computed beside it."""
        self._keep_children_out()
        self.page.begin(name)
        observer = self.observer if waiting else None
        if observer is not None and not (observer.is_deep and get_ident() == observer.calls.thread):
            observer = None  # a part of the step, in the thread whose steps are taken apart
        if observer is not None:
            observer.push("communication")
        try:
            yield
            self.page.end(waiting=waiting)
        except (RuntimeError, ValueError) as problem:
            text = str(problem).partition("\n")[0]
            lost = Lost(f"{name}: {text or type(problem).__name__}")
            if self.on_lost is not None:
                self.on_lost(lost)
            raise lost from problem
        finally:
            if observer is not None:
                observer.pop("communication")

    def gather(self, mine: torch.Tensor, name: str) -> torch.Tensor:
        """The same tensor of every rank, stacked: (..., ) becomes (world, ...)."""
        self.serve(mine.device)
        whole = mine.new_empty((self.world, *mine.shape))
        into, own = as_bytes(whole), as_bytes(mine)  # not every type can be exchanged
        self.keep(into, own)
        with self.named(name):
            self.processes._allgather_base(into, own).wait()
        return whole

    def joined(self, piece: torch.Tensor, edges: Sequence[int], dim: int, name: str) -> torch.Tensor:
        """The pieces of all ranks along a dimension, which begin and end at `edges`, on every rank."""
        sizes = [high - low for low, high in itertools.pairwise(edges)]
        rows = self.gather(lengthened(piece, max(sizes), dim), name)
        return torch.cat([row.narrow(dim, 0, size) for row, size in zip(rows, sizes, strict=True)], dim)

    def sum(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """The sum over ranks, in place."""
        self.serve(tensor.device)
        self.keep(tensor)
        with self.named(name):
            self.processes.allreduce([tensor]).wait()
        return tensor

    def broadcast(self, tensor: torch.Tensor, name: str, *, source: int = 0) -> torch.Tensor:
        """The tensor of rank `source`, in place."""
        self.serve(tensor.device)
        self.keep(tensor)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        with self.named(name):
            self.processes.broadcast([tensor], options).wait()
        return tensor

    def everywhere(self, holds: bool, name: str) -> bool:
        """Whether something holds on every rank."""
        return self.gather(torch.tensor([int(holds)]), name).min().item() == 1

    def anywhere(self, flags: Sequence[bool], name: str) -> list[bool]:
        """For each flag, whether it is set on any rank."""
        found: list[bool] = self.gather(torch.tensor(flags, dtype=torch.bool), name).any(0).tolist()
        return found

    def objects(self, mine: Any, name: str) -> list[Any]:
        """Any value of each rank, in order of ranks; a rank that met with another exchange ends, as gloo has it."""
        text = torch.frombuffer(bytearray(pickle.dumps((name, mine))), dtype=torch.uint8)
        sizes = self.gather(torch.tensor([text.numel()]), name).view(-1)
        rows = self.gather(lengthened(text, int(sizes.max()), 0), name)
        try:
            found = [pickle.loads(bytes(row[:size].numpy())) for row, size in zip(rows, sizes.tolist(), strict=True)]
            names = {one[0] for one in found}
        except Exception:  # noqa: BLE001  bytes of another exchange
            names = set()
        if names != {name}:
            self.page.begin(name)
            os.abort()
        return [one[1] for one in found]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its numbers, one after the other."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def lengthened(tensor: torch.Tensor, length: int, dim: int) -> torch.Tensor:
    """With zeros behind it, where it is shorter along a dimension."""
    if tensor.shape[dim] == length:
        return tensor
    shape = list(tensor.shape)
    shape[dim] = length - tensor.shape[dim]
    return torch.cat([tensor, tensor.new_zeros(shape)], dim)


def padded(num_bytes: int) -> int:
    """A multiple of 16, so that what comes next is aligned for every type."""
    return (num_bytes + 15) // 16 * 16


def packed(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Tensors of any shapes and types as one row of bytes."""
    rows = [torch.empty(0, dtype=torch.uint8, device=device), *(as_bytes(one).to(device) for one in tensors)]
    return torch.cat([lengthened(row, padded(len(row)), 0) for row in rows])


def unpacked(row: torch.Tensor, kinds: Sequence[tuple[Sequence[int], torch.dtype]]) -> list[torch.Tensor]:
    """The tensors of such a row, in its memory, by their shapes and types."""
    found, start = [], 0
    for shape, dtype in kinds:
        size = math.prod(shape) * dtype.itemsize
        found.append(row[start : start + size].view(dtype).view(tuple(shape)))
        start += padded(size)
    return found


def _own_address(me: RankPlace) -> str:
    """The address of this machine that leads to where ranks meet; nothing is sent to find it."""
    if me.local_world == me.world:
        return "127.0.0.1"
    family, kind, number, _, address = socket.getaddrinfo(me.host, me.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, number) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
