"""Which loaders are fetched with their pixel work on threads, and what is known about each?

In: loaders and their iterators. Out: fetchers in them, or why not.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset, default_collate
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _SingleProcessDataLoaderIter

from flatout.frameworks.pytorch.input.harmless.resolving import Refused
from flatout.frameworks.pytorch.input.harmless.walking import Harmless, look_at
from flatout.frameworks.pytorch.input.items.fused import FusedFetch, FusedFetcher
from flatout.frameworks.pytorch.input.items.shadow import Shadow
from flatout.frameworks.pytorch.input.items.suited import why_unsuited
from flatout.frameworks.pytorch.input.of_loader import known
from flatout.frameworks.pytorch.input.pixels.decoded import DecodedImages
from flatout.frameworks.pytorch.input.worker_settings import KEPT_WORKERS
from flatout.frameworks.pytorch.seams.random_states import RandomStates
from flatout.guest.interruptions import let_through
from flatout.machine.control_groups import cores_quota

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.input.pixels.fetching import Engine, PixelFetcher

MOST_FAILURES = 8
"""Batches that had to be fetched again, after which it is no longer tried, unless four times as many had not."""

MOST_THREADS = 32
"""Beyond these the script's own code, which runs in one thread, takes longer than all of its pixel work."""

MOST_IDLE_ITEMS = 200
"""Items one after another of which none has left any pixel work."""

ABOUT_PROCESSES = re.compile(
    r"(torch[.])?(multiprocessing|threading|os)([.]|$)|torch[.](random$|utils[.]data[.]_utils[.])"
)
"""Modules whose functions tell something else in a worker."""

MOST_LOOKS = 200
"""How often a dataset whose code or attributes have changed is looked at again."""


class PixelThreads:
    """All loaders of a process whose pixel work can be done by threads."""

    def __init__(self, fused: FusedFetch) -> None:
        self.num_batches = 0
        """Fetched so since it was engaged."""
        self.decoded = DecodedImages()
        self._wanted_by: set[str] = set()
        self._fused = fused
        self._engine: Engine | None = None

    @property
    def engaged(self) -> bool:
        """Whether pixel work is done by threads at present."""
        return bool(self._wanted_by)

    def engage(self, on: bool, *, wanted_by: str = "pixel_threads") -> None:
        """From the next fetch on, or no longer, unless another lever that builds on it wants it."""
        self._wanted_by = self._wanted_by | {wanted_by} if on else self._wanted_by - {wanted_by}
        self.num_batches = 0

    def attach(self, loader: DataLoader[Any], iterator: Any) -> None:
        """Put a fetcher of ours into an iterator that fetches in this process."""
        if type(iterator) is not _SingleProcessDataLoaderIter or not self.engaged:
            return
        fetcher = iterator._dataset_fetcher
        if type(fetcher) in (_MapDatasetFetcher, FusedFetcher) and self.why_not(loader) is None:
            iterator._dataset_fetcher = self.fetcher(loader, fetcher)

    def fetcher(self, loader: DataLoader[Any], original: Any, *, in_process: bool = False) -> PixelFetcher:
        """A fetcher of ours for a loader, of which `why_not` says None; what it cannot do, `original` does."""
        from flatout.frameworks.pytorch.input.pixels.fetching import Engine, PixelFetcher

        if self._engine is None:
            self._engine = Engine(min(max(_num_cores() - 1, 1), MOST_THREADS), self.decoded)
        return PixelFetcher(self, self._engine, original, self.standing(loader), in_process=in_process)

    def fetches(self, iterator: Any) -> bool:
        """Whether an iterator asks a fetcher of ours."""
        from flatout.frameworks.pytorch.input.pixels.fetching import PixelFetcher

        return type(iterator._dataset_fetcher) is PixelFetcher

    def why_not(self, loader: DataLoader[Any], *, for_workers: bool = False) -> str | None:
        """Why the pixel work of a loader is not done by threads, in a few words; None where it can be.

        `for_workers`: whether it is to be done in place of workers.
        """
        try:
            why = _unsuited(loader, for_workers=for_workers)
        except Exception as problem:  # noqa: BLE001  a loader or dataset of any kind may be asked
            let_through(problem)
            return f"{type(problem).__name__} when it was looked at"
        if why is None and self._fused.why_not(loader, for_workers=for_workers) is None:
            why = "its batches can be computed at once"
        if why is None:
            standing = self.standing(loader)
            standing.holds()
            why = standing.why_not or (standing.why_not_for_workers if for_workers else None)
        return why

    def standing(self, loader: DataLoader[Any]) -> Standing:
        """What is known about a loader's dataset."""
        dataset = loader.dataset
        return known(loader, self, lambda found: found.dataset is dataset, lambda: Standing(dataset))


