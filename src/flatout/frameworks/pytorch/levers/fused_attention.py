"""fused_attention: compute attention that the script writes by hand as one operation.

A product (`@`, `matmul`, `bmm`, `einsum`), a scale, one mask, a softmax and a product become
`scaled_dot_product_attention`, which keeps no scores. It is found while the model computes, and whatever else a script
does with scores or weights gives what plain gives. Not fused: dropout, which would draw other random numbers; two
masks; a bias that is trained or of another type than the scores; weights that are read. On a CPU a causal mask is
recognised and half of the work left out; on a GPU masks are not read, for that would wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from flatout.frameworks.lever import Lever
from flatout.records.ceilings import Machine
from flatout.records.facts import NOT_LOOKED_AT, Facts
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session


class FusedAttention(Lever):
    """`scaled_dot_product_attention` in the place of products around a softmax."""

    name = "fused_attention"
    summary = "attention written by hand computed by scaled_dot_product_attention"
    class_ = "rounding"
    shortens: ClassVar = ("forward", "backward")
    check = "gradients"
    partners: ClassVar = ("bf16",)
    conflicts: ClassVar = ("compile",)  # which traces the products, and looks for such patterns itself

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """Scripts whose model takes a softmax of its own."""
        if facts.attention is None:
            return NOT_LOOKED_AT
        if any(model.compiled for model in facts.main_models):
            return "the script compiles its model itself"
        if facts.distributed:
            return "distributed wrappers put functions of their own around the model"
        if facts.several_threads:
            return "several threads call the model"
        return None if facts.softmax else "no softmax was seen in the model"

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Put products off inside each outermost call, and where a backward computes a part of it again."""
        from flatout.frameworks.pytorch.seams.deferred_attention import DeferredProducts
        from flatout.frameworks.pytorch.seams.regions import Region

        products = DeferredProducts(session.calls.thread)
        switch = partial(setattr, products, "on")
        region = Region(lambda: False, switch, partial(switch, True))
        session.kept[self.name] = products, region
        for call in session.calls.found:
            call.arounds[self.name] = region.call

    def release(self, session: Session) -> None:
        """Products are computed where the script has them."""
        for call in session.calls.found:
            call.arounds.pop(self.name, None)
        if self.name in session.kept:
            products, region = session.kept.pop(self.name)
            region.end()
            products.remove()

    def evidence(self, session: Session) -> str | None:
        """How many were fused; else why the script's were not."""
        products, _ = session.kept[self.name]
        reasons = {*products.reasons.values()} - {""}
        if reasons and not products.num_fused:
            session.unavailable[self.name] = ", ".join(sorted(reasons))
        return f"{products.num_fused:,} times computed as one operation" if products.num_fused else None
