"""channels_last: keep images and convolution weights with the channel as the fastest dimension.

The whole state moves: parameters, gradients, buffers and moments alike; inputs are converted as they enter the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.ceilings import Machine
from flatout.plan import Lever
from flatout.trace import Facts, Setting

if TYPE_CHECKING:
    import torch

    from flatout.frameworks.pytorch.calls import Compute
    from flatout.frameworks.pytorch.session import Session


class ChannelsLast(Lever):
    """Memory format NHWC (or NDHWC) for convolutions."""

    name = "channels_last"
    summary = "images and convolution weights with the channel as fastest dimension"
    class_ = "rounding"
    shortens: ClassVar = ("forward", "backward")
    check = "gradients"

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
        from torch.utils._pytree import tree_map

        formats = {4: torch.channels_last, 5: torch.channels_last_3d}

        def convert(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.dim() in formats and value.is_floating_point():
                return value.contiguous(memory_format=formats[value.dim()])
            return value

        def around(compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return compute(*tree_map(convert, args), **tree_map(convert, kwargs))

        session.map_state(convert)
        for call in session.calls.found:
            call.arounds[self.name] = around

    def release(self, session: Session) -> None:
        """Move everything back."""

        def convert(value: torch.Tensor) -> torch.Tensor:
            return value.contiguous() if value.dim() in (4, 5) else value

        session.map_state(convert)
        for call in session.calls.found:
            call.arounds.pop(self.name, None)

    def evidence(self, session: Session) -> str | None:
        """Weights that are laid out so."""
        import torch

        for parameter in session.parameters():
            if parameter.dim() == 4 and min(parameter.shape[1:]) > 1:
                if parameter.is_contiguous(memory_format=torch.channels_last):
                    return "convolution weights lie in channels_last"
                return None
        return "convolution weights lie in channels_last (3D, or of size 1)"
