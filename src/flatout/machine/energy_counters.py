"""Which energy counters can be read here, what is missing for the others, and what do they show meanwhile?

In: `/sys/class/powercap` (RAPL), and NVIDIA's GPUs through the library of their driver. Out: joules. Only the parent
reads; nothing of this runs in the user's process.
"""

from __future__ import annotations

import bisect
import functools
import math
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from flatout.machine.control_groups import text_of
from flatout.machine.gpu_watch import Nvml, NvmlError
from flatout.records.energy import Energy

RUN_EVERY_S = 1.0
"""Often enough for the sum over a run, for which no wrapping around must be missed: that takes a minute at least."""

WINDOWS_EVERY_S = 0.015
"""Windows of 0.25 s hold sixteen readings. One costs about 20 microseconds a counter."""

RAPL_UPDATE_S = 1e-3
"""Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 3B, 16.10.3: about every millisecond."""

NVML_UPDATE_S = 0.1
"""Source: Yang, Adamek, Armour, "Accurate and Convenient Energy Measurements for GPUs", SC24: 100 ms from Ampere on."""

MOST_WATTS = 10_000.0
"""A counter that shows less than before, and more power than this behind its range, has begun anew."""

MIN_UPDATES = 10
"""A stretch with fewer readings or changes of a counter is too short: one of them is over a tenth of it."""


@dataclass(slots=True, kw_only=True)
class Counter:
    """One counter of the machine, and what it has shown.

    Attributes:
        name: For example `package-0`, `gpu-0`.
        device: What it counts.
        source: Who counts.
        update_s: How often it changes, as its maker says.
        read: What it shows now, in joules, or an exception.
        uuid: Of a GPU, e.g. `GPU-7f…`.
        range_joules: It begins anew behind this value; None where it does not.
        at_s: When it was read.
        joules: What it showed then, as if it had never begun anew.
        lost: Why it is not read any more, or empty.
    """

    name: str
    device: Literal["cpu", "gpu"]
    source: str
    update_s: float
    read: Callable[[], float]
    uuid: str = ""
    range_joules: float | None = None
    at_s: list[float] = field(default_factory=list)
    joules: list[float] = field(default_factory=list)
    lost: str = ""
    _last: float = 0.0

    def note(self, now: Callable[[], float]) -> None:
        """Read it; whatever a driver raises, or where it went back, it is left alone from then on."""
        if self.lost:
            return
        try:
            begun_s, shown = now(), self.read()
            gained = shown - self._last if self.joules else 0.0
            if gained < 0:
                # Source: `Documentation/power/powercap/powercap.rst`, Linux: it wraps at `max_energy_range_uj`
                gained += self.range_joules or 0.0
                if gained > MOST_WATTS * max(begun_s - self.at_s[-1], self.update_s):
                    raise ValueError("the counter began anew")
            if gained < 0:
                raise ValueError("the counter went back")
        except Exception as problem:  # noqa: BLE001  a counter is never worth a run
            self.lost = f"{self.name} is no longer readable: {_first_line(problem)}"
            return
        self.at_s.append((begun_s + now()) / 2)
        self.joules.append((self.joules[-1] if self.joules else 0.0) + gained)
        self._last = shown

    def at(self, instant_s: float) -> float:
        """The energy at an instant between two readings, with the power constant from one to the next."""
        above = min(max(bisect.bisect_left(self.at_s, instant_s), 1), len(self.at_s) - 1)
        begun_s, ended_s = self.at_s[above - 1 : above + 1]
        begun, ended = self.joules[above - 1 : above + 1]
        return begun + (ended - begun) * (instant_s - begun_s) / ((ended_s - begun_s) or 1.0)


class Found(NamedTuple):
    """What there is to read, and what is missing for the rest."""

    counters: tuple[Counter, ...] = ()
    missing: tuple[str, ...] = ()


def find(root: Path = Path("/"), environment: Mapping[str, str] | None = None) -> Found:
    """The counters that this process may read.

    Args:
        root: Where `/sys` and `/dev` are looked for.
        environment: The variables; this process's without it.
    """
    counters: list[Counter] = []
    missing: list[str] = []
    _packages(root, counters, missing)
    if (root / "dev/nvidiactl").exists() or (root / "dev/dxg").exists():  # the latter under WSL
        try:
            _gpus(os.environ if environment is None else environment, counters)
        except (NvmlError, AttributeError) as problem:  # no permission, before Volta, driver too old
            missing.append(f"GPU: {problem.args[-1]}")
    return Found(counters=tuple(counters), missing=tuple(missing))


