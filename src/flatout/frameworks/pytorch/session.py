"""What does a lever get to work with? The models, optimizers and loaders of this process, and the state to move.

In: levers by name with settings. Out: the levers engaged, released and proven. Used at step boundaries only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from time import perf_counter
from typing import Any

import torch

from flatout.frameworks.pytorch.calls import Calls
from flatout.frameworks.pytorch.levers import registry
from flatout.frameworks.pytorch.loaders import Loaders
from flatout.plan import Lever
from flatout.trace import Levers, Setting, Toggle


class Session:
    """The script's objects, as levers may touch them."""

    def __init__(self, calls: Calls, loaders: Loaders, device: str, cache_folder: str | None = None) -> None:
        self.calls = calls
        self.loaders = loaders
        self.device = device
        self.cache_folder = cache_folder
        self.optimizers: list[torch.optim.Optimizer] = []
        self.scaler_seen = False
        self.silent = False
        """Whether updates made now are ours and count for nothing."""
        self.levers: dict[str, Lever] = registry()
        self.engaged: dict[str, Mapping[str, Setting]] = {}
        self.kept: dict[str, Any] = {}
        """What a lever needs in order to release itself, by its name."""

    # -- state ---------------------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Every parameter of the found models and optimizers, once."""
        seen: set[int] = set()
        for call in self.calls.found:
            for parameter in call.module.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in seen:
                        seen.add(id(parameter))
                        yield parameter

    def map_state(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Change the storage of all state alike: parameters, gradients, buffers, and moments of a parameter's shape.

        A lever that moved parameters alone would leave a fused optimizer to pair elements of different places.
        """
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.data = change(parameter.data)
                if parameter.grad is not None:
                    parameter.grad.data = change(parameter.grad.data)
            for call in self.calls.found:
                for buffer in call.module.buffers():
                    buffer.data = change(buffer.data)
            for optimizer in self.optimizers:
                for owner, state in optimizer.state.items():
                    for key, value in state.items():
                        if isinstance(value, torch.Tensor) and value.shape == owner.shape:
                            state[key] = change(value)

    # -- levers --------------------------------------------------------------------------------------------------

    def engage(self, name: str, settings: Mapping[str, Setting]) -> None:
        """Engage one lever that is not engaged."""
        self.levers[name].engage(self, settings)
        self.engaged[name] = settings

    def release(self, name: str) -> None:
        """Release one lever that is engaged."""
        del self.engaged[name]
        self.levers[name].release(self)

    def engage_exactly(self, wanted: Levers) -> Toggle:
        """Engage exactly `wanted`; a lever with other settings is released first.

        Levers that need a new process are as they were at its start and are not touched.
        """
        begun_s = perf_counter()
        togglable = {name: s for name, s in wanted.items() if self.levers[name].toggles != "process"}
        present = [name for name in self.engaged if self.levers[name].toggles != "process"]
        released = [name for name in present if togglable.get(name) != self.engaged[name]]
        for name in reversed(released):
            self.release(name)
        new = [name for name in self.levers if name in togglable and name not in self.engaged]
        for name in new:  # in the registry's order, which is that in which they build on each other
            self.engage(name, togglable[name])
        return Toggle(
            engaged={name: togglable[name] for name in new},
            released=tuple(released),
            took_s=perf_counter() - begun_s,
            step=-1,
        )

    def evidence(self) -> tuple[dict[str, str], dict[str, str]]:
        """Lever to proof, and lever to why there is none."""
        proofs, missing = {}, {}
        for name in self.engaged:
            proof = self.levers[name].evidence(self)
            if proof:
                proofs[name] = proof
            else:
                missing[name] = "no effect was seen"
        return proofs, missing
