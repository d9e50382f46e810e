"""Which attributes of a loader say how its workers run, and what may stand in their place?

In: a loader's own attributes, and settings. Out: attributes that go together.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterDataPipe, MapDataPipe

WORKER_ATTRIBUTES = (
    "num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "timeout", "worker_init_fn"
)  # fmt: skip

IN_PROCESS = "in_process"
"""The setting that has the batches of the script's workers computed in this process; no attribute of a loader."""

AHEAD = "ahead"
"""The setting that has processes make batches ahead; no attribute of a loader either."""

KEPT_WORKERS = "its workers are kept between passes, and their random streams with them"
"""Why nothing that draws can be put in the place of such workers."""


def start_method(loader: DataLoader[Any] | None = None) -> str:
    """How worker processes are started, those of a loader or any others.

    get_context() would fix it, and the script may still want to set it.
    """
    if loader is not None and loader.multiprocessing_context is not None:
        return str(loader.multiprocessing_context.get_start_method())
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def keeps_workers(loader: DataLoader[Any]) -> bool:
    """Whether the script has workers that stay from one pass to the next."""
    return bool(loader.persistent_workers and loader.num_workers)


def is_pipe(loader: DataLoader[Any]) -> bool:
    """Whether its dataset is a pipe, for which PyTorch draws a seed in each pass, workers kept or not: left to it."""
    return isinstance(loader.dataset, IterDataPipe | MapDataPipe)


def usable(settings: Mapping[str, Any], loader: Any) -> dict[str, Any]:
    """The settings without those that a loader cannot have.

    Page-locked memory where the script does not use CUDA by now: PyTorch would warn of it where there is no device, and
    begin CUDA for it where there is one.
    """
    found = {name: value for name, value in settings.items() if name != AHEAD}
    if not torch.cuda.is_initialized():
        found.pop("pin_memory", None)
    return found


def needs_workers(loader: Any) -> bool:
    """Whether something of a loader means its workers: a function that begins them, or how long one waits for them."""
    return bool(loader.num_workers) and (loader.worker_init_fn is not None or loader.timeout > 0)


def wanted(former: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The script's own worker attributes with `settings` in their place, as far as they go together."""
    wanted = {**former, **{name: value for name, value in settings.items() if name != IN_PROCESS}}
    if former["num_workers"] and not wanted["num_workers"]:  # drawing as its workers would
        return {**former, "pin_memory": wanted["pin_memory"]}
    return wanted