def _packages(root: Path, counters: list[Counter], missing: list[str]) -> None:
    """Processor packages; what they hold and what holds them would be counted twice."""
    zones = sorted((root / "sys/class/powercap").glob("intel-rapl:*"))
    packages = [(zone, name) for zone in zones if (name := text_of(zone / "name").strip()).startswith("package")]
    if not packages:
        missing.append(
            "RAPL: no counters in `/sys/class/powercap`: this processor or kernel has none, or a virtual machine or a "
            "container hides them"
        )
    for zone, name in packages:
        file = zone / "energy_uj"

        def read(file: Path = file) -> float:
            return int(file.read_text(encoding="ascii")) / 1e6

        try:
            read()
        except PermissionError:
            missing.append(
                f"RAPL: `{file}` is for root alone (Linux 5.10 and later): "
                f"`sudo chmod a+r {zone.parent}/intel-rapl:*/energy_uj` until the next start"
            )
            return
        except (OSError, ValueError) as problem:
            missing.append(f"RAPL: `{file}` cannot be read: {problem}")
            continue
        range_uj = text_of(zone / "max_energy_range_uj").strip()
        range_joules = int(range_uj) / 1e6 if range_uj.isdigit() else None
        counters.append(
            Counter(name=name, device="cpu", source="RAPL", update_s=RAPL_UPDATE_S, read=read,
                    range_joules=range_joules)
        )  # fmt: skip


def _gpus(environment: Mapping[str, str], counters: list[Counter]) -> None:
    """NVIDIA's GPUs, of which `CUDA_VISIBLE_DEVICES` may name some by number or by UUID."""
    nvml = Nvml()
    for name, handle in nvml.handles(environment.get("CUDA_VISIBLE_DEVICES")).items():
        read = functools.partial(nvml.joules, handle)
        read()
        counters.append(
            Counter(name=f"gpu-{name}", device="gpu", source="NVML", update_s=NVML_UPDATE_S, read=read,
                    uuid=nvml.uuid(handle))
        )  # fmt: skip


def _first_line(problem: Exception) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0]


class EnergyMeter:
    """Notes every counter now and then, and says what was used.

    ```python
    with EnergyMeter() as meter:
        subprocess.run(command)
    print(meter.joules())
    ```

    As a context it notes in a thread of its own, and does nothing where nothing can be read. Whoever starts
    processes with `preexec_fn` meanwhile wants no thread: call `open`, then `note` from time to time.

    Args:
        every_s: How often to note.
        found: The counters; looked for when opened without it.
        now: The clock; `time.perf_counter` of all processes of one Linux machine is the same.
    """

    def __init__(
        self, every_s: float = RUN_EVERY_S, *, found: Found | None = None, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.every_s = every_s
        self.found = found or Found()
        self._look = found is None
        self._now = now
        self._last_s = -math.inf
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Look for counters, and note them for the first time."""
        if self._look:
            self.found = find()
        self.note()

    def __enter__(self) -> EnergyMeter:
        self.open()
        if self.found.counters:
            self._thread = threading.Thread(target=self._go_on, name="flatout-energy", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        self.note()

    def _go_on(self) -> None:
        while not self._stop.wait(self.every_s):
            self.note()

    def note(self, *, at_most_every_s: float = 0.0) -> None:
        """Read every counter."""
        if self._now() - self._last_s >= at_most_every_s:
            with self._lock:
                self._last_s = self._now()
                for counter in self.found.counters:
                    counter.note(self._now)

    def joules(
        self,
        device: str | None = None,
        start_s: float = -math.inf,
        end_s: float = math.inf,
        *,
        every_s: float = 0.0,
        gpus: Collection[str] = (),
    ) -> Energy:
        """What was used between two instants; from the first note to the last without them.

        Args:
            device: What the script computed on, where that is known: one on the processor is not charged for a GPU.
            start_s: The one.
            end_s: The other.
            every_s: How often to have noted, where the instants lie between notes.
            gpus: UUIDs of the GPUs that the script computed on, where they are known: idle ones beside are not its.
        """
        used = 0.0
        with self._lock:
            counters = [one for one in self.found.counters if device != "cpu" or one.device == "cpu"]
            if {*gpus} & {one.uuid for one in counters}:
                counters = [one for one in counters if one.device == "cpu" or one.uuid in gpus]
            for one in counters:
                if one.lost or len(one.at_s) < 2:
                    return Energy(why_not=one.lost or f"{one.name} was not read often enough")
                begun_s, ended_s = max(start_s, one.at_s[0]), min(end_s, one.at_s[-1])
                if start_s != -math.inf and (begun_s, ended_s) != (start_s, end_s):
                    return Energy(why_not=f"{one.name} was not read before and after")
                needed_s = MIN_UPDATES * max(one.update_s, every_s)
                if ended_s - begun_s < needed_s:
                    took = f"{ended_s - begun_s:.2g} s"
                    return Energy(why_not=f"{took} are too short for {one.name}: {needed_s:.2g} s are needed")
                gained = one.at(ended_s) - one.at(begun_s)
                if not gained:
                    return Energy(why_not=f"{one.name} stood still")
                used += gained
        if not counters:
            return Energy(why_not="; ".join(self.found.missing) or "no energy counter could be read")
        return Energy(joules=used)
