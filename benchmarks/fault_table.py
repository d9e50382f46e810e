"""What do the results of `loader_faults.py` say: better than plain, the same, later, or worse?

In: what one script saw as PyTorch runs it and under a configuration. Out: a verdict, the words of a cell, a table.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from engaged import CONFIGURATIONS
from planted_faults import FAULTS

OWN = {"raises", "index_error", "unpicklable", "interrupted", "corrupt", "vanishes"}
"""Faults that are the script's own: it has to see them, whoever fetches."""

MARK = "loader-faults-output"
SLOWER_S = 1.5
"""Seconds that count as a difference, if they are twice as many as well."""

SLACK = {"more_mb": 30, "more_maps": 8}
"""What may grow a little without being a leak."""

BY_DEGREE = ("batches delivered", "seconds", "seconds to exit")
"""Differences that are chance where a configuration has changed nothing."""

HIDDEN = ("random", "processes", "more_mb", "more_maps")
"""What is compared and not shown."""

MOST_AHEAD = 4
"""Batches: two for each of two workers, which is what PyTorch itself has."""

RANKS = {"hangs": 0, "died": 1, "raised": 2, "finished": 3}
"""Ways to end, from bad to good."""


def ended(found: dict[str, Any]) -> str:
    """How a script ended."""
    if found["hangs"]:
        return "hangs"
    if kind_of(found):
        return "raised"
    return "finished" if found["finished"] and found["exit_code"] == 0 else "died"


def kind_of(found: dict[str, Any]) -> str | None:
    """The class of the exception that ended a script; also of one that came while it was telling."""
    if found["raised"]:
        return str(found["raised"]["kind"])
    last = re.findall(r"^(\w+(?:Error|Exception|Interrupt))\b", found["said"], re.MULTILINE)
    return last[-1] if found["exit_code"] == 1 and last else None


def verdict(fault: str, plain: dict[str, Any], other: dict[str, Any]) -> tuple[str, str]:
    """`better`, `same` or `worse`; `sooner` or `later` where only the time differs; and in what. Of one run of each."""
    both = min(len(plain["batches"]), len(other["batches"]))
    if plain["batches"][:both] != other["batches"][:both]:
        return "worse", "other batches"
    one, two = ended(plain), ended(other)
    if one != two:
        better = RANKS[two] > RANKS[one] and not (fault in OWN and one == "raised")
        return "better" if better else "worse", ""
    if fault in OWN and kind_of(plain) != kind_of(other):
        return "worse", "another exception"
    noted = _by_what_was_noted(plain["noted"], other["noted"])
    return noted or (("same", "") if fault == "cycles" else _by_degree(fault, plain, other))


def _by_what_was_noted(plain: dict[str, Any], other: dict[str, Any]) -> tuple[str, str] | None:
    """What a script has counted itself."""
    if plain.get("random") != other.get("random"):
        return "worse", "other random numbers"
    if plain.get("pairs") != other.get("pairs"):
        return "worse", "other pairs"
    if other.get("batches_ahead", 0) > MOST_AHEAD:
        return "worse", "batches ahead"
    for name, value in other.items():
        if name.startswith("more_") and value > max(plain[name], 0) + SLACK.get(name, 0):
            return "worse", name.replace("_", " ")
    return None


def _by_degree(fault: str, plain: dict[str, Any], other: dict[str, Any]) -> tuple[str, str]:
    """Where both end in one way: who is left, batches, seconds."""
    if plain["children_left"] != other["children_left"] and not plain["hangs"]:
        return "better" if other["children_left"] < plain["children_left"] else "worse", "children left"
    if len(plain["batches"]) != len(other["batches"]) and fault != "interrupted":
        return "better" if len(other["batches"]) > len(plain["batches"]) else "worse", "batches delivered"
    for name, words in (("longest_pause_s", "seconds"), ("exit_s", "seconds to exit")):
        a, b = plain[name], other[name]
        if None not in (a, b) and abs(a - b) > SLOWER_S and max(a, b) > 2 * min(a, b):
            return "sooner" if b < a else "later", words
    return "same", ""


