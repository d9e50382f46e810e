"""What are this machine's ceilings, from the cache or measured now?

In: the machine, a framework's `calibration.py`, which is run in a process and session of its own. Out: a `Ceilings`
record. The child only measures when asked; here it is judged whether the machine was quiet meanwhile, and what the
samples together are worth: a disturbed window lowers no ceiling, see `ceiling_of`. At the time limit the child is
killed and what it has found so far counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from flatout.errors import MachineError, RecordError
from flatout.machine import foreign_cpu
from flatout.machine.installed import Package, not_installed, version_of
from flatout.machine.read import read_machine
from flatout.records import files
from flatout.records.ceilings import Ceiling, Ceilings, Machine, ceiling_of
from flatout.records.places import cache_folder

REVISION = 4
"""Of what is measured and how: ceilings that were kept under another one are measured again."""

QUIET_FRACTION = 0.1
"""Ceilings of which others took more of the core-time meanwhile carry a remark."""

NUM_ROUNDS = 8
"""Beside the samples that come with the choice of sizes."""

LIMIT_S = 30.0
DEVICE_LIMIT_S = 60.0
"""A GPU's libraries are loaded from a cold disk, and its convolutions searched for."""

MAX_AGE_S = 30 * 24 * 3600.0
MAX_AGE_WITH_REMARKS_S = 600.0
"""A month, for firmware, drivers and neighbours change; with remarks, what serves the same session."""


def ceilings(
    package: Package,
    *,
    refresh: bool = False,
    device: str = "auto",
    limit_s: float | None = None,
    before: Callable[[], None] = lambda: None,
) -> Ceilings:
    """This machine's ceilings: cached ones when they are trusted, else measured (10 to 20 s) and cached.

    Cached per machine, framework version, threads and device. A cache that cannot be read or written is no failure;
    a disturbed measurement replaces no undisturbed one.

    Args:
        package: The framework.
        refresh: Measure even when cached ones are trusted.
        device: `auto` (the GPU where the framework finds one), `cpu`, `cuda` or `cuda:N`.
        limit_s: Wall seconds after which measuring ends, the start of the framework included; without it
            `LIMIT_S`, or `DEVICE_LIMIT_S` where there is a GPU to measure.
        before: Called when something is to be measured.

    Raises:
        MachineError: The framework is not installed, or nothing was measured within the limit.
    """
    machine = read_machine()
    path = cache_path(machine, f"{package.framework}-{version_of(package)}", device)
    cached = None if path is None else _cached(path)
    if cached is not None and not refresh:
        return cached
    before()
    usual_s = DEVICE_LIMIT_S if machine.accelerators and device != "cpu" else LIMIT_S
    found = measure(machine, package, device=device, limit_s=usual_s if limit_s is None else limit_s)
    loses = cached is not None and not cached.remarks and found.remarks
    if path is not None and not loses:
        with contextlib.suppress(OSError, MachineError):
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write(found, path)
    return found


def _cached(path: Path) -> Ceilings | None:
    """What is kept there, where it can be read and is young enough."""
    try:
        found = files.read(Ceilings, path, missing="no ceilings", hint="measure again")
    except RecordError:
        return None
    limit_s = MAX_AGE_WITH_REMARKS_S if found.remarks else MAX_AGE_S
    return found if found.age_s(time.time()) <= limit_s else None


def cache_path(machine: Machine, framework_and_version: str, device: str) -> Path | None:
    """Where ceilings are kept: in flatout's folder of the caches; None where there is no home."""
    folder = cache_folder()
    if folder is None:
        return None
    name = f"{machine.machine_key()}-{framework_and_version}-{machine.num_cores}-{device}-{REVISION}"
    return folder / f"ceilings-{re.sub(r'[^A-Za-z0-9.+-]', '_', name)}.json"


# -- measuring -----------------------------------------------------------------------------------------------------


def measure(machine: Machine, package: Package, *, device: str, limit_s: float) -> Ceilings:
    """Measure now, whatever is cached.

    Raises:
        MachineError: The child failed, or had nothing when the limit came.
    """
    started_s = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        with measuring_process(machine, package, device, errors, limit_s=limit_s) as child:
            measuring = Measuring(child, machine)
            measuring.converse()
        errors.seek(0)
        said = errors.read().strip()
    if not any(measuring.samples.values()):
        raise _nothing(package, said, limit_s)
    return Ceilings(
        machine=machine,
        framework=package.framework,
        framework_version=measuring.start["framework_version"],
        device=measuring.start["device"],
        num_threads=measuring.start["num_threads"],
        measured_unix_s=time.time(),
        measuring_s=time.monotonic() - started_s,
        foreign_cpu_fraction=measuring.foreign_fraction,
        values=measuring.found(),
        remarks=measuring.remarks(limit_s),
    )


