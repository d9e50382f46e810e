"""How fast is this device under PyTorch at matrix products, convolutions, moving bytes, and at starting an operation?

In: a command line (`python -m flatout.frameworks.pytorch.observe.calibration OUTPUT.json`, or this file by its path
with any interpreter that has torch: it needs nothing of flatout). Out: JSON lines, each written when it is known, so
that a process killed at any moment leaves what it has measured:

    {"kind": "start", "framework_version": ..., "device": ..., "num_threads": ...}
    {"kind": "probe", "name": ..., "unit": ..., "source": ...}
    {"kind": "sample", "name": ..., "value": ...}
    {"kind": "end", "of": "choose" or "round"}

Two kinds of work: `choose` doubles the size of every probe until its rate stops rising; a `round` runs every probe for
a few short windows. The windows of one probe so lie seconds apart, among those of all others, and a disturbance or a
change of clock frequency hits some of each and not all of one. With `--on-request` each is done when its name comes
as a line on stdin, so that the reader, `flatout.machine.calibrate`, can wait for a quiet machine; it also judges what a
sample is worth.

Not `torch.utils.benchmark.Timer`: it measures one statement to the end before the next, and by the host's clock. Here
windows of many probes alternate, are timed on a device by its own events, and are written as they come. The set-up is
the Timer's: a fixed number of threads, warm-up first, tensors made outside the timed part.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO

import torch

LONGEST_CALL_S = 0.25
"""No size is tried whose single call is predicted to take longer: emulated bfloat16 can be 500 times slower."""

WORTHWHILE_GAIN = 1.02
"""A doubled size must raise the rate by this factor to count as a rise."""

NUM_OPERATIONS = 200
"""Tiny operations in one call of `kernel_launch`, so that the loop around calls costs nothing."""

WINDOWS_PER_ROUND = 2
DEFAULT_ROUNDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One thing to measure at one size.

    Attributes:
        name: Name of the ceiling.
        unit: `FLOP/s`, `B/s` or `s`.
        work: FLOPs, bytes, or (`s`) operations in one call.
        source: One sentence: what is measured, on what shape.
        call: Does the work once; on a GPU it only enqueues it.
        tf32: Whether float32 products may be rounded to TF32.
        call_s: Seconds of one call, known when the size has been tried.
    """

    name: str
    unit: str
    work: float
    source: str
    call: Callable[[], object]
    tf32: bool = False
    call_s: float = 0.0

    def value(self, seconds_per_call: float) -> float:
        """The sample in `unit`."""
        return seconds_per_call / self.work if self.unit == "s" else self.work / seconds_per_call


Candidate = tuple[float, Callable[[], Probe]]
"""The work of one call, and what makes the probe: tensors are made only for sizes that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopwatch:
    """Times calls on one device, waiting for it once per window and never per call."""

    device: torch.device
    window_s: float

    def seconds_per_call(self, probe: Probe, window_s: float) -> float:
        """Mean seconds of calls in a row that fill `window_s`; a single call when that is 0."""
        allow_tf32(probe.tf32)
        return self._on_device(probe, window_s) if self.device.type == "cuda" else self._on_host(probe, window_s)

    def _on_host(self, probe: Probe, window_s: float) -> float:
        """Ends by the clock, not after a planned number of calls: on a busy machine that could take minutes."""
        num_calls, elapsed_s, started_s = 0, 0.0, time.perf_counter()
        while num_calls == 0 or elapsed_s < window_s:
            probe.call()
            num_calls += 1
            elapsed_s = time.perf_counter() - started_s
        return elapsed_s / num_calls

    def _on_device(self, probe: Probe, window_s: float) -> float:
        """Calls only enqueue here, so their number is planned; the device's own events time them."""
        num_calls = max(1, round(window_s / probe.call_s)) if probe.call_s > 0 else 1
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        start.record()
        for _ in range(num_calls):
            probe.call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / num_calls


def allow_tf32(allowed: bool) -> None:
    """Let CUDA round float32 products to TF32, or not; cuBLAS and cuDNN have switches of their own."""
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


# -- choosing sizes ------------------------------------------------------------------------------------------------


def grow(candidates: Sequence[Candidate], stopwatch: Stopwatch) -> Probe | None:
    """The fastest of candidates that grow; ends when two in a row did not raise the rate.

    Of sizes that are equally fast the largest wins: its threads meet less often, so that it is the least disturbed.
    None when the device refuses even the first: no kernel for the dtype, or no memory.
    """
    tried: list[Probe] = []
    best_rate = 0.0
    num_without_rise = 0
    for work, make in candidates:
        if tried and tried[-1].call_s * work / tried[-1].work > LONGEST_CALL_S:
            break
        try:
            probe = make()
            probe = replace(probe, call_s=_call_s(probe, stopwatch))
        except RuntimeError:  # what torch raises for a missing kernel, and (as a subclass) for missing memory
            break
        tried.append(probe)
        num_without_rise = 0 if _rate(probe) > best_rate * WORTHWHILE_GAIN else num_without_rise + 1
        best_rate = max(best_rate, _rate(probe))
        if num_without_rise == 2:
            break
    return next((p for p in reversed(tried) if _rate(p) * WORTHWHILE_GAIN >= best_rate), None)


