"""How does a trial's script that serves get a client? This starts both: `-S with_client.py NOTE CLIENT SCRIPT...`.

It becomes SCRIPT. A process that it has left behind waits until SCRIPT, or what it has started, listens on a socket,
and then runs CLIENT (a JSON list) again and again, in the user's own environment and in the trial's session, so that it
is isolated and ended with it. NOTE says how its runs ended. Standard library only: this is run as a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

POLL_S = 0.1
PAUSE_S = 0.5
"""After a run that failed: perhaps the script was not ready."""


class Note(TypedDict):
    """How the client's runs have ended so far."""

    num_runs: int
    exit_code: int
    failing_since_s: float | None
    """`time.monotonic` since when each run has failed; None where the latest has not."""


def read(path: Path) -> Note | None:
    """What the file says; None where the script does not listen yet."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
    except (OSError, ValueError):
        return None


def command(script: list[str], client: tuple[str, ...], note: Path) -> list[str]:
    """What starts both; a client that is a Python file is run as the script is."""
    client = (script[0], *client) if client[0].endswith(".py") else client
    return [script[0], "-S", str(Path(__file__).resolve()), str(note.resolve()), json.dumps(client), *script]


def output_of(note: Path) -> Path:
    """Where the client's output goes."""
    return note.with_suffix(".log")


def main() -> None:
    """Fork, and become the script."""
    note, client, *script = sys.argv[1:]
    served = os.getpid()
    if not os.fork():
        if not os.fork():  # the script finds no child that it has not started
            try:
                _serve_with(Path(note), json.loads(client), served)
            finally:
                os._exit(0)
        os._exit(0)
    os.wait()
    os.execvp(script[0], script)


def _serve_with(note: Path, client: list[str], served: int) -> None:
    while not _listens():
        if not _lives(served):
            return
        time.sleep(POLL_S)
    environment = _own_environment()
    found: Note = {"num_runs": 0, "exit_code": 0, "failing_since_s": None}
    with open(output_of(note), "ab") as log:
        while _lives(served):
            _write(note, found)
            found["exit_code"] = _run(client, environment, log.fileno())
            found["num_runs"] += 1
            if not found["exit_code"]:
                found["failing_since_s"] = None
            elif found["failing_since_s"] is None:
                found["failing_since_s"] = time.monotonic()
            time.sleep(PAUSE_S if found["exit_code"] else 0.0)


def _write(note: Path, found: Note) -> None:
    unfinished = note.with_suffix(".part")
    unfinished.write_text(json.dumps(found), encoding="utf-8")
    unfinished.replace(note)


def _run(client: list[str], environment: dict[str, str], log: int) -> int:
    pid = os.fork()
    if not pid:
        try:
            nothing = os.open(os.devnull, os.O_RDONLY)
            for source, target in ((nothing, 0), (log, 1), (log, 2)):
                os.dup2(source, target)
            os.execvpe(client[0], client, environment)
        except OSError as problem:
            os.write(2, f"{client[0]}: {problem.strerror}\n".encode())
        finally:
            os._exit(127)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _own_environment() -> dict[str, str]:
    """The user's: without what leads into the script's process, and what its levers have set."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("FLATOUT_")}
    own = os.environ.get("FLATOUT_PYTHONPATH")
    found.pop("PYTHONPATH", None)
    if own is not None:
        found["PYTHONPATH"] = own
    for name, value in os.environ.items():  # as `child_process.environment_for` writes them
        read_at_start = name.removeprefix("FLATOUT_")
        if name.startswith("FLATOUT_") and read_at_start in os.environ and name != "FLATOUT_PYTHONPATH":
            found.pop(read_at_start)
            if value:
                found[read_at_start] = value[1:]
    return found


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _listens() -> bool:
    """Whether a process of this session listens on a TCP port or a socket in the file system."""
    listening = {f"socket:[{inode}]" for inode in _listening_inodes()}
    return bool(listening) and any(link in listening for link in _sockets_of_session(os.getsid(0)))


def _listening_inodes() -> Iterator[str]:
    for name, state, wanted, inode in (("tcp", 3, "0A", 9), ("tcp6", 3, "0A", 9), ("unix", 3, "00010000", 6)):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text(encoding="utf-8", errors="replace").splitlines()[1:]:
                fields = line.split()
                if len(fields) > inode and fields[state] == wanted:
                    yield fields[inode]


def _sockets_of_session(session: int) -> Iterator[str]:
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(entry.name)) == session:
                for descriptor in (entry / "fd").iterdir():
                    with contextlib.suppress(OSError):
                        yield os.readlink(descriptor)


if __name__ == "__main__":
    main()
