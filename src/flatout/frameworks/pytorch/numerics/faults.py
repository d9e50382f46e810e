"""What is wrong under levers, whatever the error of a replayed gradient says?

Outputs of another type or shape, or other whole numbers in them; NaN at inputs that training meets rarely; a gradient
that is lost for an input, which another model may learn from; gradients of parameters that are no longer the present
ones; gradients that are not cleared or do not add up. Each is tried beside plain, with the captured calls, and
everything is put back. In: captured calls, their plain replays, the replay under levers. Out: what is wrong, in words,
or nothing. Loaded in trials only.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from flatout.frameworks.pytorch.numerics.capture import Capture, CapturedCall
from flatout.frameworks.pytorch.numerics.differences import error_of, reals, square
from flatout.frameworks.pytorch.numerics.replay import Replayed, Replayer
from flatout.frameworks.pytorch.numerics.rounding import SLOW_S, epsilon_of, shaken
from flatout.frameworks.pytorch.seams.trees import map_tensors
from flatout.guest.memory_errors import out_of_memory
from flatout.judge import agreement

LARGE = 1e4
"""How much larger the last example of a batch is made, as a rare input."""

SHIFT = 0.1
"""Standard deviation of how far each number of the parameters is moved, relative to it."""

LEAST_CHANGE = 0.02
"""Gradients that change less than this share of themselves where parameters are moved tell nothing."""

ALONG = 0.5
"""How far along plain's change the lever's gradient has to go. Sound levers go all of it, whatever their rounding,
which has no part in that direction; a copy of all weights that is not renewed goes nowhere."""

INPUT_ERROR = 0.25
"""An input's gradient that is further off than this, and `TIMES` as far as those of parameters, is wrong."""

TIMES = 8.0

SUM_ERROR = 1e-5
"""Relative difference of a sum that was made in another place (its terms are the same to the bit on a CPU)."""

MOST_NOISE = 0.03
"""Up to what relative difference two replays under the levers are believed to differ by the order in which a device
adds: attention in bfloat16 adds parts of its backward in any order, 1e-4 to 1e-3. Source: pytorch#123656."""

NUM_SHAKES = 8
"""Replays that show which whole numbers may change; one at a tie changes in about half of them."""

FEW_SHAKES = 2
"""The same where a replay takes long."""


