"""What do the results of `input_others.py` say, as tables of a page?

In: what one run of it found. Out: a table for each workload, in Markdown, and the sentence above it.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

MARK = "other-loaders-output"
ROUNDING = 2e-6
"""A difference of normalized pixels up to which they count as equal: float32 rounds at about a tenth of it."""

TITLES = {
    "mnist": "MNIST in memory, batch 64",
    "photographs": "Photographs, 224 × 224, batch 32",
    "tokens": "Windows of 256 tokens, batch 32",
    "tensors": "`TensorDataset`, 20 numbers, batch 64",
}
LABELS = {
    "plain": "PyTorch", "flatout": "**flatout**, `--levers input`", "torchdata": "torchdata nodes", "spdl": "SPDL",
    "grain": "Grain", "dali": "DALI on the CPU", "litdata": "LitData", "webdataset": "WebDataset", "tf_data": "tf.data",
}  # fmt: skip
KINDS = {"any": "the fastest of the others", "equal": "the fastest of the others with equal pixels"}


def equal(found: dict[str, Any] | None) -> bool:
    """Whether batches have plain's pixels, up to rounding."""
    kinds = [found[kind] for kind in ("decoded", "resized", "items") if kind in found] if found else []
    return bool(kinds) and all(kind["max"] is not None and kind["max"] <= ROUNDING for kind in kinds)


def _pixels(found: dict[str, Any] | None) -> str:
    """How far they are from plain's."""
    if not found:
        return "not compared"
    kinds = {kind: found[kind] for kind in ("decoded", "resized", "items") if kind in found}
    if all(kind["bits"] for kind in kinds.values()):
        return "bits"
    if any(kind["max"] is None for kind in kinds.values()):
        return "another shape or type"
    if equal(found):
        return f"up to rounding ({max(kind['max'] for kind in kinds.values()):.0e})"
    return "differ by up to " + ", ".join(f"{kind['max']:.2g} ({name})" for name, kind in kinds.items())


def _order(found: dict[str, Any] | None) -> str:
    if not found:
        return ""
    if found["order"] and found["batches"] and found["random_state"]:
        return "plain's"
    return "plain's order only" if found["order"] else "its own"


def _setting(side: str, setting: str) -> str:
    if side == "tf_data":
        return setting.replace("autoc", "auto, cached").replace("auto", "automatic")
    kind = "processes" if setting.endswith("p") else "workers" if side in ("plain", "flatout") else ""
    return f"{setting.rstrip('p')} {kind}".strip()


def _speed(passes: dict[str, list[list[float]]], number: int, samples: dict[str, list[int]]) -> tuple[float, str]:
    """Samples a second in the median of a side's fastest setting, and which that is."""
    side, setting = min(passes, key=lambda key: median(passes[key][number])).split()
    return samples[side][number] / median(passes[f"{side} {setting}"][number]), _setting(side, setting)


def _row(found: dict[str, Any], workload: str, side: str, passes: dict[str, Any]) -> tuple[float, str]:
    """A row and what it is sorted by."""
    first, first_setting = _speed(passes, 0, found["samples"][workload])
    second, second_setting = _speed(passes, 1, found["samples"][workload])
    setting = first_setting if first_setting == second_setting else f"{first_setting}; {second_setting}"
    pixels = found["pixels"][side].get(workload)
    order = "that of its workers" if side == "plain" and first_setting != _setting(side, "0") else _order(pixels)
    made = [of["prepare_s"] for of in found["made"].get(side, ()) if of["job"] == workload]
    cells = [
        LABELS[side], f"{first:,.0f}", f"{second:,.0f}", setting, _pixels(pixels), order,
        str(found["edits"][side][workload]), f"{made[0]:.1f} s" if made else "-",
    ]  # fmt: skip
    return first, "| " + " | ".join(cells) + " |"


def said(judged: dict[str, Any]) -> str:
    """A comparison in words."""
    if judged["ratio"] is None:
        return f"{judged['verdict']} ({judged['reason']})"
    return f"{judged['ratio']:.2f} [{judged['low']:.2f}, {judged['high']:.2f}], {judged['verdict']}"


def _verdict(found: dict[str, Any], workload: str) -> str:
    """What flatout is to the others, in a sentence for each pass."""
    lines = []
    for which in ("first", "second"):
        for kind, words in KINDS.items():
            judged = found["judged"].get(f"{workload}_{which}_{kind}")
            if judged:
                other = LABELS[judged["other"].split()[0]]
                lines.append(f"- {which} pass, to {words} ({other}): {said(judged)}")
    return "\n".join(lines)


def tables(found: dict[str, Any]) -> str:
    """All of it, in Markdown."""
    parts = []
    for workload, passes in found["passes_s"].items():
        rows = []
        for side in dict.fromkeys(key.split()[0] for key in passes):
            own = {key: times for key, times in passes.items() if key.split()[0] == side}
            groups = [{key: own[key]} for key in own] if side == "plain" else [own]
            rows += [_row(found, workload, side, group) for group in groups]
        lines = [row for _, row in sorted(rows, reverse=True)]
        missing = [LABELS[side] for side in found["packages"] if not any(key.split()[0] == side for key in passes)]
        parts += [
            f"### {TITLES[workload]}",
            f"flatout, how many times as fast [95 %], {found['rounds']} rounds:\n\n{_verdict(found, workload)}",
            "| loader | first pass, samples/s | second pass | threads or workers | pixels | order and random stream "
            "| lines of edit | format made in |\n" + "|---" * 8 + "|\n" + "\n".join(lines),
        ]
        if missing:
            parts.append(f"Did not do this: {', '.join(missing)}.")
    if found["absent"]:
        parts.append(f"Not installed here: {', '.join(LABELS[side] for side in found['absent'])}.")
    return "\n\n".join(parts)


def into(page: Path, found: dict[str, Any]) -> None:
    """Put the tables between the page's marks."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(f"<!-- {MARK}:begin -->")
    _, end, after = rest.partition(f"<!-- {MARK}:end -->")
    page.write_text(f"{before}{begin}\n{tables(found)}\n{end}{after}", encoding="utf-8")
