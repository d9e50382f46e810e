"""What binds, with evidence and bounds, on anatomies made by hand."""

import math
from dataclasses import replace

import pytest

from flatout.frameworks.pytorch.levers import registry
from flatout.judge.activity import Activity, SlowSteps
from flatout.judge.anatomy import Account, dissect
from flatout.judge.causes import Findings, arithmetic_of, saved
from flatout.judge.diagnosis import BINDINGS, diagnose
from flatout.judge.profiled_time import Idle, ProfiledTime
from flatout.judge.stats import Comparison
from flatout.records.ceilings import Ceiling, Ceilings
from flatout.records.facts import BusyThread
from flatout.records.trace import Census, Operation, Scaling
from flatout.trials.search.space import bound_of
from handmade import FACTS, LOADER, MACHINE, MODEL, anatomy, window

GPU = replace(FACTS, device="cuda")


def ceilings(**values):
    names = {**{"matmul_float32": 100e9, "memory_copy": 40e9, "kernel_launch": 2e-6}, **values}
    units = {"memory_copy": "B/s", "kernel_launch": "s"}
    return Ceilings(
        machine=MACHINE,
        framework="pytorch",
        framework_version="2.13.0",
        device="cpu",
        num_threads=2,
        measured_unix_s=1.8e9,
        measuring_s=10.0,
        foreign_cpu_fraction=0.0,
        values=tuple(
            Ceiling(name=name, value=value, unit=units.get(name, "FLOP/s"), spread_fraction=0.01, num_samples=40,
                    source="made up")
            for name, value in names.items() if value
        ),
    )  # fmt: skip


def operation(name="mm", *, flops=0, moved_bytes=0, self_s=1e-3, num_calls=1):
    return Operation(
        name=name, shape="8x8", dtype="float32", num_calls=num_calls, flops=flops, moved_bytes=moved_bytes,
        self_s=self_s, counted=flops > 0,
    )  # fmt: skip


def census(*operations, num_operations=100, num_syncs=0, uncounted=(), **changes):
    return Census(
        num_operations=num_operations,
        num_syncs=num_syncs,
        flops=sum(op.flops for op in operations),
        moved_bytes=sum(op.moved_bytes for op in operations),
        operations=operations,
        uncounted=uncounted,
        **changes,
    )


def compared(ratio, low=None, high=None, verdict="faster"):
    low, high = low or ratio - 0.05, high or ratio + 0.05
    return Comparison(verdict=verdict, ratio=ratio, low=low, high=high, low99=low, high99=high, num_pairs=4)


def findings(phases_s, *, facts=FACTS, num_cores=2, counterfactuals=None, outside=None, **rest):
    return Findings(
        anatomy=replace(anatomy(phases_s), outside_s=outside or {}),
        facts=facts,
        num_cores=num_cores,
        counterfactuals=counterfactuals or {},
        **rest,
    )


def profiled(busy_s, *idle, device="cuda"):
    """Of a step of a second, or longer; each idle as cause, phase and seconds."""
    rows = tuple(Idle(cause=cause, phase=phase, seconds=seconds) for cause, phase, seconds in idle)
    step_s = busy_s + sum(one.seconds for one in rows)
    return ProfiledTime(device=device, num_steps=3, step_s=step_s, busy_s=busy_s, idle=rows)


MODEL_BOUND = {"data": 0.02, "forward": 0.30, "backward": 0.60, "optimizer": 0.05, "unattributed": 0.03}
DATA_BOUND = {"data": 0.70, "forward": 0.10, "backward": 0.15, "optimizer": 0.03, "unattributed": 0.02}
SCALES = Scaling(full_s=(0.9, 0.91, 0.89), half_s=(0.46, 0.46, 0.46))
FIXED = Scaling(full_s=(0.9, 0.91, 0.89), half_s=(0.80, 0.80, 0.80))


TIE = {"data": 0.46, "forward": 0.20, "backward": 0.25, "optimizer": 0.05, "unattributed": 0.04}


BETWEEN = {"unattributed": 0.6, "forward": 0.1, "backward": 0.2, "data": 0.1}


def bound(found, remedy):
    return next(b for b in found.bounds if b.remedy == remedy)


