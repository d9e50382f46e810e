"""G5: what is compared, and against which noise, where backward is another thread and not the same twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from device import DEVICE, REHEARSAL, SHRINK
from log import Log
from torch import nn
from windows import Windows

from flatout.records.trace import Levers


def run(log: Log) -> None:
    """All items."""
    log.item("gpt_bf16", lambda: _compared(_gpt(width=512, context=512, batch=8, vocabulary=2000), {"bf16": {}}))
    log.item("gpt_nothing", lambda: _compared(_gpt(width=512, context=512, batch=8, vocabulary=2000), {}))
    for gigabytes in (0.1, 0.5, 2, 8):
        vocabulary = int(gigabytes * 1e9 / (8 * 512 * 4))
        log.item(f"outputs_of_{gigabytes}_GB", lambda vocabulary=vocabulary: _compared(
            _gpt(width=256, context=512, batch=8, vocabulary=vocabulary), {"bf16": {}}))  # fmt: skip
    log.item("resnet_channels_last", lambda: _compared(_resnet(), {"channels_last": {}}))
    log.item("resnet_tf32_off_nothing", lambda: _compared(_resnet(), {}))
    log.item("out_of_memory", _out_of_memory)


class Attention(nn.Module):
    """Causal self-attention by PyTorch's own function."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs, self.outputs = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, context, width) to the same."""
        batch, context, width = x.shape
        q, k, v = (t.view(batch, context, self.heads, -1).transpose(1, 2) for t in self.inputs(x).chunk(3, dim=-1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.outputs(mixed.transpose(1, 2).reshape(batch, context, width))


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, max(1, width // 64))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, context, width) to the same."""
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


def _gpt(*, width: int, context: int, batch: int, vocabulary: int) -> Callable[[], object]:
    torch.manual_seed(0)
    if REHEARSAL:
        context, batch, vocabulary, width = context // SHRINK, 2, max(64, vocabulary // SHRINK**2), 64
    model = nn.Sequential(
        nn.Embedding(vocabulary, width), *[Block(width) for _ in range(2)], nn.Linear(width, vocabulary)
    )
    model.to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(vocabulary, (batch, context + 1), device=DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    return step


def _resnet() -> Callable[[], object]:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    model = resnet18().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    images = torch.randn(128 // SHRINK, 3, 224 // (2 if REHEARSAL else 1), 224, device=DEVICE)
    labels = torch.randint(1000, (len(images),), device=DEVICE)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


class Comparing(Windows):
    """Asks for a comparison at the next update."""

    def __init__(self) -> None:
        super().__init__()
        self.levers: Levers | None = None
        self.answer: Any = None

    def on_update(self) -> None:
        """Gradients are complete: compare."""
        if self.levers is None or not self.framework.capture.complete:
            return
        levers, self.levers = self.levers, None
        self.answer = self.framework.compare(levers, ("gradients",))


def _compared(step: Callable[[], object], levers: Levers, more: Callable[[], object] | None = None) -> dict[str, Any]:
    watched = Comparing()
    try:
        watched.settle(step)
        held = more() if more is not None else None
        watched.framework.begin_capture()
        watched.levers = levers
        if not REHEARSAL:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(6):
            step()
            if watched.answer is not None or watched.failures:
                break
        del held
        answer = dataclasses.asdict(watched.answer) if watched.answer is not None else None
        faults = [d["fault"] for d in answer["differences"] if d.get("fault")] if answer else []
        step()  # the script goes on
        return {
            "answer": answer, "faults": faults, "failures": watched.failures,
            "limit_bytes": watched.framework.capture.limit_bytes,
            "peak_bytes": None if REHEARSAL else torch.cuda.max_memory_allocated(),
            "ok": bool(answer) and not faults and not answer["missing"] and not watched.failures,
        }  # fmt: skip
    finally:
        watched.framework.detach()
        if not REHEARSAL:
            torch.cuda.empty_cache()


def _out_of_memory() -> dict[str, Any]:
    """With nearly all memory taken: not compared, and training goes on."""
    if REHEARSAL:
        return {"skipped": "needs a device's memory"}

    def hold() -> torch.Tensor:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        return torch.empty(max(0, free - 300 * 2**20), dtype=torch.uint8, device="cuda")

    found = _compared(_gpt(width=512, context=512, batch=8, vocabulary=20000), {"bf16": {}}, hold)
    return {**found, "ok": None}
