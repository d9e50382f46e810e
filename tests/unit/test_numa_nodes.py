"""Which NUMA nodes may a process use, on made-up machines, and which of them is chosen?"""

from pathlib import Path

import pytest

from flatout.machine.control_groups import text_of
from flatout.machine.numa_nodes import numa_nodes, parse_cpu_list
from flatout.machine.read import read_machine
from flatout.records.as_json import from_json, to_json
from flatout.records.ceilings import Machine, differences
from flatout.records.numa import chosen, why_no_choice
from made_up_machine import numa_tree

TWO = {0: ("0-3,8-11", 64), 1: ("4-7,12-15", 64)}
GPUS = {"0000:17:00.0": ("GPU-aaaa", 0), "0000:ca:00.0": ("GPU-bbbb", 1)}


def read(root, allowed=range(16), **environment):
    return numa_nodes(frozenset(allowed), environment, root)


def test_each_node_has_its_processors_and_its_memory(tmp_path):
    first, second = read(numa_tree(tmp_path, TWO))
    assert first.number == 0 and first.cpus == (0, 1, 2, 3, 8, 9, 10, 11)
    assert second.number == 1 and second.cpus == (4, 5, 6, 7, 12, 13, 14, 15)
    assert first.memory_bytes == second.memory_bytes == 64 * 2**30
    assert first.memory_allowed and second.memory_allowed and not first.near_accelerator
    assert why_no_choice([first, second]) is None and chosen([first, second]) == first


def test_only_processors_that_the_process_may_use_count_and_most_of_them_win(tmp_path):
    nodes = read(numa_tree(tmp_path, TWO), allowed=range(3, 8))
    assert [node.cpus for node in nodes] == [(3,), (4, 5, 6, 7)]
    assert chosen(nodes).number == 1
    one = read(tmp_path, allowed=range(4))
    assert [node.number for node in one] == [0] and "of one NUMA node" in why_no_choice(one)


def test_a_node_of_memory_alone_is_none_to_run_on(tmp_path):
    nodes = read(numa_tree(tmp_path, {**TWO, 2: ("", 512)}))
    assert [node.number for node in nodes] == [0, 1]


def test_memory_that_the_control_group_keeps_away_is_not_chosen(tmp_path):
    nodes = read(numa_tree(tmp_path, TWO, memory="1"))
    assert [node.memory_allowed for node in nodes] == [False, True]
    assert why_no_choice(nodes) is None and chosen(nodes).number == 1


def test_where_no_memory_is_near_there_is_no_choice(tmp_path):
    nodes = read(numa_tree(tmp_path, TWO, memory="2-3"))
    assert "control group" in why_no_choice(nodes)
    bare = read(numa_tree(tmp_path / "bare", {0: ("0-3", 0), 1: ("4-7", 0)}))
    assert why_no_choice(bare) is not None


def test_of_nodes_with_as_many_processors_the_larger_one_is_chosen(tmp_path):
    assert chosen(read(numa_tree(tmp_path, {0: ("0-3", 32), 1: ("4-7", 64)}))).number == 1


@pytest.mark.parametrize(
    ("visible", "near"),
    [({}, 0), ({"CUDA_VISIBLE_DEVICES": "1"}, 1), ({"CUDA_VISIBLE_DEVICES": "1,0"}, 1),
     ({"CUDA_VISIBLE_DEVICES": "GPU-bbbb"}, 1), ({"CUDA_VISIBLE_DEVICES": "GPU-b"}, 1),
     ({"CUDA_VISIBLE_DEVICES": ""}, None), ({"CUDA_VISIBLE_DEVICES": "7"}, None),
     ({"CUDA_VISIBLE_DEVICES": "-1"}, None), ({"CUDA_VISIBLE_DEVICES": "MIG-1"}, None)],
)  # fmt: skip
def test_of_equal_nodes_that_of_the_first_visible_gpu_is_chosen(tmp_path, visible, near):
    nodes = read(numa_tree(tmp_path, TWO, gpus=GPUS), **visible)
    assert [node.number for node in nodes if node.near_accelerator] == ([] if near is None else [near])
    assert chosen(nodes).number == (near or 0)


def test_a_gpu_whose_node_the_firmware_does_not_say_is_near_to_none(tmp_path):
    nodes = read(numa_tree(tmp_path, TWO, gpus={"0000:17:00.0": ("GPU-a", -1)}))
    assert not any(node.near_accelerator for node in nodes)


def test_where_the_kernel_names_no_nodes_there_are_none(tmp_path):
    assert read(tmp_path) == [] and why_no_choice([]) is not None


def test_the_machine_has_them_where_there_are_several_and_they_survive_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr("flatout.machine.read.allowed_cpus", lambda: frozenset(range(16)))
    two = read_machine(root=numa_tree(tmp_path / "two", TWO))
    one = read_machine(root=numa_tree(tmp_path / "one", {0: ("0-15", 128)}))
    assert [node.number for node in two.numa_nodes] == [0, 1] and one.numa_nodes == ()
    assert from_json(Machine, to_json(two)) == two
    old = {key: value for key, value in to_json(two).items() if key != "numa_nodes"}
    assert from_json(Machine, old).numa_nodes == (), "a record of before"
    assert differences(two, one) == ("NUMA nodes of the usable cores: `1` here, `2` there",)
    assert two.machine_key() == one.machine_key()


def test_this_machine_is_read_as_the_kernel_lists_it():
    online = parse_cpu_list(text_of(Path("/sys/devices/system/node/online")))
    assert {node.number for node in read_machine().numa_nodes} <= online
