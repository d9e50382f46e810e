"""How fast is this device under PyTorch at matrix products, convolutions, moving bytes, and at starting an operation?

In: a command line (this file by its path, with any interpreter that has torch: it needs nothing of flatout), and lines
on stdin. Out: JSON lines, each written when it is known, so that a process killed at any moment leaves what it has
measured:

    {"kind": "start", "framework_version": ..., "device": ..., "num_threads": ...}
    {"kind": "probe", "name": ..., "unit": ..., "source": ...}
    {"kind": "sample", "name": ..., "value": ...}
    {"kind": "end", "of": "choose" or "round"}

On `choose` the size of every probe is doubled until its rate stops rising; on `round` every probe runs for a few short
windows. The windows of one probe so lie seconds apart, among those of all others, and a disturbance or a change of
clock frequency hits some of each and not all of one. The reader, `flatout.machine.calibrate`, waits for a quiet machine
and judges what a sample is worth. `torch.utils.benchmark.Timer` would measure one statement to the end before the next,
and by the host's clock.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

LONGEST_CALL_S = 0.25
"""No size is tried whose single call is predicted to take longer: emulated bfloat16 can be 500 times slower."""

WORTHWHILE_GAIN = 1.02
"""A doubled size must raise the rate by this factor to count as a rise."""

NUM_OPERATIONS = 200
"""Tiny operations in one call of `kernel_launch`, so that the loop around calls costs nothing."""

WINDOWS_PER_ROUND = 2

NUM_SEARCHED = 4
"""Algorithms of cuDNN that are tried for each convolution: some are compiled for it, for seconds each."""


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
    """Seconds of a call after warm-up: the first one chooses algorithms and fills their caches.

    On a device it may load a library or search for seconds, and says nothing; on a CPU a long one is slow itself.
    """
    first_s = stopwatch.seconds_per_call(probe, 0.0)
    if first_s > 4 * LONGEST_CALL_S and stopwatch.device.type == "cpu":
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
    return [(2.0 * n**3, partial(make, n)) for n in sizes]


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
    return [(work(batch), partial(make, batch)) for batch in batches]


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


STREAMS: dict[str, tuple[int, int, Callable[..., object]]] = {
    "copy": (2, 2, lambda target, origin: target.copy_(origin)),
    "triad": (3, 3, lambda target, first, second: torch.add(first, second, alpha=2.0, out=target)),
    "`relu_`": (1, 2, lambda target: target.relu_()),
    "`mul_`": (2, 3, lambda target, other: target.mul_(other)),
}
"""Buffers, how often one is read or written, and what does it: STREAM's copy and triad (a = b + 2 c), and overwriting
what was read. The latter passes more of a program's bytes, because no line is fetched only to be overwritten (which is
not counted, as in STREAM, McCalpin 1995): optimizers and activations in place would exceed what a copy reaches."""


def streams(name: str, sizes: Sequence[tuple[int, Share]], kinds: Sequence[str]) -> list[list[Candidate]]:
    """Reading and writing growing memory in these ways: bytes as the program asks for them."""

    def make(share: Share, kind: str) -> Probe:
        num, num_passes, call = STREAMS[kind]
        buffers = share(num)
        each = f"{4 * len(buffers[0]) / 2**20:g} MiB"
        return Probe(
            name=name,
            unit="B/s",
            work=4.0 * len(buffers[0]) * num_passes,
            source=f"{kind} over {f'{num} buffers' if num > 1 else 'a buffer'} of {each}, reads and writes counted",
            call=lambda: call(*buffers),
        )

    def candidates(kind: str) -> list[Candidate]:
        num, num_passes, _ = STREAMS[kind]
        return [(float(size // num * num_passes), partial(make, share, kind)) for size, share in sizes]

    return [candidates(kind) for kind in kinds]


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
    memory = shared_memory(device, 3 * buffer_bytes)
    matrices = [[matmuls(device, dtype, name)] for name, dtype in dtypes]
    ways = [(torch.contiguous_format, CONVOLUTIONS[0]), *((torch.channels_last, shape) for shape in CONVOLUTIONS)]
    ways = ways[1:2] if cuda else ways  # the layout that tensor cores want: each is searched for
    images = [[convolutions(device, dtype, name, *way) for way in ways] for name, dtype in dtypes]
    moving = [
        streams("memory_copy", [(3 * buffer_bytes, memory)], ("copy", "triad")),
        streams("memory_in_place", [(3 * buffer_bytes, memory)], ("`relu_`", "`mul_`")),
    ]
    if cuda:
        pinned_bytes = min(2**28, buffer_bytes)
        copies = [[transfers(device, pinned_bytes, to_device=direction)] for direction in (True, False)]
        # what takes longest comes last: at the time limit it is what is missing
        all_alternatives = [*moving, [launches(device)], *matrices, *copies, *images]
    else:
        # from 256 KiB a thread, less than the caches of a core hold, to 8 MiB a thread, more than most do
        sizes = [torch.get_num_threads() * 2**18 * 2**number for number in range(6)]
        shares = [(size, shared_memory(device, size)) for size in sizes]
        moving.append(streams("memory_cache", shares, ("`relu_`", "`mul_`")))
        all_alternatives = [*matrices, *images, *moving, [launches(device)]]
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


def main(output: str, device_name: str, threads: str, buffer_bytes: int) -> None:
    """Measure what lines on stdin ask for.

    Args:
        output: File (or pipe) for the JSON lines.
        device_name: `auto` (the GPU where there is one), `cpu`, `cuda` or `cuda:N`.
        threads: Numbers of CPU threads to choose from, as in `16,8`.
        buffer_bytes: A third of the memory that is copied.
    """
    # Huge pages, read at torch's first allocation: a copy then does not depend on which small pages it was given
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    device = torch.device(device_name if device_name != "auto" else "cuda" if torch.cuda.is_available() else "cpu")
    choices, name = [int(n) for n in threads.split(",")], "cpu"
    if on_gpu := device.type == "cuda":
        torch.backends.cudnn.benchmark = True  # the ceiling is the best algorithm, not the first guess
        torch.backends.cudnn.benchmark_limit = NUM_SEARCHED
        torch.cuda.set_device(device if device.index is not None else torch.device("cuda", 0))
        device = torch.device("cuda", torch.cuda.current_device())
        choices, name = choices[:1], torch.cuda.get_device_name(device)  # there the host only enqueues
    num_threads = choose_threads(choices, Stopwatch(device=torch.device("cpu"), window_s=0.05))
    where = f"on `{name}`" if on_gpu else f"{num_threads} thread{'s' if num_threads != 1 else ''}"
    stopwatch = Stopwatch(device=device, window_s=0.025 if on_gpu else 0.05)
    probes: list[Probe] = []
    with open(output, "w", encoding="utf-8", buffering=1) as file:

        def write(**line: object) -> None:
            file.write(json.dumps(line) + "\n")

        def sample(probe: Probe) -> None:
            seconds = stopwatch.seconds_per_call(probe, stopwatch.window_s)
            write(kind="sample", name=probe.name, value=probe.value(seconds))

        write(kind="start", framework_version=torch.__version__, device=name, num_threads=num_threads)
        for request in map(str.strip, sys.stdin):
            if request == "choose":
                probes = []
                for probe in choose_probes(stopwatch, buffer_bytes):
                    probes.append(probe)
                    write(kind="probe", name=probe.name, unit=probe.unit, source=f"{probe.source}, {where}")
                    sample(probe)  # at once: also a process that is killed now has found something
            else:
                for probe in probes * WINDOWS_PER_ROUND:
                    sample(probe)
            write(kind="end", of=request)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
