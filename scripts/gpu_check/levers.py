"""G3: does a lever do there what it says? Pairs of windows timed by events; then everything as it was before."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import torch
from device import DEVICE, REHEARSAL, SHRINK, true_step_s
from log import Log
from torch import nn
from windows import Windows

from flatout.records.trace import Levers

PAIRS = 2 if REHEARSAL else 6


def run(log: Log) -> None:
    """All items."""
    step, model = _mlp()
    watched = Windows()
    watched.settle(step)
    log.item("facts", lambda: {"facts": dataclasses.asdict(watched.framework.facts())})
    for levers in ({"tf32": {}}, {"bf16": {}}, {"fused_optimizer": {}}):
        if REHEARSAL and "tf32" in levers:
            continue
        log.item("mlp_" + "_".join(levers), lambda levers=levers: _pairs(watched, levers, step, model, 3))
    watched.framework.detach()


def _mlp() -> tuple[Callable[[], object], nn.Module]:
    torch.manual_seed(0)
    width, batch = 4096 // SHRINK, 8192 // SHRINK**2
    model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(width, width), nn.GELU())]).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    x = torch.randn(batch, width, device=DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    return step, model


def _state(model: nn.Module) -> list[Any]:
    flags = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.is_autocast_enabled("cuda"))
    return [flags, *((tuple(p.shape), p.stride(), p.dtype) for p in model.parameters())]


def _pairs(watched: Windows, levers: Levers, step: Callable[[], object], model: nn.Module, num: int) -> dict[str, Any]:
    """Ratios of plain over the levers, by events and by flatout's own windows; evidence; what is left afterwards."""
    framework, before = watched.framework, _state(model)
    ratios, own, evidence = [], [], {}
    for _ in range(PAIRS):
        framework.engage({})
        framework.coast()
        plain_s = true_step_s(step, num)
        window_s = watched.window(step, num)["step_s"]
        framework.engage(levers)
        framework.coast()
        ratios.append(plain_s / true_step_s(step, num))
        own.append(window_s / watched.window(step, num)["step_s"])
        evidence = {"shown": framework.evidence()[0], "missing": framework.evidence()[1]}
    framework.engage({})
    return {
        "ratio": statistics.median(ratios), "ratios": ratios, "own_ratio": statistics.median(own), "own_ratios": own,
        **evidence, "released": _state(model) == before, "failures": watched.failures,
        "ok": _state(model) == before and not watched.failures,
    }  # fmt: skip
