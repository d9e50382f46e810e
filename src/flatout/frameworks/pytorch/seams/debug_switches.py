"""Which switches for debugging are on, and how are they turned off for a while?

In: the process as the script has set it. Out: names of what is on; all of it off, and back as the script wants it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from flatout.frameworks.pytorch.seams.patches import Patch, remove_all
from flatout.frameworks.pytorch.seams.trees import tensors_of

ANOMALY = "anomaly detection"


class _Flag(NamedTuple):
    holder: Any
    name: str
    usual: Any
    device: str = ""
    """Where alone it costs something; empty for anywhere."""


class _Deterministic:
    mode = property(
        lambda self: torch.get_deterministic_debug_mode(), lambda self, mode: torch.set_deterministic_debug_mode(mode)
    )


_FLAGS = {
    "deterministic algorithms": _Flag(_Deterministic(), "mode", 0),
    "disabled oneDNN": _Flag(torch.backends.mkldnn, "enabled", True, "cpu"),
    "disabled cuDNN": _Flag(torch.backends.cudnn, "enabled", True, "cuda"),
    "deterministic cuDNN": _Flag(torch.backends.cudnn, "deterministic", False, "cuda"),
}

_VARIABLES: dict[str, Callable[[str, str], bool]] = {
    "CUDA_LAUNCH_BLOCKING": lambda device, value: device == "cuda" and value not in ("", "0"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": lambda device, value: device == "cuda" and value not in ("", "0"),
    "TORCH_DISTRIBUTED_DEBUG": lambda device, value: value.upper() in ("INFO", "DETAIL"),
    "OMP_NUM_THREADS": lambda device, value: value == "1",
}


def is_traced(out: Any) -> bool:
    """Whether anomaly detection was on when these outputs were computed: their operations then know from where."""
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors_of(out, unique=False)]
    return any("traceback_" in node.metadata for node in nodes if node is not None)


def switched_on(device: str, *, traced: bool) -> tuple[str, ...]:
    """What is on and can be turned off between two steps.

    Args:
        device: Where the models compute.
        traced: Whether a step was seen to be computed with anomaly detection, which may be on in a part of it only.
    """
    anomaly = (ANOMALY,) if traced or torch.is_anomaly_enabled() else ()
    return (*anomaly, *(name for name, flag in _FLAGS.items() if _is_on(flag, device)))


def set_from_outside(device: str) -> tuple[str, ...]:
    """What may slow each step and is set for the process, or is a tool that watches it."""
    found = [
        f"{name}={os.environ[name]}" for name, costs in _VARIABLES.items() if costs(device, os.environ.get(name, ""))
    ]
    return (*found, *(["a running profiler"] if torch._C._autograd._profiler_enabled() else []))


def _is_on(flag: _Flag, device: str) -> bool:
    return flag.device in ("", device) and getattr(flag.holder, flag.name) != flag.usual


class Off:
    """All switches off until `release`; of anomaly detection what the script sets meanwhile is kept for it."""

    def __init__(self, device: str) -> None:
        self.names = {name for name, flag in _FLAGS.items() if _is_on(flag, device)}
        """What was turned off, or held off since."""
        self._former = {name: getattr(_FLAGS[name].holder, _FLAGS[name].name) for name in self.names}
        for name in self.names:
            setattr(_FLAGS[name].holder, _FLAGS[name].name, _FLAGS[name].usual)
        self._wanted = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        torch.set_anomaly_enabled(False)
        self.names |= {ANOMALY} if self._wanted[0] else set()
        self._patches = [
            Patch(torch, "set_anomaly_enabled", _instead(self._want)),
            Patch(torch, "is_anomaly_enabled", _instead(lambda: self._wanted[0])),
            Patch(torch, "is_anomaly_check_nan_enabled", _instead(lambda: self._wanted[1])),
        ]

    def _want(self, enabled: bool, check_nan: bool = True) -> None:
        self._wanted = enabled, check_nan
        self.names |= {ANOMALY} if enabled else set()

    def release(self) -> None:
        """On again what was on, anomaly detection as the script set it last."""
        remove_all(self._patches)
        torch.set_anomaly_enabled(*self._wanted)
        for name, value in self._former.items():
            setattr(_FLAGS[name].holder, _FLAGS[name].name, value)


def _instead(other: Callable[..., Any]) -> Callable[[Any, Patch], Any]:
    def make(original: Any, patch: Patch) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            return (other if patch.active else original)(*args, **kwargs)

        return called

    return make
