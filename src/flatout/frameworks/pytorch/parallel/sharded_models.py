"""Which models are sharded over ranks, and what does a script do with them beside training calls?

Optimizers that compute element by element update the part that is here, as if it were all; state is sharded as
parameters are. PyTorch's others compute on what is whole to Python, and gather it; those of others are refused. In: the
models that training calls, optimizers. Out: parameters held in parts from the first call on, evaluated and updated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatout.frameworks.pytorch.parallel import torch_function  # noqa: F401  what sharded parameters and their views answer
from flatout.frameworks.pytorch.parallel.division import ModelDivision
from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.protocol import ParameterHolder, Pattern
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.parallel.sharded_tensor import REPLICATE, Sharded, become
from flatout.frameworks.pytorch.seams.outer_call import OuterCall
from flatout.frameworks.pytorch.seams.patches import Patch
from flatout.guest.c_library import c_library, environment_decides, why_not_glibc
from flatout.records.ranks import GROUPED_MODES, MODEL_MODES, RankConfig, sharing_ranks

ELEMENTWISE = (
    "SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "ASGD",
)  # fmt: skip
"""Optimizers whose update of an element needs that element alone. Source: `torch.optim`."""

Optimizer = torch.optim.Optimizer


def update_rows(refuse: Callable[[NotDivided], Any]) -> None:
    """Have optimizers update rows; `refuse` is told of those that cannot, and ends the run."""
    for kind in (getattr(torch.optim, name) for name in ELEMENTWISE):
        if "step" in vars(kind):
            Patch(kind, "step", _by_rows)
    if hasattr(clip_grad, "_get_total_norm"):
        Patch(clip_grad, "_get_total_norm", _of_all_at_once)

    def check(optimizer: Optimizer, *_: Any) -> None:
        step = next(kind for kind in type(optimizer).__mro__ if "step" in vars(kind))
        if not step.__module__.startswith("torch.optim") and _sharded(optimizer):
            problem = NotDivided(
                f"`{type(optimizer).__name__}` cannot update parameters that are sharded",
                cause=f"its step is not PyTorch's (`{step.__module__}`): it may need all of a parameter's memory, "
                "and a rank holds some rows",
                hint=REPLICATE,
            )
            refuse(problem)

    register_optimizer_step_pre_hook(check)


def _by_rows(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    del patch

    @functools.wraps(original)
    def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        parameters = _sharded(optimizer)
        if not parameters:
            return original(optimizer, closure) if closure is not None else original(optimizer)

        def with_wholes() -> Any:
            """The script's own closure, for which parameters are whole."""
            assert closure is not None
            with _being(parameters, Sharded), torch._C._EnableTorchFunction(), torch.enable_grad():
                return closure()

        _share_state(optimizer, parameters)
        # PyTorch's kernels for many tensors want plain ones
        with _being(parameters, nn.Parameter), torch._C.DisableTorchFunctionSubclass():
            found = original(optimizer, with_wholes) if closure is not None else original(optimizer)
        _share_state(optimizer, parameters)
        return found

    return step


def _share_state(optimizer: Optimizer, parameters: list[Sharded]) -> None:
    """State is sharded as parameters are: what is whole is cut, what was made for rows stands for the whole."""
    for parameter in parameters:
        cut, state = parameter.placement, optimizer.state.get(parameter, {})
        for name, value in state.items():
            if not isinstance(value, torch.Tensor) or isinstance(value, Sharded) or not value.dim():
                continue
            if value.shape == cut.part_shape:
                become(value, cut)
            elif value.shape == cut.shape:
                state[name] = become(cut.mine(value).clone(), cut)


def _sharded(optimizer: Optimizer) -> list[Sharded]:
    return [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, Sharded)]


@contextmanager
def _being(parameters: list[Sharded], kind: type) -> Iterator[None]:
    """Within, parameters are of a type to whoever looks."""
    kinds = [type(parameter) for parameter in parameters]
    for parameter in parameters:
        parameter.__class__ = kind
    try:
        yield
    finally:
        for parameter, former in zip(parameters, kinds, strict=True):
            parameter.__class__ = former