POLLS = BusyThread(name="dashboard", place="train.py:21", cpu_fraction=0.97)


PLANTED = {
    "input": findings(DATA_BOUND, counterfactuals={"free_data": compared(3.2)}),
    "compute": findings(
        MODEL_BOUND, scaling=SCALES, ceilings=ceilings(), census=census(operation(flops=80 * 10**9, self_s=0.8))
    ),
    "memory bandwidth": findings(
        MODEL_BOUND,
        scaling=SCALES,
        ceilings=ceilings(),
        census=census(
            operation("native_layer_norm", flops=0, moved_bytes=int(0.7 * 30e9), self_s=0.7),
            operation(flops=10**10, self_s=0.1),
        ),
    ),
    "launch overhead": findings(
        MODEL_BOUND, scaling=FIXED, ceilings=ceilings(), census=census(operation(), num_operations=100_000)
    ),
    "host synchronisation": findings(
        {"sync": 0.6, "forward": 0.1, "backward": 0.2, "data": 0.1}, facts=GPU, census=census(num_syncs=40)
    ),
    "copies": findings({"copy": 0.6, "forward": 0.1, "backward": 0.2, "data": 0.1}, facts=GPU),
    "allocation": findings(
        MODEL_BOUND, facts=GPU, profiled=profiled(0.3, ("allocation", "forward", 0.2), ("allocation", "backward", 0.5))
    ),
    "thread oversubscription": findings(
        MODEL_BOUND, facts=replace(FACTS, num_threads=8), counterfactuals={"fitting_threads": compared(1.8)}
    ),
    "debug switches": findings(
        MODEL_BOUND,
        facts=replace(FACTS, debug_switches=("anomaly detection",)),
        counterfactuals={"debugging_off": compared(1.7)},
    ),
    "interpreter": findings(
        MODEL_BOUND, facts=replace(FACTS, busy_threads=(POLLS,)), counterfactuals={"free_interpreter": compared(12.0)}
    ),
    "evaluation": findings(MODEL_BOUND, outside={"evaluation": 4.0}),
    "optimizer": findings({"optimizer": 0.6, "forward": 0.1, "backward": 0.2, "data": 0.1}),
    "checkpoints": findings(MODEL_BOUND, outside={"checkpoint": 20.0}),
    "garbage collection": findings({"garbage": 0.6, "forward": 0.1, "backward": 0.2, "data": 0.1}),
    "logging": findings(BETWEEN, activity=Activity(num_samples=100, output_share=0.55)),
    "paging": findings(BETWEEN, activity=Activity(num_samples=100, waiting_share=0.55, faults_per_step=30.0)),
    "slow steps": findings(
        BETWEEN, slow_steps=SlowSteps(every=10.0, excess_share=0.5, times=11.0, phase="unattributed")
    ),
    "own code": findings(BETWEEN),
    "nothing": findings({f"part{number}": 0.025 for number in range(36)} | {name: 0.025 for name in ("data", "loss",
                        "forward", "backward")}),
}  # fmt: skip


def test_a_device_that_works_all_the_time_is_not_held_back_by_the_reads_that_wait_for_it():
    python = {"sync": 0.8, "forward": 0.02, "backward": 0.04, "optimizer": 0.01}
    device = {"forward": (0.3,), "backward": (0.6,), "optimizer": (0.06,), "sync": (0.01,), "unattributed": (0.03,)}
    seen = dissect([window((1.0,), python, device_phases=device)])
    prints = Activity(num_samples=100, output_share=0.4)
    found = diagnose(replace(findings({}, facts=GPU, activity=prints), anatomy=seen))
    assert found.binding == "compute" and bound(found, "no host synchronisation").ratio == pytest.approx(
        1.01, abs=0.005
    )
    assert bound_of(registry()["bf16"], found) > 3
    assert any("Python" in line and "sync" in line for line in found.evidence)
    blamed = diagnose(replace(findings({}, facts=GPU), anatomy=dissect([window((1.0,), python)])))
    assert blamed.binding == "host synchronisation", "which is what the host's own clock says"


LAUNCHES = profiled(0.4, ("Python", "forward", 0.2), ("Python", "backward", 0.4))


