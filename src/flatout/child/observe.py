"""Where does the time of training steps go in a notebook, or in a program of one's own? Observed in this very process.

In: a `with` block in which something trains. Out: an `Observation`: its steps, their speed and their anatomy. Nothing
is changed or tried, no file is written, and what breaks here costs the observation, never the training.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from flatout.child.open_window import OpenWindow
from flatout.child.orders import Order
from flatout.errors import Inconclusive, UsageError
from flatout.frameworks import NAMES, kind
from flatout.frameworks.contract import Framework, Settings, Step
from flatout.judge.anatomy import Anatomy, dissect
from flatout.records.facts import Facts
from flatout.records.trace import Window

WINDOW_STEPS = 2000
"""Steps kept in one window; the next one follows without a gap that matters."""

_attaching = threading.Lock()


class Observation:
    """What was seen in a `with flatout.observe()` block; complete when the block has ended.

    Attributes:
        num_steps: Steps that ended in the block, those before it was known what a step is included.
        windows: The measured steps with their phases.
        facts: What the program turned out to do; None before that is known.
        problems: What went wrong in the recorder, in words.
    """

    def __init__(self, framework: Framework) -> None:
        self.num_steps = 0
        self.windows: list[Window] = []
        self.facts: Facts | None = None
        self.problems: list[str] = []
        self._framework = framework
        self._open: OpenWindow | None = None
        self._begun_s = time.perf_counter()

    @property
    def anatomy(self) -> Anatomy:
        """Where a step's time went.

        Raises:
            Inconclusive: Too few steps were made for one to be taken apart.
        """
        return dissect(self.windows)

    @property
    def steps_per_s(self) -> float:
        """Measured training steps a second, without evaluation and checkpoints.

        Raises:
            Inconclusive: No step was measured.
        """
        return 1 / self.anatomy.step_s

    def __str__(self) -> str:
        try:
            anatomy = self.anatomy
        except Inconclusive:
            return f"{self.num_steps} steps, too few to take one apart"
        lines = [f"{self.num_steps} steps, {1 / anatomy.step_s:.3g} a second"]
        lines += [
            f"  {name:14} {100 * seconds / anatomy.step_s:5.1f} %   {1e3 * seconds:.3g} ms"
            for name, seconds in anatomy.phases_s.items()
        ]
        return "\n".join(lines)

    # -- the framework's listener --------------------------------------------------------------------------------

    def on_step(self, step: Step) -> None:
        """A step has ended."""
        self.num_steps += 1
        if self._open is not None:
            self._open.add(step)
            if self._open.complete:
                self._close()
        if self._open is None and self._framework.settled() and not (self.facts and self.facts.not_measured):
            self._begin()

    def on_update(self) -> None:
        """Gradients are complete; nobody waits for them here."""

    def on_pass_end(self) -> None:
        """The data has been gone through once; nobody waits for the next step here."""

    def on_failure(self, stage: str, problem: BaseException) -> None:
        """Something of ours went wrong; training goes on."""
        if len(self.problems) < 20:
            self.problems.append(f"{stage}: {type(problem).__name__}: {problem}")

    def _begin(self) -> None:
        if self.facts is None:
            self.facts = self._framework.facts()
            if self.facts.not_measured:
                self.problems.append(f"nothing was measured: {self.facts.not_measured}")
                return
        order = Order(number=-1, kind="window", purpose="observed", observe="phases", num_steps=WINDOW_STEPS)
        self._framework.observe("phases")
        now_s = self._framework.start_window()
        self._open = OpenWindow(order, index=len(self.windows), started_s=now_s)
        self._open.restart(now_s, now_s - self._begun_s)

    def _close(self) -> None:
        window, self._open = self._open, None
        if window is not None and window.step_s:
            self.windows.append(window.record(self._framework.end_window(), None))

    def end(self) -> None:
        """Close what is open and leave nothing behind."""
        for part in (self._close, self._framework.detach):
            try:
                part()
            except Exception as problem:  # noqa: BLE001  the program's own result is what matters
                self.on_failure("recorder", problem)
        self.num_steps += self._framework.num_missed_steps()


@contextlib.contextmanager
def observe() -> Iterator[Observation]:
    """Observe the training steps that are made in the block, in this process and thread.

    ```python
    with flatout.observe() as run:
        train(model, loader)
    print(run)
    ```

    Raises:
        UsageError: No framework is installed, or this process is observed already.
    """
    with _attaching:
        observation = Observation(_framework())
        observation._framework.attach(observation)
    try:
        yield observation
    finally:
        observation.end()


def _framework() -> Framework:
    """The one that this process has imported; where it has none yet, the first that is known."""
    known = [kind(name) for name in NAMES]
    chosen = next((one for one in known if one.package.name in sys.modules), known[0])
    try:
        followed = chosen.is_followed()
    except ImportError as problem:
        hint = f"`pip install {chosen.package.name}`"
        raise UsageError(f"there is no {chosen.label} to observe", cause=str(problem), hint=hint) from None
    if followed:
        raise UsageError(
            "this process is observed already",
            cause="another `flatout.observe()` is open, or flatout has started the program itself",
            hint="one at a time; under `flatout run` the report has what this would show",
        )
    return chosen.make(Settings())
