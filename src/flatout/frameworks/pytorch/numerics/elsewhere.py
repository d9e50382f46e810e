"""Does a lever compute with the parameters as they are now, and does it hand gradients on to whatever came before?

A replay under a lever that has just been engaged does not tell: a copy of the weights that was made then is still a
true one. So the calls are replayed once more with parameters that have moved, plain and under the engaged levers, and
the lever's gradient has to go where plain's goes. And a model's input may be another model's output: a gradient that is
lost there shows in no parameter of this one. In: captured calls and the engaged levers. Out: what is wrong, in words,
or nothing. Loaded in trials only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from flatout.frameworks.pytorch.numerics.capture import CapturedCall
from flatout.frameworks.pytorch.numerics.differences import Gradients, relative_error, square
from flatout.frameworks.pytorch.numerics.replay import Replayed, Replayer
from flatout.frameworks.pytorch.numerics.rounding import shaken

MOVED = 0.1
"""Standard deviation of how far each number of the parameters is moved, relative to it."""

LEAST_MOVED = 0.02
"""Gradients that move less than this share of themselves tell nothing."""

ALONG = 0.5
"""How far along plain's way the lever's gradient has to go. Sound levers go all of it, whatever their rounding, which
has no part in that direction; a copy of all weights that is not renewed goes nowhere."""

NOT_FOLLOWED = (
    "gradients do not follow the parameters: those of an earlier step are at work, or something else is computed"
)

INPUT_ERROR = 0.25
"""An input's gradient that is further off than this, and `BESIDE` times as far as those of parameters, is wrong."""

BESIDE = 8.0


class Elsewhere:
    """What plain does with parameters that have moved, to be held against what a lever does."""

    def __init__(self, replayer: Replayer, calls: Sequence[CapturedCall], first: Replayed) -> None:
        self._replayer = replayer
        moved = shaken(calls, 0, MOVED)
        self._calls = [c.changed(former_values=m.former_values) for c, m in zip(calls, moved, strict=True)]
        found = replayer.run(self._calls)
        way = _way(found.gradients, first.gradients)
        length = _product(way, way)
        whole = math.fsum(square(g) for g in first.gradients.values())
        tells = found.finite and length > LEAST_MOVED**2 * whole
        self._way, self._length = (way, length) if tells else ({}, 0.0)

    def fault(self, changed: Replayed) -> str:
        """What the engaged levers do wrong; empty where nothing. `changed` is the replay where parameters are now."""
        if not self._way or not changed.finite:
            return ""
        found = self._replayer.run(self._calls, levers=True)
        if found.finite and _product(_way(found.gradients, changed.gradients), self._way) < ALONG * self._length:
            return NOT_FOLLOWED
        return ""


def inputs_fault(changed: Replayed, first: Replayed) -> str:
    """What is wrong with the gradients of inputs; empty where nothing is."""
    most = max(INPUT_ERROR, BESIDE * relative_error(changed.gradients, first.gradients))
    for found, plain in zip(changed.of_inputs, first.of_inputs, strict=False):
        if plain is None or not square(plain) > 0:
            continue
        if found is None or not square(found) > 0:
            return "no gradient any more for an input of a model, which another one may learn from"
        error2 = square(found.double() - plain.double()) if found.shape == plain.shape else math.inf
        if error2 > most**2 * square(plain):
            return f"the gradient of an input of a model is off by {math.sqrt(error2 / square(plain)):.2g} of itself"
    return ""


def _way(found: Gradients, begun: Gradients) -> Gradients:
    return {p: found[p].double() - g.double() for p, g in begun.items() if p in found}


def _product(one: Gradients, other: Gradients) -> float:
    return math.fsum(float(torch.sum(one[p] * other[p])) for p in one if p in other)
