"""Which script does a launcher's command start, with which framework? In: words of a command. Out: a `Script`."""

from __future__ import annotations

import contextlib
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from flatout.errors import MachineError, RecordError, UsageError
from flatout.machine.installed import Package, version_of
from flatout.records import plan_file
from flatout.run.script import Script, cannot_start

LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "srun", "python", "python3")
"""Programs that start others, also where they are named by their path."""


def launched_by(words: tuple[str, ...], module: str | None = None, num_ranks: int | None = None) -> tuple[str, ...]:
    """The launcher's command, where words name a program that starts a script; empty where they name the script.

    Raises:
        UsageError: Ranks of ours were asked for beside those of a launcher.
    """
    if module is not None or not words:
        return ()
    if shutil.which(words[0]) is None:
        no_script = not words[0].endswith(".py") and not Path(words[0]).exists()
        if no_script and any(_is_python(word) for word in words[1:]):
            raise cannot_start(words, "there is no such program, or it may not be executed")
        return ()
    if not is_launcher(words[0]):
        return ()
    if num_ranks is not None:
        raise UsageError(
            "`--ranks` and a launcher cannot be combined", cause=f"`{words[0]}` starts the ranks itself",
            hint=f"leave out `--ranks`, or `{words[0]}`",
        )  # fmt: skip
    return words


def is_launcher(word: str) -> bool:
    """Whether a command's first word is a program that starts scripts, not a script that may be executed."""
    return shutil.which(word) is not None and (Path(word).name in LAUNCHERS or not Path(word).exists())


def _is_python(word: str) -> bool:
    return word.endswith(".py") and Path(word).is_file()


def name_of(words: Sequence[str]) -> str:
    """What a launcher is called: its program, or the module that Python runs.

    >>> name_of(["/usr/bin/torchrun", "train.py"]), name_of(["python", "-m", "torch.distributed.run", "train.py"])
    ('torchrun', 'torch.distributed.run')
    """
    name = Path(words[0]).name
    return words[2] if name.startswith("python") and list(words[1:2]) == ["-m"] and len(words) > 2 else name


def script_of(words: Sequence[str]) -> Script:
    """The script that a launcher's command starts: the first file that is Python, else the last module.

    Raises:
        UsageError: There is none.
    """
    for place, word in enumerate(words):
        if place and _is_python(word):
            return Script(path=word, arguments=tuple(words[place + 1 :]))
    modules = [place for place, word in enumerate(words[:-1]) if word == "-m"]
    if not modules:
        raise UsageError(
            f"no script in `{shlex.join(words)}`", cause="none of its words is a Python file that is there, or `-m`",
            hint="e.g. `flatout tune -- torchrun --nproc-per-node 2 train.py`; a shell script takes it as an argument",
        )  # fmt: skip
    return Script(module=words[modules[-1] + 1], arguments=tuple(words[modules[-1] + 2 :]))


def called(words: Sequence[str]) -> str:
    """What messages call what a launcher starts: its script, where one can be told, else its first words."""
    try:
        return script_of(words).name
    except UsageError:
        return " ".join(words[:3])


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


def framework_version(package: Package) -> str:
    """What is installed of a framework; `none` where it is not."""
    with contextlib.suppress(MachineError):
        return version_of(package)
    return "none"
