"""What did a run in the foreground come to? A record only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flatout.errors import FlatoutError
from flatout.records.energy import Energy
from flatout.records.facts import Facts
from flatout.records.trace import Failure, Header
from flatout.run.monitor import Decision
from flatout.run.rank_watch import Exchanges


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run in the foreground came to."""

    num_processes: int = 0
    """Processes that trained, under a launcher."""
    failed_rank: tuple[int, str, str] | None = None
    """The rank that failed first, where that was not rank 0, how, and the end of what it said."""
    ranks_problem: FlatoutError | None = None
    """Why the script could not be run on ranks as one process would run it."""
    exchanges: Exchanges | None = None
    """What exchanging between ranks cost; None where the run was not divided."""
    stacks: dict[int, list[str]] = field(default_factory=dict)
    """Where each rank stood when ranks waited for others that did not come."""
    num_busy: int = 0
    """Pairs of windows of the check that others disturbed."""
    exit_code: int = 0
    """As `subprocess` reports it; negative for a signal."""
    num_steps: int = 0
    began: bool = False
    """Whether a first step was made."""
    ended: bool = False
    """Whether the script said at its end how many steps it made; else there may have been more of them."""
    steps_s: float = 0.0
    """Wall seconds from the first training step to the last."""
    plan_s: list[float] = field(default_factory=list)
    """Step times of the windows under the plan, paired with `plain_s`."""
    plain_s: list[float] = field(default_factory=list)
    released: bool = False
    """Whether the check at the start released the plan because it was slower here."""
    decisions: list[Decision] = field(default_factory=list)
    """What was decided about the plan later on."""
    looking_s: float = 0.0
    """What looking at it later on has cost the run, seconds."""
    learned: Any = None
    """What the run found out about itself (`flatout.trials.learn.Learned`); None where it did not."""
    header: Header | None = None
    engaged: bool = False
    """What was engaged in the end."""
    recorded: bool = True
    """Whether there was a folder for the trace; else the script ran plainly."""
    failures: list[Failure] = field(default_factory=list)
    """What went wrong on our side."""
    raised: Failure | None = None
    """What the script itself raised in the end, where it did."""
    facts: Facts | None = None
    evidence: dict[str, str] = field(default_factory=dict)
    """Lever to proof."""
    missing: dict[str, str] = field(default_factory=dict)
    """Lever to why no effect of it has shown yet."""
    remarks: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    """What is said to who asks for everything."""
    energy: Energy = field(default_factory=Energy)
    """What the machine used meanwhile, from the start of the process to its end."""

    @property
    def out_of_memory(self) -> bool:
        """Whether memory ran out under the levers: in a call that was made again without them, or for the script."""
        ended_so = self.raised is not None and self.raised.out_of_memory and self.is_engaged
        return ended_so or any(failure.out_of_memory for failure in self.failures)

    @property
    def is_engaged(self) -> bool:
        """Whether the plan was at work in the end."""
        changes = [decision.kind for decision in self.decisions if decision.kind != "kept"]
        return self.engaged and (changes[-1] == "engaged again" if changes else not self.released)
