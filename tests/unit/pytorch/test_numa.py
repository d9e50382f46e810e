"""Does `numa` have OpenMP bind its threads to one node, and change nothing where it may not?"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from flatout.frameworks.pytorch.levers import numa, registry
from flatout.records.numa import NumaNode
from handmade import FACTS, MACHINE
from made_up_machine import numa_tree

LEVER = registry()["numa"]
GIB = 2**30
NODES = (
    NumaNode(number=0, cpus=(0, 1), memory_bytes=16 * GIB),
    NumaNode(number=1, cpus=(2, 3), memory_bytes=16 * GIB),
)
SEVERAL = replace(MACHINE, numa_nodes=NODES)


@pytest.fixture(autouse=True)
def two_nodes(monkeypatch, tmp_path):
    for name in numa.PLACES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(numa, "ROOT", numa_tree(tmp_path, {0: ("0-1", 16), 1: ("2-3", 16)}))
    monkeypatch.setattr(os, "sched_getaffinity", lambda task: {0, 1, 2, 3})


@pytest.mark.parametrize(("settings", "places"), [({}, "{0,1}"), ({"node": 1}, "{2,3}"), ({"node": 2}, None)])
def test_the_node_is_one_place_for_all_threads_and_one_that_is_not_there_is_none(settings, places):
    assert LEVER.environment(settings) == ({"OMP_PROC_BIND": "close", "OMP_PLACES": places} if places else {})


def test_processors_that_the_process_may_not_use_are_not_taken(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda task: {1, 2, 3})
    assert LEVER.environment({"node": 0})["OMP_PLACES"] == "{1}"


def test_a_node_whose_memory_the_control_group_keeps_away_is_not_bound_to(tmp_path):
    numa_tree(tmp_path, {0: ("0-1", 16), 1: ("2-3", 16)}, memory="1")
    assert LEVER.environment({"node": 0}) == {} and LEVER.environment({})["OMP_PLACES"] == "{2,3}"


def test_on_a_machine_of_one_node_and_where_threads_are_bound_already_nothing_is_set(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    assert "OMP_PROC_BIND" in LEVER.applies(FACTS, SEVERAL) and LEVER.environment({}) == {}
    monkeypatch.delenv("OMP_PROC_BIND")
    monkeypatch.setattr(numa, "ROOT", numa_tree(tmp_path / "one", {0: ("0-3", 16)}))
    assert LEVER.environment({}) == {}


def test_it_applies_to_one_process_where_there_are_several_nodes_with_memory():
    assert LEVER.applies(FACTS, SEVERAL) is None and LEVER.lacks(SEVERAL) is None
    assert LEVER.settings(FACTS, SEVERAL) == ({},)
    assert "several processes" in LEVER.applies(replace(FACTS, distributed=True), SEVERAL)
    assert LEVER.applies(FACTS, MACHINE) == LEVER.lacks(MACHINE) and "one NUMA node" in LEVER.lacks(MACHINE)
    kept = replace(MACHINE, numa_nodes=tuple(replace(node, memory_allowed=False) for node in NODES))
    assert "control group" in LEVER.applies(FACTS, kept)


REAL = """
import json, os
import torch
from flatout.frameworks.pytorch.levers import registry
torch.ones(2000, 2000) @ torch.ones(2000, 2000)
places = [sorted(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")]
print(json.dumps([torch.get_num_threads(), places, registry()["numa"].evidence(None)]))
"""


def test_openmp_binds_the_thread_that_trains_and_the_number_of_threads_stays(monkeypatch):
    """Of this machine's processors one is taken for a node: what is asked is whether OpenMP does as it is told."""
    monkeypatch.undo()
    cpu = min(os.sched_getaffinity(0))
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two processors")

    def ran(**more):
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
        done = subprocess.run(
            [sys.executable, "-c", REAL], env={**environment, **more}, capture_output=True, text=True, check=True
        )
        return json.loads(done.stdout)

    num, places, told = ran()
    assert told is None and [cpu] not in places
    bound = ran(OMP_PROC_BIND="close", OMP_PLACES=f"{{{cpu}}}")
    assert bound[0] == num, "and so the order in which numbers are added"
    assert bound[1].count([cpu]) >= num and bound[2] == "1 processor of a NUMA node"
