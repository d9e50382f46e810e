"""What does a page say of energy? Both sides of a step, and how that was obtained. In: a summary. Out: words."""

from __future__ import annotations

from flatout.records.energy import EnergySummary
from flatout.report import words


def line(found: EnergySummary, *, with_plan: bool) -> str:
    """One plain step, beside one with the plan; empty where it is not known."""
    if found.baseline.joules is None:
        return ""
    tuned = found.tuned.joules if found.tuned is not None and with_plan else None
    return words.joules(found.baseline.joules) + (f" → {words.joules(tuned)}" if tuned is not None else "")


def how(found: EnergySummary) -> str:
    """How it was obtained, or why not."""
    if found.baseline.joules is None:
        return f"not known: {found.baseline.why_not}"
    whole = f". All of this took {words.joules(found.measuring_joules)}" if found.measuring_joules is not None else ""
    return f"{'; '.join(found.sources)}, at the start and the end of each window, for all that ran here{whole}"
