"""What was the training thread doing? Records of sampled stacks: by phase, by kind of code, by place.

In and out: records. Imported in the user's process: the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class StackRow:
    """All samples of one phase, one kind and one place.

    Attributes:
        phase: The phase in which they fell.
        kind: `decode` (images, sound, archives), `collate`, `workers` (starting and ending loader processes), `queue`
            (waiting for them), `output` (printing, logging, serialising), or `code`.
        place: `file:line` of the innermost line of the script, or of the library where it has none.
        wall_s: Time that they stand for.
        waiting_s: The part of it in which the thread did not run: it waited for a disk, a network, a lock, a process;
            not for a core, where the kernel tells that.
        num_samples: How many there were.
    """

    phase: str
    kind: str
    place: str
    wall_s: float
    waiting_s: float
    num_samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks:
    """One window's samples.

    Attributes:
        rows: The heaviest first; what is left out stands for little.
        num_steps: Steps of the window.
        wall_s: Its time.
        num_samples: All samples.
        major_faults: Pages that had to be read from a disk because memory did not hold them (any more).
        system_s: CPU time that the kernel spent for the thread: reading pages, writing files, starting processes.
        levers: What was engaged: the samples of a window without workers tell what these would do.
    """

    rows: tuple[StackRow, ...]
    num_steps: int
    wall_s: float
    num_samples: int
    major_faults: int = 0
    system_s: float = 0.0
    levers: Mapping[str, Mapping[str, str | int | float | bool]] = field(default_factory=dict)
    order: int = -1

    def wall_of(self, phase: str) -> float:
        """Seconds of a phase."""
        return sum(r.wall_s for r in self.rows if r.phase == phase)
