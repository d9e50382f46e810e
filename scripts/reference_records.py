"""The records as Markdown tables, read from the source: the part of the reference that knows dataclasses.

A field that means the same in every record is explained once; an interval's two ends share the line of its middle.

In: module names below `flatout`. Out: text. Reading the source instead of importing it keeps comments beside fields
(the strings that follow them), and makes the pages the same under every version of Python.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "flatout"
TEXT_WIDTH = 118

#: What a name's ending says about its unit; the longest ending that fits counts.
UNITS = {
    "_per_s": "1/s",
    "flops_per_s": "FLOP/s",
    "_bytes": "bytes",
    "joules": "J",
    "joules_per_step": "J",
    "_fraction": "share, 0 to 1",
    "_unix_s": "s since 1970",
    "_s": "s",
    "flops": "FLOP",
}

#: The records that lie on disk, by module in the order of the chain. What the Python interface takes is on its page.
RECORDS: dict[str, tuple[str, ...]] = {
    "records.ceilings": ("Machine", "Ceilings", "Ceiling"),
    "records.trace": ("Window",),
    "judge.anatomy": ("Anatomy",),
    "judge.diagnosis": ("Diagnosis", "Bound"),
    "judge.stats": ("Comparison",),
    "records.plan": ("Trial",),
    "judge.result": ("Result",),
    "judge.equivalence": ("Equivalence",),
}

#: Other records that lie in a run folder, as parts of those above: described by the docstring of their module.
OTHERS = (
    "records.ceilings",
    "records.trace",
    "records.difference",
    "records.energy",
    "records.facts",
    "records.numa",
    "records.stacks",
    "records.host_reads",
    "records.profile",
    "judge.activity",
    "judge.read_sites",
    "judge.profiled_time",
    "judge.metric",
    "judge.proof",
    "run.outcome",
)

#: Fields that mean the same wherever they stand: explained once, and only named in a record's own table.
EVERYWHERE = {
    "format": "version of the record",
    "created": "when: ISO 8601, UTC, to the second",
    "flatout": "version of flatout",
    "framework": "`pytorch`",
    "framework_version": "for example `2.13.0+cpu`",
    "python": "version of Python",
    "script": "as it was typed, or `-m module`",
    "arguments": "the script's own",
    "num_threads": "CPU threads of one operation",
    "started_unix_s": "when, in seconds since 1970",
    "levers": "by name, with their settings",
    "run": "the run folder",
    "took_s": "wall seconds that it took",
    "wall_s": "wall seconds that it ran",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of a record as its page shows it."""

    name: str
    unit: str
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordClass:
    """A dataclass, read from its source so that nothing depends on the version of Python."""

    name: str
    summary: str
    fields: tuple[Field, ...]


#: Names that mean the same wherever they stand. What a record itself says of a field comes first.
COMMON = {
    "ceilings": "this machine's; None where they could not be measured",
    "census": "one step's operations; None where not counted",
    "class_": "what it may change, see the levers",
    "device": "`cpu` or `cuda`: where the parameters lie",
    "diagnosis": "what binds",
    "facts": "what the script turned out to do",
    "header": "who wrote the trace, and where",
    "low": "the 5th percentile",
    "machine": "where it was measured",
    "name": "what it is called",
    "order": "the order that it answers; -1 for none",
    "outcome": "what it came to",
    "plan": "what was chosen; None where nothing was",
    "reason": "why",
    "shortens": "phases that it can make shorter",
    "timeline": "every measured step, for the figure",
    "trials": "in the order in which they were made",
    "untried": "levers that were not tried, and why",
    "verdict": "in one word",
}


def records() -> str:
    """The records that lie on disk, field by field, and where the others stand."""
    parts = [
        "# Records",
        prose(
            "What lies in a run folder, and what stages hand to each other. All are frozen, keyword-only dataclasses; "
            "their JSON has the same names. A name's ending states its unit (`_s` seconds, `_bytes`, `_fraction` a "
            "share from 0 to 1); `num_` is a count, times are wall seconds, and null means that something was not "
            "observed, never that it was 0. What the verbs of `flatout.api` take and give back is on the page about "
            "[Python](python.md), what `--json` prints on [that about JSON](json.md)."
        ),
        prose(
            "Some fields mean the same in every record: "
            + "; ".join(f"`{name}`: {text}" for name, text in EVERYWHERE.items())
            + "."
        ),
    ]
    for module, wanted in RECORDS.items():
        for record in record_classes(module, wanted):
            parts.append(f"## {record.name}\n\n{prose(f'`flatout.{module}`: {record.summary}')}\n\n{described(record)}")
    rows = [
        [
            f"`flatout.{name}`",
            ", ".join(f"`{r.name}`" for r in record_classes(name) if r.name not in RECORDS.get(name, ())),
            _asks(name),
        ]
        for name in OTHERS
    ]
    parts += [
        "## Other records",
        "Parts of those above; each field is described where the record is defined.",
        table(["module", "records", "what they answer"], rows),
    ]
    return "\n\n".join(parts)


