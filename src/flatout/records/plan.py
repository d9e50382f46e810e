"""Which levers were tried, what did that bring, and what was chosen?

`Candidate` is a set of levers with settings, `Trial` what measuring it beside the baseline gave, `Plan` the choice with
what justifies it. Its file is in `flatout.records.plan_file`, the levers' contract in `flatout.frameworks.lever`.
In: facts and measurements. Out: records.

This module is imported in the user's process: it needs the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from flatout.records.ceilings import Machine
from flatout.records.trace import Levers, Setting

#: What a lever may change, from nothing to the model's function; each class includes those before it.
LeverClass = Literal["exact", "rounding", "precision", "statistical", "lossy", "semantics"]
CLASSES: tuple[LeverClass, ...] = get_args(LeverClass)

DEFAULT_CLASS: LeverClass = "precision"
"""How far levers go where nobody says more."""

Outcome = Literal["faster", "slower", "no difference", "inconclusive", "screened", "disagrees", "failed", "ruled out"]


def allows(accepted: str, wanted: str) -> bool:
    """Whether `--accept accepted` admits a lever of class `wanted`.

    >>> allows("precision", "rounding"), allows("exact", "rounding")
    (True, False)

    Raises:
        ValueError: One of them is no class.
    """
    return CLASSES.index(wanted) <= CLASSES.index(accepted)


Key = tuple[tuple[str, tuple[tuple[str, Setting], ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A set of levers with settings, worth trying."""

    levers: Levers

    @property
    def label(self) -> str:
        """How people read it.

        >>> Candidate(levers={"threads": {"num": 1}, "bf16": {}}).label
        'threads=1 bf16'
        """
        return label(self.levers)

    @property
    def key(self) -> Key:
        """Equal for equal sets, whatever the order in which they were put together."""
        return tuple(sorted((name, tuple(sorted(settings.items()))) for name, settings in self.levers.items()))


def label(levers: Levers) -> str:
    """A set of levers in one line: `name`, `name=value` or `name(a=1, b=2)`, `plain` for the empty set."""
    words = []
    for name, settings in levers.items():
        if not settings:
            words.append(name)
        elif len(settings) == 1:
            words.append(f"{name}={next(iter(settings.values()))}")
        else:
            words.append(f"{name}({', '.join(f'{k}={v}' for k, v in settings.items())})")
    return " ".join(words) or "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One candidate measured beside the baseline.

    Attributes:
        levers: What was engaged.
        outcome: The verdict in one word; `screened` is none: what windows under many sets tell of this one.
        reason: Why, in one sentence, where the outcome needs one.
        ratio: Baseline step time over the candidate's: above 1 is faster; None where not measured.
        ratio_low: Lower end of the 95 % interval; of fewer than four pairs the smallest ratio.
        ratio_high: Upper end of the 95 % interval; of fewer than four pairs the largest ratio.
        num_pairs: Pairs of windows behind the ratio.
        num_windows: Windows under all sets behind it, where it was screened.
        num_discarded: Pairs of windows left out: other processes ran, something was compiled, or one paid for a loader
            that started over and the other did not.
        agreement: `agrees`, `disagrees`, `inconclusive` or empty where speed already decided.
        agreement_detail: The numbers behind it.
        class_: The widest class among its levers.
        took_s: What trying it cost.
        engage_s: What engaging it cost the first time (compilation, new workers, a new process).
        peak_memory_bytes: Highest memory seen while it was engaged.
        baseline_peak_memory_bytes: The same for the baseline beside it.
        remeasured: Whether the ratio comes from fresh windows after the choice.
        baseline_step_s: Step time of each baseline window, the raw samples.
        candidate_step_s: Step time of each candidate window, paired with the former.
        evidence: Lever to the proof that it took effect.
        candidate_first: For each pair whether the lot had the candidate go first.
        share: What the look that ended it could spend of the errors (`flatout.judge.sequential`).
        noise: Standard deviation of the log ratio of two plain windows, below which few pairs are not believed.
    """

    levers: Levers
    outcome: Outcome
    reason: str = ""
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    num_pairs: int = 0
    num_windows: int = 0
    num_discarded: int = 0
    agreement: str = ""
    agreement_detail: str = ""
    class_: str = "exact"
    took_s: float = 0.0
    engage_s: float = 0.0
    peak_memory_bytes: int | None = None
    baseline_peak_memory_bytes: int | None = None
    remeasured: bool = False
    baseline_step_s: tuple[float, ...] = ()
    candidate_step_s: tuple[float, ...] = ()
    evidence: Mapping[str, str] = field(default_factory=dict)
    candidate_first: tuple[bool, ...] = ()
    share: float = 1.0
    noise: float = 0.0

    @property
    def label(self) -> str:
        """The levers in one line."""
        return label(self.levers)

    @property
    def is_won(self) -> bool:
        """Whether it is faster, and its numbers agree."""
        return self.outcome == "faster" and self.agreement == "agrees"


PLAN_FORMAT = 1  # 1: first version
PLAN_FILE = "flatout.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The chosen candidate, with the machine, the versions and the trial that justify it."""

    format: int
    flatout: str
    script: str
    arguments: tuple[str, ...]
    levers: Levers
    ratio: float
    ratio_low: float
    ratio_high: float
    num_pairs: int
    agreement: str
    class_: str
    baseline_steps_per_s: float
    tuned_steps_per_s: float
    machine: Machine
    python: str
    framework: str
    framework_version: str
    created: str
    """ISO 8601, UTC, to the second."""
    run: str = ""
    """The run folder with the trials behind it."""
    reason: str = ""
    """Why nothing is to be changed, and what was tried; empty of a plan with levers."""
    infers: bool = False
    """Whether it is for the calls of a script that trains as well (`--infer`)."""
    goal: str = "throughput"
    """What it was chosen by, and is checked by in a run; see `Window`."""
