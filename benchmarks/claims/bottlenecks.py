"""Is the planted bottleneck the one that `flatout why` names, and are its bounds what removing it brings?

    python benchmarks/claims/bottlenecks.py [--kinds decode ...] [--shares 0.65 0.5 0.85]

For each kind and strength of `planted_script.py`: `flatout why --json`; before and after it, for causes that can be
taken away in a running script, the same script with and without its cause by turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from planted_script import PAGES_BYTES, SPENT

from flatout.judge import stats
from flatout.records.as_json import to_json
from measuring import FLATOUT, PYTHON, quiet, timed, write

SCRIPT = str(Path(__file__).parent / "planted_script.py")
INPUT = ("storage", "decode", "transform", "collate", "worker start-up")
ADDITIVE = (
    "storage", "decode", "transform", "collate", "checkpoints", "garbage collection", "logging", "paging", "slow steps",
    "own code",
)  # fmt: skip
EQUAL = ("decode+transform", "transform+own code", "decode+logging", "storage+checkpoints")
"""Two causes of equal size: both are to be named."""
WHOLE = ("launch overhead", "compute", "memory bandwidth", "optimizer", "thread oversubscription", "worker start-up")
ON_GPU = ("sync per step", "sync per layer")
"""On a CPU nothing runs ahead that the host could wait for."""
ALL = [*ADDITIVE, *WHOLE, *EQUAL, *(ON_GPU if torch.cuda.is_available() else ())]
STEADY = {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**40)}
"""Memory is not given back between steps: whether glibc does so is a matter of chance, and doubles a backward pass."""

SLACK = 1.10
"""A bound may exceed what removal really brings by so much."""

UNEQUAL = 1.2
"""Two causes of which one took so many times as long as the other, by the script's clock, are not of equal size."""
ATTEMPTS = 4
"""To plant two of equal size."""


def main() -> None:
    """The whole grid."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kinds", nargs="*", default=ALL, choices=ALL)
    parser.add_argument("--shares", nargs="*", type=float, default=[0.65, 0.5, 0.85])
    parser.add_argument("--again", type=Path, help="a result, in which these kinds and shares are to be replaced")
    parser.add_argument("--record", type=Path, help="keep what each diagnosis was made from in this folder")
    arguments = parser.parse_args()
    rows = []
    for share in arguments.shares:
        for kind in arguments.kinds:
            quiet(60)
            rows.append(
                equal_row(kind, share, arguments.record) if kind in EQUAL else row(kind, share, arguments.record)
            )
            shown = {k: rows[-1][k] for k in ("kind", "share", "named", "right", "bound", "bound_holds")}
            really = rows[-1]["really"] or {}
            print(json.dumps({**shown, "really": [really.get(k) for k in ("ratio", "low", "high")]}), flush=True)
        right = sum(r["right"] for r in rows)
        print(f"{right} of {len(rows)} causes named", flush=True)
        if arguments.kinds == ALL:
            write("claims_bottlenecks", {"command": " ".join(sys.argv), "num_right": right, "rows": rows})
    if arguments.again is not None:
        rows = replaced(json.loads(arguments.again.read_text(encoding="utf-8"))["rows"], rows)
        right = sum(r["right"] for r in rows)
        write("claims_bottlenecks", {"command": " ".join(sys.argv), "num_right": right, "rows": rows})


def replaced(rows: list[dict[str, Any]], again: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with those that were measured again in place of the former ones."""
    newer = {(row["kind"], row["share"]): row for row in again}
    return [newer.get((row["kind"], row["share"]), row) for row in rows]


def record(kind: str, share: float, found: Path, kept: Path, named: list[str], *, right: bool) -> None:
    """Keep a trace's findings, small, with the diagnosis that is expected of them."""
    findings = json.loads(found.read_text(encoding="utf-8").replace(f"{Path(SCRIPT).parent}/", ""))
    for ceiling in findings["ceilings"]["values"]:
        ceiling["samples"] = []
    findings["census"]["operations"] = findings["census"]["operations"][:40]
    findings["ceilings"]["machine"]["hostname"] = "recorded"
    value = {"planted": kind, "share": share, "expected": named, "findings": findings}
    kept.mkdir(exist_ok=True)
    name = f"{kind.replace(' ', '_').replace('-', '_')}_{round(100 * share)}{'' if right else '_wrong'}.json"
    (kept / name).write_text(json.dumps(value) + "\n", encoding="utf-8")


def equal_row(kind: str, share: float, kept: Path | None) -> dict[str, Any]:
    """One script with two causes; again where they turn out not to be of equal size, whatever was named."""
    for number in range(1, ATTEMPTS + 1):
        found = {**row(kind, share, kept), "attempts": number}
        took = found.get("took_ms") or [1.0, 1.0]
        if max(took) <= UNEQUAL * min(took):
            break
        print(f"{kind}: {took} ms, in 50 steps, not of equal size", flush=True)
    return found


