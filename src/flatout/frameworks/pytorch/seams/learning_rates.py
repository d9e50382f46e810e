"""How does a learning rate follow where an update is made of more items, and how is that unseen by the script?

With k times the items the rate of SGD is k times, that of Adam and its kin the square root of k times as large. It
stands in the optimizer's groups while it updates, and the script's own before and after. In: an optimizer and a factor.
Out: rates changed, and put back.

Source: Goyal et al., "Accurate, Large Minibatch SGD" (2017), for SGD; Malladi et al., "On the SDEs and Scaling Rules
for Adaptive Gradient Algorithms" (2022), for Adam and RMSprop, without what they change in betas and epsilon.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer

RULES = {
    "SGD": 1.0,
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop"), 0.5),
}
"""By an optimizer's class: the power of the ratio of items in an update with which its learning rate goes."""

Changed = tuple[dict[str, Any], Any, Any]
"""A group of parameters, its rate, and the one that stands in its place during an update."""


def without_rule(names: Iterable[str]) -> str | None:
    """That no rule is known for the learning rate of some of these classes of optimizers; None where it is for all."""
    unknown = [name for name in names if name not in RULES]
    return f"no rule is known for the learning rate of `{unknown[0]}`" if unknown else None


def scale(optimizer: Optimizer, factor: float, *, but: Collection[int] = ()) -> list[Changed]:
    """Multiply the rates of an optimizer's groups, but for those with these `id`s; what `restore` is to be given."""
    changed: list[Changed] = []
    for group in optimizer.param_groups if factor != 1.0 else ():
        if id(group) not in but and "lr" in group:
            rate = group["lr"]
            group["lr"] = rate * factor
            changed.append((group, rate, group["lr"]))
    return changed


def restore(changed: Iterable[Changed]) -> None:
    """The rates are the script's, unless somebody has set one meanwhile."""
    for group, rate, in_place in changed:
        if group["lr"] is in_place:
            group["lr"] = rate
