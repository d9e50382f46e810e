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
import stat
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from flatout.errors import RecordError, UsageError, cannot_write
from flatout.records.as_json import from_json, to_json
from flatout.records.ceilings import Machine, differences
from flatout.records.plan import CLASSES, PLAN_FORMAT, Plan, label

MOST_BYTES = 16 << 20
"""A plan takes some 2 kB."""

_HEAD = """\
# Plans made by flatout: what to change about how a script runs, with the measurement that justifies it.
# `flatout run SCRIPT` engages the plan of its script; delete a table to forget it. Safe to commit,
# if the name of the machine and the script's arguments are: both stand here.
"""

_BEGINS = re.compile(r"\ufeff?(?:# Plans made by flatout|(?:[ \t]*(?:#[^\n]*)?\r?\n)*[ \t]*format[ \t]*=[ \t]*[0-9])")
"""How every plan file begins, also one whose comments somebody took away."""

_BEGINNING_BYTES = 4096

_OURS = re.compile(r"# .*: \S+x \[\S+, \S+\]")
"""The line under a plan's head, which is written anew with the plan."""

_NO_LOCKS = (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What network file systems say that cannot lock a folder."""


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
        if path.exists() and not _is_empty(path):
            _plans(path)
        folder = folder_of(path)
        if not folder.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as problem:
        raise cannot_write(path, problem) from None


def write(plan: Plan, path: Path) -> None:
    """Put the plan into the file, in place of the former plan of the same script; everything else stays.

    Raises:
        MachineError: The file cannot be written.
        RecordError: The file is there, is not empty, and is not a plan file.
        UsageError: The script's name or arguments are not text.
    """
    place = Path(os.path.realpath(path))  # a link stays a link
    try:
        with _locked(place.parent):
            text = _text(place) if place.exists() and not _is_empty(place) else None
            _put(place, _with_plan(text, plan, path))
    except UnicodeDecodeError as problem:
        raise _not_understood(path, str(problem)) from None
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
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as problem:
            if problem.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(lock)


def _put(place: Path, text: str) -> None:
    """The whole file or none of it: a draft beside it takes its place."""
    draft = place.with_name(f".{place.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        if place.exists():
            draft.chmod(stat.S_IMODE(place.stat().st_mode))
        os.replace(draft, place)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def _with_plan(text: str | None, plan: Plan, path: Path) -> str:
    """The file's text with the plan in it."""
    import tomlkit
    from tomlkit.container import OutOfOrderTableProxy
    from tomlkit.items import Table

    document = _document(text, path)
    kept = _comments(document.body)
    plans = document.setdefault("plan", tomlkit.table(is_super_table=True))
    if not isinstance(plans, Table | OutOfOrderTableProxy):
        raise torn(path, "`plan` is not a table of tables")
    table = _table(plan)
    plans[plan.script] = table
    lost = Counter(kept) - Counter(_comments(document.body))
    _append(table["machine"], [c for c in kept if lost[c] and not _OURS.fullmatch(c)])
    found = str(tomlkit.dumps(document))
    if text is not None and _others(found, plan.script) != _others(text, plan.script):
        raise torn(path, "its tables are written in a way that cannot be kept beside a new one")
    return found


def _document(text: str | None, path: Path) -> Any:
    import tomlkit

    if text is None:
        document = tomlkit.parse(_HEAD)
        document["format"] = PLAN_FORMAT
        return document
    try:
        found = tomlkit.parse(text)
    except (ValueError, RecursionError) as problem:  # of tomlkit, or of a number or a depth that nobody can read
        raise _not_understood(path, f"it does not read as TOML: {problem}") from None
    _check_format(found, path)
    return found


def _comments(body: Iterable[tuple[Any, Any]]) -> list[str]:
    """Every comment below, in order; a comment before a table's head belongs to the table above it."""
    from tomlkit.items import AoT, InlineTable, Null, Table, Whitespace

    found: list[str] = []
    for _, item in body:
        if isinstance(item, AoT):
            found += _comments([(None, table) for table in item.body])
        elif not isinstance(item, Whitespace | Null):
            found += [item.trivia.comment] if item.trivia.comment else []
            found += _comments(item.value.body) if isinstance(item, Table | InlineTable) else []
    return found


def _append(table: Any, comments: list[str]) -> None:
    import tomlkit

    if comments:
        table.add(tomlkit.nl())
    for comment in comments:
        table.add(tomlkit.comment(comment.removeprefix("#").strip()))


def _others(text: str, script: str) -> Any:
    """What the file says apart from one script's plan."""
    found = tomllib.loads(text)
    plans = {name: table for name, table in found.get("plan", {}).items() if name != script}
    return to_json({**found, "plan": plans})  # without NaN, which is not equal to itself


def _table(plan: Plan) -> Any:
    import tomlkit

    table = tomlkit.table()
    head = f"{label(plan.levers)}: {plan.ratio:.2f}x [{plan.ratio_low:.2f}, {plan.ratio_high:.2f}]"
    table.add(tomlkit.comment("".join(c if c.isprintable() else " " for c in head)))  # a comment ends with its line
    _add(table, plan, (field for field in Plan.__slots__ if field not in _TABLES))
    levers = tomlkit.table(is_super_table=True)
    for name, settings in plan.levers.items():
        inner = tomlkit.table()
        inner.update(settings)
        levers[name] = inner
    if plan.levers:
        table["levers"] = levers
    machine = tomlkit.table()
    machine.update(_without_none(to_json(plan.machine)))
    table["machine"] = machine
    return table


_TABLES = ("script", "levers", "machine", "format")
"""Fields of a plan that are no keys of its table."""


def _add(table: Any, record: Plan, names: Iterable[str]) -> None:
    """Add fields of a record to a table; floats with as many digits as a measurement has."""
    for name in names:
        value = getattr(record, name)
        table[name] = float(f"{value:.6g}") if isinstance(value, float) else to_json(value)


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
    table = plans[key]
    if not isinstance(table, dict):
        raise torn(path, f"the plan of `{key}` is not a table")
    value = {"format": PLAN_FORMAT, "levers": {}, **table, "script": key}
    where = f"`{path}`, plan of `{key}`"
    plan = from_json(Plan, value, where=where)
    if plan.class_ not in CLASSES:
        raise torn(path, f"`class_` is `{plan.class_}`, not one of {', '.join(CLASSES)}")
    for name in ("ratio", "ratio_low", "ratio_high", "baseline_steps_per_s", "tuned_steps_per_s"):
        if not 0 < (number := getattr(plan, name)) < math.inf:
            raise torn(path, f"`{name}` is {number}: no measurement gives that")
    return plan


def _text(path: Path) -> str:
    """What stands in the file; a pipe or a device is not read, for it may never end."""
    place = path.stat()
    if stat.S_ISDIR(place.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(place.st_mode) or place.st_size > MOST_BYTES:
        raise OSError(errno.EINVAL, f"not a file of at most {MOST_BYTES >> 20} MiB")
    return path.read_text(encoding="utf-8")


def _plans(path: Path) -> dict[str, Any]:
    try:
        text = _text(path)
    except OSError as problem:
        raise RecordError(
            f"cannot read the plan `{path}`",
            cause=str(problem.strerror or problem),
            hint="`flatout tune SCRIPT` writes one",
        ) from None
    except UnicodeDecodeError as problem:
        raise _not_understood(path, str(problem)) from None
    try:
        found = tomllib.loads(text)
    except (ValueError, RecursionError) as problem:
        raise _not_understood(path, f"it does not read as TOML: {problem}") from None
    _check_format(found, path)
    plans = found.get("plan", {})
    if not isinstance(plans, dict):
        raise torn(path, "`plan` is not a table")
    return plans


def _check_format(found: Any, path: Path) -> None:
    number = found.get("format")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise _not_understood(path, _instead_of_a_format(found))
    if number > PLAN_FORMAT:
        raise RecordError(
            f"`{path}` has format {number}, this version reads up to {PLAN_FORMAT}",
            cause="a newer flatout wrote it",
            hint="`pip install --upgrade flatout`, or tune again with this version",
        )


def _instead_of_a_format(found: Any) -> str:
    if not found:
        return "it is empty, or holds nothing but comments"
    if "format" not in found:
        return "it states no `format`, which every plan file begins with"
    stated = found["format"]
    literal = str(stated).lower() if isinstance(stated, bool) else str(stated)[:40]
    return f"its `format` is `{literal}`, that of a plan file is a whole number from 1 to {PLAN_FORMAT}"


def _not_understood(path: Path, why: str) -> RecordError:
    """The error for a file that cannot be understood: what never was a plan is somebody's work, and not torn."""
    try:
        with open(path, "rb") as file:
            beginning = file.read(_BEGINNING_BYTES).decode(errors="replace")
    except OSError:
        beginning = ""
    if _BEGINS.match(beginning):
        return torn(path, why)
    return RecordError(
        f"`{path}` is no plan file",
        cause=why,
        hint="`--plan` names another: one that `flatout tune` wrote, or for `tune` a new one",
    )


def torn(path: Path, why: str) -> RecordError:
    """The error for a plan file that cannot be understood."""
    return RecordError(
        f"`{path}` is torn",
        cause=why,
        hint="mend it by hand or restore it; `flatout tune --plan NEW SCRIPT` makes another beside it",
    )


def _is_empty(path: Path) -> bool:
    place = path.stat()
    return stat.S_ISREG(place.st_mode) and not place.st_size


def unknown_levers(plan: Plan, known: Iterable[str]) -> tuple[str, ...]:
    """Levers of the plan that this version does not have."""
    return tuple(name for name in plan.levers if name not in set(known))


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
