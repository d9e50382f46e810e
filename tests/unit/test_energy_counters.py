"""Which counters are found, what is missing for others, and what does the meter note? On recorded trees and fakes."""

import os
from pathlib import Path

import pytest

from flatout.machine import energy_counters, gpu_watch
from flatout.machine.energy_counters import Counter, EnergyMeter, Found, find
from flatout.machine.gpu_watch import NvmlError
from nvml_library import NvmlLibrary


def zone(root, place, name, joules=1.0):
    folder = root / "sys/class/powercap" / place
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{round(joules * 1e6)}\n")
    (folder / "max_energy_range_uj").write_text("262143328850\n")


@pytest.fixture
def server(tmp_path):
    """Two packages with their parts, memory of each, and what holds them all."""
    zone(tmp_path, "intel-rapl:0", "package-0", 100.0)
    zone(tmp_path, "intel-rapl:0:0", "core", 60.0)
    zone(tmp_path, "intel-rapl:0:1", "dram", 10.0)
    zone(tmp_path, "intel-rapl:1", "package-1", 200.0)
    zone(tmp_path, "intel-rapl:2", "psys", 900.0)
    return tmp_path


def test_packages_are_counted_once_and_what_they_hold_or_what_holds_them_is_not(server):
    found = find(server, {})
    assert {one.name: one.read() for one in found.counters} == {"package-0": 100.0, "package-1": 200.0}
    assert found.counters[0].range_joules == pytest.approx(262143.32885)
    assert found.missing == ()


def test_without_counters_it_is_said_that_a_virtual_machine_may_hide_them(tmp_path):
    found = find(tmp_path, {})
    assert found.counters == ()
    assert len(found.missing) == 1 and found.missing[0].startswith("RAPL: no counters in `/sys/class/powercap`")


