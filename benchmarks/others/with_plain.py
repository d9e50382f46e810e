"""PyTorch's own `DataLoader`; a setting is a number of workers."""

from __future__ import annotations

from functools import partial
from typing import Any

from contract import BATCH, Source, main
from script import DATASETS
from torch.utils.data import DataLoader


def loader(workload: str, source: Source, setting: str) -> DataLoader[Any]:
    dataset = DATASETS[workload](source)
    return DataLoader(dataset, batch_size=BATCH[workload], shuffle=True, num_workers=int(setting))


MAKERS = {workload: partial(loader, workload) for workload in DATASETS}

if __name__ == "__main__":
    main("plain", MAKERS)
