"""Write the reference pages from the code: `python scripts/make_reference.py [FOLDER]`, by default `docs/reference`.

In: click's help, the lever registry, the records and the errors, as they are now. Out: one Markdown page each. A test
writes them into a temporary folder and fails where the committed pages differ, so that they are never edited by hand.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reference_examples import json_page, plan_page
from reference_records import fenced, prose, records, table

ROOT = Path(__file__).resolve().parent.parent
MARK = "<!-- Made by `python scripts/make_reference.py`. Do not edit: change the code and make it anew. -->"
WIDTH = 110


def main() -> None:
    """Write all pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "docs" / "reference")
    for path in write_all(parser.parse_args().folder):
        print(path)


def write_all(folder: Path) -> list[Path]:
    """Write every page into `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, make in PAGES.items():
        path = folder / name
        path.write_text(f"{MARK}\n\n{make().strip()}\n", encoding="utf-8")
        written.append(path)
    return written


# -- commands ------------------------------------------------------------------------------------------------------


def commands() -> str:
    """Each command's own help."""
    import click

    from flatout.cli import COMMANDS, flatout

    top = click.Context(flatout, info_name="flatout", terminal_width=WIDTH, **flatout.context_settings)
    parts = [
        "# Commands",
        prose(
            "What `--help` says, for every command. flatout's own options stand before the script; everything after "
            "the script is the script's own. Durations are a number with `s`, `m` or `h`; without a letter they are "
            "seconds. What a command prints goes to stdout, what it says meanwhile to stderr; see [JSON](json.md) for "
            "`--json` and [errors and exit codes](errors.md)."
        ),
    ]
    for name in COMMANDS:
        command = flatout.get_command(top, name)
        if command is None:
            raise LookupError(f"the command `{name}` is listed but cannot be loaded")
        context = click.Context(command, info_name=name, parent=top, terminal_width=WIDTH)
        parts += [f"## flatout {name}", fenced(command.get_help(context))]
    return "\n\n".join(parts)


# -- levers --------------------------------------------------------------------------------------------------------

_TOGGLES = {"step": "between two steps", "epoch": "when a pass over the data begins", "process": "in a new process"}
_CLASSES = {
    "exact": ("nothing: same batches, same random numbers, same bits", "bit for bit", "on"),
    "rounding": ("the order of float operations", "agreement", "on"),
    "precision": ("the width of floats", "agreement", "on"),
    "statistical": ("which random numbers are drawn", "`flatout prove`, over several seeds", "`--accept statistical`"),
    "lossy": ("answers of a model that nobody trains", "share of changed answers", "`--accept lossy`"),
    "semantics": (
        "batch size, learning rate, the model",
        "`flatout prove`, and by you",
        "never by `tune`; `prove` and `run` take them with `--levers` and `--accept semantics`",
    ),
}


def levers() -> str:
    """The registry as a table, and a section for each lever."""
    from flatout.frameworks.pytorch.levers import registry
    from flatout.records.plan import CLASSES

    found = list(registry().values())
    if tuple(_CLASSES) != CLASSES:
        raise LookupError("the classes of levers have changed: describe them here")
    rows = [
        [
            f"[`{lever.name}`](#{lever.name})" if _details(lever) else f"[`{lever.name}`](#levers)",
            lever.class_,
            ", ".join(lever.shortens),
            _TOGGLES[lever.toggles],
            "whole runs" if lever.class_ == "semantics" else lever.check,
            lever.summary,
            _first_line(type(lever).applies),
        ]
        for lever in found
    ]
    parts = [
        "# Levers",
        prose(
            "A lever is one change to how a script runs. These are all there are, in the order in which they build on "
            "each other. *Can shorten* names the phases that it can make shorter. *Checked by* names what is compared "
            "with and without it, see [agreement](../explanation/numbers.md#agreement). "
            "`flatout levers SCRIPT` says which of them apply. `--levers input` stands for all exact ones that shorten "
            "`data` or `copy`, as far as they go together on the machine."
        ),
        table(["lever", "class", "can shorten", "toggled", "checked by", "what it does", "applies to"], rows),
        "## Classes",
        "Each class admits those above it; `--accept CLASS` says how far levers may go, `precision` without it.",
        table(["class", "may change", "judged", "tried"], [[f"`{name}`", *row] for name, row in _CLASSES.items()]),
        *(f"## {lever.name}\n\n{prose(text)}" for lever in found if (text := _details(lever))),
    ]
    return "\n\n".join(parts)


