"""How do worker processes of ours end? With the script; and where one dies or hangs, all of them at once.

PyTorch learns of a dead worker by a signal that raises in whatever line the script is in, and of one that hangs not at
all. Ours are looked at while a batch is waited for, and have a time limit: the batch is then fetched without them, so
that giving up too early costs time and nothing else. In: a loader under settings of ours. Out: its iterator.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import DataLoader, _utils
from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL, signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from flatout.frameworks.pytorch.input.plain_iterator import Recorded
from flatout.frameworks.pytorch.input.worker_settings import start_method
from flatout.guest import lifeline

LOOK_S = 0.5
"""How long a batch is waited for before it is looked whether the workers are alive."""

PATIENCE_S = 60.0
"""How long a batch may take before the workers count as hanging, where the script says nothing of it."""


def as_no_ones() -> None:
    """Signals end this process, and a terminal's interruption is the script's: its handlers are not for here."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)


class Process(type(multiprocessing.get_context("fork")).Process):  # type: ignore[misc]
    """A forked process that ends with the script, however that ends."""

    def start(self) -> None:
        """Fork."""
        self._by_main_thread = threading.get_native_id() == os.getpid()
        super().start()
        multiprocessing.process._children.discard(self)  # type: ignore[attr-defined]  # the script may join its own

    def run(self) -> None:
        """What the forked process does."""
        if self._by_main_thread:  # the signal comes when the thread that forked ends, and others may end early
            lifeline.request()()
            if os.getppid() != self._parent_pid:
                os._exit(1)
        as_no_ones()
        super().run()


class _Context(type(multiprocessing.get_context("fork"))):  # type: ignore[misc]
    """Forks as the default does."""

    Process = Process


class _Sent:
    """A collation that raises in the worker where its batch could not be sent whole.

    PyTorch's queue drops what cannot be pickled, and the script would wait for it until the time limit.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, items: Any) -> Any:
        batch = self._collate(items)
        _Pickler(io.BytesIO()).dump(batch)
        return batch


class _Pickler(ForkingPickler):
    """Pickles all but the tensors, which have a way of their own."""

    def persistent_id(self, value: Any) -> bool | None:
        """Something for a tensor that arrives as it is.

        Raises:
            TypeError: PyTorch's own way would lose something of it.
        """
        if type(value) is torch.Tensor:
            if value.requires_grad and not value.is_leaf:
                raise TypeError("a tensor that has a gradient to come cannot be sent")
            if value.is_quantized or vars(value) or value.is_conj() or value.is_neg():
                raise TypeError("a tensor that is quantized, conjugate or carries attributes cannot be sent whole")
            return True
        return True if isinstance(value, torch.UntypedStorage | torch.TypedStorage) else None


@contextlib.contextmanager
def _ours(loader: DataLoader[Any]) -> Iterator[None]:
    """Have the loader's workers end with the script, and tell what they cannot send."""
    attributes = vars(loader)
    own, context = loader.collate_fn, loader.multiprocessing_context
    if context is None and start_method() == "fork":  # others would have to import us
        loader.multiprocessing_context = _Context()
        attributes["collate_fn"] = _Sent(own)
    try:
        yield
    finally:
        loader.multiprocessing_context = context
        attributes["collate_fn"] = own


class OurWorkers(Recorded, _MultiProcessingDataLoaderIter):
    """PyTorch's iterator, which raises as soon as a worker has died, and when one hangs."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._broken, self._pid = False, os.getpid()
        try:
            with _ours(loader):
                super().__init__(loader)
        except BaseException:
            self._broken, self._problem = True, None
            self._shutdown_workers()
            raise
        self._timeout = self._timeout or PATIENCE_S

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        if first_iter:
            # Before they have anything to do: PyTorch's signal that one has died may raise where a queue's lock is
            # held, and then nobody can end them.
            signal_handling._remove_worker_pids(id(self))  # type: ignore[attr-defined]
            self._worker_pids_set = False
        self.begin_record()
        super()._reset(loader, first_iter)

    def _try_get_data(self, timeout: float = MP_STATUS_CHECK_INTERVAL) -> tuple[bool, Any]:
        until_s = time.monotonic() + timeout
        found, data = False, None
        try:
            while not found and (left_s := until_s - time.monotonic()) > 0:
                found, data = super()._try_get_data(min(LOOK_S, left_s))
        except Exception:
            self._broken = True
            raise
        self._broken = self._broken or not found
        return found, data

    def _shutdown_workers(self) -> None:
        if os is None or _utils is None or _utils.python_exit_status is not False:  # the interpreter ends
            return None
        if os.getpid() != self._pid:  # collected in a process that was forked from here, whose workers they are not
            return None
        if not hasattr(self, "_workers") or self._shutdown:  # there was no room even for the first queue
            return None
        begun = hasattr(self, "_workers_status")
        if self._broken or not begun or not all(worker.is_alive() for worker in self._workers):
            return self._end_at_once()
        super()._shutdown_workers()
        for worker in self._workers:
            if worker.is_alive():  # stopped, say
                worker.kill()
        return None

    def _end_at_once(self) -> None:
        """Without asking them: a dead worker may hold the locks with which they are asked."""
        self._shutdown = True
        if hasattr(self, "_pin_memory_thread"):
            self._pin_memory_thread_done_event.set()
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.join(timeout=MP_STATUS_CHECK_INTERVAL)
        for queue in self._index_queues:
            queue.cancel_join_thread()
            queue.close()