def _rate(probe: Probe) -> float:
    return probe.work / probe.call_s


def _call_s(probe: Probe, stopwatch: Stopwatch) -> float:
    """Seconds of a call after warm-up: the first one chooses algorithms and fills their caches."""
    first_s = stopwatch.seconds_per_call(probe, 0.0)
    if first_s > 4 * LONGEST_CALL_S:
        return first_s
    warm = replace(probe, call_s=stopwatch.seconds_per_call(probe, 0.0))
    return min(stopwatch.seconds_per_call(warm, 0.2 * stopwatch.window_s) for _ in range(3))


def best_of(alternatives: Sequence[Sequence[Candidate]], stopwatch: Stopwatch) -> Probe | None:
    """The fastest over several ways of doing the same, e.g. two memory layouts; None when none of them works."""
    found = [probe for probe in (grow(candidates, stopwatch) for candidates in alternatives) if probe is not None]
    return max(found, key=_rate, default=None)


# -- probes --------------------------------------------------------------------------------------------------------


def matmuls(device: torch.device, dtype: torch.dtype, name: str) -> list[Candidate]:
    """Square matrix products; one counts as 2 n^3 operations, a multiplication and an addition each.

    Random values, because some devices draw less power and clock higher on constant ones.
    """

    def make(n: int) -> Probe:
        left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
        result = torch.empty_like(left)
        return Probe(
            name=f"matmul_{name}",
            unit="FLOP/s",
            work=2.0 * n**3,
            source=f"`torch.mm`, {n} x {n} times {n} x {n}",
            call=lambda: torch.mm(left, right, out=result),
            tf32=name == "tf32",
        )

    sizes = (1024, 2048, 4096, 8192, 16384) if device.type == "cuda" else (512, 1024, 2048, 4096)
    return [(2.0 * n**3, lambda n=n: make(n)) for n in sizes]  # type: ignore[misc]


CONVOLUTIONS = ((256, 14, 3), (64, 28, 5))
"""Channels, side and kernel: a ResNet's third stage, and weights that stay in the cache nearest to a core."""