def _details(lever: Any) -> str:
    """What a row of the table does not say; empty where that is nothing."""
    kind = type(lever)
    module = inspect.getdoc(importlib.import_module(kind.__module__)) or ""
    head, _, rest = module.partition("\n")
    text = head.partition(": ")[2] or head
    sentences = [*rest.split()]
    if "settings" in vars(kind):
        sentences.append(f"Tried as `{lever.name}={lever.parameter.upper()}`: {_first_line(kind.settings)}.")
    if lever.choices:
        alone = ", or nothing" if lever.optional else ""
        sentences.append(f"Its setting is one of {', '.join(f'`{word}`' for word in lever.choices)}{alone}.")
    if lever.only_by_name:
        sentences.append(f"Only by name (`--levers {lever.name}`): {lever.only_by_name}.")
    if lever.conflicts:
        sentences.append(f"Not together with {', '.join(f'`{name}`' for name in lever.conflicts)}.")
    return " ".join([text[:1].upper() + text[1:], *sentences]) if sentences else ""


def _first_line(function: Callable[..., Any]) -> str:
    text = (inspect.getdoc(function) or "").splitlines()[0].rstrip(".")
    return text[:1].lower() + text[1:] if not text[1:2].isupper() else text


# -- errors --------------------------------------------------------------------------------------------------------


def errors() -> str:
    """The hierarchy, each class with its exit code, and what else a command may exit with."""
    from flatout import errors as module

    kinds = [
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, module.FlatoutError) and kind is not module.FlatoutError
    ]
    example = module.UsageError(
        "no such script: `trian.py`",
        cause="it is not in `/home/me/project`",
        hint="flatout's own options stand before the script; check the path",
    )
    rows = [
        [f"`{kind.__name__}`", str(kind.exit_code), " ".join((inspect.getdoc(kind) or "").split()).rstrip(".")]
        for kind in kinds
    ]
    tree = textwrap.dedent((inspect.getdoc(module) or "").split("\n\n")[1])
    return "\n\n".join(
        [
            "# Errors and exit codes",
            prose(
                "Every error that you can act on has three parts: what happened, why, and what to type next. They go "
                "to stderr; stdout stays empty."
            ),
            fenced(str(example)),
            "In Python each is an exception with the attributes `error`, `cause` and `hint`, and `str()` gives the "
            "three lines.",
            fenced(tree),
            table(["error", "exit code", "when"], rows),
            "## Other exit codes",
            table(["exit code", "when"], _OTHER_CODES),
            prose(
                "`flatout run` and `flatout exec` end as the script ends: with its exit code, or by the same signal. "
                "They exit with a code from the table only when the script was not started at all."
            ),
        ]
    )


_OTHER_CODES = [
    [
        "0",
        "done; for `tune` whatever its verdict is: that nothing helps, or that it stayed inconclusive, is an answer, "
        "not an error",
    ],
    ["1", "`prove`: the metric is another under the plan"],
    [
        "6",
        "`prove`: these seeds cannot tell, or nothing can be compared (or an `Inconclusive`, which says so on stderr)",
    ],
    ["130", "you stopped it (Ctrl-C) before there was anything to keep"],
    [
        "143",
        "it was told to end (SIGTERM), whichever command it was; the children of `tune`, `why` and `prove` are ended "
        "with it, and the runs that `prove` has finished are kept",
    ],
    ["141", "whoever read our output went away"],
]


PAGES: dict[str, Callable[[], str]] = {
    "commands.md": commands,
    "levers.md": levers,
    "json.md": json_page,
    "records.md": records,
    "errors.md": errors,
    "plan-file.md": plan_page,
}

if __name__ == "__main__":
    main()
