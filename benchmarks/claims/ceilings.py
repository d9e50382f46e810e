"""Are the measured ceilings what independent tools measure on the same machine?

    python benchmarks/claims/ceilings.py --stream stream.c --mkl libmkl_rt.so.3 [--rounds 9]

`stream.c` is McCalpin's (https://www.cs.virginia.edu/stream/FTP/Code/stream.c), compiled here with gcc, arrays as
long as flatout's buffers and on huge pages as those are. OpenBLAS comes with NumPy; MKL, which PyTorch multiplies with,
with `pip install mkl`. `torch.utils.benchmark` measures the same statement as flatout did, on tensors of its own. All
of them by turns, in an order drawn by lot, each in a process of its own: neighbours and clocks change from minute to
minute, so a ceiling is compared with what a tool found in the same round. What memory gives changes within seconds
where it is shared, by half on the machine this was written on; so tools for memory are asked three times a round, as
long as flatout's own windows are spread over. A tool's rate is the same quantile of its blocks as a ceiling is of its
windows; of STREAM's, of the best that each of its runs prints.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flatout.ceilings import Ceiling, Ceilings
from flatout.records import from_json
from measuring import FLATOUT, PYTHON, quiet, write

TOOLS = Path(__file__).parent / "ceilings_tools.py"
QUANTILE = 0.9
"""Of rates, as in `flatout.ceilings.ceiling_of`."""
MEMORY_TURNS = 3
"""How often a tool for memory is asked in a round."""
ALLOWED = 0.05
"""How far the median over rounds may lie from the tool's."""


def refreshed(folder: Path) -> Ceilings:
    """`flatout machine` with nothing cached."""
    env = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache")}
    command = [FLATOUT, "machine", "--refresh", "--json"]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    return from_json(Ceilings, json.loads(done.stdout))


def asked(name: str, ceiling: Ceiling, threads: int) -> list[float]:
    """What each block of a Python tool found, in the ceiling's unit."""
    command = [PYTHON, str(TOOLS), name, ceiling.source, str(threads)]
    env = {
        **os.environ,
        "OPENBLAS_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "THP_MEM_ALLOC_ENABLE": "1",  # huge pages, which flatout's own buffers lie on
    }
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    seconds = json.loads(done.stdout.splitlines()[-1])
    return [s if ceiling.unit == "s" else 1 / s for s in seconds]


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

    def rates(self, ceiling: Ceiling, threads: int) -> list[float]:
        """Its best rate for the kernel that the ceiling names, of one run."""
        size = float(re.search(r"buffers of ([0-9.]+) MiB", ceiling.source)[1]) * 2**20  # type: ignore[index]
        count = int(size) // 8  # its elements are doubles
        binary = self.folder / f"stream-{count}"
        if not binary.exists():
            options = ["-O3", "-march=native", "-fopenmp", "-mcmodel=medium", "-fno-tree-loop-distribute-patterns"]
            define = [f"-DSTREAM_ARRAY_SIZE={count}", "-DNTIMES=20", "-Dstatic="]  # its arrays are named in huge.c
            (self.folder / "huge.c").write_text(HUGE_PAGES, encoding="utf-8")
            sources = [str(self.source), str(self.folder / "huge.c")]
            subprocess.run(["gcc", *options, *define, *sources, "-o", str(binary)], check=True)
        env = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_PROC_BIND": "true"}
        done = subprocess.run([str(binary)], env=env, check=True, capture_output=True, text=True)
        kernel = "Triad" if "triad" in ceiling.source else "Copy"
        return [float(re.search(rf"{kernel}:\s+([0-9.]+)", done.stdout)[1]) * 1e6]  # type: ignore[index]


@dataclass(frozen=True, slots=True)
class Given:
    """Tools that have to be brought along; None is left out."""

    stream: Stream | None
    mkl: Path | None


def tools_of(ceiling: Ceiling, threads: int, given: Given) -> dict[str, Callable[[], list[float]]]:
    """The independent tools that can measure this ceiling."""
    found: dict[str, Callable[[], list[float]]] = {
        "torch.utils.benchmark": lambda: asked(ceiling.name, ceiling, threads),
    }
    if ceiling.name == "matmul_float32":
        found["OpenBLAS"] = lambda: asked("openblas", ceiling, threads)
        if given.mkl is not None:
            found["MKL"] = lambda: asked(str(given.mkl), ceiling, threads)
    if ceiling.name == "memory_copy" and (stream := given.stream) is not None:
        found["STREAM"] = lambda: stream.rates(ceiling, threads)
    return found


def one_round(folder: Path, given: Given, lots: random.Random) -> list[dict[str, Any]]:
    """Every ceiling once by flatout and once by each tool."""
    quiet(60)
    found = refreshed(folder)
    jobs = [
        (ceiling, tool, call)
        for ceiling in found.values
        for tool, call in tools_of(ceiling, found.num_threads, given).items()
        for _ in range(MEMORY_TURNS if ceiling.name.startswith("memory") else 1)
    ]
    lots.shuffle(jobs)
    blocks: dict[tuple[str, str], list[float]] = {}
    for ceiling, tool, call in jobs:
        blocks.setdefault((ceiling.name, tool), []).extend(call())
    rows = []
    for (name, tool), values in blocks.items():
        ceiling = next(c for c in found.values if c.name == name)
        theirs = float(np.quantile(values, 1 - QUANTILE if ceiling.unit == "s" else QUANTILE))
        ratio = ceiling.value / theirs
        rows.append(
            {
                "ceiling": name,
                "source": ceiling.source,
                "unit": ceiling.unit,
                "tool": tool,
                "flatout": ceiling.value,
                "theirs": theirs,
                "ratio": ratio,
                "spread_fraction": ceiling.spread_fraction,
                "remarks": list(found.remarks),
            }
        )
    return rows


def summarized(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The median ratio of each ceiling and tool over the rounds, and the middle half of them."""
    pairs = sorted({(row["ceiling"], row["tool"]) for row in rows})
    found = []
    for name, tool in pairs:
        mine = [row for row in rows if (row["ceiling"], row["tool"]) == (name, tool)]
        low, middle, high = np.quantile([row["ratio"] for row in mine], [0.25, 0.5, 0.75])
        found.append(
            {
                "ceiling": name,
                "tool": tool,
                "num_rounds": len(mine),
                "median_ratio": round(float(middle), 4),
                "quartiles": [round(float(low), 4), round(float(high), 4)],
                "median_spread_fraction": round(float(np.median([row["spread_fraction"] for row in mine])), 4),
                "within": abs(float(middle) - 1) <= ALLOWED,
            }
        )
    return found


def main() -> None:
    """All rounds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--stream", type=Path, help="McCalpin's stream.c; without it STREAM is left out")
    parser.add_argument("--mkl", type=Path, help="libmkl_rt.so.3; without it MKL is left out")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="flatout-ceilings-") as folder:
        given = Given(Stream(arguments.stream, Path(folder)) if arguments.stream else None, arguments.mkl)
        for number in range(arguments.rounds):
            rows += one_round(Path(folder), given, random.Random(number))
            print(f"round {number + 1} of {arguments.rounds}", flush=True)
    found = summarized(rows)
    for line in found:
        print(json.dumps(line), flush=True)
    write("claims_ceilings", {"command": " ".join(sys.argv), "summary": found, "rows": rows})


if __name__ == "__main__":
    main()