def test_a_device_that_waits_for_launches_is_bound_by_them_and_it_is_said_what_a_busy_one_would_bring():
    found = diagnose(findings(MODEL_BOUND, facts=GPU, profiled=LAUNCHES))
    assert found.binding == "launch overhead"
    assert bound(found, "free launches").ratio == pytest.approx(2.5)
    assert bound(found, "a device that is never idle").ratio == pytest.approx(2.5)
    assert any("idles for: Python 60 %; never idle: at most 2.50x" in line for line in found.evidence)


def test_what_profiling_makes_a_step_longer_by_is_not_blamed_on_launches():
    longer = profiled(0.9, ("Python", "forward", 0.3), ("Python", "backward", 0.3))
    assert diagnose(findings(MODEL_BOUND, facts=GPU, profiled=longer)).binding == "compute"


def test_many_operations_that_keep_the_device_busy_are_no_launch_overhead():
    same = findings(MODEL_BOUND, facts=GPU, scaling=FIXED)
    assert diagnose(same).binding == "launch overhead"
    assert diagnose(replace(same, profiled=profiled(1.0))).binding == "compute"


def test_lines_that_a_device_waits_for_after_a_value_was_read_are_blamed_on_the_read():
    slow = findings({"unattributed": 0.6, "forward": 0.1, "backward": 0.2, "data": 0.1}, facts=GPU)
    assert diagnose(slow).binding == "own code"
    read = profiled(0.4, ("synchronisation", "unattributed", 0.6))
    assert diagnose(replace(slow, profiled=read)).binding == "host synchronisation"


def test_on_a_cpu_operators_are_told_and_change_no_cause():
    same = findings(MODEL_BOUND, scaling=SCALES)
    told = replace(same, profiled=profiled(0.4, ("Python", "forward", 0.6), device="cpu"))
    assert repr(diagnose(told)) == repr(diagnose(same)), "which may hold numbers that equal nothing"


def test_there_is_a_planted_bottleneck_for_each_binding():
    assert set(PLANTED) == set(BINDINGS)


@pytest.mark.parametrize("binding", PLANTED)
def test_a_planted_bottleneck_is_named_with_sentence_and_evidence(binding):
    found = diagnose(PLANTED[binding])
    assert found.binding == binding
    assert found.sentence.startswith(binding + ":")
    assert found.evidence
    assert list(found.bounds) == sorted(found.bounds, key=lambda b: -b.ratio)


def test_an_input_bound_script_is_said_to_wait_for_items_and_for_whom():
    facts = replace(FACTS, loaders=(replace(LOADER, num_workers=12),))
    assert "by 12 workers" in diagnose(replace(PLANTED["input"], facts=facts)).sentence
    found = diagnose(PLANTED["input"])
    assert "item by item in the training process" in found.sentence
    assert found.evidence[:2] == (
        "data takes 70 % of the step",
        "free data: at most 3.20x (one cached batch replayed)",
    )
    assert (bound(found, "free data").low, bound(found, "free data").high) == pytest.approx((3.15, 3.25))


def test_stolen_cores_are_blamed_on_the_input_though_no_wait_is_seen():
    """Twelve workers on two cores show no waiting at all: the cost is stolen CPU, which the counterfactual shows."""
    found = diagnose(findings({**MODEL_BOUND, "forward": 0.02, "backward": 0.02, "data": 0.01, "part": 0.85},
                              counterfactuals={"free_data": compared(1.6)}))  # fmt: skip
    assert found.binding == "input"


def test_waiting_that_costs_nothing_is_not_blamed():
    """An asynchronous device works on while the loader is waited for: freeing the data brings nothing."""
    found = diagnose(findings(DATA_BOUND, counterfactuals={"free_data": compared(1.0, verdict="no difference")}))
    assert found.binding != "input"


def test_a_counterfactual_that_is_not_sure_names_no_bottleneck_by_itself():
    unsure = compared(1.5, 0.7, 3.0, "inconclusive")
    assert diagnose(findings(MODEL_BOUND, counterfactuals={"free_data": unsure})).binding == "compute"
    facts = replace(FACTS, num_threads=8)
    found = diagnose(findings(MODEL_BOUND, facts=facts, counterfactuals={"fitting_threads": unsure}))
    assert found.binding == "compute"


