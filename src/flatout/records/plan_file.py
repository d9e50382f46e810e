"""How does a plan lie on disk? As TOML that people can read and commit: one table per script, in `flatout.toml`.

In: a `Plan` and a path. Out: the file, in which the plans of other scripts and the user's comments stay; or the plan
read back; or an error that says what is wrong with the file. A plan is data: nothing in it is evaluated or imported.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.errors import RecordError, UsageError, cannot_write
from flatout.records.as_json import from_json, to_json
from flatout.records.ceilings import Machine, differences
from flatout.records.output_file import write_whole
from flatout.records.plan import CLASSES, PLAN_FORMAT, Plan, label

if TYPE_CHECKING:
    from tomlkit import TOMLDocument

MOST_BYTES = 16 << 20
"""A larger file is no plan."""

_HEAD = """\
# Plans made by flatout: what to change about how a script runs, with the measurement that justifies it.
# `flatout run SCRIPT` engages the plan of its script; delete a table to forget it. Safe to commit,
# if the name of the machine and the script's arguments are: both stand here.
"""

_OURS = re.compile(r"# .*: \S+x \[\S+, \S+\]")
"""The line under a plan's head, which is written anew with the plan."""


def folder_of(path: Path) -> Path:
    """The folder in which the file really lies: what a plan names is found from there, whoever reads it from where."""
    return Path(os.path.realpath(path)).parent


def key_of(script: str, path: Path) -> str:
    """What the file at `path` calls a script that was typed as `script`: the way to it from the file's folder.

    So every way of typing one script finds its plan, and scripts of one name in several folders have a plan each.
    A module is known by its name.
    """
    if script.startswith("-m "):
        return script
    folder, name = os.path.split(script.rstrip("/") or script)
    try:
        return os.path.relpath(os.path.join(os.path.realpath(folder), name), folder_of(path))
    except OSError:  # the working folder is gone
        return script


def seen_from(path: Path, plan: Plan) -> Plan:
    """A plan as the file at `path` holds it: its script and its run folder as they are found from the file's folder."""
    run = os.path.relpath(plan.run, folder_of(path)) if plan.run else ""
    return replace(plan, script=key_of(plan.script, path), run=run)


def check_place(path: Path) -> None:
    """Make sure that a plan can be written to `path`, before minutes are spent on making one.

    Raises:
        MachineError: The folder is not there, or cannot be written.
        RecordError: The file is there, is not empty, and is not a plan file.
    """
    try:
        folder = folder_of(path)
        if not os.access(folder, os.W_OK | os.X_OK):
            number = errno.EACCES if folder.is_dir() else errno.ENOENT
            raise OSError(number, os.strerror(number))
        is_there = _is_there(path)
    except OSError as problem:
        raise cannot_write(path, problem) from None
    if is_there:
        _plans(path)
        _table_of_plans(path)


def write(plan: Plan, path: Path) -> None:
    """Put the plan into the file, in place of the former plan of the same script; everything else stays.

    Raises:
        MachineError: The file cannot be written.
        RecordError: The file is there, is not empty, and is not a plan file.
        UsageError: The script's name or arguments are not text.
    """
    try:
        with _locked(folder_of(path)):
            text = _with_plan(plan, path)
            text.encode()
            write_whole([text], path)
    except UnicodeEncodeError:
        raise UsageError(
            f"no plan can be written for {plan.script!r}",
            cause="the script's name or arguments hold bytes that are not UTF-8, which TOML cannot",
            hint="rename the file, or start it from its folder",
        ) from None
    except OSError as problem:
        raise cannot_write(path, problem) from None


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One writer at a time: the lock is on the folder, which is there and stays."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # of network file systems that cannot lock a folder
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _table_of_plans(path: Path) -> tuple[str | None, TOMLDocument]:
    """The file's text, None without one, and what it says with a table of plans, into which one more can be put.

    Raises:
        RecordError: There is none.
    """
    import tomlkit
    from tomlkit.items import Table

    former = _text(path) if _is_there(path) else None
    document = tomlkit.parse(_HEAD + f"format = {PLAN_FORMAT}\n" if former is None else former)
    if not isinstance(document.setdefault("plan", tomlkit.table(is_super_table=True)), Table):
        raise unreadable(path, "`plan` is no table of tables that follow each other")
    return former, document


def _with_plan(plan: Plan, path: Path) -> str:
    """The file's text with the plan in it; comments of the user's in the former plan go behind the new one."""
    import tomlkit
    from tomlkit.items import Table

    former, document = _table_of_plans(path)
    plans = document["plan"]
    replaced = plans.get(plan.script)
    lines = replaced.as_string().splitlines() if isinstance(replaced, Table) else []
    comments = [line.strip() for line in lines if line.lstrip().startswith("#") and not _OURS.fullmatch(line.strip())]
    table = _table(plan)
    for comment in comments:
        table["machine"].add(tomlkit.comment(comment.removeprefix("#").strip()))
    plans[plan.script] = table
    found = str(tomlkit.dumps(document))
    if former is not None and _others(found, plan.script) != _others(former, plan.script):
        raise unreadable(path, "its tables are written in a way that cannot be kept beside a new one")
    return found


def _others(text: str, script: str) -> Any:
    """What the file says apart from one script's plan."""
    found = tomllib.loads(text)
    plans = {name: table for name, table in found.get("plan", {}).items() if name != script}
    return to_json({**found, "plan": plans})  # without NaN, which is not equal to itself


