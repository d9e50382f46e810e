"""The tables of `benchmarks/claims.md`, section Numerics, from the raw results: `numerics_page.py RESULTS.json`.

In: what `numerics.py` wrote. Out: the page, with the text between its two comment lines made anew.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "benchmarks" / "claims.md"
BEGIN, END = "<!-- numerics-output:begin -->", "<!-- numerics-output:end -->"
FAMILIES = ("lenet", "resnet", "gpt", "lstm", "vae")

WORDS = ("agrees", "inconclusive", "disagrees")


def told(row: dict[str, Any]) -> str:
    """By what a bug was caught: the multiple of rounding, or in a word."""
    if row["word"] != "disagrees":
        return f"**{row['word']}**"
    multiple = row["multiples"].get("outputs" if row["detail"].startswith("outputs") else row["check"])
    if " times what " in row["detail"] and isinstance(multiple, float):
        return f"{multiple:.0e}".replace("e+0", "e").replace("e+", "e") if multiple >= 1e4 else f"{multiple:.0f}"
    words = {
        "infinitely often": "counter",
        "random generators": "random",
        "not a bit": "bits",
        "NaN": "NaN",
        "instead of": "type",
        "other settings": "settings",
        "zero_grad": "cleared",
        "add up": "sum",
        "other items": "items",
        "whole numbers": "whole",
        "memory": "memory",
        "lost": "lost",
        "of an earlier step": "stale",
        "no gradient any more": "cut",
    }
    return next((word for part, word in words.items() if part in row["detail"]), "seen")


def caught(rows: list[dict[str, Any]]) -> str:
    """How many of how many."""
    return f"{sum(row['check'] in row['checks'] for row in rows)} of {len(rows)}"


def matrix(rows: list[dict[str, Any]]) -> list[str]:
    """Bugs by families."""
    columns = (*FAMILIES, "another script")
    lines = [f"| bug | class | check | {' | '.join(columns)} |", "|---|---|---|" + "---|" * len(columns)]
    for bug in dict.fromkeys(row["bug"] for row in rows):
        here = {row["family"]: row for row in rows if row["bug"] == bug}
        first = next(iter(here.values()))
        cells = [told(here[family]) if family in here else "" for family in FAMILIES]
        cells.append(", ".join(f"{told(row)} ({name})" for name, row in here.items() if name not in FAMILIES))
        lines.append(f"| {bug} | {first['class']} | {first['check']} | {' | '.join(cells)} |")
    return lines


def sound(rows: list[dict[str, Any]]) -> list[str]:
    """Sound pairs by set of levers."""
    believed = [row for row in rows if not row["unsound"]]
    lines = [
        "How many roundings (of bfloat16 where a lever is of class precision) the worst parameter or output was off, "
        "over all scripts:",
        "",
        "| levers | scripts | agrees | inconclusive | disagrees | its gradient | its output | its update |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for levers in dict.fromkeys(row["levers"] for row in believed):
        here = [row for row in believed if row["levers"] == levers]
        words = Counter(row["word"] for row in here)
        counts = " | ".join(str(words[word]) for word in WORDS)
        worst = " | ".join(largest(here, check) for check in ("gradients", "outputs", "updates"))
        lines.append(f"| {levers.replace('+', ', ')} | {len(here)} | {counts} | {worst} |")
    words = Counter(row["word"] for row in believed)
    counts = " | ".join(f"**{words[word]}**" for word in WORDS)
    return [*lines, f"| **all** | **{len(believed)}** | {counts} | | | |"]


def largest(rows: list[dict[str, Any]], check: str) -> str:
    """The largest multiple that a check has seen."""
    seen = [row["multiples"][check] for row in rows if row["multiples"].get(check) is not None]
    return f"{max(seen):.2g}" if seen else ""


def truth(rows: list[dict[str, Any]]) -> list[str]:
    """Levers beside float64."""
    lines = [
        "Levers on scripts that compute badly themselves. What is nearer to the same step in float64 than plain is, "
        "agrees, however many roundings it is off plain:",
        "",
        "| lever | plain's distance from float64 | the lever's | roundings off plain | said |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        name = row["case"] + (", with dropout" if row["dropout"] else "")
        distances = f"{row['baseline_truth_error']:.1e} | {row['truth_error']:.1e}"
        lines.append(f"| {name} | {distances} | {row['multiples']['gradients']:.2g} | {row['word']} |")
    return lines


def precision(rows: list[dict[str, Any]]) -> list[str]:
    """Families in which scaled gradients were seen under bfloat16."""
    factors = [f for f in dict.fromkeys(row["factor"] for row in rows) if f != 1.0]
    lines = [
        "In how many of the five families a lever was refused that scales gradients so, under bfloat16:",
        "",
        f"| when | which gradients | {' | '.join(f'x {f:g}' for f in factors)} |",
        "|---|---|" + "---|" * len(factors),
    ]
    for moment in dict.fromkeys(row["moment"] for row in rows):
        for place in dict.fromkeys(row["place"] for row in rows):
            cells = []
            for factor in factors:
                here = [r for r in rows if (r["moment"], r["place"], r["factor"]) == (moment, place, factor)]
                cells.append(f"{sum(r['word'] == 'disagrees' for r in here)} of {len(here)}")
            lines.append(f"| {moment} | {place} | {' | '.join(cells)} |")
    plain = [row for row in rows if row["factor"] == 1.0]
    slopes = [s for row in plain for s in row["slopes"]]
    multiples = [m for row in plain for m in row["multiples"]]
    agree = f"{sum(row['word'] == 'agrees' for row in plain)} of {len(plain)} agree"
    spread = f"slopes {min(slopes):.3f} to {max(slopes):.3f}, multiples up to {max(multiples):.2f}"
    return [*lines, "", f"bfloat16 itself, unscaled: {spread}, {agree}."]


def main() -> None:
    """Rewrite the tables."""
    found = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    machine, versions = found["machine"], found["versions"]
    head = f"{machine['cpu']}, {machine['num_cores']} cores, PyTorch {versions['torch']}, {found['date'][:10]}."
    parts = [
        [head],
        [
            f"**Planted bugs**: {caught(found['planted'])} are caught by the check that their lever names.",
            "",
            *matrix(found["planted"]),
        ],
        ["**Sound levers**", "", *sound(found["sound"])],
        ["**Beside float64**", "", *truth(found["truth"])],
        ["**Class precision**", "", *precision(found["precision"])],
    ]
    body = "\n\n".join("\n".join(part) for part in parts)
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{body}\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