def _asks(module: str) -> str:
    """The first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(_path(module).read_text(encoding="utf-8"))) or ""
    return first_sentence(text.partition("\n")[0])


def _path(module: str) -> Path:
    return SOURCE / f"{module.replace('.', '/')}.py"


def record_classes(module: str, wanted: Sequence[str] | None = None) -> list[RecordClass]:
    """The public dataclasses of a module, in the order of its source."""
    found = [
        _record_class(node)
        for node in ast.parse(_path(module).read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
        and not node.name.startswith("_")
        and any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    if wanted is None:
        return found
    if missing := set(wanted) - {record.name for record in found}:
        raise LookupError(f"`flatout.{module}` has no record {', '.join(missing)}")
    return sorted((record for record in found if record.name in wanted), key=lambda record: wanted.index(record.name))


def _record_class(node: ast.ClassDef) -> RecordClass:
    docstring = ast.get_docstring(node) or ""
    described = attributes_in(docstring)
    fields: list[Field] = []
    for number, item in enumerate(node.body):
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        name = item.target.id
        after = node.body[number + 1] if number + 1 < len(node.body) else None
        own = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
        meaning = described.get(name) or " ".join(inspect.cleandoc(str(own)).split()) or COMMON.get(name, "")
        fields.append(
            Field(
                name=name,
                unit=unit_of(name),
                meaning=first_sentence(meaning),
            )
        )
    summary = docstring.split("\n\nAttributes:")[0]
    return RecordClass(name=node.name, summary=summary.strip(), fields=tuple(fields))


def attributes_in(docstring: str) -> dict[str, str]:
    """The descriptions under `Attributes:` in a Google-style docstring."""
    _, _, text = docstring.partition("Attributes:\n")
    found: dict[str, str] = {}
    name = ""
    for line in textwrap.dedent(text).splitlines():
        if not line.strip():
            break
        if not line.startswith(" "):
            name, _, line = line.partition(": ")
        found[name] = f"{found.get(name, '')} {line.strip()}".strip()
    return found


def first_sentence(text: str) -> str:
    """A text up to its first full stop, which is left out."""
    return re.split(r"(?<!e\.g)(?<!\.)\.(?:\s|$)", text, maxsplit=1)[0]


def unit_of(name: str) -> str:
    """The unit that a name states."""
    fitting = [ending for ending in UNITS if name.endswith(ending)]
    if fitting:
        return UNITS[max(fitting, key=len)]
    return "count" if name.startswith("num_") else ""


def described(record: RecordClass) -> str:
    """The fields of a record: its own as a table, or as one line where they are few, then those of every record."""
    own = [field for field in record.fields if field.name not in EVERYWHERE]
    shared = [f"`{field.name}`" for field in record.fields if field.name in EVERYWHERE and field.name != "format"]
    rows = with_ends_folded([(f"`{field.name}`", field.unit, field.meaning) for field in own])
    heads = ["field", "unit", "meaning"]
    if not any(unit for _, unit, _ in rows):
        heads, rows = ["field", "meaning"], [(name, meaning) for name, _, meaning in rows]
    return table(heads, rows) + (f"\n\n{prose('Beside these ' + ', '.join(shared) + '.')}" if shared else "")


def with_ends_folded(rows: Iterable[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Rows of name, kind and meaning, in which the two ends of an interval stand with what lies in between."""
    folded: list[tuple[str, str, str]] = []
    for name, kind, meaning in rows:
        text = meaning.lower()
        if folded and text.startswith(("lower end", "upper end")):
            first, of, known = folded[-1]
            of_what = text.removeprefix("lower end").split(";")[0]
            folded[-1] = (
                f"{first}, {name}",
                of,
                f"{known}; then both ends{of_what}" if text.startswith("lower end") else known,
            )
        else:
            folded.append((name, kind, meaning))
    return folded


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(" ".join(str(cell).split()) for cell in line) + " |" for line in lines)


def prose(text: str) -> str:
    """A paragraph in lines of at most 118 characters, never broken within code."""
    lines = [""]
    for word in re.findall(r"(?:`[^`]*`|\S)+", text):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > TEXT_WIDTH:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".lstrip()
    return "\n".join(lines)


def fenced(text: str, kind: str = "text") -> str:
    """A code block."""
    return f"```{kind}\n{text.rstrip()}\n```"
