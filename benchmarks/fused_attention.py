"""From how many tokens on does `fused_attention` pay? Steps of one script with and without it, in turn.

    python benchmarks/fused_attention.py

The script is `scripts/attention_by_hand.py`; a step's time is the CPU time of its one thread, which others that use
the machine disturb least. Out: `results/fused_attention_<cpu>_<yyyymm>.json`, with all samples.
"""

from __future__ import annotations

import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from flatout.frameworks.pytorch.seams.deferred_attention import DeferredProducts
from measuring import ratio, write

SCRIPT = Path(__file__).parent / "scripts" / "attention_by_hand.py"
NUM_PAIRS = 24
SIZES = {32: 4, 64: 4, 256: 2, 512: 1, 1024: 1}
"""Tokens, and how many sequences of them."""


def measured(tokens: int, batch: int) -> dict[str, Any]:
    """Samples of both sides in seconds, and their ratio."""
    sys.argv = [str(SCRIPT), "--steps", "0", "--layers", "2", "--tokens", str(tokens), "--batch", str(batch)]
    script = runpy.run_path(str(SCRIPT))
    model, optimizer, words = script["model"], script["optimizer"], script["args"].vocabulary

    def step_s(fused: bool) -> float:
        text = torch.randint(words, (batch, tokens + 1))
        products = DeferredProducts(threading.get_ident()) if fused else None
        begun_s = time.thread_time()
        if products is not None:
            products.on = True
        logits = model(text[:, :-1])
        if products is not None:
            products.on = False
        loss = F.cross_entropy(logits.reshape(-1, words), text[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        took_s = time.thread_time() - begun_s
        if products is not None:
            products.remove()
            assert products.num_fused == 2, products.reasons
        return took_s

    samples: dict[bool, list[float]] = {False: [], True: []}
    for number in range(NUM_PAIRS + 2):
        for fused in (False, True) if number % 2 else (True, False):
            took_s = step_s(fused)
            if number >= 2:
                samples[fused].append(took_s)
    return {"tokens": tokens, "batch": batch, "plain_s": samples[False], "fused_s": samples[True],
            "ratio": ratio(samples[False], samples[True])}  # fmt: skip


def main() -> None:
    """Measure all sizes."""
    torch.set_num_threads(1)
    rows = []
    for tokens, batch in SIZES.items():
        rows.append(measured(tokens, batch))
        print(tokens, rows[-1]["ratio"], flush=True)
    write("fused_attention", {"rows": rows})


if __name__ == "__main__":
    main()