@contextlib.contextmanager
def measuring_process(
    machine: Machine, package: Package, device: str, errors: IO[str] | None = None, *, limit_s: float
) -> Iterator[Child]:
    """A framework's calibration, started for this machine; it measures when it is asked, and is killed at the limit.

    Threads: one per logical or per physical core, whichever is faster. Buffers: three of two last-level caches.
    """
    threads = sorted({machine.num_cores, machine.num_physical_cores}, reverse=True)
    memory_bytes = min(machine.memory_bytes, machine.memory_limit_bytes or machine.memory_bytes)
    buffer_bytes = min(max(2 * (machine.last_level_cache_bytes or 0), 2**28), memory_bytes // 16)
    options = [device, ",".join(map(str, threads)), str(buffer_bytes)]
    with _child([sys.executable, str(package.calibration)], options, errors, limit_s) as child:
        yield child


@dataclasses.dataclass(frozen=True, slots=True)
class Child:
    """The measuring process: requests go to its stdin, its JSON lines come through a pipe of their own."""

    process: subprocess.Popen[bytes]
    answers: IO[bytes]

    def request(self, what: str) -> bool:
        """Ask for `choose` or `round`; False when it has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{what}\n".encode())
            self.process.stdin.flush()
        except OSError:
            return False
        return True

    def next(self) -> dict[str, Any] | None:
        """The next line; None when it has ended."""
        line = self.answers.readline()
        value: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
        return value


@contextlib.contextmanager
def _child(command: Sequence[str], options: Sequence[str], errors: IO[str] | None, limit_s: float) -> Iterator[Child]:
    """Start it in a session of its own, so that its CPU time can be told from others' and all of it be killed.

    The results have their own pipe: libraries may print to stdout (`MKL_VERBOSE`). `PYTHONSAFEPATH` keeps the
    script's folder out of its path, where modules of ours could hide others of the same name.
    """
    reading, writing = os.pipe()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FLATOUT_")}
    with open(reading, "rb") as answers:
        try:
            process = subprocess.Popen(
                [*command, f"/dev/fd/{writing}", *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                pass_fds=(writing,),
                start_new_session=True,
                env={**environment, "PYTHONSAFEPATH": "1"},
            )
        except OSError as problem:
            hint = "install the framework beside flatout, in the same environment"
            raise MachineError(f"`{command[0]}` cannot be started", cause=str(problem), hint=hint) from problem
        finally:
            os.close(writing)
        end = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
        end.daemon = True
        end.start()
        try:
            yield Child(process, answers)
        finally:
            end.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(OSError):
                process.communicate()


class Measuring:
    """One conversation with the child: what it said, and how quiet the machine was meanwhile.

    Attributes:
        start: What is measured: `device`, `framework_version`, `num_threads`.
        foreign_fraction: Share of the core-time that others took meanwhile; None where not observed.
    """

    def __init__(self, child: Child, machine: Machine) -> None:
        self.start: dict[str, Any] = {}
        self.samples: dict[str, list[float]] = {}
        self.foreign_fraction: float | None = None
        self._probes: dict[str, dict[str, Any]] = {}
        self._num_done = 0
        self._child = child
        self._machine = machine

    def begin(self) -> bool:
        """Wait until the child is ready; False when it has ended before, or the time is up."""
        self.start = self._child.next() or {}
        return bool(self.start)

    def converse(self) -> None:
        """Have sizes chosen, then rounds measured, while there is time."""
        if not self.begin():
            return
        before = foreign_cpu.take(self._child.process.pid)
        for what in ("choose", *["round"] * NUM_ROUNDS):
            if not self.ask(what):
                break
        after = foreign_cpu.take(self._child.process.pid)
        self.foreign_fraction = foreign_cpu.fraction(before, after, cores=self._machine.cores_quota)

    def ask(self, what: str) -> bool:
        """Have the child do `what` and keep what came; False when it did not finish."""
        if not self._child.request(what):
            return False
        while (line := self._child.next()) is not None and line["kind"] != "end":
            if line["kind"] == "probe":
                self._probes[line["name"]] = line
                self.samples[line["name"]] = []
            else:
                self.samples[line["name"]].append(line["value"])
        self._num_done += line is not None
        return line is not None

    def found(self) -> tuple[Ceiling, ...]:
        """One ceiling per probe that has samples, in the order of the probes."""
        samples = {name: found for name, found in self.samples.items() if found}
        probes = [(name, found, self._probes[name]) for name, found in samples.items()]
        return tuple(ceiling_of(name, probe["unit"], found, source=probe["source"]) for name, found, probe in probes)

    def remarks(self, limit_s: float) -> tuple[str, ...]:
        """What a reader must know before trusting them."""
        remarks = []
        if self.foreign_fraction is not None and self.foreign_fraction > QUIET_FRACTION:
            remarks.append(
                f"other processes used {100 * self.foreign_fraction:.0f} % of the CPU while measuring: "
                "these ceilings may be too low, and utilizations against them too high"
            )
        if self._num_done <= NUM_ROUNDS:
            remarks.append(f"stopped at the limit of {limit_s:g} s with {self._num_done} of {NUM_ROUNDS + 1} rounds")
        return tuple(remarks)


def _nothing(package: Package, said: str, limit_s: float) -> MachineError:
    if f"No module named '{package.name}'" in said:
        return not_installed(package)
    if said:
        return MachineError(
            "the ceilings could not be measured",
            cause=f"the measuring process ended with `{said.splitlines()[-1]}`",
            hint=f"see all of it: `echo choose | {sys.executable} {package.calibration} ceilings.json auto 1 1000000`",
        )
    return MachineError(
        f"no ceiling was measured within {limit_s:g} s",
        cause=f"`{package.name}` had not started, or other processes kept the cores",
        hint="try again when the machine is quiet",
    )