def convolutions(
    device: torch.device,
    dtype: torch.dtype,
    name: str,
    layout: torch.memory_format,
    shape: tuple[int, int, int] = CONVOLUTIONS[0],
) -> list[Candidate]:
    """Convolutions of one shape over growing batches; counted directly, 2 K^2 C^2 per output pixel.

    Counted like that, an algorithm that saves multiplications (Winograd) may show more than the hardware's peak; a
    model's own convolutions are counted the same way.
    """
    channels, side, kernel = shape

    def make(batch: int) -> Probe:
        images = torch.randn(batch, channels, side, side, device=device).to(dtype).contiguous(memory_format=layout)
        weight = torch.randn(channels, channels, kernel, kernel, device=device).to(dtype)
        weight = weight.contiguous(memory_format=layout)
        words = "channels_last" if layout is torch.channels_last else "contiguous"
        where = f"{batch} x {channels} x {side} x {side}, {words}"
        return Probe(
            name=f"conv_{name}",
            unit="FLOP/s",
            work=work(batch),
            source=f"{kernel} x {kernel} convolution forward, {where}",
            call=lambda: torch.nn.functional.conv2d(images, weight, padding=kernel // 2),
            tf32=name == "tf32",
        )

    def work(batch: int) -> float:
        return 2.0 * kernel**2 * channels**2 * side**2 * batch

    batches = (32, 64, 128, 256) if device.type == "cuda" else (4, 8, 16, 32)
    return [(work(batch), lambda batch=batch: make(batch)) for batch in batches]  # type: ignore[misc]


Share = Callable[[int], tuple[torch.Tensor, ...]]
"""Gives so many equal tensors."""


def shared_memory(device: torch.device, total_bytes: int) -> Share:
    """One memory for all probes that need much: the first touch of a page can cost more than all that is measured."""
    kept: list[torch.Tensor] = []

    def share(num: int) -> tuple[torch.Tensor, ...]:
        if not kept:
            kept.append(torch.ones(total_bytes // 4, device=device))
        count = len(kept[0]) // num
        return tuple(kept[0][number * count : (number + 1) * count] for number in range(num))

    return share


def memory_copies(total_bytes: int, share: Share) -> list[list[Candidate]]:
    """STREAM's copy and triad (a = b + 2 c): bytes read and written as the program asks for them.

    Lines that a cache reads only to overwrite them are not counted, as in STREAM (McCalpin 1995).
    """

    def make(num_streams: int) -> Probe:
        target, first, *rest = share(num_streams)
        what = "triad" if rest else "copy"
        return Probe(
            name="memory_copy",
            unit="B/s",
            work=4.0 * len(target) * num_streams,
            source=f"{what} over {_buffers(num_streams, target)}, reads and writes counted",
            call=(lambda: torch.add(first, rest[0], alpha=2.0, out=target)) if rest else (lambda: target.copy_(first)),
        )

    return [[(float(total_bytes), lambda n=n: make(n))] for n in (2, 3)]  # type: ignore[misc]


def in_place(name: str, sizes: Sequence[tuple[int, Share]]) -> list[list[Candidate]]:
    """Overwriting what was read, over growing memory: with one operand (`relu_`) and with two (`mul_`).

    More of a program's bytes pass than in a copy, because no line is fetched only to be overwritten; so optimizers and
    activations in place would exceed what a copy reaches.
    """

    def make(share: Share, num_operands: int) -> Probe:
        target, *rest = share(num_operands)
        what = "mul_" if rest else "relu_"
        return Probe(
            name=name,
            unit="B/s",
            work=4.0 * len(target) * (num_operands + 1),
            source=f"`{what}` over {_buffers(num_operands, target)}, reads and writes counted",
            call=(lambda: target.mul_(rest[0])) if rest else (lambda: target.relu_()),
        )

    def work(size: int, num: int) -> float:
        return float(size // num * (num + 1))

    return [[(work(size, n), lambda share=share, n=n: make(share, n)) for size, share in sizes] for n in (1, 2)]  # type: ignore[misc]


def _buffers(num: int, one: torch.Tensor) -> str:
    size = f"{4 * len(one) / 2**20:g} MiB"
    return f"a buffer of {size}" if num == 1 else f"{num} buffers of {size}"


def cache_sizes() -> list[int]:
    """From 256 KiB a thread, less than the caches of a core hold, to 8 MiB a thread, more than most do."""
    return [torch.get_num_threads() * 2**18 * 2**number for number in range(6)]


def transfers(device: torch.device, buffer_bytes: int, *, to_device: bool) -> list[Candidate]:
    """Copies between page-locked host memory and the device."""

    def make() -> Probe:
        host = torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(buffer_bytes, dtype=torch.uint8, device=device)
        target, origin = (there, host) if to_device else (host, there)
        return Probe(
            name="host_to_device" if to_device else "device_to_host",
            unit="B/s",
            work=float(buffer_bytes),
            source=f"copy of {buffer_bytes / 2**20:.0f} MiB, host side page-locked",
            call=lambda: target.copy_(origin, non_blocking=True),
        )

    return [(float(buffer_bytes), make)]


def launches(device: torch.device) -> list[Candidate]:
    """Adding two tensors of one element: nothing but the cost of an operation, from Python, as in a training loop."""

    def make() -> Probe:
        left, right = torch.ones(1, device=device), torch.ones(1, device=device)

        def call() -> None:
            for _ in range(NUM_OPERATIONS):
                torch.add(left, right)

        return Probe(
            name="kernel_launch",
            unit="s",
            work=float(NUM_OPERATIONS),
            source="`torch.add` of two one-element tensors, called from Python",
            call=call,
        )

    return [(float(NUM_OPERATIONS), make)]


def choose_probes(stopwatch: Stopwatch, buffer_bytes: int) -> Iterator[Probe]:
    """Every probe of this device at its best size; what the device cannot do is left out."""
    device, cuda = stopwatch.device, stopwatch.device.type == "cuda"
    dtypes = [("float32", torch.float32), ("bfloat16", torch.bfloat16)]
    if cuda:
        dtypes.append(("float16", torch.float16))
        if torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0):
            dtypes.append(("tf32", torch.float32))
        buffer_bytes = min(2**30, torch.cuda.get_device_properties(device).total_memory // 16)
    all_alternatives = [[matmuls(device, dtype, name)] for name, dtype in dtypes]
    ways = ((torch.contiguous_format, CONVOLUTIONS[0]), *((torch.channels_last, shape) for shape in CONVOLUTIONS))
    all_alternatives += [[convolutions(device, dtype, name, *way) for way in ways] for name, dtype in dtypes]
    memory = shared_memory(device, 3 * buffer_bytes)
    all_alternatives += [memory_copies(3 * buffer_bytes, memory)]
    all_alternatives += [in_place("memory_in_place", [(3 * buffer_bytes, memory)])]
    if not cuda:
        sizes = [(size, shared_memory(device, size)) for size in cache_sizes()]
        all_alternatives += [in_place("memory_cache", sizes)]
    all_alternatives += [[launches(device)]]
    if cuda:
        pinned_bytes = min(2**28, buffer_bytes)
        all_alternatives += [[transfers(device, pinned_bytes, to_device=direction)] for direction in (True, False)]
    for alternatives in all_alternatives:
        probe = best_of(alternatives, stopwatch)
        if probe is not None:
            yield probe


def choose_threads(candidates: Sequence[int], stopwatch: Stopwatch) -> int:
    """The number of threads, of those offered, with the fastest matrix product; it stays set.

    Two hardware threads of one core share its arithmetic units, so one thread per core is often the faster choice.
    """
    rates: dict[int, float] = {}
    for num_threads in candidates:
        torch.set_num_threads(num_threads)
        if len(candidates) > 1:
            probe = grow(matmuls(torch.device("cpu"), torch.float32, "float32"), stopwatch)
            rates[num_threads] = _rate(probe) if probe else 0.0
    chosen = max(rates, key=rates.__getitem__, default=candidates[0])
    torch.set_num_threads(chosen)
    return chosen


# -- the process ---------------------------------------------------------------------------------------------------


class Calibration:
    """What one process measures: its device, and the probes at the sizes chosen last."""

    def __init__(self, output: IO[str], stopwatch: Stopwatch, *, num_threads: int, buffer_bytes: int) -> None:
        self._output = output
        self._stopwatch = stopwatch
        self._buffer_bytes = buffer_bytes
        self._probes: list[Probe] = []
        on_gpu = stopwatch.device.type == "cuda"
        name = torch.cuda.get_device_name(stopwatch.device) if on_gpu else "cpu"
        self._where = f"on `{name}`" if on_gpu else f"{num_threads} thread{'s' if num_threads != 1 else ''}"
        self._write(kind="start", framework_version=torch.__version__, device=name, num_threads=num_threads)

    def choose(self) -> None:
        """Choose all sizes, and take a first sample of each: also a process that is killed now has found something."""
        self._probes = []
        for probe in choose_probes(self._stopwatch, self._buffer_bytes):
            self._probes.append(probe)
            self._write(kind="probe", name=probe.name, unit=probe.unit, source=f"{probe.source}, {self._where}")
            self._sample(probe)
        self._write(kind="end", of="choose")

    def round(self) -> None:
        """A few windows of every probe, in turn."""
        for _ in range(WINDOWS_PER_ROUND):
            for probe in self._probes:
                self._sample(probe)
        self._write(kind="end", of="round")

    def _sample(self, probe: Probe) -> None:
        seconds = self._stopwatch.seconds_per_call(probe, self._stopwatch.window_s)
        self._write(kind="sample", name=probe.name, value=probe.value(seconds))

    def _write(self, **line: object) -> None:
        self._output.write(json.dumps(line) + "\n")


def main(arguments: Sequence[str]) -> int:
    """Measure as the command line says."""
    # Huge pages, read at torch's first allocation: a copy then does not depend on which small pages it was given
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    options = _parser().parse_args(arguments)
    device = _device(options.device)
    threads = [int(n) for n in options.threads.split(",")] if options.threads else [torch.get_num_threads()]
    threads = threads[:1] if device.type == "cuda" else threads  # there the host only enqueues
    num_threads = choose_threads(threads, Stopwatch(device=torch.device("cpu"), window_s=0.05))
    stopwatch = Stopwatch(device=device, window_s=0.025 if device.type == "cuda" else 0.05)
    with open(options.output, "w", encoding="utf-8", buffering=1) as output:
        measuring = Calibration(output, stopwatch, num_threads=num_threads, buffer_bytes=options.buffer_bytes)
        for request in sys.stdin if options.on_request else ["choose"] + ["round"] * DEFAULT_ROUNDS:
            measuring.choose() if request.strip() == "choose" else measuring.round()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="calibration", description="Measure this device's ceilings with PyTorch.")
    parser.add_argument("output", help="file (or pipe) for the JSON lines")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--threads", default="", help="numbers of CPU threads to choose from, e.g. 16,8")
    parser.add_argument("--buffer-bytes", type=int, default=2**28, help="a third of the memory that is copied")
    parser.add_argument("--on-request", action="store_true", help="do what lines on stdin say: `choose` or `round`")
    return parser


def _device(name: str) -> torch.device:
    """The device to measure, ready; `auto` is the GPU where there is one."""
    device = torch.device(name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    if device.type != "cuda":
        return device
    torch.backends.cudnn.benchmark = True  # the ceiling is the best algorithm, not the first guess
    torch.cuda.set_device(device if device.index is not None else torch.device("cuda", 0))
    return torch.device("cuda", torch.cuda.current_device())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
