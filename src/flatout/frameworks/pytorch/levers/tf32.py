"""tf32: let float32 matrix products and convolutions on the GPU round their inputs to 10 bits of mantissa."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from flatout.frameworks.pytorch.lever_bases import TENSOR_CORES_FOR_ALL, CudaLever, least_capability
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session

PROBE = 1024
"""Rows and columns of the product that is looked at."""


class Tf32(CudaLever):
    """`allow_tf32` for matrix products and cuDNN."""

    name = "tf32"
    summary = "float32 products on the GPU's tensor cores with TF32 inputs"
    class_ = "precision"
    shortens: ClassVar = ("forward", "backward")
    check = "gradients"
    proves_once = True

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """An Ampere or newer GPU whose products are not TF32 yet."""
        if (reason := super().applies(facts, machine)) is not None:
            return reason
        if facts.matmul_precision != "highest":
            return "the script allows it already"
        capability = least_capability(machine)
        return "this GPU has no TF32" if capability is None or capability < TENSOR_CORES_FOR_ALL else None

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Allow it, in the terms that the script uses: PyTorch refuses to be asked in both, and may warn of the older.

        The newer ones alone are no choice: the compiler of 2.9 and 2.10 asks in the older.
        """
        import torch

        from flatout.frameworks.pytorch.seams.unseen_warnings import unseen_warnings

        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        precision = getattr(matmul, "fp32_precision", None)  # not before PyTorch 2.9
        with unseen_warnings():
            try:
                session.kept[self.name] = (matmul.allow_tf32, cudnn.allow_tf32, precision)
            except RuntimeError:
                session.kept[self.name] = (None, None, precision)
                matmul.fp32_precision = "tf32"
                return
            matmul.allow_tf32 = True
            cudnn.allow_tf32 = True

    def release(self, session: Session) -> None:
        """Back to the script's."""
        import torch

        from flatout.frameworks.pytorch.seams.unseen_warnings import unseen_warnings

        matmul, cudnn, precision = session.kept.pop(self.name)
        with unseen_warnings():
            if matmul is not None:
                torch.backends.cuda.matmul.allow_tf32 = matmul
                torch.backends.cudnn.allow_tf32 = cudnn
            if precision is not None:
                torch.backends.cuda.matmul.fp32_precision = precision

    def evidence(self, session: Session) -> str | None:
        """A product that shows the rounding: 1 + 2^-12 squared keeps its small part in float32 alone.

        So large a one that cuBLAS has no reason to compute it without tensor cores.
        """
        import torch

        value = torch.full((PROBE, PROBE), 1 + 2**-12, device="cuda")
        rounded = (value @ value)[0, 0].item() == float(PROBE)
        return "a probe product was rounded to TF32" if rounded else None