def verdicts(fault: str, plain: list[dict[str, Any]], other: list[dict[str, Any]]) -> tuple[str, str]:
    """Of several runs of each: worse or later where one is so against all of plain's; better, sooner where all are."""
    found = []
    for run in other:
        against = [verdict(fault, one, run) for one in plain]
        kinds = [how for how, _ in against]
        how = "same" if "same" in kinds or len(set(kinds)) > 1 else kinds[0]
        found.append((how, next((what for kind, what in against if kind == how), "")))
    kinds = [how for how, _ in found]
    bad = [how for how in ("worse", "later") if how in kinds]
    how = bad[0] if bad else kinds[0] if len(set(kinds)) == 1 else "same"
    return how, next((what for kind, what in found if kind == how), "")


def described(runs: list[dict[str, Any]]) -> str:
    """What the script saw, run by run where that differs."""
    return "; or ".join(dict.fromkeys(_described(run) for run in runs))


def _described(found: dict[str, Any]) -> str:
    how, num = ended(found), len(found["batches"])
    left = f", {found['children_left']} children left" if found["children_left"] and not found["hangs"] else ""
    seconds = f", {found['longest_pause_s']:.0f} s" if found["longest_pause_s"] >= SLOWER_S else ""
    if how == "raised":
        return f"`{kind_of(found)}` after {num} batches{seconds}{left}"
    if how == "hangs":
        return f"hangs after {num} batches"
    if how == "died":
        return f"exit status {found['exit_code']} after {num} batches{left}"
    memory = f", {found['peak_mb']} MB" if "batches_ahead" in found["noted"] else ""
    return f"finishes{seconds}{left}{_noted(found['noted'])}{memory}"


def _noted(noted: dict[str, Any]) -> str:
    shown = {
        name: value for name, value in noted.items() if name not in ("random", "processes", "more_mb", "more_maps")
    }
    return "".join(f", {value} {name.replace('_', ' ')}" for name, value in shown.items() if value)


def took_effect(found: dict[str, Any]) -> bool:
    """Whether the configuration did anything; unknown, and taken to be so, where the script was killed."""
    told = found["took_effect"]
    return not told or any(told.values())


def cell(fault: str, plain: list[dict[str, Any]], other: list[dict[str, Any]]) -> str:
    """One cell of the table."""
    if plain is other:
        return described(plain)
    how, what = verdicts(fault, plain, other)
    if not any(map(took_effect, other)) and (how == "same" or what in BY_DEGREE):
        return "-"
    if how == "same":
        return "same"
    return f"**{how}**: {described(other)}" + (f" ({what})" if what and what not in BY_DEGREE else "")


def table(rows: list[dict[str, Any]]) -> str:
    """All of it, in Markdown."""
    names = [name for name in CONFIGURATIONS if any(name in row.get("results", {}) for row in rows)]
    lines = [
        "| fault | workers | " + " | ".join(name if name == "plain" else f"`{name}`" for name in names) + " |",
        "|---" * (len(names) + 2) + "|",
    ]
    for row in rows:
        what = (FAULTS[row["fault"]][0].__doc__ or "").strip().rstrip(".")
        if "skipped" in row:
            lines.append(f"| {what} | | not planted: {row['skipped']} |" + " |" * (len(names) - 1))
            continue
        plain = row["results"]["plain"]
        cells = [cell(row["fault"], plain, row["results"][name]) for name in names]
        lines.append(f"| {what} | {row['num_workers']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def into(page: Path, rows: list[dict[str, Any]]) -> None:
    """Put the table between the page's marks."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(f"<!-- {MARK}:begin -->")
    _, end, after = rest.partition(f"<!-- {MARK}:end -->")
    page.write_text(f"{before}{begin}\n{table(rows)}\n{end}{after}", encoding="utf-8")
