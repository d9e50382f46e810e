"""float8: let torchao multiply the model's Linear layers in float8 on the GPU.

`torchao.float8.convert_to_float8_training` makes the layers, which have the very parameters of the script's. They
stand in for the script's in the model's training calls and the backward through them only: an evaluation, a checkpoint
file, a copy and whatever looks at the model find the script's own layers. Only plain `nn.Linear` without hooks, with
dimensions divisible by 16, of models that are trained, are replaced. It gains most with `compile`, which fuses the
scaling.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import operator
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.frameworks.lever import Lever
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from torch import nn

    from flatout.frameworks.pytorch.seams.calls import Around, Compute
    from flatout.frameworks.pytorch.seams.regions import Region
    from flatout.frameworks.pytorch.session import Session

    Swap = tuple[nn.Module, str, tuple[nn.Module, nn.Module]]

FIRST_CAPABILITY = 8.9
"""Ada, the first NVIDIA generation with float8 products. Source: NVIDIA Ada GPU architecture white paper (2022)."""

ALIGNED = 16
"""What dimensions must be divisible by. Source: PyTorch, `torch._scaled_mm`."""


class Float8(Lever):
    """`torchao.float8.convert_to_float8_training`."""

    name = "float8"
    summary = "products of Linear layers in float8 on the GPU, by torchao"
    class_ = "precision"
    shortens: ClassVar = ("forward", "backward")
    check = "gradients"
    needs_whole_parameters = True
    only_by_name = "so few bits are for those who know that their training bears them"
    partners: ClassVar = ("compile",)

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """Linear layers of fitting sizes on a GPU that has float8, with torchao installed."""
        if facts.device != "cuda":
            return "no CUDA device is used"
        if facts.distributed:
            return "distributed wrappers may hold the layers that it replaces"
        if not any(model.num_aligned_linears for model in facts.trained_models):
            return f"no Linear layer whose dimensions are divisible by {ALIGNED}"
        return self.lacks(machine)

    def lacks(self, machine: Machine) -> str | None:
        """A GPU with float8, or torchao."""
        capabilities = [a.compute_capability for a in machine.accelerators if a.compute_capability]
        if not capabilities or min(map(float, capabilities)) < FIRST_CAPABILITY:
            return f"needs a GPU with float8 (compute capability {FIRST_CAPABILITY} or newer)"
        return None if importlib.util.find_spec("torchao") else "needs torchao: `pip install torchao`"

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Have the layers made, and put them in place inside each outermost call."""
        from flatout.frameworks.pytorch.seams.regions import Region
        from flatout.frameworks.pytorch.session import Unavailable

        try:
            torchao = importlib.import_module("torchao.float8")
        except ImportError:
            raise Unavailable("torchao is not installed: `pip install torchao`") from None
        session.require_cuda()
        num, seen = 0, set[str]()
        for call in session.calls.trained:
            swaps = _swaps(call.module, torchao.convert_to_float8_training, torchao.Float8LinearConfig)
            num += len(swaps)
            if swaps:
                write, ours = (functools.partial(_put, swaps, which) for which in (0, 1))
                region = call.kept[self.name] = Region(lambda: True, write, ours)
                call.arounds[self.name] = _around(region, seen)
        if not num:
            raise Unavailable("no Linear layer could be replaced")
        session.kept[self.name] = num, seen

    def release(self, session: Session) -> None:
        """The script's own layers everywhere."""
        for call in session.calls.found:
            call.arounds.pop(self.name, None)
            region = call.kept.pop(self.name, None)
            if region is not None:
                region.end()
        session.kept.pop(self.name, None)

    def evidence(self, session: Session) -> str | None:
        """Products in float8 that were seen in a call."""
        num, seen = session.kept.get(self.name, (0, ()))
        return f"{num} Linear layers replaced, {' and '.join(sorted(seen))} seen" if seen else None


def is_aligned(module: Any) -> bool:
    """Whether a module is a plain Linear layer of dimensions that float8 products take."""
    from torch import nn

    return type(module) is nn.Linear and not (module.in_features % ALIGNED or module.out_features % ALIGNED)


def _fits(module: Any, name: str) -> bool:
    """Whether another layer can stand in for it: what is called with a layer would not be called."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return is_aligned(module) and not any(getattr(module, hook, None) for hook in hooks)


def _swaps(model: nn.Module, convert: Any, configure: Any) -> list[Swap]:
    """Each place of a layer with the script's own layer and the one that is made for it; the model is left as it is."""
    places = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    found = []
    try:
        # padded, because a batch may have any number of rows
        convert(model, module_filter_fn=_fits, config=configure(pad_inner_dim=True))
        for parent, name, child in places:
            other = parent._modules[name]
            if other not in (None, child) and all(map(operator.is_, child.parameters(), other.parameters())):
                found.append((parent, name, (child, other)))
    finally:
        for parent, name, child in places:
            parent._modules[name] = child
    return found


def _put(swaps: list[Swap], which: int, *_: Any) -> None:
    """Put the script's own layers (0) or the others (1) in their places, unless the script has put its own there."""
    for parent, name, pair in swaps:
        if parent._modules.get(name) in pair:
            pair[1].training = pair[0].training
            parent._modules[name] = pair[which]


def _around(region: Region, seen: set[str]) -> Around:
    """The call in the region; in the first it is noted whether torchao, or a compiler, asks for the product."""
    import torch

    from flatout.frameworks.pytorch.seams.patches import Patch

    looked = False

    def noting(original: Any, patch: Patch) -> Any:
        def product(*args: Any, **kwargs: Any) -> Any:
            seen.add("`_scaled_mm`")
            return original(*args, **kwargs)

        return product

    def around(compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal looked
        if looked:
            return region.call(compute, args, kwargs)
        looked, patch = True, Patch(torch, "_scaled_mm", noting)
        try:
            return region.call(compute, args, kwargs)
        finally:
            patch.remove()

    return around
