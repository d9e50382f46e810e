"""On how many ranks is a run to go, on which devices? What was typed, and what the plan says.

In: terms, a plan. Out: terms, or an error before anything is started.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from flatout.errors import RecordError, UsageError
from flatout.records.ceilings import Machine
from flatout.records.plan import Plan
from flatout.records.ranks import Terms
from flatout.run.rank_start import crowding, devices_for


def decided(
    asked: Terms | None, plan: Plan | None, named: Path | None, hang_timeout_s: float, say: Callable[[str], None]
) -> Terms | None:
    """The ranks that were typed, else the plan's; None for one process.

    Args:
        asked: What was typed; None where nothing was.
        plan: The plan that is engaged.
        named: Its file, where that was typed: then both have to say the same.
        hang_timeout_s: For the plan's ranks.
        say: Told what the plan says of it, where it decides or is overruled.

    Raises:
        RecordError: A plan was named that is for another number of ranks.
    """
    planned = plan.ranks if plan is not None else None
    if asked is None:
        if planned is None:
            return None
        say(f"{planned.num} ranks, {planned.mode}, as the plan says: {planned.ratio:.2g}x expected of them")
        return Terms(num_ranks=planned.num, mode=planned.mode, hang_timeout_s=hang_timeout_s)
    if planned is not None and planned.num != asked.num_ranks:
        if named is not None:
            raise RecordError(
                f"`{named}` is for {planned.num} ranks, not for `--ranks {asked.num_ranks}`",
                cause=f"{planned.ratio:.2g}x, and that it trains the same, were measured on {planned.num} ranks",
                hint=f"leave out `--ranks`, or `flatout tune --ranks {max(asked.num_ranks, 2)}` makes another plan",
            )
        say(f"on {_ranks(asked.num_ranks)}, as you said: the plan is for {planned.num}")
    elif planned is not None and asked.mode == "auto":
        asked = replace(asked, mode=planned.mode)
    return asked if asked.num_ranks > 1 else None


def _ranks(num: int) -> str:
    return "one process" if num == 1 else f"{num} ranks"


def check(asked: Terms | None, *, learn: bool, recheck: bool) -> None:
    """Make sure that nothing was asked for that ranks cannot do.

    Raises:
        UsageError: Something was.
    """
    if asked is None or asked.num_ranks == 1:
        return
    for option, given in (("--learn", learn), ("--recheck", recheck)):
        if given:
            raise UsageError(
                f"`--ranks` and `{option}` cannot be combined",
                cause="levers are tried in one process, where no other rank waits for it",
                hint="`flatout tune` first, then `flatout run --ranks`",
            )


def devices(terms: Terms, machine: Callable[[], Machine], say: Callable[[str], None]) -> tuple[str, ...]:
    """The GPU of each rank of this machine, where there are GPUs.

    Raises:
        UsageError: There are fewer than ranks.
    """
    num = len(terms.of_this_node)
    if (crowded := crowding(num, machine())) is not None:
        say(crowded)
    return devices_for(num, machine(), os.environ.get("CUDA_VISIBLE_DEVICES"))
