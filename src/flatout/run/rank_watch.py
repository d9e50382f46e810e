"""Which rank hangs, and who waits for whom? Looked at from the parent while the ranks of this machine run.

A rank that waits for another one longer than the time limit is a hang: its stacks and those of all others are taken,
and the run is ended. In: the pages of ranks, how they ended. Out: an error that names ranks, exchanges and lines.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.errors import ScriptError
from flatout.guest.rank_status import RankStatus, page_file, read
from flatout.guest.tracebacks import HERE
from flatout.records.ranks import (
    EXIT_LOST,
    STACKS_SIGNAL,
    RankConfig,
    ends_of,
    leaves_file,
    pid_file,
    refusal_file,
    stacks_file,
)
from flatout.run.child_process import signal_name

LOOK_EVERY_S = 0.5
STACKS_S = 2.0
"""So long a rank may take to write its stacks."""

REFUSED_S = 3.0
"""So long a rank may take to end after a refusal: one by a process that it has started does not end the rank."""

JOINING_S = 60.0
"""A rank that came to no exchange yet is waited for so long at the least: it may be loading all again."""

OUTLIVED_S = 10.0
"""So long other ranks may take to end after rank 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """Ranks that wait for others that do not come.

    Attributes:
        error: What is said of it.
        stacks: For each rank the lines of its main thread, the innermost first.
    """

    error: ScriptError
    stacks: dict[int, list[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanges:
    """What exchanging cost the ranks of this machine.

    Attributes:
        num: Exchanges of a rank.
        least_share: Share of training that each rank spent in exchanges while it computed nothing: their own cost.
        most_share: Of the rank that spent most: what is beyond the least, it waited for another one.
        waited_for: The rank with the least.
        training_s: Seconds from the first divided call to the last exchange.
        memory_bytes: The most memory that a rank was seen to hold at an exchange: of its device, or resident; 0 where
            nothing tells.
        kinds: Of that rank with the least, the share of training for each kind of exchange, the costliest first.
    """

    num: int
    least_share: float
    most_share: float
    waited_for: int
    training_s: float
    memory_bytes: int = 0
    kinds: dict[str, float] = field(default_factory=dict)


class RankWatch:
    """Looks at the ranks of one run."""

    def __init__(self, terms: RankConfig) -> None:
        self._terms = terms
        self._folder = Path(terms.folder)
        self._next_s = 0.0
        self.hang: Hang | None = None

    def look(self) -> bool:
        """Whether the ranks hang: then the run is to be ended."""
        now_s = time.perf_counter()
        if self.hang is not None or now_s < self._next_s:
            return False
        self._next_s = now_s + LOOK_EVERY_S
        self._end_what_outlives_rank_0()
        self._end_what_has_refused()
        stands = self.stands()
        waiting = [rank for rank, stand in stands.items() if stand.waits]
        if (error := self._ended_unnoticed(stands, now_s)) is not None:
            self.hang = Hang(error=error, stacks=self._stacks())
            return True
        if self._some_end():
            return False
        limit_s = self._terms.hang_timeout_s
        if any(rank not in stands or not stands[rank].num_begun for rank in self._terms.of_this_node):
            limit_s = max(limit_s, JOINING_S)
        if not waiting or any(now_s - stand.since_s < limit_s for stand in stands.values()):
            return False
        self.hang = Hang(error=self._told(stands, now_s), stacks=self._stacks())
        return True

    def _end_what_outlives_rank_0(self) -> None:
        """Once rank 0 has ended, nothing that others do is of use."""
        ends = self.ends()
        if 0 not in ends or time.time() - float(ends[0]["unix_s"]) < OUTLIVED_S:
            return
        for rank in self._terms.of_this_node:
            if rank not in ends:
                self._kill(rank)

    def _end_what_has_refused(self) -> None:
        """What has been refused is trained no further."""
        for rank in self._terms.of_this_node:
            with contextlib.suppress(OSError):
                since_s = time.time() - refusal_file(self._folder, rank).stat().st_mtime
                if since_s > REFUSED_S and rank not in self.ends():
                    self._kill(rank)

    def _kill(self, rank: int) -> None:
        with contextlib.suppress(OSError, ValueError):
            os.kill(int(pid_file(self._folder, rank).read_text()), signal.SIGKILL)

    def _ended_unnoticed(self, stands: dict[int, RankStatus], now_s: float) -> ScriptError | None:
        """That a rank ended well before it met the others, who wait and do not learn of it; None where none did."""
        since = time.time() - OUTLIVED_S
        gone = [rank for rank, end in self.ends().items() if rank and not end["code"] and end["unix_s"] < since]
        waiting = [rank for rank, stand in stands.items() if stand.waits and now_s - stand.since_s > OUTLIVED_S]
        return _waits_for(waiting[0], gone[0], stands) if gone and waiting else None

    def _some_end(self) -> bool:
        """Whether a rank is ending, or has just now: those that wait for it learn of it by themselves."""
        ends, lately_s = self.ends(), time.time() - self._terms.hang_timeout_s
        ending = (rank for rank in self._terms.of_this_node if leaves_file(self._folder, rank).exists())
        return any(rank not in ends for rank in ending) or any(end["unix_s"] > lately_s for end in ends.values())

    def stands(self) -> dict[int, RankStatus]:
        """Where each rank stands that has joined."""
        found = {rank: read(page_file(self._folder, rank)) for rank in self._terms.of_this_node}
        return {rank: stand for rank, stand in found.items() if stand is not None}

    def ends(self) -> dict[int, dict[str, Any]]:
        """How ranks have ended."""
        return ends_of(self._folder, self._terms.of_this_node)

    def problem(self) -> ScriptError | None:
        """What ranks did to each other, where that ended the run; None where it did not."""
        return self.ended_early() or self.lost_elsewhere() or self.mismatched()

    def ended_early(self) -> ScriptError | None:
        """That a rank ended well while another one waited for it; None where none did."""
        ends, stands = self.ends(), self.stands()
        lost = [rank for rank, end in ends.items() if end["code"] == EXIT_LOST]
        well = [rank for rank, end in ends.items() if end["code"] == 0]
        if not lost or not well:
            return None
        return _waits_for(lost[0], well[0], stands)

    def exchanges(self) -> Exchanges | None:
        """What exchanges cost the run; None where it did not get to train."""
        stands = {rank: stand for rank, stand in self.stands().items() if stand.first_s}
        if not stands:
            return None
        shares = {r: s.waited_s / max(s.since_s - s.first_s, 1e-9) for r, s in stands.items()}
        waited_for = min(shares, key=lambda rank: shares[rank])
        least = stands[waited_for]
        costliest = sorted(least.kinds.items(), key=lambda kind: -kind[1])
        return Exchanges(
            num=max(stand.num_ended for stand in stands.values()),
            least_share=shares[waited_for],
            most_share=max(shares.values()),
            waited_for=waited_for,
            training_s=max(stand.since_s - stand.first_s for stand in stands.values()),
            memory_bytes=max(stand.memory_bytes for stand in stands.values()),
            kinds={name: took_s / max(least.since_s - least.first_s, 1e-9) for name, took_s in costliest},
        )

    def lost_elsewhere(self) -> ScriptError | None:
        """That a rank of another machine has ended, while those of this one waited for it."""
        ends = self.ends()
        if self._terms.num_nodes == 1 or not ends or any(end["code"] != EXIT_LOST for end in ends.values()):
            return None
        stands = self.stands()
        name = next((stand.name for stand in stands.values()), "an exchange")
        return ScriptError(
            "a rank of another machine has ended",
            cause=f"the ranks of this machine were in an exchange with it: {name}",
            hint="what it had to say stands on its machine",
        )

    def mismatched(self) -> ScriptError | None:
        """That ranks met in one exchange with tensors of different sizes, for which gloo aborts a process."""
        ends, stands = self.ends(), self.stands()
        aborted = [rank for rank, end in ends.items() if end["code"] == -signal.SIGABRT]
        if not any(stands[rank].waits for rank in aborted if rank in stands):
            return None
        told = "; ".join(f"rank {rank}: {stand.num_begun:,} ({stand.name})" for rank, stand in sorted(stands.items()))
        return ScriptError(
            "ranks exchanged what does not fit together",
            cause=f"the exchanges they were in: {told}",
            hint="models or parts of one are called in another order on other ranks, or not at all, or shapes of "
            "outputs depend on values: `--mode replicate`, or one rank",
        )

    def _told(self, stands: dict[int, RankStatus], now_s: float) -> ScriptError:
        stands = {rank: stands.get(rank, RankStatus()) for rank in self._terms.of_this_node}  # some have not joined yet
        most = max(stand.num_begun for stand in stands.values())
        late = sorted(rank for rank, stand in stands.items() if stand.num_begun < most)
        waiting = sorted(rank for rank, stand in stands.items() if stand.num_begun == most and stand.waits)
        first = stands[waiting[0]] if waiting else RankStatus()
        silent_s = min(now_s - stand.since_s for stand in stands.values())
        names = {stand.name for stand in stands.values() if stand.num_begun == most}
        if late:
            wait = "waits" if len(waiting) == 1 else "wait"
            return ScriptError(
                f"{_ranks(late)} did not come for {silent_s:.0f} s, and {_ranks(waiting)} {wait}",
                cause=f"{_ranks(waiting)} {wait} in exchange {most:,} ({first.name}){self._own_place(waiting[0])}; "
                f"rank {late[0]} made {stands[late[0]].num_ended:,}{self._own_place(late[0])}",
                hint="`--hang-timeout` says how long to wait; the stacks of all ranks are above",
            )
        if len(names) > 1:
            return ScriptError(
                f"ranks wait for each other in different exchanges for {silent_s:.0f} s",
                cause="; ".join(f"rank {rank}: {stand.name}" for rank, stand in sorted(stands.items())),
                hint="the script takes other branches on other ranks; run it on one rank",
            )
        others = self._terms.num_nodes > 1
        return ScriptError(
            f"all ranks{' of this machine' * others} wait in the same exchange for {silent_s:.0f} s",
            cause=f"exchange {most:,}, {first.name}: "
            + ("a rank of another machine does not come" if others else "what connects the ranks does not answer"),
            hint="the stacks of all ranks are above" + (", and what the other machines say" if others else ""),
        )

    def _own_place(self, rank: int) -> str:
        """Where a rank is in the script's own code."""
        own = next((frame for frame in self._stacks_of(rank) if "/site-packages/" not in frame), None)
        return "" if own is None else f" at {own}"

    def _stacks(self) -> dict[int, list[str]]:
        return {rank: self._stacks_of(rank) for rank in self._terms.of_this_node}

    def _stacks_of(self, rank: int) -> list[str]:
        """The main thread's lines, as the rank writes them when it is told to."""
        path = stacks_file(self._folder, rank)
        with contextlib.suppress(OSError, ValueError):
            if not path.stat().st_size:
                os.kill(int(pid_file(self._folder, rank).read_text()), STACKS_SIGNAL)
            until_s = time.perf_counter() + STACKS_S
            while time.perf_counter() < until_s:
                lines = _main_thread(path.read_text(encoding="utf-8", errors="replace"))
                if lines:
                    return lines
                time.sleep(0.05)
        return []


def _waits_for(waiting: int, gone: int, stands: dict[int, RankStatus]) -> ScriptError:
    """That one rank waits for another that has ended."""
    stand, ended = stands.get(waiting, RankStatus()), stands.get(gone, RankStatus())
    return ScriptError(
        f"rank {gone} ended, and rank {waiting} waits for it",
        cause=f"rank {waiting} was at exchange {stand.num_begun:,} ({stand.name}), rank {gone} made "
        f"{ended.num_ended:,}: its data or its loop ended earlier",
        hint="what a script reads or draws must not depend on the process or the time; seed it, or run it on one rank",
    )


def _main_thread(text: str) -> list[str]:
    r"""From what `faulthandler` wrote: the frames of the thread that was interrupted, without flatout's own.

    >>> _main_thread('Current thread 0x1 (most recent call first):\n  File "/a/train.py", line 3 in <module>\n')
    ['/a/train.py:3 in <module>']
    """
    found: list[str] = []
    inside = False
    for line in text.splitlines():
        if line.startswith(("Current thread", "Thread")):
            inside = line.startswith("Current thread")
        frame = re.match(r'\s+File "(.+)", line (\d+) in (.+)', line)
        if inside and frame is not None and not frame[1].startswith(HERE):
            found.append(f"{frame[1]}:{frame[2]} in {frame[3]}")
    return found


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def said(code: int) -> str:
    """How a rank ended, in words."""
    return f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
