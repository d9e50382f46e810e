"""Write `docs/gpu.md` and README's sentence about CUDA from what `make gpu-check` found: `python scripts/gpu_page.py`.

In: `benchmarks/results/gpu_check_*.jsonl`, as `make gpu-check` writes them (its `gpu_check.jsonl`, renamed), and the
items that there are. Out: the last result of each with its date, device and commit; what never ran says so. What was
rehearsed without a device is no result.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Line = dict[str, Any]

NO_RESULT = {"skipped", "rehearsed"}

SENTENCE = re.compile(r"^- \*\*CPU is what was measured\.\*\*.*?\n(?=- )", re.MULTILINE | re.DOTALL)
"""README's, up to the next one."""

HEAD = """\
<!-- Made by `python scripts/gpu_page.py`. Do not edit: run `make gpu-check` and make it anew. -->

# On a GPU

`make gpu-check` runs on a machine with an NVIDIA GPU all that no other machine can show, in at most 530 s, what is
worth most first; `make gpu-check GROUPS=truth,levers` some groups of it. `make gpu-check REHEARSE=1` shows without a
device that the check itself works: on the CPU, with the tests' simulated device, or it says why it cannot.
"""


def main() -> None:
    """Write both."""
    for path, text in made(last_results(read(sorted(RESULTS.glob("gpu_check_*.jsonl"))))).items():
        path.write_text(text, encoding="utf-8")


def made(results: dict[tuple[str, str], Line]) -> dict[Path, str]:
    """Both files as they should be."""
    readme = ROOT / "README.md"
    said = SENTENCE.sub(lambda _: sentence(results), readme.read_text(encoding="utf-8"), count=1)
    return {ROOT / "docs" / "gpu.md": page(results), readme: said}


def read(files: Iterable[Path]) -> list[Line]:
    """All lines; one that was cut off in the middle is none."""
    found = []
    for text in (line for file in files for line in file.read_text(encoding="utf-8").splitlines()):
        try:
            found.append(json.loads(text))
        except ValueError:
            continue
    return found


def last_results(lines: Iterable[Line]) -> dict[tuple[str, str], Line]:
    """Of each group and item that ran on a device."""
    ran = [one for one in lines if one.get("device") and one["item"] != "group" and not one.keys() & NO_RESULT]
    return {(line["group"], line["item"]): line for line in sorted(ran, key=lambda line: line["unix_s"])}


@functools.cache
def items() -> list[tuple[str, Any]]:
    """All items, each with the name of its group, in their order."""
    folder = str(ROOT / "scripts" / "gpu_check")
    sys.path.insert(0, folder)
    before = {*sys.modules}
    try:
        groups = importlib.import_module("groups").GROUPS
        return [(name, item) for name in groups for item in importlib.import_module(name).items()]
    finally:
        sys.path.remove(folder)
        for name in {*sys.modules} - before:  # their names are short ones, and others may have them too
            if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
                del sys.modules[name]


def page(results: dict[tuple[str, str], Line]) -> str:
    """The whole page."""
    every = items()
    never = [f"`{item.name}`" for group, item in every if (group, item.name) not in results]
    parts = [HEAD, summary(results)]
    if results and never:
        parts.append(f"**Never run on a device:** {', '.join(never)}.\n")
    for name in dict.fromkeys(group for group, _ in every):
        rows = [row(item, results.get((name, item.name))) for group, item in every if group == name]
        heads = "| item | must show | rehearsed | last result |\n| --- | --- | --- | --- |"
        parts.append("\n".join([f"## {name}\n", heads, *rows, ""]))
    return "\n".join(parts)


def summary(results: dict[tuple[str, str], Line]) -> str:
    """What all of it comes to."""
    every = items()
    ran = [results[key] for group, item in every if (key := (group, item.name)) in results]
    if not ran:
        return (
            f"**None of these {len(every)} items has ever run on a device.** What stands here is what they must show.\n"
        )
    wrong = sum(line["ok"] is False for line in ran)
    return f"Of {len(every)} items {len(ran)} have run on a device, and {wrong} of them did not show what they must.\n"


def row(item: Any, line: Line | None) -> str:
    """Of the table."""
    rehearsed = f"no: {item.cannot}" if item.cannot else item.rehearsed
    found = "never run"
    if line is not None:
        word = {True: "shown", False: "**not shown**", None: "noted"}[line["ok"]]
        error = f" ({line['error']})" if "error" in line else ""
        found = f"{word}{error}, {date(line)}, {line['device']}, `{line['commit']}`"
    return (
        "| " + " | ".join(text.replace("|", "\\|") for text in (f"`{item.name}`", item.shows, rehearsed, found)) + " |"
    )


def date(line: Line) -> str:
    """Of a line, by UTC."""
    return datetime.fromtimestamp(line["unix_s"], UTC).strftime("%Y-%m-%d")


def sentence(results: dict[tuple[str, str], Line]) -> str:
    """README's, on CUDA."""
    begin = "- **CPU is what was measured.** The code for CUDA"
    if not results:
        return f"{begin} [has never run on a GPU](docs/gpu.md).\n"
    last = max(results.values(), key=lambda line: line["unix_s"])
    return f"{begin} ran last on {last['device']}, {date(last)}: [what it showed](docs/gpu.md).\n"


if __name__ == "__main__":
    main()
