"""How is a child started, told what to do, listened to and ended? The parent's side of one child.

In: a `Script`, the session's settings, orders. Out: the records that the child wrote, in order, or the way it ended.
Parent and child meet in files alone: the session, a named pipe with orders, and the trace.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from flatout.child.orders import Order, SessionSpec, encode
from flatout.errors import cannot_write
from flatout.records.as_json import to_json
from flatout.records.trace import End, Failure, Header, PassEnd, Ready, Record
from flatout.records.trace_file import Follower
from flatout.run.process_tree import ProcessTree

BOOTSTRAP = Path(__file__).parent.parent / "child" / "bootstrap"
POLL_S = 0.02

start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen
"""How the user's program is started, a trial's child as well as a run: with the arguments of `subprocess.Popen`. What
has processes made in another way puts its own here."""

#: Variables that have done their work when the process has started: the bootstrap puts the user's in their place, for
#: the script and for what it starts. It knows these names as well.
READ_AT_START = ("LD_PRELOAD", "GLIBC_TUNABLES", "MALLOC_CONF", "TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD",
                 "PYTHONHASHSEED")  # fmt: skip


@dataclass(kw_only=True, eq=False)
class Ended(Exception):
    """The child is gone: by itself, by an exception, by a signal, or because it was given up."""

    exit_code: int | None
    """As `subprocess` reports it; negative for a signal."""
    failure: Failure | None = None
    """The exception that the script raised, where it was recorded."""
    finished: bool = False
    """Whether the script ran to its end."""
    hung: bool = False
    """Whether it was given up after its time limit."""
    between_passes: bool = False
    """Whether it then had ended a pass over its data and made no step since."""
    num_steps: int = 0
    """Steps that it made, as far as known."""
    trained: bool = False
    """Whether it made a first step."""
    output: str = ""
    """The end of what it printed."""
    output_path: str = ""
    """The file with all that it printed; empty where there is none."""

    @property
    def cut_off(self) -> bool:
        """Whether it was ended from outside, by us or by a signal, whatever it was at."""
        return self.hung or (self.exit_code is not None and self.exit_code < 0)

    @property
    def out_of_memory(self) -> bool:
        """Whether it had no memory left, by its own word or the kernel's, which then kills."""
        if self.failure is not None:
            return self.failure.out_of_memory
        return self.exit_code == -signal.SIGKILL and not self.hung

    def sentence(self) -> str:
        """How it ended, in a few words."""
        if self.hung:
            if self.between_passes:
                return "no step in time after a pass over the data"
            return "hung: no answer within its time limit"
        if self.failure is not None:
            return ": ".join([self.failure.error, *self.failure.message.splitlines()[:1]])
        if self.exit_code is not None and self.exit_code < 0:
            return f"killed by {signal_name(-self.exit_code)}"
        return f"ended with exit code {self.exit_code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a child is started with."""

    command: Sequence[str]
    """Isolated or not."""
    session: SessionSpec
    run_folder: Path
    """Where its files go."""
    name: str
    """Tells the children of one run folder apart."""
    environment: Mapping[str, str | None] = field(default_factory=dict)
    """Variables set on top of the user's; None takes one away."""
    folder: Path = field(default_factory=Path.cwd)
    """The working folder."""
    through_launcher: bool = False
    """Whether the command is a launcher of ours, which gives its processes the environment itself."""
    passed_on: bool = False
    """Whether the command is a launcher of the user's, whose processes inherit the environment."""


def session_files(run_folder: Path, name: str) -> dict[str, str]:
    """The paths that a session names, all inside the run folder."""
    place = run_folder.resolve()
    return {
        "trace": str(place / f"trace-{name}.jsonl"),
        "claim": str(place / f"claim-{name}"),
        "orders": str(place / f"orders-{name}"),
    }


def environment_for(session_path: Path, extra: Mapping[str, str | None], *, passed_on: bool = False) -> dict[str, str]:
    """The user's environment with the bootstrap in front; what it hides is restored by the bootstrap itself.

    Args:
        session_path: What the child is told.
        extra: Variables set on top of the user's; None takes one away.
        passed_on: Whether what is read as a process starts is for the processes that the command starts.
    """
    found = {name: value for name, value in {**os.environ, **extra}.items() if value is not None}
    for name in () if passed_on else READ_AT_START:
        if name in extra:
            own = os.environ.get(name)
            found[f"FLATOUT_{name}"] = "" if own is None else f"={own}"
    found.pop("FLATOUT_PYTHONPATH", None)
    own = found.get("PYTHONPATH")
    found["FLATOUT_SESSION"] = str(session_path)
    found["PYTHONPATH"] = str(BOOTSTRAP) if not own else f"{BOOTSTRAP}{os.pathsep}{own}"
    if own is not None:
        found["FLATOUT_PYTHONPATH"] = own
    return found


def session_path(launch: Launch) -> Path:
    """Where a child finds what it is told."""
    return launch.run_folder.resolve() / f"session-{launch.name}.json"


def write_session(launch: Launch) -> Path:
    """Write what the child is told; returns the file's path.

    Raises:
        OSError: The folder is gone, or the disk is full.
    """
    path = session_path(launch)
    path.write_text(json.dumps(to_json(launch.session), indent=1), encoding="utf-8")
    return path


def discard_channels(session: SessionSpec) -> None:
    """Remove what only a living child needs: a pipe that is left behind stops who reads all files of a folder."""
    for path in (session.orders, session.claim):
        if path is not None:
            with contextlib.suppress(OSError):
                os.unlink(path)


