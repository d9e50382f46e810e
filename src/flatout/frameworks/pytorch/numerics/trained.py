"""What has a run trained, and is it what another run of the same steps has? State kept at a step boundary.

In the script's process: its optimizers and models, written to a file. In the parent: the files of two runs, and of one
whose parameters were moved in their last place. Out: `Difference`s.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from flatout.frameworks.pytorch.numerics.differences import apart, furthest
from flatout.frameworks.pytorch.observe.memory import peak_bytes, reset_peak
from flatout.frameworks.pytorch.seams.calls import Calls
from flatout.frameworks.pytorch.seams.random_states import RandomStates
from flatout.frameworks.pytorch.session import Session
from flatout.records.difference import Difference

SUM = 4.0
"""Units in the last place that a sum over a batch may differ by in another order, whatever moving its parts changes."""

NUDGE = 8.0
"""Units in the last place by which parameters are moved after each step: outputs of a deep model are known to some
1e-6, whatever the order of its sums. One unit once is too little: whether a value near zero changes sides of a ReLU is
then a matter of luck, and that moves more than all else (seen with batch normalisation under AdamW)."""

COARSE = 1e-4
"""Parameters in types whose unit is larger, as bfloat16, are moved by one unit, once: more would be no rounding."""

State = dict[str, torch.Tensor]


class Trained:
    """What the script trains in this process."""

    def __init__(self, session: Session, calls: Calls) -> None:
        self._session, self._calls = session, calls
        self._is_reset = False

    def keep(self, path: str | None) -> None:
        """See `flatout.frameworks.contract.Trained`."""
        found = {}
        random = RandomStates()
        with torch.no_grad():
            for place, tensor in self._by_place().items():
                whole = _whole(tensor).detach().cpu()
                if path is not None:
                    found[place] = whole
        if path is not None:
            torch.save({"tensors": found, "random": random, "names": self._names()}, path)

    def nudge(self, step: int) -> None:
        """See `flatout.frameworks.contract.Trained`."""
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for whole in self._parameters():
                parameter = whole.to_local() if is_distributed(whole) else whole  # type: ignore[attr-defined]
                if not parameter.is_floating_point():
                    continue
                unit = torch.finfo(parameter.dtype).eps
                size = NUDGE * unit if unit < COARSE else unit if step == 1 else 0.0
                signs = torch.randint(0, 2, parameter.shape, generator=generator).mul_(2).sub_(1).to(parameter.device)
                parameter.mul_((1 + signs * size).to(parameter.dtype))

    def memory_of_step(self) -> int | None:
        """See `flatout.frameworks.contract.Trained`."""
        device = self._calls.where
        found = peak_bytes(device) if self._is_reset else None
        self._is_reset = reset_peak(device)
        return found

    def _parameters(self) -> list[torch.Tensor]:
        """In the script's own order: by its optimizers, then what models have beyond."""
        groups = [group for optimizer in self._session.optimizers for group in optimizer.param_groups]
        found = [p for group in groups for p in group["params"]]
        found += [p for call in self._calls.trained for p in call.module.parameters()]
        return list({id(p): p for p in found}.values())

    def _by_place(self) -> State:
        """By number, for which module of a model is called, and so what things are called, may differ between runs."""
        buffers = {id(b): b for call in self._calls.trained for b in call.module.buffers()}
        found = {f"parameter {n}": p for n, p in enumerate(self._parameters())}
        return found | {f"buffer {n}": b for n, b in enumerate(buffers.values())}

    def _names(self) -> dict[str, str]:
        """What people call what lies there."""
        modules = [call.module for call in self._calls.trained]
        names = {id(t): name for m in modules for name, t in (*m.named_parameters(), *m.named_buffers())}
        return {place: names.get(id(t), place) for place, t in self._by_place().items()}


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a `DTensor`, told without loading what defines it."""
    return type(tensor).__name__ == "DTensor"


def distributed_like(like: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    """A `DTensor` placed as another one, of what this rank holds."""
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return DTensor.from_local(part, mesh, placements, run_check=False)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of all of it, where this rank holds a part; all ranks ask for it together."""
    if is_distributed(tensor):
        whole: torch.Tensor = tensor.full_tensor()  # type: ignore[attr-defined]
        return whole
    return copy.deepcopy(tensor)  # of what we hold in parts a copy is the whole


def differences(plain: Path, nudged: Path, other: Path, begun: Path) -> tuple[Difference, ...]:
    """What a run has trained against the same steps of the plain script.

    Args:
        plain: The plain script's state after the last step.
        nudged: The same after parameters were moved in their last place at the first.
        other: The state of the run in question.
        begun: The plain script's state after the first step: errors are relative to how far training has moved.

    Raises:
        OSError: A state is missing.
    """
    # written by our own child, by `keep`
    kept = [torch.load(path, weights_only=False) for path in (plain, nudged, other, begun)]
    base, moved, found, start = (one["tensors"] for one in kept)
    if any(one.keys() != base.keys() for one in (moved, found, start)):
        return (Difference(check="parameters", error=math.inf, fault="other parameters were trained"),)
    told = _difference(base, moved, found, start, "parameters")
    name, alike = kept[0]["names"].get(told.multiple_of, told.multiple_of), kept[0]["random"].equals(kept[2]["random"])
    return (replace(told, multiple_of=name, random_states_equal=alike),)


def of_losses(plain: Sequence[float], nudged: Sequence[float], other: Sequence[float]) -> tuple[Difference, ...]:
    """The same of the losses of the last steps that all three have; nothing where one has none.

    >>> of_losses([2.0, 1.0], [2.0, 1.0], [2.0, 1.0])[0].error
    0.0
    """
    num = min(len(plain), len(nudged), len(other))
    if not num:
        return ()
    base, moved, found = ({"loss": torch.tensor(each[-num:], dtype=torch.float64)} for each in (plain, nudged, other))
    zero = {"loss": torch.zeros(num, dtype=torch.float64)}
    return (_difference(base, moved, found, zero, "losses"),)


def _difference(
    base: Mapping[str, torch.Tensor], moved: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor],
    start: Mapping[str, torch.Tensor], check: str,
) -> Difference:  # fmt: skip
    if any(base[name].shape != found[name].shape for name in base):
        return Difference(check=check, error=math.inf, fault="parameters have other shapes")
    compared, nudged = apart(found, base), apart(moved, base)
    narrowest = torch.float32 if check == "losses" else None  # of the script's own losses
    places = {n: torch.finfo(narrowest or t.dtype).eps if t.is_floating_point() else 0.0 for n, t in base.items()}
    units = {n: max(nudged[n].distance, SUM * places[n] * a.size) for n, a in compared.items()}
    multiple_of, multiple = furthest({name: a.distance for name, a in compared.items()}, units)
    # buffers are counters, and statistics of another size: each is judged by itself
    parameters = [name for name in base if not name.startswith("buffer")]
    way = apart(*({n: each[n].double() - start[n].double() for n in parameters} for each in (found, base)))
    step, whole = math.hypot(*(a.size for a in way.values())), math.hypot(*(a.distance for a in way.values()))
    return Difference(
        check=check,
        error=whole / step if step else (math.inf if whole else 0.0),
        slope=math.fsum(a.product for a in way.values()) / step**2 if step else 1.0,
        rounding=math.hypot(*(nudged[n].distance for n in parameters)) / step if step else 0.0,
        multiple=multiple,
        multiple_of=multiple_of or "",
        finite=all(bool(torch.isfinite(found[n]).all()) or not bool(torch.isfinite(base[n]).all()) for n in base),
    )
