"""Records of a machine and its limits."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.errors import RecordError
from flatout.records.as_json import from_json, to_json
from flatout.records.ceilings import (
    Accelerator,
    Ceiling,
    Ceilings,
    Machine,
    ceiling_of,
    differences,
)

POSITIVE = st.floats(min_value=1e-6, max_value=1e18)
H200 = Accelerator(name="NVIDIA H200", memory_bytes=150754820096, compute_capability="9.0")


def machine(**changes):
    found = Machine(
        hostname="here",
        cpu="AMD EPYC",
        architecture="x86_64",
        num_cores=2,
        num_physical_cores=2,
        num_cores_total=64,
        memory_bytes=24 * 2**30,
        operating_system="Linux 6.1",
        cpu_features=("avx2", "avx512_bf16"),
    )
    return dataclasses.replace(found, **changes)


def ceiling(name="matmul_float32", value=200e9, unit="FLOP/s"):
    return Ceiling(name=name, value=value, unit=unit, spread_fraction=0.01, num_samples=16, source="made up")


def ceilings(*values, **changes):
    found = Ceilings(
        machine=machine(),
        framework="pytorch",
        framework_version="2.13.0+cpu",
        device="cpu",
        num_threads=2,
        measured_unix_s=1e9,
        measuring_s=9.5,
        foreign_cpu_fraction=None,
        values=values or (ceiling(),),
    )
    return dataclasses.replace(found, **changes)


# -- machine


@pytest.mark.parametrize(
    "change",
    [
        {"cpu": "Intel Xeon"},
        {"num_cores": 1},
        {"num_physical_cores": 1},
        {"cores_quota": 1.5},
        {"cpu_features": ("avx2",)},
        {"accelerators": (H200,)},
    ],
)
def test_what_decides_performance_changes_the_key_and_is_named_as_a_difference(change):
    other = machine(**change)
    assert other.machine_key() != machine().machine_key()
    assert len(differences(machine(), other)) == 1


@pytest.mark.parametrize(
    "change", [{"hostname": "there"}, {"num_cores_total": 8}, {"memory_bytes": 24 * 2**30 - 2**20}]
)
def test_what_does_not_decide_performance_changes_neither_key_nor_differences(change):
    other = machine(**change)
    assert other.machine_key() == machine().machine_key()
    assert differences(machine(), other) == ()


def test_the_order_of_features_does_not_change_the_key():
    assert machine(cpu_features=("avx512_bf16", "avx2")).machine_key() == machine().machine_key()


def test_the_key_is_the_same_in_every_process_and_release():
    """A plan keeps it: should this fail, every plan is `for another machine`."""
    assert machine().machine_key() == "4f95e065961e"


def test_differences_say_which_side_has_what():
    there = machine(accelerators=(H200,), cpu_features=("avx2", "amx_bf16"), cxx_compiler="/usr/bin/g++")
    assert differences(there, machine(memory_bytes=12 * 2**30)) == (
        "CPU features only there: `amx_bf16`",
        "CPU features only here: `avx512_bf16`",
        "accelerators: `none` here, `NVIDIA H200 (140 GiB)` there",
        "memory: `12.0 GiB` here, `24.0 GiB` there",
        "C++ compiler: `none` here, `/usr/bin/g++` there",
    )


def test_a_memory_limit_counts_as_the_memory():
    assert differences(machine(), machine(memory_limit_bytes=2**30)) == ("memory: `1.0 GiB` here, `24.0 GiB` there",)


def test_bfloat16_in_hardware_is_read_from_the_features():
    assert machine().bfloat16_in_hardware()
    assert not machine(cpu_features=("avx2", "avx512f")).bfloat16_in_hardware()


# -- limits from samples


@given(st.lists(POSITIVE, min_size=1, max_size=50))
def test_a_rate_lies_between_median_and_maximum_and_a_duration_between_minimum_and_median(samples):
    rate = ceiling_of("memory_copy", "B/s", samples, source="made up")
    duration = ceiling_of("kernel_launch", "s", samples, source="made up")
    tolerance = 1e-12 * max(samples)
    assert duration.value <= rate.value + tolerance
    assert min(samples) - tolerance <= duration.value and rate.value <= max(samples) + tolerance
    assert rate.num_samples == len(samples)
    assert rate.spread_fraction >= 0 and duration.spread_fraction >= 0


def test_disturbed_windows_do_not_lower_a_ceiling():
    assert ceiling_of("x", "B/s", [10.0] * 9 + [1.0] * 6, source="made up").value == 10.0


def test_one_lucky_window_raises_neither_a_ceiling_nor_its_spread():
    ceiling = ceiling_of("x", "B/s", [10.0] * 15 + [99.0], source="made up")
    assert ceiling.value == 10.0 and ceiling.spread_fraction == 0.0


@pytest.mark.parametrize(("unit", "usual", "fast"), [("B/s", 50.0, 80.0), ("s", 1 / 50.0, 1 / 80.0)])
def test_a_machine_that_is_fast_in_a_window_of_eight_has_a_spread_that_says_so(unit, usual, fast):
    # a rate between the two hangs on how many fast windows were met, and another measurement may give either
    ceiling = ceiling_of("x", unit, [usual] * 15 + [fast] * 2, source="made up")
    assert min(usual, fast) <= ceiling.value <= max(usual, fast)
    assert ceiling.spread_fraction == pytest.approx(abs(fast - usual) / 2 / ceiling.value)


def test_no_samples_are_no_ceiling():
    with pytest.raises(ValueError, match="no samples"):
        ceiling_of("x", "B/s", [], source="made up")


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_ceiling_is_positive_and_finite(value):
    with pytest.raises(RecordError):
        ceiling(value=value)


def test_get_finds_by_name_and_peak_takes_the_faster_of_matmul_and_convolution():
    found = ceilings(ceiling(), ceiling("conv_float32", 240e9), ceiling("matmul_tf32", 400e12))
    assert found.get("matmul_float32").value == 200e9
    assert found.get("matmul_float16") is None
    assert found.peak("float32").name == "conv_float32"
    assert found.peak("tf32").name == "matmul_tf32"
    assert found.peak("bfloat16") is None


def test_ceilings_survive_json():
    found = ceilings(machine=machine(accelerators=(H200,)), foreign_cpu_fraction=0.1, remarks=("disturbed",))
    assert from_json(Ceilings, json.loads(json.dumps(to_json(found)))) == found


def test_age_is_never_negative():
    assert ceilings().age_s(1e9 + 60) == 60
    assert ceilings().age_s(1e9 - 60) == 0


# -- files


WORDS = st.text(max_size=20)
