"""Under what terms may a script be run for measuring? Values that the user gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flatout.frameworks.contract import CAPTURE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Under what terms the script may be run.

    Attributes:
        isolate: Whether trials are kept off the user's disk; False only with `--allow-writes`.
        start_limit_s: Seconds within which the first steps must come.
        capture_bytes: Most memory for keeping a step.
        store_memory_bytes: Memory for kept items; None: half of what is free.
        environment: Variables that the script is given on top of the user's; None takes one away.
    """

    isolate: bool = True
    start_limit_s: float = 90.0
    capture_bytes: int = CAPTURE_BYTES
    store_memory_bytes: int | None = None
    environment: Mapping[str, str | None] = field(default_factory=dict)
