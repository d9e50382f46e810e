"""Which script does a launcher's command start, with which framework? In: words of a command. Out: a `Script`."""

from __future__ import annotations

import contextlib
from pathlib import Path

from flatout import plan_file
from flatout.errors import MachineError, RecordError
from flatout.run import installed
from flatout.run.script import Script


def planned(words: tuple[str, ...], known: tuple[str, ...], path: Path) -> Script | None:
    """The first script or module in a launcher's command that has a plan."""
    for place, word in enumerate(words):
        rest = words[place + 1 :]
        if word == "-m" and rest and f"-m {rest[0]}" in known:
            return Script(module=rest[0], arguments=rest[1:])
        if word != "-m" and plan_file.key_of(word, path) in known:
            return Script(path=word, arguments=rest)
    return None


def scripts_of(path: Path, *, named: bool) -> tuple[str, ...]:
    """The scripts with a plan in the file; a broken one that was merely found stops no run."""
    try:
        return plan_file.scripts(path) if path.exists() else ()
    except RecordError:
        if named:
            raise
        return ()


def framework_version() -> str:
    """PyTorch's; `none` where there is none."""
    with contextlib.suppress(MachineError):
        return installed.framework_version("pytorch")
    return "none"
