"""What should be views of sharded tensors are copies: how does what is written into them reach the parts?

A copy remembers by which views it came from its tensor. Where it is written to, the whole is gathered, the same views
are taken of it and written to, and every rank keeps its part. In: a function of PyTorch's, called with such copies.
Out: what one process gets.
"""

from __future__ import annotations

from typing import Any

import torch

from flatout.frameworks.pytorch.parallel.answers import SAME_PART, VIEWS, answer, flat, whole_args
from flatout.frameworks.pytorch.parallel.sharded import Copied, Sharded, copied, name_of, whole_of, writes
from flatout.frameworks.pytorch.seams.trees import tensors_of


def answer_of_copies(func: Any, args: Any, kwargs: Any) -> Any:
    """One question; the machinery by which it came here is off."""
    first = args[0] if args else None
    for one in flat((args, kwargs)):
        if isinstance(one, Copied) and one.seen != one.path.base._version:
            _write(one, None, (), {})
    if isinstance(first, Copied) and writes(func):
        return _write(first, func, whole_args(args[1:]), {key: whole_args(value) for key, value in kwargs.items()})
    if any(isinstance(one, Sharded) for one in flat((args, kwargs))):
        return answer(func, args, kwargs)
    found = func(*args, **kwargs)
    if isinstance(first, Copied) and (name_of(func) in VIEWS or func in SAME_PART):
        copied(found, first.path.base, (*first.path.steps, (func, args[1:], kwargs, 0)))
    return found


Copied.answer = staticmethod(answer_of_copies)


def _write(copy: Copied, func: Any, args: Any, kwargs: Any) -> Copied:
    """Write where the copy came from, and into the copy; without a function look there once more."""
    base, cut = copy.path.base, copy.path.base.portions
    with torch.no_grad():
        view = whole = whole_of(base).detach()
        for step, rest, words, place in copy.path.steps:
            view = tensors_of(step(view, *rest, **words))[place]
        if func is not None:
            func(view, *args, **kwargs)
            base.detach().copy_(cut.mine(whole))
        copy.data.copy_(view)
    copy.seen = base._version
    return copy
