"""What do optimizers do to the parameters under a lever? Three updates from one snapshot, and everything put back.

In: optimizers whose gradients are complete. Out: how far each parameter moved.
"""

from __future__ import annotations

import contextlib
import math
import numbers
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from threading import get_ident
from typing import Any, TypeVar

import torch
from torch.optim import optimizer as of_optimizers

from flatout.frameworks.pytorch.numerics.differences import Apart, apart, furthest, reals, square
from flatout.frameworks.pytorch.numerics.room import Place, num_bytes, place_for
from flatout.frameworks.pytorch.seams.random_states import RandomStates
from flatout.frameworks.pytorch.session import Session

T = TypeVar("T")

GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")

NUM_UPDATES = 3
"""Updates compared: the first has no moments yet, the third shows a wrong pairing of moments and parameters."""

LESS = 0.5
"""What part of its options an optimizer is left: of the learning rate from the second update on, of all others in the
third. Schedules change them (OneCycleLR the momentum as well), and a lever may have kept what was there before."""

NAMED = ("lr", "momentum", "weight_decay")
"""Options that are quantities even where the script has written an integer; others may be counts or switches."""

LEAST_NORMAL = torch.finfo(torch.float32).tiny
"""What a moment may be off where it is denormal: such numbers have no last place that is relative to them."""

CLIPPED = 1e4
"""How much larger gradients are before the last update, where the script clips them: most steps clip nothing."""


def has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an update would change anything."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


