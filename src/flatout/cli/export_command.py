"""`flatout export`: parse, call, print."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flatout.cli import options

if TYPE_CHECKING:
    from flatout.records.exported_models import ExportedModel, ExportedTensor, ModelExport


@click.command("export", cls=options.ScriptCommand, context_settings=options.SCRIPT_SETTINGS)
@click.option("--to", required=True, metavar="RUNTIME", help="`onnx`, `openvino` or `torchscript`.")
@click.option(
    "-o", "folder", required=True, type=click.Path(path_type=Path), metavar="FOLDER", help="A folder, new or empty."
)
@options.infer
@options.terms
@options.as_json
@options.script_words
def command(  # noqa: PLR0913  one parameter per option
    words: tuple[str, ...], module: str | None, to: str, folder: Path, infers: bool, allow_writes: bool,
    start_limit: str, as_json: bool,
) -> None:  # fmt: skip
    """Write the models that SCRIPT calls as files of another runtime, with a loader, and check them.

    \b
    Example:  flatout export --to onnx -o out infer.py
    Next:     python out/load.py

    The batch is free where that is right at sizes that were not used to export. The exit code is 1 where outputs
    do not agree, 6 where the script has no inputs to tell.
    """  # noqa: D301
    from flatout import api
    from flatout.cli.progress import measured
    from flatout.records.as_json import to_json
    from flatout.run.script import from_words

    terms = api.Terms(
        isolate=not allow_writes, start_limit_s=options.seconds(start_limit, "--start-limit"), infers=infers
    )
    script = from_words(words, module)

    def shown(found: ModelExport) -> None:
        print(json.dumps(to_json(found)) if as_json else "\n".join(_lines(found)))
        verdicts = {model.verdict for model in found.models if not model.refused}
        sys.exit(1 if "disagrees" in verdicts else 6 if "inconclusive" in verdicts else 0)

    measured(
        lambda show: api.export_models(script, to=to, folder=folder, terms=terms, show=show), shown,
        stopped="nothing was written",
    )  # fmt: skip


def _lines(found: ModelExport) -> list[str]:
    lines = [line for model in found.models for line in _of_model(model)]
    load = "load.py" if len(found.models) == 1 else next(f"{m.name}/load.py" for m in found.models if not m.refused)
    return [*lines, "", f"next: python {Path(found.folder) / load}"]


def _of_model(model: ExportedModel) -> list[str]:
    if model.refused:
        return [f"{model.name}: not exported: {model.refused}"]
    inputs = [f"{one.dtype} [{', '.join(_shape(one, model))}]" for one in model.inputs]
    batch = "any number of rows"
    if not model.batch_is_free:
        batch = f"rows as seen ({model.batch}) only: {model.why_fixed}"
    lines = [f"{model.name}: {', '.join(inputs)}; {batch}", f"  {model.verdict}: {model.detail}"]
    for one in model.checks:
        which = "new inputs" if one.is_new else "inputs that it was exported with"
        lines.append(
            f"  batch {one.batch}: {one.num_answers - one.num_others} of {one.num_answers} answers equal, outputs "
            f"{one.difference.error:.1e} apart, {which}"
        )
    if model.num_other_kinds:
        lines.append(f"  {model.num_other_kinds} calls seen had other types or shapes: these files are not for them")
    return lines


def _shape(tensor: ExportedTensor, model: ExportedModel) -> list[str]:
    free = model.batch_is_free and tensor.has_batch
    return ["batch" if free and not place else str(size) for place, size in enumerate(tensor.shape)]
