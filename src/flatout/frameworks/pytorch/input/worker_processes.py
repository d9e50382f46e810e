"""How do worker processes of ours end? With the script; and where one dies or hangs, all of them at once.

PyTorch learns of a dead worker by a signal that raises in whatever line the script is in, and of one that hangs not at
all. Ours are watched while a batch is waited for, and given up when one shows no sign of life: the batch is fetched
without them, so that giving up too early costs time and nothing else. In: a loader under settings of ours. Out: its
iterator.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, _utils
from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL, signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from flatout.frameworks.pytorch.input.hand_back import GivenOrder, Recorded
from flatout.frameworks.pytorch.input.hand_over import context_for
from flatout.frameworks.pytorch.input.shuffles import shuffle_of
from flatout.guest import lifeline

LOOK_S = 5.0
"""How long a batch is waited for before it is looked whether the workers are alive."""

MOST_LIFELESS = 6
"""Looks in a row at which a worker has not moved, though it has something to do. One that waits for a disk or a network
moves whenever something comes. Counted in looks, not in seconds, for a whole machine may sleep as well."""


class Process(type(multiprocessing.get_context("fork")).Process):  # type: ignore[misc]
    """A forked process that ends with the script, however that ends."""

    def start(self) -> None:
        """Fork."""
        self._by_main_thread = threading.get_native_id() == os.getpid()
        super().start()

    def run(self) -> None:
        """What the forked process does."""
        if self._by_main_thread:  # the signal comes when the thread that forked ends, and others may end early
            lifeline.request()()
            if os.getppid() != self._parent_pid:
                os._exit(1)
        super().run()


class OurWorkers(Recorded, _MultiProcessingDataLoaderIter):
    """PyTorch's iterator, which raises as soon as a worker has died, and when one hangs."""

    def __init__(self, loader: DataLoader[Any], ahead: int) -> None:
        self._ahead = ahead
        """By how many batches plain is ahead of the script."""
        self._broken = False
        self._pid = os.getpid()
        self._seen: dict[Any, tuple[Any, int]] = {}
        """For each worker: signs of life, and at how many looks they were the same."""
        try:
            with _handing_over(loader):
                super().__init__(loader)
        except BaseException:
            self._broken, self._problem = True, None
            self._shutdown_workers()
            raise

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        if first_iter:
            # Before they have anything to do: PyTorch's signal that one has died may raise where a queue's lock is
            # held, and then nobody can end them.
            signal_handling._remove_worker_pids(id(self))  # type: ignore[attr-defined]
            self._worker_pids_set = False
        self.begin_record()
        self.shuffle = shuffle_of(loader, self._ahead)
        sampler = self._index_sampler
        if first_iter and not self._ahead:  # the script has no workers: with them, PyTorch begins an order twice
            self._index_sampler = GivenOrder(sampler, self._sampler_iter)
        try:
            with self.shuffle.aside() if self.shuffle is not None else contextlib.nullcontext():
                super()._reset(loader, first_iter)
        finally:
            self._index_sampler = sampler

    def _try_get_data(self, timeout: float = MP_STATUS_CHECK_INTERVAL) -> tuple[bool, Any]:
        try:
            if self._pin_memory:  # a thread takes what comes
                return super()._try_get_data(timeout)
            end_s = time.monotonic() + timeout
            while not wait(self._waited_for(), min(LOOK_S, max(end_s - time.monotonic(), 0))):
                self._look()
                if time.monotonic() >= end_s:
                    self._broken = self._timeout > 0  # the script's own limit
                    return False, None
            return super()._try_get_data(0)
        except Exception:
            self._broken = True
            raise

    def _waited_for(self) -> list[Any]:
        """Where a batch or a worker's death shows."""
        active = zip(self._workers, self._workers_status, strict=True)
        reader: Any = self._data_queue
        return [reader._reader, *(worker.sentinel for worker, is_active in active if is_active)]

    def _look(self) -> None:
        """See whether those that have something to do are alive.

        Raises:
            RuntimeError: One has not moved for a long time.
        """
        busy = {task[0] for task in self._task_info.values() if len(task) == 1} or range(len(self._workers))
        for worker in (self._workers[number] for number in busy):
            signs = signs_of_life(worker.pid)
            before, num = self._seen.get(worker.pid, (None, 0))
            num = num + 1 if signs is not None and signs == before else 0
            self._seen[worker.pid] = signs, num
            if num >= MOST_LIFELESS:
                raise RuntimeError(f"a worker (pid {worker.pid}) has shown no sign of life for {num * LOOK_S:.0f} s")

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


def signs_of_life(pid: int | None) -> tuple[str, ...] | None:
    """What moves whenever a process does anything: its processor time, and how often each thread has waited.

    None where it is not known.
    """
    folder = Path("/proc") / str(pid)
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        threads = [(thread / "status").read_text() for thread in (folder / "task").iterdir()]
    except OSError:
        return None
    return (*fields[11:13], *(text.partition("voluntary_ctxt_switches:")[2] for text in threads))


@contextlib.contextmanager
def _handing_over(loader: DataLoader[Any]) -> Iterator[None]:
    """Have the loader's workers hand over small tensors by value."""
    own = loader.multiprocessing_context
    ours = context_for(vars(loader)) if own is None else None
    if ours is None:
        yield
        return
    loader.multiprocessing_context = ours
    try:
        yield
    finally:
        loader.multiprocessing_context = own
