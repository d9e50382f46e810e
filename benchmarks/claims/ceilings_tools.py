"""One ceiling by a tool that is not flatout: `ceilings_tools.py NAME "SOURCE" THREADS`.

NAME and SOURCE are a ceiling's, which says on what shape it was measured; the same is measured here by
`torch.utils.benchmark`, a product of matrices also by OpenBLAS through NumPy (NAME `openblas`) and by MKL's C interface
(NAME is the path of `libmkl_rt.so.3`). For each line on stdin two blocks are measured, and the seconds per unit of work
(an operation, a byte, a call) of each printed, as JSON.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
import time
from collections.abc import Callable

import numpy as np

NUM_BLOCKS = 2
BLOCK_S = 0.05

Blocks = Callable[[], list[float]]
"""Seconds per unit of work of so many blocks."""


def timer(name: str, source: str, threads: int) -> Blocks:
    """By `torch.utils.benchmark.Timer`."""
    import torch
    from torch.utils.benchmark import Timer

    statement, around, work = stated(name, source)
    measuring = Timer(statement, globals={"torch": torch, **around}, num_threads=threads)
    number = max(1, round(BLOCK_S / measuring.blocked_autorange(min_run_time=0.5).median))
    return lambda: [measuring.timeit(number).mean / work for _ in range(NUM_BLOCKS)]


def stated(name: str, source: str) -> tuple[str, dict[str, object], float]:
    """The statement of a ceiling, its tensors, and the work of one call."""
    import torch

    dtype = torch.bfloat16 if name.endswith("bfloat16") else torch.float32
    numbers = [int(n) for n in re.findall(r"\d+", source)]
    if name.startswith("matmul"):
        side = numbers[0]
        tensors = {t: torch.randn(side, side).to(dtype) for t in "abc"}
        return "torch.mm(a, b, out=c)", {**tensors}, 2.0 * side**3
    if name.startswith("conv"):
        kernel, _, batch, channels, side, _ = numbers[:6]
        layout = torch.channels_last if "channels_last" in source else torch.contiguous_format
        images = torch.randn(batch, channels, side, side).to(dtype).contiguous(memory_format=layout)
        weight = torch.randn(channels, channels, kernel, kernel).to(dtype).contiguous(memory_format=layout)
        work = 2.0 * kernel**2 * channels**2 * side**2 * batch
        statement = f"torch.nn.functional.conv2d(x, w, padding={kernel // 2})"
        return statement, {"x": images, "w": weight}, work
    if name == "kernel_launch":
        return "torch.add(a, b)", {"a": torch.ones(1), "b": torch.ones(1)}, 1.0
    size = float(re.search(r"buffers? of ([0-9.]+) MiB", source)[1]) * 2**20  # type: ignore[index]
    operands = {t: torch.ones(int(size) // 4) for t in "abc"}
    if "triad" in source:
        return "torch.add(a, b, alpha=2.0, out=c)", {**operands}, 3 * size
    if "copy" in source:
        return "c.copy_(a)", {**operands}, 2 * size
    return ("c.relu_()", {**operands}, 2 * size) if "relu_" in source else ("c.mul_(a)", {**operands}, 3 * size)


def openblas(source: str) -> Blocks:
    """By `numpy.matmul`; the number of threads comes from the environment."""
    left, right, result = matrices(source)

    def call() -> None:
        np.matmul(left, right, out=result)

    return lambda: [block_s / (2.0 * len(left) ** 3) for block_s in blocks(call)]


def mkl(library: str, source: str) -> Blocks:
    """By `cblas_sgemm` of the library that PyTorch multiplies with."""
    left, right, result = matrices(source)
    multiply = ctypes.CDLL(library).cblas_sgemm
    by_rows, as_it_is = 101, 111
    one, zero, side = ctypes.c_float(1), ctypes.c_float(0), len(left)

    def call() -> None:
        a, b, c = (ctypes.c_void_p(array.ctypes.data) for array in (left, right, result))
        multiply(by_rows, as_it_is, as_it_is, side, side, side, one, a, side, b, side, zero, c, side)

    call()
    assert np.allclose(result, left @ right, atol=1e-2)
    return lambda: [block_s / (2.0 * side**3) for block_s in blocks(call)]


def matrices(source: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Two square ones to be multiplied, and one for the result."""
    side = int(re.findall(r"\d+", source)[0])
    generator = np.random.default_rng(0)
    left, right = (generator.standard_normal((side, side), dtype=np.float32) for _ in range(2))
    return left, right, np.empty_like(left)


def blocks(call: Callable[[], None]) -> list[float]:
    """Mean seconds of a call in each block, after a call to warm up, as the Timer makes it."""
    found = []
    call()
    for _ in range(NUM_BLOCKS):
        begun, num = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - begun) < BLOCK_S or num == 0:
            call()
            num += 1
        found.append(elapsed / num)
    return found


def ready(name: str, source: str, threads: int) -> Blocks:
    """The tool of that name, prepared."""
    if name == "openblas":
        return openblas(source)
    return mkl(name, source) if ".so" in name else timer(name, source, threads)


if __name__ == "__main__":
    measured = ready(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    for _ in sys.stdin:
        print(json.dumps(measured()), flush=True)
