"""Everything that only a machine with a GPU can show, in order of value and within a time limit.

    PYTHONPATH=src python3 scripts/gpu_check --out gpu-check --limit 530         # every group that fits
    PYTHONPATH=src python3 scripts/gpu_check --out gpu-check --groups truth,env  # these
    PYTHONPATH=src python3 scripts/gpu_check --out gpu-check --rehearse          # without a device, as far as that goes

One process a group, so that an error that spoils a CUDA context ends one group and no more; each is killed at its own
limit, and starts only where what it needs at least is left. In: nothing. Out: `gpu_check.jsonl`, a line an item, and
`GROUP.log` with what the group printed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from groups import GROUPS
from log import Log

ROOT = Path(__file__).resolve().parents[2]

PATIENCE = 3
"""So many times as long may a group of a rehearsal take, on few cores and beside other tests."""


def main() -> None:
    """Run groups, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu-check"), help="folder for lines and logs")
    parser.add_argument("--limit", type=float, default=530.0, help="seconds in all")
    parser.add_argument("--groups", default=",".join(GROUPS), help="which, in this order")
    parser.add_argument("--rehearse", action="store_true", help="without a device, as far as that goes")
    parser.add_argument("--inside", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.inside is not None:
        log = Log(options.out, options.groups, options.inside, rehearses=options.rehearse)
        for item in importlib.import_module(options.groups).items():
            log.run(item)
        return
    about = {"commit": _commit()}
    os.environ["GPU_CHECK_OUT"] = str(options.out.resolve())
    if options.rehearse:
        os.environ |= {"GPU_CHECK_REHEARSES": "1", "XDG_CACHE_HOME": str(options.out.resolve() / "cache")}
        os.environ["OMP_NUM_THREADS"] = "1"  # groups run beside each other
    else:
        from flatout.machine.cuda_devices import read_accelerators

        about["device"] = ", ".join(one.name for one in read_accelerators())
    end_s = time.monotonic() + options.limit

    def run(name: str) -> None:
        left_s, (needs_s, most_s) = end_s - time.monotonic(), GROUPS[name]
        log = Log(options.out, name, about, rehearses=options.rehearse)
        if left_s < needs_s:
            log.note("group", lambda: {"skipped": f"{left_s:.0f} s left"})
            return
        ended = _in_a_process(name, options, about, min(PATIENCE * most_s if options.rehearse else most_s, left_s))
        if ended == "cut":
            log.note(log.now.read_text("utf-8"), lambda: {"ok": False, "error": "cut"})
        log.note("group", lambda: {"ok": ended == "0", "exit": ended})

    with ThreadPoolExecutor(os.cpu_count() if options.rehearse else 1) as pool:  # a device is measured by one alone
        [*pool.map(run, options.groups.split(","))]


def _in_a_process(group: str, options: argparse.Namespace, about: dict[str, Any], limit_s: float) -> str:
    """Its exit code, or "cut"."""
    command = [sys.executable, str(Path(__file__).parent), "--out", str(options.out), "--groups", group]
    command += ["--inside", json.dumps(about), *(["--rehearse"] if options.rehearse else ())]
    with open(options.out / f"{group}.log", "wb") as said:
        process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            ended = str(process.wait(limit_s))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ended = "cut"
    sys.stdout.write((options.out / f"{group}.log").read_text("utf-8", "replace")[-5000:])
    sys.stdout.flush()
    return ended


def _commit() -> str:
    """Of the sources; unknown where they came without their history."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=8"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return os.environ.get("COMMIT", "unknown")


if __name__ == "__main__":
    main()
