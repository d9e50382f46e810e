"""Meta's SPDL: its `DataLoader` of threads, and its look-alike of PyTorch's, which has processes.

A setting is a number of threads, with `p` behind it of processes. Decoding is the script's own: `spdl.io` needs FFmpeg,
whose pixels are not PIL's. The threads take whole batches of indices, so that little is done for each item.
Source: https://facebookresearch.github.io/spdl/latest/getting_started/pytorch.html
"""

from __future__ import annotations

from functools import partial
from typing import Any

from contract import BATCH, Source, main
from script import DATASETS
from spdl.dataloader import DataLoader, get_pytorch_dataloader
from torch.utils.data import BatchSampler, RandomSampler, default_collate


def loader(workload: str, source: Source, setting: str) -> Any:
    dataset = DATASETS[workload](source)
    if setting.endswith("p"):
        return get_pytorch_dataloader(
            dataset, batch_size=BATCH[workload], shuffle=True, num_workers=int(setting.rstrip("p")), in_order=True
        )

    def fetch(indices: list[int]) -> Any:
        return default_collate([dataset[index] for index in indices])

    sampler = BatchSampler(RandomSampler(dataset), BATCH[workload], drop_last=False)
    return DataLoader(sampler, preprocessor=fetch, num_threads=int(setting), output_order="input")


if __name__ == "__main__":
    main("spdl", {workload: partial(loader, workload) for workload in DATASETS})
