"""How much time is there, and what fits into it? In: what was asked for, and the time of a step. Out: deadlines."""

from __future__ import annotations

import math
import time

from flatout.errors import Inconclusive

Defaults = tuple[tuple[float, float], ...]
TUNE_DEFAULTS_S: Defaults = ((1.0, 300.0), (0.2, 180.0), (0.0, 120.0))
WHY_DEFAULTS_S: Defaults = ((0.0, 60.0),)
"""What is taken where nothing was asked for; of steps slower than the first number too few windows fit into less."""

MOST_DEFAULT_S = 600.0
"""Very slow steps get as much as the least of it takes, up to this."""

WRITE_UP_S = 12.0
"""What starting the command, the looks after the search and writing the report take."""


class Budget:
    """The aimed wall time of one measurement, from its start on: what was asked for, or a default."""

    def __init__(self, asked_s: float | None, defaults: Defaults = TUNE_DEFAULTS_S) -> None:
        self._begun_s = time.perf_counter()
        self._defaults = defaults if asked_s is None else ()
        self.total_s = defaults[-1][1] if asked_s is None else asked_s

    @property
    def spent_s(self) -> float:
        """Wall seconds since the start."""
        return time.perf_counter() - self._begun_s

    @property
    def left_s(self) -> float:
        """Seconds left for measuring; negative where more was spent."""
        return self._measuring_s - self.spent_s

    @property
    def share_spent(self) -> float:
        """How much of it is spent, at most 1."""
        return min(self.spent_s / self.total_s, 1.0)

    @property
    def _measuring_s(self) -> float:
        return self.total_s - min(WRITE_UP_S, self.total_s / 10)

    def deadline_s(self, share: float = 1.0) -> float:
        """The `time.perf_counter` at which a share of the time for measuring is spent."""
        return self._begun_s + self._measuring_s * share

    def allow(self, total_s: float) -> None:
        """Take as much as that, where nothing was asked for."""
        if self._defaults:
            self.total_s = max(self.total_s, total_s)

    def suit(self, num_steps: int, step_s: float) -> None:
        """Take more for slow steps, of which so many are needed at the least, where nothing was asked for."""
        usual_s = next((total_s for slow_s, total_s in self._defaults if step_s > slow_s), None)
        if usual_s is not None:
            self.total_s = max(usual_s, min(num_steps * step_s, MOST_DEFAULT_S))

    def require(self, num_steps: int, step_s: float, script: str, *, patience: float = 1.0) -> None:
        """Make sure that so many steps can be made within the budget, or within `patience` times as long.

        Raises:
            Inconclusive: They cannot; the hint names a budget that suffices.
        """
        if num_steps * step_s <= patience * self.total_s:
            return
        raise Inconclusive(
            f"a step of `{script}` takes {step_s:.2g} s: too long for a budget of {self.total_s:.3g} s",
            cause=f"an answer takes about {num_steps} steps more at the least",
            hint=f"`--budget {math.ceil((num_steps * step_s + self.spent_s) / 60)}m`, or a smaller batch or model",
        )
