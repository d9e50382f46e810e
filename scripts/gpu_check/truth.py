"""Is a window as long as the device's own work? Each against CUDA events around many steps of the same loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import simulated
import torch
from device import DEVICE, REHEARSAL, clock_s, judged, true_step_s, wait
from log import Item
from models import mlp
from torch import nn
from windows import Windows

SIZES: dict[str, tuple[tuple[int, int, int], bool, int, int]] = {
    "gpu_bound_no_read": ((4096, 6, 8192), False, 15, 3),  # float32: some 100 ms a step, 80 kernels
    "gpu_bound_item": ((4096, 6, 8192), True, 15, 3),
    "launch_bound": ((64, 60, 32), False, 200, 40),
    "one_step_windows": ((8192, 4, 16384), False, 5, 1),  # some 0.5 s a step
}
"""Width, depth and batch; whether a value is read each step; steps of the truth, and of a window for it."""

SIMULATED: dict[str, dict[str, Any]] = {
    "gpu_bound_no_read": {"device_s": 10e-3},
    "gpu_bound_item": {"device_s": 10e-3, "reads": ("end",)},
    "launch_bound": {"host_s": 100e-6, "device_s": 20e-6},
    "one_step_windows": {"device_s": 50e-3},
}
"""In a rehearsal: seconds that a kernel costs the host and the device."""

DEPTHS = {
    "window": ("ends", "a window over the truth is 1 +- 0.05"),
    "coasting": ("off", "noted: nobody waits, and a window is as long as Python took"),
    "device_clock": ("phases", "the phases' sum over the truth is 1 +- 0.05"),
}


def items() -> list[Item]:
    """In this order."""
    windows = [
        Item(f"{kind}_{name}", shows, partial(_window, name, depth), rehearsed="simulated device")
        for name in SIZES
        for kind, (depth, shows) in DEPTHS.items()
    ]
    return [
        Item("events", "events around steps and the clock on the wall differ by at most 5 %", _events),
        *windows,
        Item(
            "phases_by_kernels", "forward, backward, optimizer: within 5 points of the profiler's kernels", _by_kernels
        ),
        Item("recorder_cost", "at most 40 us a step for its end, 200 us for phases", _recorder_cost),
        Item("items_on_the_cpu", "`.item()` of a tensor on the CPU records no events", _items_on_the_cpu),
        Item("dropout_masks", "one random state gives one mask in all types", _dropout_masks),
        Item("tf32_probe", "a product shows TF32 from 64 on", _tf32_probe),
        Item("cudnn_plan_cache", "whether `cudnn.benchmark` changes a shape that was computed before", _plan_cache),
        Item("precision_warnings", "asking in the old terms warns nobody", _precision_warnings),
    ]


@contextlib.contextmanager
def _loop(name: str) -> Iterator[tuple[Callable[[], object], Callable[[], float], Windows]]:
    """A step, its true seconds, and what watches it."""
    size, reads, num_true, _ = SIZES[name]
    watched = Windows()
    try:
        if REHEARSAL:
            with simulated.loop(watched, **SIMULATED[name]) as (simulated_step, simulated_true_s):
                yield simulated_step, simulated_true_s, watched
            return
        loop = mlp(*size)
        x, y = torch.ones((), device=DEVICE), torch.zeros((), device=DEVICE)

        def step() -> None:
            loop.step()
            if reads:
                (x + y).item()

        yield step, lambda: true_step_s(step, num_true), watched
    finally:
        watched.framework.detach()


def _window(name: str, depth: str) -> dict[str, Any]:
    with _loop(name) as (step, true_s, watched):
        watched.settle(step)
        watched.framework.coast()
        truth_s = true_s()
        found = watched.window(step, SIZES[name][-1], depth)
        device = sum(found.get("device_phases", {}).values())
        ratio, device_ratio = (found.get("step_s") or 0.0) / truth_s, device / truth_s
        right = abs((device_ratio if depth == "phases" else ratio) - 1) <= 0.05 and not found["failures"]
        return {
            "true_step_s": truth_s, "ratio": ratio, "device_ratio": device_ratio, **found,
            "ok": None if depth == "off" else right,
        }  # fmt: skip


def _events() -> dict[str, Any]:
    loop = mlp(4096, 6, 8192)
    by_events_s = true_step_s(loop.step, 10)
    by_wall_s = clock_s(lambda: [loop.step() for _ in range(10)]) / 10
    return {"events_s": by_events_s, "wall_s": by_wall_s, "ok": judged(abs(by_events_s / by_wall_s - 1) <= 0.05)}


def _by_kernels() -> dict[str, Any]:
    """Shares of a step by flatout's phases, and by the profiler's own sum of the kernels of each part."""
    from torch.profiler import profile

    loop, watched = mlp(4096, 6, 8192), Windows()
    x = torch.randn(8192 if not REHEARSAL else 32, loop.model[0].in_features, device=DEVICE)
    outputs: list[torch.Tensor] = []
    parts = {
        "forward": lambda: outputs.append(loop.model(x)),
        "backward": lambda: outputs[-1].sum().backward(),
        "optimizer": loop.optimizer.step,
    }

    def kernels_s(part: Callable[[], object]) -> float:
        with profile() as seen:
            part()
            wait()
        return sum(getattr(e, f"self_{DEVICE.type}_time_total" if REHEARSAL else "self_device_time_total")
                   for e in seen.key_averages()) / 1e6  # fmt: skip

    try:
        found = watched.window(loop.step, 5, "phases")["device_phases"]
    finally:
        watched.framework.detach()
    profiled = {name: kernels_s(part) for name, part in parts.items()}
    ours = {name: found.get(name, 0.0) for name in parts}
    apart = [abs(ours[n] / (sum(ours.values()) or 1) - profiled[n] / (sum(profiled.values()) or 1)) for n in parts]
    return {"phases": found, "profiled_s": profiled, "ok": judged(max(apart) <= 0.05)}


def _recorder_cost() -> dict[str, Any]:
    """Microseconds a step that each depth adds to a step of about a millisecond."""
    step, num = mlp(64, 60, 32).step, 10 if REHEARSAL else 300
    plain_s = true_step_s(step, num)
    watched, found = Windows(), {"plain_step_s": plain_s}
    watched.settle(step)
    for depth in ("off", "ends", "phases"):
        watched.framework.coast() if depth == "off" else watched.framework.observe(depth)
        found[f"{depth}_us"] = (true_step_s(step, num) - plain_s) * 1e6
    watched.framework.detach()
    found["plain_again_us"] = (true_step_s(step, num) - plain_s) * 1e6
    return {**found, "ok": judged(found["ends_us"] < 40 and found["phases_us"] < 200)}


def _items_on_the_cpu() -> dict[str, Any]:
    """`.item()` of a tensor on the CPU waits for no device, and must cost no events."""
    from flatout.frameworks.pytorch.observe.device_clock import DeviceClock

    step, num = mlp(64, 60, 32).step, 4 if REHEARSAL else 20
    small, marks, kept = torch.rand(1), [0], DeviceClock._mark

    def with_items() -> None:
        for _ in range(500):
            small.item()
        step()

    def marked(self: DeviceClock, phase: str) -> None:
        marks[0] += 1
        kept(self, phase)

    watched = Windows()
    DeviceClock._mark = marked  # type: ignore[method-assign]
    try:
        found = watched.window(with_items, num, "phases")
    finally:
        DeviceClock._mark = kept  # type: ignore[method-assign]
        watched.framework.detach()
    a_step = marks[0] / (num + 1)
    return {"events_a_step": a_step, "device_phases": found.get("device_phases"), "ok": a_step < 60}


def _dropout_masks() -> dict[str, Any]:
    """Does one random state give one mask in all types? Else bf16 cannot be compared where there is dropout."""
    masks, states = {}, {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in ((1 << 20,), (1000, 1001)):
            torch.manual_seed(1)
            masks[dtype, shape] = torch.native_dropout(torch.ones(shape, device=DEVICE, dtype=dtype), 0.3, True)[1]
            states[dtype, shape] = torch.get_rng_state() if REHEARSAL else torch.cuda.get_rng_state()
    shapes = {shape for _, shape in masks}

    def alike(found: dict[Any, torch.Tensor]) -> dict[str, bool]:
        return {
            str(s): all(torch.equal(found[torch.float32, s], found[d, t]) for d, t in found if t == s) for s in shapes
        }

    same, state = alike(masks), alike(states)
    return {"same_mask": same, "same_state": state, "ok": judged(all(same.values()) and all(state.values()))}


def _tf32_probe() -> dict[str, Any]:
    """From which size on a product shows TF32: the lever's evidence uses one."""
    torch.backends.cuda.matmul.allow_tf32 = True
    value = 1 + 2**-12
    shown = {}
    for n in (16, 64, 128, 256, 512, *(() if REHEARSAL else (1024,))):
        one = torch.full((n, n), value, device=DEVICE)
        shown[n] = (one @ one)[0, 0].item() == float(n)
    torch.backends.cuda.matmul.allow_tf32 = False
    return {"tf32_shown": shown, "ok": judged(shown[64])}


