"""What happened in one run: the versioned records that a child writes and everybody else reads.

How they lie on disk is in `flatout.records.trace_file`. In and out: records; nothing is computed here beyond sums.

This module is imported in the user's process: it needs the standard library only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from flatout.records.difference import Difference
from flatout.records.exported_models import ModelExport
from flatout.records.facts import Facts
from flatout.records.host_reads import HostReads
from flatout.records.profile import Profile
from flatout.records.stacks import Stacks

FORMAT = 1  # 1: first version

#: What a part of a step can be. An open list: readers keep names that they do not know.
PHASES = (
    "data",
    "copy",
    "forward",
    "loss",
    "backward",
    "optimizer",
    "communication",
    "sync",
    "garbage",
    "evaluation",
    "checkpoint",
    "other",
    "unattributed",
)

#: Phases that lie between steps; they are accounted for but never enter a ratio.
OUTSIDE = ("evaluation", "checkpoint")

FOREIGN_LIMIT = 0.10
"""A window in which others used more than this share of the cores says little: of a plan, of what binds, of energy."""

Setting = str | int | float | bool
Levers = Mapping[str, Mapping[str, Setting]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Who wrote the trace and where: one per trace, its first line."""

    format: int
    flatout: str
    started_unix_s: float
    script: str
    arguments: tuple[str, ...]
    python: str
    framework: str
    framework_version: str
    pid: int
    rank: int = 0
    world_size: int = 1
    start_s: float | None = None
    """Seconds from the start of the process to its first training step, or None where not observed."""
    zero_monotonic_s: float | None = None
    """The zero of the trace's clock on the clock that all processes of a Linux machine share (`time.perf_counter`)."""


