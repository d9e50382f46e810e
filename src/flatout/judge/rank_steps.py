"""Where does each rank's step go? The phases of every rank side by side, communication among them. A record."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.judge.anatomy import Anatomy
from flatout.records import files
from flatout.records.as_json import to_json
from flatout.records.ceilings import Machine

FILE = "rank-anatomy.json"

COMMUNICATION = "communication"

WAITING = ("forward", "backward", "optimizer", "unattributed", COMMUNICATION)
"""Phases within which a rank may wait for others."""

WAITED_FOR = 0.1
"""A rank that communicates for so much less of the step than another one is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAnatomy:
    """The mean step of each rank, taken apart.

    Attributes:
        script: Its file or module name.
        typed: The script and its arguments as one would type them again.
        num_ranks: The world.
        mode: How the work was divided; of ranks that a launcher starts the launcher's name.
        machine: Where.
        framework: `pytorch`.
        framework_version: Its version.
        ranks: The anatomy of each rank. Communication is what was waited for while nothing was computed.
        kinds: Of the rank that communicated least, the share of training for each kind of exchange, costliest first.
        peak_memory_bytes: The most that a rank was seen to hold; None where nothing tells.
        num_left_out: First steps that are not counted.
        created: ISO 8601, UTC.
        run: The run folder.
        is_launched: Whether the script divides its work itself, so that its exchanges are within its other phases.
        took_s: Wall seconds of all of it.
    """

    script: str
    typed: str
    num_ranks: int
    mode: str
    machine: Machine
    framework: str
    framework_version: str
    ranks: tuple[Anatomy, ...]
    kinds: dict[str, float] = field(default_factory=dict)
    peak_memory_bytes: int | None = None
    num_left_out: int = 0
    created: str = ""
    run: str = ""
    is_launched: bool = False
    took_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a step: that of the slowest rank."""
        return max(one.step_s for one in self.ranks)

    @property
    def phases(self) -> list[str]:
        """All phases, those that take most on any rank first; what no phase claims is the last."""
        names = {name for one in self.ranks for name in one.phases_s}
        return sorted(names, key=lambda name: (name == "unattributed", -max(self.seconds(name))))

    def seconds(self, phase: str) -> list[float]:
        """Seconds of a phase on each rank."""
        return [one.phases_s.get(phase, 0.0) for one in self.ranks]

    def shares(self, phase: str) -> list[float]:
        """Its share of the step on each rank."""
        return [one.phases_s.get(phase, 0.0) / one.step_s for one in self.ranks]

    @property
    def waited_for(self) -> int | None:
        """The rank that the others wait for; None where they communicate about as long."""
        shares = self.shares(COMMUNICATION)
        return shares.index(min(shares)) if max(shares) - min(shares) > WAITED_FOR else None

    @property
    def longer_there(self) -> str | None:
        """What takes longer on the rank that is waited for than on the others; None where none is, or nothing does."""
        rank = self.waited_for
        if rank is None:
            return None
        beyond = {name: _beyond(self.seconds(name), rank) for name in self.phases if name != COMMUNICATION}
        worst = max(beyond, key=lambda name: beyond[name], default=None)
        return worst if worst is not None and beyond[worst] > 0 else None

    @property
    def uneven(self) -> tuple[int, str] | None:
        """A rank that takes longer than the others for something in which nobody waits, and for what; None without."""
        found = [
            (_beyond(self.seconds(name), rank), rank, name)
            for name in self.phases
            if name not in WAITING
            for rank in range(self.num_ranks)
        ]
        beyond, rank, name = max(found, default=(0.0, 0, ""))
        return (rank, name) if beyond > WAITED_FOR * self.step_s else None


def _beyond(seconds: Sequence[float], rank: int) -> float:
    others = [s for place, s in enumerate(seconds) if place != rank]
    return seconds[rank] - sum(others) / len(others) if others else 0.0


def summary_of(found: RankAnatomy) -> dict[str, Any]:
    """What `why --ranks --json` prints."""
    value: dict[str, Any] = to_json(
        {
            "ranks": found.num_ranks, "mode": found.mode, "step_s": found.step_s,
            "communication_share": min(found.shares(COMMUNICATION)), "exchange_kinds": found.kinds,
            "waited_for": found.waited_for, "launched": found.is_launched, "peak_memory_bytes": found.peak_memory_bytes,
            "anatomies": [dataclasses.asdict(one) for one in found.ranks], "run": found.run,
        }
    )  # fmt: skip
    return value


def load(folder: Path) -> RankAnatomy:
    """What a run folder holds.

    Raises:
        RecordError: There is none, or it cannot be read.
    """
    return files.read(
        RankAnatomy, folder / FILE, missing=f"no steps of ranks in `{folder}`",
        hint="`flatout why --ranks N SCRIPT` takes some apart",
    )  # fmt: skip
