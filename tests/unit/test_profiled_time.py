"""Does the account of profiled steps close, and does it say of what is in them what is true?"""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flatout.judge.profiled_time import on_tensor_cores, profiled_time
from flatout.records.ceilings import Ceiling, Ceilings
from flatout.records.profile import Span, profile_of
from flatout.records.trace import Census, Operation
from handmade import MACHINE

moments = st.integers(-50, 400)
PHASES = ("data", "copy", "forward", "backward", "optimizer", "sync", "unattributed", "recorder")


@st.composite
def spans(draw):
    """Anything a profiler may say, in any order: calls that nothing answers, work that nobody asked for."""
    found = []
    for link in range(draw(st.integers(0, 14))):
        kind, begun, asked = draw(st.sampled_from(["kernel", "transfer"])), draw(moments), draw(moments)
        lasted = draw(st.integers(0, 60))
        found.append(Span(kind, f"k{draw(st.integers(0, 3))}", draw(st.integers(0, 2)), begun, begun + lasted, link))
        if draw(st.booleans()):
            found.append(Span("launch", "launch", 0, asked, asked + draw(st.integers(0, 20)), link))
    for kind in draw(st.lists(st.sampled_from(["wait", "allocation", "operator"]), max_size=10)):
        begun = draw(moments)
        found.append(Span(kind, kind, 0, begun, begun + draw(st.integers(0, 50))))
    cuts = sorted(draw(st.lists(moments, max_size=10)))
    found += [Span("phase", draw(st.sampled_from(PHASES)), 0, a, b) for a, b in itertools.pairwise(cuts)]
    return found


@given(found=spans(), device=st.sampled_from(["cpu", "cuda"]), ends=st.lists(moments, min_size=2, max_size=5))
def test_busy_and_idle_sum_to_the_steps_whatever_was_seen(found, device, ends):
    account = profiled_time(profile_of(found, device=device, ends_ns=tuple(sorted(ends)), zero_s=0.0))
    if account is None:
        return
    assert account.busy_s >= 0 and all(one.seconds > 0 for one in account.idle)
    assert account.busy_s + sum(one.seconds for one in account.idle) == pytest.approx(account.step_s, rel=1e-9)
    assert all(part.share >= 0 for part in account.parts)


def of(*found, device="cuda", ends_ns=(0, 1000), **known):
    return profiled_time(profile_of([*found], device=device, ends_ns=ends_ns, zero_s=0.0), **known)


def work(name, begun, ended, link, *, asked=None, lane=7, kind="kernel", operator=""):
    asked = begun - 10 if asked is None else asked
    call = Span("launch", "cudaLaunchKernel", 0, asked, asked + 5, link)
    return [call, Span(kind, name, lane, begun, ended, link, operator)]


def test_a_step_of_a_device_ends_when_its_own_work_is_done():
    found = of(
        *work("a", -40, 100, 1, asked=-50), *work("b", 100, 1100, 2, asked=10), *work("c", 1100, 1500, 3, asked=1200)
    )
    assert found.step_s == pytest.approx(1000e-9) and found.busy_share == 1.0


def test_kernels_beside_each_other_are_busy_once():
    found = of(*work("a", 0, 800, 1, asked=1), *work("b", 300, 1000, 2, asked=2, lane=9))
    assert (found.busy_s, found.idle) == (pytest.approx(1000e-9), ())


def test_a_copy_beside_a_kernel_costs_nothing_and_one_alone_is_idle():
    copy = work("Memcpy HtoD", 700, 1000, 2, asked=2, lane=9, kind="transfer")
    found = of(*work("a", 0, 800, 1, asked=1), *copy)
    assert found.by_cause == {"copies": pytest.approx(200e-9)}


def test_what_waits_in_the_queue_is_not_blamed_on_python():
    found = of(*work("a", 0, 400, 1, asked=1), *work("b", 410, 1000, 2, asked=50))
    assert found.by_cause == {"starting": pytest.approx(10e-9)}


def test_python_that_is_late_after_a_wait_is_blamed_on_it_as_far_as_it_had_waited():
    wait = Span("wait", "cudaStreamSynchronize", 0, 250, 400)
    found = of(*work("a", 0, 400, 1, asked=1), wait, *work("b", 700, 1000, 2, asked=695))
    assert found.by_cause == {"synchronisation": pytest.approx(150e-9), "Python": pytest.approx(150e-9)}


def test_tensor_cores_are_known_by_the_names_of_kernels():
    gemm = "ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_nn"
    assert on_tensor_cores(gemm) and not on_tensor_cores("ampere_sgemm_128x64_nn")
    found = of(*work(gemm, 0, 250, 1, asked=1), *work("ampere_sgemm_128x64_nn", 250, 1000, 2, asked=2))
    assert found.tensor_core_share == pytest.approx(0.25)
    assert [part.tensor_cores for part in found.parts] == [False, True]


MM = Operation(name="mm", shape="8x8", dtype="float32", num_calls=1, flops=40, moved_bytes=0, self_s=1.0, counted=True)


def test_a_kernel_is_held_against_the_ceiling_of_the_operator_that_asked_for_it():
    census = Census(num_operations=1, num_syncs=0, flops=40, moved_bytes=0, operations=(MM,), uncounted=())
    limits = Ceilings(
        machine=MACHINE, framework="pytorch", framework_version="2.13.0", device="cuda", num_threads=2,
        measured_unix_s=1.8e9, measuring_s=10.0, foreign_cpu_fraction=0.0,
        values=tuple(
            Ceiling(name=name, value=value, unit="FLOP/s", spread_fraction=0.01, num_samples=40, source="made up")
            for name, value in {"matmul_float32": 1e8, "matmul_tf32": 8e8}.items()
        ),
    )  # fmt: skip
    kernels = work("gemm", 0, 800, 1, asked=1, operator="aten::mm") + work("relu", 800, 1000, 2, asked=2)
    found = of(*kernels, census=census, ceilings=limits)
    assert [(part.name, part.fraction) for part in found.parts] == [("gemm", pytest.approx(0.5)), ("relu", None)]
    found = of(*kernels, census=census, ceilings=limits, arithmetic="tf32")
    assert (found.parts[0].fraction, found.parts[0].limit) == (pytest.approx(0.0625), "matmul_tf32")


def test_an_operator_has_its_own_time_without_what_it_calls_and_fetching_is_none_of_it():
    phases = [Span("phase", "data", 0, 0, 300), Span("phase", "forward", 0, 300, 1000)]
    operators = [Span("operator", name, 0, *times) for name, times in {
        "aten::stack": (100, 200), "aten::linear": (400, 900), "aten::addmm": (450, 850),
    }.items()]  # fmt: skip
    found = of(*phases, *operators, device="cpu")
    assert {part.name: part.seconds for part in found.parts} == {
        "aten::addmm": pytest.approx(400e-9), "aten::linear": pytest.approx(100e-9),
    }  # fmt: skip
    assert found.busy_s == pytest.approx(500e-9)
    assert found.by_cause == {"input": pytest.approx(300e-9), "forward": pytest.approx(200e-9)}


def test_without_a_whole_step_there_is_no_account():
    assert of(ends_ns=(5,)) is None and of(ends_ns=(5, 5), device="cpu") is None
