"""How does one rank live? This small process starts it, waits for it and says how it ended.

A standalone program, run by the launcher for each rank as `python -I -S enter_rank.py SPEC.json`. It gives a rank above
0 a world in which it is silent and writes nothing of the user's (`enter_isolation.py`), hides the launcher's variables
from the script, and outlives the script: so a launcher that ends all ranks when one fails does not interrupt rank 0 in
the middle of its end. Standard library only.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))


def _environment(spec: dict[str, Any]) -> dict[str, str]:
    """The script's environment: without the launcher's variables, with ours."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    for name in spec["launchers"]:
        found.pop(name, None)
    found.update(spec["hidden"])
    found.update(spec["environment"])
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found["FLATOUT_RANK"] = " ".join([str(os.getpid()), *(os.environ[name] for name in names)])
    return found


def _adopt(path: str, parent: int) -> None:
    """Have the isolated process live with this one."""
    with open(path) as file:
        found = json.load(file)
    found["parent"] = parent
    _write(path, found)


def _start(spec: dict[str, Any], rank: int, local: int) -> int:
    """Fork the script's process, in a world of its own for ranks above 0."""
    command, parent = spec["command"], os.getpid()
    if rank:
        isolation = spec["isolations"][local]
        _adopt(isolation[-2], parent)
        command = [*isolation, *command]
    pid = os.fork()
    if pid:
        return pid
    try:
        _die_with_parent()
        if os.getppid() != parent:  # it died just now
            os._exit(1)
        environment = _environment(spec)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        if rank:
            nothing = os.open(os.devnull, os.O_RDONLY)
            place = os.path.join(spec["folder"], f"output-rank-{rank}.log")
            output = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(nothing, 0)
            os.dup2(output, 1)
            os.dup2(output, 2)
        os.execvpe(command[0], command, environment)
    except BaseException as problem:  # noqa: BLE001  this is a forked copy, which must not go on as its parent
        os.write(2, f"flatout: rank {rank} did not start: {problem}\n".encode())
    os._exit(127)


def _write(path: str, value: Any) -> None:
    part = path + ".part"
    with open(part, "w") as file:
        json.dump(value, file)
    os.rename(part, path)


def _wait_for_first(spec: dict[str, Any]) -> None:
    """A rank that fails lets rank 0 end by itself, which may be writing what it has trained."""
    until = time.monotonic() + spec["grace_s"]
    while time.monotonic() < until and not os.path.exists(os.path.join(spec["folder"], "ended-0.json")):
        time.sleep(0.02)


def main() -> NoReturn:
    """Start the script, wait for it, and end as it ended."""
    with open(sys.argv[1]) as file:
        spec = json.load(file)
    _die_with_parent()
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # they come to the whole group, and so to the script
    pid = _start(spec, rank, local)
    while True:
        try:
            _, status = os.waitpid(pid, 0)
            break
        except InterruptedError:
            continue
    code = os.waitstatus_to_exitcode(status)
    _write(os.path.join(spec["folder"], f"ended-{rank}.json"), {"code": code, "unix_s": time.time()})
    if rank and code:
        _wait_for_first(spec)
    os._exit(code if code >= 0 else 128 - code)


main()
