"""Which switches for debugging are on, and how are they turned off for a while?

In: the process as the script has set it. Out: names of what is on; all of it off, and back as the script wants it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from flatout.frameworks.pytorch.seams.patches import Patch, remove_all
from flatout.frameworks.pytorch.seams.trees import tensors_of

ANOMALY = "anomaly detection"


class _Deterministic:
    mode = property(
        lambda self: torch.get_deterministic_debug_mode(), lambda self, mode: torch.set_deterministic_debug_mode(mode)
    )


_FLAGS: dict[str, tuple[Any, str, Any, str]] = {
    "deterministic algorithms": (_Deterministic(), "mode", 0, ""),
    "disabled oneDNN": (torch.backends.mkldnn, "enabled", True, "cpu"),
    "disabled cuDNN": (torch.backends.cudnn, "enabled", True, "cuda"),
    "deterministic cuDNN": (torch.backends.cudnn, "deterministic", False, "cuda"),
}
"""By name: an attribute, its usual value, and the device where alone it costs something."""

_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING=1": "cuda", "PYTORCH_NO_CUDA_MEMORY_CACHING=1": "cuda", "OMP_NUM_THREADS=1": "",
    "TORCH_DISTRIBUTED_DEBUG=INFO": "", "TORCH_DISTRIBUTED_DEBUG=DETAIL": "",
}  # fmt: skip


def is_traced(out: Any) -> bool:
    """Whether anomaly detection was on when these outputs were computed: their operations then know from where."""
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors_of(out, unique=False)]
    return any("traceback_" in node.metadata for node in nodes if node is not None)


def switched_on(device: str, *, traced: bool = False) -> tuple[str, ...]:
    """What is on and can be turned off between two steps.

    Args:
        device: Where the models compute.
        traced: Whether a step was seen to be computed with anomaly detection, which may be on in a part of it only.
    """
    flags = [
        name
        for name, (holder, attribute, usual, where) in _FLAGS.items()
        if where in ("", device) and getattr(holder, attribute) != usual
    ]
    return (*([ANOMALY] if traced or torch.is_anomaly_enabled() else []), *flags)


def set_from_outside(device: str) -> tuple[str, ...]:
    """What may slow each step and is set for the process, or is a tool that watches it."""
    there = {f"{name}={value}" for name, value in os.environ.items()}
    found = [text for text, where in _VARIABLES.items() if text in there and where in ("", device)]
    return (*found, *(["a running profiler"] if torch._C._autograd._profiler_enabled() else []))


class Off:
    """All switches off until `release`; of anomaly detection what the script sets meanwhile is kept for it."""

    def __init__(self, device: str) -> None:
        self.names = {*switched_on(device)}
        """What was turned off, or held off since."""
        self._former = {name: getattr(*_FLAGS[name][:2]) for name in self.names - {ANOMALY}}
        for name in self._former:
            setattr(*_FLAGS[name][:3])
        self._wanted = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
        torch.set_anomaly_enabled(False)
        instead: dict[str, Callable[..., Any]] = {
            "set_anomaly_enabled": self._want,
            "is_anomaly_enabled": lambda: self._wanted[0],
            "is_anomaly_check_nan_enabled": lambda: self._wanted[1],
        }
        self._patches = [Patch(torch, name, _by(ours)) for name, ours in instead.items()]

    def _want(self, enabled: bool, check_nan: bool = True) -> None:
        self._wanted = enabled, check_nan
        self.names |= {ANOMALY} if enabled else set()

    def release(self) -> None:
        """On again what was on, anomaly detection as the script set it last."""
        remove_all(self._patches)
        torch.set_anomaly_enabled(*self._wanted)
        for name, value in self._former.items():
            setattr(*_FLAGS[name][:2], value)


def _by(ours: Callable[..., Any]) -> Callable[[Any, Patch], Any]:
    return lambda original, patch: lambda *args, **named: (ours if patch.active else original)(*args, **named)
