"""What are this machine's ceilings, from the cache or measured now?

In: the machine, a framework's `calibration.py`, which is run in a process and session of its own. Out: a `Ceilings`
record. The child only measures when asked; here it is judged whether the machine was quiet meanwhile, whether a round
has to be repeated, and what the samples together are worth. At the time limit the child is killed and what it has
found so far counts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from flatout.errors import MachineError, RecordError
from flatout.machine import foreign_cpu
from flatout.machine.installed import Package, not_installed, version_of
from flatout.machine.read import read_machine
from flatout.records.ceilings import Ceiling, Ceilings, Machine, ceiling_of, load, save
from flatout.records.places import cache_folder

REVISION = 4
"""Of what is measured and how: ceilings that were kept under another one are measured again."""

QUIET_FRACTION = 0.1
"""A round in which others took more of the core-time than this is not quiet: it is repeated while there is time."""

NUM_ROUNDS = 8
MIN_ROUNDS = 4
PAUSE_S = 0.5
"""How long to wait after a disturbed round."""

CHOOSING_SHARE = 0.5
"""After a disturbed choice sizes are chosen again, but only in this share of the time limit."""

MAX_AGE_S = 30 * 24 * 3600.0
MAX_AGE_WITH_REMARKS_S = 600.0
"""A month, for firmware, drivers and neighbours change; with remarks, what serves the same session."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What came from the child in one go.

    Attributes:
        samples: Name of the ceiling and the sample.
        foreign_fraction: Share of the core-time that others took meanwhile; None where not observed.
        wall_s: Its duration.
        complete: Whether the child finished it.
    """

    samples: tuple[tuple[str, float], ...]
    foreign_fraction: float | None
    wall_s: float
    complete: bool = True

    def is_quiet(self) -> bool:
        """Whether nobody was seen to disturb it."""
        return self.foreign_fraction is None or self.foreign_fraction <= QUIET_FRACTION


def ceilings(
    package: Package,
    *,
    refresh: bool = False,
    python: str = sys.executable,
    device: str = "auto",
    limit_s: float = 30.0,
) -> Ceilings:
    """This machine's ceilings: cached ones when they are trusted, else measured (10 to 20 s) and cached.

    Cached per machine, framework version, threads and device. A cache that cannot be read or written is no failure;
    a disturbed measurement replaces no undisturbed one.

    Args:
        package: The framework.
        refresh: Measure even when cached ones are trusted.
        python: The interpreter whose framework is measured.
        device: `auto` (the GPU where the framework finds one), `cpu`, `cuda` or `cuda:N`.
        limit_s: Wall seconds after which measuring ends, the start of the framework included.

    Raises:
        MachineError: The framework is not installed, or nothing was measured within the limit.
    """
    machine = read_machine()
    path = cache_path(machine, f"{package.framework}-{version_of(package, python)}", device)
    cached = _trusted_in(path)
    if cached is not None and not refresh:
        return cached
    found = measure(machine, package, python=python, device=device, limit_s=limit_s)
    loses = cached is not None and not cached.remarks and found.remarks
    if path is not None and not loses:
        with contextlib.suppress(OSError):
            save(found, path)
    return found


def _trusted_in(path: Path | None) -> Ceilings | None:
    if path is not None:
        with contextlib.suppress(RecordError):
            found = load(path)
            return found if is_trusted(found, time.time()) else None
    return None


def is_trusted(found: Ceilings, now_unix_s: float) -> bool:
    """Whether cached ceilings are young enough: a month, or ten minutes when they carry remarks."""
    return found.age_s(now_unix_s) <= (MAX_AGE_WITH_REMARKS_S if found.remarks else MAX_AGE_S)


def cache_path(machine: Machine, framework_and_version: str, device: str) -> Path | None:
    """Where ceilings are kept: in flatout's folder of the caches; None where there is no home."""
    folder = cache_folder()
    if folder is None:
        return None
    name = f"{machine.machine_key()}-{framework_and_version}-{machine.num_cores}-{device}-{REVISION}"
    return folder / f"ceilings-{re.sub(r'[^A-Za-z0-9.+-]', '_', name)}.json"


# -- measuring -----------------------------------------------------------------------------------------------------


