"""The tables of `benchmarks/claims.md` from the raw results: `page.py`; the section Numerics has `numerics_page.py`.

In: what the benchmarks beside this file wrote, the newest of each. Out: the page, with the text between a section's
two comment lines made anew.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from profiled import PHASES

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "benchmarks" / "claims.md"
RESULTS = ROOT / "benchmarks" / "results"
NO_END = 1e3
"""A bound's upper end where the share may as well be the whole step (`flatout.judge.diagnosis`)."""


def newest(name: str) -> dict[str, Any] | None:
    """The newest result of that name."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob(f"{name}_*.json")]
    return max(found, key=lambda result: str(result["date"]), default=None)


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
    return [re.sub(" ?%", " %", line) for line in lines]


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


def faster() -> list[str]:
    """Simulated comparisons, then real ones."""
    found = newest("claims_simulated")
    lines = simulated(found) if found is not None else []
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
    return lines


def where(found: dict[str, Any]) -> str:
    """On which machine, and when."""
    machine = found["machine"]
    return f"{machine['cpu']}, {machine['num_cores']} cores, {found['date'][:10]}"


def ceilings() -> list[str]:
    """Each ceiling over what a tool found, and how high the operations of the examples stand."""
    tools, roofline = newest("claims_ceilings"), newest("claims_roofline")
    return [*(beside_tools(tools) if tools else ()), *(under_ceilings(roofline) if roofline else ())]


def beside_tools(found: dict[str, Any]) -> list[str]:
    """A row for each ceiling and tool."""
    lines = [
        f"{where(found)}: flatout's rate over the tool's (`kernel_launch`: time), of the medians of their windows and "
        f"of the ceilings; medians of {found['summary'][0]['num_rounds']} rounds and their middle half.",
        "",
        "| ceiling | tool | of the medians | middle half | of the ceilings | middle half | the ceiling's own spread |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["summary"]:
        cells = [row["ceiling"], row["tool"]]
        for what in ("ratio_of_medians", "ratio"):
            low, high = row[f"quartiles_of_{what}"]
            cells += [f"{row[f'median_{what}']:.3f}", f"{low:.3f} to {high:.3f}"]
        lines.append(f"| {' | '.join(cells)} | {100 * row['median_spread_fraction']:.1f} % |")
    return lines


def under_ceilings(found: dict[str, Any]) -> list[str]:
    """How many operations exceed their ceiling, and the highest of all."""
    summary = found["summary"]
    disturbed = summary["num_disturbed_censuses"]
    lines = [
        "",
        f"The roofline, {where(found)}: {summary['num_censuses'] - disturbed} censuses of the five examples "
        f"({disturbed} more were disturbed and do not count), {summary['num_operations']} operations, "
        f"{summary['num_not_judged']} of them too short or not limited, **{summary['num_above']} above their ceiling** "
        f"by more than its spread. Against the memory's rate alone {summary['num_above_memory']} would stand above. "
        "The highest:",
        "",
        "| example | operation | shape | ceiling | share of it |",
        "|---|---|---|---|---|",
    ]
    for row in summary["highest"][:5]:
        share = f"{100 * row['fraction']:.0f} %"
        lines.append(f"| {row['example']} | `{row['name']}` | {row['shape']} | {row['ceiling']} | {share} |")
    return lines


def unexplained(found: dict[str, Any]) -> list[str]:
    """How much of each example's step no phase explains; measured in the runs of the roofline."""
    shares = [f"{name} {100 * share:.1f} %" for name, share in found["summary"]["unattributed"].items()]
    return ["", f"Of a step of the examples no phase explains, as a median of the censuses above: {', '.join(shares)}."]


def diagnosis() -> list[str]:
    """The grid of planted bottlenecks, and the anatomy beside the profiler's."""
    parts = (
        ("claims_bottlenecks", grid_of),
        ("claims_bounds", levers_within),
        ("claims_profiled", beside_profiler),
        ("claims_roofline", unexplained),
    )
    return [line for name, made in parts if (found := newest(name)) is not None for line in made(found)]