def test_a_counterfactual_that_is_not_sure_leaves_the_blame_to_the_shares():
    unsure = compared(1.5, 0.7, 5.0, "inconclusive")
    assert diagnose(findings(DATA_BOUND, counterfactuals={"free_data": unsure})).binding == "input"


def test_without_a_counterfactual_the_share_of_the_step_is_the_bound():
    found = diagnose(findings(DATA_BOUND))
    assert found.binding == "input"
    assert bound(found, "free data").ratio == pytest.approx(1 / 0.3)
    assert bound(found, "free data").how == "its share of the step"
    assert math.isnan(bound(found, "free data").low)


WARM = Scaling(full_s=(0.30, 0.27, 0.24, 0.24), half_s=(0.13, 0.13, 0.13, 0.13))


@pytest.mark.parametrize(
    ("scaling", "facts", "left"),
    [
        (None, FACTS, 0.4),
        (FIXED, FACTS, 0.4),  # back to back it takes no less
        (WARM, GPU, 0.4),
        (WARM, FACTS, 0.4 - 0.2 * 0.3 * 0.6 / 0.7),  # a fifth of computing, as far as this cause is what comes between
    ],
)
def test_the_bound_of_an_interruption_counts_on_computing_that_is_quicker_back_to_back(scaling, facts, left):
    found = diagnose(findings(BETWEEN, scaling=scaling, facts=facts))
    assert bound(found, "free code between the parts").ratio == pytest.approx(1 / left)
    if facts.device == "cpu" and scaling is WARM:
        assert bound(found, "free data").ratio == pytest.approx(1 / (0.9 - 0.2 * 0.3 * 0.1 / 0.7))


def test_computing_back_to_back_leaves_nothing_to_gain_where_the_interruption_lies_inside_of_it():
    paging = Activity(num_samples=500, waiting_share=0.9, faults_per_step=100.0)
    found = diagnose(findings(MODEL_BOUND, scaling=WARM, activity=paging))
    assert bound(found, "memory that suffices").ratio <= 1 / (0.1 * 2 / 3) + 1e-9


def test_where_pages_come_from_a_disk_lines_that_stall_are_paging_as_a_whole():
    stalled = Activity(num_samples=500, waiting_share=0.3, system_share=0.1, stalled_share=0.55, faults_per_step=100.0)
    assert bound(diagnose(findings(BETWEEN, activity=stalled)), "memory that suffices").ratio == pytest.approx(1 / 0.45)
    resident = replace(stalled, faults_per_step=0.0)
    assert diagnose(findings(BETWEEN, activity=resident)).binding == "own code"


def test_more_threads_than_cores_are_only_blamed_where_fewer_are_faster():
    facts = replace(FACTS, num_threads=8)
    same = compared(1.0, verdict="no difference")
    found = diagnose(findings(MODEL_BOUND, facts=facts, counterfactuals={"fitting_threads": same}))
    assert found.binding == "compute" and "8 threads on 2 cores" in found.evidence


def test_what_does_not_shrink_with_the_batch_is_launch_overhead_and_bounds_it():
    found = diagnose(PLANTED["launch overhead"])
    fixed = (2 * 0.80 - 0.9) / 0.9
    assert bound(found, "free launches").ratio == pytest.approx(1 / (1 - fixed * 0.9))
    assert f"{100 * fixed:.0f} % of the model's time does not shrink with the batch" in found.evidence
    assert found.evidence[0].startswith("free launches")


def test_many_operations_are_launch_overhead_where_the_batch_could_not_be_halved():
    slow = ceilings(kernel_launch=5e-6)
    found = diagnose(findings(MODEL_BOUND, ceilings=slow, census=census(operation(), num_operations=100_000)))
    assert found.binding == "launch overhead"


def test_tiny_operations_left_of_the_ridge_are_not_taken_for_moving_data():
    tiny = tuple(operation(f"add{i}", flops=0, moved_bytes=100, self_s=0.01) for i in range(40))
    assert (
        diagnose(findings(MODEL_BOUND, scaling=SCALES, ceilings=ceilings(), census=census(*tiny))).binding == "compute"
    )


