"""Do all ranks hold the same? Parameters, buffers, random numbers, the batch itself.

Before the first divided call rank 0's values are taken where others differ; a batch that differs cannot be mended. In:
a module and the inputs of a call. Out: the same on every rank, or what differs.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from flatout.frameworks.pytorch.parallel.group import Group


def digest(tensors: Iterable[torch.Tensor]) -> bytes:
    """A fingerprint of values, types and shapes."""
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_meta:
            continue
        values = tensor.detach().contiguous().cpu().view(-1)
        found.update(f"{values.dtype}{tuple(tensor.shape)}".encode())
        found.update(values.resolve_conj().resolve_neg().view(torch.uint8).numpy().tobytes())
    return found.digest()


def state_of(module: nn.Module) -> list[torch.Tensor]:
    """Parameters and buffers, each once."""
    return list({id(t): t for t in (*module.parameters(), *module.buffers())}.values())


def generators() -> dict[str, Any]:
    """Where the generators stand that a script draws from."""
    numpy = sys.modules.get("numpy")
    return {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "cuda": torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_initialized() else b"",
        "python": random.getstate(),
        "numpy": None if numpy is None else _plain(numpy.random.get_state()),
    }


def _plain(state: Any) -> tuple[Any, ...]:
    return (state[0], state[1].tobytes(), *state[2:])


def set_generators(states: dict[str, Any]) -> None:
    """Put them where another rank's stand."""
    torch.set_rng_state(torch.frombuffer(bytearray(states["torch"]), dtype=torch.uint8))
    if states["cuda"] and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(torch.frombuffer(bytearray(states["cuda"]), dtype=torch.uint8))
    random.setstate(states["python"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and states["numpy"] is not None:
        name, keys, *rest = states["numpy"]
        numpy.random.set_state((name, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))


def make_equal(module: nn.Module, group: Group) -> list[str]:
    """Give every rank rank 0's state where it has another one; what that was, in words."""
    state = state_of(module)
    found = group.objects((digest(state), [tuple(t.shape) for t in state]), "comparison of states")
    told = []
    if any(shapes != found[0][1] for _, shapes in found):
        return ["the model has other parameters"]
    if any(values != found[0][0] for values, _ in found):
        with torch.no_grad():
            for tensor in state:
                group.broadcast(tensor.data, "state of rank 0")
        told.append("parameters")
    states = group.objects(generators(), "comparison of random numbers")
    if any(one != states[0] for one in states):
        set_generators(states[0])
        told.append("random numbers")
    return told


def same_batch(tensors: Sequence[torch.Tensor], group: Group) -> bool:
    """Whether all ranks call the model with the same inputs."""
    found = group.objects(digest(tensors), "comparison of batches")
    return all(one == found[0] for one in found)
