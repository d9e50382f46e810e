"""G1: is a window as long as the device's own work? Each against CUDA events around many steps of the same loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from device import DEVICE, REHEARSAL, SHRINK, true_step_s, wait
from log import Log
from torch import nn
from windows import Windows

Step = Callable[[], object]


def run(log: Log) -> None:
    """All items."""
    for name, (step, num_true, num_window) in loops().items():
        watched = Windows()
        log.item(f"window_{name}", lambda: _window(watched, step, num_true, num_window, "ends"))  # noqa: B023
        log.item(f"coasting_{name}", lambda: _window(watched, step, num_true, num_window, "off"))  # noqa: B023
        log.item(f"device_clock_{name}", lambda: _window(watched, step, num_true, num_window, "phases"))  # noqa: B023
        watched.framework.detach()
    log.item("recorder_cost", _recorder_cost)
    log.item("items_on_the_cpu", _items_on_the_cpu)
    if REHEARSAL:
        return
    log.item("dropout_masks", _dropout_masks)
    log.item("tf32_probe", _tf32_probe)
    log.item("cudnn_plan_cache", _cudnn_plan_cache)
    log.item("legacy_precision_warnings", _legacy_precision_warnings)


def loops() -> dict[str, tuple[Step, int, int]]:
    """Name -> a step, steps of the truth, steps of a window as they would be chosen for it."""
    torch.manual_seed(0)

    def mlp(width: int, depth: int, batch: int, *, item: bool) -> Step:
        width, batch = max(16, width // SHRINK), max(4, batch // SHRINK**2)
        layers = [part for _ in range(depth) for part in (nn.Linear(width, width), nn.GELU())]
        model = nn.Sequential(*layers).to(DEVICE)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        x = torch.randn(batch, width, device=DEVICE)

        def step() -> None:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            if item:
                loss.item()

        return step

    return {
        "gpu_bound_no_read": (mlp(4096, 6, 8192, item=False), 15, 3),  # float32: some 100 ms a step, 80 kernels
        "gpu_bound_item": (mlp(4096, 6, 8192, item=True), 15, 3),
        "launch_bound": (mlp(64, 60, 32, item=False), 200, 40),
        "one_step_windows": (mlp(8192, 4, 16384, item=False), 5, 1),  # some 0.5 s a step
    }


def _window(watched: Windows, step: Step, num_true: int, num_window: int, depth: str) -> dict[str, Any]:
    watched.settle(step)
    watched.framework.coast()
    true_s = true_step_s(step, num_true)
    found = watched.window(step, num_window, depth)
    device = sum(found.get("device_phases", {}).values())
    ratio = (found.get("step_s") or 0.0) / true_s
    judged = device / true_s if depth == "phases" and device else ratio
    return {  # at `off` nobody waits, and a window is as long as Python took
        "true_step_s": true_s, "ratio": ratio, "device_ratio": device / true_s if device else None,
        **found, "ok": abs(judged - 1) <= 0.05 or depth == "off",
    }  # fmt: skip


def _recorder_cost() -> dict[str, Any]:
    """Microseconds a step that each depth adds to a step of about a millisecond."""
    step, *_ = loops()["launch_bound"]
    plain_s = true_step_s(step, 300)
    watched, found = Windows(), {"plain_step_s": plain_s}
    watched.settle(step)
    for depth in ("off", "ends", "phases"):
        watched.framework.coast() if depth == "off" else watched.framework.observe(depth)
        found[f"{depth}_us"] = (true_step_s(step, 300) - plain_s) * 1e6
    watched.framework.detach()
    found["plain_again_us"] = (true_step_s(step, 300) - plain_s) * 1e6
    return {**found, "ok": found["ends_us"] < 40 and found["phases_us"] < 200}


def _items_on_the_cpu() -> dict[str, Any]:
    """`.item()` of a tensor on the CPU waits for no device, and must cost no events."""
    from flatout.frameworks.pytorch.observe.device_clock import DeviceClock

    step, *_ = loops()["launch_bound"]
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
        found = watched.window(with_items, 20, "phases")
    finally:
        DeviceClock._mark = kept  # type: ignore[method-assign]
        watched.framework.detach()
    return {"events_a_step": marks[0] / 21, "device_phases": found.get("device_phases"), "ok": marks[0] / 21 < 60}


def _dropout_masks() -> dict[str, Any]:
    """Does one random state give one mask in all types? Else bf16 cannot be compared where there is dropout."""
    masks, states = {}, {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in ((1 << 20,), (1000, 1001)):
            torch.cuda.manual_seed(1)
            masks[dtype, shape] = torch.native_dropout(torch.ones(shape, device="cuda", dtype=dtype), 0.3, True)[1]
            states[dtype, shape] = torch.cuda.get_rng_state()
    shapes = {shape for _, shape in masks}

    def alike(found: dict[Any, torch.Tensor]) -> dict[str, bool]:
        return {
            str(s): all(torch.equal(found[torch.float32, s], found[d, t]) for d, t in found if t == s) for s in shapes
        }

    same, state = alike(masks), alike(states)
    return {"same_mask": same, "same_state": state, "ok": all(same.values()) and all(state.values())}


def _tf32_probe() -> dict[str, Any]:
    """From which size on a product shows TF32: the lever's evidence uses one."""
    torch.backends.cuda.matmul.allow_tf32 = True
    value = 1 + 2**-12
    shown = {}
    for n in (16, 64, 128, 256, 512, 1024):
        one = torch.full((n, n), value, device="cuda")
        shown[n] = (one @ one)[0, 0].item() == float(n)
    torch.backends.cuda.matmul.allow_tf32 = False
    return {"tf32_shown": shown, "ok": shown[64]}


def _cudnn_plan_cache() -> dict[str, Any]:
    """Does `cudnn.benchmark` change anything after a shape has been computed without it?"""
    from torch.profiler import ProfilerActivity, profile

    conv = nn.Conv2d(64, 64, 3, padding=1, bias=False).cuda()
    x, other = torch.randn(64, 64, 56, 56, device="cuda"), torch.randn(64, 64, 57, 57, device="cuda")

    def kernels(image: torch.Tensor) -> list[str]:
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            conv(image)
            torch.cuda.synchronize()
        return sorted(e.key for e in seen.key_averages() if "memcpy" not in e.key.lower())

    def first_s(image: torch.Tensor) -> float:
        wait()
        begun_s = time.perf_counter()
        conv(image)
        wait()
        return time.perf_counter() - begun_s

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


def _legacy_precision_warnings() -> dict[str, Any]:
    """Does asking for the precision of products in the old terms warn on the user's stderr?"""
    import warnings

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        precision = torch.get_float32_matmul_precision()
        allowed = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    return {"precision": precision, "allowed": allowed, "warned": [str(w.message)[:200] for w in seen], "ok": not seen}