class Standing:
    """What is known about the dataset of one loader."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.why_not: str | None = None
        self.shadow = Shadow()
        self.harmless: Harmless | None = None
        self._num_looks = 0
        self._num_idle_items = 0
        self._num_failures = 0
        self._num_fetched = 0

    @property
    def why_not_for_workers(self) -> str | None:
        """Why its items may not be what they are in a worker; None where they are."""
        modules = self.harmless.guards.modules() if self.harmless is not None else set()
        return "its items ask in which process they are" if any(map(ABOUT_PROCESSES.match, modules)) else None

    def holds(self) -> bool:
        """Whether its code is known to do no harm when it is run once more; looked at again where it has changed."""
        if self.why_not is None and (self.harmless is None or not self.harmless.guards.hold()):
            self._look()
        return self.why_not is None

    def _look(self) -> None:
        self._num_looks += 1
        if self._num_looks > MOST_LOOKS:
            self.set_aside("its code or what it refers to changes all the time")
            return
        try:
            self.harmless = look_at(self.dataset)
        except Refused as problem:
            self.set_aside(str(problem))
        except Exception as problem:  # noqa: BLE001  code of any kind may be looked at
            let_through(problem)
            self.set_aside(f"{type(problem).__name__} while its code was looked at")

    def failed(self, problem: BaseException) -> None:
        """A batch had to be fetched again."""
        self._num_failures += 1
        if self._num_failures >= max(MOST_FAILURES, self._num_fetched / 4):
            why = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
            self.set_aside(f"{self._num_failures} batches had to be fetched again: {why}")

    def succeeded(self) -> None:
        """A batch was fetched."""
        self._num_fetched += 1

    def compared(self, after: RandomStates | None, own_after: RandomStates | None, why: str | None) -> None:
        """A batch was computed both ways; the random states after ours and after the script's own, and what differs."""
        if after is None or own_after is None or not after.equals(own_after):
            self.set_aside("its batches draw other random numbers")
        elif why is not None:
            self.set_aside(f"its batches differ: {why}")

    def noted(self, num_pictures: int, num_items: int) -> None:
        """The code of so many items has run, and asked for so many pictures."""
        self._num_idle_items = 0 if num_pictures else self._num_idle_items + num_items
        if self._num_idle_items >= MOST_IDLE_ITEMS:
            self.set_aside("no image is opened in a way that is known")

    def set_aside(self, why: str) -> None:
        """Never again."""
        self.why_not = why


def _num_cores() -> int:
    """Cores that this process may really use: its affinity, and in a container the quota of its control group."""
    num = os.cpu_count() or 1
    with contextlib.suppress(OSError, AttributeError):  # there is none, or none may be asked for
        num = len(os.sched_getaffinity(0))
    quota = cores_quota()
    return min(num, max(int(quota), 1)) if quota else num


def _unsuited(loader: DataLoader[Any], *, for_workers: bool) -> str | None:
    """Why a loader does not come into question, whatever its dataset computes."""
    if for_workers and loader.persistent_workers:
        return KEPT_WORKERS
    if for_workers and loader.collate_fn is not default_collate:
        return "its workers put the batches together by a function of the script's"
    if isinstance(loader.dataset, IterableDataset) or not loader._auto_collation:
        return "the script puts its batches together itself"
    if "PIL.Image" not in sys.modules:
        return "PIL is not used"
    if not isinstance(vars(sys.modules["PIL.Image"].Image).get("im"), property):
        return "Pillow is older than version 11"
    return why_unsuited(loader, for_workers=for_workers)
