"""What does a lever get to work with? The models, optimizers and loaders of this process, and the state to move.

In: levers by name with settings. Out: the levers engaged, released and proven. Used at step boundaries only.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from flatout.frameworks.contract import NotReleased
from flatout.frameworks.lever import Lever
from flatout.frameworks.pytorch.input.loaders import Loaders
from flatout.frameworks.pytorch.lever_bases import why_none, why_not_on_ranks
from flatout.frameworks.pytorch.observe.memory import PageFaults
from flatout.frameworks.pytorch.seams.calls import Calls
from flatout.frameworks.pytorch.seams.optimizers import UpdateFlags
from flatout.guest.interruptions import raised_by_handler
from flatout.records.trace import Levers, Setting, Toggle

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.observe.other_threads import OtherThreads
    from flatout.frameworks.pytorch.parallel.group import Communication
    from flatout.frameworks.pytorch.parallel.ranks import Ranks

NO_EFFECT = "no effect was seen"


class Unavailable(RuntimeError):
    """What a lever needs is not there, as was found when it was to be engaged; the others are engaged without it."""


class Session:
    """The script's objects, as levers may touch them. It keeps none of them alive."""

    def __init__(
        self, calls: Calls, loaders: Loaders, levers: Mapping[str, Lever], cache_folder: str | None = None
    ) -> None:
        self.calls = calls
        self.loaders = loaders
        self.cache_folder = cache_folder
        self.ranks: Ranks | None = None
        """This process as one of many; None where it is alone."""
        self.flags = UpdateFlags()
        self.scaler_seen = False
        self.page_faults = PageFaults()
        self.traced = False
        """Whether a step was seen to be computed with anomaly detection; looked for in trials."""
        self.other_threads: OtherThreads | None = None
        """Those that compute beside the training; None in a run."""
        self.silent = False
        """Whether updates made now are ours and count for nothing."""
        self.levers = levers
        self.engaged: dict[str, Mapping[str, Setting]] = {}
        self.unavailable: dict[str, str] = {}
        """Levers that were asked for last and cannot be engaged in this process: why not."""
        self.kept: dict[str, Any] = {}
        """What a lever needs in order to release itself, by its name."""
        self._proofs: dict[str, str] = {}
        """What has shown that a lever took effect, of those that `proves_once`."""
        self.at_step_end: dict[str, Callable[[], None]] = {}
        """What levers do when a step has ended, by their name; its time is the next step's."""
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []

    @property
    def device(self) -> str:
        """Where the models compute, `cuda` or `cpu`."""
        return self.calls.device

    def require_cuda(self) -> None:
        """Refuse what needs a CUDA device where there is none.

        Raises:
            Unavailable: There is none.
        """
        if not torch.cuda.is_available():
            raise Unavailable("PyTorch finds no CUDA device here")

    def communication(self) -> Communication:
        """How ranks send gradients, where they do.

        Raises:
            Unavailable: They do not.
        """
        num, mode = (self.ranks.group.world, self.ranks.mode) if self.ranks is not None else (1, "")
        reason = why_not_on_ranks(num, mode)
        if self.ranks is None or reason is not None:
            raise Unavailable(reason)
        return self.ranks.group.communication

    # -- optimizers ----------------------------------------------------------------------------------------------

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers that have made an update and still exist, in the order of their first."""
        return [o for ref in self._optimizers if (o := ref()) is not None]

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """One has made its first update."""
        self._optimizers = [ref for ref in self._optimizers if ref() is not None]
        self._optimizers.append(weakref.ref(optimizer))

    # -- state ---------------------------------------------------------------------------------------------------

    def parameters(self) -> list[torch.Tensor]:
        """Every parameter of the found models and optimizers, once."""
        groups = [group["params"] for optimizer in self.optimizers for group in optimizer.param_groups]
        found = chain(*(call.module.parameters() for call in self.calls.found), *groups)
        return list({id(parameter): parameter for parameter in found}.values())

    def map_state(self, change: Callable[[torch.Tensor, torch.Tensor, str], torch.Tensor]) -> None:
        """Change the storage of all state alike: parameters, gradients, buffers, and moments of a parameter's shape.

        A lever that moved parameters alone would leave a fused optimizer to pair elements of different places.
        `change` is given a tensor, the parameter or buffer that it belongs to, which has not moved yet, and what it is
        of it: `data`, `grad`, or the name of a moment.
        """
        with torch.no_grad():
            for parameter in self.parameters():
                states = [optimizer.state.get(parameter) for optimizer in self.optimizers]
                for state in (one for one in states if isinstance(one, dict)):
                    for key, value in state.items():
                        if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                            state[key] = change(value, parameter, key)
                if parameter.grad is not None:
                    _move(parameter.grad, change(parameter.grad.data, parameter, "grad"))
                _move(parameter, change(parameter.data, parameter, "data"))
            buffers = chain.from_iterable(call.module.buffers() for call in self.calls.found)
            for buffer in {id(buffer): buffer for buffer in buffers}.values():
                _move(buffer, change(buffer.data, buffer, "data"))

    # -- levers --------------------------------------------------------------------------------------------------

    def engage(self, name: str, settings: Mapping[str, Setting]) -> None:
        """Engage one lever that is not engaged."""
        try:
            self.levers[name].engage(self, settings)
        except Exception:
            with contextlib.suppress(Exception):  # it may have got as far as nowhere
                self.levers[name].release(self)
            raise
        self.engaged[name] = settings
        self._proofs.pop(name, None)

    def engage_at_start(self, levers: Levers) -> None:
        """Engage those that wait for no step, before the script goes on; what is not to be had is noted."""
        self._engage_all({name: how for name, how in levers.items() if self.levers[name].toggles != "step"})

    def release(self, name: str) -> None:
        """Release one lever that is engaged.

        Raises:
            NotReleased: It could not be taken back whole; what it put around calls of a model is gone even so.
            Exception: What a signal handler of the script raised meanwhile, which is the script's.
        """
        del self.engaged[name]
        try:
            self.levers[name].release(self)
        except Exception as problem:
            for call in self.calls.found:
                call.arounds.pop(name, None)
                if self.levers[name].compiles:
                    call.compute = None
            if raised_by_handler(problem):
                raise
            raise NotReleased(f"{name}: {type(problem).__name__}: {problem}") from problem

    def release_all(self, names: Sequence[str]) -> None:
        """Release these, each whatever becomes of the others, the last first.

        Raises:
            NotReleased: Of the first that could not be taken back.
        """
        broken: NotReleased | None = None
        for name in reversed(names):
            try:
                self.release(name)
            except NotReleased as problem:
                broken = broken or problem
        if broken is not None:
            raise broken

    def engage_exactly(self, wanted: Levers) -> Toggle:
        """Engage exactly `wanted`; a lever with other settings is released first.

        Levers that need a new process are as they were at its start and are not touched.

        Raises:
            NotReleased: One could not be taken back; then none is engaged.
        """
        begun_s = perf_counter()
        with self.calls.gate:
            self.calls.gate.alone()
            return self._engage_exactly(wanted, begun_s)

    def _engage_exactly(self, wanted: Levers, begun_s: float) -> Toggle:
        self.calls.refresh()
        togglable = {name: s for name, s in wanted.items() if self.levers[name].toggles != "process"}
        present = [name for name in self.engaged if self.levers[name].toggles != "process"]
        released = [name for name in present if togglable.get(name) != self.engaged[name]]
        self.release_all(released)
        new = [name for name in self.levers if name in togglable and name not in self.engaged]
        self.unavailable = {n: why for n, why in self.unavailable.items() if self.levers[n].toggles == "process"}
        self._engage_all({name: togglable[name] for name in new})  # in the registry's order: they build on each other
        return Toggle(
            engaged={name: togglable[name] for name in new if name not in self.unavailable},
            released=tuple(released),
            took_s=perf_counter() - begun_s,
            step=-1,
        )

    def _engage_all(self, levers: Levers) -> None:
        for name, settings in levers.items():
            try:
                self.engage(name, settings)
            except Unavailable as problem:
                self.unavailable[name] = str(problem)

    def engage_again(self) -> None:
        """Extend the engaged levers to models and optimizers that have come since."""
        wanted = {name: s for name, s in self.engaged.items() if self.levers[name].toggles == "step"}
        with self.calls.gate:
            self.calls.gate.alone()
            self.release_all(list(wanted))
            self._engage_all(wanted)

    def evidence(self) -> tuple[dict[str, str], dict[str, str]]:
        """Lever to proof, and lever to why there is none."""
        proofs, missing = {}, dict(self.unavailable)
        for name in self.engaged:
            proof = self._proofs.get(name) or self.levers[name].evidence(self)
            if proof:
                proofs[name] = proof
                if self.levers[name].proves_once:
                    self._proofs[name] = proof
            else:
                missing[name] = self.unavailable.get(name) or self._why_none(name)
        return proofs, missing

    def _why_none(self, name: str) -> str:
        """Why a lever shows no effect: what it says of the loaders that feed the training, where it does."""
        if said := self.levers[name].why_no_evidence(self):
            return said
        return why_none([self.levers[name].why_not(self, one) for one in self.loaders.training] or [None]) or NO_EFFECT


def _move(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if value.data_ptr() != tensor.data_ptr() or value.stride() != tensor.stride():
        tensor.data = value
