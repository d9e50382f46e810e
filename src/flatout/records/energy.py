"""What is said of energy? Joules, or why there are none. They are read elsewhere (`machine/energy_counters.py`)."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """What was used in some stretch of time, or for one step of it.

    Attributes:
        joules: The sum over the counters; None where one of them cannot tell.
        why_not: Why there is no sum, or empty.
    """

    joules: float | None = None
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnergySummary:
    """What one `tune` or `why` learned about energy.

    Attributes:
        sources: The counters that were read, each with who counts.
        baseline: One plain step.
        tuned: One step under the best candidate; None where none was measured again.
        measuring_joules: What the whole measurement used.
    """

    sources: tuple[str, ...] = ()
    baseline: Energy = field(default_factory=Energy)
    tuned: Energy | None = None
    measuring_joules: float | None = None
