"""Everything that only a machine with a GPU can show, in order of value and within a time limit.

    PYTHONPATH=src python3 scripts/gpu_check --out gpu-check --limit 530         # every group that fits
    PYTHONPATH=src python3 scripts/gpu_check --out gpu-check --groups truth,env  # these
    PYTHONPATH=src python3 scripts/gpu_check --out gpu-check --rehearse          # on a CPU, as far as that goes

One process a group, so that an error that spoils a CUDA context ends one group and no more; each is killed at its own
limit, and starts only where what it needs at least is left. In: nothing. Out: `gpu_check.jsonl`, a line an item, and
`GROUP.log` with what the group printed.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from log import Log

GROUPS = {
    "env": (10, 75),
    "truth": (20, 90),
    "ceilings": (20, 100),
    "levers": (15, 110),
    "numerics": (15, 110),
    "first_use": (50, 180),
}
"""Of each group: seconds that it needs at least, and seconds after which it is killed."""


def main() -> None:
    """Run groups, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder for lines and logs")
    parser.add_argument("--limit", type=float, default=530.0, help="seconds in all")
    parser.add_argument("--groups", default=",".join(GROUPS), help="which, in this order")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, as far as that goes")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.inside:
        importlib.import_module(options.groups).run(Log(options.out, options.groups))
        return
    if options.rehearse:
        os.environ["GPU_CHECK_DEVICE"] = "cpu"
    end_s = time.monotonic() + options.limit
    for name in options.groups.split(","):
        left_s = end_s - time.monotonic()
        needs_s, most_s = GROUPS[name]
        if left_s < needs_s:
            Log(options.out, name).item("group", lambda left_s=left_s: {"skipped": f"{left_s:.0f} s left"})
            continue
        ended = _in_a_process(name, options.out, min(most_s, left_s))
        Log(options.out, name).item("group", lambda ended=ended: {"ok": ended == "0", "exit": ended})


def _in_a_process(group: str, out: Path, limit_s: float) -> str:
    """Its exit code, or "cut"."""
    command = [sys.executable, str(Path(__file__).parent), "--out", str(out), "--groups", group, "--inside"]
    with open(out / f"{group}.log", "wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            ended = str(process.wait(limit_s))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ended = "cut"
    sys.stdout.write((out / f"{group}.log").read_text("utf-8", "replace")[-3000:])
    sys.stdout.flush()
    return ended


if __name__ == "__main__":
    main()