class Faults:
    """Made while nothing is engaged, so that it knows what plain does; asked under levers, then without them."""

    def __init__(self, replayer: Replayer, capture: Capture, plain: Replayed, again: Replayed) -> None:
        self._replayer = replayer
        self._calls: Sequence[CapturedCall] = capture.present
        self._plain = plain
        self._integers_again = places_changed(again, plain)
        is_quick = plain.took_s <= SLOW_S
        self._rare = _rare_inputs(replayer, self._calls) if is_quick else []
        self._moved = self._of_moved() if is_quick else None
        self._clearings = list(capture.gradient_calls.clearings)
        # ranks would wait for each other, and hooks of the script's own would fire, and may update
        parameters = [p for c in self._calls for p in c.call.module.parameters()]
        is_distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        self._is_hooked = is_distributed or any(map(_has_hooks, parameters))
        self._left = [] if self._is_hooked else self._left_after_clearing()

    def under_levers(self, changed: Replayed) -> str:
        """What is wrong under the engaged levers; empty where nothing. `changed` is the replay under them."""
        if changed.kinds != self._plain.kinds:
            return _other_kind(changed, self._plain)
        if changed.settings != self._plain.settings:
            return "what follows the model is computed under other settings (autocast, default type)"
        if changed.finite and not all(self._replayer.run(calls, levers=True).finite for calls in self._rare):
            return "NaN or infinity at rare inputs (an example of zeros, a large one) at which plain has none"
        return (
            _of_inputs(changed, self._plain)
            or self._of_moved_parameters(changed)
            or ("" if self._is_hooked else self._of_clearing() or self._of_sums(changed))
        )

    # -- whole numbers among the outputs ---------------------------------------------------------------------------

    def of_integers(self, changed: Replayed, class_: str) -> str:
        """What is wrong with outputs of whole numbers; to be asked without levers.

        Whole numbers (classes, masks, counts) have no size: they have to be equal, except in as many places as change
        in plain itself where what goes in moves as far as is believed to be rounding.
        """
        places = places_changed(changed, self._plain)
        if not any(bool(p.any()) for p in places):
            return ""
        believed = [self._integers_again] if any(bool(p.any()) for p in self._integers_again) else []
        if class_ != "exact":
            believed += self._ties(class_)
        return integers_fault(places, believed, [name for name, _ in self._plain.integers])

    def _ties(self, class_: str) -> list[list[torch.Tensor]]:
        """Places that change in plain where numbers move by as many roundings as outputs may be off."""
        coarsest = agreement.most_roundings("outputs", "precision") * torch.finfo(torch.bfloat16).eps
        own = max((epsilon_of(call) for call in self._calls), default=0.0)
        believed = (
            coarsest if class_ != "rounding" else min(coarsest, agreement.most_roundings("outputs", class_) * own)
        )
        seeds = range(FEW_SHAKES if self._plain.took_s > SLOW_S else NUM_SHAKES)
        moved = (self._replayer.run(shaken(self._calls, seed, believed)) for seed in seeds)
        return [places_changed(one, self._plain) for one in moved]

    # -- parameters as they are now --------------------------------------------------------------------------------

    def _moved_calls(self) -> list[CapturedCall]:
        """The calls with parameters that have moved, each time by as much: they are not kept, being a whole model."""
        moved = zip(self._calls, shaken(self._calls, 0, SHIFT), strict=True)
        return [call.changed(former_values=other.former_values) for call, other in moved]

    def _of_moved(self) -> Replayed | None:
        """Plain where parameters have moved; None where that tells nothing.

        A replay under a lever that has just been engaged does not show a copy of the weights: made then, it is still a
        true one.
        """
        found = self._replayer.run(self._moved_calls())
        if not found.finite:
            return None
        found.outputs, found.of_inputs = [], []
        found.make_room(self._replayer.device)
        whole = math.fsum(square(g) for g in self._plain.gradients.values())
        change = _product((found, self._plain), (found, self._plain))
        return found if change > LEAST_CHANGE**2 * whole else None

    def _of_moved_parameters(self, changed: Replayed) -> str:
        if self._moved is None or not changed.finite:
            return ""
        found, plains = self._replayer.run(self._moved_calls(), levers=True), (self._moved, self._plain)
        along = _product((found, changed), plains)
        if found.finite and along < ALONG * _product(plains, plains):
            return (
                "gradients do not follow the parameters: those of an earlier step are at work, or something else is "
                "computed"
            )
        return ""

    # -- clearing and adding up ------------------------------------------------------------------------------------

    def _of_clearing(self) -> str:
        for clearing, plain, left in zip(self._clearings, self._left, self._left_after_clearing(), strict=True):
            if left > plain:
                return f"`{clearing.owner}.zero_grad` leaves gradients of an earlier step in {left - plain} parameters"
        return ""

    def _left_after_clearing(self) -> list[int]:
        """For each of the script's own ways of clearing, in how many parameters something is left after it."""
        found = []
        for clearing in self._clearings:
            target = clearing.target()
            parameters = [] if target is None else list(clearing.parameters_of(target))
            with _gradients_kept(parameters):
                for parameter in parameters:
                    parameter.grad = torch.ones_like(parameter)
                if target is not None:
                    clearing.again(target)
                found.append(sum(p.grad is not None and square(p.grad) > 0 for p in parameters))
        return found

    def _of_sums(self, changed: Replayed) -> str:
        """Replays return gradients; here backward passes add them up in the parameters, as the script's do."""
        modules = {id(c.call.module): c.call.module for c in self._calls}
        parameters: list[Any] = list({p: None for module in modules.values() for p in module.parameters()})
        if not changed.gradients:
            return ""
        with _gradients_kept(parameters):
            for parameter in parameters:
                parameter.grad = None
            try:
                self._replayer.run(self._calls, levers=True, into_parameters=True)
            except RuntimeError as problem:
                if out_of_memory(problem):
                    raise
                return ""  # computed from values that a former update has changed
            summed = {p: reals(p.grad.detach()) for p in parameters if p.grad is not None}
            error = error_of(summed, changed.gradients)
        if not error <= SUM_ERROR:  # as far off as two replays are from each other?
            noise = error_of(self._replayer.run(self._calls, levers=True).gradients, changed.gradients)
            if not error <= agreement.NOISE_FLOOR * min(noise, MOST_NOISE):
                return "gradients of several backward passes do not add up"
        return ""


def places_changed(found: Replayed, plain: Replayed) -> list[torch.Tensor]:
    """For each output of whole numbers, where it is another one."""
    return [
        other != value if other.shape == value.shape else torch.ones_like(value, dtype=torch.bool)
        for (_, other), (_, value) in zip(found.integers, plain.integers, strict=False)
    ]


