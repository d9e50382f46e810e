"""Which counters are found, what is missing for others, and what does the meter note? On recorded trees and fakes."""

import os
import sys
import types
from pathlib import Path

import pytest

from flatout.machine import energy_counters
from flatout.machine.energy_counters import EnergyMeter, Found, Probe, find
from flatout.records.energy import Counter


def zone(root, place, name, joules=1.0, *, range_joules=262143.328850):
    folder = root / "sys/class/powercap" / place
    folder.mkdir(parents=True)
    (folder / "name").write_text(f"{name}\n")
    (folder / "energy_uj").write_text(f"{round(joules * 1e6)}\n")
    (folder / "max_energy_range_uj").write_text(f"{round(range_joules * 1e6)}\n")
    return folder / "energy_uj"


@pytest.fixture
def server(tmp_path):
    """Two packages with their parts, memory of each, and what holds them all."""
    zone(tmp_path, "intel-rapl:0", "package-0", 100.0)
    zone(tmp_path, "intel-rapl:0:0", "core", 60.0)
    zone(tmp_path, "intel-rapl:0:1", "dram", 10.0)
    zone(tmp_path, "intel-rapl:1", "package-1", 200.0)
    zone(tmp_path, "intel-rapl:1:0", "dram", 20.0)
    zone(tmp_path, "intel-rapl:2", "psys", 900.0)
    return tmp_path


def test_packages_and_memory_are_counted_once_and_what_they_hold_or_what_holds_them_is_not(server):
    found = find(server, {})
    shown = {probe.counter.name: probe.read() for probe in found.probes}
    assert shown == {"package-0": 100.0, "dram-0": 10.0, "package-1": 200.0, "dram-1": 20.0}
    assert {probe.counter.device for probe in found.probes} == {"cpu", "memory"}
    assert found.probes[0].counter.range_joules == pytest.approx(262143.32885)
    assert found.probes[0].counter.resolution_s == 1e-3
    assert found.missing == ()


def test_without_counters_it_is_said_that_a_virtual_machine_may_hide_them(tmp_path):
    found = find(tmp_path, {})
    assert found.probes == ()
    assert len(found.missing) == 1 and found.missing[0].startswith("RAPL: no counters in `/sys/class/powercap`")


def test_where_root_alone_may_read_the_file_and_the_permission_are_named(server, monkeypatch):
    def refuse(file):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(energy_counters, "_uj", refuse)
    found = find(server, {})
    assert found.probes == () and len(found.missing) == 1
    assert f"`{server}/sys/class/powercap/intel-rapl:0/energy_uj` is for root alone" in found.missing[0]
    assert "sudo chmod a+r" in found.missing[0] and "zeusd" in found.missing[0]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_really_may_not_be_read_is_named(server):
    (server / "sys/class/powercap/intel-rapl:0/energy_uj").chmod(0)
    assert "is for root alone" in find(server, {}).missing[0]


def test_as_zeus_mounts_it_into_containers_it_is_found(tmp_path):
    folder = tmp_path / "zeus_sys/class/powercap/intel-rapl:0"
    folder.mkdir(parents=True)
    (folder / "name").write_text("package-0\n")
    (folder / "energy_uj").write_text("5000000\n")
    found = find(tmp_path, {})
    assert [probe.read() for probe in found.probes] == [5.0]
    assert found.probes[0].counter.range_joules is None


# -- GPUs ----------------------------------------------------------------------------------------------------------


class NVIDIAGPUs:
    """What `zeus.device.get_gpus()` returns, as far as it is asked."""

    def __init__(self, shown_mj, *, volta=True, problem=None):
        self._shown_mj, self._volta, self._problem = shown_mj, volta, problem

    def __len__(self):
        return len(self._shown_mj)

    def supports_get_total_energy_consumption(self, index):
        return self._volta

    def get_total_energy_consumption(self, index):
        if self._problem is not None:
            raise self._problem
        return self._shown_mj[index]


@pytest.fixture
def zeus(monkeypatch):
    """A module `zeus.device` that returns what it is given."""

    def install(*, gpus=None, cpus=None, problem=None):
        def get(what):
            def getter():
                if problem is not None:
                    raise problem
                return what

            return getter

        device = types.ModuleType("zeus.device")
        device.get_gpus, device.get_cpus = get(gpus), get(cpus)
        monkeypatch.setitem(sys.modules, "zeus.device", device)
        monkeypatch.setattr(energy_counters, "_has_zeus", lambda: True)

    return install


@pytest.fixture
def gpu_machine(tmp_path):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    return tmp_path


def gpu_reasons(found):
    return [reason for reason in found.missing if reason.startswith("GPU")]


def test_gpus_are_read_through_zeus_in_joules(gpu_machine, zeus):
    zeus(gpus=NVIDIAGPUs([1500, 2500]))
    found = find(gpu_machine, {})
    assert {p.counter.name: p.read() for p in found.probes} == {"gpu-0": 1.5, "gpu-1": 2.5}
    assert found.probes[0].counter.source == "NVML through zeus" and found.probes[0].counter.resolution_s == 0.1
    assert gpu_reasons(found) == []


def test_without_zeus_it_is_said_what_to_install(gpu_machine, monkeypatch):
    monkeypatch.setattr(energy_counters, "_has_zeus", lambda: False)
    assert "pip install 'flatout[energy]'" in gpu_reasons(find(gpu_machine, {}))[0]


