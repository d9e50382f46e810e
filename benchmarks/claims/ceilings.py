"""Are the measured ceilings what independent tools measure on the same machine?

    python benchmarks/claims/ceilings.py --stream stream.c --mkl libmkl_rt.so.3 [--rounds 9]

`stream.c` is McCalpin's (https://www.cs.virginia.edu/stream/FTP/Code/stream.c), compiled here with gcc, arrays as
long as flatout's buffers and on huge pages as those are. OpenBLAS comes with NumPy; MKL, which PyTorch multiplies with,
with `pip install mkl`. `torch.utils.benchmark` measures the same statement as flatout did, on tensors of its own.

What a shared machine has to give changes within seconds (its memory by half on the one this was written on), so all of
them take turns window by window: flatout's own measuring process and each tool, in processes of their own that wait
for their turn, in an order drawn by lot. A round has new processes and so many turns; a tool's rate is the same
quantile of its blocks as a ceiling is of its windows. STREAM takes a second for a turn, of which the best block counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flatout.frameworks import kind
from flatout.machine import calibrate
from flatout.machine.read import read_machine
from flatout.records.ceilings import Machine, Unit, ceiling_of
from measuring import PYTHON, quiet, write

TOOLS = Path(__file__).parent / "ceilings_tools.py"
TURNS = 20
ROUND_S = 900.0
"""No round takes as long."""
BETWEEN_S = 0.03
"""Threads of the last one have gone to sleep by then."""
ALLOWED = 0.05
"""How far the median over rounds may lie from the tool's."""

Process = subprocess.Popen[str]


TOOLS_ENVIRONMENT = {
    # threads that turn round in wait of work would disturb whose turn it is
    "OPENBLAS_THREAD_TIMEOUT": "4",
    "KMP_BLOCKTIME": "0",
    # huge pages, which flatout's own buffers lie on
    "THP_MEM_ALLOC_ENABLE": "1",
    # a process with one convolution gives its output's memory back after each, and pays 5 % to have it cleared again
    "GLIBC_TUNABLES": "glibc.malloc.trim_threshold=4294967296:glibc.malloc.mmap_threshold=4294967296",
}


@contextlib.contextmanager
def waiting(command: list[str], environment: dict[str, str]) -> Iterator[Process]:
    """A tool that measures when a line comes."""
    env = {**os.environ, **environment}
    process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def answer(process: Process, request: str) -> str:
    """The next line after a request."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{request}\n")
    process.stdin.flush()
    return process.stdout.readline()


@dataclass
class Tool:
    """Another way to measure one ceiling."""

    name: str
    ceiling: str
    unit: Unit
    measure: Callable[[], list[float]]
    values: list[float] = field(default_factory=list)

    def turn(self) -> None:
        """A block or two."""
        self.values.extend(self.measure())

    @property
    def value(self) -> float:
        """In the ceiling's unit."""
        return ceiling_of(self.ceiling, self.unit, self.values, source=self.name).value


HUGE_PAGES = """
#include <stdint.h>
#include <sys/mman.h>
extern double a[], b[], c[];
__attribute__((constructor)) static void huge(void) {
    double *arrays[] = {a, b, c};
    for (int n = 0; n < 3; n++) {
        uintptr_t begin = ((uintptr_t)arrays[n] + 4095) & ~(uintptr_t)4095;
        madvise((void *)begin, 8UL * STREAM_ARRAY_SIZE - 4096, MADV_HUGEPAGE);
    }
}
"""
"""Asks for huge pages for STREAM's arrays, before it touches them."""


class Stream:
    """McCalpin's STREAM, compiled for buffers of a size."""

    def __init__(self, source: Path, folder: Path) -> None:
        self.source, self.folder = source, folder

    def rates(self, described: str, threads: int) -> list[float]:
        """Its best rate for the kernel that the ceiling's source names, of one run."""
        size = float(re.search(r"buffers of ([0-9.]+) MiB", described)[1]) * 2**20  # type: ignore[index]
        count = int(size) // 8  # its elements are doubles
        binary = self.folder / f"stream-{count}"
        if not binary.exists():
            options = ["-O3", "-march=native", "-fopenmp", "-mcmodel=medium", "-fno-tree-loop-distribute-patterns"]
            define = [f"-DSTREAM_ARRAY_SIZE={count}", "-DNTIMES=4", "-Dstatic="]  # its arrays are named in huge.c
            (self.folder / "huge.c").write_text(HUGE_PAGES, encoding="utf-8")
            sources = [str(self.source), str(self.folder / "huge.c")]
            subprocess.run(["gcc", *options, *define, *sources, "-o", str(binary)], check=True)
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_PROC_BIND": "true"}
        done = subprocess.run([str(binary)], env=env, check=True, capture_output=True, text=True)
        kernel = "Triad" if "triad" in described else "Copy"
        return [float(re.search(rf"{kernel}:\s+([0-9.]+)", done.stdout)[1]) * 1e6]  # type: ignore[index]


