"""Scripts that wait for their input, tuned: photographs that are decoded, digits that are gathered one by one."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from device import REHEARSAL
from log import Item
from verbs import flatout, within

ROOT = Path(__file__).resolve().parents[2]

NUM_PICTURES = 8 if REHEARSAL else 1500


def items() -> list[Item]:
    """In this order."""
    return [
        Item("tune_photographs", "at least 3 times as fast with 16 cores", _photographs, "CPU, the script under `run`"),
        Item("why_digits", "`input` binds", _digits, cannot="the same as `tune_photographs`, with another script"),
    ]


def _photographs() -> dict[str, Any]:
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(NUM_PICTURES):
            small = random.integers(0, 255, (30, 40, 3), dtype=np.uint8)
            where = Path(folder, "pictures", f"class{number % 10}")
            where.mkdir(parents=True, exist_ok=True)
            Image.fromarray(small).resize((400, 300)).save(where / f"{number}.jpg", quality=90)
        script = [str(ROOT / "examples" / "resnet_folder.py"), "--data", "pictures", "--epochs"]
        if REHEARSAL:
            return flatout(Path(folder), "run", "--fixed", *script, "1", "--batch-size", "4", "--image-size", "32")
        found = flatout(Path(folder), "tune", *within(60), "--json", *script, "1000", "--batch-size", "64")
    return {**found, "ok": found["ok"] and found["result"].get("ratio", 0.0) >= 3}


def _digits() -> dict[str, Any]:
    script = str(ROOT / "examples" / "lenet.py")
    with tempfile.TemporaryDirectory() as folder:
        found = flatout(Path(folder), "why", *within(20), "--json", script, "--epochs", "1000")
    return {**found, "ok": found["ok"] and found["result"].get("binding") == "input"}
