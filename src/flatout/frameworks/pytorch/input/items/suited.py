"""Can another way of fetching take the place of a loader's own, as far as the loader's arguments tell?

In: a loader. Out: why not, in a few words.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, Subset

from flatout.frameworks.pytorch.input.hand_over import start_method
from flatout.frameworks.pytorch.input.items.hugging_face import is_table


def why_unsuited(loader: DataLoader[Any], *, for_workers: bool, tables: bool = False) -> str | None:
    """Why not; None where it can.

    Args:
        loader: Of any kind.
        for_workers: It takes the place of workers, not of fetching in the script's own process.
        tables: It knows how tables of Hugging Face's `datasets` give several items at once.
    """
    if for_workers != bool(loader.num_workers):
        return "the script has no workers" if for_workers else "the script's workers fetch"
    if for_workers and (loader.worker_init_fn is not None or not getattr(loader, "in_order", True)):
        return "the workers begin with a function of the script's, or give batches out of order"
    if for_workers and loader.timeout > 0:
        return "the script says how long a worker may take"
    if for_workers and start_method(loader) != "fork":
        return "the workers are not forked, and have other values than this process"
    dataset = loader.dataset
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if getattr(dataset, "__getitems__", None) and not (tables and is_table(dataset)):
        return "the dataset gives several items at once"
    return None
