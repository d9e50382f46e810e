"""Where an operation stands under the measured ceilings."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import handmade
from flatout.judge.roofline import SHORTEST_CALL_S, standing
from flatout.records.ceilings import Ceiling, Ceilings
from flatout.records.trace import Operation

MIB = 2**20


def limit(name, value, unit):
    return Ceiling(name=name, value=value, unit=unit, spread_fraction=0.02, num_samples=17, source="made up")


CEILINGS = Ceilings(
    machine=replace(handmade.MACHINE, last_level_cache_bytes=32 * MIB),
    framework="pytorch",
    framework_version="1.0",
    device="cpu",
    num_threads=2,
    measured_unix_s=0.0,
    measuring_s=1.0,
    foreign_cpu_fraction=0.0,
    values=(
        limit("matmul_float32", 200e9, "FLOP/s"),
        limit("conv_float32", 500e9, "FLOP/s"),
        limit("memory_copy", 40e9, "B/s"),
        limit("memory_in_place", 50e9, "B/s"),
        limit("memory_cache", 400e9, "B/s"),
        limit("kernel_launch", 1e-6, "s"),
    ),
)


def operation(*, flops=0, moved_bytes=0, self_s=1e-3, num_calls=1, dtype="float32"):
    return Operation(
        name="mm", shape="8x8", dtype=dtype, num_calls=num_calls, flops=flops, moved_bytes=moved_bytes, self_s=self_s,
        counted=True,
    )  # fmt: skip


def test_arithmetic_is_limited_by_the_faster_of_product_and_convolution():
    found = standing(operation(flops=250_000_000, moved_bytes=10), CEILINGS)
    assert found.ceiling.name == "conv_float32"
    assert found.fraction == pytest.approx(0.5)


def test_operands_that_the_cache_can_hold_are_limited_by_the_cache_and_not_by_the_memory():
    found = standing(operation(moved_bytes=30 * MIB), CEILINGS)
    assert found.ceiling.name == "memory_cache"
    assert not found.is_above(), "although it moves 31 GB/s of 50 by the memory's measure"
    assert found.least_s == pytest.approx(30 * MIB / 400e9)


def test_of_large_operands_all_but_two_cachefuls_pass_the_memory():
    found = standing(operation(moved_bytes=164 * MIB, self_s=0.01), CEILINGS)
    assert found.ceiling.name == "memory_in_place"
    assert found.least_s == pytest.approx(64 * MIB / 400e9 + 100 * MIB / 50e9)


def test_it_is_above_only_beyond_the_spread_of_its_ceiling():
    assert not standing(operation(flops=505_000_000), CEILINGS).is_above()
    assert standing(operation(flops=515_000_000), CEILINGS).is_above()


def test_a_type_that_was_not_measured_is_held_against_the_highest_peak():
    assert standing(operation(flops=1, dtype="float64"), CEILINGS).ceiling.name == "conv_float32"


def test_on_an_accelerator_the_time_of_an_operation_is_that_of_its_start_and_says_nothing():
    assert standing(operation(flops=10**9), replace(CEILINGS, device="Some GPU")) is None


def test_what_does_no_work_or_is_too_short_for_the_clock_stands_nowhere():
    assert standing(operation(), CEILINGS) is None
    assert standing(operation(flops=1, self_s=SHORTEST_CALL_S, num_calls=2), CEILINGS) is None


def test_ceilings_without_a_cache_limit_no_operation_that_fits_into_it():
    found = replace(CEILINGS, values=tuple(c for c in CEILINGS.values if c.name != "memory_cache"))
    assert standing(operation(moved_bytes=MIB), found) is None


@given(st.integers(1, 10**12), st.integers(1, 10**10), st.integers(1, 100))
def test_the_least_time_never_falls_with_more_work_and_adds_over_calls(flops, moved_bytes, num_calls):
    one = standing(operation(flops=flops, moved_bytes=moved_bytes), CEILINGS)
    more = standing(operation(flops=flops, moved_bytes=moved_bytes + MIB), CEILINGS)
    many = standing(
        operation(flops=flops * num_calls, moved_bytes=moved_bytes * num_calls, num_calls=num_calls, self_s=1.0),
        CEILINGS,
    )
    assert one.least_s <= more.least_s
    assert many.least_s == pytest.approx(num_calls * one.least_s)