def row(kind: str, share: float, kept: Path | None = None) -> dict[str, Any]:
    """One planted script."""
    with tempfile.TemporaryDirectory(prefix="flatout-planted-") as folder:
        words = [SCRIPT, kind, str(share)]
        if "paging" in kind:
            with open(Path(folder) / "pages", "wb") as pages:
                pages.write(os.urandom(PAGES_BYTES))
                os.fsync(pages.fileno())
        if kind not in (*WHOLE, *ON_GPU):  # the same amount for the diagnosis and for its removal
            words += ["--amount", last_line(timed([PYTHON, *words, "--calibrate"], Path(folder), STEADY).output)]
        before = removed(words, Path(folder)) if kind in ADDITIVE else None
        threads = {"OMP_NUM_THREADS": "24"} if kind == "thread oversubscription" else {}
        done = timed([FLATOUT, "why", "--json", "--budget", "25s", *words], Path(folder), {**STEADY, **threads})
        if done.exit_code != 0:
            return {
                "kind": kind,
                "share": share,
                "named": done.output[-400:],
                "right": False,
                "bound": None,
                "really": None,
                "bound_holds": None,
            }
        result = json.loads(next(Path(folder).glob(".flatout/*/result.json")).read_text(encoding="utf-8"))
        found = result["diagnosis"]
        named = names(found)
        right = set(wanted(kind)) <= set(named)
        if kept is not None:
            record(kind, share, next(Path(folder).glob(".flatout/*/findings.json")), kept, named, right=right)
        after = removed(words, Path(folder)) if kind in ADDITIVE else None
        took = taken_ms(Path(folder)) if kind in EQUAL else None
    really = None if before is None or after is None else around(before, after)
    bound = bound_of(kind, found["bounds"])
    return {
        "kind": kind, "share": share, "named": named, "right": right, "sentence": found["sentence"],
        "evidence": found["evidence"], "phases": result["anatomy"]["phases_s"], "bound": bound and bound["ratio"],
        "bounds": found["bounds"], "really": really, "bound_holds": holds(bound, really), "took_ms": took,
        "unattributed": result["anatomy"]["phases_s"].get("unattributed", 0) / result["anatomy"]["step_s"],
    }  # fmt: skip


def taken_ms(folder: Path) -> list[float] | None:
    """Milliseconds of 50 steps that each of two causes took while the script was diagnosed, by its own clock."""
    lines = [
        [float(word) for word in line.split()[1:]]
        for log in folder.glob(".flatout/*/output-*.log")
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
        if line.startswith(SPENT)
    ]
    if len(lines) < 4:
        return None
    usual = [statistics.quantiles(one)[2] for one in zip(*lines, strict=True)]
    # Where data were free there was nothing to fetch, and nothing to compare.
    whole = [line for line in lines if all(took >= ms / 2 for took, ms in zip(line, usual, strict=True))]
    return [statistics.median(one) for one in zip(*whole, strict=True)] if whole else None


def wanted(kind: str) -> list[str]:
    """The causes that are to be named."""
    return ["host synchronisation"] if kind in ON_GPU else kind.split("+")


def last_line(output: str) -> str:
    """What a planted script measured, below what it planted."""
    return output.strip().splitlines()[-1]


def names(found: dict[str, Any]) -> list[str]:
    """Every cause that a diagnosis names; of the input the part."""
    return [found["part"] if name == "input" and found["part"] else name for name in (found["binding"], *found["also"])]


def removed(words: list[str], folder: Path) -> dict[str, Any]:
    """What taking the cause away really brings."""
    done = timed([PYTHON, *words, "--measure"], folder, STEADY)
    times = json.loads(last_line(done.output))
    found = stats.compare(times["with"], times["without"])
    return {**to_json(found), "samples": times}


def around(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What removal brought before and after the diagnosis; on a shared machine that is not the same."""
    return {
        "ratio": (before["ratio"] * after["ratio"]) ** 0.5,
        "low": min(before["low"], after["low"]),
        "high": max(before["high"], after["high"]),
        "before": before,
        "after": after,
    }


def bound_of(kind: str, bounds: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The bound for what would free the cause."""
    from flatout.judge.diagnosis import REMEDIES

    remedy = REMEDIES.get("input" if kind in INPUT else kind)
    return next((b for b in bounds if b["remedy"] == remedy), None)


def holds(bound: dict[str, Any] | None, really: dict[str, Any] | None) -> str | None:
    """Whether the gain stays within the bound, and the bound close to the gain."""
    if bound is None or really is None:
        return None
    high = bound["high"] if bound["high"] is not None else bound["ratio"]
    low = bound["low"] if bound["low"] is not None else bound["ratio"]
    if really["low"] > high:
        return "exceeded"
    return "too far" if low > SLACK * really["high"] else "holds"


if __name__ == "__main__":
    main()
