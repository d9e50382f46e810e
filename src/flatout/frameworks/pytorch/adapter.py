"""How does PyTorch fulfil the framework contract? Hooks on optimizers, and the seams in calls and loaders.

In: what the conductor asks for. Out: steps, windows, facts, numerics. One instance per process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from flatout.frameworks.contract import Settings, Step, StepListener
from flatout.frameworks.pytorch import facts as fact_finding
from flatout.frameworks.pytorch.input.loaders import Loaders
from flatout.frameworks.pytorch.levers import registry
from flatout.frameworks.pytorch.numerics.capture import Capture
from flatout.frameworks.pytorch.numerics.compare import Numerics
from flatout.frameworks.pytorch.observe import devices
from flatout.frameworks.pytorch.observe.memory import peak_bytes, reset_peak
from flatout.frameworks.pytorch.observe.observer import Observer
from flatout.frameworks.pytorch.seams import patches
from flatout.frameworks.pytorch.seams.calls import Calls
from flatout.frameworks.pytorch.session import Session
from flatout.frameworks.pytorch.steps import Steps
from flatout.guest.interruptions import raised_by_handler
from flatout.guest.tracebacks import hide_ours
from flatout.records.facts import Facts
from flatout.records.trace import OUTSIDE, Agreement, Census, Levers, Scaling, Toggle

if TYPE_CHECKING:
    from pathlib import Path

    from flatout.frameworks.pytorch.export_model import ModelExporter
    from flatout.frameworks.pytorch.observe.census import OperationCounter
    from flatout.frameworks.pytorch.parallel.ranks import Ranks
    from flatout.records.exported_models import ModelExport
    from flatout.records.ranks import RankConfig, RankPlace

FEWEST_SETTLING_STEPS = 4
"""Steps that are looked at before it is said what the script does."""

WARM_UP_STEPS = 3
"""The last of these, by a device's clock, are a first idea of the step time."""


