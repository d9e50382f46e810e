"""Does `heap` keep what steps free, in a process of its own, and nowhere where it could do nothing or harm?"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from flatout.frameworks.pytorch.levers import heap, registry  # noqa: E402
from flatout.frameworks.pytorch.observe.memory import PageFaults  # noqa: E402
from flatout.frameworks.pytorch.session import Unavailable  # noqa: E402
from flatout.guest import c_library  # noqa: E402
from flatout.records.facts import NOT_LOOKED_AT  # noqa: E402
from handmade import FACTS, MACHINE  # noqa: E402

LEVER = registry()["heap"]
FAULTING = replace(FACTS, page_faults_per_step=5000, warm_up_step_s=0.02)

LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_glibc = pytest.mark.skipif(c_library.why_not_glibc() is not None, reason=f"{c_library.why_not_glibc()}")

TRAINING = """
import json, os, resource, torch
from torch import nn
from flatout.frameworks.pytorch.adapter import PyTorch
from flatout.frameworks.pytorch.levers import heap
from flatout.guest import c_library
torch.set_num_threads(1)
torch.manual_seed(0)
LEVERS = json.loads(os.environ["LEVERS"])
before = {*os.environ}
class Listener:
    def on_step(self, step): pass
    def on_update(self): pass
    def on_pass_end(self): pass
    def on_failure(self, stage, problem): raise problem
pytorch = PyTorch()
pytorch.prepare(LEVERS, trial=True)
pytorch.attach(Listener())
model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten(), nn.LazyLinear(10))
images, losses = torch.randn(16, 3, 48, 48), []
model(images)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
def step():
    optimizer.zero_grad()
    loss = model(images).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
def faults():
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        step()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun) / 5
for _ in range(8):
    step()
found = {"faults": faults(), "fact": pytorch.facts().page_faults_per_step, "evidence": pytorch.evidence()}
found["losses"], found["environment"] = losses, sorted({*os.environ} - before)
found["mapped"] = c_library.is_mapping_of_its_own(c_library.PROBE_BYTES)
print(json.dumps(found))
"""


def trained(levers, **environment):
    done = subprocess.run(
        [sys.executable, "-c", TRAINING], capture_output=True, text=True, timeout=120, check=True,
        env={**os.environ, "LEVERS": json.dumps(levers), **environment},
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.slow
@needs_glibc
@pytest.mark.skipif(
    LARGE_PAGES.exists() and "[always]" in LARGE_PAGES.read_text(), reason="this kernel hands out large pages"
)
def test_steps_take_next_to_no_fresh_memory_and_keep_every_bit():
    plain, kept = trained({}), trained({"heap": {}})
    assert plain["fact"] > 1000 and plain["faults"] > 20 * (kept["faults"] + 10)
    assert plain["mapped"] and not kept["mapped"]
    assert plain["losses"] == kept["losses"]
    assert kept["environment"] == plain["environment"] and kept["fact"] is None
    proofs, missing = kept["evidence"]
    assert proofs["heap"].startswith("large blocks come from the heap, ") and missing == {}


@needs_glibc
def test_a_share_of_the_free_memory_bounds_what_is_kept(monkeypatch):
    told = []

    class Library:
        def mallopt(self, *what):
            told.append(what)
            return 1

    monkeypatch.setattr(heap, "c_library", Library)
    for free_bytes, bound in ((4 * 2**30, 2**30), (64 * 2**30, -1)):
        monkeypatch.setattr(
            "flatout.machine.control_groups.free_memory_bytes", lambda free_bytes=free_bytes: free_bytes
        )
        LEVER.engage(None, {})
        assert told == [(heap.M_MMAP_MAX, 0), (heap.M_TRIM_THRESHOLD, bound)]
        told.clear()


def test_without_glibc_it_is_said_and_the_script_goes_on(watch, workload, monkeypatch):
    monkeypatch.setattr(heap, "why_not_glibc", lambda: "another allocator is in place of glibc's")
    with pytest.raises(Unavailable, match="another allocator"):
        LEVER.engage(None, {})
    watched = watch({"heap": {}})
    workload("mlp").train(8)
    watched.pytorch.engage({})
    assert watched.pytorch.evidence() == ({}, {"heap": "another allocator is in place of glibc's"})
    assert watched.pytorch.facts().page_faults_per_step is not None


@pytest.mark.parametrize(
    ("facts", "machine", "environment", "reason"),
    [
        ({}, {}, {}, None),
        ({"warm_up_step_s": 2.0}, {}, {}, "hardly any page faults (5,000 in a step of 2,000 ms)"),
        ({"page_faults_per_step": 0}, {}, {}, "hardly any page faults (0 in a step of 20 ms)"),
        ({"page_faults_per_step": None}, {}, {}, NOT_LOOKED_AT),
        ({}, {"operating_system": "Darwin 23.0"}, {}, "this is not Linux"),
        ({}, {}, {"MALLOC_TRIM_THRESHOLD_": "1"}, "the environment decides already (`MALLOC_TRIM_THRESHOLD_`)"),
        ({}, {}, {"GLIBC_TUNABLES": "glibc.malloc.top_pad=9"}, "the environment decides already (`GLIBC_TUNABLES`)"),
        ({}, {}, {"GLIBC_TUNABLES": "glibc.malloc.check=1"}, None),
        ({}, {}, {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, "the environment decides already (`LD_PRELOAD`)"),
        ({}, {}, {"LD_PRELOAD": "/opt/libgomp.so"}, None),
    ],
)
def test_it_applies_where_page_faults_take_time_and_nobody_else_decides(
    facts, machine, environment, reason, monkeypatch
):
    for name in (*c_library.VARIABLES, "GLIBC_TUNABLES", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert LEVER.applies(replace(FAULTING, **facts), replace(MACHINE, **machine)) == reason


def test_page_faults_of_a_step_are_those_of_the_calmer_of_the_last_two(monkeypatch):
    counts = iter([100, 900, 930, 1000, 50, 60])
    monkeypatch.setattr(
        "flatout.frameworks.pytorch.observe.memory.resource.getrusage",
        lambda who: type("Usage", (), {"ru_minflt": next(counts)}),
    )
    faults = PageFaults()
    seen = []
    for first in (True, False, False, False, True, False):
        faults.note(first=first)
        seen.append(faults.per_step)
    assert seen == [None, None, 30, 30, None, None]


@pytest.mark.parametrize(("num", "promised"), [(None, 1.0), (0, 1.0), (5000, 1 / 0.75), (19_000, 20.0), (30_000, 20.0)])
def test_it_promises_what_page_faults_take(num, promised):
    facts = replace(FAULTING, page_faults_per_step=num)
    assert LEVER.promise(facts) == pytest.approx(promised)