class Snapshot:
    """Parameters, gradients, optimizer state and options as they are now, in memory of their own.

    Raises:
        NoRoom: They have none, on the device or on the host.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], device: str) -> None:
        parameters = list({p: None for o in optimizers for group in o.param_groups for p in group["params"]})
        gradients = [p.grad for p in parameters if p.grad is not None]
        found = (*parameters, *gradients, *(value for _, _, value in _states(optimizers)))
        place = place_for(num_bytes(found), device, "parameters, gradients and moments")
        self._parameters = {p: _copied(p, place) for p in parameters}
        self._gradients = [(gradient, _copied(gradient, place)) for gradient in gradients]
        self._optimizers = [_OptimizerState(o, place) for o in optimizers]
        self.plain_hooks = {id(o): {**o._optimizer_step_pre_hooks, **o._optimizer_step_post_hooks} for o in optimizers}
        """The script's own step hooks, which do not see our updates."""
        self.plain_global_hooks = {key for name in GLOBAL_HOOKS for key in getattr(of_optimizers, name)}
        """Those for all optimizers, by their keys; ours are among them, and have nothing to do meanwhile."""
        self._plain_steps = {id(o): vars(o).get("step") for o in optimizers}

    def step_of(self, optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
        """How the optimizer updates: as its class does, unless a lever has put something of its own in that place."""
        present = vars(optimizer).get("step")
        if present is not None and present is not self._plain_steps[id(optimizer)]:
            return present  # type: ignore[no-any-return]
        return lambda: type(optimizer).step(optimizer)  # type: ignore[call-arg]

    def restore_gradients(self) -> None:
        """Put gradients back: an update may write into them (foreach SGD with Nesterov momentum does)."""
        for gradient, value in self._gradients:
            if gradient.layout is torch.strided:
                gradient.data.copy_(value)

    def moved(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """How far each parameter is from here, one at a time."""
        for parameter, value in self._parameters.items():
            yield parameter, reals(parameter.detach() - value.to(parameter.device))

    def is_finite(self) -> bool:
        """Whether every parameter is still a number."""
        return all(bool(torch.isfinite(moved).all()) for _, moved in self.moved())

    def beside(self, plain: Moved) -> dict[torch.Tensor, Apart]:
        """How far each parameter is from here, beside how far plain updates have moved it; nothing of it is copied."""
        return {p: apart({p: moved}, {p: plain.parameters[p]})[p] for p, moved in self.moved()}

    def scale(self, parameter: torch.Tensor, moved: torch.Tensor) -> float:
        """How far rounding may move a parameter: one unit in the last place of it and of its movement."""
        size = math.sqrt(square(self._parameters[parameter])) + math.sqrt(square(moved))
        return torch.finfo(moved.dtype).eps * size if moved.is_floating_point() else 0.0

    def restore(self) -> None:
        """Put everything back, in the memory format that it has now."""
        for parameter, value in self._parameters.items():
            parameter.data.copy_(value)
        self.restore_gradients()
        for state in self._optimizers:
            state.restore()


class _OptimizerState:
    """State by parameter, options by group, and what the optimizer keeps on itself."""

    def __init__(self, optimizer: torch.optim.Optimizer, place: Place) -> None:
        self._optimizer = optimizer
        self._state = {owner: _kept(state, place) for owner, state in optimizer.state.items()}
        groups = ({k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups)
        self._groups = [_kept(group, place) for group in groups]
        self._own = {k: v for k, v in vars(optimizer).items() if isinstance(v, numbers.Number | str | None)}

    def restore(self) -> None:
        state = self._optimizer.state
        for owner in list(state):
            if owner in self._state:
                _put_back(state[owner], self._state[owner], owner=owner)
            else:
                del state[owner]
        for group, kept in zip(self._optimizer.param_groups, self._groups, strict=True):
            _put_back(group, kept, always=("params",))
        vars(self._optimizer).update(self._own)


def _copied(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    """A copy where it has room; counters and rates lie where they lay."""
    placed = place(tensor.detach()) if tensor.dim() else tensor.detach()
    return placed.clone() if placed.device == tensor.device else placed


def _kept(value: Any, place: Place) -> Any:
    if isinstance(value, torch.Tensor):
        return _copied(value, place)
    if type(value) is dict:
        return {k: _kept(v, place) for k, v in value.items()}
    return value.copy() if type(value) is list else value


def _put_back(present: Any, kept: Any, always: tuple[str, ...] = (), owner: Any = None) -> None:
    """Put what was kept in the place of what is there; what is not there any more is made where its owner lies."""
    if not isinstance(present, dict) or not isinstance(kept, dict):
        return
    for key in [k for k in present if k not in kept and k not in always]:
        del present[key]
    for key, value in kept.items():
        now = present.get(key)
        if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.shape == value.shape:
            now.data.copy_(value)
        else:
            present[key] = _kept(value, lambda t: t.to(owner.device) if isinstance(owner, torch.Tensor) else t)


class Moved:
    """What updates have done: how far each parameter went, what the optimizer remembers, where random streams stand.

    Raises:
        NoRoom: There is none for copies of that.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], snapshot: Snapshot, device: str) -> None:
        moved, states = snapshot.moved(), list(_states(optimizers))
        found = (
            *(p for o in optimizers for group in o.param_groups for p in group["params"]),
            *(v for *_, v in states),
        )
        place = place_for(num_bytes(found), device, "an update's parameters and moments")
        self.parameters = {p: place(distance) for p, distance in moved}
        self.states = {(p, key): _copied(reals(value.detach()), place) for p, key, value in states}
        self.random = RandomStates()

    @property
    def finite(self) -> bool:
        """Whether every parameter is still a number."""
        return all(bool(torch.isfinite(t).all()) for t in self.parameters.values())


def updated(
    session: Session,
    optimizers: Sequence[torch.optim.Optimizer],
    snapshot: Snapshot,
    look: Callable[[], T],
    clip: Callable[[float], None] | None = None,
    *,
    vary: bool = True,
) -> T:
    """Look at what three updates under the engaged levers do, where it lies; everything is put back after.

    With `clip`, each begins with gradients as backward left them, and the script's own clipping is made again; the last
    with gradients so large that it has something to do. From the second on the learning rate is another, and with
    `vary` all other options are others in the last.
    """
    session.silent = True
    try:
        for optimizer in optimizers:
            with _without_hooks(optimizer, snapshot):
                for number in range(NUM_UPDATES):
                    snapshot.restore_gradients()
                    if clip is not None:
                        clip(CLIPPED if number == NUM_UPDATES - 1 else 1.0)
                    if number == 1:
                        _lessen(optimizer, lambda name: name == "lr")
                    if number == NUM_UPDATES - 1 and vary:
                        _lessen(optimizer, lambda name: name != "lr")
                    session.flags.before_update(optimizer)
                    snapshot.step_of(optimizer)()
                    session.flags.after_update(optimizer)
        return look()
    finally:
        snapshot.restore()
        session.silent = False


def bears_other_options(session: Session, optimizers: Sequence[torch.optim.Optimizer], snapshot: Snapshot) -> bool:
    """Whether plain updates with lessened options still give numbers, where they do with the script's own."""
    try:
        if updated(session, optimizers, snapshot, snapshot.is_finite):
            return True
    except Exception:  # noqa: BLE001  an optimizer of the script's own may refuse an option in any way
        return False
    return not updated(session, optimizers, snapshot, snapshot.is_finite, vary=False)


def _lessen(optimizer: torch.optim.Optimizer, meant: Callable[[str], bool]) -> None:
    for group in optimizer.param_groups:
        for name in [name for name in group if name != "params" and meant(name)]:
            value = group[name]
            if isinstance(value, torch.Tensor):
                if value.is_floating_point():
                    value.mul_(LESS)  # in place: a captured graph reads it there
            else:
                group[name] = _lessened(value, integers=name in NAMED)


def _lessened(value: Any, *, integers: bool = False) -> Any:
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return LESS * value if integers or not isinstance(value, numbers.Integral) else value
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return LESS * value
    return type(value)(_lessened(part) for part in value) if type(value) in (tuple, list) else value


def _states(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
    """Moments and step counters of every parameter."""
    for optimizer in optimizers:
        for owner, state in optimizer.state.items():
            if isinstance(owner, torch.Tensor) and isinstance(state, dict):
                for key, value in state.items():
                    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                        yield owner, key, value


def worst_update(
    moved: Mapping[torch.Tensor, Apart], optimizers: Sequence[torch.optim.Optimizer], plain: Moved, snapshot: Snapshot
) -> tuple[torch.Tensor | None, str, float]:
    """The parameter (and what of it) whose difference is the largest multiple of what rounding may do.

    A step counter that stands elsewhere is an infinite one. What is compared lies in the parameters and optimizers.
    """
    scales = {p: snapshot.scale(p, value) for p, value in plain.parameters.items()}
    parameter, multiple = furthest({p: a.distance for p, a in moved.items()}, scales)
    present = {(p, key): reals(value.detach()) for p, key, value in _states(optimizers)}
    both = {key: present[key] for key in plain.states if key in present}
    compared = apart(both, {key: plain.states[key] for key in both})
    units = {key: _unit(plain.states[key]) for key in both}
    state, of_states = furthest({key: a.distance for key, a in compared.items()}, units)
    if state is not None and not of_states <= multiple:  # NaN as well
        return *state, of_states
    return parameter, "", multiple


def _unit(moment: torch.Tensor) -> float:
    """How far rounding may move it: nothing for a counter."""
    if not moment.is_floating_point() or not moment.dim():
        return 0.0
    return math.sqrt(square(moment)) * torch.finfo(moment.dtype).eps + math.sqrt(moment.numel()) * LEAST_NORMAL


@contextlib.contextmanager
def _without_hooks(optimizer: torch.optim.Optimizer, snapshot: Snapshot) -> Iterator[None]:
    """The script's own step hooks (averages of weights, schedules) do not see our updates; those of a lever do."""
    own = snapshot.plain_hooks[id(optimizer)]
    places: list[tuple[Any, str, Collection[int]]] = [
        (optimizer, f"_optimizer_step_{when}_hooks", own) for when in ("pre", "post")
    ]
    places += [(of_optimizers, name, snapshot.plain_global_hooks) for name in GLOBAL_HOOKS]
    kept = [(holder, name, getattr(holder, name)) for holder, name, _ in places]
    for holder, name, plain in places:
        setattr(holder, name, _SomeUnseen(getattr(holder, name), plain))
    try:
        yield
    finally:
        for holder, name, hooks in kept:
            setattr(holder, name, hooks)


class _SomeUnseen(OrderedDict[int, Any]):
    """Hooks of which the updates of this thread pass some over; another thread may be training meanwhile."""

    def __init__(self, hooks: Mapping[int, Any], unseen: Collection[int]) -> None:
        super().__init__(hooks)
        self._unseen, self._thread = unseen, get_ident()

    def values(self) -> Any:
        if get_ident() != self._thread:
            return super().values()
        return [hook for key, hook in self.items() if key not in self._unseen]
