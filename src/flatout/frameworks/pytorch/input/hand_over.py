"""How does a batch come from a worker process? Small tensors by value through the pipe, large ones in shared memory.

PyTorch shares every tensor by a descriptor of its own, which the worker serves from a thread and the script fetches
through an authenticated socket: about a millisecond of both for each tensor, however small. Through a pipe that holds
it whole, a batch of small tensors comes 2 to 5 times as fast. In: how many batches may be under way. Out: a
multiprocessing context for a loader. Measured: benchmarks/hand_over.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import multiprocessing
import pickle
import struct
from collections.abc import Mapping
from multiprocessing.connection import Connection
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch._utils import ExceptionWrapper
from torch.multiprocessing.reductions import reduce_storage, reduce_tensor
from torch.utils.data import DataLoader

PIPE_BYTES = 2**20
"""The pipe that is asked for: what Linux grants to anyone (`/proc/sys/fs/pipe-max-size`)."""

LARGEST_BY_VALUE = 2**19
"""Bytes of a storage above which copying it twice costs as much as a descriptor. Source: benchmarks/hand_over.py."""


def context_for(settings: Mapping[str, Any]) -> Any:
    """The multiprocessing context for a loader with these worker attributes; None for PyTorch's own.

    Only forked workers: others would have to import us.
    """
    if start_method() != "fork" or not settings["num_workers"]:
        return None
    return _Context(num_under_way=settings["num_workers"] * (settings["prefetch_factor"] or 2))


def start_method(loader: DataLoader[Any] | None = None) -> str:
    """How worker processes are started, those of a loader or any others.

    get_context() would fix it, and the script may still want to set it.
    """
    if loader is not None and loader.multiprocessing_context is not None:
        return str(loader.multiprocessing_context.get_start_method())
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


class _Context(type(multiprocessing.get_context("fork"))):  # type: ignore[misc]
    """Forks as the default does; its first queue, by which batches come, is ours."""

    def __init__(self, num_under_way: int) -> None:
        super().__init__()
        from flatout.frameworks.pytorch.input.worker_processes import Process

        self.Process = Process
        self._num_under_way = num_under_way
        self._num_queues = 0

    def Queue(self, maxsize: int = 0) -> Any:
        self._num_queues += 1
        context = torch.multiprocessing.get_context("fork")
        if self._num_queues > 1:
            return context.Queue(maxsize)
        return _BatchQueue(self._num_under_way, ctx=context)


class _BatchQueue(Queue):  # type: ignore[type-arg]
    """A queue that has room in its pipe for every tensor that it sends by value.

    So a worker does not wait, or die, in the middle of one, and its reader not either.
    """

    def __init__(self, num_under_way: int, *, ctx: Any) -> None:
        super().__init__(ctx=ctx)
        self._writer = _Whole(self._writer)  # type: ignore[has-type]
        # a page for what goes with the tensors
        self._room = max(_pipe_bytes(self._writer.fileno()) // num_under_way - 4096, 0)

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        super().put(_Packed(obj, self._room), block, timeout)


class _Whole(Connection):
    """The writing end of a pipe that sends the length and the message in one call."""

    def __init__(self, writer: Any) -> None:
        super().__init__(writer.fileno(), readable=False)
        writer._handle = None  # ours to close now

    def _send_bytes(self, buf: Any) -> None:
        if len(buf) > PIPE_BYTES:
            super()._send_bytes(buf)  # type: ignore[misc]
        else:
            self._send(struct.pack("!i", len(buf)) + bytes(buf))  # type: ignore[attr-defined]


def _pipe_bytes(descriptor: int) -> int:
    """What the pipe holds, after asking for more."""
    import fcntl

    with contextlib.suppress(OSError):  # more than this user may have
        fcntl.fcntl(descriptor, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return fcntl.fcntl(descriptor, fcntl.F_GETPIPE_SZ)


class _Packed:
    """A message, pickled by our rules in the thread that sends it, that comes out as itself.

    That thread drops what cannot be pickled, and the script would wait for it forever: the problem is sent instead.
    """

    def __init__(self, message: Any, room: int) -> None:
        self._message = message
        self._room = room

    def __reduce__(self) -> Any:
        data = io.BytesIO()
        try:
            _Pickler(data, self._room).dump(self._message)
        except Exception:  # noqa: BLE001  a batch of the user's own kind may raise anything
            index, _ = self._message
            return tuple, ((index, ExceptionWrapper(where="in a worker, sending its batch")),)
        return pickle.loads, (data.getvalue(),)


class _Pickler(ForkingPickler):
    """multiprocessing's own, but for small storages as long as there is room."""

    def __init__(self, file: Any, room: int) -> None:
        super().__init__(file)
        self._room = room
        ours: dict[type, Any] = {torch.UntypedStorage: self._reduce_storage, torch.Tensor: _reduce_tensor}
        self.dispatch_table = {**self.dispatch_table, **ours}

    def _reduce_storage(self, storage: torch.UntypedStorage) -> Any:
        num_bytes = storage.nbytes()
        if storage.device.type != "cpu" or num_bytes > min(LARGEST_BY_VALUE, self._room):
            return reduce_storage(storage)  # type: ignore[no-untyped-call]
        self._room -= num_bytes
        return storage_of, (ctypes.string_at(storage.data_ptr(), num_bytes),)


def _reduce_tensor(tensor: torch.Tensor) -> Any:
    """PyTorch's own, but for what it loses on the way: then the batch is made again without workers.

    Raises:
        TypeError: Something of the tensor would be lost.
    """
    if tensor.is_quantized or vars(tensor):
        raise TypeError("a tensor that is quantized or carries attributes cannot be sent whole")
    if tensor.is_conj() or tensor.is_neg():  # a mark that says how to read the memory, and is not sent
        tensor = tensor.detach().resolve_conj().resolve_neg()
    return reduce_tensor(tensor)  # type: ignore[no-untyped-call]


def storage_of(data: bytes) -> torch.UntypedStorage:
    """A storage of its own with these bytes."""
    storage = torch.UntypedStorage(len(data))
    ctypes.memmove(storage.data_ptr(), data, len(data))
    return storage
