"""What is asked of a run while it trains, and what comes back? Windows, with the plan and without it.

In: step times. Out: `Ask`s. Arithmetic only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from flatout.child.orders import settling_steps
from flatout.records.trace import Agreement, Failure, Levers, Window

WINDOW_S = 0.3
LIMIT_S = 1.0
"""A window that was asked for ends here at the latest: plain may be many times slower than the plan."""

COMPILE_SKIP_STEPS, SLOW_STEP_S = 3, 0.5
"""After a change of what is compiled so many steps are not measured, unless a step takes that long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRequest:
    """What the run shall do from the next step on.

    Attributes:
        levers: What is engaged meanwhile; without another ask it stays so.
        purpose: Noted with the window: `check` where it is measured, else `run`.
        num_steps: Steps until it answers.
        skip_steps: Steps before them that are not measured.
        limit_s: It answers after so many seconds at the latest.
        reason: A decision, noted in the trace; empty where none was made.
        kind: `window`, or `compare` for the numbers of one step, whose checks are the purpose.
        observe: What a window looks at: `ends`, `phases`.
    """

    levers: Levers
    purpose: str = "check"
    num_steps: int = 1
    skip_steps: int = 0
    limit_s: float = LIMIT_S
    reason: str = ""
    kind: Literal["window", "compare"] = "window"
    observe: Literal["ends", "phases"] = "ends"


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowResult:
    """What came back: a window where one was measured, and of each lever the proof of its effect, or why there is none.

    `num_steps` are those of the run up to here; `failures` is what went wrong meanwhile.
    """

    window: Window | None
    num_steps: int = 0
    agreement: Agreement | None = None
    evidence: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """What a pair compares: the plan, and what is left of it where it is not engaged; whether it compiles."""

    plan: Levers
    without: Levers
    compiles: bool = False

    def skip_steps(self, step_s: float) -> int:
        """Steps after a change that are not measured."""
        return COMPILE_SKIP_STEPS if self.compiles and step_s < SLOW_STEP_S else settling_steps(step_s)

    def ask(self, plan: bool, step_s: float, limit_s: float = LIMIT_S) -> WindowRequest:
        """A window of one side, where a step is expected to take so long."""
        return WindowRequest(
            levers=self.plan if plan else self.without,
            num_steps=steps_in(WINDOW_S, step_s),
            skip_steps=self.skip_steps(step_s),
            limit_s=limit_s,
        )

    def stay(self, plan: bool, reason: str = "") -> WindowRequest:
        """Go on under one side."""
        return WindowRequest(levers=self.plan if plan else self.without, purpose="run", reason=reason)


def steps_in(seconds: float, step_s: float) -> int:
    """So many steps as fit, at least one.

    >>> steps_in(0.3, 0.01), steps_in(0.3, 4.0)
    (30, 1)
    """
    return max(int(seconds / step_s + 1e-9), 1)
