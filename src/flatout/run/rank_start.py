"""How does flatout have a script run on many ranks? It writes down what each is to be, and starts the launcher.

The parent's side. In: the script's command, the session of its processes, and terms. Out: the launcher's command; in
the end, why a rank refused or failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.errors import FlatoutError, MachineError, ScriptError, UsageError
from flatout.records.ceilings import Machine
from flatout.records.ranks import (
    ELASTIC_LOGS,
    MEETING,
    RankConfig,
    ended_file,
    ends_of,
    errors_file,
    failed_by_itself,
    read_json,
    refusal_file,
    was_ended,
)
from flatout.run import isolation
from flatout.run.child_process import tail
from flatout.run.rank_watch import said
from flatout.run.trackers import QUIET_TRACKERS

GRACE_S = 8.0
"""So long a rank that failed waits for rank 0 to end by itself; then all are ended."""

_LAUNCH = "import sys; sys.path.pop(0); from flatout.run.rank_launcher import main; main(sys.argv[1])"
"""Without the working folder among the places of modules: a file of the user's there is not for the launcher."""

_CATCHABLE = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)

_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK",
              "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK", "ROLE_WORLD_SIZE",
              "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")  # fmt: skip
"""Variables that the launcher sets for its own ends; the script gets what the user had in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What the ranks of this machine are.

    Attributes:
        command: The script's.
        environment: What each has beyond the user's environment.
        terms: How the run is divided.
        script_folder: Where the script lies.
        devices: For each rank the GPU that is its own, as `CUDA_VISIBLE_DEVICES` names it; empty without GPUs.
        apart: Whether this is a trial, of which rank 0 as well leaves nothing in the user's folders.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    terms: RankConfig
    script_folder: Path | None
    devices: tuple[str, ...] = ()
    apart: bool = False

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.terms.folder)

    def launcher(self) -> list[str]:
        """Write what each rank is to be; the launcher's command.

        Raises:
            FlatoutError: Ranks above 0 cannot be kept from the user's files here.
            OSError: The run folder cannot be written.
        """
        isolations = [
            isolation.isolate(
                [], folder=Path.cwd(), script_folder=self.script_folder, run_folder=self.folder, scratch=scratch
            )
            for scratch in self._scratches()
        ]
        spec = {
            "command": list(self.command),
            "environment": dict(self.environment),
            "launchers": _LAUNCHERS,
            "hidden": {name: os.environ[name] for name in _LAUNCHERS if name in os.environ},
            "folder": self.terms.folder,
            "ranks": list(self.terms.of_this_node),
            "num_nodes": self.terms.num_nodes,
            "node_rank": self.terms.node_rank,
            "rdzv_endpoint": self.terms.rdzv_endpoint,
            "meet_s": self.terms.hang_timeout_s,
            "isolations": isolations,
            "grace_s": GRACE_S,
            "ignored": [s.name for s in _CATCHABLE if signal.getsignal(s) == signal.SIG_IGN],
            "devices": list(self.devices),
            "of_others": QUIET_TRACKERS,
            "apart": self.apart,
            "stdin": _stdin(),
            "parent": os.getpid(),
        }
        path = self.folder / "ranks.json"
        path.write_text(json.dumps(spec), encoding="utf-8")
        return [sys.executable, "-c", _LAUNCH, str(path)]

    def _scratches(self) -> list[Path]:
        return [self.folder / f"scratch-rank-{rank}" for rank in self.terms.of_this_node]

    def clean(self) -> None:
        """Remove what ranks above 0 have written."""
        for scratch in self.folder.glob("scratch-rank-*"):
            with contextlib.suppress(FlatoutError, OSError):
                isolation.discard(scratch)
        shutil.rmtree(self.folder / ELASTIC_LOGS, ignore_errors=True)
        ends = ends_of(self.folder, self.terms.of_this_node)
        if len(ends) == len(self.terms.of_this_node) and not any(end["code"] for end in ends.values()):
            for path in (*self.folder.glob("output-rank-*.log"), *self.folder.glob("errors-rank-*.log")):
                with contextlib.suppress(OSError):
                    path.unlink()

    def problem(self) -> FlatoutError | None:
        """Why the run could not be divided; None where it could."""
        for rank in self.terms.of_this_node:
            found = read_json(refusal_file(self.folder, rank))
            if found is not None:
                return ScriptError(found["error"], cause=found["cause"], hint=found["hint"])
        with contextlib.suppress(OSError):
            return MachineError(
                f"the machines did not meet at `{self.terms.rdzv_endpoint or 'localhost'}`",
                cause=(self.folder / MEETING).read_text(encoding="utf-8").splitlines()[0],
                hint="machine 0 is to be up, with the port free there and reachable from the others; "
                "`--hang-timeout` says how long to wait",
            )
        for rank, scratch in zip(self.terms.of_this_node, self._scratches(), strict=True):
            end = read_json(ended_file(self.folder, rank))
            told = (rank or self.apart) and end and end["code"] == isolation.EXIT_REFUSED
            refused = isolation.refusal(scratch) if told else None
            if refused is not None:
                return MachineError(
                    "ranks cannot be kept from your files on this machine", cause=refused.cause,
                    hint="allow what the cause names; ranks that write to your folders all at once would damage files",
                )  # fmt: skip
        return None

    def failed(self, ends: Mapping[int, Mapping[str, Any]]) -> tuple[int, str, str] | None:
        """The rank that failed first, where that was not rank 0, how, and the end of what it had to say."""
        own = {rank: end for rank, end in ends.items() if failed_by_itself(end)}
        if was_ended(ends):
            own.pop(0)
        if not own or 0 in own or (0 in ends and ends[0]["code"] == 0):
            return None
        first = min(own, key=lambda rank: float(own[rank]["unix_s"]))
        return first, said(int(own[first]["code"])), tail(errors_file(self.folder, first))


def devices_for(num_ranks: int, machine: Machine, visible: str | None) -> tuple[str, ...]:
    """The GPU of each rank of this machine; empty where it has none.

    Args:
        num_ranks: Ranks of this machine.
        machine: Its GPUs are those that `visible` leaves.
        visible: `CUDA_VISIBLE_DEVICES`, where it is set.

    Raises:
        UsageError: There are fewer GPUs than ranks.
    """
    num = len(machine.accelerators)
    if not num:
        return ()
    if num < num_ranks:
        raise UsageError(
            f"`--ranks {num_ranks}` needs {num_ranks} GPUs, and there {'is' if num == 1 else 'are'} {num}",
            cause="ranks that share a GPU slow each other down, and may run out of its memory",
            hint=f"`--ranks {num}`" + (" or without `--ranks`" if num == 1 else "") + ', or `CUDA_VISIBLE_DEVICES=""` '
            "for the CPU",
        )
    names = [part.strip() for part in visible.split(",")] if visible is not None else [str(n) for n in range(num)]
    return tuple(names[:num_ranks])


def crowding(num_ranks: int, machine: Machine) -> str | None:
    """That ranks share the cores of a CPU, where there are more of them; None where each has its own."""
    if machine.accelerators or num_ranks <= machine.num_cores:
        return None
    cores = f"{machine.num_cores} core{'s' * (machine.num_cores != 1)}"
    return f"{num_ranks} ranks share {cores}: this is no faster than {machine.num_cores}"


def _stdin() -> dict[str, Any] | None:
    """What ranks above 0 read as their stdin: a file and from where on, None in it for what can be read once."""
    with contextlib.suppress(OSError):
        mode = os.fstat(0).st_mode
        if stat.S_ISREG(mode):
            return {"path": os.readlink("/proc/self/fd/0"), "offset": os.lseek(0, 0, os.SEEK_CUR)}
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(0):
            return {"path": None, "offset": 0}
    return None
