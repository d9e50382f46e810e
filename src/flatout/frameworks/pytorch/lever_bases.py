"""What do several levers share? How those of loaders and of GPUs begin, and the same words for the same reasons.

In: facts, machines, loaders. Out: base classes, and one sentence why a lever does not apply, or None where it does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from flatout.frameworks.lever import Lever
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.ranks import SUMMING_MODES
from flatout.records.trace import Setting

DEFAULT_PREFETCH_FACTOR = 2
"""Batches that each worker keeps ready where nothing is said, as PyTorch has it."""


class LoaderLever(Lever):
    """A part of the input, which gives the script's own batches sooner; what it counts is its evidence."""

    class_ = "exact"
    shortens: ClassVar = ("data",)
    check = "batches"
    checks_itself = True
    part: ClassVar[str]
    """Which part of `session.loaders.parts` it engages."""
    counted: ClassVar[tuple[str, str]]
    """The part's counter, and what it counts, in words."""

    def _part(self, parts: Any) -> Any:
        return getattr(parts, self.part)

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """A loader whose dataset says in its code what it computes or opens."""
        return why_none([loader.refusal(self.name) for loader in facts.loaders])

    def why_not(self, session: Any, loader: Any) -> str | None:
        """What its part says of the loader."""
        return session.loaders.why_not(self._part, loader, for_workers=self.serves_workers(loader))  # type: ignore[no-any-return]

    def serves_workers(self, loader: Any) -> bool:
        """Whether it would do its work in the loader's workers."""
        return False

    def engage(self, session: Any, settings: Mapping[str, Setting]) -> None:
        """From the next fetch on."""
        self._part(session.loaders.parts).engage(True)
        session.loaders.attach()

    def release(self, session: Any) -> None:
        """As the script has it; what is kept waits."""
        self._part(session.loaders.parts).engage(False)

    def evidence(self, session: Any) -> str | None:
        """What its part has done."""
        counter, words = self.counted
        num = getattr(self._part(session.loaders.parts), counter)
        return f"{num:,} {words}" if num else None


class CudaLever(Lever):
    """A lever for scripts that compute on a GPU."""

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """A script that computes on a GPU."""
        return None if facts.device == "cuda" else "no CUDA device is used"

    def lacks(self, machine: Machine) -> str | None:
        """A GPU."""
        return None if machine.accelerators else "needs a CUDA device, none was found"


TENSOR_CORES_FOR_ALL = 8.0
"""Compute capability of Ampere, the first NVIDIA generation with products in TF32 and bfloat16, and the first that
flash attention and cuDNN's are written for. Source: NVIDIA A100 white paper (2020)."""


def least_capability(machine: Machine) -> float | None:
    """The lowest compute capability of a machine's GPUs; None where none is known.

    >>> from types import SimpleNamespace
    >>> from flatout.records.ceilings import Accelerator
    >>> gpus = [Accelerator(name=name, memory_bytes=1, compute_capability=name) for name in ("10.0", "7.5")]
    >>> least_capability(SimpleNamespace(accelerators=gpus))
    7.5
    """
    return min((float(a.compute_capability) for a in machine.accelerators if a.compute_capability), default=None)


def why_not_on_ranks(num_ranks: int, mode: str) -> str | None:
    """Why a lever of communication has nothing to do; None where it has, which is so in some modes.

    >>> why_not_on_ranks(2, "tensor")
    'in mode `tensor` gradients are not summed so'
    """
    if num_ranks < 2:
        return "it is for ranks (`--ranks N`): one process sends no gradients"
    return None if mode in SUMMING_MODES else f"in mode `{mode}` gradients are not summed so"


def why_none(reasons: Sequence[str | None]) -> str | None:
    """The first loader's reason; None where some loader has none.

    >>> why_none(["too small", None]), why_none(["too small", "too large"])
    (None, 'too small')
    """
    if not reasons:
        return "no DataLoader feeds the training"
    return None if None in reasons else reasons[0]
