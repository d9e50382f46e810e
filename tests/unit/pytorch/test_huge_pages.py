"""Does `huge_pages` have the kernel asked, unseen by the script, and nowhere where that could do nothing or harm?"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from flatout.frameworks.pytorch.levers import huge_pages, registry  # noqa: E402
from flatout.run.child_process import environment_for, session_files  # noqa: E402
from handmade import FACTS, MACHINE  # noqa: E402

LEVER = registry()["huge_pages"]
FAULTING = replace(FACTS, page_faults_per_step=5000, warm_up_step_s=0.02)

asked = pytest.mark.skipif(LEVER.lacks(replace(MACHINE)) is not None, reason=f"{LEVER.lacks(MACHINE)}")

LOOKING = """
import json, os, subprocess, sys, resource
from types import SimpleNamespace
from flatout.frameworks.pytorch.levers import registry
import torch
def faults():
    begun = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    kept = torch.zeros(64 * 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begun
lever, session = registry()["huge_pages"], SimpleNamespace(page_faults=SimpleNamespace(per_step=1200))
print(json.dumps({
    "faults": faults(),
    "evidence": lever.evidence(session),
    "own": os.environ.get("GLIBC_TUNABLES"),
    "child": subprocess.run(["printenv", "GLIBC_TUNABLES"], capture_output=True, text=True).stdout.strip() or None,
}))
"""


def looked(tmp_path, extra, **options):
    """What a script finds of which the lever wants the variables `extra`."""
    session = tmp_path / "session.json"
    session.write_text(json.dumps(session_files(tmp_path, "run")))
    sources = str(Path(huge_pages.__file__).parents[4])
    environment = environment_for(session, extra, **options)
    environment["PYTHONPATH"] += os.pathsep + sources
    environment["FLATOUT_PYTHONPATH"] = sources
    done = subprocess.run(
        [sys.executable, "-c", LOOKING], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    return json.loads(done.stdout)


@pytest.fixture
def untold(monkeypatch):
    for name in ("GLIBC_TUNABLES", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@asked
def test_fresh_memory_costs_few_faults_and_the_script_sees_nothing_of_the_variable(untold, tmp_path):
    plain, engaged = looked(tmp_path, {}), looked(tmp_path, LEVER.environment({}))
    assert plain["faults"] > 20 * engaged["faults"]  # 256 MiB: 65,536 pages of 4 KiB, 128 of 2 MiB
    assert plain["evidence"] is None
    assert engaged["evidence"].endswith(" MiB of memory in pages of 2 MiB, 1,200 page faults a step")
    assert engaged["own"] is None and engaged["child"] is None


@pytest.mark.slow
@asked
def test_what_the_user_tells_glibc_stays(untold, tmp_path):
    untold.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    environment = LEVER.environment({})
    assert environment == {"GLIBC_TUNABLES": "glibc.malloc.check=0:glibc.malloc.hugetlb=1"}
    seen = looked(tmp_path, environment)
    assert seen["own"] == seen["child"] == "glibc.malloc.check=0" and seen["evidence"]


def test_what_the_user_decides_about_huge_pages_is_not_overridden(untold):
    untold.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=0")
    assert LEVER.environment({}) == {}


@pytest.mark.slow
@asked
def test_under_a_launcher_the_setting_reaches_what_it_starts(untold, tmp_path):
    seen = looked(tmp_path, LEVER.environment({}), passed_on=True)
    assert seen["own"] == seen["child"] == "glibc.malloc.hugetlb=1"


@pytest.mark.slow
@asked
def test_beside_heap_memory_is_in_huge_pages_as_well(untold, tmp_path):
    code = """
import torch
from types import SimpleNamespace
from flatout.frameworks.pytorch.levers import registry
session = SimpleNamespace(page_faults=SimpleNamespace(per_step=None))
registry()["heap"].engage(session, {})
kept = torch.zeros(64 * 2**20)
print({name: registry()[name].evidence(session) for name in ("heap", "huge_pages")})
"""
    environment = {**os.environ, **LEVER.environment({}), "PYTHONPATH": str(Path(huge_pages.__file__).parents[4])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert "'heap': 'large blocks come from the heap'" in done.stdout
    assert " MiB of memory in pages of 2 MiB" in done.stdout


@pytest.mark.parametrize(
    ("mode", "version", "facts", "machine", "environment", "reason"),
    [
        ("madvise", (2, 36), {}, {}, {}, None),
        ("always", (2, 36), {}, {}, {}, "this kernel gives huge pages unasked"),
        ("never", (2, 36), {}, {}, {}, "this kernel gives no huge pages"),
        (None, (2, 36), {}, {}, {}, "this kernel gives no huge pages"),
        ("madvise", (2, 31), {}, {}, {}, "the C library is not glibc 2.35 or later"),
        ("madvise", (), {}, {}, {}, "the C library is not glibc 2.35 or later"),
        ("madvise", (2, 36), {}, {"operating_system": "Darwin 23.0"}, {}, "this is not Linux"),
        ("madvise", (2, 36), {"page_faults_per_step": 3}, {}, {}, "hardly any page faults (3 in a step of 20 ms)"),
        (
            "madvise", (2, 36), {}, {}, {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=2"},
            "the environment decides already (`GLIBC_TUNABLES`)",
        ),
    ],
)  # fmt: skip
def test_it_applies_where_the_kernel_waits_to_be_asked(mode, version, facts, machine, environment, reason, untold):
    untold.setattr(huge_pages, "mode", lambda: mode)
    untold.setattr(huge_pages, "glibc_version", lambda: version)
    for name, value in environment.items():
        untold.setenv(name, value)
    assert LEVER.applies(replace(FAULTING, **facts), replace(MACHINE, **machine)) == reason


def test_the_mode_is_the_word_in_brackets(tmp_path):
    path = tmp_path / "enabled"
    assert huge_pages.mode(path) is None
    path.write_text("always [madvise] never\n")
    assert huge_pages.mode(path) == "madvise"
    path.write_bytes(b"\xff")
    assert huge_pages.mode(path) is None
