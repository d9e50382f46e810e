"""torchdata's nodes, as its guide "Migrating to torchdata.nodes" puts them together.

A setting is a number of threads, with `p` behind it of processes.
Source: https://docs.pytorch.org/data/0.11/migrate_to_nodes_from_utils.html
"""

from __future__ import annotations

from functools import partial
from typing import Any

from contract import BATCH, Source, main
from script import DATASETS
from torch.utils.data import BatchSampler, RandomSampler, default_collate
from torchdata.nodes import Loader, ParallelMapper, Prefetcher, SamplerWrapper


class MapAndCollate:
    """What a worker does with the indices of a batch."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __call__(self, indices: list[int]) -> Any:
        return default_collate([self.dataset[index] for index in indices])


def loader(workload: str, source: Source, setting: str) -> Any:
    dataset = DATASETS[workload](source)
    num_workers, method = int(setting.rstrip("p")), "process" if setting.endswith("p") else "thread"
    node = SamplerWrapper(BatchSampler(RandomSampler(dataset), BATCH[workload], drop_last=False))
    node = ParallelMapper(node, map_fn=MapAndCollate(dataset), num_workers=num_workers, in_order=True, method=method)
    return Loader(Prefetcher(node, prefetch_factor=2 * num_workers))


if __name__ == "__main__":
    main("torchdata", {workload: partial(loader, workload) for workload in DATASETS})
