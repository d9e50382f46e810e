"""Is PyTorch told with all that the user tells it, where that can bring something?"""

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from flatout.frameworks.pytorch.levers import expandable_segments, registry  # noqa: E402
from flatout.frameworks.pytorch.observe import devices  # noqa: E402
from flatout.frameworks.pytorch.observe.memory import memory_of_device  # noqa: E402
from flatout.records.ceilings import Accelerator  # noqa: E402
from flatout.records.facts import DeviceMemory  # noqa: E402
from handmade import FACTS, MACHINE  # noqa: E402

LEVER = registry()["expandable_segments"]
GIB = 2**30
FRAGMENTED = DeviceMemory(allocated_bytes=6 * GIB, reserved_bytes=10 * GIB)
FACTS_GPU = replace(FACTS, device="cuda", device_memory=FRAGMENTED)
MACHINE_GPU = replace(MACHINE, accelerators=(Accelerator(name="GPU", memory_bytes=80 * GIB, compute_capability="9.0"),))


@pytest.fixture
def cuda(monkeypatch):
    """CUDA that is not initialised yet, as PyTorch shows it: what was queued runs at `initialise`."""
    for name in expandable_segments.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    fake = SimpleNamespace(queued=[], told=[], environment=monkeypatch)
    fake.initialise = lambda: [queued() for queued in fake.queued]
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "_lazy_call", fake.queued.append)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", fake.told.append, raising=False)
    return fake


@pytest.mark.parametrize(
    ("own", "told"),
    [
        ({}, ["expandable_segments:True"]),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128,"}, ["max_split_size_mb:128,expandable_segments:True"]),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128", "PYTORCH_ALLOC_CONF": "max_split_size_mb:256"},
            ["max_split_size_mb:128,expandable_segments:True"],
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, []),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, []),
    ],
)
@pytest.mark.parametrize("by_script", [False, True])
def test_pytorch_is_told_as_it_initialises_cuda_with_all_that_the_user_tells_it(own, told, by_script, cuda):
    before = dict(os.environ)
    if by_script:
        LEVER.engage(None, {})
        assert cuda.told == [] and dict(os.environ) == before
    for name, value in own.items():
        cuda.environment.setenv(name, value)
    if not by_script:
        LEVER.engage(None, {})
    cuda.initialise()
    assert cuda.told == told and LEVER.environment({}) == {}


def test_a_pytorch_that_refuses_the_settings_initialises_cuda_all_the_same(cuda, monkeypatch):
    def refuse(text):
        raise ValueError("Unrecognized key")

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", refuse, raising=False)
    LEVER.engage(None, {})
    cuda.initialise()


def test_a_pytorch_without_cuda_is_said_and_the_script_goes_on(watch, workload, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    watched = watch({"expandable_segments": {}})
    workload("mlp").train(8)
    watched.pytorch.engage({})
    proofs, missing = watched.pytorch.evidence()
    assert proofs == {} and "without CUDA" in missing["expandable_segments"]


def test_evidence_is_memory_that_can_grow(monkeypatch):
    segments = [{"is_expandable": False, "total_size": GIB}]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert LEVER.evidence(None) is None
    segments.append({"is_expandable": True, "total_size": 3 * 2**20})
    assert LEVER.evidence(None) == "1 segment that can grow, 3 MiB"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert LEVER.evidence(None) is None


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
    counted = {"allocated_bytes.all.peak": 5, "reserved_bytes.all.peak": 8, "num_alloc_retries": 2}
    monkeypatch.setattr(devices, "in_use", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(devices, "memory_counts", lambda device: counted)
    assert memory_of_device() == DeviceMemory(allocated_bytes=5, reserved_bytes=8, num_retries=2)
    counted.clear()  # another allocator than PyTorch's own counts nothing
    assert memory_of_device() is None


@pytest.mark.gpu
def test_on_a_gpu_memory_grows_in_place(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    code = """
import torch
from flatout.frameworks.pytorch.levers import registry
lever = registry()["expandable_segments"]
lever.engage(None, {})
kept = torch.ones(2**20, device="cuda")
print(lever.evidence(None))
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "can grow" in done.stdout and not done.stderr
