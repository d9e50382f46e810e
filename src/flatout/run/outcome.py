"""What did a run in the foreground come to? A record only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flatout.errors import FlatoutError
from flatout.records.energy import Energy
from flatout.records.facts import Facts
from flatout.records.trace import Failure, Header
from flatout.run.guard import Decision
from flatout.run.rank_watch import Exchanges


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run in the foreground came to.

    Attributes:
        exit_code: As `subprocess` reports it; negative for a signal.
        num_steps: Training steps made.
        steps_s: Wall seconds from the first to the last of them.
        plan_s: Step times of the windows under the plan, paired with `plain_s`.
        plain_s: Step times of the windows without it.
        released: Whether the check at the start released the plan because it was slower here.
        decisions: What was decided about the plan later on.
        looking_s: What looking at it later on has cost the run, seconds.
        learned: What the run found out about itself (`flatout.trials.learn.Learned`); None where it did not.
        header: Of the process that trains.
        engaged: What was engaged in the end.
        failures: What went wrong on our side.
        raised: What the script itself raised in the end, where it did.
        facts: What the script turned out to do.
        evidence: Lever to proof.
        remarks: What the process had to say in the end.
        num_processes: Processes that trained, under a launcher.
        failed_rank: The rank that failed first, where that was not rank 0, how, and the end of what it said.
        ranks_problem: Why the script could not be run on ranks as one process would run it.
        exchanges: What exchanging between ranks cost; None where the run was not divided.
        stacks: Where each rank stood when ranks waited for others that did not come.
        energy: What the machine used meanwhile, from the start of the process to its end.
    """

    num_processes: int = 0
    failed_rank: tuple[int, str, str] | None = None
    ranks_problem: FlatoutError | None = None
    exchanges: Exchanges | None = None
    stacks: dict[int, list[str]] = field(default_factory=dict)
    num_busy: int = 0
    """Pairs of windows of the check that others disturbed."""
    exit_code: int = 0
    num_steps: int = 0
    began: bool = False
    """Whether a first step was made."""
    ended: bool = False
    """Whether the script said at its end how many steps it made; else there may have been more of them."""
    steps_s: float = 0.0
    plan_s: list[float] = field(default_factory=list)
    plain_s: list[float] = field(default_factory=list)
    released: bool = False
    decisions: list[Decision] = field(default_factory=list)
    looking_s: float = 0.0
    learned: Any = None
    header: Header | None = None
    engaged: bool = False
    recorded: bool = True
    """Whether there was a folder for the trace; else the script ran plainly."""
    failures: list[Failure] = field(default_factory=list)
    raised: Failure | None = None
    facts: Facts | None = None
    evidence: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    """What is said to who asks for everything."""
    energy: Energy = field(default_factory=Energy)

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
