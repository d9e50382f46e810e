"""compile: let `torch.compile` turn the model's operations into fewer, larger kernels.

In place: the module stays what it is and checkpoint keys carry no `_orig_mod.`. Random numbers are drawn as plain
draws them (`fallback_random`), so that dropout masks and generator states agree.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.ceilings import Machine
from flatout.plan import Lever
from flatout.trace import Facts, Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.calls import Compute
    from flatout.frameworks.pytorch.session import Session

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


class Compile(Lever):
    """`torch.compile` of each outermost model call, where gradients are taken."""

    name = "compile"
    summary = "the model compiled into fewer, larger kernels"
    class_ = "rounding"
    shortens: ClassVar = ("forward", "backward")
    check = "gradients"
    compiles = True

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """Models not compiled yet, and a compiler to do it with."""
        if not facts.models:
            return "no model call was found"
        if any(model.compiled for model in facts.models):
            return "the script compiles its model itself"
        if any(model.recurrent for model in facts.models):
            return "recurrent layers are not compiled well: PyTorch runs them as they are"
        return self.lacks(machine)

    def lacks(self, machine: Machine) -> str | None:
        """A C++ compiler: generated kernels are built by it."""
        return None if machine.cxx_compiler else "needs a C++ compiler (`g++` or `clang++`), none was found"

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Compute each outermost call through its compiled form, made once and kept with the model."""
        import torch
        import torch._inductor.config as inductor

        session.kept[self.name] = (inductor.fallback_random, os.environ.get(CACHE_VARIABLE))
        if session.cache_folder is not None:
            os.environ.setdefault(CACHE_VARIABLE, session.cache_folder)
        inductor.fallback_random = True
        for call in session.calls.found:
            if self.name not in call.kept:
                call.kept[self.name] = torch.compile(_inlined(call.module._call_impl))
            call.compute = call.kept[self.name]

    def release(self, session: Session) -> None:
        """Compute as plain again; the compiled form is kept for another time."""
        import torch._inductor.config as inductor

        inductor.fallback_random, folder = session.kept.pop(self.name)
        if folder is None:
            os.environ.pop(CACHE_VARIABLE, None)
        for call in session.calls.found:
            call.compute = None

    def evidence(self, session: Session) -> str | None:
        """Graphs that were compiled."""
        num = _num_graphs()
        return f"{num} graph{'s' * (num != 1)} compiled" if num else None


def _inlined(call: Compute) -> Compute:
    """A frame around the module's call: PyTorch compiles no frame of its own, which is what `nn.Sequential` has."""

    def computed(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return computed


def _num_graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
