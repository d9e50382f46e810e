"""What must a framework be able to do, for flatout to measure and change a script that uses it?

The child's conductor knows frameworks through this contract alone. In: what to observe, which levers to engage. Out:
records of the trace. Imported in the user's process: standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from flatout.records.facts import Facts
from flatout.records.trace import Agreement, Census, Levers, Scaling, Toggle


class NotReleased(RuntimeError):
    """A lever could not be taken back: what is measured in this process from now on is neither plain nor a trial."""


class StepListener(Protocol):
    """Who is told of steps: the conductor."""

    def on_step(self, now_s: float) -> None:
        """A step has ended at `now_s` (`time.perf_counter`); the state is at a boundary."""

    def on_update(self) -> None:
        """The last update of a step is about to be made: gradients are complete, parameters are still old."""

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

    def attach(self, listener: StepListener) -> None:
        """Begin to report steps."""

    def detach(self) -> None:
        """Release every lever and leave nothing behind."""

    def settled(self) -> bool:
        """Whether the model's outermost calls have been found, so that facts are complete."""

    def facts(self) -> Facts:
        """What the script turned out to do."""

    def prepare(self, levers: Levers, *, endless: bool, trial: bool, learns: bool = False) -> None:
        """Before the script continues: engage levers that do not wait for a step, and let loaders start over.

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
        """Observe at `off`, `ends`, `phases`, `stacks` or `reads`."""

    def coast(self) -> None:
        """Tell of steps at the least cost, until anything is to be observed or engaged again."""

    def start_window(self) -> float:
        """A window begins: wait for the device once, reset counters; the `perf_counter` at which it starts."""

    def end_step(self) -> tuple[dict[str, float], float]:
        """Seconds by phase of the step that has just ended, and those that lay outside it."""

    def num_missed_steps(self) -> int:
        """Steps made before it was known what a step is, of which `on_step` was not told."""

    def training_since_s(self) -> float | None:
        """About when the first step of all was over, told of or not, by `perf_counter`; None where none was seen."""

    def end_window(self) -> Mapping[str, Any]:
        """A window ends: wait for the device once; `losses`, `device_phases`, `recompilations`, `peak_memory_bytes`.

        Where they were looked for, also `stacks` and `host_reads`, without their numbers of steps.
        """

    def begin_capture(self) -> None:
        """Keep the model calls of the next step."""

    def compare(self, levers: Levers, checks: Sequence[str]) -> Agreement:
        """Numerics of the captured step under `levers` against plain; called from `on_update`."""

    def scale(self) -> Scaling | None:
        """Time the captured calls at full and half batch; None where they cannot be halved."""

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

    def remarks(self) -> list[str]:
        """What is to be said to the user as the script ends."""
