"""How far is a measurement to go, under what terms, and who is told? Values that the user gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flatout.records.plan import Trial
from flatout.records.trace import Levers
from flatout.trials.search.space import Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Under what terms the script may be run.

    Attributes:
        isolate: Whether trials are kept off the user's disk; False only with `--allow-writes`.
        start_limit_s: Seconds within which the first steps must come.
        store_memory_bytes: Memory for kept items; None: half of what is free.
        infers: Whether calls of models are its steps although it may train as well.
        goal: What candidates are compared by, see `Window.goal`; empty for what suits.
        client: The command that calls a script that serves; empty where it calls its models by itself.
        environment: Variables that the script is given on top of the user's; None takes one away.
    """

    isolate: bool = True
    start_limit_s: float = 90.0
    store_memory_bytes: int | None = None
    infers: bool = False
    goal: str = ""
    client: tuple[str, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)

    @property
    def compared_by(self) -> str:
        """The goal; where nobody has said it, a client that sets the pace leaves the time of calls alone."""
        return self.goal or ("latency" if self.client else "throughput")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """How far to go.

    Attributes:
        budget_s: Aimed wall time; None for a default that suits the steps, see `flatout.trials.budget`.
        choice: Which levers.
        terms: How the script may be run.
        exactly: Try this one set and nothing else (a plan that is checked again).
        launcher: The command that starts ranks of the script; empty for one process.
    """

    exactly: Levers | None = None
    launcher: tuple[str, ...] = ()
    budget_s: float | None = None
    choice: Choice = field(default_factory=Choice)
    terms: Terms = field(default_factory=Terms)


@dataclass(slots=True, kw_only=True)
class Show:
    """Who is told what is going on; the terminal's progress, or nobody."""

    stage: Callable[[str, float], None] = lambda text, share: None
    trial: Callable[[Trial], None] = lambda trial: None
    tick: Callable[[], None] = lambda: None
    remark: Callable[[str], None] = lambda text: None
