"""What do all benchmarks share? Whole commands in turn, raw samples kept, ratios with their interval.

Every benchmark writes `results/<what>_<cpu>_<yyyymm>.json` with hardware, versions, the commands and all samples.
"""

from __future__ import annotations

import datetime
import functools
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout import api
from flatout.judge import stats
from flatout.machine import foreign_cpu
from flatout.machine.read import read_machine
from flatout.records.as_json import to_json
from flatout.records.ceilings import Machine

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
RESULTS = HERE / "results"
PYTHON = sys.executable
FLATOUT = str(Path(sys.executable).parent / "flatout")
SHARED = Path(os.environ.get("FLATOUT_DATA", ROOT.parent / "shared" / "data"))
BUSY = 0.10


@dataclass
class Timed:
    """One run of a whole command."""

    wall_s: float
    exit_code: int
    foreign_fraction: float | None
    peak_bytes: int
    output: str = field(repr=False, default="")


def timed(command: Sequence[str], folder: Path, env: dict[str, str] | None = None) -> Timed:
    """Run a command to its end; its wall time, exit code, and how much CPU others used meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    before = foreign_cpu.take(None)
    begun_s = time.perf_counter()
    process = subprocess.Popen(
        list(command), cwd=folder, env={**os.environ, **(env or {})}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    output, _ = process.communicate()
    wall_s = time.perf_counter() - begun_s
    after = foreign_cpu.take(None)
    import resource

    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return Timed(wall_s, process.returncode, foreign_cpu.fraction(before, after), peak, output[-40_000:])


def quiet(limit_s: float = 120.0) -> bool:
    """Wait until others leave the machine alone for two seconds."""
    deadline = time.perf_counter() + limit_s
    while time.perf_counter() < deadline:
        before = foreign_cpu.take(os.getsid(0))
        time.sleep(2.0)
        fraction = foreign_cpu.fraction(before, foreign_cpu.take(os.getsid(0)))
        if fraction is None or fraction < 0.05:
            return True
    return False


def ratio(baseline_s: Sequence[float], candidate_s: Sequence[float]) -> dict[str, Any]:
    """The paired ratio baseline / candidate with its intervals."""
    return to_json(stats.compare(baseline_s, candidate_s))


def named(machine: Machine) -> str:
    """The processor in the names of results; two that sell under one name may differ in what they compute natively."""
    cpu = re.sub(r"[^a-z0-9]+", "-", machine.cpu.lower()).strip("-")
    if not machine.bfloat16_in_hardware():
        return f"{cpu}-no-bf16"
    return cpu if bfloat16_pays() else f"{cpu}-slow-bf16"


@functools.cache
def bfloat16_pays() -> bool:
    """Whether a product in bfloat16 is faster here; processors whose tiles are hidden have it, and slower."""
    if not read_machine().bfloat16_in_hardware():
        return False
    float32, bfloat16 = (api.machine().peak(dtype) for dtype in ("float32", "bfloat16"))
    return float32 is not None and bfloat16 is not None and bfloat16.value > float32.value


def file_for(name: str) -> Path:
    """Where a result of this machine and month lies."""
    return RESULTS / f"{name}_{named(read_machine())}_{datetime.datetime.now(datetime.UTC):%Y%m}.json"


def write(name: str, value: dict[str, Any]) -> Path:
    """Write one result with what is needed to read it in a year."""
    machine = read_machine()
    now = datetime.datetime.now(datetime.UTC)
    RESULTS.mkdir(exist_ok=True)
    path = file_for(name)
    versions = {"python": platform.python_version(), "torch": _version("torch"), "flatout": _version("flatout")}
    head = {
        "what": name,
        "date": now.isoformat(timespec="seconds"),
        "commit": _commit(),
        "machine": to_json(machine),
        "versions": versions,
    }
    rows = [f" {json.dumps(name)}: {json.dumps(part)}" for name, part in {**head, **value}.items()]  # a line each
    text = "{\n" + ",\n".join(rows) + "\n}\n"
    for place, said in ((SHARED, "$FLATOUT_DATA"), (ROOT, "."), (Path(tempfile.gettempdir()), "$TMPDIR")):
        text = text.replace(str(place), said)  # where things lie on one machine is nobody's business
    draft = path.with_suffix(".draft")  # a benchmark that is stopped keeps what it had
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)
    print(f"wrote {path.relative_to(ROOT)}", flush=True)
    return path


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()
