"""Scripts with one planted fault each, for `loader_faults.py`: `planted_faults.py FAULT WORKERS EVENTS`.

Each is what a user might have written: a dataset, a `DataLoader` with so many workers, a loop. What happens is appended
to the file EVENTS as lines of JSON: batches, the moment at which the fault is planted, the end or the exception. Where
a fault is not a line of the dataset's own, the dataset can be read by the input pipeline, so that `virtual_workers` has
something to do.
"""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from flatout.frameworks.pytorch.seams.trees import digest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import engaged

NUM_ITEMS, BATCH = 96, 4
BAD = 40
"""The item that goes wrong, where one does."""

NUM_BEFORE = 5
"""Batches after which something is done to the workers, or to the script."""

FOR_EVER_S = 10_000
NUM_CYCLES, NUM_CYCLES_OF_PROCESSES = 10_000, 100


class Told:
    """The file of events."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._pid = os.getpid()

    def __call__(self, event: str, **what: Any) -> None:
        line = json.dumps({"event": event, "time_s": time.time(), **what})
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(line + "\n")


class Rows(Dataset):
    """Items that the input pipeline can read."""

    def __init__(self, num: int = NUM_ITEMS, width: int = 64) -> None:
        self.rows = torch.arange(num * width, dtype=torch.float32).reshape(num, width)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index], index


class Wrong(Rows):
    """One item at which something happens, in a worker or everywhere."""

    def __init__(self, act: Callable[[], Any], *, everywhere: bool = False, each: bool = False) -> None:
        super().__init__()
        self.act, self.everywhere, self.each = act, everywhere, each

    def __getitem__(self, index: int) -> Any:
        if (index == BAD or self.each) and (self.everywhere or get_worker_info() is not None):
            self.act()
        return super().__getitem__(index)


def loader_of(dataset: Dataset, num_workers: int, **options: Any) -> DataLoader:
    """A shuffled loader."""
    return DataLoader(dataset, **{"batch_size": BATCH, "shuffle": True, "num_workers": num_workers, **options})


def loop(tell: Told, batches: Any, plant: Callable[[], Any] | None = None) -> None:
    """What every script does."""
    for number, batch in enumerate(batches):
        tell("batch", digest=digest(batch))
        if plant is not None and number + 1 == NUM_BEFORE:
            tell("planted")
            plant()


# -- workers that die, hang, or raise ------------------------------------------------------------------------------


def to_a_worker(number: int) -> None:
    """Send a signal to one worker, whoever's it is."""
    for child in multiprocessing.active_children()[:1]:
        os.kill(child.pid, number)


def killed(tell: Told, num_workers: int) -> None:
    """A worker is killed from outside, as the kernel does where memory runs out."""
    loop(tell, loader_of(Rows(), num_workers), lambda: to_a_worker(signal.SIGKILL))


def exits(tell: Told, num_workers: int) -> None:
    """A worker exits with status 3."""
    loop(tell, loader_of(Wrong(lambda: os._exit(3)), num_workers))


def segfault(tell: Told, num_workers: int) -> None:
    """A worker reads what is not there."""
    loop(tell, loader_of(Wrong(lambda: ctypes.string_at(0)), num_workers))


def memory(tell: Told, num_workers: int) -> None:
    """Workers have little room in their address space, and an item needs some."""

    def little() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))

    os.register_at_fork(after_in_child=little)
    loop(tell, loader_of(Wrong(lambda: torch.ones(2**27), everywhere=True), num_workers))


def stopped(tell: Told, num_workers: int) -> None:
    """A worker is stopped from outside and does nothing any more."""
    loop(tell, loader_of(Rows(), num_workers), lambda: to_a_worker(signal.SIGSTOP))


def hung(tell: Told, num_workers: int) -> None:
    """An item waits for ever in a worker."""
    loop(tell, loader_of(Wrong(lambda: time.sleep(FOR_EVER_S)), num_workers))


def hung_with_timeout(tell: Told, num_workers: int) -> None:
    """The same, and the script has asked for a time limit."""
    loop(tell, loader_of(Wrong(lambda: time.sleep(FOR_EVER_S)), num_workers, timeout=2))


def raises(tell: Told, num_workers: int) -> None:
    """An item raises an exception of the script's."""

    def wrong() -> None:
        raise KeyError("no such item")

    loop(tell, loader_of(Wrong(wrong, everywhere=True), num_workers))


class Places(Rows):
    """An index that leads nowhere, in a dataset that can be read."""

    def __init__(self) -> None:
        super().__init__()
        self.places = [NUM_ITEMS + 1 if index == BAD else index for index in range(NUM_ITEMS)]

    def __getitem__(self, index: int) -> Any:
        return self.rows[self.places[index]], index


def index_error(tell: Told, num_workers: int) -> None:
    """An item is outside of its tensor."""
    loop(tell, loader_of(Places(), num_workers))


