"""What a user types on the first day: `why` and `tune` of scripts that keep the device busy, or do not."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from device import judged
from log import Item
from verbs import HEAD, flatout, within

BOUND = """
torch.manual_seed(0)
width, batch = (32, 16) if REHEARSAL else (4096, 8192)
model = nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(width, width), nn.GELU())]).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
for epoch in range(100):
    total = 0.0
    for step in range(50):
        x = torch.randn(batch, width).to(DEVICE) if {blocking} else torch.randn(batch, width, device=DEVICE)
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        {read}
    print(epoch, float(loss))
"""
SCRIPTS = {
    "no_read": (HEAD + BOUND.format(blocking=False, read="pass"), "compute"),
    "item": (HEAD + BOUND.format(blocking=False, read="total += loss.item()"), "compute"),
    "blocking_copy": (HEAD + BOUND.format(blocking=True, read="pass"), "input"),
}
"""And what binds."""


def items() -> list[Item]:
    """In this order."""
    return [
        *[Item(f"why_{name}", f"`{binds}` binds", partial(_verb, name, "why", 20))
          for name, (_, binds) in SCRIPTS.items()],
        Item("tune_no_read", "a plan, at least 3 times as fast", partial(_verb, "no_read", "tune", 50),
             cannot="the same as `tune_gpt`, with another script"),
    ]  # fmt: skip


def _verb(name: str, verb: str, budget_s: int) -> dict[str, Any]:
    script, binds = SCRIPTS[name]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(script)
        found = flatout(Path(folder), verb, *within(budget_s), "--json", "train.py")
    result = found["result"]
    right = result.get("binding") == binds if verb == "why" else result.get("ratio", 0.0) >= 3
    return {**found, "ok": found["ok"] and judged(right) is not False}
