"""ranks: the training divided over several processes, by its batch, its parameters, its layers or their features.

Batches, learning rate and what the script prints and saves stay those of one process; sums over a batch are made in
another order. The parent starts the ranks, so nothing is engaged here: see `flatout.frameworks.pytorch.parallel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from flatout.frameworks.lever import Lever
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.ranks import DIVISION, divisions
from flatout.records.trace import Setting


class Ranks(Lever):
    """How many processes train together, and in which mode."""

    name = "ranks"
    parameter = "division"
    pattern = DIVISION
    summary = "the training divided over several processes, e.g. `2:replicate`; tried with `--ranks N`"
    class_ = "rounding"
    shortens: ClassVar = ("forward", "backward", "optimizer")
    toggles = "process"
    check = "updates"
    divides = True

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """Whether it can be divided shows when it is started so."""
        return None

    def settings(self, facts: Facts, machine: Machine) -> tuple[Mapping[str, Setting], ...]:
        """Every division of the ranks that were asked for."""
        return tuple({"division": one} for one in divisions(facts.num_ranks)) if facts.num_ranks > 1 else ()

    def evidence(self, session: Any) -> str | None:
        """The ranks themselves say what they exchanged."""
        return None
