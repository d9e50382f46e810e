"""Which device does a script train on, and what does its own clock say? All that is known of devices here.

A device with a queue is told what to do and does it later, so a stamp of the host says where Python was, and not how
long work took. In: parameters, a `torch.device`, calls of `Tensor.to` and the like. Out: events on the stream that is
current there, waiting, memory. The tests put a device of their own in the place of these functions, see
`tests/simulated_device.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch

Event = torch.Event

MEASURED = ("cuda",)
"""Kinds with a queue whose clock is read; PyTorch calls AMD's so, too, whose clock is not."""


def of(parameters: Iterable[torch.Tensor]) -> torch.device | None:
    """Where most of them lie, other than in the memory of the CPU; None where none does.

    >>> of([torch.ones(1)]) is None
    True
    """
    num = Counter(p.device for p in parameters if p.device.type not in ("cpu", "meta"))
    return max(num, key=num.__getitem__) if num else None


def has_queue(device: torch.device) -> bool:
    """Whether steps there are timed by its own clock."""
    return device.type in MEASURED and torch.version.hip is None


def kinds() -> tuple[str, ...]:
    """On which a model may compute here.

    >>> kinds()[0]
    'cpu'
    """
    found = torch.accelerator.current_accelerator()
    return ("cpu",) if found is None else ("cpu", found.type)


def not_measured(device: torch.device) -> str:
    """Why steps there cannot be timed; empty where they can.

    >>> not_measured(torch.device("cpu")), not_measured(torch.device("mps"))
    ('', 'the clock of `mps` is not known here, and a clock of the host would time the orders it is given')
    """
    if device.type == "cpu" or has_queue(device):
        return ""
    name = "ROCm" if device.type in MEASURED else device.type
    return f"the clock of `{name}` is not known here, and a clock of the host would time the orders it is given"


# -- its clock -------------------------------------------------------------------------------------------------------


def new_event(device: torch.device) -> Event:
    """A point in time that `record` sets."""
    return torch.Event(device, enable_timing=True)


def current_stream(device: torch.device) -> torch.Stream:
    """On which that device is told what to do at present."""
    return torch.accelerator.current_stream(device)


def record(event: Event, stream: torch.Stream) -> None:
    """Set it to when the stream has done all it has been told so far."""
    event.record(stream)


def wait(device: torch.device) -> None:
    """Until it has done all that it was told."""
    torch.get_device_module(device).synchronize(device)


def is_capturing(device: torch.device) -> bool:
    """Whether a graph is being captured: nothing is computed, and nobody may wait or look at a clock."""
    return bool(torch.get_device_module(device).is_current_stream_capturing())


def waits(device: torch.device) -> list[tuple[Any, str]]:
    """What a script calls to wait for it, beside methods of tensors: holders and names."""
    module = torch.get_device_module(device)
    return [(holder, "synchronize") for holder in (torch.accelerator, module, module.Stream, module.Event)]


# -- what calls of a tensor's methods concern ------------------------------------------------------------------------


def reads(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a method of the first of these waits for a device.

    >>> reads((torch.ones(1),), {})
    False
    """
    return _kind(*args[:1]) not in ("", "cpu")


def copies(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether `to` copies from the host's memory to a device's, or back.

    >>> x = torch.ones(1)
    >>> copies((x, "cuda"), {}), copies((x, torch.half), {}), copies((x,), {"device": "cpu", "non_blocking": True})
    (True, False, False)
    """
    source = _kind(*args[:1])
    kinds = {_target(one) for one in (*args[1:], *kwargs.values())} - {""}
    return bool(source) and any((kind == "cpu") != (source == "cpu") for kind in kinds)


def to_device(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether `cuda` copies its tensor there."""
    return _kind(*args[:1]) == "cpu"


def _target(given: Any) -> str:
    """The kind of device that an argument of `to` names; empty where it names none."""
    if isinstance(given, str):
        return given.partition(":")[0]
    if isinstance(given, torch.device):
        return given.type
    return "the accelerator" if type(given) is int else _kind(given)


def _kind(value: Any = None) -> str:
    """Of the device on which a tensor lies; empty for anything else."""
    if not isinstance(value, torch.Tensor):
        return ""
    with torch._C.DisableTorchFunctionSubclass():  # a class of the script's own is not asked
        return value.device.type


# -- its memory ------------------------------------------------------------------------------------------------------


def in_use() -> torch.device | None:
    """The one that is current in this process, where it has begun to use one."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or not has_queue(kind) or not torch.get_device_module(kind).is_initialized():
        return None
    return torch.device(kind.type, torch.get_device_module(kind).current_device())


def free_bytes(device: torch.device) -> int:
    """Of its memory what is free where a step needs most; what PyTorch's allocator holds and gave nobody is."""
    module = torch.get_device_module(device)
    free, _ = module.mem_get_info(device)
    return int(free + module.memory_reserved(device) - module.max_memory_allocated(device))


def reset_peak(device: torch.device) -> None:
    """Forget the peak of its memory so far."""
    torch.get_device_module(device).reset_peak_memory_stats(device)


def peak_bytes(device: torch.device) -> int:
    """The most that PyTorch's allocator gave out since, or since the process began."""
    return int(torch.get_device_module(device).max_memory_allocated(device))


def memory_counts(device: torch.device) -> Mapping[str, Any]:
    """What PyTorch's allocator counts."""
    found: Mapping[str, Any] = torch.get_device_module(device).memory_stats(device)
    return found
