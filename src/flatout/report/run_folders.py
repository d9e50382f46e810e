"""What can be done with runs that are over? Show one, hold two beside each other.

In: names of run folders. Out: a `Result` or another record, or a `Contrast`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from flatout.errors import UsageError
from flatout.judge import contrast as contrasts
from flatout.judge import proof, rank_steps, result, trace_windows
from flatout.run import folder

if TYPE_CHECKING:
    from flatout.judge.contrast import Contrast
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


def contrast(first: str, second: str) -> Contrast:
    """The results of two run folders side by side: what changed, what did not, and what differs besides time.

    Raises:
        UsageError: There is no such run, or both are the same.
        RecordError: One of them holds no result.
    """
    places = [folder.find(folder.working_folder(), name) for name in (first, second)]
    if places[0].resolve() == places[1].resolve():
        raise UsageError(
            f"`{first}` and `{second}` are the same run",
            cause="a run does not differ from itself",
            hint="`ls .flatout` lists the others",
        )
    one, other = (report(str(place)) for place in places)
    return contrasts.contrast(one, other, *(trace_windows.gather(place) for place in places))