class Child:
    """One child that follows orders. Use it as a context: leaving it ends the child and all that it started."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._follower = Follower(launch.session.trace)
        self._log: IO[bytes] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._kin: ProcessTree  # from its start on
        self._orders = -1
        self._number = 0
        self.records: list[Record] = []
        self.started_s = 0.0

    # -- life ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Child:
        try:
            self._start()
        except OSError as problem:
            self.end()
            raise cannot_write(self._launch.run_folder, problem) from None
        return self

    def _start(self) -> None:
        launch = self._launch
        told = write_session(replace(launch, session=replace(launch.session, lives_with=os.getpid())))
        if launch.session.orders is not None:
            os.mkfifo(launch.session.orders)
            # Both ends, so that opening waits for nobody and the child sees the end only when we are gone.
            self._orders = os.open(launch.session.orders, os.O_RDWR | os.O_CLOEXEC)
        self._log = open(self.output_path, "wb")  # noqa: SIM115  closed by `end`
        self.started_s = time.perf_counter()
        environment = environment_for(told, launch.environment, passed_on=launch.passed_on)
        self._process = start(
            list(launch.command),
            cwd=launch.folder,
            env=None if launch.through_launcher else environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._kin = ProcessTree(self._process.pid)

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def output_path(self) -> Path:
        """The file with all that the child printed."""
        return self._launch.run_folder / f"output-{self._launch.name}.log"

    @property
    def alive(self) -> bool:
        """Whether the process still runs; while it does, what will tell its leftovers is noted."""
        if self._process is None or self._process.poll() is not None:
            return False
        self._kin.look()
        return True

    @property
    def exit_code(self) -> int:
        """Of a child that has ended by itself, as `subprocess` reports it."""
        assert self._process is not None and self._process.returncode is not None
        return self._process.returncode

    @property
    def session_id(self) -> int:
        """The session that all of its processes belong to."""
        assert self._process is not None
        return self._process.pid

    def rest(self) -> list[Record]:
        """All that it wrote, up to now."""
        self.records += self._follower.new()
        return self.records

    def end(self) -> None:
        """Kill the child and everything that it started; nothing of the script runs any more, no handler either."""
        process, self._process = self._process, None
        if process is not None:
            self._kin.kill()
            process.wait()
            self._kin.close()
        if self._orders >= 0:
            os.close(self._orders)
            self._orders = -1
        if self._log is not None:
            self._log.close()
            self._log = None
        discard_channels(self._launch.session)
        with contextlib.suppress(OSError):
            os.unlink(session_path(self._launch))

    # -- orders --------------------------------------------------------------------------------------------------

    def ready(self, limit_s: float, wait: Callable[[], None] | None = None) -> list[Record]:
        """Wait until the child stands at its first boundary.

        Raises:
            Ended: It did not get there.
        """
        return self._until(-1, limit_s, wait)

    def ask(
        self, limit_s: float, wait: Callable[[], None] | None = None, pause_s: float = 0.0, /, **what: Any
    ) -> list[Record]:
        """Give an order and wait for its answers.

        Args:
            limit_s: After this many seconds without an answer the child is given up.
            wait: Called while waiting, e.g. to draw progress.
            pause_s: So many seconds may pass from the end of a pass over the data, whatever the limit.
            **what: The fields of an `Order`.

        Raises:
            Ended: The child is gone.
        """
        order = Order(number=self._number, **what)
        self._number += 1
        if not self.alive:
            raise self._ended(hung=False)
        os.write(self._orders, encode(order).encode())
        return self._until(order.number, limit_s, wait, pause_s)

    def _until(
        self, number: int, limit_s: float, wait: Callable[[], None] | None, pause_s: float = 0.0
    ) -> list[Record]:
        found: list[Record] = []
        deadline = time.perf_counter() + limit_s
        while True:
            alive = self.alive  # before reading: what it wrote last must not be missed
            new = self._follower.new()
            self.records += new
            found += new
            if any(isinstance(r, Ready) and r.order == number for r in new):
                return found
            if any(isinstance(r, PassEnd) for r in new):
                deadline = max(deadline, time.perf_counter() + pause_s)
            if not alive:
                raise self._ended(hung=False)
            if time.perf_counter() > deadline:
                raise self._ended(hung=True)
            if wait is not None:
                wait()
            time.sleep(POLL_S)

    def _ended(self, *, hung: bool) -> Ended:
        code = self._process.poll() if self._process is not None else None
        self.end()
        self.records += self._follower.new()
        end = next((r for r in reversed(self.records) if isinstance(r, End)), None)
        failure = next((r for r in reversed(self.records) if isinstance(r, Failure) and r.stage == "script"), None)
        ready = [r.num_steps for r in self.records if isinstance(r, Ready)]
        return Ended(
            exit_code=code,
            failure=failure,
            finished=code == 0 and not hung,
            hung=hung,
            between_passes=bool(self.records) and isinstance(self.records[-1], PassEnd),
            num_steps=end.num_steps if end else max(ready, default=0),
            trained=any(isinstance(r, Header) for r in self.records),
            output=tail(self.output_path),
            output_path=str(self.output_path) if self.output_path.exists() else "",
        )


def signal_name(number: int) -> str:
    """What a signal is called; most real-time signals have no name.

    >>> signal_name(9), signal_name(40)
    ('SIGKILL', 'signal 40')
    """
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def tail(path: Path, num_bytes: int = 4000) -> str:
    """The end of a text file; empty where there is none."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(file.tell() - num_bytes, 0))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
