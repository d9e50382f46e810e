"""attention: choose the backend that computes `scaled_dot_product_attention`.

On a GPU PyTorch takes the first that can, by an order of its own, and another may be faster. The choice holds in the
model's forward and the backward from its outputs on; elsewhere `torch.backends.cuda.flash_sdp_enabled()` and the like
say what plain says. What the chosen backend cannot compute is computed by `math`. Attention that a script writes by
hand is left to `fused_attention`. Backends draw dropout differently: the comparison of
gradients finds that. Flash attention and cuDNN's compute in 16 bits alone, so in a float32 script they take effect
beside `bf16`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.frameworks.pytorch.lever_bases import TENSOR_CORES_FOR_ALL, CudaLever, least_capability
from flatout.records.ceilings import Machine
from flatout.records.facts import NOT_LOOKED_AT, Facts
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.seams.outer_call import Around, Compute
    from flatout.frameworks.pytorch.seams.regions import Region
    from flatout.frameworks.pytorch.session import Session


SIXTEEN_BITS = ("flash", "cudnn")
"""What computes in float16 or bfloat16 alone: in a float32 script beside `bf16`."""


class Attention(CudaLever):
    """`torch.backends.cuda.enable_flash_sdp` and the like."""

    name = "attention"
    summary = "the backend that computes scaled_dot_product_attention"
    class_ = "rounding"
    shortens: ClassVar = ("forward", "backward")
    check = "gradients"
    parameter = "backend"
    choices: ClassVar = ("flash", "efficient", "cudnn", "math")
    partners: ClassVar = ("bf16",)  # flash and cuDNN's compute in 16 bits alone
    # A compiled function keeps the backend that it was compiled with, and PyTorch's cache of compiled functions (of
    # AOTAutograd, seen in 2.13) gives it to one that is compiled for another: its key leaves out which are allowed.
    conflicts: ClassVar = ("compile",)

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """Scripts that call it, where another backend than now may compute it and the script has switched none off."""
        if (reason := super().applies(facts, machine)) is not None:
            return reason
        if facts.attention is None:
            return NOT_LOOKED_AT
        if facts.attention_chosen:
            return "the script has switched backends off itself"
        if any(model.compiled for model in facts.main_models):
            return "the script compiles its model itself, and the backends with it"
        if not facts.attention:
            return "no call of `scaled_dot_product_attention` was seen"
        return None if self.settings(facts, machine) else "no backend is left to try"

    def settings(self, facts: Facts, machine: Machine) -> tuple[Mapping[str, Setting], ...]:
        """Those that compute none of it now, as far as they are written for this GPU."""
        used, capability = facts.attention or (), least_capability(machine)
        old = capability is not None and capability < TENSOR_CORES_FOR_ALL
        words = [word for word in self.choices if not old or word not in SIXTEEN_BITS]
        return tuple({"backend": word} for word in words if used != (word,))

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Allow that one, and `math` for the rest, inside each outermost call."""
        from flatout.frameworks.pytorch.observe.attention import allow, allowed
        from flatout.frameworks.pytorch.seams.regions import Region

        backend, seen = str(settings["backend"]), set[str]()
        ours = {name: name in (backend, "math") for name in allowed()}
        region = Region(allowed, allow, lambda: allow(ours))
        session.kept[self.name] = region, backend, seen
        for call in session.calls.found:
            call.arounds[self.name] = _around(region, seen)

    def release(self, session: Session) -> None:
        """Calls are computed as the script has it."""
        region, *_ = session.kept.pop(self.name, (None,))
        for call in session.calls.found:
            call.arounds.pop(self.name, None)
        if region is not None:
            region.end()

    def evidence(self, session: Session) -> str | None:
        """The backends that a call of the model really took, where the chosen one is among them."""
        _, wanted, seen = session.kept.get(self.name, (None, "", ()))
        return f"attention computed by {' and '.join(sorted(seen))}" if wanted in seen else None


def _around(region: Region, seen: set[str]) -> Around:
    from flatout.frameworks.pytorch.observe.attention import backends_of

    looked = False

    def around(compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal looked
        out = region.call(compute, args, kwargs)
        if not looked:
            looked = True
            seen.update(backends_of(out))
        return out

    return around
