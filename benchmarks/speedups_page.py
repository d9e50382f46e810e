"""What do the results of `speedups.py` say, as a table and in one line?

In: results of this machine and month. Out: `summary` for the terminal, `into` for `benchmarks/public-scripts.md`.

    python benchmarks/speedups_page.py      # the table anew, from what is there
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from measuring import RESULTS, ROOT, file_for
from speedup_cases import ALL

PAGE = ROOT / "benchmarks" / "public-scripts.md"
MARK = "twelve-scripts-output"
HEAD = (
    "| script | plain, units/s | expert | flatout | flatout over plain [95 %] | flatout over expert [95 %] "
    "| short run, over plain | levers | tuning, s | raw samples |"
)
Z = 1.96


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """What this machine has, by script."""
    paths = {case.name: folder / file_for(f"script_{case.name}").name for case in ALL}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items() if path.exists()}


def summary(folder: Path) -> str:
    """All scripts in a few lines; what is missing is said."""
    counted = [case.name for case in ALL if case.counted]
    found = {name: one for name, one in results(folder).items() if name in counted}
    told = [f"{len(found)} of {len(counted)} scripts have a result"]
    for against in ("plain", "expert"):
        judged = {name: one[f"over_{against}"] for name, one in found.items() if one[f"over_{against}"]["ratio"]}
        if judged:
            told.append(over_all(against, judged))
        missing = sorted(set(found) - set(judged))
        if missing:
            told.append(f"no ratio to {against}: {', '.join(missing)}")
    if found:
        name = max(found, key=lambda name: found[name]["tune"]["wall_s"])
        told.append(f"longest tune: {name}, {found[name]['tune']['wall_s']:.0f} s")
        failed = [name for name, one in found.items() if one["tune"]["failed"]]
        told += [f"tune refused: {', '.join(failed)}"] if failed else []
    return "\n".join(f"- {line}" for line in told)


def over_all(against: str, judged: dict[str, dict[str, Any]]) -> str:
    """The geometric mean with what measuring leaves open in it, its spread over scripts, and the worst."""
    mean = geometric_mean(one["ratio"] for one in judged.values())
    errors = [(math.log(one["high"]) - math.log(one["low"])) / (2 * Z) for one in judged.values()]
    half = Z * math.sqrt(sum(error**2 for error in errors)) / len(errors)
    worst = min(judged, key=lambda name: judged[name]["ratio"])
    best = max(one["ratio"] for one in judged.values())
    low, high = mean * math.exp(-half), mean * math.exp(half)
    return (
        f"flatout over {against}: geometric mean {mean:.2f} [{low:.2f}, {high:.2f}] "
        f"of {len(judged)} scripts, from {judged[worst]['ratio']:.2f} ({worst}, {said(judged[worst])}) to {best:.2f}"
    )


def said(judged: dict[str, Any]) -> str:
    """A ratio with its interval."""
    if judged["ratio"] is None:
        return judged["reason"]
    return f"{judged['ratio']:.2f} [{judged['low']:.2f}, {judged['high']:.2f}]"


def row(name: str, found: dict[str, Any]) -> str:
    """A script's line in the table."""
    cells = [f"`{name}`", *(speed(found["samples"][side]) for side in ("plain", "expert", "flatout"))]
    tune = found["tune"]
    levers = ", ".join(tune["levers"]) or (f"`tune` refused (exit {tune['exit_code']})" if tune["failed"] else "none")
    cells += [said(found["over_plain"]), said(found["over_expert"]), said(found["short_over_plain"]), levers]
    return "| " + " | ".join([*cells, f"{tune['wall_s']:.0f}", f"`script_{name}`"]) + " |"


def speed(samples: list[dict[str, Any]]) -> str:
    """Work units a second, in the median of the processes that have a window."""
    times_s = [one["unit_s"] for one in samples if one.get("unit_s")]
    return f"{1 / median(times_s):.3g}" if times_s else "failed"


def into(folder: Path) -> None:
    """Put the table between the page's marks."""
    rows = [row(name, found) for name, found in results(folder).items()]
    table = "\n".join([HEAD, "|---" * HEAD.count(" | ") + "|---|", *rows, "", summary(folder)])
    text = PAGE.read_text(encoding="utf-8")
    before, begin, rest = text.partition(f"<!-- {MARK}:begin -->")
    _, end, after = rest.partition(f"<!-- {MARK}:end -->")
    PAGE.write_text(f"{before}{begin}\n{table}\n{end}{after}", encoding="utf-8")


if __name__ == "__main__":
    print(summary(RESULTS))
    into(RESULTS)
