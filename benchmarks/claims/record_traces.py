"""Which step times did real scripts have on a real, shared machine? Recorded once, replayed by the noise models.

    python benchmarks/claims/record_traces.py quiet|busy

Writes `traces/<script>_<condition>.json`: the step times of a plain run in order, microseconds, without evaluation.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flatout.records.trace import Window
from flatout.records.trace_file import Reader
from measuring import FLATOUT, ROOT, SHARED, timed

MOST_STEPS = 6000
SCRIPTS = {
    "lenet": ["lenet.py", "--data", str(SHARED / "MNIST"), "--epochs", "6"],
    "tabular_mlp": ["tabular_mlp.py", "--epochs", "60"],
}


def main(condition: str) -> None:
    """Record every script once."""
    for name, words in SCRIPTS.items():
        with tempfile.TemporaryDirectory() as folder:
            run = timed(
                [FLATOUT, "run", "--levers", "none", str(ROOT / "examples" / words[0]), *words[1:]], Path(folder)
            )
            found = [path for path in Path(folder).glob(".flatout/*/trace-run.jsonl")]
            if run.exit_code != 0 or not found:
                print(f"{name}: exit {run.exit_code}: {run.output[-300:]}")
                continue
            windows = [record for record in Reader(found[0]) if isinstance(record, Window)]
        steps = [s - o for w in windows for s, o in zip(w.step_s, w.outside_s, strict=True)][10:MOST_STEPS]
        value = {
            "script": name, "condition": condition, "foreign_fraction": run.foreign_fraction,
            "step_s": [round(s, 6) for s in steps],
        }  # fmt: skip
        path = Path(__file__).parent / "traces" / f"{name}_{condition}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(value) + "\n", encoding="utf-8")
        print(f"{name}: {len(steps)} steps", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
