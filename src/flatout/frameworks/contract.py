"""What must a framework be able to do, for flatout to measure and change a script that uses it?

Nothing outside a framework's package knows more of it than this: `Kind` before a script runs, `Framework` in its
process. In: what to observe, which levers to engage. Out: records of the trace. Imported in the user's process:
standard library only. The smallest framework that fulfils it is `tests/toy`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from flatout.frameworks.lever import Lever
from flatout.machine.installed import Package
from flatout.records.difference import Difference
from flatout.records.exported_models import ModelExport
from flatout.records.facts import Facts
from flatout.records.ranks import RankConfig, RankPlace
from flatout.records.trace import Agreement, Census, Levers, Scaling, Toggle


class NotReleased(RuntimeError):
    """A lever could not be taken back: what is measured in this process from now on is neither plain nor a trial."""


NO_PHASES: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a framework is told as it is made, in the user's process.

    Attributes:
        cache_folder: Where it may keep what outlives the run, e.g. compiled code; None: nowhere.
        store_memory_bytes: Memory for items that levers keep; None: half of what is free.
        admits_random: Whether items may draw other random numbers than in the plain script.
        infers: Whether calls of models are its steps although it may train as well.
        goal: What windows are compared by, see `Window`.
    """

    cache_folder: str | None = None
    store_memory_bytes: int | None = None
    admits_random: bool = True
    infers: bool = False
    goal: str = "throughput"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameworkSpec:
    """A framework as it is known without being loaded.

    Attributes:
        label: What people call it.
        package: How it is installed, and the programs that measure what a machine can do with it.
        steps_show_in: Where its steps are seen, in words.
        levers: Its levers by name; reading their descriptions loads nothing.
        make: Itself, in the user's process.
        is_followed: Whether somebody follows the steps of this process already.
        trained_apart: What a run has trained against the plain one's: states after the last step of the plain run, of
            a plain run that was nudged, of the run in question, and the plain one's after its first step.
        exports: Runtimes that models can be exported to, and why one cannot be here; empty where it can.
        losses_apart: The same of the losses of the last steps: plain, nudged, in question.
    """

    label: str
    package: Package
    steps_show_in: str
    levers: Callable[[], dict[str, Lever]]
    make: Callable[[Settings], Framework]
    is_followed: Callable[[], bool]
    trained_apart: Callable[[Path, Path, Path, Path], tuple[Difference, ...]]
    exports: Callable[[], dict[str, str]]
    losses_apart: Callable[[Sequence[float], Sequence[float], Sequence[float]], tuple[Difference, ...]]


class Step(NamedTuple):
    """A step that has ended.

    Attributes:
        ended_s: When, by `time.perf_counter`.
        phases: Its seconds by phase, where phases are observed; else of what lies before it outside training alone.
        outside_s: Seconds before its end that lay outside training: evaluation, a checkpoint.
    """

    ended_s: float
    phases: Mapping[str, float] = NO_PHASES
    outside_s: float = 0.0


class StepListener(Protocol):
    """Who is told of steps: the conductor."""

    def on_step(self, step: Step) -> None:
        """A step has ended; the state is at a boundary."""

    def on_update(self) -> None:
        """The last update of a step is about to be made: gradients are complete, parameters are still old."""

    def on_pass_end(self) -> None:
        """The data has been gone through once; what the script does before its next step may take long."""

    def on_failure(self, stage: str, problem: BaseException) -> None:
        """Something of ours went wrong; training goes on."""


class Trained(Protocol):
    """What a script trains, at a boundary."""

    def keep(self, path: str | None) -> None:
        """Write it, and where random numbers stand; where ranks hold parts, each of them asks for it.

        Without a path it is another rank that writes.
        """

    def nudge(self, step: int) -> None:
        """Move every parameter by what rounding may move it in a step, in the same way at the same step."""

    def memory_of_step(self) -> int | None:
        """Bytes that the process held at most since this was asked last: of its device, or resident.

        None where nothing tells, or the peak cannot be reset.
        """


class Framework(Protocol):
    """One framework in one process."""

    name: str
    version: str

    def join(self, place: RankPlace, terms: RankConfig) -> None:
        """Become one of many ranks that train together; before `attach`, and only where ranks are offered."""

    def attach(self, listener: StepListener) -> None:
        """Begin to report steps."""

    def detach(self) -> None:
        """Release every lever and leave nothing behind."""

    def settled(self) -> bool:
        """Whether the model's outermost calls have been found, so that facts are complete."""

    def facts(self) -> Facts:
        """What the script turned out to do; `warm_up_step_s` too, where only a device's own clock tells it."""

    def prepare(self, levers: Levers, *, trial: bool, learns: bool = False) -> None:
        """Before the script continues: engage levers that do not wait for a step.

        Where a run `learns`, its facts are looked for as in a trial.
        """

    def vary_seeds(self, run: int) -> None:
        """Before the script continues: have it draw the random numbers of another run, its own in run 0."""

    def keep_losses(self) -> None:
        """Record losses in windows that observe no phases, too."""

    def engage(self, levers: Levers) -> Toggle:
        """Engage exactly these levers; all others are released.

        Raises:
            NotReleased: One of them could not be taken back; the others were, and nothing was engaged.
        """

    def evidence(self) -> tuple[dict[str, str], dict[str, str]]:
        """Lever to proof of effect, and lever to why none could be shown, for what is engaged."""

    def observe(self, depth: str) -> None:
        """Observe at `off`, `ends`, `phases`, `stacks`, `reads` or `profile`."""

    def coast(self) -> None:
        """Tell of steps at the least cost, until anything is to be observed or engaged again."""

    def start_window(self) -> float:
        """A window begins: reset counters; the `perf_counter` at which it starts. A device is not waited for."""

    def num_missed_steps(self) -> int:
        """Steps made before it was known what a step is, of which `on_step` was not told."""

    def training_since_s(self) -> float | None:
        """About when the first step of all was over, told of or not, by `perf_counter`; None where none was seen."""

    def end_window(self) -> Mapping[str, Any]:
        """A window ends: `losses`, `call_s`, `device_phases`, `recompilations`, `peak_memory_bytes`.

        Where steps end later than Python is through with them, because a device has a queue, its last step is waited
        for, and `step_s` and `outside_s` of each are told by that device's own clock (not at `off`). Where they were
        looked for, also `stacks` and `host_reads`, without their numbers of steps, and `profile`.
        """

    def begin_capture(self) -> None:
        """Keep the model calls of the next step."""

    def compare(self, levers: Levers, checks: Sequence[str]) -> Agreement | None:
        """Numerics of the captured step under `levers` against plain; called from `on_update`. None: a further step."""

    def scale(self) -> Scaling | None:
        """Time the captured calls at full and half batch; None where they cannot be halved."""

    def export(self, to: str, folder: Path) -> ModelExport | None:
        """Write files of the captured models for another runtime. None: the calls of a further step are needed."""

    def begin_census(self) -> None:
        """Count the operations from here to `end_census`."""

    def end_census(self) -> Census:
        """What was counted."""

    def counterfactual(self, name: str, engaged: bool) -> None:
        """Make something free: `free_data` replays one cached batch."""

    def trained(self) -> Trained:
        """What is trained, to be kept or moved."""

    def engaged(self) -> Levers:
        """The levers that are engaged now, with their settings."""

    def patched(self) -> list[str]:
        """What is replaced in this process at present, as in `torch.autograd.backward`."""

    def remarks(self) -> list[str]:
        """What is to be said to the user as the script ends."""
