"""The records as Markdown tables, read from the source: the part of the reference that knows dataclasses.

In: module names below `flatout`. Out: text. Reading the source instead of importing it keeps comments beside fields
(the strings that follow them), and makes the pages the same under every version of Python.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "flatout"

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

#: The records that lie on disk or that the Python interface takes and gives, by module in the order of the chain.
RECORDS: dict[str, tuple[str, ...] | None] = {
    "records.ceilings": None,
    "records.numa": None,
    "records.energy": ("Counter", "Series", "Log", "Energy", "EnergySummary"),
    "records.stacks": None,
    "records.host_reads": None,
    "records.difference": None,
    "records.trace": None,
    "judge.anatomy": None,
    "judge.activity": None,
    "judge.read_sites": None,
    "judge.diagnosis": ("Bound", "Diagnosis"),
    "judge.stats": None,
    "judge.equivalence": None,
    "judge.metric": ("Metric", "Reading"),
    "judge.agreement": None,
    "records.ranks_of_plan": None,
    "records.plan": None,
    "judge.result": None,
    "judge.rank_tuning": None,
    "judge.proof": None,
    "judge.contrast": None,
    "trials.search.space": ("Choice",),
    "trials.terms": ("Terms",),
    "trials.conduct": ("Goal",),
    "run.script": ("Script",),
    "run.choice": ("Engagement",),
    "run.outcome": ("Outcome",),
    "trials.prover": ("ProveRequest",),
    "trials.lever_rows": None,
    "report.former": ("Exported",),
    "api": None,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One field of a record as its page shows it."""

    name: str
    type: str
    unit: str
    default: str
    meaning: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordClass:
    """A dataclass, read from its source so that nothing depends on the version of Python."""

    name: str
    summary: str
    fields: tuple[Field, ...]


#: Names that mean the same wherever they stand. What a record itself says of a field comes first.
COMMON = {
    "affinity": "logical processors that the process may use; None where not observed",
    "arguments": "the script's own",
    "autocast": "whether the script uses autocast itself",
    "batch_size": "items in a batch; None where the loader does not say",
    "calls_per_step": "calls with gradients in one step",
    "can_fuse": "whether a fused update exists for it here",
    "ceilings": "this machine's; None where they could not be measured",
    "census": "one step's operations; None where not counted",
    "class_": "what it may change, see the levers",
    "compiled": "whether the script compiles it itself",
    "convolution_dims": "dimensions of the convolutions in it",
    "created": "ISO 8601, UTC, to the second",
    "cudnn_benchmark": "as the script has set it",
    "dataset": "name of its class",
    "detail": "the numbers behind it, for people",
    "device": "`cpu` or `cuda`: where the parameters lie",
    "diagnosis": "what binds",
    "differences": "one per check",
    "distributed": "whether a process group is initialised",
    "dtype": "of the first tensor argument",
    "dtypes": "of the parameters",
    "engaged": "what was engaged, with its settings",
    "engagement": "what was to be engaged, and why",
    "error": "name of the exception's class",
    "exit_code": "of the process; None where not known",
    "facts": "what the script turned out to do",
    "filename": "the file that an `OSError` names",
    "flatout": "version of flatout",
    "flops": "multiply-adds of matrix products and convolutions times two",
    "foreach": "whether some group has the flag",
    "format": "version of the record",
    "framework": "`pytorch`",
    "framework_version": "for example `2.13.0+cpu`",
    "full_s": "of each replay at the whole batch",
    "fused": "whether some group has the flag",
    "generator": "whether the script gave it a generator",
    "grad_scaler": "whether the script scales gradients",
    "half_s": "of each replay at half the batch",
    "has_closure": "whether it calls the model itself (LBFGS)",
    "header": "who wrote the trace, and where",
    "iterable": "whether the dataset is an `IterableDataset`",
    "lever": "its name",
    "levers": "by name, with their settings",
    "loaders": "from which training drew batches, most used first",
    "low": "the 5th percentile",
    "machine": "where it was measured",
    "matmul_precision": "`torch.get_float32_matmul_precision()`",
    "mean": "arithmetic mean",
    "median": "middle value",
    "message": "what the exception said",
    "models": "the outermost modules that training calls",
    "moved_bytes": "of arguments that are read and results that are written; what caches hold does not pass the memory",
    "name": "what it is called",
    "num_batches": "in one pass; None where the loader does not say",
    "num_threads": "CPU threads of one operation",
    "optimizers": "that made an update",
    "optimizers_per_step": "updates in one step",
    "order": "the order that it answers; -1 for none",
    "out_of_memory": "whether memory was short",
    "outcome": "what it came to",
    "parameter": "the setting that it must be given, a whole number; None where it takes none",
    "path": "of the file",
    "persistent": "whether workers stay between passes",
    "picklable": "whether workers could be given the dataset; None where that is not needed",
    "pid": "process id",
    "pinned": "whether batches are in page-locked memory",
    "plan": "what was chosen; None where nothing was",
    "prefetch_factor": "batches that a worker makes ahead",
    "python": "version of Python",
    "rank": "of this process",
    "reason": "why",
    "records": "in the order in which they were written",
    "recurrent": "whether it has recurrent layers",
    "refusal": "why it cannot be tried; None where it can",
    "registry": "all levers by name",
    "released": "names of the levers that were released",
    "run": "the run folder",
    "script": "as it was typed, or `-m module`",
    "self_s": "of all its calls together",
    "shape": "of the first three tensor arguments",
    "shortens": "phases that it can make shorter",
    "stage": "where: see above",
    "started_unix_s": "when",
    "step": "number of the step, from 1",
    "summary": "what it does",
    "timeline": "every measured step, for the figure",
    "toggles": "`step`, `epoch` or `process`",
    "took_s": "how long it took",
    "trials": "in the order in which they were made",
    "untried": "levers that were not tried, and why",
    "verdict": "in one word",
    "wall_s": "how long it ran",
    "warm_up_step_s": "mean of the first steps, for a first idea",
    "world_size": "number of ranks",
    "worst_error": "its relative error",
}


