"""Which energy counters can be read here, what is missing for the others, and what do they show meanwhile?

In: `/sys/class/powercap` (RAPL), NVIDIA's and AMD's GPUs through the optional library `zeus`. Out: a
`flatout.records.energy.Log`. Only the parent reads; nothing of this runs in the user's process.

RAPL files are read here and not through `zeus`, which starts a process for each of them to watch it wrap around;
whoever notes a counter every second sees that anyway. Where `zeusd` serves them, `zeus` is asked.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.machine.control_groups import text_of
from flatout.records.energy import MIN_UPDATES, Counter, Curves, Device, Energy, Log, Series

RUN_EVERY_S = 1.0
"""Often enough for the sum over a run, for which no wrapping around must be missed: that takes a minute at least."""

WINDOWS_EVERY_S = 0.015
"""Windows of 0.25 s hold sixteen readings. One costs about 20 microseconds a counter."""

RAPL_UPDATE_S = 1e-3
"""Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 3B, 16.10.3: about every millisecond."""

NVML_UPDATE_S = 0.1
"""Source: Yang, Adamek, Armour, "Accurate and Convenient Energy Measurements for GPUs", SC24: 100 ms from Ampere on."""

_ZEUSD = ("ZEUSD_SOCK_PATH", "ZEUSD_HOST_PORT")
_POWERCAP = ("sys/class/powercap", "zeus_sys/class/powercap")  # the second: as zeus has it mounted into containers


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A counter, and how it is read: joules, or an exception."""

    counter: Counter
    read: Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What there is to read, and what is missing for the rest."""

    probes: tuple[Probe, ...] = ()
    missing: tuple[str, ...] = ()


def find(root: Path = Path("/"), environment: Mapping[str, str] | None = None) -> Found:
    """The counters that this process may read.

    Takes milliseconds; with an NVIDIA or AMD driver and `zeus`, a tenth of a second.

    Args:
        root: Where `/sys`, `/proc` and `/dev` are looked for.
        environment: The variables; this process's without it.
    """
    known = os.environ if environment is None else environment
    probes: list[Probe] = []
    missing: list[str] = []
    for look in (_cpus, _gpus):
        try:
            look(root, known, probes, missing)
        except Exception as problem:  # noqa: BLE001  a counter is never worth a run
            missing.append(f"{type(problem).__name__}: {problem}")
    return Found(probes=tuple(probes), missing=tuple(missing))


def energy_counters() -> Log:
    """The counters that can be read here, as a log without readings, and what is missing for others."""
    found = find()
    series = tuple(Series(counter=probe.counter) for probe in found.probes)
    return Log(series=series, missing=found.missing)


# -- processors ----------------------------------------------------------------------------------------------------


def _cpus(root: Path, environment: Mapping[str, str], probes: list[Probe], missing: list[str]) -> None:
    if any(environment.get(name) for name in _ZEUSD) and _has_zeus():
        _through_zeusd(probes, missing)
        return
    zones = next(filter(None, (sorted((root / place).glob("intel-rapl:*")) for place in _POWERCAP)), [])
    counted = [(zone, name) for zone in zones if (name := _counted_name(zone)) is not None]
    if not counted:
        missing.append(
            "RAPL: no counters in `/sys/class/powercap`: this processor or kernel has none, or a virtual machine or a "
            "container hides them"
        )
        return
    for zone, name in counted:
        file = zone / "energy_uj"
        try:
            _uj(file)
        except PermissionError:
            missing.append(
                f"RAPL: `{file}` is for root alone (Linux 5.10 and later): "
                f"`sudo chmod a+r {zone.parent}/intel-rapl:*/energy_uj` until the next start, or the daemon `zeusd`"
            )
            return
        except (OSError, ValueError) as problem:
            missing.append(f"RAPL: `{file}` cannot be read: {problem}")
            continue
        probes.append(_rapl(zone, name))


def _counted_name(zone: Path) -> str | None:
    """What a zone is called, of those that are added up: packages hold cores and graphics, a platform holds packages.

    Source: `Documentation/power/powercap/powercap.rst`, Linux: subzones are parts of their zone; memory is not, on
    servers, part of the package.
    """
    name = text_of(zone / "name").strip()
    if name.startswith("package"):
        return name
    return f"dram-{zone.name.split(':')[1]}" if name == "dram" else None


def _rapl(zone: Path, name: str) -> Probe:
    range_uj = text_of(zone / "max_energy_range_uj").strip()
    counter = Counter(
        name=name,
        device="cpu" if name.startswith("package") else "memory",
        source="RAPL",
        resolution_s=RAPL_UPDATE_S,
        resolution_joules=1e-6,
        range_joules=int(range_uj) / 1e6 if range_uj.isdigit() else None,
    )
    return Probe(counter=counter, read=lambda: _uj(zone / "energy_uj") / 1e6)


def _uj(file: Path) -> int:
    return int(file.read_text(encoding="ascii"))


def _through_zeusd(probes: list[Probe], missing: list[str]) -> None:
    """The daemon reads as root, and minds the wrapping."""
    try:
        cpus = importlib.import_module("zeus.device").get_cpus()
        shown = [cpus.get_total_energy_consumption(index) for index in range(len(cpus))]
    except Exception as problem:  # noqa: BLE001  zeus raises classes of its own, and those of its HTTP library
        missing.append(f"RAPL through `zeusd`: {problem}")
        return
    for index, one in enumerate(shown):
        for part, device in (("cpu_mj", "cpu"), ("dram_mj", "memory")):
            if getattr(one, part) is not None:
                name = f"{'package' if device == 'cpu' else 'dram'}-{index}"
                probes.append(
                    _of_zeus(name, device, "RAPL through zeusd", RAPL_UPDATE_S, _cpu_reader(cpus, index, part))
                )


def _cpu_reader(cpus: Any, index: int, part: str) -> Callable[[], float]:
    return lambda: float(getattr(cpus.get_total_energy_consumption(index), part))


def _of_zeus(name: str, device: Any, source: str, resolution_s: float, read_mj: Callable[[], float]) -> Probe:
    counter = Counter(
        name=name, device=device, source=source, resolution_s=resolution_s, resolution_joules=1e-3, range_joules=None
    )
    return Probe(counter=counter, read=lambda: read_mj() / 1e3)


# -- GPUs ----------------------------------------------------------------------------------------------------------


def _gpus(root: Path, environment: Mapping[str, str], probes: list[Probe], missing: list[str]) -> None:
    driver = any((root / place).exists() for place in ("proc/driver/nvidia", "sys/module/nvidia", "sys/module/amdgpu"))
    device = any((root / place).exists() for place in ("dev/nvidiactl", "dev/kfd", "dev/dxg"))
    if not device:
        if driver:
            missing.append(
                "GPU: there is a driver and no device: this container was not given one (`docker run --gpus all`)"
            )
        return
    if environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return
    if not _has_zeus():
        missing.append("GPU: its counters are read through the library zeus: `pip install 'flatout[energy]'`")
        return
    try:
        gpus = importlib.import_module("zeus.device").get_gpus()
    except Exception as problem:  # noqa: BLE001  zeus raises classes of its own, and a UUID in the variable ValueError
        missing.append(f"GPU: {_first_line(problem)}")
        return
    for index in range(len(gpus)):
        _gpu(gpus, index, probes, missing)


def _gpu(gpus: Any, index: int, probes: list[Probe], missing: list[str]) -> None:
    name = f"gpu-{index}"
    try:
        if not gpus.supports_get_total_energy_consumption(index):
            missing.append(f"GPU: {name} has no energy counter: NVIDIA's have one from Volta on")
            return
        gpus.get_total_energy_consumption(index)
    except Exception as problem:  # noqa: BLE001  no permission, device lost, driver too old: each a class of zeus
        missing.append(f"GPU: {name}: {_first_line(problem)}")
        return
    source = "NVML through zeus" if type(gpus).__name__ == "NVIDIAGPUs" else "AMD SMI through zeus"
    probes.append(_of_zeus(name, "gpu", source, NVML_UPDATE_S, lambda: gpus.get_total_energy_consumption(index)))


def _has_zeus() -> bool:
    with contextlib.suppress(ImportError, ValueError):
        return importlib.util.find_spec("zeus") is not None and importlib.util.find_spec("zeus.device") is not None
    return False


def _first_line(problem: Exception) -> str:
    return (str(problem).splitlines() or [type(problem).__name__])[0]


# -- noting them ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Noted:
    probe: Probe
    at_s: list[float] = field(default_factory=list)
    joules: list[float] = field(default_factory=list)
    lost: bool = False


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
        self._found = found
        self._now = now
        self._noted: list[_Noted] = []
        self._missing: list[str] = []
        self._last_s = -math.inf
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Look for counters, and note them for the first time."""
        found = find() if self._found is None else self._found
        self._noted = [_Noted(probe) for probe in found.probes]
        self._missing = list(found.missing)
        self.note()

    def __enter__(self) -> EnergyMeter:
        self.open()
        if self._noted:
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
        """Read every counter; one that cannot be read any more is left alone from then on, and named as missing."""
        if self._now() - self._last_s < at_most_every_s:
            return
        with self._lock:
            for one in self._noted:
                if one.lost:
                    continue
                try:
                    begun_s = self._now()
                    joules = one.probe.read()
                    self._last_s = self._now()
                except Exception as problem:  # noqa: BLE001  whatever a driver raises: a counter is never worth a run
                    one.lost = True
                    self._missing.append(f"{one.probe.counter.name}: no longer readable: {_first_line(problem)}")
                    continue
                one.at_s.append(round((begun_s + self._last_s) / 2, 6))  # the log is kept, and reading takes longer
                one.joules.append(round(joules, 6))

    def log(self) -> Log:
        """What was noted so far, up to this moment."""
        with self._lock:
            return Log(
                series=tuple(
                    Series(counter=one.probe.counter, at_s=tuple(one.at_s), joules=tuple(one.joules))
                    for one in self._noted
                ),
                missing=tuple(self._missing),
                noted_every_s=self.every_s,
            )

    def joules(self, device: str | None = None) -> Energy:
        """What was used from the first note to the last one.

        Args:
            device: What the script computed on, where that is known: one on the processor is not charged for a GPU.
        """
        counted: tuple[Device, ...] = ("cpu", "memory") if device == "cpu" else ("cpu", "memory", "gpu")
        noted = [one for one in self._noted if one.probe.counter.device in counted]
        read = [(one.at_s[0], one.at_s[-1]) for one in noted if not one.lost]
        if not read:
            return Energy(why_not="; ".join(self._missing) or "no energy counter could be read")
        start_s, end_s = max(first for first, _ in read), min(last for _, last in read)
        slowest = max((one.probe.counter for one in noted), key=lambda counter: counter.resolution_s)
        if end_s - start_s < MIN_UPDATES * slowest.resolution_s:
            took = f"{end_s - start_s:.2g} s"
            return Energy(
                why_not=f"{took} are too short for {slowest.name}: it changes every {slowest.resolution_s:g} s"
            )
        return Curves(self.log(), counted).between(start_s, end_s, min_updates=2)
