"""How is a bug planted in a lever? A `Lever` that engages by one of a few ways, and releases by undoing it.

In: what goes wrong, as a function. Out: a lever that is registered, engaged and judged like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flatout.frameworks.lever import Lever
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts

Undo = Callable[[], None]
Plant = Callable[[Any], Undo]
"""Given a session, makes the change and returns what undoes it."""

NAME = "planted"


@dataclass(frozen=True, kw_only=True)
class Bug:
    """One bug, and the lever that has it.

    Attributes:
        name: What goes wrong.
        class_: The class that the lever claims.
        check: The check that it names.
        plant: How.
        families: The scripts in which it can happen at all.
    """

    name: str
    class_: str
    check: str
    plant: Plant
    families: tuple[str, ...]

    def lever(self) -> Lever:
        """A lever with this bug in it."""
        return planted(self.plant, self.class_, self.check)


def planted(plant: Plant, class_: str, check: str) -> Lever:
    """A lever that engages by `plant`."""

    class Planted(Lever):
        name, summary, shortens = NAME, "a planted bug", ("forward", "backward", "data", "optimizer")

        def applies(self, facts: Facts, machine: Machine) -> None:
            return None

        def engage(self, session: Any, settings: Any) -> None:
            session.kept[NAME] = plant(session)

        def release(self, session: Any) -> None:
            undo = session.kept.pop(NAME, None)
            if undo is not None:
                undo()

        def evidence(self, session: Any) -> str:
            return "planted"

    Planted.class_, Planted.check = class_, check  # type: ignore[assignment]
    return Planted()


# -- in the model's call -------------------------------------------------------------------------------------------


def around(change: Callable[[nn.Module, Callable[..., Any], tuple, dict], Any]) -> Plant:
    """Around each outermost call: `change(module, compute, args, kwargs)`."""

    def plant(session: Any) -> Undo:
        for call in session.calls.found:
            call.arounds[NAME] = lambda compute, args, kwargs, m=call.module: change(m, compute, args, kwargs)
        return lambda: [call.arounds.pop(NAME, None) for call in session.calls.found] and None

    return plant


def within(prepare: Callable[[nn.Module], Undo | None]) -> Plant:
    """While each outermost call is computed, the module is changed by `prepare` and then put back."""

    def change(module: nn.Module, compute: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        undo = prepare(module)
        try:
            return compute(*args, **kwargs)
        finally:
            if undo is not None:
                undo()

    return around(change)


def set_meanwhile(pairs: list[tuple[Any, str, Any]]) -> Undo:
    """Set attributes, and return what sets them back."""
    missing = object()
    kept = [(holder, name, vars(holder).get(name, missing)) for holder, name, _ in pairs]
    for holder, name, value in pairs:
        setattr(holder, name, value)

    def undo() -> None:
        for holder, name, value in kept:
            delattr(holder, name) if value is missing else setattr(holder, name, value)

    return undo


def replaced(kinds: tuple[type, ...], forward: Callable[[nn.Module, Any], Any], which: str = "all") -> Plant:
    """The forward of modules of some kinds is another: of all, the `first` or the `last`."""

    def prepare(module: nn.Module) -> Undo:
        found = [m for m in module.modules() if isinstance(m, kinds)]
        found = {"all": found, "first": found[:1], "last": found[-1:]}[which]
        return set_meanwhile([(m, "forward", lambda *a, m=m: forward(m, *a)) for m in found])

    return within(prepare)


def of_parameters(change: Callable[[torch.Tensor], torch.Tensor], which: str = "all") -> Plant:
    """Gradients of parameters are changed as they come: of all, or of the `smallest` parameter."""

    def plant(session: Any) -> Undo:
        parameters = [p for p in session.parameters() if p.requires_grad]
        if which == "smallest":
            parameters = parameters_by_size(session)[:1]
        handles = [p.register_hook(change) for p in parameters]
        return lambda: [handle.remove() for handle in handles] and None

    return plant


def parameters_by_size(session: Any) -> list[torch.Tensor]:
    """Trained parameters, the one with the smallest gradient that is more than rounding first."""
    sized = [(float(p.grad.norm()), p) for p in session.parameters() if p.requires_grad and p.grad is not None]
    whole = sum(size**2 for size, _ in sized) ** 0.5
    return [p for size, p in sorted(sized, key=lambda pair: pair[0]) if size > 1e-4 * whole] or [*session.parameters()]


# -- in the optimizer ----------------------------------------------------------------------------------------------


def options(**change: Callable[[Any], Any]) -> Plant:
    """Options of every parameter group are others."""

    def plant(session: Any) -> Undo:
        groups = [g for o in session.optimizers for g in o.param_groups]
        kept = [(g, {k: g[k] for k in change if k in g}) for g in groups]
        for group, own in kept:
            group.update({k: change[k](value) for k, value in own.items()})
        return lambda: [group.update(own) for group, own in kept] and None

    return plant


def stepping(make: Callable[[torch.optim.Optimizer, Callable[[], Any]], Callable[..., Any]]) -> Plant:
    """The optimizer's `step` is another, made of its own."""

    def plant(session: Any) -> Undo:
        undos = []
        for optimizer in session.optimizers:
            own = type(optimizer).step
            undos.append(set_meanwhile([(optimizer, "step", make(optimizer, lambda o=optimizer, own=own: own(o)))]))
        return lambda: [undo() for undo in undos] and None

    return plant


# -- in what lies between, and in the batches ----------------------------------------------------------------------


def attribute(holder: Any, name: str, make: Callable[[Any], Any]) -> Plant:
    """A function of PyTorch's is another."""

    def plant(session: Any) -> Undo:
        own = vars(holder)[name]
        setattr(holder, name, make(own))
        return lambda: setattr(holder, name, own)

    return plant


def batches(change: Callable[[Any, Iterator[Any]], Iterator[Any]]) -> Plant:
    """Batches of a pass are changed on their way: `change(loader, iterator)`."""

    def plant(session: Any) -> Undo:
        loaders, own = session.loaders, session.loaders.open

        def opened(loader: Any) -> Any:
            found = own(loader)
            found.iterator = change(loader, found.iterator)
            return found

        return set_meanwhile([(loaders, "open", opened)])

    return plant
