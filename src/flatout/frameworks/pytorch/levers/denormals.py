"""denormals: take numbers below the smallest normal one for zero, on the CPU.

Many processors compute with denormal numbers (below 1.2e-38 in float32) a hundred times slower than with others. They
come up where something decays towards zero: moments of parameters that get no gradient, weights under strong decay,
gradients that vanish. The processor's mode is one of each thread: it is set in the thread that trains, in which
backward runs as well, and in each thread of its team for one operation; threads and processes begun by the script
compute as they did, unless that thread begins them meanwhile. In the thread that trains Python's and NumPy's own floats
are flushed too. Parameters, gradients, buffers and moments are looked at; activations are not, but where those
are denormal, gradients of the weights that they meet are as a rule.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.plan import Lever
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session

GRAIN = 32768
"""Elements of a simple operation for each thread that works on it. Source: `at::internal::GRAIN_SIZE` of PyTorch."""

ARCHITECTURES = ("x86_64", "amd64", "aarch64", "arm64")
"""Where `torch.set_flush_denormal` does something. Source: `ATen/cpu/FlushDenormal.cpp` of PyTorch."""


class Denormals(Lever):
    """`torch.set_flush_denormal` in each thread that computes."""

    name = "denormals"
    summary = "numbers too small to be normal taken for zero on the CPU"
    class_ = "precision"  # the range of floats ends sooner; the order of operations stays
    shortens: ClassVar = ("forward", "loss", "backward", "optimizer")
    check = "gradients"

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """On a CPU where denormal numbers are among parameters, gradients, buffers or moments after the first steps."""
        if facts.device != "cpu":
            return "the work is on the GPU, which computes with denormal numbers at full speed"
        if not facts.denormal_fraction > 0:
            return "no denormal number among parameters, gradients, buffers and moments"
        return self.lacks(machine)

    def lacks(self, machine: Machine) -> str | None:
        """A processor of which PyTorch can set the mode."""
        known = machine.architecture.lower() in ARCHITECTURES
        return None if known else f"PyTorch cannot flush denormal numbers on {machine.architecture}"

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Set the mode in each thread of the team, which keeps it."""
        import torch

        from flatout.frameworks.pytorch.session import Unavailable

        if _flushed_share(1) == 1:
            raise Unavailable("the script flushes denormal numbers itself")
        if not torch.set_flush_denormal(True):
            raise Unavailable("this processor cannot flush denormal numbers")
        num = session.kept[self.name] = torch.get_num_threads()
        _in_each_thread(num, lambda: torch.set_flush_denormal(True))
        session.in_forks(self.name, lambda: torch.set_flush_denormal(False))

    def release(self, session: Session) -> None:
        """Compute with denormal numbers again, in each of the threads."""
        import torch

        num = session.kept.pop(self.name, None)
        if num is None:
            return
        session.in_forks(self.name, None)
        torch.set_flush_denormal(False)
        _in_each_thread(max(num, torch.get_num_threads()), lambda: torch.set_flush_denormal(False))

    def evidence(self, session: Session) -> str | None:
        """Denormal products that come out as zero in each thread."""
        import torch

        num = torch.get_num_threads()
        if _flushed_share(num) < 1:
            return None
        return f"denormal products are zero on {num} {'thread' if num == 1 else 'threads'}"


def _flushed_share(num: int) -> float:
    """Share of denormal products that come out as zero, where so many threads work on them."""
    import torch

    with torch.no_grad():
        products = torch.full((num * GRAIN,), 1e-30, dtype=torch.float32, device="cpu") * 1e-10
        return float((products == 0).sum()) / products.numel()


def _in_each_thread(num: int, act: Callable[[], object]) -> None:
    """Call `act` in each thread of the team that this thread computes with.

    PyTorch sets the mode of the calling thread alone, and the others were begun before.

    Raises:
        Unavailable: There are other threads, and they are not OpenMP's.
    """
    if num == 1:
        return
    import torch

    from flatout.frameworks.pytorch.session import Unavailable

    library = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))
    parallel = getattr(library, "GOMP_parallel", None)  # of the OpenMP that it is linked with
    if parallel is None:
        raise Unavailable("PyTorch computes with threads here that cannot be reached")
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    parallel.argtypes = (kind, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    parallel(kind(lambda _: act() and None), None, num, 0)
