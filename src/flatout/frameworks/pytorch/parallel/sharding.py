"""Which models are sharded over ranks, and what does a script do with them beside training calls?

In: the models that training calls. Out: their parameters held by rows from the first call on, evaluated and updated as
whole ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from flatout.frameworks.pytorch.parallel import views  # noqa: F401  what sharded parameters and their views answer
from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.held import Held, HeldByModel
from flatout.frameworks.pytorch.parallel.model_division import ModelDivision
from flatout.frameworks.pytorch.parallel.pattern import Pattern
from flatout.frameworks.pytorch.parallel.portions import REPLICATE
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.parallel.sharded import Sharded
from flatout.frameworks.pytorch.parallel.sharded_updates import ShardedUpdates
from flatout.frameworks.pytorch.seams.calls import OuterCall
from flatout.guest.c_library import c_library, environment_decides, why_not_glibc
from flatout.records.ranks import GROUPED_MODES, MODEL_MODES, SEQUENCE_MODE, Terms, sharing_ranks

M_MMAP_THRESHOLD = -3
"""Source: `mallopt(3)`, Linux manual pages."""

MAPPED_BYTES = 4 << 20
"""Blocks of this size and more are mapped by themselves. Smaller parts of models are gathered with others."""


class Sharding:
    """The models of a process whose parameters are sharded."""

    def __init__(self, group: Group, terms: Terms, refuse: Callable[[NotDivided], Any]) -> None:
        self._group, self._refuse, self._mode = group, refuse, terms.mode
        self._width = group.world
        if terms.mode in GROUPED_MODES:
            self._width = sharing_ranks(group.world, group.me.local_world)
        self._groups: tuple[Group, Group | None] | None = None
        self._meshes: dict[str, Any] = {}
        self._shards: list[tuple[nn.Module, Any]] = []
        self._updates = ShardedUpdates(refuse)

    def holding(self, call: OuterCall) -> Callable[[nn.Module, Collection[int]], Held]:
        """How a module's parameters are to be held, once it is known how its calls are divided.

        Raises:
            NotDivided: They cannot be.
        """
        parameters = list(call.module.parameters())
        kinds = {(p.dtype, p.device.type) for p in parameters if p.dim() and p.is_floating_point()}
        cause = ""
        if any(isinstance(p, Sharded) for p in parameters):
            cause = "it is called in training by itself and within another module"
        elif call.compiled_by_script:
            cause = "the script compiles it (`torch.compile`)"
        elif any(getattr(part, "sparse", None) is True for part in call.module.modules()):
            cause = "it has sparse gradients"
        elif len(kinds) > 1:
            cause = f"its parameters are {', '.join(sorted(f'{kind} on {device}' for kind, device in kinds))}"
        if cause:
            how = "divided" if self._mode in MODEL_MODES else "sharded"
            raise NotDivided(f"`{call.name}` cannot be {how} over ranks", cause=cause, hint=REPLICATE)
        return self._held

    def plan(self, division: ModelDivision, call: OuterCall) -> None:
        """Have a model be divided itself, at its first call.

        Raises:
            NotDivided: It cannot be.
        """
        self.holding(call)  # what it refuses is refused here
        if self._groups is None:
            self._groups = _groups(self._group, self._width)
        division.sharing, division.replicas = self._groups
        division.return_memory = _return_freed
        division.cuts_batches = "pipeline" in self._mode or division.replicas is not None

        def planned(division: ModelDivision, args: Any, kwargs: Any, pattern: Pattern) -> HeldByModel:
            parts: HeldByModel
            if "pipeline" in self._mode:
                from flatout.frameworks.pytorch.parallel import pipeline_planning

                parts = pipeline_planning.planned(division, args, kwargs, pattern, self._refuse)
            else:
                from flatout.frameworks.pytorch.parallel import tensor_planning

                positions = self._mode == SEQUENCE_MODE
                parts = tensor_planning.planned(division, args, kwargs, self._refuse, positions=positions)
            self._shards.append((division.module(), parts))
            return parts

        division.planner = planned

    def _return_memory(self) -> None:
        """Have what is let go of return to the system: gathered parameters come and go in every call.

        The C library keeps blocks of up to 32 MB once it has seen such blocks freed; a model of 100 M parameters on
        four ranks then held 2.0 GB each, where 0.9 GB were in use (`benchmarks/figures.md`).
        """
        if environment_decides() is None and why_not_glibc() is None:
            c_library().mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)

    def _held(self, module: nn.Module, called: Collection[int]) -> Held:
        from flatout.frameworks.pytorch.parallel.mesh import Mesh  # PyTorch's layers take 0.5 s to load
        from flatout.frameworks.pytorch.parallel.shards import Shards

        device = next(p.device for p in module.parameters())
        if device.type not in self._meshes:
            self._return_memory()
            self._meshes[device.type] = Mesh(self._group, device, self._width)
        shards = Shards(module, self._meshes[device.type], self._group, called, self._refuse)
        self._shards.append((module, shards))
        return shards

    def evaluated(self, call: OuterCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a call of which no gradients are taken."""
        shards = next((shards for module, shards in self._shards if module is call.module), None)
        if shards is None:
            return call.plain(*args, **kwargs)
        try:
            return shards.evaluated(call.plain, args, kwargs)
        except NotDivided as problem:
            return self._refuse(problem)

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


def _return_freed() -> None:
    """Have the C library return what is free: it would keep what calls took that were computed both ways.

    Setting a threshold, as for rows, would return activations in every step and fault them in again.
    """
    if environment_decides() is None and why_not_glibc() is None:
        c_library().malloc_trim(0)


def _groups(group: Group, width: int) -> tuple[Group, Group | None]:
    """The ranks that share a model with this one, and those that hold what it holds: one in each such group."""
    if width == group.world:
        return group, None
    row, column = divmod(group.rank, width)
    sharing = group.of_ranks(f"model{row}", list(range(row * width, (row + 1) * width)))
    return sharing, group.of_ranks(f"replicas{column}", list(range(column, group.world, width)))
