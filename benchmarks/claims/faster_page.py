"""The tables of `docs/claims.md`, section Faster, from the raw results: `faster_page.py`.

In: what `simulated.py` and `itself.py` wrote, the newest of each. Out: the page, with the text between its two
comment lines made anew.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "claims.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- faster-output:begin -->", "<!-- faster-output:end -->"


def newest(name: str) -> dict[str, Any] | None:
    """The newest result of that name."""
    found = sorted(RESULTS.glob(f"{name}_*.json"), key=lambda path: path.stat().st_mtime)
    return json.loads(found[-1].read_text(encoding="utf-8")) if found else None


def simulated(found: dict[str, Any]) -> list[str]:
    """A row for each noise model."""
    lines = [
        f"Simulated, {num_comparisons(found):,} comparisons a cell, {found['date'][:10]}.",
        "",
        "| noise | windows scatter by | screening: false alarms | 95 % covers | final: false alarms | 95 % covers "
        "| 5 % found | 5 % found at 3 % scatter |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in found["models"].items():
        num = row["num_comparisons"]
        screening, final = row["screening_itself"], row["final_itself"]
        gain, scaled = row["final_gain"], row["final_gain_at_3%"]
        model = name.replace("_", " ")
        lines.append(
            f"| {model} | {row['window_scatter']:.1%} | {alarms(screening, num)} | {covered(screening)} "
            f"| {alarms(final, num)} | {covered(final, gain)} | {gain['found_within_60_windows'] / num:.1%} "
            f"| {scaled['found_within_60_windows'] / num:.1%} |"
        )
    return [line.replace("%", " %") for line in lines]


def num_comparisons(found: dict[str, Any]) -> int:
    """Of each cell."""
    return int(next(iter(found["models"].values()))["num_comparisons"])


def alarms(row: dict[str, Any], num: int) -> str:
    """How often equal sides were called faster or slower."""
    return f"{(row['faster'] + row['slower']) / num:.2%}"


def covered(*rows: dict[str, Any]) -> str:
    """The worst share of 95 % intervals that hold the truth."""
    return f"{min(row['covered'] / max(row['judged'], 1) for row in rows):.1%}"


def itself(found: dict[str, Any], condition: str) -> str:
    """One line for real scripts against themselves."""
    summary = found["summary"]
    verdicts = summary["verdicts"]
    wrong = verdicts.get("faster", 0) + verdicts.get("slower", 0)
    raw = summary["all_windows_verdicts"]
    raw_wrong = raw.get("faster", 0) + raw.get("slower", 0)
    return (
        f"| {condition} | {summary['num_comparisons']} | {wrong} | {verdicts.get('no difference', 0)} "
        f"| {summary['num_with_interval']} | {summary['covered']} | {raw_wrong} |"
    )


def main() -> None:
    """Write the page anew."""
    lines: list[str] = []
    if (found := newest("claims_simulated")) is not None:
        lines += simulated(found)
    rows = [(name, newest(f"claims_itself_{name}")) for name in ("quiet", "busy")]
    real = [itself(found, name) for name, found in rows if found is not None]
    if real:
        lines += [
            "",
            "Real scripts against themselves.",
            "",
            "| machine | comparisons | called faster or slower | no difference | with an interval | that holds 1 "
            "| wrong with all windows |",
            "|---|---|---|---|---|---|---|",
            *real,
        ]
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main()
