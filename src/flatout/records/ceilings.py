"""What is this machine, and what can it do at most?

In: measured samples. Out: `Machine`, `Ceiling` and `Ceilings` records. The samples are taken in
`machine/calibrate.py`; here nothing is timed and no clock is read. The roofline is `judge/roofline.py`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Literal

from flatout.errors import RecordError
from flatout.records.numa import NumaNode

FORMAT = 1
"""The version of the ceilings file that this code writes, and the newest that it reads."""

BFLOAT16_FEATURES = ("avx512_bf16", "amx_bf16", "bf16", "svebf16")
"""Processor features, as the kernel names them, that mean bfloat16 products in hardware."""

Unit = Literal["FLOP/s", "B/s", "s"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One GPU that this process may use.

    Attributes:
        name: As its driver calls it, e.g. `NVIDIA H200`.
        memory_bytes: Its own memory.
        compute_capability: For example `9.0`; None where the driver does not say.
    """

    name: str
    memory_bytes: int
    compute_capability: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What this process has to run on.

    Attributes:
        hostname: Where it was read. Not part of what decides performance.
        cpu: Readable model name, e.g. `AMD EPYC`.
        architecture: For example `x86_64`.
        num_cores: Cores that this process can really use: the smaller of its affinity and its control group's
            quota (rounded down, at least 1). A core is a logical processor of the kernel.
        num_physical_cores: The same without counting hardware threads of one core twice.
        num_cores_total: Logical processors of the whole machine.
        memory_bytes: Memory of the whole machine.
        operating_system: Kernel and its release.
        cores_quota: The control group's quota in cores, possibly fractional; None without one.
        memory_limit_bytes: The control group's limit; None without one.
        last_level_cache_bytes: Summed over the caches that the usable cores share; None where not observed.
        shm_bytes: Size of `/dev/shm`, through which loader workers pass batches; None without one.
        cxx_compiler: Path of the C++ compiler that `torch.compile` can use on a CPU; None without one.
        cpu_features: Those that decide the speed of matrix products, as the kernel names them.
        accelerators: GPUs that this process may use.
        numa_nodes: Nodes with processors that this process may use; empty where they are of one, or nothing tells.
        format: Version of this record.
    """

    hostname: str
    cpu: str
    architecture: str
    num_cores: int
    num_physical_cores: int
    num_cores_total: int
    memory_bytes: int
    operating_system: str
    cores_quota: float | None = None
    memory_limit_bytes: int | None = None
    last_level_cache_bytes: int | None = None
    shm_bytes: int | None = None
    cxx_compiler: str | None = None
    cpu_features: tuple[str, ...] = ()
    accelerators: tuple[Accelerator, ...] = ()
    numa_nodes: tuple[NumaNode, ...] = ()
    format: int = FORMAT

    def bfloat16_in_hardware(self) -> bool:
        """Whether the CPU multiplies bfloat16 natively; without it bfloat16 on the CPU is emulated and may lose."""
        return any(feature in self.cpu_features for feature in BFLOAT16_FEATURES)

    def machine_key(self) -> str:
        """Twelve hexadecimal digits that change when something that decides performance changes.

        Decided by the processor, its features, the usable cores and the accelerators; not by the hostname, the
        amount of memory or the kernel, so that equal machines share a plan.
        """
        decisive = {
            "cpu": self.cpu,
            "architecture": self.architecture,
            "num_cores": self.num_cores,
            "num_physical_cores": self.num_physical_cores,
            "cores_quota": self.cores_quota,
            "cpu_features": sorted(self.cpu_features),
            # a driver's update moves the memory that it reports by some MiB
            "accelerators": [[a.name, round(a.memory_bytes / 2**30), a.compute_capability] for a in self.accelerators],
        }
        return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:12]


def differences(then: Machine, now: Machine) -> tuple[str, ...]:
    """What a reader should know before trusting on `now` what was measured on `then`; empty when nothing matters.

    Memory sizes that differ by less than 5 % are the same: kernels reserve different amounts.
    """
    lost = [feature for feature in then.cpu_features if feature not in now.cpu_features]
    gained = [feature for feature in now.cpu_features if feature not in then.cpu_features]
    features = [(place, found) for place, found in (("there", lost), ("here", gained)) if found]
    memory_bytes = [min(one.memory_bytes, one.memory_limit_bytes or one.memory_bytes) for one in (then, now)]
    return (
        *_difference("CPU", then.cpu, now.cpu),
        *_difference("architecture", then.architecture, now.architecture),
        *_difference("usable cores", then.num_cores, now.num_cores),
        *_difference("usable physical cores", then.num_physical_cores, now.num_physical_cores),
        *_difference("quota in cores", then.cores_quota, now.cores_quota),
        *(f"CPU features only {place}: `{' '.join(found)}`" for place, found in features),
        *_difference("NUMA nodes of the usable cores", len(then.numa_nodes) or 1, len(now.numa_nodes) or 1),
        *_difference("accelerators", _accelerators_text(then), _accelerators_text(now)),
        *_memory_difference("memory", *memory_bytes),
        *_memory_difference("`/dev/shm`", then.shm_bytes, now.shm_bytes),
        *_difference("C++ compiler", then.cxx_compiler, now.cxx_compiler),
        *_difference("operating system", then.operating_system, now.operating_system),
    )


def _difference(what: str, then: object, now: object) -> tuple[str, ...]:
    here, there = ("none" if value is None else value for value in (now, then))
    return () if then == now else (f"{what}: `{here}` here, `{there}` there",)


def _accelerators_text(machine: Machine) -> str:
    return ", ".join(f"{a.name} ({a.memory_bytes / 2**30:.0f} GiB)" for a in machine.accelerators) or "none"


def _memory_difference(what: str, then: int | None, now: int | None) -> tuple[str, ...]:
    if then and now and abs(then - now) <= 0.05 * max(then, now):
        return ()
    return _difference(what, then and f"{then / 2**30:.1f} GiB", now and f"{now / 2**30:.1f} GiB")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """One measured limit.

    Attributes:
        name: What is limited, e.g. `matmul_bfloat16`, `memory_copy`, `kernel_launch`.
        value: The limit in `unit`: a rate that is not exceeded, or (`s`) a duration that is not undercut.
        unit: `FLOP/s`, `B/s` or `s`.
        spread_fraction: Half the interquartile range of the samples over their median; or half of how far the second
            fastest lies beyond the faster quartile, over the value, where that is more: fast now and then.
        num_samples: Windows that it was judged from.
        source: One sentence: what was measured, on what shape, with how many threads.
        samples: What each window gave, in `unit`; empty where an older flatout measured it.
    """

    name: str
    value: float
    unit: Unit
    spread_fraction: float
    num_samples: int
    source: str
    samples: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.value) and self.value > 0):
            raise RecordError(
                f"the ceiling `{self.name}` is `{self.value}`",
                cause="a limit is a positive, finite number",
                hint="measure again: `flatout machine --refresh`",
            )


def ceiling_of(name: str, unit: Unit, samples: Sequence[float], *, source: str) -> Ceiling:
    """The limit that samples show: their 90th percentile for rates, their 10th for durations.

    Whatever disturbs a window (an interrupt, a neighbour, a cold cache) makes it slower, never faster, so the mean
    or median estimates the disturbance as much as the machine, and real work would exceed it. The maximum would be
    one lucky window, and it grows with the number of windows. A high quantile is what the machine does again and
    again when left alone.

    Raises:
        ValueError: There are no samples.

    >>> ceiling_of("memory_copy", "B/s", [9.0, 10.0, 10.0, 10.0, 11.0], source="made up").value
    10.6
    >>> ceiling_of("kernel_launch", "s", [2.0, 1.0, 1.0, 1.0], source="made up").value
    1.0
    """
    import statistics  # the user's process has no use for it

    if not samples:
        raise ValueError(f"no samples of `{name}`")
    ordered = sorted(samples, reverse=unit != "s")  # the fastest first
    second = ordered[min(1, len(ordered) - 1)]
    twentieths = statistics.quantiles(ordered if len(ordered) > 1 else ordered * 2, n=20, method="inclusive")
    low, middle, high = (twentieths[number - 1] for number in (5, 10, 15))
    value = twentieths[1 if unit == "s" else 17]
    ahead = low - second if unit == "s" else second - high
    return Ceiling(
        name=name,
        value=value,
        unit=unit,
        spread_fraction=max((high - low) / 2 / middle, ahead / 2 / value) if middle and value else 0.0,
        num_samples=len(samples),
        source=source,
        samples=tuple(samples),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """The measured limits of one device of one machine under one framework.

    Attributes:
        machine: Where they were measured.
        framework: For example `pytorch`.
        framework_version: For example `2.13.0+cpu`.
        device: `cpu`, or the accelerator that was measured.
        num_threads: CPU threads that measured.
        measured_unix_s: When, as seconds since 1970.
        measuring_s: How long it took, with the start of the process.
        foreign_cpu_fraction: Share of the usable core-time that other processes took in the windows that count,
            0 to 1; None where not observed.
        values: The limits.
        remarks: What a reader must know before trusting them; empty after an undisturbed, complete measurement.
        format: Version of this record.
    """

    machine: Machine
    framework: str
    framework_version: str
    device: str
    num_threads: int
    measured_unix_s: float
    measuring_s: float
    foreign_cpu_fraction: float | None
    values: tuple[Ceiling, ...]
    remarks: tuple[str, ...] = ()
    format: int = FORMAT

    def get(self, name: str) -> Ceiling | None:
        """The limit of that name, or None where it was not measured."""
        return next((c for c in self.values if c.name == name), None)

    def peak(self, dtype: str) -> Ceiling | None:
        """The highest arithmetic rate seen for `dtype` (`float32`, `bfloat16`, `tf32` ...), matmul or convolution.

        The libraries behind the two differ, and on some machines the convolution is the faster one: a utilization
        against the slower could exceed 1.
        """
        found = [c for c in (self.get(f"matmul_{dtype}"), self.get(f"conv_{dtype}")) if c is not None]
        return max(found, key=lambda c: c.value, default=None)

    def peaks(self) -> dict[str, Ceiling]:
        """The `peak` of each type that was measured, the widest first."""
        return {dtype: peak for dtype in ("float32", "tf32", "bfloat16") if (peak := self.peak(dtype)) is not None}

    def bandwidth(self) -> Ceiling | None:
        """The highest rate at which bytes passed the memory, copied or overwritten in place; None if not measured."""
        found = [c for c in (self.get("memory_copy"), self.get("memory_in_place")) if c is not None]
        return max(found, key=lambda c: c.value, default=None)

    def age_s(self, now_unix_s: float) -> float:
        """Seconds between the measurement and `now_unix_s`; at least 0, should a clock have been set back."""
        return max(0.0, now_unix_s - self.measured_unix_s)
