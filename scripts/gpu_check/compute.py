"""A transformer of 124 million parameters, tuned, and by the hand of somebody who knows: do both say the same?"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from device import judged
from log import Item
from verbs import HEAD, flatout, within

SCRIPT = (
    HEAD
    + """
from models import gpt
loop = gpt(width=768, context=512, batch=8, vocabulary=50257, depth=12)
step = loop.step
by_hand = "--by-hand" in sys.argv
if by_hand:
    for group in loop.optimizer.param_groups:
        group["fused"] = True
    forward = loop.model.forward
    def narrow(x):
        with torch.autocast(DEVICE.type, torch.bfloat16):
            return forward(x)
    loop.model.forward = narrow
num, per_read = (int(sys.argv[1]), 50) if len(sys.argv) > 1 and sys.argv[1].isdigit() else (10**6, 50)
begun_s = None
for number in range(num):
    step()
    if number == 9:
        wait()
        begun_s = time.perf_counter()
    if number % per_read == 0:
        print(number, file=sys.stderr)
wait()
print((time.perf_counter() - begun_s) / (num - 10))
"""
)


def items() -> list[Item]:
    """In this order."""
    return [
        Item("gpt_by_hand", "noted: seconds a step, plain and with bf16 and a fused optimizer", by_hand),
        Item("tune_gpt", "a plan with `bf16`; plain is within 3 % of `gpt_by_hand`, its ratio within 10 %", tuned),
        Item("run_gpt", "200 steps under the plan: the ratio it saw is within 5 % of the plan's", _run),
    ]


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    made = tempfile.TemporaryDirectory()
    Path(made.name, "train.py").write_text(SCRIPT)
    return made


@functools.cache
def by_hand() -> dict[str, Any]:
    """Seconds a step by a stopwatch of the script's own."""
    found = {}
    for name, more in {"plain": [], "by_hand": ["--by-hand"]}.items():
        command = [sys.executable, "train.py", "40", *more]
        done = subprocess.run(command, cwd=_folder().name, capture_output=True, text=True, timeout=60)
        found[f"{name}_s"] = float(done.stdout) if not done.returncode else json.dumps(done.stderr[-1500:])
    return {**found, "ok": all(isinstance(one, float) for one in found.values())}


@functools.cache
def tuned() -> dict[str, Any]:
    """What `tune` says of the same script."""
    found, other = flatout(Path(_folder().name), "tune", *within(80), "--json", "train.py"), by_hand()
    result = found["result"]
    plain = result.get("baseline_steps_per_s", 0.0) * other["plain_s"]
    ratio = result.get("ratio", 0.0) / (other["plain_s"] / other["by_hand_s"])
    right = "bf16" in result.get("levers", ()) and abs(plain - 1) <= 0.03 and ratio >= 0.9
    return {**found, "plain_over_stopwatch": plain, "ratio_over_by_hand": ratio,
            "ok": found["ok"] and judged(right) is not False}  # fmt: skip


def _run() -> dict[str, Any]:
    folder = Path(_folder().name)
    found = flatout(folder, "run", "--json", "run.json", "train.py", "30" if judged(True) is None else "200")
    said = json.loads((folder / "run.json").read_text())
    apart = (said.get("ratio") or 0.0) / (tuned()["result"].get("ratio") or 1.0) - 1
    return {**found, "said": said, "apart": apart, "ok": found["ok"] and judged(abs(apart) <= 0.05) is not False}
