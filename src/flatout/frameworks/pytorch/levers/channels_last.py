"""channels_last: keep images and convolution weights with the channel as the fastest dimension.

The whole state moves: parameters, gradients, buffers and moments alike; inputs are converted as they enter the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.frameworks.lever import Lever
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.trace import Setting

if TYPE_CHECKING:
    import torch

    from flatout.frameworks.pytorch.seams.outer_call import Compute
    from flatout.frameworks.pytorch.session import Session


class ChannelsLast(Lever):
    """Memory format NHWC (or NDHWC) for convolutions."""

    name = "channels_last"
    summary = "images and convolution weights with the channel as fastest dimension"
    class_ = "rounding"
    shortens: ClassVar = ("forward", "backward")
    check = "gradients"
    moves_state = True
    needs_whole_parameters = True
    partners: ClassVar = ("bf16",)  # in bfloat16 convolutions of the usual layout are reordered at every call

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """Models with 2D or 3D convolutions."""
        if not any({2, 3} & set(model.convolution_dims) for model in facts.models):
            return "no 2D or 3D convolution"
        if facts.distributed:
            return "distributed wrappers keep views of the parameters"
        return None

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Move the state, and convert inputs from now on."""
        import torch

        from flatout.frameworks.pytorch.seams.trees import map_tensors

        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        strides: dict[tuple[int, str], tuple[int, ...]] = {}
        session.kept[self.name] = strides
        strided = [p for p in session.parameters() if p.layout is torch.strided]
        shared = Counter(p.untyped_storage().data_ptr() for p in strided)

        def move(value: torch.Tensor, owner: torch.Tensor, what: str) -> torch.Tensor:
            if not _may_move(owner) or shared[owner.untyped_storage().data_ptr()] > 1:
                return value
            strides[id(owner), what] = value.stride()
            return value.to(memory_format=formats[value.dim()])

        def convert(value: torch.Tensor) -> torch.Tensor:
            if value.dim() in formats and value.is_floating_point() and value.layout is torch.strided:
                # `contiguous` would leave the strides where a dimension has size 1, and operations choose their kernels
                # by them (the first convolution of a model for grey images: backward 2.4 times as long)
                return value.to(memory_format=formats[value.dim()])
            return value

        def around(compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            args, kwargs = map_tensors(convert, (args, kwargs), objects=False)
            return compute(*args, **kwargs)

        session.map_state(move)
        for call in session.calls.found:
            call.arounds[self.name] = around

    def release(self, session: Session) -> None:
        """Move everything back to where it was; what has come since lies as its parameter does."""
        import torch

        strides: dict[tuple[int, str], tuple[int, ...]] = session.kept.pop(self.name)

        def move(value: torch.Tensor, owner: torch.Tensor, what: str) -> torch.Tensor:
            stride = strides.get((id(owner), what), strides.get((id(owner), "data")))
            if stride is None or value.stride() == stride or value.shape != owner.shape:
                return value
            return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)

        session.map_state(move)
        for call in session.calls.found:
            call.arounds.pop(self.name, None)

    def evidence(self, session: Session) -> str | None:
        """Weights that are laid out so."""
        import torch

        moved = {owner for owner, _ in session.kept.get(self.name, ())}
        weights = [p for p in session.parameters() if id(p) in moved]
        telling = [p for p in weights if min(p.shape[1:]) > 1]  # of size 1 both layouts are the same
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        if not all(p.is_contiguous(memory_format=formats[p.dim()]) for p in telling):
            return None
        return f"{len(weights)} convolution weights lie in channels_last" if weights else None


def _may_move(owner: torch.Tensor) -> bool:
    """Whether it is an image-like tensor with a storage of its own, of which nobody keeps another view."""
    import torch

    if owner.dim() not in (4, 5) or not owner.is_floating_point() or owner.layout is not torch.strided:
        return False
    return owner.untyped_storage().nbytes() == owner.numel() * owner.element_size()
