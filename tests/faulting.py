"""What the tests of faults share: runs as a user types them, their folder, and a look at what is left behind."""

import contextlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import warm
from flatout.machine.read import read_machine
from flatout.records import plan_file
from flatout.records.plan import PLAN_FORMAT, Plan
from flatout.run import isolation
from flatout.run.script import as_typed

SCRIPTS = Path(__file__).parent / "scripts"
PYTHON = as_typed(sys.executable)
FLATOUT = [PYTHON, "-m", "flatout"]
REASON = isolation.available()
CEILINGS = Path(tempfile.gettempdir()) / f"flatout-test-ceilings-{os.getuid()}"
"""Ceilings are measured once for all tests; they are no part of what is tested."""
HERE = [] if REASON is None else ["--allow-writes"]


def environment(**changes):
    found = {**os.environ, "OMP_NUM_THREADS": "1", **changes}
    found.pop("COLUMNS", None)
    return {name: value for name, value in found.items() if value is not None}


def flatout(*words, limit_s=120, prefix=(), **changes):
    """A command of ours to its end."""
    return warm.run(
        [*prefix, *FLATOUT, *words],
        capture_output=True,
        text=True,
        timeout=limit_s,
        env=environment(**changes),
        stdin=subprocess.DEVNULL,
        check=False,
    )


def plain(*words, **changes):
    """The script under plain Python."""
    return warm.run(
        [PYTHON, *words], capture_output=True, text=True, timeout=60, env=environment(**changes), check=False
    )


def parts(text):
    """The three parts of an error; empty where it is none."""
    found = {line.partition(":")[0]: line.partition(":")[2].strip() for line in text.splitlines()}
    return {name: found[name] for name in ("error", "cause", "hint") if name in found}


def last_lines(done):
    """What was said at the end of a run."""
    return [line.removeprefix("flatout:").strip() for line in done.stderr.splitlines() if line.startswith("flatout:")]


def write_plan(script, *levers, path=Path("flatout.toml"), **changes):
    """A plan for this machine, as if `tune` had made it."""
    import torch

    settings: dict[str, dict[str, int | str]] = {}
    for name, _, value in (word.partition("=") for word in levers):
        settings[name] = {} if not value else {"num": int(value)} if value.isdigit() else {"division": value}
    plan = Plan(
        **{
            "format": PLAN_FORMAT, "flatout": "0.1.0", "script": script, "arguments": (), "levers": settings,
            "ratio": 1.2, "ratio_low": 1.1, "ratio_high": 1.3, "num_pairs": 8, "agreement": "", "class_": "precision",
            "baseline_steps_per_s": 100.0, "tuned_steps_per_s": 120.0, "machine": read_machine(),
            "python": platform.python_version(), "framework": "pytorch",
            "framework_version": str(torch.__version__), "created": "2026-01-01T00:00:00+00:00", **changes,
        }
    )  # fmt: skip
    plan_file.write(plan, path)


def processes_of(folder):
    """The command lines of living processes that work in a folder, or in whose command line it stands."""
    found, folder = [], str(folder)
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            place = os.readlink(entry / "cwd")
            is_there = folder in words or place == folder or place.startswith(folder + "/")
            if is_there and state not in "ZX" and int(entry.name) != os.getpid():
                found.append(words)
    return found


def left_behind(folder):
    """Processes, pipes, claims, scratch folders, sessions and drafts that nobody needs any more."""
    deadline = time.monotonic() + 10
    while (found := processes_of(folder)) and time.monotonic() < deadline:
        time.sleep(0.05)
    names = [p.name for p in Path(folder).rglob("*") if p.is_fifo()]
    names += [p.name for p in Path(folder).rglob("*") if p.name.startswith(("claim-", "scratch-", "."))]
    return found + [name for name in names if name not in (".flatout", ".gitignore")]


def copied(name, folder):
    """A script of the tests, in a folder of its own."""
    return Path(shutil.copy(SCRIPTS / name, folder / name))
