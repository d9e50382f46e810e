"""Does a lever do there what it says? Pairs of windows timed by events; then everything as it was before."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from device import DEVICE, REHEARSAL, judged, true_step_s
from log import Item
from models import Block, Trained, gpt, mlp, resnet, trained
from torch import nn
from torch.utils.data import DataLoader, Dataset
from windows import Windows

from flatout.records.trace import Levers

PAIRS = 1 if REHEARSAL else 6

ON_DEVICES = ("tf32", "attention", "cudnn_benchmark", "device_prefetch", "pinned_memory")
"""Of these a rehearsal runs the same without them."""

WITHOUT = "CPU, without the lever"

BACK = "and everything is as before"


def items() -> list[Item]:
    """In this order."""
    layers = partial(mlp, 4096, 4, 8192, torch.optim.AdamW)
    many = partial(mlp, 256, 200, 1024, torch.optim.AdamW)
    launches = functools.cache(partial(gpt, width=768, context=256, batch=4, vocabulary=8000, depth=12))
    modes: list[Levers] = [{"compile": {}}, {"compile": {"mode": "reduce-overhead"}}]
    return [
        Item("facts", "noted: what is known of a script", partial(_facts, layers)),
        Item("tf32", f"at least 3 times as fast, {BACK}", partial(_pairs, layers, {"tf32": {}}, 3.0), WITHOUT),
        Item("bf16", f"at least 6 times as fast, {BACK}", partial(_pairs, layers, {"bf16": {}}, 6.0)),
        Item("resnet_channels_last", f"noted, {BACK}", partial(_pairs, resnet, {"channels_last": {}})),
        Item("resnet_bf16_channels_last", f"at least 2 times as fast, {BACK}",
             partial(_pairs, resnet, {"channels_last": {}, "bf16": {}}, 2.0)),
        Item("fused_optimizer", f"noted, {BACK}", partial(_pairs, many, {"fused_optimizer": {}})),
        Item("fused_state", "state within 2 roundings of plain's, under the same keys", partial(_fused_state, many)),
        *[Item(f"device_prefetch_{num}_workers", f"at least 1.4 times as fast, each batch is right, {BACK}",
               partial(_input, num, {"device_prefetch": {}, "pinned_memory": {}}, 1.4), WITHOUT) for num in (0, 4)],
        *[Item(f"attention_{word}", f"a call of it is seen, {BACK}",
               partial(_pairs, _attention, {"attention": {"backend": word}}), WITHOUT)
          for word in ("flash", "efficient", "cudnn", "math")],
        Item("compile_regional", f"noted, {BACK}", partial(_pairs, launches, {"compile": {"mode": "regional"}})),
        *[Item("_".join(["compile", *mode["compile"].values()]), f"noted, {BACK}", partial(_pairs, launches, mode),
               cannot="compiles what `compile_regional` does, in another way") for mode in modes],
        Item("cudnn_benchmark", "noted: a process with it and one without", _cudnn_benchmark, WITHOUT),
        Item("graphed_callables", "a script's own graphs are captured in a window of phases, without a failure",
             _graphed, cannot="a CPU captures no graphs"),
    ]  # fmt: skip


def _facts(make: Callable[[], Trained]) -> dict[str, Any]:
    watched, loop = Windows(), make()
    try:
        watched.settle(loop.step)
        return {"facts": dataclasses.asdict(watched.framework.facts())}
    finally:
        watched.framework.detach()


def _state(model: nn.Module) -> list[Any]:
    flags = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.is_autocast_enabled("cuda"))
    return [flags, *((tuple(p.shape), p.stride(), p.dtype) for p in model.parameters())]


def _pairs(make: Callable[[], Trained], levers: Levers, at_least: float = 0.0, num: int = 3) -> dict[str, Any]:
    """Ratios of plain over the levers, by events and by flatout's own windows; evidence; what is left afterwards."""
    if REHEARSAL:
        levers = {name: one for name, one in levers.items() if name not in ON_DEVICES}
    watched, loop = Windows(), make()
    framework, step = watched.framework, loop.step
    ratios, own = [], []
    evidence: tuple[dict[str, str], dict[str, str]] = ({}, {})
    try:
        watched.settle(step)
        before = _state(loop.model)
        for _ in range(PAIRS):
            framework.engage({})
            framework.coast()
            plain_s = true_step_s(step, num)
            window_s = watched.window(step, num)["step_s"]
            framework.engage(levers)
            framework.coast()
            ratios.append(plain_s / true_step_s(step, num))
            own.append(window_s / watched.window(step, num)["step_s"])
            evidence = framework.evidence()
        framework.engage({})
        released = _state(loop.model) == before
    finally:
        framework.detach()
    ratio, shown = statistics.median(ratios), not evidence[1] and not watched.failures
    return {
        "ratio": ratio, "ratios": ratios, "own_ratio": statistics.median(own), "own_ratios": own,
        "shown": evidence[0], "missing": evidence[1], "released": released, "failures": watched.failures,
        "ok": released and shown and judged(ratio >= at_least) is not False,
    }  # fmt: skip


