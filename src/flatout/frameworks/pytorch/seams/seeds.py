"""Which random numbers does a whole run draw? Those of the script's own seeds, or of others in their place.

In: the number of a run. Out: nothing; what seeds a generator is replaced, and generators that nobody seeds are
seeded. Run 0 has the script's own. Only calls of the script and of libraries count: what PyTorch seeds in its workers
follows from the former, and is left alone.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import numbers
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

OWN = ("torch", "flatout", "numpy")
"""Packages whose own calls are left alone."""


def vary(run: int) -> None:
    """Have this process and its children draw the random numbers of run `run`, 0 or more."""
    numpy = sys.modules.get("numpy")
    places = [(torch, "manual_seed"), (torch.random, "manual_seed"), (random, "seed")]
    places += [(torch.cuda, "manual_seed"), (torch.cuda, "manual_seed_all")]
    if numpy is not None:
        places += [(numpy.random, "seed"), (numpy.random, "default_rng")]
        numpy.random.seed(_mixed("start", run))
    random.seed(_mixed("start", run))  # nobody else may have: without it two runs of one number differ by chance
    torch.manual_seed(_mixed("start", run))
    unseeded = itertools.count()
    for place, name in places:
        setattr(place, name, _varied(getattr(place, name), run, unseeded))


def _varied(seed: Callable[..., Any], run: int, unseeded: Iterator[int]) -> Callable[..., Any]:
    @functools.wraps(seed)
    def varied(*values: Any, **named: Any) -> Any:
        package = str(sys._getframe(1).f_globals.get("__name__", "")).partition(".")[0]
        if package in OWN:
            return seed(*values, **named)
        name = next((name for name in ("seed", "a") if name in named), None)
        value = values[0] if values else named[name] if name is not None else None
        if value is None:  # from the operating system: different in every run otherwise
            other: Any = _mixed(f"unseeded {next(unseeded)}", run)
        elif run > 0 and isinstance(value, (numbers.Number, str, bytes, list, tuple)):
            other = _mixed(value, run)
        else:
            other = value
        if name is not None:
            return seed(**{**named, name: other})
        return seed(other, *values[1:], **named)

    return varied


def _mixed(value: Any, run: int) -> int:
    """A seed of 32 bits that follows from the script's own and the run."""
    return int.from_bytes(hashlib.sha256(f"{run}:{value!r}".encode()).digest()[:4], "little")
