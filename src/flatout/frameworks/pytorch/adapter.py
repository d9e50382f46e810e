"""How does PyTorch fulfil the framework contract? Hooks on optimizers, and the seams in calls and loaders.

In: what the conductor asks for. Out: steps, windows, facts, numerics. One instance per process.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from threading import get_ident
from time import perf_counter
from typing import Any

import torch

from flatout.frameworks.contract import StepListener
from flatout.frameworks.pytorch import facts as fact_finding
from flatout.frameworks.pytorch.calls import Calls
from flatout.frameworks.pytorch.capture import Capture
from flatout.frameworks.pytorch.census import OperationCounter
from flatout.frameworks.pytorch.compilation import num_compilations
from flatout.frameworks.pytorch.loaders import Loaders
from flatout.frameworks.pytorch.memory import PeakMemory
from flatout.frameworks.pytorch.numerics import Numerics
from flatout.frameworks.pytorch.observer import Observer
from flatout.frameworks.pytorch.rhythm import Rhythm
from flatout.frameworks.pytorch.session import Session
from flatout.trace import Agreement, Census, Facts, Levers, Scaling, Toggle

BACKWARDS_WITHOUT_UPDATE = 20
"""After so many backward passes without an optimizer update that shows, the loader's fetches are taken for steps."""


