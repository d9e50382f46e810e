"""Measuring the ceilings: the conversation with the measuring process, the cache, the choice of sizes."""

from __future__ import annotations

import dataclasses
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

import handmade
from flatout.errors import MachineError
from flatout.frameworks import kind
from flatout.machine import calibrate, foreign_cpu
from flatout.machine.calibrate import NUM_ROUNDS, Measuring
from flatout.machine.read import read_machine
from flatout.records import files
from flatout.records.ceilings import Accelerator, Ceilings

TORCH = kind().package
MACHINE = dataclasses.replace(handmade.MACHINE, num_physical_cores=2, last_level_cache_bytes=2**30)


def measured(**changes):
    found = Ceilings(
        machine=MACHINE,
        framework="pytorch",
        framework_version="1.0",
        device="cpu",
        num_threads=2,
        measured_unix_s=time.time(),
        measuring_s=1.0,
        foreign_cpu_fraction=0.0,
        values=(),
    )
    return dataclasses.replace(found, **changes)


# -- the cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a `measure` that counts its calls instead of measuring."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrate, "version_of", lambda package: "2.13.0+cpu")
    calls = []

    def measure(machine, package, **options):
        calls.append(options)
        return measured(measuring_s=float(len(calls)))

    monkeypatch.setattr(calibrate, "measure", measure)
    return calls


def the_file(tmp_path):
    (found,) = (tmp_path / "cache" / "flatout").iterdir()
    return found


def kept(tmp_path):
    return files.read(Ceilings, the_file(tmp_path), missing="", hint="")


def test_a_second_call_reads_what_the_first_measured(cache):
    assert calibrate.ceilings(TORCH) == calibrate.ceilings(TORCH)
    assert len(cache) == 1


def test_refresh_measures_again_and_replaces_the_file(cache, tmp_path):
    calibrate.ceilings(TORCH)
    assert calibrate.ceilings(TORCH, refresh=True).measuring_s == 2.0
    assert kept(tmp_path).measuring_s == 2.0


@pytest.mark.parametrize("text", ["", '{"format": 1, "mach', '{"format": 1}', "\x00"])
def test_a_torn_file_is_measured_again(cache, tmp_path, text):
    calibrate.ceilings(TORCH)
    the_file(tmp_path).write_text(text)
    assert calibrate.ceilings(TORCH).measuring_s == 2.0
    assert kept(tmp_path).measuring_s == 2.0


def test_another_device_or_version_has_a_file_of_its_own(cache, monkeypatch):
    calibrate.ceilings(TORCH)
    calibrate.ceilings(TORCH, device="cpu")
    monkeypatch.setattr(calibrate, "version_of", lambda package: "2.14.0")
    calibrate.ceilings(TORCH)
    assert len(cache) == 3


@pytest.mark.parametrize(("device", "limit_s"), [("auto", 60.0), ("cpu", 30.0)])
def test_a_gpu_has_more_time_and_room_is_made_before_it_is_measured(cache, monkeypatch, device, limit_s):
    happened = []
    here = dataclasses.replace(MACHINE, accelerators=(Accelerator(name="GPU", memory_bytes=2**37),))
    monkeypatch.setattr(calibrate, "read_machine", lambda: here)
    monkeypatch.setattr(
        calibrate, "measure", lambda machine, package, device, limit_s: (happened.append(limit_s), measured())[1]
    )
    for _ in range(2):
        calibrate.ceilings(TORCH, device=device, before=lambda: happened.append("room"))
    assert happened == ["room", limit_s]


