"""torchvision's datasets with pictures of ours, and whether their batches under a lever are those of plain.

In: transforms. Out: datasets; why a lever leaves them alone.
"""

import numpy as np
import torch
from torch.utils.data import DataLoader

from flatout.frameworks.pytorch.input.items.shadow import difference
from flatout.frameworks.pytorch.input.loaders import Loaders
from flatout.frameworks.pytorch.seams.random_states import RandomStates
from vision import torchvision

torchvision = torchvision()
Compose = torchvision.transforms.Compose

COLOURS = np.random.default_rng(1).integers(0, 256, (60, 32, 32, 3), dtype=np.uint8)
GREY = torch.from_numpy(np.random.default_rng(2).integers(0, 256, (60, 28, 28), dtype=np.uint8))


def cifar(*transforms, chain=Compose):
    """CIFAR-10 with images of ours."""
    dataset = torchvision.datasets.CIFAR10.__new__(torchvision.datasets.CIFAR10)
    dataset.data, dataset.targets = COLOURS, [i % 10 for i in range(60)]
    dataset.transform, dataset.target_transform = chain([*transforms]), None
    return dataset


def mnist(*transforms, chain=Compose):
    """MNIST with images of ours."""
    dataset = torchvision.datasets.MNIST.__new__(torchvision.datasets.MNIST)
    dataset.data, dataset.targets = GREY, torch.arange(60) % 10
    dataset.transform, dataset.target_transform = chain([*transforms]), None
    return dataset


def check(make, num=3, between=lambda dataset, number: None, keep=False, **options):
    """Passes under the lever are those of plain, random streams included; why it is not used, else None."""
    options = {"batch_size": 7, "shuffle": True, **options}
    found = []
    for on in (False, True):
        dataset, owner = make(), Loaders()
        if on:
            owner.install()
            owner.parts.fused.engage(True)
            owner.parts.stored.engage(keep)
        try:
            torch.manual_seed(0)
            loader, batches, states = DataLoader(dataset, **options), [], []
            for number in range(num):
                between(dataset, number)
                batches.append(list(loader))
                states.append(RandomStates())
            found.append((batches, states))
            why = owner.parts.fused.why_not(loader)
        finally:
            owner.remove()
    assert difference(found[1][0], found[0][0]) is None
    assert all(a.equals(b) for a, b in zip(found[0][1], found[1][1], strict=True))
    assert why is not None or keep or owner.parts.fused.num_batches > 0
    return why
