"""Fill the places in the documentation that show real output, by running what stands above them.

python scripts/record_outputs.py [NAME ...]     # all, or e.g. `machine-output tune-output`

Each place is a pair of marks, `<!-- NAME:begin -->` and `<!-- NAME:end -->`. The commands run in one new folder, in the
order of the tutorial, so the machine should have nothing else to do meanwhile.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from flatout.machine.read import read_machine

ROOT = Path(__file__).resolve().parent.parent
TUTORIAL = ROOT / "docs" / "tutorials" / "lenet.md"
BIN = Path(sys.executable).parent
EPOCHS = ("--epochs", "60")
PROVED = ("--metric", "accuracy: ([0-9.]+)", "--margin", "0.01")


def main() -> None:
    """Fill what the command line names, or everything."""
    wanted = sys.argv[1:] or list(PLACES)
    folder = Path(tempfile.mkdtemp(prefix="flatout-tutorial-"))
    shutil.copy(ROOT / "examples" / "lenet.py", folder)
    for name in PLACES:
        if name in wanted:
            page, make = PLACES[name]
            fill(page, name, make(folder))
    shutil.rmtree(folder)


def said(folder: Path, *command: str, stderr: bool = False) -> str:
    """What a command prints; its progress, which is on stderr, only where it is asked for."""
    environment = {**os.environ, "COLUMNS": "80", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}
    print("$", *command, flush=True)
    done = subprocess.run(
        command, cwd=folder, env=environment, text=True, check=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT if stderr else None,
    )  # fmt: skip
    return done.stdout.rstrip()


def block(*texts: str) -> str:
    """Output as the page shows it, with what it was made on."""
    machine = read_machine()
    versions = f"PyTorch {version('torch')}, Python {platform.python_version()}, flatout {version('flatout')}"
    when = datetime.date.today().isoformat()
    text = "\n".join(re.sub(r"[^\s`]*/(?=\.flatout/|lenet\.py|bin/flatout|data/MNIST)", "", t) for t in texts)
    return f"```text\n{text}\n```\n\n*{machine.num_cores} cores ({machine.cpu}), {versions}, {when}.*"


def fill(page: Path, name: str, content: str) -> None:
    """Put the content between the marks of that name."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise SystemExit(f"{page}: no place named {name}")
    page.write_text(f"{before}{begin}\n{content}\n{end}{after}", encoding="utf-8")


def _plainly(*words: str, stderr: bool = False) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        return block(said(folder, *words, stderr=stderr))

    return make


def _run(folder: Path) -> str:
    lines = said(folder, "flatout", "run", "lenet.py", *EPOCHS, stderr=True).splitlines()
    ours = [line for line in lines if line.startswith("flatout: ")]
    script = [line for line in lines if not line.startswith("flatout: ")]
    return block("\n".join([ours[0], "...", *script[-3:], ours[-1]]))


PROGRESS = re.compile(
    r"flatout: (starting|this machine|measuring|warming|plain against|where|what|counting|trying|screening|comparing"
    r"|others|done|.* beside plain)"
    r"|  \S.*\d\.\d\dx  (faster|slower|no difference|inconclusive|disagrees|failed|screened)|  \S.*  failed"
)
"""What `tune` says while it is at it."""


def _demo(folder: Path) -> str:
    shown = []
    said(ROOT, "make", ".venv/installed", stderr=True)  # what pip says is not the demo's
    for line in said(ROOT, "make", "--no-print-directory", "demo", stderr=True).splitlines():
        line = re.sub(r"^\+ \S*/flatout", "$ flatout", line)
        if not PROGRESS.match(line):
            shown.append(line)
    epochs = [n for n, line in enumerate(shown) if line.startswith("epoch ")]
    return block("\n".join([*shown[: epochs[0]], "...", *shown[epochs[-1] :]]))


PLACES: dict[str, tuple[Path, Callable[[Path], str]]] = {
    "why-output": (TUTORIAL, _plainly("flatout", "why", "lenet.py", *EPOCHS)),
    "tune-output": (TUTORIAL, _plainly("flatout", "tune", "lenet.py", *EPOCHS)),
    "run-output": (TUTORIAL, _run),
    "prove-output": (TUTORIAL, _plainly("flatout", "prove", *PROVED, "lenet.py", *EPOCHS)),
    "demo-output": (ROOT / "README.md", _demo),
}

if __name__ == "__main__":
    main()
