"""Do steps take longer because they call the model more often: episodes of a game, a line search, packed sequences?

Then times are compared for equal work. In: plain windows. Out: calls of a usual step, or None where steps are alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from flatout.judge.stats import summarize
from flatout.records.trace import Window

FEWEST = 8
"""Steps from which it is concluded."""

UNEVEN = 0.1
"""Half of the interquartile range over the median from which numbers of calls count as different."""

EXPLAINED = 0.5
"""Seconds of a call must scatter by less than this share of what seconds of a step do."""


def usual_calls(windows: Sequence[Window]) -> float | None:
    """Calls that a usual step makes; None where their number does not tell how long a step takes.

    >>> from dataclasses import replace
    >>> window = Window(index=0, purpose="warm-up", levers={}, observe="ends", start_s=0.0, outside_s=(0.0,) * 8,
    ...     step_s=(0.1, 0.2, 0.4, 0.1, 0.3, 0.2, 0.5, 0.3), num_calls=(10, 20, 40, 10, 30, 20, 50, 30))
    >>> usual_calls([window])
    26.25
    >>> usual_calls([replace(window, num_calls=(10, 10, 10, 10, 10, 10, 10, 11))]) is None
    True
    """
    steps = [
        (seconds - outside_s, num)
        for window in windows
        for seconds, outside_s, num in zip(window.step_s, window.outside_s, window.num_calls, strict=False)
        if num and seconds > outside_s
    ]
    if len(steps) < FEWEST or summarize([float(num) for _, num in steps]).spread_fraction < UNEVEN:
        return None
    of_calls = summarize([seconds / num for seconds, num in steps]).spread_fraction
    of_steps = summarize([seconds for seconds, _ in steps]).spread_fraction
    return sum(num for _, num in steps) / len(steps) if of_calls < EXPLAINED * of_steps else None