def test_on_a_gpu_the_time_of_an_operation_on_the_host_says_nothing():
    """All launches take as long; the roofline tells which of them keep the device busy."""
    operations = (operation("norm", moved_bytes=int(1e9), self_s=1e-5), operation(flops=10**9, self_s=1e-5))
    found = diagnose(findings(MODEL_BOUND, facts=GPU, scaling=SCALES, ceilings=ceilings(), census=census(*operations)))
    assert found.binding == "memory bandwidth"


def test_a_loss_that_costs_more_than_the_model_is_part_of_it():
    assert diagnose(findings({"loss": 0.7, "forward": 0.1, "backward": 0.1, "data": 0.1})).binding == "compute"


def test_a_large_part_that_no_cause_explains_is_not_called_nothing_to_gain():
    found = diagnose(findings({"unattributed": 0.95, "forward": 0.02, "backward": 0.03}))
    assert found.binding == "own code"
    assert any("95 % of the step is in no phase" in note for note in found.notes)
    other = diagnose(findings({"communication": 0.95, "forward": 0.02, "backward": 0.03}))
    assert "95 % of the step is `communication`" in other.sentence


def test_a_model_that_is_not_trained_is_named_with_its_share():
    found = findings({"forward": 0.009, "backward": 0.0005})
    step_s, seen = found.anatomy.step_s, {"Teacher": 0.9, "Small": 0.01}
    shares = {name: share * step_s for name, share in seen.items()}
    told = diagnose(replace(found, anatomy=replace(found.anatomy, not_trained_s=shares)))
    assert told.binding == "compute" and "`Teacher` that is not trained takes 90 % of the step" in told.evidence
    assert not any("Small" in line for line in told.evidence)


def test_nothing_binds_where_nothing_is_large():
    assert diagnose(PLANTED["nothing"]).sentence == "nothing: no single cause, freed entirely, would bring 10 %"


# -- utilization ----------------------------------------------------------------------------------------------------


def used(flops, **changes):
    return diagnose(findings(MODEL_BOUND, census=census(operation(flops=flops)), **changes))


def test_utilization_is_the_steps_arithmetic_over_the_measured_ceiling():
    found = used(50 * 10**9, ceilings=ceilings())
    assert found.model_flops_per_step == 50 * 10**9
    assert found.achieved_flops_per_s == pytest.approx(50e9)
    assert found.model_flops_utilization == pytest.approx(0.5)
    assert bound(found, "compute at its dtype's ceiling").ratio == pytest.approx(1 / (1 - (0.9 - 0.5)))


def test_a_utilization_above_one_is_said_and_not_clamped():
    found = used(150 * 10**9, ceilings=ceilings())
    assert found.model_flops_utilization == pytest.approx(1.5)
    assert any(note.startswith("a utilization of 150 % is impossible") for note in found.notes)
    assert bound(found, "compute at its dtype's ceiling").ratio == 1.0


def test_the_ceiling_is_the_faster_of_products_and_convolutions():
    found = used(150 * 10**9, ceilings=ceilings(conv_float32=200e9))
    assert found.model_flops_utilization == pytest.approx(0.75) and not any("cannot be" in n for n in found.notes)


def test_a_script_in_half_precision_is_measured_against_that_ceiling():
    both = ceilings(matmul_bfloat16=400e9)
    for facts in (replace(FACTS, autocast=True), replace(FACTS, models=(replace(MODEL, dtypes=("bfloat16",)),))):
        found = used(200 * 10**9, facts=facts, ceilings=both)
        assert found.arithmetic == "bfloat16" and found.model_flops_utilization == pytest.approx(0.5)


def test_without_the_ceiling_of_its_own_arithmetic_no_utilization_is_claimed():
    found = used(200 * 10**9, facts=replace(FACTS, autocast=True), ceilings=ceilings())
    assert found.model_flops_utilization is None


def test_the_arithmetic_of_a_script_is_what_it_multiplies_in():
    assert arithmetic_of(FACTS) == "float32"
    assert arithmetic_of(replace(GPU, matmul_precision="high")) == "tf32"
    assert arithmetic_of(replace(FACTS, matmul_precision="high")) == "float32"
    assert arithmetic_of(replace(GPU, models=(replace(MODEL, dtypes=("float16",)),))) == "float16"
    assert arithmetic_of(replace(GPU, autocast=True, matmul_precision="high")) == "bfloat16"


