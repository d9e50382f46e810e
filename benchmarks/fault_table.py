"""What do the results of `loader_faults.py` say: better than plain, the same, or worse?

In: what one script saw as PyTorch runs it and under a configuration. Out: a verdict, the words of a cell, a table.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engaged import CONFIGURATIONS
from planted_faults import FAULTS

OWN = {"raises", "index_error", "unpicklable", "interrupted"}
"""Faults that are the script's own: it has to see them, whoever fetches."""

MARK = "loader-faults-output"
SLOWER_S = 1.5
"""Seconds that count as a difference, if they are twice as many as well."""

MORE_MB = 30
"""Memory that counts as a difference."""


def ended(found: dict[str, Any]) -> str:
    """How a script ended."""
    if found["hangs"]:
        return "hangs"
    if found["raised"]:
        return "raised"
    return "finished" if found["finished"] and found["exit_code"] == 0 else "died"


RANKS = {"hangs": 0, "died": 1, "raised": 2, "finished": 3}


def verdict(fault: str, plain: dict[str, Any], other: dict[str, Any]) -> tuple[str, str]:
    """`better`, `same` or `worse`, and in what."""
    both = min(len(plain["batches"]), len(other["batches"]))
    if plain["batches"][:both] != other["batches"][:both] or plain["noted"].get("random") != other["noted"].get("random"):
        return "worse", "other batches or random numbers"
    one, two = ended(plain), ended(other)
    if one != two:
        better = RANKS[two] > RANKS[one] and not (fault in OWN and one == "raised")
        return "better" if better else "worse", two
    if one == "raised" and plain["raised"]["kind"] != other["raised"]["kind"]:
        return "worse", f"another exception: `{other['raised']['kind']}`"
    for name, words in (("pairs", "pairs"), ("batches_ahead", "batches ahead")):
        if plain["noted"].get(name) != other["noted"].get(name):
            fewer = name == "batches_ahead" and other["noted"][name] < plain["noted"][name]
            return "better" if fewer else "worse", f"{other['noted'][name]} {words}"
    grown = [n for n, v in other["noted"].items() if n.startswith("more_") and v > max(plain["noted"][n], 0) + _slack(n)]
    if grown:
        return "worse", ", ".join(f"{other['noted'][name]} {name.replace('_', ' ')}" for name in grown)
    return _by_degree(plain, other)


def _by_degree(plain: dict[str, Any], other: dict[str, Any]) -> tuple[str, str]:
    """Where both end in one way: who is left, batches, seconds, memory."""
    for name, words, sign in (("children_left", "children left", -1), ("batches", "batches", 1)):
        a, b = (found[name] if name == "children_left" else len(found[name]) for found in (plain, other))
        if a != b and not (plain["hangs"] and name == "children_left"):
            return "better" if (b - a) * sign > 0 else "worse", f"{b} {words}"
    for name, words in (("after_s", ""), ("exit_s", " to exit")):
        a, b = plain[name], other[name]
        if abs(a - b) > SLOWER_S and max(a, b) > 2 * min(a, b):
            return "better" if b < a else "worse", f"{b:.1f} s{words}"
    return "same", ""


def _slack(name: str) -> int:
    return MORE_MB if name == "more_mb" else 4 if name == "more_maps" else 0


def described(found: dict[str, Any]) -> str:
    """What the script saw."""
    how = ended(found)
    num, seconds = len(found["batches"]), f"{found['after_s']:.1f} s"
    left = f", {found['children_left']} children left" if found["children_left"] and not found["hangs"] else ""
    if how == "raised":
        return f"`{found['raised']['kind']}` after {num} batches, {seconds}{left}"
    if how == "hangs":
        return f"hangs after {num} batches"
    if how == "died":
        return f"exit status {found['exit_code']} after {num} batches{left}"
    noted = {name: value for name, value in found["noted"].items() if name not in ("random", "processes") and value}
    words = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in noted.items())
    return f"finishes, {num} batches, {seconds}" + (f", {words}" if words else "") + left


def took_effect(found: dict[str, Any]) -> bool:
    """Whether the configuration did anything; unknown, and taken to be so, where the script was killed."""
    told = found["took_effect"]
    return not told or bool(told["changed_passes"] or told["computed_batches"] or told["problems"])


def cell(fault: str, plain: dict[str, Any], other: dict[str, Any]) -> str:
    """One cell of the table."""
    if plain is other:
        return described(plain)
    how, what = verdict(fault, plain, other)
    if how != "same":
        return f"**{how}**: {described(other)}" + (f" ({what})" if what not in ("finished", "raised", "hangs", "died") else "")
    return "same" if took_effect(other) else "same (left as it is)"


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