class PyTorch:
    """PyTorch in this process."""

    name = "pytorch"

    def __init__(self, cache_folder: str | None = None) -> None:
        self.version: str = str(torch.__version__)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.calls = Calls(self.device)
        self.loaders = Loaders()
        self.rhythm = Rhythm()
        self.observer = Observer(self.calls, self.loaders, self.device)
        self.session = Session(self.calls, self.loaders, self.device, cache_folder)
        self.capture = Capture(self.calls)
        self.numerics = Numerics(self.session, self.capture)
        self._memory = PeakMemory(self.device)
        self._listener: StepListener | None = None
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._known: set[int] = set()
        self._handles: list[Any] = []
        self._scaler_step: Any = None
        self._thread = get_ident()
        self._last_phases: dict[str, float] = {}
        self._last_outside_s = 0.0
        self._num_updates = 0
        self._settled = False
        self._census: OperationCounter | None = None
        self._compilations_before = 0
        self._restarts_before = 0
        self._num_settling = 0

    # -- attach --------------------------------------------------------------------------------------------------

    def prepare(self, levers: Levers, *, endless: bool, trial: bool) -> None:
        """See `Framework.prepare`."""
        early = {name: settings for name, settings in levers.items() if self.session.levers[name].toggles != "step"}
        self.loaders.endless = endless
        self.loaders.reopen = trial
        if trial or any(self.session.levers[name].toggles == "epoch" for name in early):
            self.loaders.install()
        for name, settings in early.items():
            self.session.engage(name, settings)

    def attach(self, listener: StepListener) -> None:
        """See `Framework.attach`."""
        self._listener = listener
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self._handles = [
            register_optimizer_step_pre_hook(self._before_update),
            register_optimizer_step_post_hook(self._after_update),
        ]
        self._watch_scaler()

    def _watch_scaler(self) -> None:
        """A scaler that skips an update still ends a step."""
        scaler = torch.amp.GradScaler
        original = scaler.step
        self._scaler_step = original

        def step(scaler_self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = self._num_updates
            self.session.scaler_seen = True
            result = original(scaler_self, optimizer, *args, **kwargs)
            if self._num_updates == before and isinstance(optimizer, torch.optim.Optimizer):
                self._after_update(optimizer, (), {})
            return result

        scaler.step = step  # type: ignore[method-assign,assignment]

    def detach(self) -> None:
        """See `Framework.detach`."""
        self.session.engage_exactly({})
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._scaler_step is not None:
            torch.amp.GradScaler.step = self._scaler_step  # type: ignore[method-assign]
        self.observer.observe("off")
        self.calls.remove()
        self.loaders.remove()
        self._listener = None

    # -- updates and steps ---------------------------------------------------------------------------------------

    def _before_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if get_ident() != self._thread or self.session.silent:
            return
        if id(optimizer) not in self._known:
            self._meet(optimizer)
        if self.observer.depth == "phases":
            self.observer.push("optimizer")
        listener = self._listener
        if self.capture.active and listener is not None:
            self.capture.before_update(optimizer)
            if self.capture.complete and self._is_last_update():
                listener.on_update()

    def _is_last_update(self) -> bool:
        return self.rhythm.next_ends()

    def _after_update(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if get_ident() != self._thread or self.session.silent:
            return
        self._num_updates += 1
        if self.observer.depth == "phases":
            self.observer.pop("optimizer")
        if not self.rhythm.update(id(optimizer)):
            return
        if self._census is not None:
            self._census.pause()
        if self.observer.depth == "off":
            now_s = perf_counter()
        else:
            self._last_phases, self._last_outside_s = self.observer.end_step()
            now_s = self.observer.clock.last if self.observer.depth == "phases" else perf_counter()
        self.loaders.num_steps += 1
        if self.capture.wanted:
            self.capture.at_boundary()
        if not self._settled:
            self._settle()
        if self._listener is not None:
            self._listener.on_step(now_s)

    def _meet(self, optimizer: torch.optim.Optimizer) -> None:
        self._known.add(id(optimizer))
        self._optimizers.append(weakref.ref(optimizer))
        self.session.optimizers = [o for ref in self._optimizers if (o := ref()) is not None]
        self.calls.look_for([optimizer])
        self._settled = False

    def _settle(self) -> None:
        self._num_settling += 1
        if self.observer.depth == "off" and self.calls.found:
            self.observer.observe("ends")
        if self.calls.settle() and self._num_settling > 3:
            self._settled = True
            self.observer.evaluation_is_training = self.observer.num_steps_with_evaluation > self._num_settling / 2

    # -- the contract --------------------------------------------------------------------------------------------

    def settled(self) -> bool:
        """See `Framework.settled`."""
        return self._settled

    def facts(self) -> Facts:
        """See `Framework.facts`."""
        return fact_finding.find(self.session, self.rhythm.num_updates)

    def engage(self, levers: Levers) -> Toggle:
        """See `Framework.engage`."""
        return self.session.engage_exactly(levers)

    def evidence(self) -> tuple[dict[str, str], dict[str, str]]:
        """See `Framework.evidence`."""
        return self.session.evidence()

    def engaged(self) -> Levers:
        """See `Framework.engaged`."""
        return dict(self.session.engaged)

    def observe(self, depth: str) -> None:
        """See `Framework.observe`."""
        self.observer.observe(depth)

    def start_window(self) -> float:
        """See `Framework.start_window`."""
        self._compilations_before = num_compilations()
        self._restarts_before = self.loaders.num_restarts
        self.observer.losses.clear()
        self._memory.reset()
        self._wait()
        self.observer.start()
        if self.observer.device_clock is not None:
            self.observer.device_clock.start()
        return self.observer.clock.last

    def end_step(self) -> tuple[dict[str, float], float]:
        """See `Framework.end_step`."""
        return self._last_phases, self._last_outside_s

    def end_window(self) -> Mapping[str, Any]:
        """See `Framework.end_window`."""
        self._wait()
        device_steps = self.observer.device_clock.read() if self.observer.device_clock is not None else []
        names = sorted({name for step in device_steps for name in step})
        return {
            "losses": [float(loss) for loss in self.observer.losses],
            "device_phases": {name: tuple(step.get(name, 0.0) for step in device_steps) for name in names},
            "recompilations": num_compilations() - self._compilations_before,
            "peak_memory_bytes": self._memory.peak_bytes(),
            "new_epochs": self.loaders.num_restarts - self._restarts_before,
        }

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def begin_capture(self) -> None:
        """See `Framework.begin_capture`."""
        self.capture.want()

    def compare(self, levers: Levers, checks: Sequence[str]) -> Agreement:
        """See `Framework.compare`."""
        return self.numerics.compare(levers, checks)

    def scale(self) -> Scaling | None:
        """See `Framework.scale`."""
        return self.numerics.scale()

    def begin_census(self) -> None:
        """See `Framework.begin_census`."""
        self._census = OperationCounter()
        self._census.__enter__()

    def end_census(self) -> Census:
        """See `Framework.end_census`."""
        counter, self._census = self._census, None
        if counter is None:
            raise RuntimeError("no census was begun")
        counter.__exit__(None, None, None)
        return counter.census()

    def counterfactual(self, name: str, engaged: bool) -> None:
        """See `Framework.counterfactual`."""
        if name == "free_data":
            self.loaders.replay_batch = engaged
