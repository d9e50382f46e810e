"""matmul_bf16: let oneDNN round the factors of float32 products to bfloat16 on the CPU, sums staying in float32.

Every tensor stays float32, which is what tells it from `bf16`: no cast, no operation in another type. It holds in the
model's forward and in the backward from its outputs on, not in the loss, the update or an evaluation. There alone a
script that asks reads the setting back: `torch.backends.mkldnn.matmul.fp32_precision` is `bf16`, and PyTorch refuses
to say `torch.get_float32_matmul_precision()`. Products of 4096 multiplications or fewer, products of a matrix with a
vector and LSTMs are left in float32 by PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.plan import Lever
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.seams.calls import Around, Compute, OuterCall
    from flatout.frameworks.pytorch.seams.regions import Region
    from flatout.frameworks.pytorch.session import Session

PROBE_SIZE = 64
"""Rows and columns of the probe product: large enough for oneDNN."""


class MatmulBf16(Lever):
    """`torch.backends.mkldnn.matmul.fp32_precision`, and that of convolutions."""

    name = "matmul_bf16"
    summary = "float32 products and convolutions on the CPU with factors rounded to bfloat16"
    class_ = "precision"
    shortens: ClassVar = ("forward", "backward")
    check = "gradients"
    # autocast leaves no product for it; what the others compute in threads beside the training would be rounded as well
    conflicts: ClassVar = ("bf16", "prefetch", "virtual_workers")
    partners: ClassVar = ("channels_last",)  # convolutions of the usual layout are reordered at every call

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """Float32 models on a CPU that multiplies bfloat16, without a precision of the script's own."""
        if facts.device != "cpu":
            return "the work is on the GPU"
        if facts.autocast:
            return "the script uses autocast itself"
        if facts.cpu_precision != "none":
            return f"the script has chosen the precision of float32 products itself ({facts.cpu_precision})"
        if not any("float32" in model.dtypes for model in facts.models):
            return "no float32 parameters" if facts.models else "no model call was found"
        return self.lacks(machine)

    def lacks(self, machine: Machine) -> str | None:
        """A processor that multiplies bfloat16, on x86 in tiles: on others oneDNN rounds nothing."""
        if not machine.bfloat16_in_hardware():
            return "this CPU has no bfloat16 instructions"
        if machine.architecture == "x86_64" and "amx_bf16" not in machine.cpu_features:
            return "this CPU has no bfloat16 tiles (AMX), without which float32 products stay as they are"
        return None

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Allow the rounding inside each outermost call, and in the backward through it."""
        import torch

        from flatout.frameworks.pytorch.seams.regions import Region

        seen: set[str] = set()
        region = Region(_read, _write, _write_bfloat16)
        session.kept[self.name] = region, seen
        for call in session.calls.found:
            if any(p.dtype == torch.float32 for p in call.module.parameters()):
                call.arounds[self.name] = _around(call, region, seen)

    def release(self, session: Session) -> None:
        """Allow it no more."""
        region, _ = session.kept.pop(self.name, (None, None))
        for call in session.calls.found:
            call.arounds.pop(self.name, None)
        if region is not None:
            region.end()

    def evidence(self, session: Session) -> str | None:
        """A product or convolution of the model that came out otherwise than in float32; of compiled ones a probe."""
        _, seen = session.kept.get(self.name, (None, None))
        return f"{' and '.join(sorted(seen))} rounded to bfloat16" if seen else None


def _around(call: OuterCall, region: Region, seen: set[str]) -> Around:
    probed = False

    def around(compute: Compute, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal probed
        look = _products(region, seen) if not probed and call.compute is None else nullcontext()
        region.start()
        try:
            with look:
                out = compute(*args, **kwargs)
            if not probed and call.compute is not None and _probe_is_rounded():
                seen.add("a probe product")
        finally:
            region.stop()
        probed = True
        region.reach_backward(out)
        return out

    return around


def _products(region: Region, seen: set[str]) -> Any:
    """Looks at one call's operations: computes one product and one convolution in float32 as well."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    kinds = {"mm": "products", "addmm": "products", "bmm": "products", "baddbmm": "products"}
    kinds |= dict.fromkeys(("convolution", "mkldnn_convolution"), "convolutions")

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            kind = kinds.get(func._overloadpacket.__name__)
            if kind is not None and kind not in seen and out.dtype == torch.float32:
                region.stop()
                plain = func(*args, **(kwargs or {}))
                region.start()
                if not torch.equal(out, plain):
                    seen.add(kind)
            return out

    return Products()


def _probe_is_rounded() -> bool:
    """Whether 1 + 2^-9, which bfloat16 does not have, loses its small part in a product; nothing is drawn for it."""
    import torch

    with torch.no_grad():
        value = torch.full((PROBE_SIZE, PROBE_SIZE), 1 + 2**-9)
        return (value @ value)[0, 0].item() == float(PROBE_SIZE)


def _parts() -> tuple[Any, ...]:
    """What can be set apart: not before PyTorch 2.9, nor, on some builds, without oneDNN."""
    import torch

    found = (getattr(torch.backends.mkldnn, name, None) for name in ("matmul", "conv"))
    return tuple(part for part in found if hasattr(part, "fp32_precision"))


def _read() -> Any:
    import torch

    parts = _parts()
    return tuple(part.fp32_precision for part in parts) if parts else torch.get_float32_matmul_precision()


def _write(former: Any) -> None:
    import torch

    if isinstance(former, str):
        torch.set_float32_matmul_precision(former)
        return
    for part, precision in zip(_parts(), former, strict=True):
        part.fp32_precision = precision


def _write_bfloat16() -> None:
    import torch

    parts = _parts()
    for part in parts:
        part.fp32_precision = "bf16"
    if not parts:
        torch.set_float32_matmul_precision("medium")