def test_convolutions_in_tf32_are_held_against_its_ceiling_and_products_beside_them_against_their_own():
    images, products = operation("convolution", flops=300 * 10**9), operation("mm", flops=100 * 10**9)
    limits = ceilings(matmul_float32=100e9, matmul_tf32=500e9, conv_tf32=600e9)

    def found(facts, *operations):
        counted = census(*operations, convolution_flops=sum(op.flops for op in operations if op.name != "mm"))
        return diagnose(findings(MODEL_BOUND, facts=facts, census=counted, ceilings=limits))

    both = found(replace(GPU, convolution_tf32=True), images, products)
    assert both.arithmetic == "tf32"
    assert both.model_flops_utilization == pytest.approx(300 / 600 + 100 / 100), "seconds at the ceilings, of 1 s"
    assert found(replace(GPU, convolution_tf32=True), images).model_flops_utilization == pytest.approx(0.5)
    plain = found(GPU, images)
    assert plain.arithmetic == "float32" and plain.model_flops_utilization == pytest.approx(3.0)
    half = found(replace(GPU, convolution_tf32=True, autocast=True), images, products)
    assert half.arithmetic == "bfloat16"


@pytest.mark.parametrize("missing", ["census", "ceilings"])
def test_without_census_or_ceilings_nothing_is_said_about_utilization(missing):
    rest = {"census": census(operation(flops=10**9)), "ceilings": ceilings()}
    del rest[missing]
    found = diagnose(findings(MODEL_BOUND, **rest))
    assert found.model_flops_utilization is None
    assert not any(b.remedy == "compute at its dtype's ceiling" for b in found.bounds)


# -- what the reader must know ---------------------------------------------------------------------------------------


def test_phases_that_were_not_observed_and_operations_without_a_formula_are_noted():
    found = diagnose(findings(MODEL_BOUND, census=census(operation(), uncounted=("sort", "topk"))))
    assert "no FLOP formula for: `sort`, `topk`" in found.notes
    assert "not observed: copy, communication, sync" in found.notes


def test_phases_that_exceed_the_step_are_noted_as_counted_twice():
    found = diagnose(findings({"forward": 0.7, "backward": 0.5, "unattributed": -0.2}))
    assert "the phases sum to 20 % more than the step: something was counted twice" in found.notes
    rounding = diagnose(findings({"forward": 0.5, "backward": 0.501, "unattributed": -0.001}))
    assert not any("twice" in note for note in rounding.notes)


def test_fetching_that_costs_more_than_the_wait_for_it_is_noted_and_said_to_be_what():
    phases = {**MODEL_BOUND, "data": 0.05}
    with_workers = replace(FACTS, loaders=(replace(LOADER, num_workers=2),))

    def noted(ratio, facts=FACTS):
        found = diagnose(findings(phases, facts=facts, counterfactuals={"free_data": compared(ratio)}))
        return " ".join(found.notes)

    assert "more than the 5 % that `data` takes: workers that fetch take cores" in noted(1.4, with_workers)
    assert "fetching takes caches and memory" in noted(1.4)
    assert "free data would" not in noted(1.06)


def test_values_read_back_are_counted_and_said_to_be_harmless_on_a_cpu():
    on_cpu = diagnose(findings(MODEL_BOUND, census=census(operation(), num_syncs=7)))
    assert any("7 values read back" in line and "waits for nothing" in line for line in on_cpu.evidence)
    on_gpu = diagnose(findings(MODEL_BOUND, facts=GPU, census=census(operation(), num_syncs=7)))
    assert any("waits for the device" in line for line in on_gpu.evidence)


def test_a_phase_that_is_the_whole_step_has_a_finite_bound():
    assert bound(diagnose(findings({"optimizer": 1.0})), "free optimizer").ratio == pytest.approx(1000.0)


def test_of_two_causes_of_nearly_one_size_the_other_is_named_too():
    found = diagnose(findings(TIE, counterfactuals={"free_data": compared(1.85)}))
    assert found.binding == "input"
    assert found.sentence.endswith("; compute is nearly as large")
    assert "compute is nearly as large: 1.82x without the model's own time, 1.85x without input" in found.evidence
    for clear in (findings(DATA_BOUND, counterfactuals={"free_data": compared(3.2)}), PLANTED["nothing"]):
        assert not any("nearly as large" in line for line in diagnose(clear).evidence)


