"""bf16: compute the model's forward, and so its backward, in bfloat16 where autocast deems it safe.

Only calls of which gradients are taken, and of models of each step that are not trained; outputs are cast back to the
type that plain gives, so the loss stays float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.frameworks.lever import Lever
from flatout.frameworks.pytorch.lever_bases import TENSOR_CORES_FOR_ALL, least_capability
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.trace import Setting

if TYPE_CHECKING:
    import torch

    from flatout.frameworks.pytorch.seams.outer_call import Around, Compute, OuterCall
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
        capability = least_capability(machine) if facts.device == "cuda" else None
        if capability is not None and capability < TENSOR_CORES_FOR_ALL:
            return (
                f"this GPU (compute capability {capability}) emulates bfloat16; float16, which it has, needs the "
                "script's loss scaled: `torch.amp.GradScaler`"
            )
        return None

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Put autocast around each outermost call."""
        import torch

        seen: set[str] = set()
        session.kept[self.name] = seen
        for call in session.calls.found:
            if any(p.dtype == torch.float32 for p in call.module.parameters()):
                call.arounds[self.name] = _around(call, session.device, seen)

    def release(self, session: Session) -> None:
        """Take autocast away."""
        session.kept.pop(self.name, None)
        for call in session.calls.found:
            call.arounds.pop(self.name, None)

    def evidence(self, session: Session) -> str | None:
        """Products that were computed in bfloat16, or outputs that came out so."""
        seen = session.kept.get(self.name)
        return f"{' and '.join(sorted(seen))} in bfloat16" if seen else None


def _around(call: OuterCall, device: str, seen: set[str]) -> Around:
    import torch

    from flatout.frameworks.pytorch.seams.trees import map_tensors, tensors_of

    probed = False

    def around(compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal probed
        probe = _products(seen) if not probed and call.compute is None else nullcontext()
        with torch.autocast(device, dtype=torch.bfloat16), probe:
            out = compute(*args, **kwargs)
        found = tensors_of(out, unique=False)  # under autocast two outputs may be one, which plain has in two types
        if not probed and call.compute is not None and any(_saved_bfloat16(t) for t in found):
            seen.add("products")
        probed = True
        plain = call.plain_dtypes
        if plain is None or len(plain) != len(found):
            # nothing to go by: the script's own bfloat16 is told from ours where it has some
            other = torch.bfloat16 if torch.bfloat16 in (plain or ()) else torch.float32
            plain = tuple(other for _ in found)
        wanted = iter(plain)

        def back(tensor: torch.Tensor) -> torch.Tensor:
            dtype = next(wanted)
            if tensor.dtype != torch.bfloat16 or dtype == torch.bfloat16 or not dtype.is_floating_point:
                return tensor
            seen.add("outputs")
            return tensor.to(dtype)

        return map_tensors(back, out, unique=False)

    return around


def _saved_bfloat16(tensor: torch.Tensor) -> bool:
    """Whether the compiled function that made this tensor keeps something in bfloat16 for its backward."""
    import torch

    saved = getattr(tensor.grad_fn, "saved_tensors", ())
    return any(isinstance(t, torch.Tensor) and t.dtype == torch.bfloat16 for t in saved)


def _products(seen: set[str]) -> Any:
    """Looks at one call's operations, for the proof that products are computed in bfloat16."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func._overloadpacket in flop_registry and any(
                isinstance(a, torch.Tensor) and a.dtype == torch.bfloat16 for a in args
            ):
                seen.add("products")
            return func(*args, **(kwargs or {}))

    return Products()