def test_where_root_alone_may_read_the_file_and_the_permission_are_named(server, monkeypatch):
    def refuse(self, **_):
        if self.name == "energy_uj":
            raise PermissionError(13, "Permission denied", str(self))
        return open(self).read()

    monkeypatch.setattr(Path, "read_text", refuse)
    found = find(server, {})
    assert found.counters == () and len(found.missing) == 1
    assert f"`{server}/sys/class/powercap/intel-rapl:0/energy_uj` is for root alone" in found.missing[0]
    assert "sudo chmod a+r" in found.missing[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_really_may_not_be_read_is_named(server):
    (server / "sys/class/powercap/intel-rapl:0/energy_uj").chmod(0)
    assert "is for root alone" in find(server, {}).missing[0]


# -- GPUs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def gpus(tmp_path, monkeypatch):
    """A machine with two GPUs, and the library of their driver."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    library = NvmlLibrary(millijoules=[1500, 2500], uuids=["GPU-3a", "GPU-7f"])
    monkeypatch.setattr(gpu_watch, "_loaded", lambda: library)
    return tmp_path, library


@pytest.mark.parametrize(
    ("visible", "shown"),
    [
        ({}, {"gpu-0": 1.5, "gpu-1": 2.5}),
        ({"CUDA_VISIBLE_DEVICES": "1"}, {"gpu-1": 2.5}),
        ({"CUDA_VISIBLE_DEVICES": "GPU-7f, 0"}, {"gpu-GPU-7f": 2.5, "gpu-0": 1.5}),
        ({"CUDA_VISIBLE_DEVICES": ""}, {}),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, {}),
    ],
)
def test_gpus_that_are_to_be_seen_are_read_in_joules(gpus, visible, shown):
    found = find(gpus[0], visible)
    assert {one.name: one.read() for one in found.counters} == shown
    assert not any(reason.startswith("GPU") for reason in found.missing)


def test_without_the_library_it_is_said_where_it_comes_from(gpus, monkeypatch):
    def loaded():
        raise NvmlError(0, "it comes with the driver")

    monkeypatch.setattr(gpu_watch, "_loaded", loaded)
    assert find(gpus[0], {}).missing[-1] == "GPU: it comes with the driver"


def test_what_the_driver_refuses_is_said_in_its_words(gpus):
    gpus[1].refuses = "nvmlDeviceGetTotalEnergyConsumption"
    assert find(gpus[0], {}).missing[-1] == "GPU: Not Supported"


def test_a_script_is_not_charged_for_gpus_beside_its_own(gpus):
    clock, library = Clock(), gpus[1]
    meter = EnergyMeter(found=Found(counters=find(gpus[0], {}).counters), now=clock)
    for _ in range(20):
        meter.note()
        clock.now_s += 1.0
        library.millijoules = [one + 1000 for one in library.millijoules]
    assert meter.joules("cuda").joules == pytest.approx(2 * 19)
    assert meter.joules("cuda", gpus=("GPU-7f",)).joules == pytest.approx(19)
    assert meter.joules("cuda", gpus=("MIG-1",)).joules == pytest.approx(2 * 19), "not known by that name"


# -- the meter -----------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def counter(read, name="package-0", **changes):
    return Counter(**{**dict(name=name, device="cpu", source="RAPL", update_s=1e-3, read=read), **changes})


def noted(clock, instants, *counters):
    meter = EnergyMeter(found=Found(counters=counters), now=clock)
    meter.open()
    for now_s in instants:
        clock.now_s = now_s
        meter.note()
    return meter


def test_a_run_is_what_was_used_from_the_first_note_to_the_last_however_often_the_counter_began_anew():
    clock = Clock()
    wrapping = counter(lambda: (60.0 + 40.0 * clock.now_s) % 65.0, range_joules=65.0)
    assert noted(clock, [1.0, 2.0, 3.0, 3.25], wrapping).joules().joules == pytest.approx(130.0)


def test_between_two_notes_the_power_is_constant():
    clock = Clock()
    meter = noted(clock, [1.0, 2.0, 4.0], counter(lambda: 40.0 * clock.now_s))
    assert meter.joules(None, 0.5, 3.0).joules == pytest.approx(100.0)
    assert "was not read before and after" in meter.joules(None, 3.0, 4.5).why_not


def test_what_is_too_short_for_its_counter_or_for_how_often_it_was_read_has_no_energy():
    clock = Clock()
    meter = noted(clock, [0.5], counter(lambda: clock.now_s, update_s=0.1))
    assert "0.5 s are too short for package-0: 1 s are needed" in meter.joules().why_not
    meter = noted(Clock(), [0.5], counter(lambda: clock.now_s))
    assert "0.4 s are too short" in meter.joules(None, 0.1, 0.5, every_s=0.1).why_not


@pytest.mark.parametrize("breaks", [RuntimeError("GPU is lost"), None])
def test_a_counter_that_is_lost_or_goes_back_on_the_way_leaves_the_sum_unknown(breaks):
    clock = Clock()

    def lost():
        if clock.now_s > 1.5 and breaks is not None:
            raise breaks
        return 9.0 - clock.now_s if clock.now_s > 1.5 else 9.0

    meter = noted(clock, [1.0, 2.0, 3.0], counter(lambda: 3 * clock.now_s), counter(lost, "gpu-0", device="gpu"))
    reason = "GPU is lost" if breaks else "the counter went back"
    assert meter.joules().why_not == f"gpu-0 is no longer readable: {reason}"
    assert meter.joules("cpu").joules == pytest.approx(9.0)


def test_a_counter_that_stands_still_or_begins_anew_tells_nothing():
    clock = Clock()
    assert noted(clock, [1.0, 2.0], counter(lambda: 7.0)).joules().why_not == "package-0 stood still"
    clock = Clock()
    readings = iter([5000.0, 5010.0, 3.0, 13.0])
    meter = noted(clock, [1.0, 2.0, 3.0], counter(lambda: next(readings), range_joules=262143.0))
    assert "the counter began anew" in meter.joules().why_not


def test_a_run_on_the_processor_is_not_charged_for_an_idle_gpu():
    clock = Clock()
    gpu = counter(lambda: 40 * clock.now_s, "gpu-0", device="gpu", update_s=0.1)
    meter = noted(clock, [0.2, 0.4, 0.6], counter(lambda: 3 * clock.now_s), gpu)
    assert meter.joules("cpu").joules == pytest.approx(1.8)
    assert "too short for gpu-0" in meter.joules("cuda").why_not and "too short for gpu-0" in meter.joules().why_not


def test_notes_may_be_asked_for_more_often_than_they_are_wanted():
    clock = Clock()
    meter = noted(clock, [], one := counter(lambda: clock.now_s))
    for _ in range(10):
        clock.now_s += 0.3
        meter.note(at_most_every_s=1.0)
    assert len(one.at_s) == 3


def test_without_counters_the_meter_does_nothing_and_says_why():
    with EnergyMeter(found=Found(missing=("RAPL: none",))) as meter:
        assert meter._thread is None
    assert meter.joules().why_not == "RAPL: none"


def test_as_a_context_it_notes_by_itself():
    with EnergyMeter(0.001, found=Found(counters=(one := counter(lambda: 1.0),))) as meter:
        while len(one.at_s) < 3:
            pass
    assert meter._thread is not None and not meter._thread.is_alive()


def test_this_machine_can_be_looked_at():
    found = energy_counters.find()
    assert found.counters or found.missing
