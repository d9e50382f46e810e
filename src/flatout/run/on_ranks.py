"""On how many ranks is a run to go, on which devices? What was typed, and what the levers say.

In: terms, levers. Out: terms, or an error before anything is started.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from flatout.errors import RecordError
from flatout.frameworks.lever import Lever, ranks_of
from flatout.records.ceilings import Machine
from flatout.records.ranks import RankConfig
from flatout.run.choice import Engagement
from flatout.run.rank_start import crowding, devices_for


def decided(
    asked: RankConfig | None, chosen: Engagement, registry: Mapping[str, Lever], named: Path | None,
    hang_timeout_s: float, say: Callable[[str], None],
) -> RankConfig | None:  # fmt: skip
    """The ranks that were typed, else those of the levers; None for one process.

    Args:
        asked: What was typed with `--ranks`; None where nothing was.
        chosen: What is engaged, one lever of which may divide the training.
        registry: All levers by name.
        named: The plan's file, where that was typed: then both have to say the same.
        hang_timeout_s: For ranks that were not typed.
        say: Told what the plan says of it, where it decides or is overruled.

    Raises:
        RecordError: A plan was named that is for another number of ranks.
    """
    planned = ranks_of(chosen.levers, registry)
    if planned is None:
        return asked if asked is not None and asked.num_ranks > 1 else None
    num, mode = planned
    who = "the plan says" if chosen.plan is not None else "you said"
    if asked is None:
        say(f"{num} ranks, {mode}, as {who}")
        return RankConfig(num_ranks=num, mode=mode, hang_timeout_s=hang_timeout_s) if num > 1 else None
    if num != asked.num_ranks:
        if named is not None:
            raise RecordError(
                f"`{named}` is for {num} ranks, not for `--ranks {asked.num_ranks}`",
                cause=f"what it expects, and that it trains the same, were measured on {num} ranks",
                hint=f"leave out `--ranks`, or `flatout tune --ranks {max(asked.num_ranks, 2)}` makes another plan",
            )
        on = "one process" if asked.num_ranks == 1 else f"{asked.num_ranks} ranks"
        say(f"on {on}, as you said: the plan is for {num}")
    elif asked.mode == "auto":
        asked = replace(asked, mode=mode)
    return asked if asked.num_ranks > 1 else None


def devices(terms: RankConfig, machine: Callable[[], Machine], say: Callable[[str], None]) -> tuple[str, ...]:
    """The GPU of each rank of this machine, where there are GPUs.

    Raises:
        UsageError: There are fewer than ranks.
    """
    num = len(terms.of_this_node)
    if (crowded := crowding(num, machine())) is not None:
        say(crowded)
    return devices_for(num, machine(), os.environ.get("CUDA_VISIBLE_DEVICES"))