def test_a_cache_that_cannot_be_written_is_no_failure(cache, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert calibrate.ceilings(TORCH).measuring_s == 1.0
    assert calibrate.ceilings(TORCH).measuring_s == 2.0


def test_without_a_home_nothing_is_cached(cache, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert calibrate.cache_path(MACHINE, "pytorch-1", "auto") is None
    assert calibrate.ceilings(TORCH).measuring_s == 1.0


def test_the_cache_is_under_home_by_default_and_its_name_holds_no_separators(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    path = calibrate.cache_path(MACHINE, "pytorch-2.13.0+cu126/odd", "cuda:0")
    assert path.parent == tmp_path / ".cache" / "flatout"
    assert path.name == f"ceilings-{MACHINE.machine_key()}-pytorch-2.13.0+cu126_odd-2-cuda_0-{calibrate.REVISION}.json"


@pytest.mark.parametrize(
    ("age_s", "remarks", "trusted"),
    [(24 * 3600, (), True), (60 * 24 * 3600, (), False), (60, ("disturbed",), True), (3600, ("disturbed",), False)],
)
def test_remarks_shorten_the_trust_in_a_cached_measurement(cache, tmp_path, age_s, remarks, trusted):
    calibrate.ceilings(TORCH)
    files.write(measured(measured_unix_s=time.time() - age_s, remarks=remarks), the_file(tmp_path))
    assert (calibrate.ceilings(TORCH).measuring_s == 1.0) == trusted


def test_a_disturbed_measurement_is_returned_and_replaces_no_undisturbed_one(cache, tmp_path, monkeypatch):
    calibrate.ceilings(TORCH)
    disturbed = measured(remarks=("disturbed",))
    monkeypatch.setattr(calibrate, "measure", lambda machine, package, **options: disturbed)
    assert calibrate.ceilings(TORCH, refresh=True) == disturbed
    assert kept(tmp_path).remarks == ()


# -- no framework


def test_this_interpreter_without_torch_is_told_too():
    with pytest.raises(MachineError, match="`pip install no_such_package_at_all`"):
        calibrate.ceilings(dataclasses.replace(TORCH, name="no_such_package_at_all"))


# -- the conversation, with a measuring process that only pretends

FAKE = """
import json, sys, time
output = open(sys.argv[1], "w", buffering=1)
def write(**line): output.write(json.dumps(line) + "\\n")
print("a library that talks to stdout")
write(kind="start", framework_version="1.0", device="cpu", num_threads=2)
chosen = 0
for request in sys.stdin:
    if request.strip() == "choose":
        chosen += 1
        write(kind="probe", name="memory_copy", unit="B/s", source=f"choice {chosen}")
    write(kind="sample", name="memory_copy", value=float(chosen))
    BODY
    write(kind="end", of=request.strip())
"""


@pytest.fixture
def converse(tmp_path, monkeypatch):
    """Runs one conversation; `fraction` is what others use meanwhile."""

    def run(body="pass", *, fraction=0.0, limit_s=20.0):
        script = tmp_path / "fake.py"
        script.write_text(FAKE.replace("BODY", body))
        monkeypatch.setattr(foreign_cpu, "fraction", lambda *a, **k: fraction)
        with (
            open(tmp_path / "errors", "w") as errors,
            calibrate._child([sys.executable, str(script)], [], errors, limit_s) as child,
        ):
            found = Measuring(child, MACHINE)
            found.converse()
        assert child.process.poll() is not None, "the process is gone"
        return found

    return run


@pytest.mark.parametrize(
    ("fraction", "remarks"),
    [(0.34, ["other processes used 34 % of the CPU while measuring"]), (0.1, []), (None, [])],
)
def test_sizes_are_chosen_once_and_rounds_follow_however_busy_the_machine_is(converse, fraction, remarks):
    found = converse(fraction=fraction)
    (copy,) = found.found()
    assert (copy.num_samples, copy.source) == (NUM_ROUNDS + 1, "choice 1")
    assert found.start["framework_version"] == "1.0"
    assert [remark.partition(":")[0] for remark in found.remarks(20.0)] == remarks


def test_at_the_limit_the_process_is_killed_and_what_it_has_found_counts(converse):
    found = converse("if request.strip() == 'round': time.sleep(60)", limit_s=2.0)
    assert [c.num_samples for c in found.found()] == [2]
    assert found.remarks(2.0) == (f"stopped at the limit of 2 s with 1 of {NUM_ROUNDS + 1} rounds",)


def test_a_process_that_dies_in_a_round_leaves_what_it_has_found(converse):
    assert [len(samples) for samples in converse("if request.strip() == 'round': sys.exit(1)").samples.values()] == [2]


@pytest.mark.parametrize(
    ("said", "error", "hint"),
    [
        ("ModuleNotFoundError: No module named 'torch'", "not installed", "pip install torch"),
        (
            "Traceback\nImportError: libfoo.so",
            "could not be measured",
            "calibration.py",
        ),
        ("", "within 3 s", "quiet"),
    ],
)
def test_a_process_that_leaves_nothing_is_a_machine_error_that_says_why(said, error, hint):
    found = calibrate._nothing(TORCH, said, 3.0)
    assert error in found.error
    assert hint in found.hint


def test_measure_says_what_the_process_said_last(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'something broke' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(MachineError) as caught:
        calibrate.measure(MACHINE, TORCH, device="auto", limit_s=5.0)
    assert "something broke" in caught.value.cause


def test_the_process_is_told_threads_and_a_buffer_beyond_the_caches(monkeypatch):
    told = []
    monkeypatch.setattr(calibrate, "_child", lambda command, options, *_: told.append(options) or nullcontext())

    def options(**changes):
        with calibrate.measuring_process(dataclasses.replace(MACHINE, **changes), TORCH, "auto", limit_s=1.0):
            return dict(zip(("device", "threads", "bytes"), told[-1], strict=True))

    assert options(last_level_cache_bytes=2**28)["bytes"] == str(2**29)
    assert options(last_level_cache_bytes=None)["bytes"] == str(2**28)
    assert options(memory_limit_bytes=2**30)["bytes"] == str(2**26), "a sixteenth of what may be used"
    assert options()["threads"] == "2"
    assert options(num_cores=16, num_physical_cores=8)["threads"] == "16,8"


# -- choosing sizes, with a stopwatch that does as it is told


@pytest.fixture
def calibration():
    pytest.importorskip("torch", reason="the measuring process needs torch")
    from flatout.frameworks.pytorch.observe import calibration

    return calibration


class ToldStopwatch:
    """Says for every call what `call_s` says for its work."""

    window_s = 0.05

    def __init__(self, call_s, device="cpu"):
        self.call_s = call_s
        self.device = SimpleNamespace(type=device)
        self.asked = []

    def seconds_per_call(self, probe, window_s):
        self.asked.append(probe.work)
        return self.call_s(probe.work)


@pytest.fixture
def candidates(calibration):
    def make(work):
        return calibration.Probe(name="x", unit="FLOP/s", work=work, source="made up", call=lambda: None)

    return lambda *works: [(work, lambda work=work: make(work)) for work in works]


def test_sizes_grow_until_the_rate_stops_rising_and_the_largest_of_equals_wins(calibration, candidates):
    told = ToldStopwatch(lambda work: work / min(work, 4.0) / 1e3)
    assert calibration.grow(candidates(1.0, 2.0, 4.0, 8.0, 16.0, 32.0), told).work == 16.0
    assert max(told.asked) == 16.0


def test_a_rate_that_falls_again_does_not_win(calibration, candidates):
    told = ToldStopwatch(lambda work: 0.001 * (2.0 if work > 2.0 else 1.0) * work)
    assert calibration.grow(candidates(1.0, 2.0, 4.0, 8.0), told).work == 2.0


def test_no_size_is_tried_that_would_take_too_long(calibration, candidates):
    told = ToldStopwatch(lambda work: 0.2 * work)
    assert calibration.grow(candidates(1.0, 8.0), told).work == 1.0
    assert told.asked and max(told.asked) == 1.0


def test_on_a_gpu_a_first_call_that_loads_a_library_for_seconds_says_nothing_of_the_size(calibration, candidates):
    class Cold(ToldStopwatch):
        def seconds_per_call(self, probe, window_s):
            return super().seconds_per_call(probe, window_s) if probe.work in self.asked else self.first(probe)

        def first(self, probe):
            self.asked.append(probe.work)
            return 2.0

    works = candidates(1.0, 8.0, 64.0)
    assert calibration.grow(works, Cold(lambda work: 0.001, device="cuda")).work == 64.0
    assert calibration.grow(works, Cold(lambda work: 0.001)).work == 1.0, "there nothing is loaded for so long"


@pytest.mark.parametrize(
    ("device", "kinds"),
    [
        ("cuda", ["streams", "launches", "matmuls", "transfers", "convolutions"]),
        ("cpu", ["matmuls", "convolutions", "streams", "launches"]),
    ],
)
def test_on_a_gpu_what_is_searched_for_comes_last_and_once_a_type(calibration, monkeypatch, device, kinds):
    seen, cuda = [], calibration.torch.cuda
    properties = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(calibration, "best_of", lambda alternatives, stopwatch: seen.append(alternatives))
    stopwatch = calibration.Stopwatch(device=calibration.torch.device(device), window_s=0.05)
    assert list(calibration.choose_probes(stopwatch, 2**20)) == []
    makes = [(len(ways), getattr(ways[0][0][1], "func", ways[0][0][1]).__qualname__) for ways in seen]
    named = [(num, name.partition(".")[0]) for num, name in makes]
    assert list(dict.fromkeys(name for _, name in named)) == kinds
    assert {num for num, name in named if name == "convolutions"} == {1 if device == "cuda" else 3}


def test_what_the_device_refuses_is_left_out_and_the_rest_is_kept(calibration, candidates):
    def refuse():
        raise RuntimeError("not implemented for 'BFloat16'")

    told = ToldStopwatch(lambda work: 0.001)
    assert calibration.grow([(1.0, refuse)], told) is None
    assert calibration.grow([*candidates(1.0), (2.0, refuse)], told).work == 1.0
    assert calibration.best_of([[(1.0, refuse)]], told) is None


def test_the_better_of_two_ways_wins(calibration, candidates):
    told = ToldStopwatch(lambda work: 0.001)
    assert calibration.best_of([candidates(1.0), candidates(3.0), candidates(2.0)], told).work == 3.0


def test_a_rate_is_work_over_time_and_a_launch_is_time_over_operations(candidates):
    (_, make), *_ = candidates(100.0)
    assert make().value(2.0) == 50.0
    assert dataclasses.replace(make(), unit="s").value(2.0) == 0.02


def test_a_matrix_product_counts_two_operations_per_multiply_add(calibration):
    cpu, kind, layout = calibration.torch.device("cpu"), calibration.torch.float32, calibration.torch.channels_last
    work, make = calibration.matmuls(cpu, kind, "float32")[0]
    assert work == make().work == 2 * 512**3
    work, make = calibration.convolutions(cpu, kind, "float32", layout)[0]
    assert work == make().work == 2 * (4 * 256 * 14 * 14) * (3 * 3 * 256)


def test_a_copy_counts_what_is_read_and_what_is_written(calibration):
    share = calibration.shared_memory(calibration.torch.device("cpu"), 3 * 2**20)
    sizes = [(3 * 2**20, share)]
    for ((work, make),) in calibration.streams("memory_copy", sizes, ("copy", "triad")):
        assert make().work == work == 3 * 2**20, "all of the memory is read or written once"
    (alone,), (two,) = calibration.streams("memory_in_place", sizes, ("`relu_`", "`mul_`"))
    assert alone[0] == alone[1]().work == 2 * 3 * 2**20
    assert two[0] == two[1]().work == 3 * 3 * 2**19


def test_memory_is_touched_once_for_all_probes(calibration):
    share = calibration.shared_memory(calibration.torch.device("cpu"), 3 * 2**20)
    thirds, halves = share(3), share(2)
    assert [len(part) for part in (*thirds, *halves)] == [2**18] * 3 + [3 * 2**17] * 2
    assert thirds[0].data_ptr() == halves[0].data_ptr() and thirds[0].data_ptr() != thirds[1].data_ptr()


def test_on_a_gpu_calls_are_planned_and_it_is_waited_for_once_a_window(calibration, candidates, monkeypatch):
    happened = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            happened.append("record")

        def synchronize(self):
            happened.append("wait")

        def elapsed_time(self, end):
            return 30.0  # milliseconds

    monkeypatch.setattr(calibration.torch.cuda, "Event", Event)
    monkeypatch.setattr(calibration.torch.cuda, "synchronize", lambda device: happened.append("idle"))
    probe = dataclasses.replace(candidates(1.0)[0][1](), call=lambda: happened.append("call"), call_s=0.01)
    stopwatch = calibration.Stopwatch(device=calibration.torch.device("cuda", 0), window_s=0.03)
    assert stopwatch.seconds_per_call(probe, 0.03) == pytest.approx(0.01)
    assert happened == ["idle", "record", "call", "call", "call", "record", "wait"]


# -- the real thing


@pytest.mark.slow
def test_this_machine_can_be_measured(calibration, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(foreign_cpu, "fraction", lambda *a, **k: None)  # neighbours would only prolong the test
    found = calibrate.ceilings(TORCH, device="cpu", limit_s=120.0)
    arithmetic = {"matmul_float32", "matmul_bfloat16", "conv_float32", "conv_bfloat16"}
    memory = {"memory_copy", "memory_cache", "memory_in_place"}
    assert {c.name for c in found.values} == {*arithmetic, *memory, "kernel_launch"}
    assert found.machine == read_machine()
    assert found.framework_version == calibration.torch.__version__
    assert found.get("kernel_launch").unit == "s"
    assert {c.num_samples for c in found.values} == {2 * NUM_ROUNDS + 1}
    assert found.foreign_cpu_fraction is None
    assert calibrate.ceilings(TORCH, device="cpu") == found


@pytest.mark.gpu
@pytest.mark.slow
def test_a_gpu_can_be_measured(calibration, tmp_path, monkeypatch):
    if not calibration.torch.cuda.is_available():
        pytest.skip("no CUDA device")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = calibrate.ceilings(TORCH, device="cuda", limit_s=60.0)
    names = {c.name for c in found.values}
    assert {"matmul_float32", "matmul_float16", "conv_float16", "memory_copy", "kernel_launch"} <= names
    assert {"host_to_device", "device_to_host"} <= names
    assert found.device == calibration.torch.cuda.get_device_name()
    assert ("matmul_tf32" in names) == (calibration.torch.cuda.get_device_capability() >= (8, 0))
