"""inference_mode: note nothing for a backward pass that never comes.

Outputs are ordinary tensors again before the script has them, so that it may write into them; where it takes gradients
they are said to need them, as in plain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.frameworks.lever import Lever
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.seams.outer_call import Compute
    from flatout.frameworks.pytorch.session import Session


class InferenceMode(Lever):
    """`torch.inference_mode` around each call."""

    name = "inference_mode"
    summary = "calls of models without a record for a backward pass, where nothing is trained"
    class_ = "rounding"  # without gradients some modules choose other kernels
    shortens: ClassVar = ("forward",)
    check = "gradients"
    conflicts: ClassVar = ("compile",)

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """Calls of models that nobody trains."""
        return None if facts.infers else "the script trains"

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """From the next call on."""
        import torch

        from flatout.frameworks.pytorch.seams.trees import map_tensors
        from flatout.frameworks.pytorch.session import Unavailable

        if not session.calls.infers:
            raise Unavailable("the script trains")
        seen: list[int] = [0]
        session.kept[self.name] = seen

        def around(compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            wants = torch.is_grad_enabled()
            with torch.inference_mode():
                out = compute(*args, **kwargs)
            seen[0] += 1

            def ordinary(tensor: torch.Tensor) -> torch.Tensor:
                if not tensor.is_inference():
                    return tensor
                own = tensor.clone()
                return own.requires_grad_() if wants and own.is_floating_point() else own

            return map_tensors(ordinary, out)

        for call in session.calls.found:
            call.arounds[self.name] = around

    def release(self, session: Session) -> None:
        """As the script calls it."""
        session.kept.pop(self.name, None)
        for call in session.calls.found:
            call.arounds.pop(self.name, None)

    def evidence(self, session: Session) -> str | None:
        """Calls that were made so."""
        num = session.kept.get(self.name, [0])[0]
        return f"{num:,} calls" if num else None