def _fused_state(make: Callable[[], Trained]) -> dict[str, Any]:
    """What an optimizer keeps after two updates under the lever, against plain's, from the same state on."""
    watched, loop = Windows(), make()
    try:
        watched.settle(loop.step)
        at_first = copy.deepcopy((loop.model.state_dict(), loop.optimizer.state_dict()))
        found = []
        for levers in ({}, {"fused_optimizer": {}}):
            watched.framework.engage(levers)
            loop.model.load_state_dict(at_first[0])
            loop.optimizer.load_state_dict(copy.deepcopy(at_first[1]))
            loop.step()
            loop.step()
            found.append(copy.deepcopy(loop.optimizer.state_dict()["state"]))
        watched.framework.engage({})
    finally:
        watched.framework.detach()
    plain, ours = found
    same = {n: sorted(one) for n, one in plain.items()} == {n: sorted(one) for n, one in ours.items()}
    pairs = [(plain[n][key].double().cpu(), ours[n][key].double().cpu()) for n in plain for key in plain[n]]
    worst = max(float(((a - b).abs() / (a.abs() + 1e-12)).median()) for a, b in pairs)
    return {"same_keys": same, "worst_median": worst, "ok": same and worst <= 2 * 1.2e-7}


class Images(Dataset):
    """Image number n is full of n mod 8; making one takes a host's time."""

    size = 32 if REHEARSAL else 224

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.full((3, self.size, self.size), float(number % 8))


def _input(num_workers: int, levers: Levers, at_least: float) -> dict[str, Any]:
    """A script that copies pageable batches and waits for each copy; whether all of them were right."""
    wrong, batch = torch.zeros((), device=DEVICE), 16 if REHEARSAL else 256
    expected = (torch.arange(batch, device=DEVICE) % 8).float()

    def batches() -> Iterator[torch.Tensor]:
        loader = DataLoader(Images(), batch, num_workers=num_workers if not REHEARSAL else min(num_workers, 1))
        for _ in itertools.count():
            yield from itertools.islice(loader, 40)

    def make() -> Trained:
        given, model = batches(), nn.Sequential(nn.Conv2d(3, 64, 7, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 2)).to(DEVICE)

        def loss() -> torch.Tensor:
            x = next(given).to(DEVICE)
            wrong.add_((x[:, 0, 0, 0] != expected).any() | (x[:, -1, -1, -1] != expected).any())
            return model(x).square().mean()

        return trained(model, loss, torch.optim.SGD)

    found = _pairs(make, levers, at_least, num=2 if REHEARSAL else 10)
    return {**found, "wrong_batches": int(wrong), "ok": found["ok"] and not wrong}


def _attention() -> Trained:
    """12 x 16 heads x 1024 x 64 in bfloat16."""
    torch.manual_seed(0)
    width, batch, context = (64, 2, 64) if REHEARSAL else (1024, 12, 1024)
    model = nn.Sequential(*[Block(width, dropout=0.0) for _ in range(4)]).to(DEVICE, torch.bfloat16)
    x = torch.randn(batch, context, width, device=DEVICE, dtype=torch.bfloat16)
    return trained(model, lambda: model(x).float().square().mean(), torch.optim.SGD)


SCRIPT = """
import sys
sys.path.insert(0, {here!r})
from device import true_step_s
from models import resnet
loop = resnet()
print(true_step_s(loop.step, 20))
"""


def _cudnn_benchmark() -> dict[str, Any]:
    """A plan for a shape is looked for once in a process, so each has its own."""
    found = {}
    for name, more in {"plain": [], "with": [] if REHEARSAL else ["--levers", "cudnn_benchmark"]}.items():
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "train.py")
            script.write_text(SCRIPT.format(here=str(Path(__file__).parent)))
            command = [sys.executable, "-m", "flatout", "run", "--fixed", *more, "train.py"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=90, env={**os.environ})
        found[name] = float(done.stdout) if not done.returncode else json.dumps(done.stderr[-1500:])
        if REHEARSAL:
            break
    return {"step_s": found, "ok": all(isinstance(one, float) for one in found.values())}


def _graphed() -> dict[str, Any]:
    """A script that captures graphs of its model after some steps, and evaluates between steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256)).to(DEVICE)
    x = torch.randn(64, 256, device=DEVICE)
    graphed: list[Any] = [model]
    loop = trained(model, lambda: graphed[0](x).square().mean(), torch.optim.SGD)
    watched = Windows()

    def step() -> None:
        loop.step()
        with torch.no_grad():
            model(x).sum().item()

    try:
        found = watched.window(step, 5, "phases")
        graphed[0] = torch.cuda.make_graphed_callables(model, (x.clone(),))
        after = watched.window(step, 5, "phases")
    finally:
        watched.framework.detach()
    return {"before": found, "after": after, "ok": not watched.failures and bool(after.get("step_s"))}
