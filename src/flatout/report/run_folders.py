"""What does a run that is over hold?

In: the name of a run folder. Out: a `Result` or another record.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flatout.judge import proof, rank_steps, result
from flatout.run import folder

if TYPE_CHECKING:
    from flatout.judge.proof import Proof
    from flatout.judge.rank_steps import RankAnatomy
    from flatout.judge.result import Result


def report(run: str | None = None) -> Result:
    """The result of a run folder; the newest without a name."""
    place = folder.find(folder.working_folder(), run)
    return replace(result.load(place), run=str(place))


def record(run: str | None = None) -> Result | Proof | RankAnatomy:
    """What a run folder holds, of whatever kind; the newest without a name.

    Raises:
        UsageError: There is no such run.
        RecordError: It holds nothing that can be shown, or what it holds cannot be read.
    """
    place = folder.find(folder.working_folder(), run)
    if (place / proof.FILE).exists():
        return replace(proof.load(place), run=str(place))
    if (place / rank_steps.FILE).exists():
        return replace(rank_steps.load(place), run=str(place))
    return report(run)
