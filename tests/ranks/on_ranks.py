"""Runs a scenario as one process and on ranks: forked processes that meet as those of `flatout run --ranks` do."""

from __future__ import annotations

import faulthandler
import functools
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from flatout.frameworks.pytorch.parallel import ranks as ranks_module
from flatout.frameworks.pytorch.parallel.ranks import Ranks
from flatout.frameworks.pytorch.seams.calls import Calls
from flatout.records.ranks import RankConfig, RankPlace

from . import scenarios

Scenario = Callable[[], Any]
LIMIT_S = 40.0
PARALLEL = Path(ranks_module.__file__).parent
LOADED = ["torch._dynamo", *(f"{ranks_module.__package__}.{path.stem}" for path in sorted(PARALLEL.glob("*.py")))]
"""What the process has loaded from which ranks are forked: a fork costs a tenth of a second, these modules a half."""


@functools.cache  # the same for all modes and numbers of ranks
def alone(scenario: Scenario) -> Any:
    """What the scenario gives in one process, which draws what a fresh one would."""
    return _in_processes(1, scenario, None)[0]


def on_ranks(world: int, scenario: Scenario, mode: str = "auto", **sending: Any) -> list[Any]:
    """What it gives on each rank; a refusal is given as its three parts. `sending`: how gradients are sent."""
    store = dist.TCPStore("localhost", 0, None, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    return _in_processes(world, scenario, store.port, mode, sending)


def _in_processes(
    world: int,
    scenario: Scenario,
    port: int | None,
    mode: str = "auto",
    sending: Mapping[str, Any] = MappingProxyType({}),
) -> list[Any]:
    context = multiprocessing.get_context("forkserver")  # a clean process to fork from: PyTorch is loaded once
    context.set_forkserver_preload(LOADED)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(rank, world, port, scenario, folder, mode, dict(sending)))
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(LIMIT_S)
        hung = [process.pid for process in processes if process.is_alive()]
        for process in processes:
            process.kill()
        stacks = [path.read_text() for path in sorted(Path(folder).glob("stack-*"))]
        assert not hung, "\n".join((f"{len(hung)} of {world} ranks hang", *stacks))
        return [_found(Path(folder), rank) for rank in range(world)]


def _found(folder: Path, rank: int) -> Any:
    refusal = folder / f"refusal-{rank}.json"
    if refusal.exists():
        return json.loads(refusal.read_text())
    found = torch.load(folder / f"found-{rank}.pt", weights_only=False)
    if isinstance(found, BaseException):
        raise found
    return found


def _rank(
    rank: int, world: int, port: int | None, scenario: Scenario, folder: str, mode: str, sending: dict[str, Any]
) -> None:
    faulthandler.dump_traceback_later(LIMIT_S - 5, file=os.open(f"{folder}/stack-{rank}", os.O_CREAT | os.O_WRONLY))
    torch.set_num_threads(1)
    torch.manual_seed(67280421310721)
    scenarios.THIS_RANK[0] = rank
    calls = Calls()
    try:
        if port is not None:
            place = RankPlace(rank=rank, local=rank, world=world, local_world=world, host="localhost", port=port)
            ranks = Ranks(place, RankConfig(num_ranks=world, folder=folder, mode=mode, hang_timeout_s=20.0), calls)
            vars(ranks.group.communication).update(sending)
            ranks.begin()
        found = scenario()
        if port is not None:
            ranks.confirm()
        if port is not None and isinstance(found, scenarios.Trained):
            found.communication = ranks.group.communication
    except BaseException as problem:
        if os.environ.get("TB"):
            import traceback

            traceback.print_exc()
        found = RuntimeError(f"rank {rank}: {type(problem).__name__}: {problem}")
    torch.save(found, f"{folder}/found-{rank}.pt")
    os._exit(0)
