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

MOST_LIVES = 3
"""So often a rank above 0 is started, where it ends before training."""


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))


def _environment(spec: dict[str, Any], rank: int) -> dict[str, str]:
    """The script's environment: without the launcher's variables, with ours."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
    for name in spec["launchers"]:
        found.pop(name, None)
    found.update(spec["hidden"])
    found.update(spec["environment"])
    if rank or spec["apart"]:
        for name, value in spec["of_others"].items():
            found.pop(name, None)
            if value is not None:
                found[name] = value
    devices = spec["devices"]
    if devices:
        found["CUDA_VISIBLE_DEVICES"] = devices[int(os.environ["LOCAL_RANK"])]
    found["FLATOUT_RANK_FOLDER"] = spec["folder"]
    if spec["stdin"] and spec["stdin"]["path"] is None:
        found["FLATOUT_RANK_STDIN"] = "once"
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found["FLATOUT_RANK"] = " ".join([str(os.getpid()), *(os.environ[name] for name in names)])
    return found


def _prepared(spec: dict[str, Any], isolation: list[str], hidden: list[str], life: int) -> list[str]:
    """The isolation's words, for a process that lives with this one and does not see what is hidden.

    Ranks with a GPU each have one `/dev/shm`: NCCL takes ranks that see another device there for those of different
    containers, and sends through sockets what NVLink or memory would carry a hundred times as fast.
    Source: `ncclTopoCheckP2p` and `shmCanConnect` of NCCL, which compare `shmDev`.
    """
    *words, path, separator = isolation
    with open(path) as file:
        found = json.load(file)
    found["parent"] = os.getpid()
    found["hidden"] = hidden
    found["shares_shm"] = bool(spec["devices"])
    if life:  # what the former one has written is not for this one
        found["scratch"] += f"-{life}"
        os.mkdir(found["scratch"])
        path = os.path.join(found["scratch"], os.path.basename(path))
    _write(path, found)
    return [*words, path, separator]


def _start(spec: dict[str, Any], rank: int, isolation: list[str] | None) -> int:
    """Fork the script's process, in a world of its own for ranks above 0."""
    command, parent = [*(isolation or []), *spec["command"]], os.getpid()
    stdin = 0 if rank == spec["ranks"][0] else _stdin(spec)
    pid = os.fork()
    if pid:
        if stdin:
            os.close(stdin)
        return pid
    try:
        _die_with_parent()
        if os.getppid() != parent:  # it died just now
            os._exit(1)
        environment = _environment(spec, rank)
        with open(f"{spec['folder']}/pid-{rank}", "w") as file:
            file.write(str(os.getpid()))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_IGN if number.name in spec["ignored"] else signal.SIG_DFL)
        if stdin:
            os.dup2(stdin, 0)
        if rank:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND
            os.dup2(os.open(f"{spec['folder']}/output-rank-{rank}.log", flags, 0o644), 1)
            os.dup2(os.open(f"{spec['folder']}/errors-rank-{rank}.log", flags, 0o644), 2)
        os.execvpe(command[0], command, environment)
    except BaseException as problem:  # noqa: BLE001  this is a forked copy, which must not go on as its parent
        os.write(2, f"flatout: rank {rank} did not start: {problem}\n".encode())
    os._exit(127)


def _stdin(spec: dict[str, Any]) -> int:
    """The file that the first rank reads as well; nothing in the place of what can be read once."""
    found = spec["stdin"] or {"path": None, "offset": 0}
    file = os.open(found["path"] or os.devnull, os.O_RDONLY)
    os.lseek(file, found["offset"], os.SEEK_SET)
    return file


def _write(path: str, value: Any) -> None:
    part = path + ".part"
    try:
        with open(part, "w") as file:
            json.dump(value, file)
        os.rename(part, path)
    except OSError:  # a full disk: nobody learns of it
        return


def _first_is(spec: dict[str, Any], *states: str) -> bool:
    return any(os.path.exists(f"{spec['folder']}/{state}") for state in states)


def _begins_anew(spec: dict[str, Any], rank: int, code: int, num: int) -> list[str] | None:
    """What is hidden from this rank in its next life; None where there is none.

    A rank that ends before training, while rank 0 gets there, has met what rank 0 was just making.
    """
    if (
        rank == spec["ranks"][0]
        or not code
        or num >= MOST_LIVES
        or _first_is(spec, f"trains-{rank}", f"refusal-{rank}.json")
    ):
        return None
    leader = spec["ranks"][0]
    while not _first_is(spec, f"trains-{leader}", f"ended-{leader}.json"):
        time.sleep(0.02)
    if not _first_is(spec, f"trains-{leader}"):
        return None
    try:
        with open(f"{spec['folder']}/anew-{rank}.json") as file:
            return list(json.load(file)["hide"])
    except (OSError, ValueError, KeyError):
        return []


def _wait_for_first(spec: dict[str, Any]) -> None:
    """A rank that fails lets rank 0 end by itself, which may be writing what it has trained."""
    until = time.monotonic() + spec["grace_s"]
    while time.monotonic() < until and not _first_is(spec, f"ended-{spec['ranks'][0]}.json"):
        time.sleep(0.02)


def _ended(pid: int) -> int:
    while True:
        try:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        except InterruptedError:
            continue


def _end_what_is_left() -> None:
    """Kill all that a script has left in the session of this process, as ranks of its own that wait for it."""
    own = os.getpid()
    if os.getsid(0) != own:  # the session is somebody else's
        return
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(name) != own and os.getsid(int(name)) == own:
                os.kill(int(name), signal.SIGKILL)
        except OSError:  # it has ended
            continue


def main() -> NoReturn:
    """Start the script, wait for it, and end as it ended."""
    with open(sys.argv[1]) as file:
        spec = json.load(file)
    _die_with_parent()
    rank, local = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # they come to the whole group, and so to the script
    hidden: list[str] | None = []
    code = num = 0
    while hidden is not None:
        isolation = _prepared(spec, spec["isolations"][local], hidden, num) if rank or spec["apart"] else None
        code = _ended(_start(spec, rank, isolation))
        if rank or _first_is(spec, f"refusal-{rank}.json"):  # what rank 0 leaves by itself stays, as in a plain run
            _end_what_is_left()
        num += 1
        hidden = _begins_anew(spec, rank, code, num)
    _write(f"{spec['folder']}/ended-{rank}.json", {"code": code, "unix_s": time.time()})
    if rank and code:
        _wait_for_first(spec)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
