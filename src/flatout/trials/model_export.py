"""How do the models that a script calls become files of another runtime?

The script runs in a trial until its calls are known; its process writes the files, and they come to the user's folder
when all is there, in one rename. In: a script, a runtime, a folder. Out: a `ModelExport`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from flatout import __version__
from flatout.child.orders import EXPORTED
from flatout.errors import Inconclusive, ScriptError, UsageError, cannot_write, did_you_mean
from flatout.frameworks import kind
from flatout.judge import agreement
from flatout.records.as_json import to_json
from flatout.records.exported_models import ExportedModel, ModelExport
from flatout.records.trace import Agreement
from flatout.run import folder as run_folders
from flatout.run import isolation
from flatout.run.script import Script, check_source
from flatout.trials.bench import Bench, opened
from flatout.trials.terms import Show, Terms

FILE = "export.json"


def exported(script: Script, to: str, folder: Path, terms: Terms, show: Show) -> ModelExport:
    """Export.

    Raises:
        FlatoutError: See `flatout.errors`.
    """
    check_source(script)
    _check_runtime(to)
    _check_folder(folder)
    if terms.isolate:
        isolation.require()
    working = run_folders.working_folder()
    with run_folders.claimed(working, script.stem) as run_folder, _forgotten(run_folder):
        bench = Bench(script, run_folder, kind().levers(), terms)
        bench.on_wait = show.tick
        with opened(bench):
            show.stage("the script's first calls", 0.1)
            bench.start()
            if not bench.infers:
                raise ScriptError(
                    f"`{script.name}` trains",
                    cause="a model whose parameters change is not what a file would hold",
                    hint="export from the script that calls the trained model, or `--infer` for its calls in "
                    "evaluation mode",
                )
            show.stage(f"writing and checking files for {to}", 0.3)
            found = bench.exported(to)
        if found is None:
            raise Inconclusive(
                f"the models of `{script.name}` could not be exported",
                cause="; ".join(bench.warnings) or "their calls could not be kept",
                hint="`flatout why` says what the script does",
            )
        if all(model.refused for model in found.models):
            refused = "; ".join(f"`{model.name}`: {model.refused}" for model in found.models)
            raise ScriptError(
                f"no model of `{script.name}` can be exported to {to}", cause=refused or "no call was seen",
                hint="another `--to`, or `flatout tune`, which keeps to the model where a runtime cannot compute it",
            )  # fmt: skip
        return _placed(found, run_folder / EXPORTED, folder)


def _check_runtime(to: str) -> None:
    known = kind().exports()
    if to not in known:
        able = ", ".join(f"`{name}`" for name, why in known.items() if not why)
        raise UsageError(
            f"no such runtime: `{to}`", cause=f"here models can be exported to {able}",
            hint=did_you_mean(to, known, "`flatout export --help`"),
        )  # fmt: skip
    if why := known[to]:
        cause, _, hint = why.partition(": ")
        others = " or ".join(f"`--to {name}`" for name, lacks in known.items() if not lacks)
        raise UsageError(f"`--to {to}` is not possible here", cause=cause, hint=hint or others)


def _check_folder(folder: Path) -> None:
    """Refuse a folder in which something is.

    Raises:
        UsageError: There is.
        MachineError: It cannot be looked into, or made.
    """
    try:
        if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
            raise UsageError(
                f"`{folder}` is there already", cause="nothing is written over",
                hint="`-o` with a folder that is new or empty",
            )  # fmt: skip
        if not folder.resolve().parent.is_dir():
            raise FileNotFoundError(2, "its folder does not exist")
    except OSError as problem:
        raise cannot_write(folder, problem) from None


@contextlib.contextmanager
def _forgotten(run_folder: Path) -> Iterator[None]:
    """Nothing of the trial is kept: what it came to lies in the user's folder."""
    try:
        yield
    finally:
        shutil.rmtree(run_folder, ignore_errors=True)


def _placed(found: ModelExport, made: Path, folder: Path) -> ModelExport:
    """The files in the user's folder, all or none; of several models each in its own.

    Raises:
        MachineError: It cannot be written.
    """
    unfinished = folder.resolve().with_name(f".{folder.resolve().name}.part")
    shutil.rmtree(unfinished, ignore_errors=True)
    single = len(found.models) == 1
    try:
        models = tuple(model if model.refused else _judged(model, made / model.name) for model in found.models)
        found = replace(found, models=models, folder=str(folder))
        if single:
            shutil.copytree(made / models[0].name, unfinished)
        else:
            shutil.copytree(made, unfinished)
        text = json.dumps({"flatout": __version__, **to_json(found)}, indent=2)
        (unfinished / FILE).write_text(text + "\n", encoding="utf-8")
        unfinished.replace(folder.resolve())  # over an empty folder at most
    except OSError as problem:
        raise cannot_write(folder, problem) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return found


def _judged(model: ExportedModel, folder: Path) -> ExportedModel:
    """The model with a verdict by its worst check, and hashes of its files."""
    points = [Agreement(levers={}, differences=(one.difference,)) for one in model.checks]
    judged = agreement.judge(points, "rounding", ("outputs",))
    verdict, detail = judged.verdict, judged.detail or "the same bits"
    if verdict == "agrees" and not all(one.is_new for one in model.checks):
        verdict, detail = "inconclusive", "the script has no other inputs than those that it was exported with"
    files = sorted(path for path in folder.iterdir() if path.is_file())
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return replace(model, verdict=verdict, detail=detail, sha256=hashes)
