"""Did a lever bring more than its bound, on any example?

    python benchmarks/claims/bounds.py [--examples lenet ...]

`flatout tune` for every example, with every lever. A lever alone is held against the bound that the search gave it
before it was tried (`flatout.trials.search.space.bound_of`): its 95 % interval must not lie above. Levers that change
what a step computes with (`precision`), and those of the whole process, have bounds of their phases, too.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from roofline import EXAMPLES, SCRIPTS

from flatout.frameworks.pytorch.levers import registry
from flatout.judge.result import Result, load
from flatout.trials.search.space import bound_of
from measuring import FLATOUT, quiet, timed, write


def main() -> None:
    """Every example."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", nargs="*", default=list(SCRIPTS), choices=list(SCRIPTS))
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in arguments.examples:
        quiet(60)
        with tempfile.TemporaryDirectory(prefix="flatout-bounds-") as folder:
            words = [str(EXAMPLES / f"{name}.py"), *SCRIPTS[name]]
            done = timed([FLATOUT, "tune", "--json", *words], Path(folder))
            if done.exit_code:
                sys.exit(f"{name} failed:\n{done.output}")
            result = load(next(Path(folder).glob(".flatout/*/result.json")))
        rows += held(name, result)
    above = [row for row in rows if row["above"]]
    print(f"{len(above)} of {len(rows)} levers brought more than their bound", flush=True)
    if arguments.examples == list(SCRIPTS):
        write("claims_bounds", {"command": " ".join(sys.argv), "num_above": len(above), "rows": rows})


def held(name: str, result: Result) -> list[dict[str, Any]]:
    """Every lever that was measured alone, beside its bound."""
    rows = []
    assert result.diagnosis is not None
    for trial in result.trials:
        if len(trial.levers) != 1 or trial.ratio is None or trial.ratio_low is None:
            continue
        bound = bound_of(registry()[next(iter(trial.levers))], result.diagnosis)
        row = {
            "example": name,
            "levers": {k: dict(v) for k, v in trial.levers.items()},
            "bound": bound if math.isfinite(bound) else None,
            "ratio": trial.ratio,
            "low": trial.ratio_low,
            "high": trial.ratio_high,
            "above": trial.ratio_low > bound,
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


if __name__ == "__main__":
    main()
