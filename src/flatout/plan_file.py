"""How does a plan lie on disk? As TOML that people can read and commit: one table per script, in `flatout.toml`.

In: a `Plan` and a path. Out: the file, in which the plans of other scripts and the user's comments stay; or the plan
read back; or an error that says what is wrong with the file. A plan is data: nothing in it is evaluated or imported.
"""

from __future__ import annotations

import fcntl
import os
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flatout.ceilings import Machine, differences
from flatout.errors import RecordError, cannot_write
from flatout.plan import PLAN_FORMAT, Plan, label
from flatout.records import from_json, to_json

DEFAULT = "flatout.toml"

_HEAD = """\
# Plans made by flatout: what to change about how a script runs, with the measurement that justifies it.
# `flatout run SCRIPT` engages the plan of its script; delete a table to forget it. Safe to commit.
"""


def write(plan: Plan, path: Path) -> None:
    """Put the plan into the file, in place of the former plan of the same script.

    Raises:
        MachineError: The file cannot be written.
        RecordError: The file is there and is not a plan file.
    """
    import tomlkit

    try:
        with _locked(path):
            document = _document(path)
            plans = document.setdefault("plan", tomlkit.table(is_super_table=True))
            plans[plan.script] = _table(plan)
            draft = path.with_name(f".{path.name}.{os.getpid()}")
            draft.write_text(tomlkit.dumps(document), encoding="utf-8")
            os.replace(draft, path)
    except OSError as problem:
        raise cannot_write(path, problem) from None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time: the lock is on the folder, which is there and stays."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _document(path: Path) -> Any:
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    if not path.exists():
        document = tomlkit.parse(_HEAD)
        document["format"] = PLAN_FORMAT
        return document
    try:
        found = tomlkit.parse(path.read_text(encoding="utf-8"))
    except (TOMLKitError, UnicodeDecodeError) as problem:
        raise torn(path, str(problem)) from None
    _check_format(found, path)
    return found


def _table(plan: Plan) -> Any:
    import tomlkit

    value = to_json(plan)
    table = tomlkit.table()
    table.add(tomlkit.comment(f"{label(plan.levers)}: {plan.ratio:.2f}x [{plan.ratio_low:.2f}, {plan.ratio_high:.2f}]"))
    for name in value:
        if name not in ("script", "levers", "machine", "format"):
            table[name] = _rounded(value[name])
    levers = tomlkit.table(is_super_table=True)
    for name, settings in value["levers"].items():
        inner = tomlkit.table()
        inner.update(settings)
        levers[name] = inner
    if value["levers"]:
        table["levers"] = levers
    machine = tomlkit.table()
    machine.update({k: v for k, v in value["machine"].items() if v is not None})
    table["machine"] = machine
    return table


def _rounded(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def scripts(path: Path) -> tuple[str, ...]:
    """The scripts for which the file holds a plan.

    Raises:
        RecordError: Missing, torn, or from a newer version.
    """
    return tuple(_plans(path))


def read(path: Path, script: str) -> Plan:
    """The plan of one script.

    Raises:
        RecordError: Missing, torn, from a newer version, or without a plan for this script.
    """
    plans = _plans(path)
    if script not in plans:
        others = ", ".join(f"`{name}`" for name in plans) or "no script at all"
        raise RecordError(
            f"`{path}` has no plan for `{script}`",
            cause=f"it has plans for {others}",
            hint=f"`flatout tune {script}` makes one",
        )
    table = plans[script]
    if not isinstance(table, dict):
        raise torn(path, f"the plan of `{script}` is not a table")
    value = {"format": PLAN_FORMAT, "levers": {}, **table, "script": script}
    return from_json(Plan, value, where=f"`{path}`, plan of `{script}`")


def _plans(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as problem:
        raise RecordError(
            f"cannot read the plan `{path}`",
            cause=str(problem.strerror or problem),
            hint="`flatout tune SCRIPT` writes one",
        ) from None
    except UnicodeDecodeError as problem:
        raise torn(path, str(problem)) from None
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise torn(path, str(problem)) from None
    _check_format(found, path)
    plans = found.get("plan", {})
    if not isinstance(plans, dict):
        raise torn(path, "`plan` is not a table")
    return plans


def _check_format(found: Any, path: Path) -> None:
    number = found.get("format")
    if not isinstance(number, int):
        raise torn(path, "it states no `format`, so it is not a plan file, or its head is gone")
    if number > PLAN_FORMAT:
        raise RecordError(
            f"`{path}` has format {number}, this version reads up to {PLAN_FORMAT}",
            cause="a newer flatout wrote it",
            hint="`pip install --upgrade flatout`, or tune again with this version",
        )


def torn(path: Path, why: str) -> RecordError:
    """The error for a plan file that cannot be understood."""
    return RecordError(f"`{path}` is torn", cause=why, hint="restore the file, or delete it and tune again")


def unknown_levers(plan: Plan, known: Iterable[str]) -> tuple[str, ...]:
    """Levers of the plan that this version does not have."""
    return tuple(name for name in plan.levers if name not in set(known))


def misfits(plan: Plan, machine: Machine, framework_version: str) -> tuple[str, ...]:
    """What differs from where the plan was made, in words; empty where it fits."""
    found = list(differences(plan.machine, machine))
    if plan.framework_version != framework_version:
        found.append(f"{plan.framework} {plan.framework_version} then, {framework_version} now")
    return tuple(found)