def measure(machine: Machine, package: Package, *, python: str, device: str, limit_s: float) -> Ceilings:
    """Measure now, whatever is cached.

    Raises:
        MachineError: The child failed, or had nothing when the limit came.
    """
    started_s = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
        with measuring_process(machine, package, python, device, errors) as child:
            measuring = Measuring(child, machine, deadline_s=started_s + limit_s, limit_s=limit_s)
            measuring.converse()
        errors.seek(0)
        said = errors.read().strip()
    if not any(part.samples for part in measuring.rounds):
        raise _nothing(package, python, said, limit_s)
    rounds, remarks = choose_rounds(measuring.rounds, limit_s=limit_s)
    return Ceilings(
        machine=machine,
        framework=package.framework,
        framework_version=measuring.start["framework_version"],
        device=measuring.start["device"],
        num_threads=measuring.start["num_threads"],
        measured_unix_s=time.time(),
        measuring_s=time.monotonic() - started_s,
        foreign_cpu_fraction=mean_foreign_fraction(rounds),
        values=summarize(rounds, measuring.probes),
        remarks=remarks,
    )


@contextlib.contextmanager
def measuring_process(
    machine: Machine, package: Package, python: str, device: str, errors: IO[str] | None = None
) -> Iterator[Child]:
    """A framework's calibration, started for this machine; it measures when it is asked."""
    with _child([python, str(package.calibration)], _options(machine, device), errors) as child:
        yield child


