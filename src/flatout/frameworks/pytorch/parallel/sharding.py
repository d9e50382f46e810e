"""Which models are sharded over ranks, and what does a script do with them beside training calls?

In: the models that training calls. Out: their parameters held by rows from the first call on, evaluated and updated as
whole ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from flatout.frameworks.pytorch.calls import OuterCall
from flatout.frameworks.pytorch.parallel import answers  # noqa: F401  what sharded parameters answer
from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.held import Held
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.parallel.sharded import REPLICATE, Sharded
from flatout.frameworks.pytorch.parallel.sharded_updates import ShardedUpdates
from flatout.ranks import Terms


class Sharding:
    """The models of a process whose parameters are sharded."""

    def __init__(self, group: Group, terms: Terms, refuse: Callable[[NotDivided], Any]) -> None:
        self._group, self._refuse = group, refuse
        self._width = group.world
        if terms.mode == "hybrid":
            self._width = sharing_ranks(group.world, group.me.local_world)
        self._meshes: dict[str, Any] = {}
        self._shards: list[tuple[nn.Module, Any]] = []
        self._updates = ShardedUpdates(refuse)

    def holding(self, call: OuterCall) -> Callable[[nn.Module, Collection[int]], Held]:
        """How a module's parameters are to be held, once it is known how its calls are divided.

        Raises:
            NotDivided: They cannot be sharded.
        """
        parameters = list(call.module.parameters())
        if any(isinstance(p, Sharded) for p in parameters):
            raise NotDivided(
                f"`{call.name}` cannot be sharded", cause="it is called in training by itself and within another module",
                hint=REPLICATE,
            )  # fmt: skip
        if call.compiled_by_script:
            raise NotDivided(
                f"`{call.name}` cannot be sharded", cause="the script compiles it (`torch.compile`)", hint=REPLICATE
            )
        kinds = {(p.dtype, p.device.type) for p in parameters if p.dim() and p.is_floating_point()}
        if len(kinds) > 1:
            told = ", ".join(sorted(f"{kind} on {device}" for kind, device in kinds))
            raise NotDivided(f"`{call.name}` cannot be sharded", cause=f"its parameters are {told}", hint=REPLICATE)
        return self._held

    def _held(self, module: nn.Module, called: Collection[int]) -> Held:
        from flatout.frameworks.pytorch.parallel.mesh import Mesh  # PyTorch's layers take 0.5 s to load
        from flatout.frameworks.pytorch.parallel.shards import Shards

        device = next(p.device for p in module.parameters())
        if device.type not in self._meshes:
            self._meshes[device.type] = Mesh(self._group, device, self._width)
        shards = Shards(module, self._meshes[device.type], self._group, called, self._refuse)
        self._shards.append((module, shards))
        return shards

    def evaluated(self, call: OuterCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a call of which no gradients are taken."""
        shards = next((shards for module, shards in self._shards if module is call.module), None)
        if shards is None:
            return call.plain(*args, **kwargs)
        with shards.evaluating():
            return call.plain(*args, **kwargs)

    @contextmanager
    def of_part(self, module: nn.Module) -> Iterator[None]:
        """Around the call of a module: where it is a part of a sharded one, all of that is gathered."""
        with ExitStack() as stack:
            inner = None
            for root, shards in self._shards:
                if root is module:
                    continue
                if inner is None:
                    inner = {id(one) for one in module.modules()}
                if id(root) not in inner and any(one is module for one in root.modules()):
                    stack.enter_context(shards.at_once())
            yield

    def close(self) -> None:
        """Nothing is exchanged any more."""
        if self._meshes:
            from flatout.frameworks.pytorch.parallel import mesh

            mesh.forget()
        self._meshes.clear()


def sharing_ranks(world: int, local_world: int) -> int:
    """How many ranks share a parameter where copies of it are kept: those of a machine; on one machine half of them.

    >>> sharing_ranks(8, 4), sharing_ranks(4, 4), sharing_ranks(2, 2)
    (4, 2, 1)
    """
    if local_world < world:
        return local_world
    return next(width for width in range(world // 2, 0, -1) if world % width == 0)