class OddError(Exception):
    """Cannot be made again from its message."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def unpicklable(tell: Told, num_workers: int) -> None:
    """An item raises an exception whose class wants two arguments."""

    def wrong() -> None:
        raise OddError(1, 2)

    loop(tell, loader_of(Wrong(wrong, everywhere=True), num_workers))


def shared_memory(tell: Told, num_workers: int) -> None:
    """Batches of 4 MB, and `/dev/shm` of 16."""
    loop(tell, loader_of(Rows(width=2**18), num_workers))


# -- images --------------------------------------------------------------------------------------------------------


class Photos(Dataset):
    """Images in files. Nothing is random, for which added workers would have random numbers of their own."""

    def __init__(self, folder: Path) -> None:
        random = np.random.default_rng(0)
        self.paths = []
        for number in range(NUM_ITEMS):
            path = folder / f"{number}.jpg"
            pixels = random.integers(0, 256, (6, 6, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((64, 64)).save(path)
            os.utime(path, (1e9, 1e9))  # what was written a moment ago is not kept
            self.paths.append(str(path))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        image = Image.open(self.paths[index]).convert("RGB")
        return torch.from_numpy(np.array(image.crop((8, 8, 40, 40)))).permute(2, 0, 1) / 255, index


def photos(tell: Told, num_workers: int, plant: Callable[[Path], Any], *, at_once: bool = False) -> None:
    """Two epochs over images; in the second one something is done to the file of the last item."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = Photos(Path(folder))
        act = lambda: plant(Path(dataset.paths[-1]))  # noqa: E731
        if at_once:
            act()
        loader = loader_of(dataset, num_workers, shuffle=False)
        for epoch in range(2):
            loop(tell, loader, act if epoch and not at_once else None)


def corrupt(tell: Told, num_workers: int) -> None:
    """The file of an image breaks off in the middle."""
    photos(tell, num_workers, lambda path: path.write_bytes(path.read_bytes()[:500]), at_once=True)


def vanishes(tell: Told, num_workers: int) -> None:
    """The file of an image is removed during the second epoch."""
    photos(tell, num_workers, lambda path: path.unlink())


def rewritten(tell: Told, num_workers: int) -> None:
    """The file of an image is rewritten during the second epoch."""
    photos(tell, num_workers, lambda path: path.write_bytes(path.with_name("0.jpg").read_bytes()))


# -- fork ----------------------------------------------------------------------------------------------------------


LOCK = threading.Lock()


class Locked(Rows):
    """Items that are taken under a lock."""

    def __getitem__(self, index: int) -> Any:
        with LOCK:
            return super().__getitem__(index)


def lock(tell: Told, num_workers: int) -> None:
    """A thread of the script's holds a lock while workers are forked."""
    taken = threading.Event()

    def hold() -> None:
        with LOCK:
            taken.set()
            time.sleep(2)

    threading.Thread(target=hold, daemon=True).start()
    taken.wait()
    loop(tell, loader_of(Locked(), num_workers))


def openmp(tell: Told, num_workers: int) -> None:
    """The script has used OpenMP before workers are forked, and items are computed on two threads."""
    torch.set_num_threads(2)
    work = torch.ones(400, 400)
    work @ work + torch.ones(2**20).sum()

    def compute() -> None:
        torch.set_num_threads(2)
        (torch.ones(2**20) + 1).sum()

    loop(tell, loader_of(Wrong(compute, everywhere=True, each=True), num_workers))


# -- the script's end ----------------------------------------------------------------------------------------------


def interrupted(tell: Told, num_workers: int) -> None:
    """Ctrl-C in a terminal, while a batch is waited for."""
    dataset = Wrong(lambda: time.sleep(0.25), everywhere=True, each=True)
    loop(tell, loader_of(dataset, num_workers), lambda: threading.Timer(0.3, os.killpg, (0, signal.SIGINT)).start())


def parent_killed(tell: Told, num_workers: int) -> None:
    """The script is killed, and its workers have nothing to do."""
    loop(tell, loader_of(Rows(), num_workers), lambda: (time.sleep(1), os.kill(os.getpid(), signal.SIGKILL)))


def parent_killed_worker_stuck(tell: Told, num_workers: int) -> None:
    """The script is killed, and a worker waits for ever in an item."""
    dataset = Wrong(lambda: time.sleep(FOR_EVER_S))
    options = {"shuffle": False, "sampler": [*range(BATCH * NUM_BEFORE), BAD, *range(BATCH * NUM_BEFORE, BAD)]}
    kill = lambda: (time.sleep(1), os.kill(os.getpid(), signal.SIGKILL))  # noqa: E731
    loop(tell, loader_of(dataset, num_workers, **options), kill)


def shutdown(tell: Told, num_workers: int) -> None:
    """The script ends in the middle of an epoch, with every queue full."""
    global held
    held = iter(loader_of(Rows(width=2**16), num_workers))
    for _ in range(NUM_BEFORE):
        tell("batch", digest=digest(next(held)))
    time.sleep(0.5)
    tell("planted")