def _options(machine: Machine, device: str) -> list[str]:
    """Threads: one per logical or per physical core, whichever is faster. Buffers: three of two last-level caches."""
    threads = sorted({machine.num_cores, machine.num_physical_cores}, reverse=True)
    memory_bytes = min(machine.memory_bytes, machine.memory_limit_bytes or machine.memory_bytes)
    buffer_bytes = min(max(2 * (machine.last_level_cache_bytes or 0), 2**28), memory_bytes // 16)
    return [device, ",".join(map(str, threads)), str(buffer_bytes)]


@dataclasses.dataclass(frozen=True, slots=True)
class Child:
    """The measuring process: requests go to its stdin, its JSON lines come through a pipe of their own."""

    process: subprocess.Popen[bytes]
    lines: Lines

    def request(self, what: str) -> bool:
        """Ask for `choose` or `round`; False when it has ended."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{what}\n".encode())
            self.process.stdin.flush()
        except OSError:
            return False
        return True


class Lines:
    """JSON lines from a pipe, each waited for until a deadline."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._poll = select.poll()  # unlike `select.select`, not limited to handles below 1024
        self._poll.register(handle, select.POLLIN)
        self._pending = b""

    def next(self, deadline_s: float) -> dict[str, Any] | None:
        """The next line; None at the end of the pipe, or at `deadline_s` (`time.monotonic`)."""
        while b"\n" not in self._pending:
            if not self._poll.poll(1000 * max(0.0, deadline_s - time.monotonic())):
                return None
            chunk = os.read(self._handle, 65536)
            if not chunk:
                return None
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        value: dict[str, Any] = json.loads(line)
        return value


@contextlib.contextmanager
def _child(command: Sequence[str], options: Sequence[str], errors: IO[str] | None) -> Iterator[Child]:
    """Start it in a session of its own, so that its CPU time can be told from others' and all of it be killed.

    The results have their own pipe: libraries may print to stdout (`MKL_VERBOSE`). `PYTHONSAFEPATH` keeps the
    script's folder out of its path, where modules of ours could hide others of the same name.
    """
    reading, writing = os.pipe()
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FLATOUT_")}
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
        os.close(reading)
        hint = "name a Python interpreter that has the framework"
        raise MachineError(f"`{command[0]}` cannot be started", cause=str(problem), hint=hint) from problem
    finally:
        os.close(writing)
    try:
        yield Child(process, Lines(reading))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            process.communicate()
        os.close(reading)


class Measuring:
    """One conversation with the child: what it said, and how quiet the machine was meanwhile."""

    def __init__(self, child: Child, machine: Machine, *, deadline_s: float, limit_s: float) -> None:
        self.start: dict[str, Any] = {}
        self.probes: dict[str, dict[str, Any]] = {}
        self.rounds: list[Round] = []
        self._child = child
        self._machine = machine
        self._deadline_s = deadline_s
        self._choose_until_s = deadline_s - (1 - CHOOSING_SHARE) * limit_s

    def begin(self) -> bool:
        """Wait until the child is ready; False when it has ended before, or the time is up."""
        self.start = self._child.lines.next(self._deadline_s) or {}
        return bool(self.start)

    def converse(self) -> None:
        """Have sizes chosen, then rounds measured, until enough were quiet or the time is up."""
        if not self.begin():
            return
        while self.ask("choose") and not self.rounds[-1].is_quiet() and time.monotonic() < self._choose_until_s:
            self._pause()
        longest_s = 0.0
        while sum(part.is_quiet() for part in self.rounds) < NUM_ROUNDS + 1 and self._time_for(longest_s):
            if not self.ask("round"):
                break
            longest_s = max(longest_s, self.rounds[-1].wall_s)
            if not self.rounds[-1].is_quiet():
                self._pause()

    def ask(self, what: str) -> bool:
        """Have the child do `what` and keep what came; False when it did not finish."""
        before, started_s = foreign_cpu.take(self._child.process.pid), time.monotonic()
        if not self._child.request(what):
            return False
        samples: list[tuple[str, float]] = []
        line = self._child.lines.next(self._deadline_s)
        while line is not None and line["kind"] != "end":
            if line["kind"] == "probe":
                self.probes[line["name"]] = line
            else:
                samples.append((line["name"], line["value"]))
            line = self._child.lines.next(self._deadline_s)
        after = foreign_cpu.take(self._child.process.pid)
        found = Round(
            samples=tuple(samples),
            foreign_fraction=foreign_cpu.fraction(before, after, cores=self._machine.cores_quota),
            wall_s=time.monotonic() - started_s,
            complete=line is not None,
        )
        if what == "choose" and found.complete:  # samples at sizes that were given up are worth nothing
            self.rounds = []
        self.rounds.append(found)
        return found.complete

    def _time_for(self, needed_s: float) -> bool:
        return bool(self.rounds) and self.rounds[-1].complete and time.monotonic() + needed_s < self._deadline_s

    def _pause(self) -> None:
        time.sleep(max(0.0, min(PAUSE_S, self._deadline_s - time.monotonic())))


def _nothing(package: Package, python: str, said: str, limit_s: float) -> MachineError:
    if f"No module named '{package.name}'" in said:
        return not_installed(package, python)
    if said:
        return MachineError(
            "the ceilings could not be measured",
            cause=f"the measuring process ended with `{said.splitlines()[-1]}`",
            hint=f"see all of it: `echo choose | {python} {package.calibration} /tmp/ceilings.json auto 1 1000000`",
        )
    return MachineError(
        f"no ceiling was measured within {limit_s:g} s",
        cause=f"`{package.name}` had not started, or other processes kept the cores",
        hint="try again when the machine is quiet",
    )


# -- judging -------------------------------------------------------------------------------------------------------


def choose_rounds(rounds: Sequence[Round], *, limit_s: float) -> tuple[list[Round], tuple[str, ...]]:
    """The rounds that count, and what a reader must know of them: the quiet ones, or else the `MIN_ROUNDS` quietest."""
    ordered = sorted(rounds, key=lambda part: part.foreign_fraction or 0.0)
    num_quiet = sum(part.is_quiet() for part in rounds)
    chosen = ordered[: max(num_quiet, MIN_ROUNDS)]
    remarks = []
    foreign = mean_foreign_fraction(chosen)
    if foreign is not None and num_quiet < len(chosen):
        remarks.append(
            f"other processes used {100 * foreign:.0f} % of the CPU while measuring: "
            "these ceilings may be too low, and utilizations against them too high"
        )
    if len(rounds) < MIN_ROUNDS:
        remarks.append(f"stopped at the limit of {limit_s:g} s with {len(rounds)} of {NUM_ROUNDS + 1} rounds")
    return chosen, tuple(remarks)


def mean_foreign_fraction(rounds: Sequence[Round]) -> float | None:
    """Others' share of the core-time over rounds, weighted by their duration; None where no round observed it."""
    seen = [(part.foreign_fraction, part.wall_s) for part in rounds if part.foreign_fraction is not None]
    total_s = sum(wall_s for _, wall_s in seen)
    return sum(fraction * wall_s for fraction, wall_s in seen) / total_s if total_s > 0 else None


def summarize(rounds: Sequence[Round], probes: dict[str, dict[str, Any]]) -> tuple[Ceiling, ...]:
    """One ceiling per probe that has samples, in the order of the probes."""
    samples: dict[str, list[float]] = {name: [] for name in probes}
    for name, value in (sample for part in rounds for sample in part.samples):
        samples[name].append(value)
    return tuple(
        ceiling_of(n, probes[n]["unit"], found, source=probes[n]["source"]) for n, found in samples.items() if found
    )