def _table(plan: Plan) -> Any:
    """A plan in TOML, whose floats have as many digits as a measurement has."""
    import tomlkit

    values = {name: value for name, value in to_json(plan).items() if name not in ("script", "format")}
    values = {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in values.items()}
    table = tomlkit.table()
    head = f"{label(plan.levers)}: {plan.ratio:.2f}x [{plan.ratio_low:.2f}, {plan.ratio_high:.2f}]"
    table.add(tomlkit.comment("".join(c if c.isprintable() else " " for c in head)))  # a comment ends with its line
    levers, machine = values.pop("levers"), values.pop("machine")
    table.update(values)
    if levers:
        table["levers"] = levers
    table["machine"] = _without_none(machine)
    return table


def _without_none(value: Any) -> Any:
    """TOML has no null: what is not known is left out, at every depth."""
    if isinstance(value, dict):
        return {name: _without_none(item) for name, item in value.items() if item is not None}
    return [_without_none(item) for item in value] if isinstance(value, list) else value


def scripts(path: Path) -> tuple[str, ...]:
    """The scripts for which the file holds a plan.

    Raises:
        RecordError: Missing, torn, or from a newer version.
    """
    return tuple(_plans(path))


def read(path: Path, key: str) -> Plan:
    """The plan of the script that the file calls `key`, see `key_of`.

    Raises:
        RecordError: Missing, torn, from a newer version, or without a plan for this script.
    """
    plans = _plans(path)
    if key not in plans:
        others = ", ".join(f"`{name}`" for name in plans) or "no script at all"
        raise RecordError(
            f"`{path}` has no plan for `{key}`",
            cause=f"it has plans for {others}",
            hint="`flatout tune` makes one; a script is called as it is found from the folder of the file",
        )
    if not isinstance(plans[key], dict):
        raise unreadable(path, f"the plan of `{key}` is not a table")
    value = {"format": PLAN_FORMAT, "levers": {}, **plans[key], "script": key}
    plan = from_json(Plan, value, where=f"`{path}`, plan of `{key}`")
    if plan.class_ not in CLASSES:
        raise unreadable(path, f"`class_` is `{plan.class_}`, not one of {', '.join(CLASSES)}")
    for name in ("ratio", "ratio_low", "ratio_high", "baseline_steps_per_s", "tuned_steps_per_s"):
        if not 0 < (number := getattr(plan, name)) < math.inf:
            raise unreadable(path, f"`{name}` is {number}: no measurement gives that")
    return plan


def _is_there(path: Path) -> bool:
    """Whether there is a file with something in it; an empty one is as good as none."""
    return path.exists() and not (path.is_file() and path.stat().st_size == 0)


def _text(path: Path) -> str:
    """What stands in the file, which reads as TOML of this format.

    Raises:
        RecordError: Missing, not TOML, or not of this format.
    """
    try:
        if path.exists() and not path.is_file():
            raise OSError(errno.EINVAL, "not a file, but something that may never end")
        if path.stat().st_size > MOST_BYTES:
            raise OSError(errno.EFBIG, f"it is larger than {MOST_BYTES >> 20} MiB, so no plan")
        text = path.read_text(encoding="utf-8")
        found = tomllib.loads(text)
    except OSError as problem:
        raise RecordError(
            f"cannot read the plan `{path}`",
            cause=str(problem.strerror or problem),
            hint="`flatout tune SCRIPT` writes one",
        ) from None
    except (ValueError, RecursionError) as problem:
        raise unreadable(path, f"it does not read as TOML: {problem}") from None
    number = found.get("format")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise unreadable(path, f"it states no `format` from 1 to {PLAN_FORMAT}, which every plan file begins with")
    if number > PLAN_FORMAT:
        raise RecordError(
            f"`{path}` has format {number}, this version reads up to {PLAN_FORMAT}",
            cause="a newer flatout wrote it",
            hint="`pip install --upgrade flatout`, or tune again with this version",
        )
    return text


def _plans(path: Path) -> dict[str, Any]:
    plans = tomllib.loads(_text(path)).get("plan", {})
    if not isinstance(plans, dict):
        raise unreadable(path, "`plan` is not a table")
    return plans


def unreadable(path: Path, why: str) -> RecordError:
    """The error for a plan file that cannot be understood; what never was one is somebody's work."""
    return RecordError(
        f"`{path}` is no plan file, or a torn one",
        cause=why,
        hint="mend it by hand or restore it; `--plan` names another: one that `flatout tune` wrote, or for `tune` a "
        "new one",
    )


def misfits(plan: Plan, machine: Machine, framework_version: str, python: str = "") -> tuple[str, ...]:
    """What differs from where the plan was made, in words; empty where it fits.

    Updates of the kernel and patches of Python change no speed that a plan rests on (`Machine.machine_key` leaves the
    kernel out too), so that `3.11.7` and `3.11.9` are one; without `python` it is not compared.
    """
    found = list(differences(replace(plan.machine, operating_system=machine.operating_system), machine))
    if plan.framework_version != framework_version:
        found.append(f"{plan.framework} {plan.framework_version} then, {framework_version} now")
    if python and plan.python.split(".")[:2] != python.split(".")[:2]:
        found.append(f"Python {plan.python} then, {python} now")
    return tuple(found)