def test_a_cause_that_cannot_be_told_from_the_largest_is_named_beside_it():
    phases = {"data": 0.5, "forward": 0.15, "backward": 0.2, "optimizer": 0.08, "unattributed": 0.07}
    sure = findings(phases, counterfactuals={"free_data": compared(2.2, 2.1, 2.3)})
    unsure = findings(phases, counterfactuals={"free_data": compared(2.2, 1.3, 3.4)})
    assert diagnose(sure).also == ()
    assert diagnose(unsure).also == ("compute",)
    found = diagnose(unsure)
    assert found.sentence.endswith("; compute is perhaps as large")
    assert "compute may be as large: 1.54x without the model's own time, 2.20x without input" in found.evidence


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"decode": 0.5, "transform": 0.47, "collate": 0.03}, ("decode", ("transform",))),
        ({"decode": 0.7, "transform": 0.3}, ("decode", ())),
        ({"decode": 0.0}, ("", ())),
    ],
)
def test_parts_of_fetching_of_equal_size_are_both_named(parts, named):
    found = diagnose(replace(PLANTED["input"], activity=Activity(num_samples=100, data_parts=parts)))
    assert (found.part, found.also) == named
    assert all(part in found.sentence for part in (found.part, *found.also))


def test_time_that_does_not_shrink_with_the_batch_is_not_blamed_on_the_start_of_few_operations():
    few = replace(PLANTED["launch overhead"], census=census(operation(), num_operations=100))
    assert diagnose(few).binding in ("compute", "memory bandwidth")
    unknown = replace(PLANTED["launch overhead"], census=None)
    assert diagnose(unknown).binding == "launch overhead"


def test_a_bound_says_what_it_is_beyond_the_share():
    waited = findings({"data": 0.4, "forward": 0.2, "backward": 0.3, "unattributed": 0.1}, scaling=SCALES)
    assert bound(diagnose(waited), "free data").how.startswith("its share")
    for each in diagnose(waited).bounds:
        if each.how == "its share of the step" and len(each.shortens) == 1:
            assert saved(each.ratio) == pytest.approx(waited.anatomy.share(each.shortens[0]), abs=0.006)


def test_workers_that_take_the_models_cores_bind_although_nobody_waits_for_them():
    """Seen with twelve workers on two cores: data 3 % of a step, and 2.1 times as fast with free data."""
    seen = {"data": 0.03, "forward": 0.30, "backward": 0.55, "optimizer": 0.07, "unattributed": 0.05}
    facts = replace(FACTS, loaders=(replace(LOADER, num_workers=12),))
    found = diagnose(findings(seen, facts=facts, counterfactuals={"free_data": compared(2.1)}))
    assert found.binding == "input" and found.sentence == "input: 12 workers on 2 cores take them from the model"
    for verdict in ("inconclusive", "no difference"):
        free = compared(1.0, verdict=verdict)
        assert diagnose(findings(seen, facts=facts, counterfactuals={"free_data": free})).binding == "compute"


def test_a_little_of_the_models_cores_leaves_the_model_what_binds():
    found = diagnose(findings(MODEL_BOUND, counterfactuals={"free_data": compared(1.2)}))
    assert found.binding == "compute"


# -- what lies between steps, and what is known by trying alone -------------------------------------------------------


def test_evaluation_that_takes_most_of_the_time_binds_and_is_said_with_its_share():
    found = diagnose(findings(MODEL_BOUND, outside={"evaluation": 4.0}))
    assert found.sentence == "evaluation: training waits while the model is evaluated, 80 % of the time"
    assert bound(found, "free evaluation").ratio == pytest.approx(5.0)
    assert bound(found, "free evaluation").how.startswith("of all the time")
    assert bound(found, "free optimizer").ratio == pytest.approx(1 / 0.95), "bounds of a step stay those of a step"


