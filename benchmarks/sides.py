"""What are the three sides of a script: plain, an expert's edit, and flatout? Folders and commands for one sitting.

In: a case and a checkout of pytorch/examples. Out: a `Side` for each, in throwaway copies of the script's folder.

An expert's edit is one file under `experts/`: NAME.patch, or NAME.cpu-bf16.patch and NAME.cpu-float32.patch where what
pays depends on whether products in bfloat16 are fast. It begins with why an expert would do that; a line `Options: ...`
adds options of the script's own, and what follows is a unified diff of at most ten lines against the unmodified script.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from measuring import FLATOUT, HERE, PYTHON, ROOT, bfloat16_pays
from speedup_cases import COMMIT, Case

EXPERTS = HERE / "experts"
OPERATORS = HERE / "torchvision_operators"
OPTIONS = "Options: "
MOST_LINES = 10
SIDES = ("plain", "expert", "flatout")


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """What an expert changes.

    Attributes:
        why: In words.
        options: Added to the command.
        diff: A unified diff; empty where options do.
        source: Its file's name.
    """

    why: str
    options: tuple[str, ...]
    diff: str
    source: str

    @property
    def num_lines(self) -> int:
        """Lines that are new or changed, and lines taken away without another in their place."""
        num, added, removed = 0, 0, 0
        for line in [*self.diff.splitlines(), " "]:
            if line.startswith(("+++", "---")):
                continue
            if line[:1] in ("+", "-"):
                added, removed = added + (line[0] == "+"), removed + (line[0] == "-")
            else:
                num, added, removed = num + max(added, removed), 0, 0
        return num


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One way to run the script."""

    folder: Path
    command: tuple[str, ...]


def variant() -> str:
    """Which of an expert's edits is for this machine."""
    return "cpu-bf16" if bfloat16_pays() else "cpu-float32"


def edit_for(name: str, machine: str) -> Edit:
    """The expert's edit of a script, for `cpu-bf16` or `cpu-float32`."""
    path = EXPERTS / f"{name}.{machine}.patch"
    if not path.exists():
        path = EXPERTS / f"{name}.patch"
    head, mark, diff = path.read_text(encoding="utf-8").partition("--- a/")
    lines = [line.removeprefix(OPTIONS) for line in head.splitlines() if line.startswith(OPTIONS)]
    why = " ".join(line for line in head.splitlines() if line and not line.startswith(OPTIONS))
    return Edit(why=why, options=tuple(" ".join(lines).split()), diff=mark + diff, source=path.name)


def prepared(case: Case, examples: Path | None, place: Path) -> dict[str, Side]:
    """Copy the script's folder twice, change one copy as the expert does, and say what is typed where."""
    script = copied(case, examples, place)
    shutil.copytree(script, place / "expert")
    edit = edit_for(case.name, variant())
    if edit.diff:
        change(place / "expert", edit.diff)
    words = case.words
    return {
        "plain": Side(folder=script, command=(PYTHON, *words)),
        "expert": Side(folder=place / "expert", command=(PYTHON, *words, *edit.options)),
        "flatout": Side(folder=script, command=(FLATOUT, "run", *words)),
    }


def copied(case: Case, examples: Path | None, place: Path) -> Path:
    """A copy of the script's folder, with its data made, beside what pytorch/examples' scripts call `../data`."""
    source = ROOT / "examples" if not case.folder else checked(examples) / case.folder
    if case.folder:
        (place / "data").symlink_to(checked(examples) / "data")
    shutil.copytree(source, place / "script", ignore=shutil.ignore_patterns(".flatout", "flatout.toml"))
    if case.prepare:
        subprocess.run([PYTHON, *case.prepare], cwd=place / "script", env=environment(case), check=True)
    return place / "script"


def checked(examples: Path | None) -> Path:
    """The checkout, at the commit that the edits and figures are for."""
    if examples is None:
        raise SystemExit("error: this script is pytorch/examples'\nhint: `--examples PATH/TO/a/checkout`")
    words = ["git", "-C", str(examples), "rev-parse", "HEAD"]
    found = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    if found != COMMIT:
        raise SystemExit(f"error: `{examples}` is at {found or 'no commit'}\nhint: `git checkout {COMMIT}`")
    return examples.resolve()


def change(folder: Path, diff: str) -> None:
    """Apply a diff to a copy, wherever that lies."""
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(
        ["git", "apply", "-p1", "--unidiff-zero", "-"], cwd=folder, env=env, input=diff, text=True, check=True
    )


def environment(case: Case) -> dict[str, str]:
    """The same for all sides: what the script needs, and torchvision's operators where its own do not load."""
    needed = dict(case.environment)
    if case.folder and _torchvision_needs_operators():
        own = os.environ.get("PYTHONPATH")
        needed["PYTHONPATH"] = os.pathsep.join([str(OPERATORS), *([own] if own else [])])
    return {**os.environ, **needed}


@cache
def _torchvision_needs_operators() -> bool:
    tried = subprocess.run([PYTHON, "-c", "import torchvision"], capture_output=True, text=True, check=False)
    return "operator torchvision::" in tried.stderr


def typed(command: tuple[str, ...], env: Mapping[str, str]) -> str:
    """A command as somebody would type it."""
    return " ".join([*(f"{key}={value}" for key, value in env.items()), Path(command[0]).name, *command[1:]])
