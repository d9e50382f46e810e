"""Is the library there where it is asked for, unseen by the script, and away from all that the script starts?"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from flatout.frameworks.pytorch.levers import allocator, registry  # noqa: E402
from flatout.run.launch import environment_for, session_files  # noqa: E402
from handmade import FACTS, MACHINE  # noqa: E402

LEVER = registry()["allocator"]
FAULTING = replace(FACTS, page_faults_per_step=5000, warm_up_step_s=0.02)

LOOKING = """
import json, os, subprocess, sys
def named(environment):
    wanted = ("LD_PRELOAD", "MALLOC_CONF", "TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD")
    return {k: v for k, v in environment.items() if k in wanted or k.startswith("FLATOUT_") and k != "FLATOUT_SESSION"}
print(json.dumps({
    "own": named(os.environ),
    "child": named(json.loads(subprocess.run(
        [sys.executable, "-S", "-c", "import json, os; print(json.dumps(dict(os.environ)))"], capture_output=True
    ).stdout)),
    "mapped": [word for word in ("jemalloc", "tcmalloc") if f"/lib{word}" in open("/proc/self/maps").read()],
    "mapped by the child": b"malloc" in subprocess.run(["cat", "/proc/self/maps"], capture_output=True).stdout,
}))
"""


def looked(tmp_path, extra, **options):
    """What a script of which the levers want `extra` sees of its environment, and what it has loaded."""
    session = tmp_path / "session.json"
    session.write_text(json.dumps(session_files(tmp_path, "run")))
    environment = environment_for(session, extra, **options)
    done = subprocess.run(
        [sys.executable, "-c", LOOKING], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.fixture
def no_preload(monkeypatch):
    for name in ("LD_PRELOAD", "GLIBC_TUNABLES", *(n for told in allocator.TOLD.values() for n in told)):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.fixture(params=allocator.FILES)
def installed(request):
    if allocator.library(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    return request.param


def test_the_script_has_the_library_and_sees_nothing_of_it_nor_do_its_children(installed, no_preload, tmp_path):
    seen = looked(tmp_path, LEVER.environment({"library": installed}))
    assert seen == {"own": {}, "child": {}, "mapped": [installed], "mapped by the child": False}


@pytest.mark.slow
def test_what_the_user_preloads_and_tells_the_allocator_stays(installed, no_preload, tmp_path):
    own = {"LD_PRELOAD": "libm.so.6", "MALLOC_CONF": "narenas:2"}
    for name, value in own.items():
        no_preload.setenv(name, value)
    environment = LEVER.environment({"library": installed})
    assert environment["LD_PRELOAD"].endswith(":libm.so.6") and "MALLOC_CONF" not in environment
    seen = looked(tmp_path, environment)
    assert seen == {"own": own, "child": own, "mapped": [installed], "mapped by the child": False}


@pytest.mark.slow
def test_under_a_launcher_the_library_reaches_what_it_starts(installed, no_preload, tmp_path):
    environment = LEVER.environment({"library": installed})
    seen = looked(tmp_path, environment, passed_on=True)
    assert seen["own"] == seen["child"] == environment and seen["mapped by the child"]


@pytest.mark.slow
def test_without_the_lever_the_users_variables_are_not_touched(no_preload, tmp_path):
    no_preload.setenv("LD_PRELOAD", "libm.so.6")
    assert looked(tmp_path, {})["own"] == {"LD_PRELOAD": "libm.so.6"}


def test_it_keeps_every_bit_and_names_the_library(installed, no_preload, shuffled_epochs):
    script = Path(__file__).resolve().parents[2] / "scripts" / "shuffled_epochs.py"
    code = f"""
import sys
from flatout.frameworks.pytorch.levers import registry
from types import SimpleNamespace
lever = registry()["allocator"]
session = SimpleNamespace(kept={{}}, page_faults=SimpleNamespace(per_step=1200))
lever.engage(session, {{"library": {installed!r}}})
print(lever.evidence(session), file=sys.stderr)
exec(compile(open({str(script)!r}).read(), {str(script)!r}, "exec"))
"""
    loaded = LEVER.environment({"library": installed})
    environment = {**os.environ, **loaded, "PYTHONPATH": str(Path(allocator.__file__).parents[4])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == shuffled_epochs.stdout and "epoch 3" in done.stdout
    assert installed in done.stderr and "is loaded, 1,200 page faults a step" in done.stderr


def test_a_library_that_is_not_there_is_said_and_the_script_goes_on(watch, workload, monkeypatch):
    monkeypatch.setattr(allocator, "library", lambda word: None)
    assert LEVER.environment({"library": "jemalloc"}) == {}
    watched = watch({"allocator": {"library": "jemalloc"}})
    workload("mlp").train(8)
    watched.pytorch.engage({})
    assert watched.pytorch.evidence() == ({}, {"allocator": "jemalloc is not installed"})


def test_only_what_is_installed_is_tried(tmp_path, no_preload):
    assert allocator.library("jemalloc", tmp_path) is None
    for name in ("usr/lib/x86_64-linux-gnu/libtcmalloc.so.4", "usr/lib64/libtcmalloc_minimal.so.4"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    assert allocator.library("tcmalloc", tmp_path) == tmp_path / "usr/lib64/libtcmalloc_minimal.so.4"
    there = {"tcmalloc"}
    no_preload.setattr(allocator, "library", lambda word: Path("/lib") / word if word in there else None)
    assert LEVER.applies(FAULTING, MACHINE) is None
    assert LEVER.settings(FAULTING, MACHINE) == ({"library": "tcmalloc"},)
    there.clear()
    assert LEVER.applies(FAULTING, MACHINE) == "neither jemalloc nor tcmalloc is installed"


@pytest.mark.parametrize(
    ("facts", "machine", "environment", "reason"),
    [
        ({"page_faults_per_step": 3}, {}, {}, "hardly any page faults (3 in a step of 20 ms)"),
        ({}, {"operating_system": "Darwin 23.0"}, {}, "this is not Linux"),
        ({}, {}, {"LD_PRELOAD": "libmimalloc.so"}, "the environment decides already (`LD_PRELOAD`)"),
    ],
)
def test_it_applies_where_page_faults_take_time_and_nobody_else_decides(
    facts, machine, environment, reason, no_preload
):
    no_preload.setattr(allocator, "library", lambda word: Path("/lib") / word)
    for name, value in environment.items():
        no_preload.setenv(name, value)
    assert LEVER.applies(replace(FAULTING, **facts), replace(MACHINE, **machine)) == reason
