"""How do PyTorch's own layers of parallelism use the ranks' groups, which are nobody's default?

They look groups up by name, so ours get one; `torch.distributed.is_initialized()` stays false. In: all ranks. Out: a
`DeviceMesh` over them, of one dimension (all share the rows of a parameter) or of two (the ranks of a machine share
them, machines hold copies).
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed.device_mesh
from torch.distributed import distributed_c10d

from flatout.frameworks.pytorch.parallel.group import Group

c10d: Any = distributed_c10d  # whose tables are private
device_mesh: Any = torch.distributed.device_mesh


class Mesh:
    """The ranks in rows of `width`, which share a parameter's rows; the columns hold copies of each other.

    Args:
        group: All ranks.
        device: Kind of device, for example `cpu`.
        width: Ranks that share a parameter; it divides the world.
    """

    def __init__(self, group: Group, device: torch.device, width: int) -> None:
        self.numbers = itertools.count()
        """Of the parameters that are cut over it, the same on all ranks."""
        group.serve(device)
        device_mesh.get_rank = lambda *_: group.rank  # its own name for it, which scripts do not use
        ranks = torch.arange(group.world)
        if width == group.world:
            self.sharing, groups = group, [group]
            table, names = ranks, None
        else:
            table, names = ranks.view(-1, width), ("replicate", "shard")
            row, column = divmod(group.rank, width)
            self.sharing = group.of_ranks(f"shard{row}", table[row].tolist())
            copies = group.of_ranks(f"replicate{column}", table[:, column].tolist())
            for one in (copies, self.sharing):
                one.serve(device)
            groups = [copies, self.sharing]
        self.devices = device_mesh.DeviceMesh(
            device.type, table, mesh_dim_names=names, _init_backend=False, _rank=group.rank
        )
        self.devices._dim_group_names = [_registered(one) for one in groups]


def _registered(group: Group) -> Any:
    """Give a group a name by which PyTorch finds it."""
    name, processes, world = f"flatout-{group.name}", group.processes, c10d._world
    if processes not in world.pg_names:
        processes._set_group_name(name)
        world.pg_map[processes] = ("gloo", group.store)
        world.pg_names[processes] = name
        world.pg_group_ranks[processes] = {rank: place for place, rank in enumerate(group.ranks)}
        world.pg_backend_config[processes] = "cpu:gloo,cuda:nccl"
        world.pg_to_tag[processes] = f"user:{name}"
        world.tags_to_pg.setdefault(f"user:{name}", []).append(processes)
        c10d._register_process_group(name, processes)
    return world.pg_names[processes]


def forget() -> None:
    """Take all names back: nothing is exchanged any more."""
    world = c10d._world
    device_mesh.get_rank = c10d.get_rank
    for processes in [one for one, name in world.pg_names.items() if str(name).startswith("flatout-")]:
        for table in (world.pg_map, world.pg_group_ranks, world.pg_backend_config):
            table.pop(processes, None)
        world.tags_to_pg.pop(world.pg_to_tag.pop(processes, ""), None)
        c10d._unregister_process_group(world.pg_names.pop(processes))
