"""Google's Grain: `MapDataset`, shuffled, batched, read by threads; PyTorch's datasets are random access sources to it.

A setting is a number of threads; none is what Grain advises for data in memory.
Source: https://google-grain.readthedocs.io/en/latest/tutorials/dataset_basic_tutorial.html
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import grain
from contract import BATCH, Source, main
from script import DATASETS
from torch.utils.data import default_collate


class Loader:
    """A pass after another of a dataset that is shuffled anew for each."""

    def __init__(self, dataset: Any, batch: int, num_threads: int) -> None:
        self.dataset = grain.MapDataset.source(dataset).seed(0)
        self.batch = batch
        self.options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=2 * batch)
        self.num_passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.num_passes += 1
        shuffled = self.dataset.shuffle(seed=self.num_passes).to_iter_dataset(self.options)
        return iter(shuffled.batch(self.batch, drop_remainder=False, batch_fn=default_collate))


def loader(workload: str, source: Source, setting: str) -> Loader:
    return Loader(DATASETS[workload](source), BATCH[workload], int(setting))


if __name__ == "__main__":
    main("grain", {workload: partial(loader, workload) for workload in DATASETS})
