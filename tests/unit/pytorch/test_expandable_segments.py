"""Is PyTorch told in time, with all that the user tells it, and nobody else?"""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from flatout.frameworks.pytorch import session as sessions  # noqa: E402
from flatout.frameworks.pytorch.levers import expandable_segments, registry  # noqa: E402
from flatout.frameworks.pytorch.observe.memory import memory_of_device  # noqa: E402
from flatout.records.ceilings import Accelerator  # noqa: E402
from flatout.records.facts import DeviceMemory  # noqa: E402
from handmade import FACTS, MACHINE  # noqa: E402

LEVER = registry()["expandable_segments"]
GIB = 2**30
FRAGMENTED = DeviceMemory(allocated_bytes=6 * GIB, reserved_bytes=10 * GIB, total_bytes=80 * GIB)
FACTS_GPU = replace(FACTS, device="cuda", device_memory=FRAGMENTED)
MACHINE_GPU = replace(MACHINE, accelerators=(Accelerator(name="GPU", memory_bytes=80 * GIB, compute_capability="9.0"),))


@pytest.fixture
def cuda(monkeypatch):
    """CUDA that is not initialised yet, as PyTorch shows it: what was queued runs at `initialise`."""
    for name in expandable_segments.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    fake = SimpleNamespace(queued=[], told=[], environment=monkeypatch)

    def initialise():
        while fake.queued:
            fake.queued.pop(0)()

    fake.initialise = initialise
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "_lazy_call", fake.queued.append)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", fake.told.append, raising=False)
    return fake


def new_session():
    return SimpleNamespace(kept={})


def test_pytorch_is_told_as_it_initialises_cuda_and_no_variable_is_set(cuda):
    before = dict(os.environ)
    LEVER.engage(new_session(), {})
    assert cuda.told == []
    cuda.initialise()
    assert cuda.told == ["expandable_segments:True"]
    assert LEVER.environment({}) == {} and dict(os.environ) == before


def test_what_the_user_tells_pytorch_is_told_again(cuda):
    cuda.environment.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128,garbage_collection_threshold:0.8,")
    session = new_session()
    LEVER.engage(session, {})
    cuda.initialise()
    LEVER.release(session)
    own = "max_split_size_mb:128,garbage_collection_threshold:0.8"
    assert cuda.told == [f"{own},expandable_segments:True", f"{own},expandable_segments:False"]


def test_the_newest_variable_is_the_one_that_counts(cuda):
    cuda.environment.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128")
    cuda.environment.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:256")
    assert expandable_segments.joined("True") == "max_split_size_mb:256,expandable_segments:True"


def test_a_script_that_sets_the_variable_before_it_uses_cuda_is_heard(cuda):
    LEVER.engage(new_session(), {})
    cuda.environment.setenv("PYTORCH_CUDA_ALLOC_CONF", "roundup_power2_divisions:4")
    cuda.initialise()
    assert cuda.told == ["roundup_power2_divisions:4,expandable_segments:True"]


@pytest.mark.parametrize("own", ["expandable_segments:False", "backend:cudaMallocAsync"])
def test_a_script_that_decides_before_it_uses_cuda_has_its_way(cuda, own):
    session = new_session()
    LEVER.engage(session, {})
    cuda.environment.setenv("PYTORCH_CUDA_ALLOC_CONF", own)
    cuda.initialise()
    LEVER.release(session)
    assert cuda.told == []
    with pytest.raises(sessions.Unavailable, match="the script decides itself"):
        LEVER.engage(new_session(), {})


def test_released_before_cuda_is_used_nothing_was_ever_told(cuda):
    session = new_session()
    LEVER.engage(session, {})
    LEVER.release(session)
    cuda.initialise()
    assert cuda.told == [] and session.kept == {}


def test_a_pytorch_that_refuses_the_settings_initialises_cuda_all_the_same(cuda, monkeypatch):
    def refuse(text):
        raise ValueError("Unrecognized key")

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", refuse, raising=False)
    session = new_session()
    LEVER.engage(session, {})
    cuda.initialise()
    LEVER.release(session)


def test_a_pytorch_without_cuda_is_said_and_the_script_goes_on(watch, workload, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    watched = watch({"expandable_segments": {}})
    workload("mlp").train(8)
    watched.pytorch.engage({})
    assert watched.pytorch.evidence() == ({}, {"expandable_segments": "this PyTorch is built without CUDA"})


def test_evidence_is_memory_that_can_grow(monkeypatch):
    segments = [{"is_expandable": False, "total_size": GIB}]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert LEVER.evidence(new_session()) is None
    segments.append({"is_expandable": True, "total_size": 3 * 2**20})
    assert LEVER.evidence(new_session()) == "1 segment that can grow, 3 MiB"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert LEVER.evidence(new_session()) is None


@pytest.mark.parametrize(
    ("facts", "machine", "variable", "reason"),
    [
        ({}, {}, "max_split_size_mb:128", None),
        ({"device": "cpu"}, {}, "", "no CUDA device is used"),
        ({}, {"operating_system": "Windows 11"}, "", "this is not Linux"),
        ({}, {}, "expandable_segments:True", "the environment decides already (`PYTORCH_ALLOC_CONF`)"),
        ({}, {}, "backend:cudaMallocAsync", "the environment decides already (`PYTORCH_ALLOC_CONF`)"),
        ({"device_memory": None}, {}, "", "looked at in a trial only"),
        (
            {"device_memory": replace(FRAGMENTED, allocated_bytes=9 * GIB)},
            {},
            "",
            "the GPU's memory is hardly fragmented (10 % of what is held is free at the peak)",
        ),
        ({"device_memory": replace(FRAGMENTED, allocated_bytes=9 * GIB, num_retries=2)}, {}, "", None),
    ],
)
def test_it_applies_where_memory_is_fragmented_and_nobody_else_decides(facts, machine, variable, reason, cuda):
    cuda.environment.setenv("PYTORCH_ALLOC_CONF", variable)
    assert LEVER.applies(replace(FACTS_GPU, **facts), replace(MACHINE_GPU, **machine)) == reason


def test_what_the_allocator_counted_becomes_a_fact(monkeypatch):
    assert memory_of_device() is None, "no GPU is used here"
    counted = {"allocated_bytes.all.peak": 5, "reserved_bytes.all.peak": 8, "num_alloc_retries": 2, "num_ooms": 1}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: counted)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: SimpleNamespace(total_memory=100))
    assert memory_of_device() == DeviceMemory(
        allocated_bytes=5, reserved_bytes=8, total_bytes=100, num_retries=2, num_failures=1
    )
    counted.clear()  # another allocator than PyTorch's own counts nothing
    assert memory_of_device() is None


@pytest.mark.gpu
def test_on_a_gpu_memory_grows_in_place(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    import subprocess
    import sys

    code = """
from types import SimpleNamespace
import torch
from flatout.frameworks.pytorch.levers import registry
lever, session = registry()["expandable_segments"], SimpleNamespace(kept={})
lever.engage(session, {})
kept = torch.ones(2**20, device="cuda")
print(lever.evidence(session))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "can grow" in done.stdout
