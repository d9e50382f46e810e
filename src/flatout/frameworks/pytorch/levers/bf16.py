"""bf16: compute the model's forward, and so its backward, in bfloat16 where autocast deems it safe.

Only calls of which gradients are taken; outputs are cast back to the type that plain gives, so the loss stays float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.ceilings import Machine
from flatout.plan import Lever
from flatout.trace import Facts, Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.calls import Compute
    from flatout.frameworks.pytorch.session import Session


class Bf16(Lever):
    """Autocast of the forward to bfloat16."""

    name = "bf16"
    summary = "matrix products and convolutions of the model in bfloat16, loss in float32"
    class_ = "precision"
    shortens: ClassVar = ("forward", "backward")
    check = "gradients"

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """Float32 models without a precision of the script's own."""
        if facts.autocast:
            return "the script uses autocast itself"
        if not facts.models:
            return "no model call was found"
        if not any("float32" in model.dtypes for model in facts.models):
            return "no float32 parameters"
        if facts.device == "cpu" and not machine.bfloat16_in_hardware():
            return "this CPU has no bfloat16 instructions"
        return None

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Put autocast around each outermost call."""
        import torch
        from torch.utils._pytree import tree_map

        seen: set[str] = session.kept.setdefault(self.name, set())

        def back(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
                seen.add("output")
                return value.float()
            return value

        def around(compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with torch.autocast(session.device, dtype=torch.bfloat16):
                out = compute(*args, **kwargs)
            return tree_map(back, out)

        for call in session.calls.found:
            if any(p.dtype == torch.float32 for p in call.module.parameters()):
                call.arounds[self.name] = around

    def release(self, session: Session) -> None:
        """Take autocast away."""
        for call in session.calls.found:
            call.arounds.pop(self.name, None)

    def evidence(self, session: Session) -> str | None:
        """An output that came back in bfloat16."""
        return "model outputs were computed in bfloat16" if session.kept.get(self.name) else None