def test_what_a_cause_in_the_step_is_worth_beside_evaluation_is_of_all_the_time():
    found = diagnose(findings(DATA_BOUND, outside={"evaluation": 0.8}))
    assert found.binding == "evaluation" and found.also == ("input",)  # 44 % of the time, and 70 % of 56 %
    assert diagnose(findings(DATA_BOUND, outside={"evaluation": 0.3})).binding == "input"


def test_evaluation_and_checkpoints_are_weighed_on_one_scale():
    found = diagnose(findings(MODEL_BOUND, outside={"evaluation": 3.0, "checkpoint": 1.0}))
    assert bound(found, "free evaluation").ratio == pytest.approx(2.5)
    assert bound(found, "free checkpoints").ratio == pytest.approx(1.25)


def test_debug_switches_are_named_before_the_time_of_the_model_that_they_lengthen():
    found = diagnose(PLANTED["debug switches"])
    assert found.sentence.startswith("debug switches: each step pays for anomaly detection")
    assert bound(found, "no debug switches").ratio == pytest.approx(1.7)
    slower = {"debugging_off": compared(1.15), "free_data": compared(3.2)}
    other = diagnose(replace(PLANTED["debug switches"], anatomy=anatomy(DATA_BOUND), counterfactuals=slower))
    assert other.binding == "input" and bound(other, "no debug switches").ratio == pytest.approx(1.15)
    same = {"debugging_off": compared(1.0, verdict="no difference")}
    assert diagnose(replace(PLANTED["debug switches"], counterfactuals=same)).binding == "compute"


def test_what_no_lever_turns_off_is_noted():
    found = diagnose(findings(MODEL_BOUND, facts=replace(FACTS, set_from_outside=("CUDA_LAUNCH_BLOCKING=1",))))
    assert "set for the process, and may slow each step: CUDA_LAUNCH_BLOCKING=1" in found.notes


def test_a_thread_that_holds_the_interpreter_is_named_with_its_line():
    found = diagnose(PLANTED["interpreter"])
    assert (
        found.sentence.startswith("interpreter: ") and "`dashboard` at `train.py:21` (97 % of a core)" in found.sentence
    )
    assert bound(found, "an interpreter that is passed on at once").ratio == pytest.approx(12.0)
    assert found.also == (), "what is left is no cause"


def test_where_passing_it_on_is_not_sure_to_help_the_time_counts_that_the_training_thread_did_not_run():
    waits = replace(PLANTED["interpreter"], activity=Activity(num_samples=500, waiting_share=0.7))
    unsure, same = compared(2.0, 0.8, 5.0, "inconclusive"), compared(1.0, verdict="no difference")
    found = diagnose(replace(waits, counterfactuals={"free_interpreter": unsure}))
    assert found.binding == "interpreter"
    assert diagnose(replace(waits, counterfactuals={"free_interpreter": same})).binding == "compute"
    idle = replace(FACTS, busy_threads=(replace(POLLS, cpu_fraction=0.05),))
    assert diagnose(replace(waits, facts=idle, counterfactuals={"free_interpreter": unsure})).binding == "compute"
    assert diagnose(replace(waits, facts=FACTS, counterfactuals={})).binding == "compute"


def test_a_thread_that_holds_the_interpreter_explains_that_the_step_contradicts_itself():
    one = Account(plain_s=(0.42, 0.43, 0.42, 0.41), other_s=(0.02, 0.021, 0.02, 0.02))
    found = diagnose(replace(PLANTED["interpreter"], accounts={"taken apart": one}))
    assert found.binding == "interpreter" and [b.remedy for b in found.bounds] == [
        "an interpreter that is passed on at once"
    ]
    assert found.evidence == found.contradictions != ()
    unsure = {"free_interpreter": compared(2.9, 0.33, 25.5, "inconclusive")}
    assert diagnose(replace(PLANTED["interpreter"], counterfactuals=unsure)).binding == "compute"
    both = replace(PLANTED["interpreter"], counterfactuals=unsure, accounts={"sampled": one})
    assert diagnose(both).binding == "interpreter", "steps of two lengths are as unsure as that, and why is seen"
    slower = {"free_interpreter": compared(0.9, 0.4, 2.0, "inconclusive")}
    assert diagnose(replace(both, counterfactuals=slower)).binding == "not concluded"
