"""Does `numa` bind threads and memory to one node, as the kernel itself says, and change nothing where it may not?"""

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from flatout.frameworks.pytorch import session as sessions  # noqa: E402
from flatout.frameworks.pytorch.levers import numa, registry  # noqa: E402
from flatout.frameworks.pytorch.observe import memory_policy  # noqa: E402
from flatout.frameworks.pytorch.observe.memory_policy import PREFERRED, Policy  # noqa: E402
from flatout.records.numa import NumaNode  # noqa: E402
from handmade import FACTS, MACHINE  # noqa: E402
from made_up_machine import numa_tree  # noqa: E402

LEVER = registry()["numa"]
GIB = 2**30
NODES = (
    NumaNode(number=0, cpus=(0, 1), memory_bytes=16 * GIB),
    NumaNode(number=1, cpus=(2, 3), memory_bytes=16 * GIB),
)
SEVERAL = replace(MACHINE, numa_nodes=NODES)


@pytest.fixture(autouse=True)
def undecided(monkeypatch):
    for name in numa.PLACES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def kernel(monkeypatch, tmp_path):
    """A machine of two nodes, and a kernel that keeps what it is told; `refuses` names what it does not let happen."""
    fake = SimpleNamespace(policy=Policy(), cpus={number: {0, 1, 2, 3} for number in (0, 71, 72)}, refuses=set())

    def refuse(what):
        if what in fake.refuses:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    def choose(policy):
        refuse("policy")
        fake.policy = policy

    def present():
        refuse("look")
        return fake.policy

    def set_affinity(task, cpus):
        refuse("affinity")
        if task == 73:
            raise ProcessLookupError
        fake.cpus[task] = {*cpus}

    monkeypatch.setattr(numa, "ROOT", numa_tree(tmp_path, {0: ("0-1", 16), 1: ("2-3", 16)}))
    monkeypatch.setattr(memory_policy, "choose", choose)
    monkeypatch.setattr(memory_policy, "present", present)
    monkeypatch.setattr(os, "sched_getaffinity", lambda task: fake.cpus[task])
    monkeypatch.setattr(os, "sched_setaffinity", set_affinity)
    tasks = {memory_policy.TASKS: ["71", "72", "73"]}
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: tasks[path] if path in tasks else listdir(path))
    return fake


def new_session():
    return SimpleNamespace(kept={}, unavailable={})


# -- engaged -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "node", "cpus"), [({}, 0, {0, 1}), ({"node": 1}, 1, {2, 3})])
def test_every_thread_and_the_memory_are_bound_to_the_node_and_freed_again(kernel, settings, node, cpus):
    session = new_session()
    num_threads = torch.get_num_threads()
    LEVER.engage(session, settings)
    assert kernel.cpus == {0: cpus, 71: cpus, 72: cpus}
    assert kernel.policy == Policy(mode=PREFERRED, nodes=frozenset({node}))
    assert LEVER.evidence(session) == f"2 processors of NUMA node {node}, and its memory first"
    assert torch.get_num_threads() == num_threads, "and so the order in which numbers are added"
    LEVER.release(session)
    assert kernel.cpus == {number: {0, 1, 2, 3} for number in (0, 71, 72)} and kernel.policy == Policy()
    assert LEVER.evidence(session) is None
    LEVER.release(session)


def test_processors_that_the_process_may_not_use_are_not_taken(kernel):
    kernel.cpus[0] = {1, 2, 3}
    session = new_session()
    LEVER.engage(session, {"node": 0})
    assert kernel.cpus[0] == {1} and "1 processor of NUMA node 0" in LEVER.evidence(session)


def test_a_script_that_binds_itself_otherwise_has_its_way_and_that_is_said(kernel):
    session = new_session()
    LEVER.engage(session, {})
    kernel.cpus[0] = {0, 1, 2}
    assert LEVER.evidence(session) is None and "other processors" in session.unavailable["numa"]
    kernel.cpus[0] = {0}
    kernel.policy = Policy(mode=3, nodes=frozenset({0, 1}))
    assert LEVER.evidence(session) is None and "another memory policy" in session.unavailable["numa"]
    kernel.policy = Policy(mode=PREFERRED, nodes=frozenset({0}))
    assert LEVER.evidence(session) and not session.unavailable


# -- not engaged ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refused", ["look", "policy", "affinity"])
def test_without_permission_nothing_is_changed_and_the_reason_is_the_kernels(kernel, refused):
    kernel.refuses = {refused}
    before = {task: {*cpus} for task, cpus in kernel.cpus.items()}
    session = new_session()
    with pytest.raises(sessions.Unavailable, match="Operation not permitted"):
        LEVER.engage(session, {})
    assert kernel.cpus == before and kernel.policy == Policy() and not session.kept


def test_a_run_whose_kernel_refuses_goes_on_and_says_so(kernel, watch, workload):
    kernel.refuses = {"policy"}
    watched = watch({"numa": {}})
    workload("mlp").train(9)
    found, missing = watched.pytorch.evidence()
    assert found == {} and "Operation not permitted" in missing["numa"]


def test_a_policy_that_was_chosen_already_is_left(kernel):
    kernel.policy = Policy(mode=3, nodes=frozenset({0, 1}))
    with pytest.raises(sessions.Unavailable, match="numactl"):
        LEVER.engage(new_session(), {})
    assert kernel.policy.mode == 3


@pytest.mark.parametrize("number", [2, 63])
def test_a_node_that_is_not_there_is_not_taken_for_another(kernel, number):
    with pytest.raises(sessions.Unavailable, match=f"NUMA node {number}"):
        LEVER.engage(new_session(), {"node": number})
    assert kernel.policy == Policy()