def grid_of(found: dict[str, Any]) -> list[str]:
    """A row for each cause and strength."""
    rows = found["rows"]
    bounded = [row for row in rows if row["bound_holds"]]
    right, holding = sum(row["right"] for row in rows), sum(row["bound_holds"] == "holds" for row in bounded)
    single = [row for row in rows if "+" not in row["kind"]]
    alone = sum(row["named"] == [row["kind"]] for row in single)
    times = [row["bound"] / row["really"]["ratio"] for row in bounded]
    shares = sorted({row["share"] for row in rows})
    by_case = {(row["kind"], row["share"]): row for row in rows}
    return [
        f"{where(found)}: what was planted is named in **{right} of {len(rows)}** cases (one cause by itself in "
        f"{alone} of {len(single)}, else beside what is nearly as large); of {len(bounded)} bounds **{holding}** hold. "
        f"Without their intervals, {sum(t > 1.1 for t in times)} of these bounds are more than a tenth above what was "
        f"brought, and {sum(t < 0.95 for t in times)} more than a twentieth below.",
        "",
        "In each cell the bound, and after the arrow what removing the cause really brought, with 95 % intervals; "
        "*and* other causes that were named beside it.",
        "",
        f"| planted | {' | '.join(f'{100 * share:.0f} % of the step' for share in shares)} |",
        f"|---|{'---|' * len(shares)}",
        *(
            f"| {kind} | {' | '.join(planted(by_case[kind, share]) for share in shares)} |"
            for kind in dict.fromkeys(row["kind"] for row in rows)
        ),
    ]


def levers_within(found: dict[str, Any]) -> list[str]:
    """How many levers alone brought more than their bound on the examples."""
    rows = found["rows"]
    lines = [
        "",
        f"On the five examples ({where(found)}) {found['num_above']} of {len(rows)} levers that were measured alone "
        "brought more than the bound that they had been given before.",
    ]
    for row in rows:
        if row["above"]:
            name = next(iter(row["levers"]))
            ratio = f"{row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}]"
            lines.append(f"`{name}` on {row['example']}: {ratio}, bound {row['bound']:.2f}.")
    return lines


def beside_profiler(found: dict[str, Any]) -> list[str]:
    """A row for each script."""
    num_rounds = len(found["rows"][0]["rounds"])
    return [
        "",
        f"The anatomy less the profiler's, in points of the step, medians of {num_rounds} rounds ({where(found)}).",
        "",
        f"| script | step | {' | '.join(PHASES)} | unattributed |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {row['script'].replace('_', ' ')} | {row['rounds'][0][0]['step_ms']:.0f} ms | "
            + " | ".join("" if row[phase] is None else f"{100 * row[phase]:+.1f}" for phase in PHASES)
            + f" | {100 * row['unattributed']:.1f} % |"
            for row in found["rows"]
        ),
    ]


def planted(row: dict[str, Any]) -> str:
    """One case of the grid."""
    if not isinstance(row["named"], list):
        return "**failed**"
    kinds = row["kind"].split("+")
    if not row["right"]:
        return f"**{', '.join(row['named'])}**"
    others = [name for name in row["named"] if name not in kinds]
    beside = f" *and {', '.join(others)}*" if others else ""
    if not row["bound"]:
        return f"named{beside}"
    really = row["really"]
    brought = f" → {really['ratio']:.2f} [{really['low']:.2f}, {really['high']:.2f}]" if really else ""
    note = {"exceeded": " **exceeded**", "too far": " **too far**"}.get(row["bound_holds"] or "", "")
    return f"{interval_of(row)}{brought}{note}{beside}"


def interval_of(row: dict[str, Any]) -> str:
    """A bound with its interval, where it has one."""
    bound = next(b for b in row["bounds"] if b["ratio"] == row["bound"])
    if bound["low"] is None:
        return f"{bound['ratio']:.2f}"
    high = f"{bound['high']:.2f}" if bound["high"] < NO_END else "∞"
    return f"{bound['ratio']:.2f} [{bound['low']:.2f}, {high}]"


def proved() -> list[str]:
    """Every lever on one script."""
    found = newest("claims_proved")
    if found is None:
        return []
    return [
        f"{where(found)}: `examples/lenet.py`, one epoch of MNIST, each lever alone.",
        "",
        "| lever | verdict | accuracy less plain's | margin | time, plain over lever |",
        "|---|---|---|---|---|",
        *(proof(row) for row in found["rows"]),
    ]


def proof(row: dict[str, Any]) -> str:
    """One lever."""
    if "verdict" not in row:
        return f"| {row['lever']} | failed | | | |"
    equivalence, ratio = row["equivalence"], row["time"]["ratio"]
    return (
        f"| {row['lever']} | {row['verdict']} | {equivalence['difference']:+.4f} [{equivalence['low']:+.4f}, "
        f"{equivalence['high']:+.4f}] | {equivalence['margin']:.4f} | {ratio:.2f} |"
    )


def main() -> None:
    """Write the page anew; a section without results stays as it is."""
    text = PAGE.read_text(encoding="utf-8")
    for section in (faster, ceilings, diagnosis, proved):
        begin, end = (f"<!-- {section.__name__}-output:{side} -->" for side in ("begin", "end"))
        if lines := section():
            before, rest = text.split(begin)
            text = f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}{rest.split(end)[1]}"
    PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
