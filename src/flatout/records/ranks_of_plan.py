"""On how many ranks does a plan have a script run, and why? A part of a plan. In and out: a record.

Imported in the user's process: the standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flatout.records.ranks import MODES


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRanks:
    """On how many ranks the script is fastest, and the measurement that justifies it.

    Attributes:
        num: The world, on one machine.
        mode: How the work is divided, a word that `--mode` takes.
        ratio: How many times as fast as one process under the same levers.
        ratio_low: Lower end of its 95 % interval.
        ratio_high: Upper end of its 95 % interval.
        num_pairs: Pairs of runs behind it.
        agreement: The class of what ranks change, and the numbers behind their agreement.
        created: When it was measured: ISO 8601, UTC, to the second.
        run: The run folder.
    """

    num: int
    mode: str
    ratio: float
    ratio_low: float
    ratio_high: float
    num_pairs: int
    agreement: str
    created: str
    run: str = ""

    @property
    def head(self) -> str:
        """What it comes to, in one line."""
        return f"{self.num} ranks, {self.mode}: {self.ratio:.2f}x [{self.ratio_low:.2f}, {self.ratio_high:.2f}]"

    def fault(self) -> str:
        """What no measurement gives, or empty."""
        if self.num < 2:
            return f"`ranks.num` is {self.num}: one process has no table of ranks"
        if self.mode not in MODES:
            return f"`ranks.mode` is `{self.mode}`, not one of {', '.join(MODES)}"
        return "" if 0 < self.ratio < math.inf else f"`ranks.ratio` is {self.ratio}: no measurement gives that"