@dataclass(frozen=True, slots=True)
class Given:
    """Tools that have to be brought along; None is left out."""

    stream: Stream | None
    mkl: Path | None


def tools_of(ours: calibrate.Measuring, given: Given, stack: contextlib.ExitStack) -> list[Tool]:
    """The independent tools that can measure each of the ceilings, ready."""
    threads = ours.start["num_threads"]
    environment = {**TOOLS_ENVIRONMENT, "OPENBLAS_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}

    def python(tool: str, probe: dict[str, Any], asked: str) -> Tool:
        command = [PYTHON, str(TOOLS), asked, probe["source"], str(threads)]
        process = stack.enter_context(waiting(command, environment))

        def measure() -> list[float]:
            seconds = json.loads(answer(process, "block"))
            return [s if probe["unit"] == "s" else 1 / s for s in seconds]

        measure()  # the first one prepares all
        return Tool(tool, probe["name"], probe["unit"], measure)

    found = [python("torch.utils.benchmark", probe, probe["name"]) for probe in ours._probes.values()]
    if (probe := ours._probes.get("matmul_float32")) is not None:
        found.append(python("OpenBLAS", probe, "openblas"))
        if given.mkl is not None:
            found.append(python("MKL", probe, str(given.mkl)))
    if (probe := ours._probes.get("memory_copy")) is not None and (stream := given.stream) is not None:
        source = probe["source"]
        found.append(Tool("STREAM", "memory_copy", "B/s", lambda: stream.rates(source, threads)))
    return found


def one_round(machine: Machine, given: Given, lots: random.Random) -> list[dict[str, Any]]:
    """Every ceiling by flatout and by each tool, window by window."""
    quiet(60)
    with contextlib.ExitStack() as stack:
        child = stack.enter_context(calibrate.measuring_process(machine, kind().package, "cpu", limit_s=ROUND_S))
        ours = calibrate.Measuring(child, machine)
        assert ours.begin() and ours.ask("choose")
        tools = tools_of(ours, given, stack)
        jobs: list[Callable[[], object]] = [lambda: ours.ask("round"), *(tool.turn for tool in tools)]
        for _ in range(TURNS):
            for job in lots.sample(jobs, len(jobs)):
                time.sleep(BETWEEN_S)
                job()
    ceilings = {ceiling.name: ceiling for ceiling in ours.found()}
    return [
        {
            "ceiling": tool.ceiling,
            "source": ceilings[tool.ceiling].source,
            "unit": tool.unit,
            "tool": tool.name,
            "flatout": ceilings[tool.ceiling].value,
            "theirs": tool.value,
            "ratio": ceilings[tool.ceiling].value / tool.value,
            "ratio_of_medians": float(np.median(ceilings[tool.ceiling].samples) / np.median(tool.values)),
            "spread_fraction": ceilings[tool.ceiling].spread_fraction,
            "windows": list(ceilings[tool.ceiling].samples),
            "blocks": tool.values,
        }
        for tool in tools
    ]


def summarized(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The median ratio of each ceiling and tool over the rounds, and the middle half of them.

    Of the windows' medians, which compare the two ways to measure, and of the quantile that a ceiling is: where a
    machine is fast for a tenth of the time only, that one hangs on how much of it was met.
    """
    pairs = sorted({(row["ceiling"], row["tool"]) for row in rows})
    found = []
    for name, tool in pairs:
        mine = [row for row in rows if (row["ceiling"], row["tool"]) == (name, tool)]
        line: dict[str, Any] = {"ceiling": name, "tool": tool, "num_rounds": len(mine)}
        for what in ("ratio", "ratio_of_medians"):
            low, middle, high = np.quantile([row[what] for row in mine], [0.25, 0.5, 0.75])
            line[f"median_{what}"] = round(float(middle), 4)
            line[f"quartiles_of_{what}"] = [round(float(low), 4), round(float(high), 4)]
        line["median_spread_fraction"] = round(float(np.median([row["spread_fraction"] for row in mine])), 4)
        for what in ("ratio", "ratio_of_medians"):
            line[f"{what}_within"] = abs(line[f"median_{what}"] - 1) <= ALLOWED
        found.append(line)
    return found


def main() -> None:
    """All rounds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stream", type=Path, help="McCalpin's stream.c; without it STREAM is left out")
    parser.add_argument("--mkl", type=Path, help="libmkl_rt.so.3; without it MKL is left out")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    machine = read_machine()
    with tempfile.TemporaryDirectory(prefix="flatout-ceilings-") as folder:
        given = Given(Stream(arguments.stream, Path(folder)) if arguments.stream else None, arguments.mkl)
        for number in range(arguments.rounds):
            rows += one_round(machine, given, random.Random(number))
            print(f"round {number + 1} of {arguments.rounds}", flush=True)
    found = summarized(rows)
    for line in found:
        print(json.dumps(line), flush=True)
    write("claims_ceilings", {"command": " ".join(sys.argv), "summary": found, "rows": rows})


if __name__ == "__main__":
    main()
