"""What does a script see when its loader breaks, as PyTorch runs it and under flatout's configurations?

    python benchmarks/loader_faults.py [killed lock ...] [--only "workers 2"] [--page]

Each fault is planted in processes of its own (`planted_faults.py`) with a time limit, for a script that has workers and
for one that has none. Writes `results/loader_faults_....json`; `--page` writes its table into
`benchmarks/loader-faults.md`, also from results that are there already.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from measuring import HERE, ROOT, write

sys.path.insert(0, str(ROOT / "scripts"))
import fault_table
from engaged import CONFIGURATIONS
from planted_faults import FAULTS

LIMIT_S = 60.0
"""For one script. Workers of ours are given up after half of it."""

LEFT_AFTER_S = 2.0
"""How long after a script's end its children are counted."""

SAMPLE_S = 0.1
PAGE = ROOT / "benchmarks" / "loader-faults.md"
SMALL_SHM = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=16m tmpfs /dev/shm && exec "$0" "$@"']
"""Runs a command with a `/dev/shm` of 16 MB of its own; takes the rights of root."""


def processes_of(token: str) -> dict[int, str]:
    """Living processes that have the token in their environment, and their state."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if token.encode() not in (folder / "environ").read_bytes():
                continue
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # ended meanwhile, or somebody else's
            continue
        if state not in "ZX":
            found[int(folder.name)] = state
    return found


def memory_mb(pids: list[int]) -> float:
    """Memory of some processes, with what they share counted once."""
    total = 0
    for pid in pids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += int(text.split("\nPss:")[1].split()[0]) if "\nPss:" in text else 0
    return total / 1024


def one(fault: str, num_workers: int, configuration: str) -> dict[str, Any]:
    """Run one script to its end or to the limit."""
    token, levers = uuid.uuid4().hex, CONFIGURATIONS[configuration]
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "events"
        environment = {**os.environ, "FLATOUT_FAULT": token}
        if levers is not None:
            environment["FLATOUT_ENGAGED"] = json.dumps(levers)
        command = [sys.executable, str(HERE / "planted_faults.py"), fault, str(num_workers), str(events)]
        with (Path(folder) / "said").open("wb") as said:
            process = subprocess.Popen(
                (SMALL_SHM if fault == "shared_memory" else []) + command, env=environment, stdin=subprocess.DEVNULL,
                stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            found = _watch(process, token)
        found["said"] = (Path(folder) / "said").read_text(encoding="utf-8", errors="replace")[-1500:]
        lines = events.read_text(encoding="utf-8").splitlines() if events.exists() else []
        return {**found, **_account([json.loads(line) for line in lines], found)}


def _watch(process: subprocess.Popen[bytes], token: str) -> dict[str, Any]:
    """Wait for the script's end; count who is left, and end them."""
    begun_s, peak_mb = time.time(), 0.0
    while process.poll() is None and time.time() - begun_s < LIMIT_S:
        peak_mb = max(peak_mb, memory_mb(list(processes_of(token))))
        time.sleep(SAMPLE_S)
    hangs = process.poll() is None
    ended_s = time.time()
    if hangs:
        process.kill()
        process.wait()
    time.sleep(LEFT_AFTER_S)
    left = processes_of(token)
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return {
        "hangs": hangs, "exit_code": None if hangs else process.returncode, "ended_s": ended_s,
        "children_left": len(left), "peak_mb": round(peak_mb),
    }  # fmt: skip


def _account(events: list[dict[str, Any]], found: dict[str, Any]) -> dict[str, Any]:
    """What the events say: batches, the longest pause between two events, the end."""
    of_kind: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        of_kind.setdefault(event["event"], []).append(event)
    batches = [event["digest"] for event in of_kind.get("batch", [])]
    raised = of_kind.get("raised", [None])[0]
    times = [e["time_s"] for e in events if e["event"] in ("begun", "batch", "raised", "finished")]
    pauses = [later - earlier for earlier, later in itertools.pairwise(times)]
    account: dict[str, Any] = {
        "batches": batches,
        "raised": raised and {"kind": raised["kind"], "message": raised["message"]},
        "finished": "finished" in of_kind,
        "longest_pause_s": round(max(pauses, default=0.0), 2),
        "exit_s": round(found["ended_s"] - times[-1], 2) if times else None,
    }
    for name in ("noted", "took_effect"):
        account[name] = {k: v for k, v in (of_kind.get(name, [{}])[0]).items() if k not in ("event", "time_s")}
    return account


def why_skipped(fault: str) -> str | None:
    """Why a fault cannot be planted here."""
    if fault != "shared_memory":
        return None
    if shutil.which("unshare") is None:
        return "`unshare` is not there"
    tried = subprocess.run([*SMALL_SHM, "true"], capture_output=True, text=True, check=False)
    return f"a small `/dev/shm` cannot be mounted: {tried.stderr.strip()}" if tried.returncode else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("faults", nargs="*", default=list(FAULTS))
    parser.add_argument("--only", action="append", default=[], help=f"of {', '.join(CONFIGURATIONS)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=1, help="scripts that are run at the same time")
    parser.add_argument("--page", action="store_true", help="write the table into the page")
    parser.add_argument("--from-results", type=Path, help="run nothing, take these results")
    arguments = parser.parse_args()
    if arguments.from_results is not None:
        rows = json.loads(arguments.from_results.read_text(encoding="utf-8"))["rows"]
    else:
        names = ["plain", *(arguments.only or list(CONFIGURATIONS)[1:])]
        rows = measured(arguments.faults, names, arguments.rounds, arguments.at_once)
        if arguments.faults == list(FAULTS) and not arguments.only:
            write("loader_faults", {"limit_s": LIMIT_S, "left_after_s": LEFT_AFTER_S, "rows": rows})
    if arguments.page:
        fault_table.into(PAGE, rows)


def several(fault: str, num_workers: int, configuration: str, rounds: int) -> list[dict[str, Any]]:
    """The same script some times, for what a fault does is a matter of moments; one that hangs only once."""
    found: list[dict[str, Any]] = []
    while len(found) < rounds and not (found and found[-1]["hangs"]):
        found.append(one(fault, num_workers, configuration))
    return found


def measured(faults: list[str], names: list[str], rounds: int, num_at_once: int) -> list[dict[str, Any]]:
    """A row for each fault, number of workers and configuration."""
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(num_at_once) as threads:
        for fault in faults:
            if why := why_skipped(fault):
                rows.append({"fault": fault, "skipped": why})
                print(fault, "skipped:", why, flush=True)
                continue
            for num in FAULTS[fault][1]:
                under_way = {name: threads.submit(several, fault, num, name, rounds) for name in names}
                rows.append({"fault": fault, "num_workers": num, "results": under_way})
        for row in rows:
            if "results" in row:
                row["results"] = _told(row)
    return rows


def _told(row: dict[str, Any]) -> dict[str, Any]:
    """The results of a row, once they are there."""
    results: dict[str, Any] = {}
    for name, under_way in row["results"].items():
        results[name] = under_way.result()
        said = fault_table.cell(row["fault"], results["plain"], results[name])
        print(f"{row['fault']}, {row['num_workers']} workers, {name}: {said}", flush=True)
    return results


if __name__ == "__main__":
    main()
