"""Which parts of a model are gathered, computed and let go one after the other?

Repeated blocks, as an expert chooses them; of what is left, parts that are neither the greater share of the model nor
too small for an exchange of their own. In: a model and which of its modules are called. Out: modules, disjoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn

from flatout.frameworks.pytorch.seams.blocks import repeated_blocks

MOST_SHARE = 0.25
"""Share of the parameters up to which a part that is not repeated is gathered as a whole."""

FEWEST_BYTES = 1 << 20
"""Smaller parts are gathered with what is around them. Source: the first bucket of DistributedDataParallel."""


def units(module: nn.Module, called: Collection[int]) -> list[nn.Module]:
    """The parts of a module that are gathered by themselves; the rest goes with the module.

    Args:
        module: The model.
        called: Identities of the modules that are called in one of its calls; others are read from outside.
    """
    blocks = [block for group in repeated_blocks(module) for block in group]
    found = [block for block in blocks if id(block) in called]
    found += _others(module, {id(inner) for block in found for inner in block.modules()}, num_bytes(module), called)
    return [one for one in found if one is not module and not _shares(one, module)]


def _others(module: nn.Module, taken: Collection[int], whole: int, called: Collection[int]) -> Iterator[nn.Module]:
    for child in module.children():
        inner = [one for one in child.modules() if id(one) in taken]
        size = num_bytes(child)
        if id(child) in taken or size < FEWEST_BYTES:
            continue
        if not inner and size <= MOST_SHARE * whole and id(child) in called:
            yield child
        else:
            yield from _others(child, taken, whole, called)


def num_bytes(module: nn.Module) -> int:
    """Memory of a module's parameters."""
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _shares(part: nn.Module, module: nn.Module) -> bool:
    """Whether a parameter of the part is used elsewhere, too."""
    own = {id(one) for one in part.modules()}
    mine = {id(p) for p in part.parameters()}
    return any(
        id(p) in mine
        for other in module.modules() if id(other) not in own for p in other._parameters.values() if p is not None
    )  # fmt: skip