SHORT = 0.05
"""A smaller batch may take half of a step's time: of twenty steps, a fortieth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Some consecutive steps under one setting of the levers.

    Attributes:
        index: Counts windows of this trace from 0.
        purpose: Why it was measured: `baseline`, `trial`, `anatomy`, `counterfactual`, `run`.
        levers: What was engaged.
        observe: `off` times steps from end to end, whatever lies in them; `ends` tells evaluation and checkpoints apart
            from them, where they show; `phases` times the parts of each step as well; `stacks` also looks at what
            the thread does, which costs it some time; `reads` notes, beside step ends, where values are read on the
            host, which costs some time as well; `profile` has the framework's own profiler look, which costs most.
        step_s: Wall seconds of each step, end to end: by the clock of the device that trains, where it has a queue;
            of `off`, where nobody waits for it, by when Python was through with the step.
        outside_s: Seconds of each step that evaluation and checkpoints took; they lie inside `step_s`. 0 where nobody
            looked (`off`).
        phases: Seconds of each step by phase, where Python was; a phase that cannot be seen is absent, never 0. Of
            `ends` and `reads` evaluation and checkpoints alone.
        device_phases: The same on the clock of a device with a queue, `unattributed` included: what lies between two
            marks, waiting included, so that they sum to the step.
        not_trained_s: Of `forward`, seconds of all steps in models that no optimizer trains, by name, on the device's
            clock where there is one.
        losses: The loss of each step, as far as `backward` was given one.
        call_s: Of `ends`, seconds that models took in each step, where nothing is trained and no device has a queue.
        foreign_fraction: Core time that other processes used, as a share of what there is; None where not observed.
        foreign_gpu_fraction: The same of the GPU that the script computes on; None where its driver does not say.
        gpu_clock_mhz: Of its multiprocessors at the window's end, of several the lowest.
        gpu_held_back: What held that clock back then, e.g. `power cap`.
        recompilations: Compilations that fell into the window; such a window is not compared.
        peak_memory_bytes: Highest memory of the process (device memory on a GPU) up to the window's end.
        start_s: Start on the trace's clock, seconds since the framework was imported.
        new_epochs: Passes over a loader that feeds the training which began within the window.
        smaller_batches: Batches of such a loader within it that are the last of a pass, and smaller than the others.
        num_calls: Calls of trained models in each step; empty where each step makes one, or nothing is trained.
        goal: What it is compared by: steps from end to end (`throughput`), or the models' part of them (`latency`).
        work: Calls of a mean step over those of a usual one, where it is known that time goes with them.
    """

    index: int
    purpose: str
    levers: Levers
    observe: Literal["off", "ends", "phases", "stacks", "reads", "profile"]
    step_s: tuple[float, ...]
    outside_s: tuple[float, ...]
    start_s: float
    phases: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    device_phases: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
    not_trained_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    losses: tuple[float, ...] = ()
    call_s: tuple[float, ...] = ()
    foreign_fraction: float | None = None
    foreign_gpu_fraction: float | None = None
    gpu_clock_mhz: float | None = None
    gpu_held_back: tuple[str, ...] = ()
    recompilations: int = 0
    peak_memory_bytes: int | None = None
    new_epochs: int = 0
    smaller_batches: int = 0
    num_calls: tuple[int, ...] = ()
    goal: str = "throughput"
    work: float = 1.0
    order: int = -1

    @property
    def compared_s(self) -> float:
        """Mean seconds of a step by which it is compared."""
        if self.goal == "latency":
            return sum(self.call_s) / len(self.call_s) if self.call_s else float("nan")
        return self.training_step_s

    @property
    def counts(self) -> bool:
        """Whether it is compared with others at all."""
        return self.recompilations == 0 and not self.is_short and self.training_s > 0

    @property
    def is_short(self) -> bool:
        """Whether its time says little of other windows: more than one in twenty steps had a smaller batch.

        Where the next pass has begun as well, that counts already.
        """
        return self.smaller_batches > self.new_epochs and self.smaller_batches > SHORT * len(self.step_s)

    @property
    def account(self) -> Mapping[str, tuple[float, ...]]:
        """The phases whose seconds sum to the steps: the device's where it has a queue, else those of Python."""
        return self.device_phases or self.phases

    @property
    def taken_fraction(self) -> float:
        """What others took, of the CPU or of the GPU, whichever is more; 0 where nothing was observed."""
        return max(self.foreign_fraction or 0.0, self.foreign_gpu_fraction or 0.0)

    @property
    def num_steps(self) -> int:
        """How many steps the window holds."""
        return len(self.step_s)

    @property
    def training_s(self) -> float:
        """Seconds of the window that went into training steps, without evaluation and checkpoints."""
        return sum(self.step_s) - sum(self.outside_s)

    @property
    def training_step_s(self) -> float:
        """Mean seconds of a training step of usual work, or NaN in an empty window."""
        return self.training_s / len(self.step_s) / self.work if self.step_s else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """All calls of one operation with one shape in one step."""

    name: str
    shape: str
    dtype: str
    num_calls: int
    flops: int
    moved_bytes: int
    self_s: float
    counted: bool
    """Whether a FLOP formula is known for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Census:
    """Every operation of one step, counted once, in a step of its own; `flops` are those that the model needs."""

    num_operations: int
    num_syncs: int
    flops: int
    moved_bytes: int
    operations: tuple[Operation, ...]
    """The heaviest by time; the rest is in the totals."""
    uncounted: tuple[str, ...]
    """Names of operations that take time and have no FLOP formula."""
    sync_places: tuple[str, ...] = ()
    """`file:line` of host synchronisations, most frequent first."""
    recomputed_flops: int = 0
    """Beside `flops`, those that only do the forward again: checkpointing, and the scores in attention's backward."""
    convolution_flops: int = 0
    """Of both, those of convolutions."""
    order: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """The outermost model calls of one step replayed at their own batch and at half of it.

    What does not shrink with the batch is fixed cost: starting operations, Python, optimizer-like work.
    """

    full_s: tuple[float, ...]
    half_s: tuple[float, ...]
    order: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What the numerics checks measured for one set of levers at one point of training."""

    levers: Levers
    differences: tuple[Difference, ...]
    missing: str = ""
    """Why nothing could be compared, or empty."""
    order: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Toggle:
    """Levers were engaged or released at a step boundary."""

    engaged: Levers
    released: tuple[str, ...]
    took_s: float
    step: int
    evidence: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Lever to the proof that it took effect."""
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Lever to why no effect could be shown."""
    reason: str = ""
    order: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Something went wrong. `stage` says where: `script`, `engage`, `step`, `release`, `compare`, `recorder`."""

    stage: str
    error: str
    message: str
    order: int = -1
    filename: str | None = None
    out_of_memory: bool = False
    place: str = ""
    """File and line of the script's own last frame, as `/home/me/train.py:20`; empty where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A write outside the folders that a trial may write to, which the isolation refused."""

    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Files of the user's that the script read, and modules that it imported from outside of an installation."""

    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Remark:
    """Something that is to be said to the user when the run is over, or only to who asks for everything."""

    text: str
    verbose: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PassEnd:
    """A pass over the data has ended within an order; what comes next (evaluation, a checkpoint) may take long."""

    num_steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The script ended by itself.

    Attributes:
        num_steps: Steps that it made.
        wall_s: Seconds since the framework was imported.
        training_s: Seconds from the end of the first step to the end of the last.
        exit_code: Its status, where it is known.
    """

    num_steps: int
    wall_s: float
    training_s: float = 0.0
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The child stands at a step boundary and has finished order `order` (-1: nothing was ordered yet)."""

    order: int
    num_steps: int


Record = (
    Header
    | Facts
    | Window
    | Census
    | Scaling
    | ModelExport
    | Stacks
    | HostReads
    | Profile
    | Agreement
    | Toggle
    | Failure
    | Refused
    | Inputs
    | Remark
    | PassEnd
    | End
    | Ready
)
