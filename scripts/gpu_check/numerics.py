"""What is compared, and against which noise, where backward is another thread and not the same twice."""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import ceilings
import torch
from device import DEVICE, REHEARSAL, judged
from log import Item
from models import Trained, gpt, mlp, resnet, trained
from torch import nn
from windows import Windows

from flatout.records.trace import Levers

NOT_FULL = "the memory of a CPU is not filled up"


def items() -> list[Item]:
    """In this order."""

    def outputs(gigabytes: float) -> Item:
        make = partial(gpt, width=256, vocabulary=int(gigabytes * 1e9 / (8 * 512 * 4)))
        return Item(f"outputs_of_{gigabytes}_GB", "compared without a fault, or the limit is said",
                    partial(_compared, make, {"bf16": {}}, may_lack="memory"))  # fmt: skip

    nets = partial(resnet, depths=(2, 2, 2, 2), batch=64)
    compiled: Levers = {"compile": {"mode": "regional"}}
    return [
        Item("gpt_bf16", "compared without a fault", partial(_compared, gpt, {"bf16": {}})),
        Item("gpt_nothing", "plain against plain, without a fault: its noise", partial(_compared, gpt, {})),
        *[outputs(gigabytes) for gigabytes in (0.1, 0.5, 2, 8)],
        Item("resnet_channels_last", "compared without a fault", partial(_compared, nets, {"channels_last": {}})),
        Item("resnet_nothing", "plain against plain, without a fault: its noise", partial(_compared, nets, {})),
        Item("resnet_compile", "compared without a fault", partial(_compared, nets, {"compile": {}}),
             cannot="compiling takes as long as all else; `compile_regional` is rehearsed"),
        Item("scaling_of_a_graph", "half of an index is not computed, and the next step runs", _scaling),
        Item("float64_truth", "known within 10 s, or refused beforehand", _truth),
        Item("checkpointed_blocks", "blocks that the script computes anew train under bf16 and regional compilation",
             partial(_trains, partial(gpt, depth=4, again=True), {"bf16": {}, **({} if REHEARSAL else compiled)}),
             "CPU, without compiling"),
        Item("out_of_memory", "nothing is said of the lever, and training goes on",
             partial(_compared, gpt, {"bf16": {}}, full=True, may_lack="memory"), cannot=NOT_FULL),
        Item("ceilings_out_of_memory", "measured, or said that they are not", _full_ceilings, cannot=NOT_FULL),
    ]  # fmt: skip


class Comparing(Windows):
    """Asks for a comparison at the next update."""

    def __init__(self) -> None:
        super().__init__()
        self.levers: Levers | None = None
        self.answer: Any = None
        self.took_s = 0.0

    def on_update(self) -> None:
        """Gradients are complete: compare."""
        if self.levers is None or not self.framework.capture.complete:
            return
        levers, self.levers = self.levers, None
        begun_s = time.perf_counter()
        self.answer = self.framework.compare(levers, ("gradients",))
        self.took_s = time.perf_counter() - begun_s


def _filled() -> torch.Tensor:
    """All memory but 300 MiB, while it is kept."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    return torch.empty(max(0, free - 300 * 2**20), dtype=torch.uint8, device="cuda")


def _compared(make: Callable[[], Trained], levers: Levers, *, full: bool = False, may_lack: str = "") -> dict[str, Any]:
    """One comparison. With `full` in the little memory that is left; `may_lack` allows it to say that this lacks."""
    watched, loop = Comparing(), make()
    try:
        watched.settle(loop.step)
        held = _filled() if full else None
        watched.framework.begin_capture()
        watched.levers = levers
        if not REHEARSAL:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(6):
            loop.step()
            if watched.answer is not None or watched.failures:
                break
        del held
        answer = dataclasses.asdict(watched.answer) if watched.answer is not None else None
        faults = [d["fault"] for d in answer["differences"] if d.get("fault")] if answer else []
        lacks = bool(answer) and answer["missing"]
        loop.step()  # the script goes on
        return {
            "compare_s": watched.took_s,
            "answer": answer, "faults": faults, "failures": watched.failures,
            "limit_bytes": watched.framework.capture.limit_bytes,
            "peak_bytes": None if REHEARSAL else torch.cuda.max_memory_allocated(),
            "ok": bool(answer) and not faults and not watched.failures
            and (not lacks or (bool(may_lack) and may_lack in lacks)),
        }  # fmt: skip
    finally:
        watched.framework.detach()
        if not REHEARSAL:
            torch.cuda.empty_cache()


class Convolution(nn.Module):
    """Sums over the edges of a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        """(nodes, 64) and (2, edges) to (nodes, 64)."""
        x = self.layer(x)
        return torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])


class Scaling(Windows):
    """Asks at the next update how a step scales with its batch."""

    def __init__(self) -> None:
        super().__init__()
        self.wanted, self.answer = False, None

    def on_update(self) -> None:
        """Gradients are complete: ask."""
        if self.wanted and self.framework.capture.complete:
            self.wanted, self.answer = False, self.framework.scale()


def _scaling() -> dict[str, Any]:
    torch.manual_seed(0)
    nodes = 1000 if REHEARSAL else 10_000
    model = Convolution().to(DEVICE)
    x, edges = torch.randn(nodes, 64, device=DEVICE), torch.randint(nodes, (2, 10 * nodes), device=DEVICE)
    loop, watched = trained(model, lambda: model(x, edges).square().mean()), Scaling()
    try:
        watched.settle(loop.step)
        watched.framework.begin_capture()
        watched.wanted = True
        for _ in range(4):
            loop.step()
        goes_on = bool(model(x, edges).isfinite().all())
    finally:
        watched.framework.detach()
    right = goes_on and not watched.failures and not watched.wanted
    return {"scaling": watched.answer, "failures": watched.failures, "ok": right and watched.answer is None}


def _truth() -> dict[str, Any]:
    found = _compared(partial(mlp, 2048, 5, 4096), {"bf16": {}})
    return {**found, "ok": found["ok"] and judged(found["compare_s"] < 10) is not False}


def _trains(make: Callable[[], Trained], levers: Levers) -> dict[str, Any]:
    """Some steps under levers."""
    watched, loop = Windows(), make()
    try:
        watched.settle(loop.step)
        watched.framework.engage(levers)
        for _ in range(4):
            loop.step()
        shown, missing = watched.framework.evidence()
        finite = all(bool(p.isfinite().all()) for p in loop.model.parameters())
        still = sorted(watched.framework.engaged())
    finally:
        watched.framework.detach()
    right = finite and still == sorted(levers) and not missing and not watched.failures
    return {"shown": shown, "missing": missing, "engaged": still, "failures": watched.failures, "ok": right}


def _full_ceilings() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"XDG_CACHE_HOME": folder}):
        held = _filled()
        found = ceilings.measured()
        del held
    return {**found, "ok": bool(found["values"])}