class PyTorch:
    """PyTorch in this process; what has no docstring here is described by `Framework`."""

    name = "pytorch"

    def __init__(self, settings: Settings | None = None) -> None:
        settings = settings or Settings()
        self.version: str = str(torch.__version__)
        self.calls = Calls()
        self.loaders = Loaders()
        self.loaders.store_memory_bytes = settings.store_memory_bytes
        self.loaders.admits_random = settings.admits_random
        self.observer = Observer(self.calls, self.loaders)
        self.session = Session(self.calls, self.loaders, registry(), settings.cache_folder)
        self.capture = Capture(self.calls)
        self.numerics = Numerics(self.session, self.capture)
        self.infers = settings.infers
        """Whether calls of models are to be steps whatever else the script does."""
        self._goal = settings.goal
        self.steps = Steps(self)
        self.listener: StepListener | None = None
        self._is_trial = False
        self._settled = False
        self._num_settling = 0
        self._has_queue = False
        """Whether they are trained on a device with a queue."""
        self._not_measured = ""
        self._is_lifted = False
        """Whether models are called, and loaders gone through, without us where no lever needs us."""
        self.ranks: Ranks | None = None
        self._census: OperationCounter | None = None
        self._exporter: ModelExporter | None = None
        self._compilations_before = 0
        self._passes_before = self._smaller_before = 0
        self._calls_s: list[float] = []
        """Seconds that models took in each step of the window, where nothing is trained."""
        self._num_calls: list[int] = []
        """Of a trial's window, calls of trained models so far: as it began, and at the end of each step."""

    # -- attach --------------------------------------------------------------------------------------------------

    def prepare(self, levers: Levers, *, trial: bool, learns: bool = False) -> None:
        self.loaders.reopen = trial
        self.loaders.studies = trial or learns
        self._is_trial = trial
        if trial or learns:  # now: a script that freezes what is there has the collector walk what comes later
            import flatout.frameworks.pytorch.input.items.parts  # noqa: F401
            from flatout.frameworks.pytorch.observe.attention import backends_of
            from flatout.frameworks.pytorch.observe.other_threads import OtherThreads
            from flatout.frameworks.pytorch.seams.debug_switches import is_traced

            def look(out: Any) -> tuple[str, ...]:
                self.session.traced |= is_traced(out)
                return backends_of(out)

            self.calls.look_at_graph = look
            self.session.other_threads = OtherThreads()
        self.loaders.install()
        self.session.engage_at_start(levers)

    def attach(self, listener: StepListener) -> None:
        self.listener = listener
        self.loaders.on_failure = self.fail
        self.loaders.on_pass_end = listener.on_pass_end
        self.observer.on_failure = self.fail
        self.calls.on_broken = self._drop_levers
        self.loaders.install()
        self.steps.install()

    def join(self, place: RankPlace, terms: RankConfig) -> None:
        """Become one of many ranks, which divide the calls of models among them; before `attach`."""
        from flatout.frameworks.pytorch.parallel.ranks import Ranks

        self.ranks = self.session.ranks = Ranks(place, terms, self.calls)
        self.ranks.group.observer = self.observer
        self.ranks.begin()

    def detach(self) -> None:
        counter, self._census = self._census, None
        if counter is not None:
            counter.__exit__(None, None, None)
        try:
            self.session.engage_exactly({})
        finally:
            self.steps.remove()
            self.capture.drop()
            self.observer.observe("off")
            if self.ranks is None:  # the others count on this one
                self.calls.remove()
            self.loaders.settings = {}
            self.loaders.remove()
            self.listener = None

    def fail(self, stage: str, problem: BaseException) -> None:
        """Something of ours went wrong; training goes on."""
        if self.listener is not None:
            self.listener.on_failure(stage, problem)

    def is_ours(self, problem: BaseException) -> bool:
        """Whether what was raised in a hook of ours is a failure of ours, which is then noted.

        Else it is the script's, to be raised again: Ctrl-C, or what a signal handler of the script raised meanwhile.
        """
        if isinstance(problem, Exception) and not raised_by_handler(problem):
            self.fail("recorder", problem)
            return True
        hide_ours(problem)
        return False

    def _drop_levers(self, problem: Exception) -> Callable[[bool], None]:
        """A model call raised under levers: release them in the middle of the step, the call is made again.

        What is returned is told whether it then went well. Where it did not, the script itself had raised, and may go
        on in its own way: its levers are engaged again.
        """
        if raised_by_handler(problem):
            raise problem
        dropped = self.engaged()
        try:
            self.session.engage_exactly({})
        except Exception as other:  # noqa: BLE001  nothing of ours may stop the call that is made next
            self.fail("release", other)
            dropped = {}
        # Its frames hold what the call had computed, and memory may be what was missing.
        problem = problem.with_traceback(None)
        problem.__context__ = problem.__cause__ = None

        def judge(well: bool) -> None:
            if well:
                self.fail("step", problem)
                return
            try:
                self.session.engage_exactly(dropped)
            except Exception as other:  # noqa: BLE001
                self.fail("engage", other)

        return judge

    # -- steps ---------------------------------------------------------------------------------------------------

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer makes its first update, or has groups that it had not."""
        if not any(o is optimizer for o in self.session.optimizers):
            self.session.add_optimizer(optimizer)
        self.look_for([p for group in optimizer.param_groups for p in group["params"]])

    def look_for(self, parameters: Sequence[torch.Tensor]) -> None:
        """Parameters are trained: find the models that own them."""
        self._look_where(parameters)
        self._follow()
        self.calls.look_for(parameters)
        self._unsettle()
        if self.ranks is not None:
            self.ranks.watch()

    def infer(self) -> None:
        """Nothing is trained: calls of models are steps."""
        self.calls.infer()
        self._look_where([p for call in self.calls.found for p in torch.nn.Module.parameters(call.module)])
        self._unsettle()

    def _look_where(self, parameters: Sequence[torch.Tensor]) -> None:
        if (where := devices.of(parameters)) is not None:
            self._not_measured, self._has_queue = devices.not_measured(where), devices.has_queue(where)
            if self._has_queue:
                self.calls.where = where

    def _unsettle(self) -> None:
        self._settled = False
        self._num_settling = 0

    def end_of_step(self) -> None:
        """A step has ended, by whichever rhythm; one that was captured is only a recipe, and nothing was computed."""
        if self._has_queue and devices.is_capturing(self.calls.where):
            return
        if self._census is not None:
            self._census.pause()
        if self.observer.depth == "off":
            self._told_of_step(Step(perf_counter()))
            return
        phases, outside_s = self.observer.end_step()
        step = Step(self.observer.clock.last, phases, outside_s)
        if self.observer.depth == "ends":
            self._told_of_step(step)
            return
        self.observer.clock.push("recorder")  # what we do here is ours, not the script's
        try:
            self._told_of_step(step)
        finally:
            self.observer.pop("recorder")

    def end_of_call(self, took_s: float) -> None:
        """A call of a script that trains nothing is over, and with it a step: what waits for an update is told now."""
        if self.observer.depth == "ends" and not self._has_queue:  # a device computes when the call is over
            self._calls_s.append(took_s)
        self.steps.tell_update()
        self.end_of_step()

    def _told_of_step(self, step: Step) -> None:
        self.loaders.num_steps += 1
        if self._is_trial:
            self._num_calls.append(self.calls.num_training_calls)
        if self.capture.active:
            self.capture.at_boundary()
        if not self._settled:
            self._settle()
        if self.listener is not None:
            self.listener.on_step(step)
        if self.session.at_step_end:
            for act in tuple(self.session.at_step_end.values()):
                act()

    def _settle(self) -> None:
        self._num_settling += 1
        if self.ranks is not None and self._num_settling == 1:
            self.ranks.after_first_step()
        self.session.page_faults.note(first=self._num_settling == 1)
        if self.session.other_threads is not None and self.calls.thread:
            self.session.other_threads.look(self.calls.thread)
        for call in self.calls.seams:
            call.end_step()
        if self.observer.depth == "off" and self.calls.found:
            self.observer.observe("ends")
            self.observer.start()
        if self.calls.settle() and self._num_settling >= FEWEST_SETTLING_STEPS:
            self._settled = True
            if self.ranks is not None:
                self.ranks.rest()
            self.calls.end_settling()
            if any(self.session.levers[name].toggles == "step" for name in self.session.engaged):
                self.session.engage_again()  # models and optimizers that came after the levers

    # -- the contract --------------------------------------------------------------------------------------------

    def settled(self) -> bool:
        return self._settled

    def facts(self) -> Facts:
        found = fact_finding.find(self.session, self.steps.ended_by)
        if not self._has_queue:
            return replace(found, not_measured=self._not_measured) if self._not_measured else found
        steps_s = [sum(step.values()) for step in (self.observer.device_steps() or ())[-WARM_UP_STEPS:]]
        return replace(found, warm_up_step_s=sum(steps_s) / max(len(steps_s), 1))

    def engage(self, levers: Levers) -> Toggle:
        self._follow()
        return self.session.engage_exactly(levers)

    def evidence(self) -> tuple[dict[str, str], dict[str, str]]:
        return self.session.evidence()

    def patched(self) -> list[str]:
        return patches.patched()

    def remarks(self) -> list[str]:
        lost = [f"no step was measured: {self._not_measured}"] if self._not_measured else []
        return [*lost, *self.loaders.remarks(), *(self.ranks.remarks() if self.ranks is not None else [])]

    def trained(self) -> Any:
        from flatout.frameworks.pytorch.numerics.trained import Trained  # samples of a run alone ask for it

        return Trained(self.session, self.calls)

    def engaged(self) -> Levers:
        return dict(self.session.engaged)

    def vary_seeds(self, run: int) -> None:
        from flatout.frameworks.pytorch.seams import seeds  # `prove` alone asks for it

        seeds.vary(run)

    def keep_losses(self) -> None:
        self.observer.keeps_losses = True

    def observe(self, depth: str) -> None:
        self._follow()
        self.observer.observe(depth)
        if depth == "ends" and self._may_coast():
            self.steps.coasts = True

    def coast(self) -> None:
        self.observer.observe("off")
        if not self._may_coast():
            return
        self._is_lifted = True
        self.calls.lift()
        if not self.loaders.in_use:
            self.loaders.remove()
        self.steps.coasts = True

    def _may_coast(self) -> bool:
        """Whether nothing but updates is needed to tell where steps end."""
        return self.steps.ended_by == "optimizer" and self._settled

    def _follow(self) -> None:
        """Be where everything can be seen and changed again, beside no call of another thread."""
        self.calls.gate.alone()
        self.steps.coasts = False
        if self._is_lifted:
            self._is_lifted = False
            self.calls.refresh()
            self.loaders.install()

    def start_window(self) -> float:
        self.calls.gate.alone()
        if not self._is_lifted:
            self.calls.refresh()
        self._compilations_before = num_compilations()
        self._passes_before, self._smaller_before = self.loaders.num_passes, self.loaders.num_smaller
        self._calls_s.clear()
        self._num_calls = [self.calls.num_training_calls]
        if self._is_trial:
            reset_peak(self.calls.where)
        if self.observer.depth == "reads":
            self.observer.note_reads()
        elif self.observer.depth == "profile":
            self.observer.begin_profile()
        self.observer.start()
        if self.observer.depth == "stacks":
            self.observer.sample_stacks()
        return self.observer.clock.last

    def num_missed_steps(self) -> int:
        return self.steps.num_missed

    def training_since_s(self) -> float | None:
        return self.steps.since_s

    def end_window(self) -> Mapping[str, Any]:
        stacks, host_reads = self.observer.sampled_stacks(), self.observer.noted_reads()
        profile = self.observer.end_profile()
        device_steps = self.observer.device_steps()
        return {
            **({"device_phases": {}} if device_steps is None else _told(device_steps, deep=self.observer.is_deep)),
            "losses": [float(loss) for loss in self.observer.losses],
            "call_s": tuple(self._calls_s),
            "goal": self._goal if self._calls_s else "throughput",
            "num_calls": _steps_of(self._num_calls),
            "recompilations": num_compilations() - self._compilations_before,
            "peak_memory_bytes": peak_bytes(self.calls.where),
            "new_epochs": self.loaders.num_passes - self._passes_before,
            "smaller_batches": self.loaders.num_smaller - self._smaller_before,
            "stacks": stacks,
            "host_reads": host_reads,
            "profile": profile,
        }

    def begin_capture(self) -> None:
        self._follow()
        self.capture.want()
        if self.steps.ended_by in ("loader", "call"):  # no update shows: what waits for one is told after a backward
            self.capture.on_backward = self.steps.tell_update

    def compare(self, levers: Levers, checks: Sequence[str]) -> Agreement | None:
        self.calls.gate.alone()
        return self.numerics.compare(levers, checks)

    def scale(self) -> Scaling | None:
        return self.numerics.scale()

    def export(self, to: str, folder: Path) -> ModelExport | None:
        from flatout.frameworks.pytorch.export_model import ModelExporter  # one command's trials alone ask for it

        self._exporter = self._exporter or ModelExporter(self.calls, to, folder)
        if not self.capture.problem and not self._exporter.add(self.capture.present):
            return None
        self.capture.drop()
        try:
            return self._exporter.export()
        finally:
            self._exporter = None

    def begin_census(self) -> None:
        self._follow()
        if not self.calls.thread:  # a census is of the thread that begins it, and another one would end it
            raise RuntimeError("several threads call models: operations are not counted")
        from flatout.frameworks.pytorch.observe.census import OperationCounter  # in trials: it loads tables of formulas

        self._census = OperationCounter()
        self._census.__enter__()

    def end_census(self) -> Census:
        counter, self._census = self._census, None
        if counter is None:
            raise RuntimeError("no census was begun")
        counter.__exit__(None, None, None)
        return counter.census()

    def counterfactual(self, name: str, engaged: bool) -> None:
        if name == "free_data":
            self.loaders.replay(engaged)


def _steps_of(totals: Sequence[int]) -> tuple[int, ...]:
    """What was added in each step; empty where it was one each time, or nothing.

    >>> _steps_of([3, 5, 6]), _steps_of([3, 4, 5]), _steps_of([0, 0])
    ((2, 1), (), ())
    """
    added = tuple(after - before for before, after in pairwise(totals))
    return () if {*added} in ({0}, {1}) else added


def _told(steps: Sequence[Mapping[str, float]], *, deep: bool) -> dict[str, Any]:
    """What a window tells of its steps by a device's own clock; their parts only where they were looked at."""
    names = sorted({name for step in steps for name in step if deep or name in OUTSIDE})
    return {
        "step_s": [sum(step.values()) for step in steps],
        "outside_s": [sum(step.get(name, 0.0) for name in OUTSIDE) for step in steps],
        "device_phases": {name: tuple(step.get(name, 0.0) for step in steps) for name in names},
    }


def num_compilations() -> int:
    """Frames that dynamo has compiled in this process, and models exported; 0 while neither is even imported."""
    exports = sys.modules.get("flatout.frameworks.pytorch.seams.exported")
    num = 0 if exports is None else exports.num_made
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return int(num)
    return int(num + sum(dynamo.counters["frames"].values()) + dynamo.counters["stats"]["unique_graphs"])
