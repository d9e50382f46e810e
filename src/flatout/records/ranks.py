"""What do the parent, the launcher and the ranks of a run agree on? Names of files, exit codes and terms.

In: a run folder. Out: where who writes what. Standard library only: the launcher and the ranks import it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

EXIT_REFUSED = 113
"""A rank ends so where the script cannot be divided; `refusal-N.json` says why."""

EXIT_LOST = 114
"""A rank ends so because another one has ended."""

EXIT_ANEW = 115
"""A rank above 0 ends so before training, to be started again once rank 0 trains."""

STACKS_SIGNAL = signal.SIGRTMAX - 7
"""Has a rank write its stacks; scripts have no handlers of their own for signals of that kind."""

ELASTIC_LOGS = "elastic"
"""A folder that the launcher needs; nothing is written to it."""

MEETING = "meeting-failed"
"""Written by the launcher where machines did not find each other: why."""

REPLICATED_MODEL_MODES = ("replicate+tensor", "replicate+pipeline")
"""Combinations: groups of ranks, each of which computes a part of the batch as the second half of the name says."""

MODEL_MODES = ("tensor", "pipeline", *REPLICATED_MODEL_MODES)
"""Modes in which ranks compute one batch together, each its share of the model."""

GROUPED_MODES = ("hybrid", *REPLICATED_MODEL_MODES)
"""Modes in which ranks are in groups (`sharing_ranks`), which hold copies of each other."""

SHARDED_MODES = ("shard", "hybrid", *MODEL_MODES)
"""Modes in which a rank holds parts of parameters. In the first two those are rows, shared by all or by a machine."""

MODES = ("auto", "replicate", *SHARDED_MODES)
"""How a model and its batch are divided."""

SUMMING_MODES = ("auto", "replicate", *REPLICATED_MODEL_MODES, "shard", "hybrid")
"""Modes in which gradients are summed at all, but for few."""

DIVISION = rf"[1-9][0-9]{{0,4}}(:({'|'.join(map(re.escape, MODES))}))?"
"""How ranks and their mode are written: `2:shard`, or `2` where the mode is to be chosen."""


def division(word: object) -> tuple[int, str]:
    """How many ranks, and in which mode.

    >>> division("2:shard"), division(4)
    ((2, 'shard'), (4, 'auto'))
    """
    num, _, mode = str(word).partition(":")
    return int(num), mode or "auto"


def divisions(num_ranks: int) -> list[str]:
    """What is worth trying on up to so many ranks: all of them and halves, in each mode that differs from the others.

    >>> divisions(2)
    ['2:replicate', '2:shard', '2:tensor', '2:pipeline']
    >>> [one for one in divisions(6) if one.endswith(":replicate")]
    ['6:replicate', '3:replicate']
    """
    numbers = [num_ranks]
    while numbers[-1] % 2 == 0 and numbers[-1] > 2:
        numbers.append(numbers[-1] // 2)
    return [f"{num}:{mode}" for num in numbers for mode in MODES if mode != "auto" and _fits(num, mode)]


def _fits(num_ranks: int, mode: str) -> bool:
    """Whether a mode is something of its own: on one machine groups need a number that has a divisor."""
    return mode not in GROUPED_MODES or sharing_ranks(num_ranks, num_ranks) > 1


SUM_OF_GRADIENTS, SUM_OVER_GROUPS = "sum of gradients", "gradients of groups of ranks"
"""What exchanges are called that sum gradients: what levers of communication can shorten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """How a run is divided.

    Attributes:
        num_ranks: The world.
        mode: One of `MODES`.
        folder: The run folder on this machine.
        hang_timeout_s: After so many seconds without a rank the others end.
        num_nodes: Machines.
        node_rank: The number of this one, from 0.
        rdzv_endpoint: `HOST:PORT` of machine 0, where machines meet; empty on one machine.
    """

    num_ranks: int
    mode: str = "auto"
    folder: str = ""
    hang_timeout_s: float = 300.0
    num_nodes: int = 1
    node_rank: int = 0
    rdzv_endpoint: str = ""

    @property
    def of_this_node(self) -> range:
        """The ranks of this machine.

        >>> RankConfig(num_ranks=8, num_nodes=2, node_rank=1).of_this_node
        range(4, 8)
        """
        num = self.num_ranks // self.num_nodes
        return range(self.node_rank * num, (self.node_rank + 1) * num)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Which rank a process is.

    Attributes:
        rank: Its number in the world, from 0.
        local: Its number on this machine.
        world: How many there are.
        local_world: How many there are on this machine.
        host: Where ranks meet.
        port: The port there.
    """

    rank: int
    local: int
    world: int
    local_world: int
    host: str
    port: int

    @classmethod
    def of(cls, words: str) -> RankPlace:
        """From what `enter_rank.py` tells: process id, rank, local rank, world, local world, host, port.

        >>> RankPlace.of("77 1 1 4 4 localhost 29500").rank
        1
        """
        _, rank, local, world, local_world, host, port = words.split()
        return cls(
            rank=int(rank), local=int(local), world=int(world), local_world=int(local_world), host=host, port=int(port)
        )


def sharing_ranks(world: int, local_world: int) -> int:
    """How many ranks make up a group, where groups hold copies of each other: those of a machine; on one, half of them.

    >>> sharing_ranks(8, 4), sharing_ranks(4, 4), sharing_ranks(2, 2)
    (4, 2, 1)
    """
    if local_world < world:
        return local_world
    return next(width for width in range(world // 2, 0, -1) if world % width == 0)


def _of_rank(name: str) -> Callable[[Path, int], Path]:
    """Where a rank's file of that name lies in the run folder."""
    return lambda folder, rank: folder / name.format(rank)


