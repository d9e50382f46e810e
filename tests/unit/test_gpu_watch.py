"""Who else computes on the GPU of a process, and what holds its clock back? On a driver of numbers."""

from dataclasses import replace

import pytest

from flatout.judge.paired import is_busy
from flatout.machine.gpu_watch import GpuWatch, Nvml
from flatout.trials.conclude import _gpu_warnings
from handmade import window
from nvml_library import NvmlLibrary


@pytest.fixture
def library():
    found = NvmlLibrary([0, 0], ["GPU-3a", "GPU-7f"])
    found.computing = {0: [11], 1: [7, 12]}
    return found


def test_the_gpus_of_a_process_are_those_that_it_has_memory_on(library):
    assert GpuWatch(Nvml(library), pid=7).since(0.0)["gpu_clock_mhz"] == 1980
    assert GpuWatch(Nvml(library), pid=99).since(0.0) == {}, "as in a container that numbers processes otherwise"
    library.refuses = "nvmlDeviceGetComputeRunningProcesses_v3"
    assert GpuWatch(Nvml(library), pid=7).since(0.0) == {}


def test_in_a_container_the_gpus_are_those_of_the_parameters_and_others_are_told_from_nobody(library):
    """There the driver numbers processes otherwise: which of several is this one is not known."""
    library.reasons, library.samples = 0x4, [(12, 6_000_000, 30)]
    found = GpuWatch(Nvml(library), pid=1, gpus=("GPU-7f",)).since(5.0)
    assert found == {"gpu_clock_mhz": 1980, "gpu_held_back": ("power cap",)}
    alone = GpuWatch(Nvml(library), pid=1, gpus=("GPU-3a",))
    library.samples = [(11, 6_000_000, 90)]
    assert alone.since(5.0)["foreign_gpu_fraction"] == 0, "who computes there all alone is this one"
    library.samples = [(11, 6_000_000, 90), (12, 6_000_000, 30)]
    assert alone.since(5.0)["foreign_gpu_fraction"] == pytest.approx(0.3), "who came later is not"


def test_what_others_compute_there_within_a_window_makes_it_busy(library):
    watch = GpuWatch(Nvml(library), pid=7)
    library.samples = [(12, 4_000_000, 90), (7, 6_000_000, 99), (12, 6_000_000, 30), (12, 6_200_000, 50)]
    seen = replace(window((0.1, 0.1)), **watch.since(5.0))
    assert seen.foreign_gpu_fraction == pytest.approx(0.4) and is_busy(seen)
    assert _gpu_warnings([seen]) == ("others used 40 % of the GPU meanwhile",)
    alone = replace(window((0.1, 0.1)), **watch.since(7.0))
    assert alone.foreign_gpu_fraction == 0 and not is_busy(alone) and _gpu_warnings([alone]) == ()


def test_what_holds_the_clock_back_is_said_and_that_it_idles_is_not(library):
    watch = GpuWatch(Nvml(library), pid=7)
    library.reasons, library.clock_mhz = 0x1 | 0x4 | 0x40, 1200
    found = watch.since(0.0)
    assert (found["gpu_clock_mhz"], found["gpu_held_back"]) == (1200, ("power cap", "heat"))
    (said,) = _gpu_warnings([replace(window((0.1,)), **found), window((0.1,))])
    assert said == "the GPU's clock was held back in 1 of 1 windows (power cap, heat): a long run may be slower"
    library.refuses = "nvmlDeviceGetProcessUtilization"
    assert "foreign_gpu_fraction" not in watch.since(0.0) and not is_busy(window((0.1,)))