def _plan_cache() -> dict[str, Any]:
    """Does `cudnn.benchmark` change anything after a shape has been computed without it?"""
    from torch.profiler import profile

    conv = nn.Conv2d(64, 64, 3, padding=1, bias=False).to(DEVICE)
    x, other = (torch.randn(4 if REHEARSAL else 64, 64, size, size, device=DEVICE) for size in (56, 57))

    def kernels(image: torch.Tensor) -> list[str]:
        with profile() as seen:
            conv(image)
            wait()
        return sorted(e.name for e in seen.events() if REHEARSAL or e.device_type == torch.autograd.DeviceType.CUDA)

    def first_s(image: torch.Tensor) -> float:
        return clock_s(lambda: conv(image))

    torch.backends.cudnn.benchmark = False
    cold_s = first_s(x)
    before = kernels(x)
    torch.backends.cudnn.benchmark = True
    toggled_s, after, new_s = first_s(x), kernels(x), first_s(other)
    new = kernels(other)
    torch.backends.cudnn.benchmark = False
    return {
        "cold_s": cold_s, "toggled_first_s": toggled_s, "new_shape_first_s": new_s, "before": before, "after": after,
        "new": new, "kernels_same": before == after, "searched_after_toggle": toggled_s > 5e-3,
    }  # fmt: skip


def _precision_warnings() -> dict[str, Any]:
    """Does asking for the precision of products in the old terms warn on the user's stderr?"""
    import warnings

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        precision = torch.get_float32_matmul_precision()
        allowed = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    return {"precision": precision, "allowed": allowed, "warned": [str(w.message)[:200] for w in seen], "ok": not seen}
