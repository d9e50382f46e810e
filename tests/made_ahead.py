"""A loop over a loader, as the script has it or with batches made ahead, and what it saw."""

import random

import numpy as np
import torch

from flatout.frameworks.pytorch.input.loaders import Loaders
from flatout.frameworks.pytorch.seams.trees import digest


def dropout(step):
    torch.empty(1000).bernoulli_(0.5)


def three(step):
    random.random(), np.random.rand(3), torch.rand(7)


def sometimes(step):
    if step % 5 == 4:
        torch.rand(3)


def more(step):
    torch.rand(step + 1)


def reseeds(step):
    torch.manual_seed(step)


def nothing(step):
    pass


def seen(loader, training=nothing, epochs=3, num=0, stop=None):
    """Digests of all batches, what was raised, and where the generators stand; `num` processes, or plainly."""
    owner = Loaders()
    problems = []
    owner.on_failure = lambda stage, problem: problems.append(str(problem))
    torch.manual_seed(1), np.random.seed(2), random.seed(3)
    owner.install()
    if num:
        owner.change({"ahead": num})
    found, step = [], 0
    try:
        for _ in range(epochs):
            try:
                for position, batch in enumerate(loader):
                    found.append(digest(batch))
                    training(step)
                    owner.num_steps += 1
                    step += 1
                    if stop is not None and position == stop:
                        break
            except KeyError as problem:
                found.append(repr(problem))
        found += [torch.rand(1).item(), np.random.rand(), random.random()]
        return found, owner.num_ahead, [*problems, *owner.remarks()]
    finally:
        owner.remove()
