"""What can the parent ask of a child? One order a line, as JSON, through a named pipe.

In: an `Order`. Out: its line, or the order of a line. The answers come back as records in the trace, each with the
order's number. Imported in the user's process: standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from flatout.frameworks.contract import Framework, Settings
from flatout.records.as_json import from_json, to_json
from flatout.records.ranks import RankConfig
from flatout.records.trace import Setting

Kind = Literal["window", "compare", "census", "scaling", "export"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """One thing to do, from the next step boundary on.

    Attributes:
        number: Counts orders of one child from 0; the answers carry it.
        kind: `window` measures steps; `compare` judges numerics; `census` counts a step's operations; `scaling`
            replays calls at half the batch; `export` writes files of the models, for the runtime in `purpose`.
        purpose: Noted with the window.
        levers: What to engage first; everything else is released.
        observe: `off`, `ends`, `phases`, `stacks`, `reads` or `profile`.
        num_steps: Steps of the window.
        limit_s: The window ends early after this many seconds of training, at a step's end.
        skip_steps: Steps after a change of levers that are not measured.
        reason: Why the levers are to be those: a decision that is noted with them; empty where none was made.
    """

    number: int
    kind: Kind
    purpose: str = ""
    levers: Mapping[str, Mapping[str, Setting]] = field(default_factory=dict)
    observe: Literal["off", "ends", "phases", "stacks", "reads", "profile"] = "ends"
    num_steps: int = 1
    limit_s: float = 3600.0
    skip_steps: int = 1
    reason: str = ""


EXPORTED = "exported"
"""Beside the trace: where files of models are written."""


def settling_steps(step_s: float) -> int:
    """Steps after a change of levers that are not measured.

    What a change costs once (new primitives, moved state) is milliseconds: nothing in a step of a second.

    >>> settling_steps(0.01), settling_steps(0.3), settling_steps(1.0)
    (2, 1, 0)
    """
    return 2 if step_s < 0.2 else 1 if step_s < 0.5 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """What a child is told before it starts (`session.json`).

    Attributes:
        mode: `trial` waits for orders at step boundaries; `run` never waits.
        trace: Where the child writes.
        orders: The named pipe from which it reads, or None.
        claim: Created by the first process that makes a step; others stay plain.
        levers: Engaged at the first boundary (`run`), or before the script starts where they need a new process.
        per_process: Under a launcher: every process that trains writes a trace of its own, and takes no orders.
        script: For the header.
        arguments: For the header.
        settings: What its framework is told.
        writable: Folders to which a trial may write; other refused writes are listed.
        cores_quota: How many cores the control group grants, which is what others are weighed against; None: all.
        seed_run: Which random numbers the script draws: its own in run 0, others in each other run; None: untouched.
        keep_losses: Whether losses are recorded although nothing is engaged.
        list_read: Folders of which it is listed what the script reads there; empty: nothing is listed.
        learns: Whether levers will be tried on this run (`run`), so that facts are wanted as in a trial.
        ranks: How the run is divided over ranks; None: it is not.
        lives_with: Process id of the parent that the child must not outlive; None: the run is the user's.
        stop_after: The run is only a sample, and ends after so many steps; None: it is the script's to end.
        keep_states: Whether such a run keeps what it has trained, after its first step and after its last.
        keep_environment: Whether its first rank keeps the environment that it was started with.
        nudge: Whether its parameters are moved in their last places after each step.
        takes_apart: Whether the parts of its steps are timed all along, in short windows.
    """

    mode: Literal["trial", "run"]
    trace: str
    claim: str
    orders: str | None = None
    levers: Mapping[str, Mapping[str, Setting]] = field(default_factory=dict)
    per_process: bool = False
    script: str = ""
    arguments: tuple[str, ...] = ()
    settings: Settings = field(default_factory=Settings)
    writable: tuple[str, ...] = ()
    cores_quota: float | None = None
    flatout_started_s: float = 0.0
    """On the clock of `time.perf_counter`, which the processes of a machine share, and which nobody sets."""
    seed_run: int | None = None
    keep_losses: bool = False
    list_read: tuple[str, ...] = ()
    learns: bool = False
    lives_with: int | None = None
    ranks: RankConfig | None = None
    stop_after: int | None = None
    keep_states: bool = False
    keep_environment: bool = False
    nudge: bool = False
    takes_apart: bool = False


def answer(order: Order, framework: Framework, trace: Path) -> Any:
    """What a framework answers to an order that calls were captured for; None: not yet, or nothing."""
    if order.kind == "compare":
        return framework.compare(order.levers, tuple(order.purpose.split()))
    if order.kind == "export":
        return framework.export(order.purpose, trace.with_name(EXPORTED))
    return framework.scale()


def encode(order: Order) -> str:
    """The order's line, with its newline.

    >>> decode(encode(Order(number=3, kind="census"))).number
    3
    """
    return json.dumps(to_json(order)) + "\n"


def decode(line: str) -> Order:
    """The order of a line."""
    return from_json(Order, json.loads(line), where="order")