held: Any = None


# -- the script's loop ---------------------------------------------------------------------------------------------


def stops_early(tell: Told, num_workers: int) -> None:
    """The loop breaks off, and the script goes on with something else."""
    for number, batch in enumerate(loader_of(Rows(), num_workers)):
        tell("batch", digest=digest(batch))
        if number + 1 == NUM_BEFORE:
            break
    time.sleep(2)
    tell("noted", processes=len(multiprocessing.active_children()), random=torch.rand(1).item())


class Asked(Sampler):
    """Counts the batches that were asked for."""

    def __init__(self) -> None:
        self.num = 0

    def __len__(self) -> int:
        return NUM_ITEMS // BATCH

    def __iter__(self) -> Iterator[list[int]]:
        for begin in range(0, NUM_ITEMS, BATCH):
            self.num += 1
            yield list(range(begin, begin + BATCH))


def slow_consumer(tell: Told, num_workers: int) -> None:
    """Batches of 4 MB that are used more slowly than they could come."""
    asked, most = Asked(), 0
    loader = DataLoader(Rows(width=2**18), batch_sampler=asked, num_workers=num_workers)
    for number, batch in enumerate(loader):
        tell("batch", digest=digest(batch))
        time.sleep(0.1)
        most = max(most, asked.num - number - 1)
    tell("noted", batches_ahead=most)


def nested(tell: Told, num_workers: int) -> None:
    """A loop within a loop over the same loader, whose workers are kept."""
    loader = loader_of(Rows(4 * BATCH), num_workers, shuffle=False, persistent_workers=bool(num_workers))
    num_pairs = 0
    for one in loader:
        for other in loader:
            num_pairs += 1
            tell("batch", digest=digest([one, other]))
    tell("noted", pairs=num_pairs)


def cycles(tell: Told, num_workers: int) -> None:
    """A pass is opened, used for one batch and dropped, again and again."""
    loader = loader_of(Rows(), num_workers)
    next(iter(loader))
    num = NUM_CYCLES
    found = []
    for number in range(num):
        begun = iter(loader)
        next(begun)
        if number == 0 and multiprocessing.active_children():
            num = NUM_CYCLES_OF_PROCESSES
        if number in (num // 5, num - 1):
            del begun
            gc.collect()
            found.append(held_now())
        if number == num - 1:
            break
    grown = {name: found[1][name] - found[0][name] for name in found[0]}
    tell("noted", cycles=num, **{f"more_{name}": value for name, value in grown.items()})


def held_now() -> dict[str, int]:
    """What this process holds: descriptors, threads, children, mappings, and MB of memory."""
    status = Path("/proc/self/status").read_text()
    resident = int(status.split("VmRSS:")[1].split()[0])
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "processes": len(multiprocessing.active_children()),
        "maps": len(Path("/proc/self/maps").read_text().splitlines()),
        "mb": round(resident / 1024),
    }


FAULTS: dict[str, tuple[Callable[[Told, int], None], tuple[int, ...]]] = {
    "killed": (killed, (2, 0)),
    "exits": (exits, (2, 0)),
    "segfault": (segfault, (2, 0)),
    "memory": (memory, (2, 0)),
    "stopped": (stopped, (2, 0)),
    "hung": (hung, (2, 0)),
    "hung_with_timeout": (hung_with_timeout, (2,)),
    "raises": (raises, (2, 0)),
    "index_error": (index_error, (2, 0)),
    "unpicklable": (unpicklable, (2, 0)),
    "shared_memory": (shared_memory, (2, 0)),
    "corrupt": (corrupt, (2, 0)),
    "vanishes": (vanishes, (2, 0)),
    "rewritten": (rewritten, (2, 0)),
    "lock": (lock, (2, 0)),
    "openmp": (openmp, (2, 0)),
    "interrupted": (interrupted, (2, 0)),
    "parent_killed": (parent_killed, (2, 0)),
    "parent_killed_worker_stuck": (parent_killed_worker_stuck, (2, 0)),
    "shutdown": (shutdown, (2, 0)),
    "stops_early": (stops_early, (2, 0)),
    "slow_consumer": (slow_consumer, (2, 0)),
    "nested": (nested, (2, 0)),
    "cycles": (cycles, (2, 0)),
}
"""Each fault, and how many workers the script has asked for."""


def main() -> None:
    name, num_workers, events = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    tell = Told(events)
    torch.manual_seed(7)
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background has it ignored
    tell("begun")
    try:
        FAULTS[name][0](tell, num_workers)
    except BaseException as problem:
        tell("raised", kind=type(problem).__name__, message=str(problem)[:2000])
        raise
    finally:
        if engaged.ENGAGED is not None:
            tell("took_effect", **engaged.ENGAGED.evidence())
    tell("finished")


if __name__ == "__main__":
    main()
