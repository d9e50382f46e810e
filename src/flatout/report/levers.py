"""What is shown of the levers? Their names, classes and what they do, and whether they apply.

In: rows. Out: a `View`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flatout.records.plan import CLASSES
from flatout.report import words
from flatout.report.table import Look, shown, table
from flatout.report.view import Row, Section, View

_CLASS_WORDS = {
    "exact": "same batches, same random numbers, same bits",
    "rounding": "the order of float operations",
    "precision": "the width of floats",
    "statistical": "which random numbers are drawn; only with `--accept statistical`",
    "lossy": "answers of a model that nobody trains; only with `--accept lossy`",
    "semantics": "batch size, learning rate, the model; only `prove` judges them",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LeverRow:
    """One lever as `flatout levers` shows it; `refusal` is None where it applies, `known` False without a script."""

    name: str
    class_: str
    shortens: tuple[str, ...]
    summary: str
    toggles: str
    known: bool
    refusal: str | None
    parameter: str | None = None
    choices: tuple[str, ...] = ()
    optional: bool = False

    def as_json(self) -> dict[str, object]:
        """For `--json`."""
        return {
            "class": self.class_,
            "shortens": list(self.shortens),
            "summary": self.summary,
            "toggles": self.toggles,
            "parameter": self.parameter,
            "choices": list(self.choices),
            "optional": self.optional,
            "applies": (self.refusal is None) if self.known else None,
            "reason": self.refusal,
        }


def view(rows: Sequence[LeverRow], typed: str = "SCRIPT") -> View:
    """Every lever, from the class that changes nothing to the one that changes most.

    Args:
        rows: The levers.
        typed: The script that they were looked at beside, as it was typed.
    """
    longest = max((len(_typed(row)) for row in rows), default=0)
    said = []
    if any(row.parameter and not row.choices for row in rows):
        said.append(("N", "a number that must be given, e.g. `workers=2`; `tune` finds the best itself"))
    if any(row.choices for row in rows):
        said.append(("WORD", "; ".join(f"for {row.name}: {', '.join(row.choices)}" for row in rows if row.choices)))
    said += [
        ("input", "`--levers input`: all exact ones for data that come late, as far as they go together"),
        ("classes", "each includes those above it; `--accept CLASS` says how far levers may go"),
    ]
    sections = []
    for class_ in CLASSES:
        cells, looks = [], []
        for row in (row for row in rows if row.class_ == class_):
            why_not = f" (not here: {row.refusal})" if row.known and row.refusal is not None else ""
            cells.append((_typed(row).ljust(longest), f"{row.summary}{why_not}"))
            looks.append(Look(tone="quiet" if why_not else ""))
        found = shown(table(class_, (class_, _CLASS_WORDS[class_]), cells), range(2), looks)
        sections += [Section(name=class_, items=(found,))] if cells else []
    terms = Section(name="terms", items=tuple(Row(label=name, note=text) for name, text in said))
    return View(
        command="flatout levers",
        title=words.plural(len(rows), "lever"),
        sections=(*sections, terms),
        next=("flatout tune", typed),
    )


def _typed(row: LeverRow) -> str:
    """What is typed after `--levers`."""
    if row.parameter is None:
        return row.name
    value = "WORD" if row.choices else "N"
    return f"{row.name}[={value}]" if row.optional else f"{row.name}={value}"
