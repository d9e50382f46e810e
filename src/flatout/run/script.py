"""Which program did the user name, and is it one that can be run?

In: what stood on the command line. Out: a `Script` with the command that plain Python would run, or an error that
says what is wrong with it.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from flatout.errors import ScriptError, UsageError
from flatout.run.folder import working_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A script or a module, with its arguments.

    Attributes:
        path: The script as it was typed, or None.
        module: The module after `-m`, or None.
        arguments: Everything after it, the script's own.
        python: The interpreter.
        flags: The interpreter's own flags, as flatout itself was started with.
    """

    path: str | None = None
    module: str | None = None
    arguments: tuple[str, ...] = ()
    python: str = field(default_factory=lambda: as_typed(sys.executable))
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What messages and records call it: as it was typed, but for what is idle in it.

        A `..` stays, for it may stand behind a link, where it does not lead back.

        >>> Script(module="package.train").name, Script(path="./src//train.py").name, Script(path="a/../train.py").name
        ('-m package.train', 'src/train.py', 'a/../train.py')
        """
        return f"-m {self.module}" if self.module is not None else str(Path(self.path or ""))

    @property
    def stem(self) -> str:
        """A short name for folders."""
        return self.module.rpartition(".")[2] if self.module is not None else Path(self.path or "script").stem

    @property
    def command(self) -> list[str]:
        """What is executed: the very command of a plain run."""
        what = ["-m", self.module] if self.module is not None else [self.path or ""]
        return [self.python, *self.flags, *what, *self.arguments]

    @property
    def folder(self) -> Path | None:
        """The script's folder; None for a module, which is found from the working folder."""
        return Path(self.path).resolve().parent if self.path is not None else None

    @property
    def typed(self) -> str:
        """The script and its arguments as one would type them again."""
        what = ["-m", self.module] if self.module is not None else [self.path or ""]
        return shlex.join([*what, *self.arguments])


def as_typed(python: str) -> str:
    """The interpreter under the name that a plain run is started by, `python`, where that is the same one.

    A script sees it in `sys.executable`, and starts others by it.
    """
    beside = Path(python).with_name("python")
    try:
        return str(beside) if python and beside.samefile(python) else python
    except OSError:
        return python


def from_words(words: tuple[str, ...], module: str | None) -> Script:
    """The script that the words after a command name.

    Raises:
        UsageError: No script was given.
    """
    flags = interpreter_flags(sys.orig_argv)
    if module is not None:
        return Script(module=module, arguments=words, flags=flags)
    if not words:
        raise UsageError("no script was given", cause="the command needs one", hint="e.g. `flatout tune train.py`")
    return Script(path=words[0], arguments=words[1:], flags=flags)


def interpreter_flags(command: Sequence[str]) -> tuple[str, ...]:
    """The interpreter's own flags in the command that started this process, as they were typed.

    >>> interpreter_flags(["python", "-uW", "error", "-Xdev", "-Om", "flatout", "run", "-u"])
    ('-uW', 'error', '-Xdev', '-O')
    >>> interpreter_flags(["python", "/usr/bin/flatout", "run", "train.py"])
    ()

    Source: "Command line and environment", Python's documentation.
    """
    found: list[str] = []
    words = iter(command[1:])
    for word in words:
        if word == "--check-hash-based-pycs":
            found += [word, next(words, "default")]
        elif not word.startswith("-") or word in ("-", "--"):
            break
        else:
            letters, ends, value = _cluster(word[1:])
            if letters:
                found.append(f"-{letters}")
            if ends:
                break
            if value:
                found.append(next(words, ""))
    return tuple(found)


def _cluster(letters: str) -> tuple[str, bool, bool]:
    """A cluster of flags up to `-m` or `-c`; whether one of these ends the flags; whether the next word is a value."""
    for position, letter in enumerate(letters):
        if letter in "cm":
            return letters[:position], True, False
        if letter in "WX":
            return letters, False, position == len(letters) - 1
    return letters, False, False


def check(script: Script) -> None:
    """Make sure that there is something to start; whether it works is for Python to say.

    Raises:
        UsageError: No such file, a folder without `__main__.py`, or not Python.
    """
    if script.path is None:
        return
    path = Path(script.path)
    try:
        exists = path.exists()
    except OSError:  # a folder on the way that we may not enter
        exists = False
    if not exists:
        raise UsageError(
            f"no such script: `{script.path}`",
            cause="the path does not exist" if path.is_absolute() else f"it is not in `{working_folder()}`",
            hint="flatout's own options stand before the script; check the path",
        )
    if path.is_dir() and not (path / "__main__.py").exists():
        raise UsageError(
            f"`{script.path}` is a folder", cause="it has no `__main__.py`", hint="name the script in it, or use `-m`"
        )


def check_command(command: Sequence[str]) -> None:
    """Make sure that there is a program to start.

    Raises:
        UsageError: No command, or its program is not found or may not be executed.
    """
    if not command:
        raise UsageError("no command was given", cause="`exec` needs one", hint="`flatout exec -- torchrun train.py`")
    if shutil.which(command[0]) is None:
        raise cannot_start(command, "there is no such program, or it may not be executed")


def cannot_start(command: Sequence[str], why: str) -> UsageError:
    """The error for a command that the operating system does not start."""
    name, *rest = command
    hint = "check the command; behind `--` stands what the shell would take"
    if name.endswith(".py"):
        hint = f"`flatout exec -- {shlex.join(['python', name, *rest])}`; `flatout run` takes the script alone"
    return UsageError(f"cannot start `{name}`", cause=why, hint=hint)


def check_source(script: Script) -> None:
    """Read the source before minutes are spent on it.

    Raises:
        UsageError: It is not text, or a shell script.
        ScriptError: Python's own compiler refuses it.
    """
    import tokenize
    import zipfile

    check(script)
    if script.path is None or not Path(script.path).is_file() or Path(script.path).suffix == ".pyc":
        return
    if zipfile.is_zipfile(script.path):
        return
    first = Path(script.path).read_bytes()[:128]
    if first.startswith(b"#!") and b"python" not in first.split(b"\n")[0]:
        raise UsageError(
            f"`{script.path}` is not Python",
            cause=f"its first line is `{first.splitlines()[0].decode(errors='replace')}`",
            hint=f"`flatout exec -- {script.path}` reaches the Python programs that a launcher starts",
        )
    try:
        with tokenize.open(script.path) as file:
            source = file.read()
        compile(source, script.path, "exec", dont_inherit=True)
    except (SyntaxError, UnicodeDecodeError, ValueError) as problem:
        if not isinstance(problem, SyntaxError) or problem.lineno is None or "encoding" in str(problem):
            hint = "name the training script itself"
            raise UsageError(f"`{script.path}` is not Python source", cause=str(problem), hint=hint) from None
        raise ScriptError(
            f"`{script.path}` line {problem.lineno} is not valid Python",
            cause=f"{problem.msg}: `{(problem.text or '').strip()[:60]}`",
            hint=f"`python {script.path}` shows the same; mend it first",
        ) from None
