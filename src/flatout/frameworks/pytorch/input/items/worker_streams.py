"""Where does the random stream of each of the script's workers stand, when there are no workers?

A worker seeds Python's, PyTorch's and NumPy's generators from the pass's seed and its own number, and draws from them
as long as it lives. In: that seed. Out: a context for each worker in which its numbers are drawn.
"""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator

import torch
from torch.utils.data import _utils
from torch.utils.data._utils import worker as _worker

from flatout.frameworks.pytorch.seams.random_states import RandomStates


class WorkerStreams:
    """The random streams of so many workers, which begin here."""

    def __init__(self, base_seed: int, num_workers: int) -> None:
        with aside():
            self._states = [_of_new_worker(base_seed, number) for number in range(num_workers)]

    @contextlib.contextmanager
    def of(self, number: int) -> Iterator[None]:
        """Inside, numbers are drawn from the stream of this worker, which then stands where they end.

        Where an error leaves it, the stream stays where it stood.
        """
        with aside():
            self._states[number].restore()
            yield
            self._states[number] = RandomStates()

    def put_back(self, number: int, states: RandomStates) -> None:
        """What was drawn since then counts as not drawn."""
        self._states[number] = states


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """Whatever is drawn inside, the random streams of this process stay where they are."""
    own = RandomStates()
    try:
        yield
    finally:
        own.restore()


def _of_new_worker(base_seed: int, number: int) -> RandomStates:
    """Seeded as `torch.utils.data._utils.worker._worker_loop` does it."""
    random.seed(base_seed + number)
    torch.default_generator.manual_seed(base_seed + number)
    numpy = sys.modules.get("numpy")
    if numpy is not None and _utils.HAS_NUMPY:
        numpy.random.seed(_worker._generate_state(base_seed, number))  # type: ignore[no-untyped-call]
    return RandomStates()
