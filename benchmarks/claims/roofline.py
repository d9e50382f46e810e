"""Does an operation of any example exceed the ceiling that it stands under?

    python benchmarks/claims/roofline.py [--rounds 3]

Every round measures the ceilings anew, then asks `flatout why` for every example; each operation that it counted is
held against the ceiling that binds it (`flatout.judge.roofline`): the fastest arithmetic of its type, the cache's
rate, and for what is larger than two caches the memory's. Above are those that exceed it by more than the ceiling's
published spread. Operations that do no limited work, or are too short for the clock, are counted and not judged; so
are rounds in which others used the machine. A census holds the 40 operations of a step that took the longest.

Noted beside it: how much of each example's step no phase explains (`unattributed`).

For comparison the same operations are held against the memory alone (`above_memory`), as a roofline without caches
has it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flatout.judge import stats
from flatout.judge.result import Result, load
from flatout.judge.roofline import standing
from flatout.records.as_json import to_json
from flatout.records.ceilings import Ceilings
from flatout.records.trace import Operation
from measuring import BUSY, FLATOUT, ROOT, SHARED, quiet, timed, write

EXAMPLES = ROOT / "examples"
SCRIPTS: dict[str, list[str]] = {
    "lenet": ["--data", str(SHARED / "MNIST"), "--epochs", "3"],
    "char_gpt": ["--data", str(SHARED / "text" / "tinyshakespeare.txt")],
    "tabular_mlp": [],
    "gan": ["--data", str(SHARED / "MNIST"), "--epochs", "3"],
    "resnet_folder": ["--data", str(SHARED / "imagenet-sample"), "--epochs", "9"],
}


def judged(op: Operation, found: Ceilings) -> dict[str, Any] | None:
    """One operation under its ceiling; None where it is not judged."""
    stands = standing(op, found)
    if stands is None:
        return None
    memory = found.get("memory_copy")
    return {
        **{name: getattr(op, name) for name in ("name", "shape", "dtype", "num_calls", "flops", "moved_bytes")},
        "self_s": op.self_s,
        "ceiling": stands.ceiling.name,
        "spread_fraction": stands.ceiling.spread_fraction,
        "fraction": round(stands.fraction, 4),
        "above": stands.is_above(),
        "above_memory": memory is not None and op.moved_bytes / op.self_s > memory.value * (1 + memory.spread_fraction),
    }


def asked(name: str, budget: str, env: dict[str, str]) -> Result:
    """One `flatout why` of an example, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="flatout-roofline-") as folder:
        command = [FLATOUT, "why", "--json", "--budget", budget, str(EXAMPLES / f"{name}.py"), *SCRIPTS[name]]
        done = timed(command, Path(folder), env)
        if done.exit_code:
            sys.exit(f"{name} failed:\n{done.output}")
        return load(next(Path(folder).glob(".flatout/*/result.json")))


def held(name: str, number: int, result: Result, found: Ceilings) -> dict[str, Any]:
    """All operations of one census."""
    census = result.census
    rows = [(op, judged(op, found)) for op in (census.operations if census else ())]
    return {
        "example": name,
        "round": number,
        "foreign_fraction": result.foreign_fraction,
        "unattributed": round(result.anatomy.share("unattributed") or 0.0, 4),
        "num_operations": len(rows),
        "num_not_judged": sum(row is None for _, row in rows),
        "operations": [row for _, row in rows if row is not None],
    }


def main() -> None:
    """All examples by turns."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--budget", default="30s", help="of one `flatout why`")
    parser.add_argument("--examples", nargs="*", default=list(SCRIPTS), choices=list(SCRIPTS))
    parser.add_argument("--wait", type=float, default=120.0, help="seconds to wait for a quiet machine before each")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    ceilings = []
    with tempfile.TemporaryDirectory(prefix="flatout-roofline-cache-") as cache:
        env = {"XDG_CACHE_HOME": cache}
        for number in range(arguments.rounds):
            quiet(arguments.wait)
            subprocess.run(
                [FLATOUT, "machine", "--refresh", "--json"], env={**os.environ, **env}, check=True, capture_output=True
            )
            for name in arguments.examples:
                quiet(arguments.wait)
                result = asked(name, arguments.budget, env)
                assert result.ceilings is not None
                rows.append({**held(name, number, result, result.ceilings), "disturbed": disturbed(result)})
                print(said(rows[-1]), flush=True)
            ceilings.append(to_json(replace(result.ceilings, remarks=())))
    write("claims_roofline", {"summary": summarized(rows), "ceilings": ceilings, "rows": rows})
    print(json.dumps(summarized(rows), indent=1))


def disturbed(result: Result) -> bool:
    """Whether others used the machine, while the ceilings or the steps were measured."""
    remarks = bool(result.ceilings and result.ceilings.remarks)
    return remarks or (result.foreign_fraction or 0.0) > BUSY


def said(row: dict[str, Any]) -> str:
    """One example in one line, and its operations above."""
    ops = row["operations"]
    top = max(ops, key=lambda op: op["fraction"], default=None)
    lines = [
        f"{row['example']}: {len(ops)} of {row['num_operations']} judged, {sum(op['above'] for op in ops)} above, "
        f"{sum(op['above_memory'] for op in ops)} above the memory's alone"
        + f"; {100 * row['unattributed']:.1f} % unattributed"
        + (f"; highest {100 * top['fraction']:.0f} % of {top['ceiling']}: {top['name']} {top['shape']}" if top else "")
        + (" (disturbed)" if row["disturbed"] else "")
    ]
    lines += [f"  above {op['ceiling']}: {op['name']} {op['shape']} {op['fraction']}" for op in ops if op["above"]]
    return "\n".join(lines)


def summarized(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """How many operations of undisturbed rounds stand above, and which reached the most."""
    quiet_rows = [row for row in rows if not row["disturbed"]]
    ops = [{"example": row["example"], **op} for row in quiet_rows for op in row["operations"]]
    each = {(op["example"], op["name"], op["shape"]): op for op in sorted(ops, key=lambda op: op["fraction"])}
    highest = sorted(each.values(), key=lambda op: -op["fraction"])[:10]
    return {
        "num_censuses": len(rows),
        "num_disturbed_censuses": len(rows) - len(quiet_rows),
        "num_operations": sum(row["num_operations"] for row in quiet_rows),
        "num_not_judged": sum(row["num_not_judged"] for row in quiet_rows),
        "num_above": sum(op["above"] for op in ops),
        "num_above_memory": sum(op["above_memory"] for op in ops),
        "unattributed": {
            name: stats.summarize([row["unattributed"] for row in rows if row["example"] == name]).median
            for name in {row["example"]: None for row in rows}
        },
        "highest": [
            {key: op[key] for key in ("example", "name", "shape", "ceiling", "fraction", "above")} for op in highest
        ],
    }


if __name__ == "__main__":
    main()