ended_file = _of_rank("ended-{}.json")
"""Written when a rank has ended: `code`, `unix_s`."""

refusal_file = _of_rank("refusal-{}.json")
"""Written by a rank that refuses: `error`, `cause`, `hint`."""

trains_file = _of_rank("trains-{}")
"""Made when a rank begins to train: what it sets up is there."""

leaves_file = _of_rank("leaves-{}")
"""Made when a rank begins to end: it comes to no exchange any more."""

anew_file = _of_rank("anew-{}.json")
"""Written by a rank that is to begin anew: paths to `hide` from it, which rank 0 has made."""

errors_file = _of_rank("errors-rank-{}.log")
"""What a rank above 0 has written to its stderr."""

pid_file = _of_rank("pid-{}")
"""The process id of a rank."""

stacks_file = _of_rank("stacks-{}")
"""Where a rank writes its stacks when it is told to."""


def refuse(terms: RankConfig, rank: int, error: str, *, cause: str, hint: str) -> NoReturn:
    """End this rank, and with it the run: it could only be trained wrongly."""
    found = {"error": error, "cause": cause, "hint": hint}
    refusal_file(Path(terms.folder), rank).write_text(json.dumps(found), encoding="utf-8")
    leave(EXIT_REFUSED)


def leave(code: int) -> NoReturn:
    """End this process at once: nothing of the script's runs any more."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def was_ended(ends: Mapping[int, Mapping[str, Any]]) -> bool:
    """Whether rank 0 was ended because another one had failed before, and so did not fail by itself.

    >>> was_ended({0: {"code": -15, "unix_s": 9.0}, 1: {"code": 1, "unix_s": 1.0}})
    True
    """
    first = ends.get(0)
    if first is None or first["code"] not in (-signal.SIGTERM, -signal.SIGKILL):
        return False
    return any(rank and failed_by_itself(end) and end["unix_s"] < first["unix_s"] for rank, end in ends.items())


def failed_by_itself(end: Mapping[str, Any]) -> bool:
    """Whether a rank failed for a reason of its own."""
    return end["code"] not in (0, EXIT_LOST, EXIT_REFUSED)


def ends_of(folder: Path, ranks: Iterable[int]) -> dict[int, dict[str, Any]]:
    """How those of the ranks have ended that have."""
    found = {rank: read_json(ended_file(folder, rank)) for rank in ranks}
    return {rank: end for rank, end in found.items() if end is not None}


def read_json(path: Path) -> dict[str, Any] | None:
    """What a rank has written; None where it has not."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None
