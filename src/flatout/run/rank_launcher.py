"""How are the ranks of a run started, and how does the run end? By torch elastic's agent.

A program, started by `run/rank_start.py` with the path of a spec. Each rank lives in a small
process of its own (`enter_rank.py`). In: the spec. Out: the exit status of rank 0, or of the rank that failed first.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flatout.guest import lifeline
from flatout.records.ranks import ELASTIC_LOGS, EXIT_LOST, MEETING, ends_of, pid_file, was_ended
from flatout.run.exit_status import leave_as

ENTER_RANK = Path(__file__).with_name("enter_rank.py")

SHUTDOWN_S = 3600
"""So long ranks that were told to end may take before they are killed: an interrupted script may save for long."""

MONITOR_EVERY_S = 0.05

HANDLED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""Signals that elastic passes on to the ranks, but for those that the user has switched off (`nohup`)."""


def main(place: str) -> None:
    """Start the ranks, wait for them, and end as they ended."""
    path = Path(place)
    spec = json.loads(path.read_text(encoding="utf-8"))
    lifeline.hold(spec["parent"])
    leave_as(_launched(spec, path))


def _launched(spec: dict[str, Any], path: Path) -> int:
    logging.disable(logging.CRITICAL)  # what there is to say, flatout says
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, launch_agent

    if spec["num_nodes"] > 1:  # that the name of another machine is not known is no news
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(SHUTDOWN_S)
    alone = spec["num_nodes"] == 1
    config = LaunchConfig(
        min_nodes=spec["num_nodes"],
        max_nodes=spec["num_nodes"],
        nproc_per_node=len(spec["ranks"]),
        run_id=uuid.uuid4().hex if alone else "flatout",
        rdzv_backend="c10d" if alone else "static",
        rdzv_endpoint="localhost:0" if alone else spec["rdzv_endpoint"],
        rdzv_configs={} if alone else {"rank": spec["node_rank"], "timeout": int(spec["meet_s"])},
        max_restarts=0,
        monitor_interval=MONITOR_EVERY_S,
        signals_to_handle=",".join(name for name in HANDLED if name not in spec["ignored"]),
        logs_specs=DefaultLogsSpecs(log_dir=str(Path(spec["folder"]) / ELASTIC_LOGS)),
    )
    _forward(spec)
    otherwise = 1
    try:
        launch_agent(config, sys.executable, ["-I", "-S", str(ENTER_RANK), str(path)])
        otherwise = 0
    except ChildFailedError as problem:
        otherwise = problem.get_first_failure()[1].exitcode
    except SignalException as came:
        otherwise = -int(came.sigval)
    except Exception as problem:  # noqa: BLE001  torch elastic raises errors of many kinds where nobody is met
        place = Path(spec["folder"]) / MEETING
        place.write_text(f"{type(problem).__name__}: {problem}", encoding="utf-8")
    return _status(Path(spec["folder"]), spec["ranks"], otherwise)


def _status(folder: Path, ranks: Sequence[int], otherwise: int) -> int:
    """The exit status of the run: rank 0's where it ended by itself, else that of the first that failed."""
    found = ends_of(folder, ranks)
    failed = [end for end in found.values() if end["code"] not in (0, EXIT_LOST)]
    first = found.get(0)
    if first is not None and first["code"] != EXIT_LOST and not was_ended(found):
        return int(first["code"])
    return int(min(failed, key=lambda end: end["unix_s"])["code"]) if failed else otherwise


def _forward(spec: dict[str, Any]) -> None:
    """Signals that are no news to the launcher are the script's."""

    def forward(number: int, _: Any) -> None:
        for rank in spec["ranks"]:
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(pid_file(Path(spec["folder"]), rank).read_text()), number)

    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, forward)