def records() -> str:
    """Every public record, field by field."""
    parts = [
        "# Records",
        "What stages hand to each other, what lies in a run folder, and what the Python interface gives back. All are "
        "frozen, keyword-only dataclasses; their JSON has the same names. A name's ending states its unit; `num_` is a "
        "count, times are wall seconds, and None means that something was not observed, never that it was 0.",
    ]
    for module, wanted in RECORDS.items():
        parts.append(f"## flatout.{module}")
        parts += [f"### {r.name}\n\n{r.summary}\n\n{fields_table(r)}" for r in record_classes(module, wanted)]
    return "\n\n".join(parts)


def record_classes(module: str, wanted: Sequence[str] | None = None) -> list[RecordClass]:
    """The public dataclasses of a module, in the order of its source."""
    path = SOURCE / f"{module.replace('.', '/')}.py"
    found = [
        _record_class(node)
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
        and not node.name.startswith("_")
        and any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    ]
    if wanted is None:
        return found
    if missing := set(wanted) - {record.name for record in found}:
        raise LookupError(f"`flatout.{module}` has no record {', '.join(missing)}")
    return [record for record in found if record.name in wanted]


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
                type=readable_type(ast.unparse(item.annotation)),
                unit=unit_of(name),
                default=_default(item.value),
                meaning=meaning.rstrip("."),
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


def readable_type(annotation: str) -> str:
    """An annotation without what only a type checker needs; no `|`, which would end a table's cell."""
    return annotation.replace(" | ", " or ").replace("Mapping", "dict").replace(", ...]", "]").replace("tuple", "list")


def unit_of(name: str) -> str:
    """The unit that a name states."""
    fitting = [ending for ending in UNITS if name.endswith(ending)]
    if fitting:
        return UNITS[max(fitting, key=len)]
    return "count" if name.startswith("num_") else ""


def _default(value: ast.expr | None) -> str:
    if value is None:
        return "required"
    text = ast.unparse(value)
    if "default_factory" in text or text.startswith(("field(", "dataclasses.field(")):
        return "made anew" if "lambda" in text or "Factory" in text else "empty"
    return f"`{text}`"


def fields_table(record: RecordClass) -> str:
    """The fields of a record; the unit's column only where some name states one."""
    with_unit = any(field.unit for field in record.fields)
    heads = ["field", "type", *(["unit"] if with_unit else []), "default", "meaning"]
    rows = [
        [f"`{f.name}`", f"`{f.type}`", *([f.unit] if with_unit else []), f.default, f.meaning] for f in record.fields
    ]
    return table(heads, rows)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(" ".join(str(cell).split()) for cell in line) + " |" for line in lines)


def record_table(module: str, name: str) -> str:
    """The fields of one record."""
    (record,) = record_classes(module, [name])
    return fields_table(record)


def fenced(text: str, kind: str = "text") -> str:
    """A code block."""
    return f"```{kind}\n{text.rstrip()}\n```"