def _of_all_at_once(original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
    """The norm of all gradients by one exchange, where PyTorch takes each by itself: the norm of norms is the same."""
    del patch

    @functools.wraps(original)
    def total_norm(tensors: Any, norm_type: float = 2.0, *rest: Any, **words: Any) -> Any:
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if any(isinstance(one, Sharded) for one in tensors):
            tensors = torch._foreach_norm(tensors, float(norm_type))
        return original(tensors, norm_type, *rest, **words)

    return total_norm


M_MMAP_THRESHOLD = -3
"""Source: `mallopt(3)`, Linux manual pages."""

MAPPED_BYTES = 4 << 20
"""Blocks of this size and more are mapped by themselves, so that gathered parameters, which come and go in every call,
return to the system: the C library keeps blocks of up to 32 MB once it has seen such blocks freed; a model of 100 M
parameters on four ranks then held 2.0 GB each, where 0.9 GB were in use (`benchmarks/figures.md`)."""


class Sharding:
    """The models of a process whose parameters are sharded."""

    def __init__(self, group: Group, terms: RankConfig, refuse: Callable[[NotDivided], Any]) -> None:
        self._group, self._refuse, self._mode = group, refuse, terms.mode
        self._meshes: dict[str, Any] = {}
        self._shards: list[tuple[nn.Module, Any]] = []
        update_rows(refuse)

    @functools.cached_property
    def _groups(self) -> tuple[Group, Group | None]:
        """The ranks that share a model with this one, and those that hold what it holds: one in each such group.

        Made when they are needed first: they take over who observes the exchanges of all.
        """
        group, world = self._group, self._group.world
        width = sharing_ranks(world, group.me.local_world) if self._mode in GROUPED_MODES else world
        if width == world:
            return group, None
        row, column = divmod(group.rank, width)
        sharing = group.of_ranks(f"model{row}", list(range(row * width, (row + 1) * width)))
        return sharing, group.of_ranks(f"replicas{column}", list(range(column, world, width)))

    def holding(self, call: OuterCall) -> Callable[[nn.Module, Collection[int]], ParameterHolder]:
        """How a module's parameters are to be held, once it is known how its calls are divided; or `NotDivided`."""
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
        """Have a model be divided itself, at its first call; or `NotDivided`."""
        self.holding(call)  # what it refuses is refused here
        division.sharing, division.replicas = self._groups
        if environment_decides() is None and why_not_glibc() is None:
            # the C library would keep what calls took that were computed both ways; a threshold, as for rows, would
            # return activations in every step and fault them in again
            division.return_memory = lambda: c_library().malloc_trim(0)
        division.cuts_batches = "pipeline" in self._mode or division.replicas is not None

        def planned(division: ModelDivision, args: Any, kwargs: Any, pattern: Pattern) -> ParameterHolder:
            parts: ParameterHolder
            if "pipeline" in self._mode:
                from flatout.frameworks.pytorch.parallel import pipeline_planning

                parts = pipeline_planning.planned(division, args, kwargs, pattern, self._refuse)
            else:
                from flatout.frameworks.pytorch.parallel import tensor

                parts = tensor.planned(division, args, kwargs, self._refuse)
            self._shards.append((division.module(), parts))
            return parts

        division.planner = planned

    def _held(self, module: nn.Module, called: Collection[int]) -> ParameterHolder:
        from flatout.frameworks.pytorch.parallel.fully_sharded import Mesh  # PyTorch's layers take 0.5 s to load
        from flatout.frameworks.pytorch.parallel.sharded_parameters import Shards

        device = next(p.device for p in module.parameters())
        if device.type not in self._meshes:
            if environment_decides() is None and why_not_glibc() is None:
                c_library().mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)
            self._meshes[device.type] = Mesh(self._group, device, *self._groups)
        shards = Shards(module, self._meshes[device.type], self._group, called, self._refuse)
        self._shards.append((module, shards))
        return shards

    def evaluated(self, call: OuterCall, args: Any, kwargs: Any) -> Any:
        """Compute a call of which no gradients are taken."""
        shards = next((shards for module, shards in self._shards if module is call.module), None)
        if shards is None:
            return call.plain(*args, **kwargs)
        try:
            return shards.evaluated(call.plain, args, kwargs)
        except NotDivided as problem:
            return self._refuse(problem)

    def close(self) -> None:
        """Nothing is exchanged any more."""
        if self._meshes:
            from flatout.frameworks.pytorch.parallel.fully_sharded import forget

            forget()
        self._meshes.clear()
