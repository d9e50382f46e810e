"""flatout's adapter in this process, with a listener that opens and closes windows as the conductor does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flatout.frameworks.contract import Step
from flatout.frameworks.pytorch.adapter import PyTorch


class Windows:
    """Measures windows of a loop that is called a step at a time."""

    def __init__(self) -> None:
        self.framework = PyTorch()
        self._wanted: tuple[int, str] | None = None
        self._ends_s: list[float] | None = None
        self._begun_s = 0.0
        self.found: dict[str, Any] | None = None
        self.failures: list[str] = []
        self.framework.prepare({}, trial=True)
        self.framework.attach(self)

    def on_step(self, step: Step) -> None:
        """A step has ended."""
        if self._wanted is None:
            return
        num, depth = self._wanted
        if self._ends_s is None:
            self.framework.coast() if depth == "off" else self.framework.observe(depth)
            self._begun_s, self._ends_s = self.framework.start_window(), []
            return
        self._ends_s.append(step.ended_s)
        if len(self._ends_s) < num:
            return
        told = self.framework.end_window()
        python_s = [b - a for a, b in zip([self._begun_s, *self._ends_s], self._ends_s, strict=False)]
        steps_s = told.get("step_s", python_s)
        device = {name: sum(row) / len(row) for name, row in told["device_phases"].items() if row}
        self.found = {
            "step_s": sum(steps_s) / num,
            "python_step_s": sum(python_s) / num,
            "device_phases": device,
        }
        self._wanted = self._ends_s = None

    def on_pass_end(self) -> None:
        """Nobody waits."""

    def on_update(self) -> None:
        """Gradients are complete; nothing is asked for."""

    def on_failure(self, stage: str, problem: BaseException) -> None:
        """Something of flatout's went wrong."""
        self.failures.append(f"{stage}: {type(problem).__name__}: {problem}"[:300])

    def settle(self, step: Callable[[], object]) -> None:
        """Until it is known what the loop does."""
        while not self.framework.settled():
            step()

    def window(self, step: Callable[[], object], num: int, depth: str = "ends") -> dict[str, Any]:
        """What one window of `num` steps has found."""
        self.settle(step)
        self._wanted, self.found = (num, depth), None
        for _ in range(num + 2):
            step()
            if self.found is not None:
                break
        return {**(self.found or {}), "failures": self.failures}
