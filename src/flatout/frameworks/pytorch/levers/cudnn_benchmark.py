"""cudnn_benchmark: let cuDNN try its convolution algorithms for each shape and keep the fastest.

PyTorch keeps one plan for each shape, whether it was searched for or guessed, and looks it up without a look at the
flag: what was set between two steps would change nothing for shapes that were met before. So the flag is set before
the script's first convolution, in a process of its own, and what is trained there is held against what plain trains.

Source: `aten/src/ATen/native/cudnn/Conv_v8.cpp` of PyTorch, `benchmark_cache` and `run_single_conv`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from flatout.frameworks.pytorch.lever_bases import CudaLever
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session


class CudnnBenchmark(CudaLever):
    """`torch.backends.cudnn.benchmark`."""

    name = "cudnn_benchmark"
    summary = "the fastest convolution algorithm for each shape, found by trying"
    class_ = "rounding"
    shortens: ClassVar = ("forward", "backward")
    toggles = "process"
    check = "gradients"
    takes_memory = True

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """Convolutions on a GPU."""
        if (reason := super().applies(facts, machine)) is not None:
            return reason
        if facts.cudnn_benchmark:
            return "already on"
        if not any(model.convolution_dims for model in facts.models):
            return "no convolution"
        return None

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Set the flag, which the script may still set as it likes."""
        import torch

        session.kept[self.name] = torch.backends.cudnn.benchmark
        torch.backends.cudnn.benchmark = True

    def release(self, session: Session) -> None:
        """Back to the script's."""
        import torch

        torch.backends.cudnn.benchmark = session.kept.pop(self.name)

    def evidence(self, session: Session) -> str | None:
        """The flag, with cuDNN there to read it."""
        import torch

        on = torch.backends.cudnn.is_available() and torch.backends.cudnn.benchmark
        return "cudnn.benchmark is on" if on else None