def test_a_gpu_before_volta_has_no_counter(gpu_machine, zeus):
    zeus(gpus=NVIDIAGPUs([1], volta=False))
    assert gpu_reasons(find(gpu_machine, {})) == ["GPU: gpu-0 has no energy counter: NVIDIA's have one from Volta on"]


def test_what_the_driver_refuses_is_said_in_its_words(gpu_machine, zeus):
    zeus(gpus=NVIDIAGPUs([1], problem=RuntimeError("Insufficient Permissions\nmore")))
    assert gpu_reasons(find(gpu_machine, {})) == ["GPU: gpu-0: Insufficient Permissions"]
    zeus(problem=ValueError("invalid literal for int() with base 10: 'GPU-1'"))
    assert "GPU-1" in gpu_reasons(find(gpu_machine, {}))[0]


def test_a_driver_without_a_device_is_a_container_that_was_not_given_one(tmp_path):
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    assert "docker run --gpus all" in gpu_reasons(find(tmp_path, {}))[0]


def test_where_no_gpu_is_to_be_seen_nothing_is_said_of_it(tmp_path, gpu_machine, zeus):
    zeus(gpus=NVIDIAGPUs([1]))
    assert gpu_reasons(find(gpu_machine, {"CUDA_VISIBLE_DEVICES": ""})) == []
    assert len(find(gpu_machine, {"CUDA_VISIBLE_DEVICES": ""}).probes) == 0


def test_the_daemon_is_asked_where_it_serves_the_processor(server, zeus):
    shown = types.SimpleNamespace(cpu_mj=7000.0, dram_mj=None)

    class Cpus:
        def __len__(self):
            return 1

        def get_total_energy_consumption(self, index):
            return shown

    zeus(cpus=Cpus())
    found = find(server, {"ZEUSD_SOCK_PATH": "/var/run/zeusd.sock"})
    assert [(p.counter.name, p.counter.source, p.read()) for p in found.probes] == [
        ("package-0", "RAPL through zeusd", 7.0)
    ]


# -- the meter -----------------------------------------------------------------------------------------------------


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def probe(read, name="package-0", **changes):
    fields = dict(name=name, device="cpu", source="RAPL", resolution_s=1e-3, resolution_joules=1e-6, range_joules=None)
    return Probe(counter=Counter(**{**fields, **changes}), read=read)


def noted(meter, clock, instants):
    meter.open()
    for now_s in instants:
        clock.now_s = now_s
        meter.note()
    return meter


def test_a_run_is_what_was_used_from_the_first_note_to_the_last():
    clock = Clock()
    meter = EnergyMeter(found=Found(probes=(probe(lambda: 40.0 * clock.now_s % 65.0, range_joules=65.0),)), now=clock)
    assert noted(meter, clock, [1.0, 2.0, 3.0, 3.25]).joules().joules == pytest.approx(130.0)
    assert meter.log().series[0].at_s == (0.0, 1.0, 2.0, 3.0, 3.25)


def test_a_run_that_is_too_short_for_its_counter_has_no_energy():
    clock = Clock()
    meter = EnergyMeter(found=Found(probes=(probe(lambda: clock.now_s, resolution_s=0.1),)), now=clock)
    assert "0.5 s are too short" in noted(meter, clock, [0.5]).joules().why_not


def test_a_counter_that_is_lost_on_the_way_leaves_the_sum_unknown_and_its_parts_known():
    clock = Clock()

    def lost():
        if clock.now_s > 1.5:
            raise RuntimeError("GPU is lost")
        return clock.now_s

    meter = EnergyMeter(
        found=Found(probes=(probe(lambda: 3 * clock.now_s), probe(lost, "gpu-0", device="gpu"))), now=clock
    )
    energy = noted(meter, clock, [1.0, 2.0, 3.0]).joules()
    assert energy.joules is None and "gpu-0" in energy.why_not
    assert energy.parts == {"package-0": pytest.approx(9.0)}
    assert meter.log().missing == ("gpu-0: no longer readable: GPU is lost",)


def test_a_run_on_the_processor_is_not_charged_for_an_idle_gpu():
    clock = Clock()
    probes = (probe(lambda: 3 * clock.now_s), probe(lambda: 40 * clock.now_s, "gpu-0", device="gpu", resolution_s=0.1))
    meter = noted(EnergyMeter(found=Found(probes=probes), now=clock), clock, [0.2, 0.4, 0.6])
    assert meter.joules("cpu").joules == pytest.approx(1.8)
    assert "too short for gpu-0" in meter.joules("cuda").why_not and "too short for gpu-0" in meter.joules().why_not


def test_notes_may_be_asked_for_more_often_than_they_are_wanted():
    clock = Clock()
    meter = EnergyMeter(found=Found(probes=(probe(lambda: clock.now_s),)), now=clock)
    meter.open()
    for _ in range(10):
        clock.now_s += 0.3
        meter.note(at_most_every_s=1.0)
    assert len(meter.log().series[0].at_s) == 3


def test_without_counters_the_meter_does_nothing_and_says_why():
    with EnergyMeter(found=Found(missing=("RAPL: none",))) as meter:
        assert meter._thread is None
    assert meter.joules().why_not == "RAPL: none" and meter.log().series == ()


def test_as_a_context_it_notes_by_itself():
    with EnergyMeter(0.001, found=Found(probes=(probe(lambda: 1.0),))) as meter:
        while len(meter.log().series[0].at_s) < 3:
            pass
    assert meter._thread is not None and not meter._thread.is_alive()


def test_this_machine_can_be_looked_at():
    found = find(Path("/"))
    assert found.probes or found.missing
