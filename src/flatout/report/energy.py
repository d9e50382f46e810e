"""What does a page say of energy? The counters, a table, and how it was obtained.

In: a `Result`, or the counters of a machine. Out: words and rows.
"""

from __future__ import annotations

from collections.abc import Sequence

from flatout.judge.result import Result
from flatout.records.energy import Counter, Energy, EnergySummary
from flatout.report import words


def why_not(found: EnergySummary) -> str:
    """Why nothing is known."""
    return found.baseline.why_not if found.counters else "; ".join(found.missing) or found.baseline.why_not


def counters(found: Sequence[Counter]) -> str:
    """Which counters, through what, and how often they change.

    >>> package = Counter(
    ...     name="package-0", device="cpu", source="RAPL", resolution_s=1e-3, resolution_joules=1e-6
    ... )
    >>> counters([package])
    'package-0: RAPL, changes every 1 ms'
    """
    groups: dict[tuple[str, float], list[str]] = {}
    for counter in found:
        groups.setdefault((counter.source, counter.resolution_s), []).append(counter.name)
    return "; ".join(
        f"{', '.join(names)}: {source}, changes every {words.seconds(every_s)}"
        for (source, every_s), names in groups.items()
    )


def rows(result: Result) -> list[tuple[str, ...]]:
    """One step of either side, and its parts."""
    found = result.energy
    if found is None or found.baseline.joules is None:
        return []
    lines = [_row("a plain step", found.baseline)]
    lines += [(f"a plain step: {name}", words.joules(joules), "") for name, joules in found.baseline.parts.items()]
    if found.tuned is not None and found.tuned.joules is not None:
        name = "a step with the plan" if result.winner is not None else "a step under the best candidate"
        lines.append(_row(name, found.tuned))
        lines += [(f"{name}: {part}", words.joules(joules), "") for part, joules in found.tuned.parts.items()]
    if found.measuring_joules is not None:
        lines.append(("all of this measurement", words.joules(found.measuring_joules), ""))
    return lines


def _row(name: str, energy: Energy) -> tuple[str, ...]:
    return name, words.joules(energy.joules), words.count(energy.num_windows)


def sources(result: Result, command: str) -> list[tuple[str, str, str]]:
    """How it was obtained, or why not."""
    found = result.energy
    if found is None:
        return []
    if found.baseline.joules is None:
        return [("energy", f"not known: {why_not(found)}", command)]
    how = (
        f"{counters(found.counters)}; noted every {words.seconds(found.noted_every_s)} and looked up at the start and "
        f"the end of each window, for all that ran on the machine"
    )
    return [("energy", how, command)]