def integers_fault(
    changed: Sequence[torch.Tensor], believed: Sequence[Sequence[torch.Tensor]], names: Sequence[str]
) -> str:
    """What is wrong with whole numbers that are others in `changed` places; in `believed` replays they may be so."""
    for number, (places, name) in enumerate(zip(changed, names, strict=False)):
        num = int(places.sum())
        ties = torch.zeros_like(places)
        for other in believed:
            ties |= other[number]
        if num > int(ties.sum()):
            told = f", where rounding changes {int(ties.sum())}" if believed else ""
            return f"whole numbers in the output `{name}` are others in {num} of {places.numel()} places{told}"
    return ""


def _of_inputs(changed: Replayed, plain: Replayed) -> str:
    """What is wrong with gradients of inputs: a model's input may be another model's output."""
    most = max(INPUT_ERROR, TIMES * error_of(changed.gradients, plain.gradients))
    for found, own in zip(changed.of_inputs, plain.of_inputs, strict=False):
        if own is None or not square(own) > 0:
            continue
        if found is None or not square(found) > 0:
            return "no gradient any more for an input of a model, which another one may learn from"
        error = error_of({0: found}, {0: own})
        if error > most:
            return f"the gradient of an input of a model is off by {error:.2g} of itself"
    return ""


def _rare_inputs(replayer: Replayer, calls: Sequence[CapturedCall]) -> list[list[CapturedCall]]:
    """The calls with a first example of zeros and a last one ten thousand times as large, as far as plain bears that.

    Extreme in both ways at once, or, where plain does not stay finite then, each way that it bears.
    """

    def bears(changed: list[CapturedCall]) -> bool:
        try:
            return replayer.run(changed).finite
        except Exception:  # noqa: BLE001  a model may refuse such inputs in any way
            return False

    both = _extreme(calls, zero=True, large=True)
    if bears(both):
        return [both]
    each = (_extreme(calls, zero=True, large=False), _extreme(calls, zero=False, large=True))
    return [one for one in each if bears(one)]


def _extreme(calls: Sequence[CapturedCall], *, zero: bool, large: bool) -> list[CapturedCall]:
    """The calls with such inputs; numbers of things get one value throughout in place of zero.

    On a GPU nothing is made large: a value that becomes an index there ends the process, not the call.
    """

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 1 or tensor.shape[0] < 2 or tensor.layout is not torch.strided or tensor.dtype == torch.bool:
            return tensor
        rare = tensor.detach().clone()
        if zero:
            rare[0] = 0 if tensor.is_floating_point() else rare[0].reshape(-1)[0]
        if large and tensor.is_floating_point() and tensor.device.type == "cpu":
            rare[-1] *= LARGE
        return rare.requires_grad_(tensor.requires_grad)

    return [
        c.changed(args=map_tensors(change, c.args, objects=False), kwargs=map_tensors(change, c.kwargs, objects=False))
        for c in calls
    ]


def _product(one: tuple[Replayed, Replayed], other: tuple[Replayed, Replayed]) -> float:
    """The inner product of two changes of gradients, each from the second of a pair to the first."""

    def change(pair: tuple[Replayed, Replayed], parameter: torch.Tensor) -> torch.Tensor:
        found, begun = (side.gradients[parameter].to(parameter.device).double() for side in pair)
        return found - begun

    keys = [p for p in one[1].gradients if all(p in each.gradients for each in (*one, *other))]
    return math.fsum(float(torch.sum(change(one, p) * change(other, p))) for p in keys)


def _other_kind(changed: Replayed, plain: Replayed) -> str:
    for (dtype, shape), (plain_dtype, plain_shape) in zip(changed.kinds, plain.kinds, strict=False):
        if dtype != plain_dtype:
            ours, theirs = (str(one).removeprefix("torch.") for one in (dtype, plain_dtype))
            return f"an output comes as {ours} instead of {theirs}, and so does the loss"
        if shape != plain_shape:
            return f"an output has the shape {list(shape)} instead of {list(plain_shape)}"
    return f"{len(changed.kinds)} outputs instead of {len(plain.kinds)}"


def _has_hooks(parameter: torch.Tensor) -> bool:
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None) or parameter._backward_hooks)


@contextlib.contextmanager
def _gradients_kept(parameters: Sequence[Any]) -> Iterator[None]:
    kept = [(p, p.grad, None if p.grad is None else p.grad.detach().clone()) for p in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient, value in kept:
            if gradient is not None and value is not None and gradient.layout is torch.strided:
                gradient.data.copy_(value)
            parameter.grad = gradient