def test_a_node_whose_memory_the_control_group_keeps_away_is_not_bound_to(kernel, tmp_path):
    numa_tree(tmp_path, {0: ("0-1", 16), 1: ("2-3", 16)}, memory="1")
    session = new_session()
    with pytest.raises(sessions.Unavailable, match="no memory of NUMA node 0"):
        LEVER.engage(session, {"node": 0})
    LEVER.engage(session, {})
    assert kernel.policy.nodes == {1}


def test_on_a_machine_of_one_node_it_is_not_engaged(kernel, tmp_path, monkeypatch):
    monkeypatch.setattr(numa, "ROOT", numa_tree(tmp_path / "one", {0: ("0-3", 16)}))
    with pytest.raises(sessions.Unavailable, match="of one NUMA node"):
        LEVER.engage(new_session(), {})


def test_threads_that_openmp_binds_by_itself_are_left(kernel, monkeypatch):
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    assert "OMP_PROC_BIND" in LEVER.applies(FACTS, SEVERAL)
    with pytest.raises(sessions.Unavailable, match="OMP_PROC_BIND"):
        LEVER.engage(new_session(), {})


# -- where it applies ----------------------------------------------------------------------------------------------


def test_it_applies_to_one_process_that_fits_into_a_node():
    assert LEVER.applies(FACTS, SEVERAL) is None and LEVER.lacks(SEVERAL) is None
    assert LEVER.settings(FACTS, SEVERAL) == ({},)
    assert "several processes" in LEVER.applies(replace(FACTS, distributed=True), SEVERAL)
    large = LEVER.applies(replace(FACTS, resident_bytes=15 * GIB), SEVERAL)
    assert large == "the training takes 15.0 GiB, of 16.0 GiB that a node has"
    assert LEVER.applies(replace(FACTS, resident_bytes=12 * GIB), SEVERAL) is None


def test_it_does_not_apply_to_one_node_or_without_memory_that_is_allowed():
    assert LEVER.applies(FACTS, MACHINE) == LEVER.lacks(MACHINE) and "one NUMA node" in LEVER.lacks(MACHINE)
    kept = replace(MACHINE, numa_nodes=tuple(replace(node, memory_allowed=False) for node in NODES))
    assert "control group" in LEVER.applies(FACTS, kept)


def test_the_facts_say_how_much_memory_the_process_had_at_its_peak(watch, workload):
    watched = watch()
    workload("mlp").train(9)
    assert 50 * 2**20 < watched.pytorch.facts().resident_bytes < 64 * GIB


# -- the kernel itself ---------------------------------------------------------------------------------------------

REAL = """
import json, os, subprocess, sys, threading
from flatout.frameworks.pytorch.observe import memory_policy
from flatout.frameworks.pytorch.levers.numa import Binding
from flatout.records.numa import NumaNode

def seen():
    policy = memory_policy.present()
    return [policy.mode, sorted(policy.nodes), sorted(os.sched_getaffinity(0))]

def in_a_thread(found):
    thread = threading.Thread(target=lambda: found.append(seen()))
    thread.start(); thread.join()
    return found[-1]

CHILD = "import os; from flatout.frameworks.pytorch.observe import memory_policy as m; p = m.present();" \\
    "print([p.mode, sorted(p.nodes), sorted(os.sched_getaffinity(0))])"
waits = threading.Event()
other = threading.Thread(target=waits.wait)
other.start()
before = seen()
node = int(sys.argv[1])
binding = Binding(NumaNode(number=node, cpus=(before[2][0],), memory_bytes=1))
binding.bind()
bound = {"here": seen(), "a thread": in_a_thread([]),
    "one that was there": sorted(os.sched_getaffinity(other.native_id)),
    "a child": json.loads(subprocess.check_output([sys.executable, "-c", CHILD], text=True)), "wrong": binding.wrong()}
binding.release()
waits.set()
print(json.dumps({"before": before, "bound": bound, "after": seen()}))
"""


def test_the_kernel_itself_binds_threads_memory_and_children_and_frees_them():
    try:
        assert memory_policy.present().is_plain
        (node,) = _allowed_nodes()[:1]
    except OSError as problem:
        pytest.skip(f"the kernel refuses memory policies here: {problem}")
    done = subprocess.run(
        [sys.executable, "-c", REAL, str(node)], capture_output=True, text=True, check=False, env={**os.environ}
    )
    if done.returncode and "Errno 1]" in done.stderr:
        pytest.skip(f"the kernel refuses memory policies here: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    bound, cpu = found["bound"], found["before"][2][0]
    for where in ("here", "a thread", "a child"):
        assert bound[where] == [PREFERRED, [node], [cpu]], where
    assert bound["one that was there"] == [cpu] and bound["wrong"] is None
    assert found["after"] == found["before"] and found["before"][0] == 0


def test_a_node_that_the_kernel_does_not_have_is_refused_by_it():
    try:
        before = memory_policy.present()
    except OSError as problem:
        pytest.skip(f"the kernel refuses memory policies here: {problem}")
    with pytest.raises(OSError):
        memory_policy.choose(Policy(mode=PREFERRED, nodes=frozenset({900})))
    assert memory_policy.present() == before


def test_on_a_machine_whose_calls_are_not_known_none_is_made(monkeypatch):
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(machine="vax"))
    with pytest.raises(OSError, match="vax"):
        memory_policy.present()


def _allowed_nodes():
    from flatout.machine.numa_nodes import parse_cpu_list

    with open("/proc/self/status", encoding="ascii", errors="replace") as status:
        line = next((line for line in status if line.startswith("Mems_allowed_list:")), None)
    if line is None:
        pytest.skip("a kernel without NUMA nodes")
    return sorted(parse_cpu_list(line.partition(":")[2]))
