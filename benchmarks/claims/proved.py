"""Does every lever train `lenet.py` on MNIST to the same accuracy? `flatout prove` for one after the other.

    python benchmarks/claims/proved.py [--seeds 8] [--levers fused_fetch bf16 ...] [--onto RESULT.json]

Levers are those that apply to the script, with the first setting that `tune` would try. `--onto` goes on with those
that an earlier sitting did not reach.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flatout.frameworks.pytorch.levers import registry
from flatout.machine.read import read_machine
from measuring import FLATOUT, ROOT, SHARED, quiet, timed, write

SCRIPT = [str(ROOT / "examples" / "lenet.py"), "--data", str(SHARED / "MNIST"), "--epochs", "1"]
METRIC = ["--metric", "accuracy: ([0-9.]+)", "--target", "0.95"]


def main() -> None:
    """Every lever that applies."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--levers", nargs="*")
    parser.add_argument("--onto", type=Path, help="a result to go on with")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if arguments.onto is not None:
        rows = json.loads(arguments.onto.read_text(encoding="utf-8"))["rows"]
    with tempfile.TemporaryDirectory(prefix="flatout-proved-") as folder:
        names = arguments.levers or applicable(Path(folder))
        for name in [one for one in names if one not in {row["lever"] for row in rows}]:
            quiet(60)
            words = [FLATOUT, "prove", "--json", "--seeds", str(arguments.seeds), "--levers", name, *METRIC]
            done = timed([*words, "--accept", "statistical", *SCRIPT], Path(folder))
            found: dict[str, Any] = {"lever": name, "exit_code": done.exit_code, "wall_s": done.wall_s}
            last = done.output.strip().splitlines()[-1]
            found |= json.loads(last) if last.startswith("{") else {"failed": done.output[-600:]}
            rows.append(found)
            equivalence = found.get("equivalence", {})
            print(
                name, found.get("verdict", found.get("failed")), equivalence.get("difference"),
                equivalence.get("margin"), found.get("time", {}).get("ratio"), flush=True,
            )  # fmt: skip
            if not arguments.levers:
                write("claims_proved", {"command": " ".join(sys.argv), "rows": rows})


def applicable(folder: Path) -> list[str]:
    """Levers as `--levers` takes them, with the first setting worth trying where they need one."""
    done = timed([FLATOUT, "levers", "--json", *SCRIPT], folder)
    shown = json.loads(done.output.strip().splitlines()[-1])
    cores = read_machine().num_cores
    names = []
    for name, row in shown.items():
        if row["applies"]:
            names.append(f"{name}={max(cores - 1, registry()[name].least)}" if row["parameter"] else name)
    return names


if __name__ == "__main__":
    main()
