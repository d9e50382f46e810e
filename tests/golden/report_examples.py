"""Results as `tune` and `why` write them, made by hand, for the golden files and the tests of the report.

`python tests/golden/report_examples.py` writes the golden files anew; look at the difference before committing it.
"""

import functools
import random
import sys
from dataclasses import replace
from pathlib import Path

from flatout.judge.anatomy import Anatomy
from flatout.judge.diagnosis import Bound, Diagnosis
from flatout.judge.profiled_time import Idle, Part, ProfiledTime
from flatout.judge.read_sites import ReadSite, ReadSites
from flatout.judge.result import FORMAT, Result, TimelineStep, Untried
from flatout.judge.stats import Comparison
from flatout.records.ceilings import Accelerator, Ceiling, Ceilings, Machine
from flatout.records.facts import Facts, LoaderFacts, ModelFacts, OptimizerFacts
from flatout.records.plan import PLAN_FORMAT, Plan, Trial, label
from flatout.records.trace import Census, Header, Operation

HERE = Path(__file__).parent
CREATED = "2026-11-21T10:46:07+00:00"
CREATED_UNIX_S = 1795257967.0
NAN = float("nan")

MACHINE = Machine(
    hostname="workbench",
    cpu="AMD EPYC",
    architecture="x86_64",
    num_cores=2,
    num_physical_cores=1,
    num_cores_total=2,
    memory_bytes=16 * 2**30,
    operating_system="Linux 6.1.0",
    last_level_cache_bytes=32 * 2**20,
    shm_bytes=8 * 2**30,
    cxx_compiler="/usr/bin/c++",
    cpu_features=("avx2", "fma", "avx512f", "avx512_bf16"),
)


def ceiling(name, value, unit, source, spread=0.012):
    return Ceiling(name=name, value=value, unit=unit, spread_fraction=spread, num_samples=40, source=source)


CEILINGS = Ceilings(
    machine=MACHINE,
    framework="pytorch",
    framework_version="2.13.0+cpu",
    device="cpu",
    num_threads=2,
    measured_unix_s=CREATED_UNIX_S - 2 * 86400,
    measuring_s=14.2,
    foreign_cpu_fraction=0.004,
    values=(
        ceiling("matmul_float32", 159e9, "FLOP/s", "`torch.mm`, 2048 x 2048 times 2048 x 2048, 2 threads"),
        ceiling("matmul_bfloat16", 434e9, "FLOP/s", "`torch.mm`, 2048 x 2048 times 2048 x 2048, 2 threads", 0.034),
        ceiling("conv_float32", 141e9, "FLOP/s", "3 x 3 convolution forward, 16 x 256 x 14 x 14, contiguous"),
        ceiling("memory_copy", 36e9, "B/s", "triad over buffers of 128 MiB, reads and writes counted"),
        ceiling("memory_in_place", 52e9, "B/s", "`relu_` over buffers of 128 MiB, reads and writes counted"),
        ceiling("memory_cache", 310e9, "B/s", "`mul_` over buffers of 4 MiB, reads and writes counted"),
        ceiling("kernel_launch", 1.9e-6, "s", "`torch.add` of two one-element tensors, called from Python"),
    ),
)


def header(script="lenet.py", **changes):
    fields = dict(
        format=1,
        flatout="0.1.0",
        started_unix_s=CREATED_UNIX_S - 80,
        script=script,
        arguments=("--data", "mnist", "--epochs", "3"),
        python="3.11.7",
        framework="pytorch",
        framework_version="2.13.0+cpu",
        pid=4711,
    )
    return Header(**{**fields, **changes})


FACTS = Facts(
    device="cpu",
    models=(ModelFacts(name="LeNet", num_parameters=61706, num_modules=8,
                       dtypes=("float32",), convolution_dims=(2,)),),
    optimizers=(OptimizerFacts(name="SGD", fused=False, foreach=False,
                               can_fuse=True),),
    loaders=(LoaderFacts(dataset="ImageDataset", batch_size=16, num_batches=938, num_workers=0,
                         prefetch_factor=None, pinned=False),),
    num_threads=2,
)  # fmt: skip


def anatomy(phases_ms, *, not_observed=("copy", "communication"), outside_s=None, num_steps=160):
    step_s = sum(phases_ms.values()) / 1e3
    return Anatomy(
        step_s=step_s,
        phases_s={name: ms / 1e3 for name, ms in phases_ms.items()},
        spread_fraction={name: 0.006 for name in phases_ms if name != "unattributed"},
        outside_s=outside_s or {},
        not_observed=not_observed,
        num_steps=num_steps,
        num_windows=4,
    )


def comparison(ratio, low, high, verdict="faster", reason=""):
    return Comparison(
        verdict=verdict,
        ratio=ratio,
        low=low,
        high=high,
        low99=low - 0.01,
        high99=high + 0.01,
        num_pairs=5,
        reason=reason,
    )


def operation(name, shape, calls, mflops, kilobytes, micros, *, dtype="float32"):
    return Operation(
        name=name, shape=shape, dtype=dtype, num_calls=calls, flops=int(mflops * 1e6), moved_bytes=int(kilobytes * 1e3),
        self_s=micros / 1e6, counted=mflops > 0,
    )  # fmt: skip


CENSUS = Census(
    num_operations=118,
    num_syncs=1,
    flops=39_500_000,
    moved_bytes=5_350_000,
    operations=(
        operation("convolution", "16x6x14x14 16x6x5x5 16", 1, 7.675, 178, 282),
        operation("convolution_backward", "16x16x10x10 16x6x14x14 16x6x5x5", 1, 15.35, 355, 263),
        operation("convolution", "16x1x28x28 6x1x5x5 6", 1, 3.775, 351, 161),
        operation("max_pool2d_with_indices_backward", "16x6x14x14 16x6x28x28", 1, 0, 1204, 118),
        operation("addmm", "120 16x400 400x120", 1, 1.525, 81.5, 41),
        operation("mm", "120x64 16x400", 1, 1.525, 81.25, 38),
        operation("addmm", "84 16x120 120x84", 1, 0.325, 23.25, 17),
        operation("addmm", "10 16x84 84x10", 1, 0.0275, 7, 12),
        operation("relu", "16x6x28x28", 4, 0, 602, 34),
        operation("add_", "120x400 120x400", 10, 0, 185.25, 49),
        operation("log_softmax", "16x10", 1, 0, 1.25, 9),
    ),
    uncounted=("max_pool2d_with_indices_backward",),
    sync_places=("lenet.py:141, once a step",),
)


def read_site(file, line, code, wait_ms, *, often=1.0, on_device=False):
    return ReadSite(
        file=file, line=line, code=code, read="item", on_device=on_device, reads_per_step=often, waited_s=wait_ms / 1e3
    )


def reads(*sites):
    return ReadSites(sites=sites)


def bound(remedy, ratio, how, *shortens, low=NAN, high=NAN):
    return Bound(remedy=remedy, ratio=ratio, low=low, high=high, how=how, shortens=shortens)


SHARE, REPLAYED = "its share of the step", "one cached batch replayed"
AT_CEILING, HALVED = "the step's FLOPs at the measured ceiling", "model calls replayed at half the batch"

INPUT = Diagnosis(
    binding="input",
    sentence="input: batches are built item by item in the training process while the model waits",
    evidence=(
        "data takes 71 % of the step",
        "free data: at most 3.42x (one cached batch replayed)",
        "118 operations a step",
        "1 value read back a step (`.item()` and the like); on a CPU it waits for nothing",
    ),
    bounds=(
        bound("free data", 3.42, REPLAYED, "data", low=3.36, high=3.49),
        bound("compute at its dtype's ceiling", 1.21, AT_CEILING, "forward", "backward"),
        bound("free optimizer", 1.04, SHARE, "optimizer"),
    ),
    model_flops_per_step=39_500_000,
    achieved_flops_per_s=9.12e9,
    model_flops_utilization=0.0574,
    notes=("no FLOP formula for: `max_pool2d_with_indices_backward`", "not observed: copy, communication"),
)

COMPUTE = Diagnosis(
    binding="compute",
    sentence="compute: the time goes into the model's own operations, forward and backward",
    evidence=(
        "compute at its dtype's ceiling: at most 1.13x (the step's FLOPs at the measured ceiling)",
        "free optimizer: at most 1.02x (its share of the step)",
        "2 % of the model's time does not shrink with the batch",
        "731 operations a step",
    ),
    bounds=(
        bound("compute at its dtype's ceiling", 1.13, AT_CEILING, "forward", "backward"),
        bound("free launches", 1.02, HALVED, "forward", "backward", "loss"),
        bound("free optimizer", 1.02, SHARE, "optimizer"),
        bound("free data", 1.007, REPLAYED, "data", low=0.997, high=1.017),
    ),
    model_flops_per_step=81_200_000_000,
    achieved_flops_per_s=136.6e9,
    model_flops_utilization=0.859,
    notes=("not observed: copy, communication",),
)

LAUNCHES = Diagnosis(
    binding="launch overhead",
    sentence="launch overhead: many small operations, whose starting costs more than their work",
    evidence=(
        "free launches: at most 1.80x (model calls replayed at half the batch)",
        "59 % of the model's time does not shrink with the batch",
        "2,316 operations a step",
        "2 values read back a step (`.item()` and the like); on a CPU that waits for nothing",
    ),
    bounds=(
        bound("compute at its dtype's ceiling", 3.80, AT_CEILING, "forward", "backward"),
        bound("free launches", 1.80, HALVED, "forward", "backward", "loss"),
        bound("free optimizer", 1.21, SHARE, "optimizer"),
        bound("free data", 1.02, REPLAYED, "data", low=1.00, high=1.04),
        bound("no host synchronisation", 1.02, SHARE, "sync"),
    ),
    model_flops_per_step=39_500_000,
    achieved_flops_per_s=2.34e9,
    model_flops_utilization=0.0147,
    notes=("no FLOP formula for: `max_pool2d_with_indices_backward`", "not observed: copy, communication"),
)


def trial(levers, ratio, low, high, outcome="faster", **changes):
    chance = random.Random(str(levers))
    base = [4.33e-3 * (1 + chance.gauss(0, 0.012)) for _ in range(6)]
    fields = dict(
        levers=levers,
        outcome=outcome,
        ratio=ratio,
        ratio_low=low,
        ratio_high=high,
        num_pairs=6,
        took_s=2.8,
        engage_s=0.02,
        peak_memory_bytes=312 * 2**20,
        baseline_peak_memory_bytes=305 * 2**20,
        baseline_step_s=tuple(base),
        candidate_step_s=tuple(x / (ratio or 1.0) * (1 + chance.gauss(0, 0.01)) for x in base),
    )
    return Trial(**{**fields, **changes})


def unmeasured(levers, outcome, reason, **changes):
    empty = dict(num_pairs=0, baseline_step_s=(), candidate_step_s=(), peak_memory_bytes=None, took_s=1.1)
    return trial(levers, None, None, None, outcome, reason=reason, **{**empty, **changes})


FETCH = {"fused_fetch": {}}
FETCH_FUSED = {**FETCH, "fused_optimizer": {}}
BEST = {**FETCH_FUSED, "threads": {"num": 1}}

LENET_TRIALS = (
    trial(FETCH, 3.05, 2.98, 3.11, agreement="agrees", agreement_detail="items and random streams equal",
          evidence={"fused_fetch": "412 items gathered, all equal to the loader's"}),
    trial({"threads": {"num": 1}}, 1.02, 0.99, 1.05, "inconclusive", reason="the interval is too wide to tell"),
    trial({"fused_optimizer": {}}, 1.03, 1.01, 1.05, class_="rounding", agreement="agrees",
          agreement_detail="gradient error 0; update error 2.1e-07"),
    trial({"bf16": {}}, 0.94, 0.92, 0.97, "slower", class_="precision"),
    trial({"channels_last": {}}, 1.00, 0.99, 1.01, "no difference", class_="rounding"),
    trial(FETCH_FUSED, 3.20, 3.12, 3.27, class_="rounding", agreement="agrees",
          agreement_detail="gradient error 2.1e-07, noise 0.7; update error 2.1e-07; items and random streams equal"),
    trial(BEST, 3.61, 3.50, 3.71, class_="rounding", agreement="agrees", num_discarded=3,
          agreement_detail="gradient error 2.4e-07, noise 0.7; update error 2.1e-07; items and random streams equal"),
    trial({**BEST, "bf16": {}}, 3.55, 3.43, 3.68, "no difference", class_="precision",
          reason="as fast without bf16"),
    trial({"workers": {"num": 2}}, 1.32, 1.27, 1.36, agreement="agrees",
          agreement_detail="items and random streams equal", took_s=4.5),
    unmeasured({"workers": {"num": 4}}, "disagrees", "other items: needs `--accept statistical`",
               agreement="disagrees", agreement_detail="other items: needs `--accept statistical`"),
    trial({**BEST, "compile": {}}, 3.66, 3.41, 3.88, "no difference", class_="rounding", engage_s=27.0, took_s=30.0,
          reason="compiled in 27 s, and no faster"),
)  # fmt: skip

UNTRIED = (
    Untried(lever="pinned_memory", reason="trains on the CPU"),
    Untried(lever="cudnn_benchmark", reason="trains on the CPU"),
    Untried(lever="tf32", reason="trains on the CPU"),
    Untried(lever="threads", reason="ruled out: what it shortens, entirely free, would bring 1.02x"),
    Untried(lever="foreach_optimizer", reason="class statistical needs `--accept statistical`"),
)


def timeline(groups, *, seed=7):
    """Steps of windows in turn; `groups` are (group, label, steps, milliseconds, repeats)."""
    chance = random.Random(seed)
    now_s, found = 3.2, []
    for group, words, steps, step_ms, repeats in groups:
        for _ in range(repeats):
            for index in range(steps):
                step_s = step_ms / 1e3 * (1 + abs(chance.gauss(0, 0.04))) * (8.0 if chance.random() < 0.004 else 1.0)
                outside_s = 0.31 if group == "baseline" and index == steps - 1 and chance.random() < 0.2 else 0.0
                found.append(
                    TimelineStep(
                        start_s=now_s, step_s=step_s + outside_s, group=group, outside_s=outside_s, label=words
                    )
                )
                now_s += step_s + outside_s
            now_s += 0.05
    return tuple(found)


def lenet_timeline():
    pairs = []
    for _ in range(5):
        pairs += [("baseline", "plain", 40, 4.3, 2)]
    pairs += [("anatomy", "plain", 40, 4.7, 4)]
    pairs += [("counterfactual", "plain", 30, 4.3, 1), ("counterfactual", "free_data", 30, 1.3, 1)] * 4
    for one in LENET_TRIALS:
        if one.ratio:
            pairs += [("trial", "plain", 30, 4.3, 1), ("trial", one.label, 60, 4.3 / one.ratio, 1)] * 4
    pairs += [("winner", "plain", 30, 4.3, 1), ("winner", label(BEST), 110, 1.2, 1)] * 10
    return timeline(pairs)


def lenet():
    """A winner, as in the mock."""
    plain = anatomy({"data": 3.07, "backward": 0.52, "forward": 0.48, "optimizer": 0.17, "unattributed": 0.09})
    tuned = anatomy({"backward": 0.50, "forward": 0.42, "data": 0.16, "optimizer": 0.05, "unattributed": 0.07})
    return Result(
        format=FORMAT,
        command="tune",
        flatout="0.1.0",
        created=CREATED,
        script="lenet.py",
        typed="lenet.py --data mnist --epochs 3",
        header=header(),
        machine=MACHINE,
        facts=FACTS,
        anatomy=plain,
        tuned_anatomy=tuned,
        diagnosis=INPUT,
        noise=comparison(1.001, 0.988, 1.014, "no difference"),
        baseline_steps_per_s=231.2,
        baseline_spread_fraction=0.02,
        baseline_window_step_s=(4.31e-3, 4.35e-3, 4.33e-3, 4.29e-3, 4.40e-3, 4.33e-3, 4.36e-3, 4.30e-3, 4.28e-3),
        verdict="faster",
        tuned_steps_per_s=832.4,
        tuning_s=71.3,
        ceilings=CEILINGS,
        census=CENSUS,
        trials=LENET_TRIALS,
        untried=UNTRIED,
        remeasured=replace(LENET_TRIALS[6], ratio=3.6, ratio_low=3.49, ratio_high=3.70, remeasured=True, num_pairs=10,
                       num_discarded=0),
        plan=plan_of(LENET_TRIALS[6]),
        plan_path="flatout.toml",
        break_even_steps=22693,
        steps_in_run=2814,
        foreign_fraction=0.01,
        written=("runs/lenet.pt", "runs/log.csv"),
        isolation="namespaces with overlays",
        timeline=lenet_timeline(),
        run=".flatout/lenet-3",
    )  # fmt: skip


def plan_of(won):
    return Plan(
        format=PLAN_FORMAT,
        flatout="0.1.0",
        script="lenet.py",
        arguments=("--data", "mnist", "--epochs", "3"),
        levers=won.levers,
        ratio=won.ratio,
        ratio_low=won.ratio_low,
        ratio_high=won.ratio_high,
        num_pairs=won.num_pairs,
        agreement=f"{won.class_}: {won.agreement_detail}",
        class_=won.class_,
        baseline_steps_per_s=231.2,
        tuned_steps_per_s=832.4,
        machine=MACHINE,
        python="3.11.7",
        framework="pytorch",
        framework_version="2.13.0+cpu",
        created=CREATED,
        run=".flatout/lenet-3",
    )


def nothing():
    """Nothing helps: the step is bound by arithmetic that is near the ceiling."""
    plain = anatomy(
        {"backward": 391.0, "forward": 186.0, "optimizer": 9.1, "data": 4.2, "loss": 1.6, "unattributed": 2.3},
        outside_s={"evaluation": 0.0312},
        num_steps=24,
    )
    census = replace(
        CENSUS, flops=81_200_000_000, num_operations=731, num_syncs=0, sync_places=(), uncounted=(),
        operations=(
            operation("convolution_backward", "32x256x14x14 256x256x3x3", 12, 32400, 391000, 218000),
            operation("convolution", "32x256x14x14 256x256x3x3", 12, 16200, 201000, 101000),
            operation("convolution_backward", "32x128x28x28 128x128x3x3", 8, 14800, 420000, 112000),
            operation("native_batch_norm_backward", "32x64x56x56", 20, 0, 1540000, 52000),
            operation("mm", "1000x32 32x512", 1, 33, 2100, 410),
        ),
    )  # fmt: skip
    trials = (
        trial({"threads": {"num": 1}}, 0.62, 0.61, 0.63, "slower", reason="4 pairs, all below 0.9: not pursued"),
        trial({"channels_last": {}}, 1.01, 0.98, 1.03, "inconclusive", class_="rounding",
              agreement="agrees", agreement_detail="gradient error 2.8e-06, noise 0.91",
              reason="the interval is too wide to tell"),
        trial({"fused_optimizer": {}}, 1.00, 0.99, 1.01, "no difference", class_="rounding"),
        trial({"foreach_optimizer": {}}, 1.00, 0.99, 1.01, "no difference", class_="rounding"),
        trial({"bf16": {}}, 1.41, 1.38, 1.44, "disagrees", class_="precision", agreement="disagrees",
              reason="gradients are scaled by 0.950, that is not noise",
              agreement_detail="gradients are scaled by 0.950, that is not noise"),
        trial({"workers": {"num": 1}}, 0.97, 0.95, 0.99, "slower"),
        unmeasured({"workers": {"num": 2}}, "failed", "RuntimeError: unable to open shared memory </torch_81_2>"),
        unmeasured({"compile": {}}, "failed", "InductorError: CppCompileError: C++ compile error"),
        trial({"channels_last": {}, "fused_optimizer": {}}, 1.01, 0.99, 1.02, "no difference", class_="rounding"),
    )  # fmt: skip
    chosen = [("baseline", "plain", 6, 594.0, 10), ("anatomy", "plain", 6, 602.0, 4)]
    for one in trials:
        if one.ratio:
            chosen += [("trial", "plain", 4, 594.0, 1), ("trial", one.label, 4, 594.0 / one.ratio, 1)] * 4
    return replace(
        lenet(),
        script="resnet_folder.py",
        typed="resnet_folder.py --data photographs --batch-size 32",
        header=header("resnet_folder.py"),
        anatomy=plain,
        tuned_anatomy=None,
        diagnosis=COMPUTE,
        noise=comparison(1.0, 0.991, 1.009, "no difference"),
        census=census,
        baseline_steps_per_s=1.683,
        tuned_steps_per_s=1.683,
        baseline_spread_fraction=0.006,
        baseline_window_step_s=(0.594, 0.596, 0.592, 0.595, 0.593, 0.594, 0.599, 0.594, 0.593, 0.594),
        verdict="no difference",
        tuning_s=164.0,
        trials=trials,
        remeasured=replace(trials[8], ratio=1.01, ratio_low=0.98, ratio_high=1.03, remeasured=True),
        plan=None,
        plan_path=None,
        break_even_steps=None,
        steps_in_run=1170,
        timeline=timeline(chosen, seed=3),
        run=".flatout/resnet_folder-1",
    )


def busy():
    """Others used the machine: nothing can be said."""
    trials = (
        trial({"threads": {"num": 1}}, 1.18, 0.88, 1.58, "inconclusive", reason="the interval is too wide to tell",
              num_discarded=9),
        unmeasured({"fused_optimizer": {}}, "inconclusive", "other processes used the CPU in every window",
                   num_discarded=12),
    )  # fmt: skip
    chosen = [("baseline", "plain", 40, 4.3, 2), ("baseline", "plain", 40, 9.8, 3), ("baseline", "plain", 30, 5.2, 5)]
    return replace(
        lenet(),
        tuned_anatomy=None,
        noise=comparison(NAN, NAN, NAN, "inconclusive", "only 2 pairs of windows, at least 4 are needed"),
        baseline_steps_per_s=148.3,
        baseline_spread_fraction=0.31,
        baseline_window_step_s=(4.4e-3, 9.6e-3, 6.7e-3, 5.1e-3, 11.2e-3),
        tuned_steps_per_s=148.3,
        verdict="inconclusive",
        tuning_s=180.4,
        trials=trials,
        untried=(*UNTRIED, Untried(lever="bf16", reason="the budget of 180 s was too short for more")),
        remeasured=None,
        plan=None,
        plan_path=None,
        break_even_steps=None,
        foreign_fraction=0.37,
        warnings=("other processes kept the machine busy: intervals are wide, windows were discarded",),
        refused=("/home/u/.cache/lenet/state.bin", "/var/tmp/lock", "/data/mnist/cache.idx"),
        timeline=timeline(chosen, seed=5),
        run=".flatout/lenet-4",
        stopped="the budget of 180 s was too short for more",
        short_budget_s=180.0,
    )


def idle(*rows):
    return tuple(Idle(cause=cause, phase=phase, seconds=ms / 1e3) for cause, phase, ms in rows)


def profiled_on_cpu():
    return ProfiledTime(
        device="cpu", num_steps=14, step_s=18.6e-3, busy_s=10.9e-3,
        idle=idle(("Python", "forward", 3.2), ("Python", "backward", 1.9), ("Python", "optimizer", 1.8),
                  ("input", "data", 0.4), ("Python", "unattributed", 0.4)),
        parts=(
            Part(name="aten::addmm", calls=24.0, seconds=2.9e-3, share=0.156, fraction=0.09, limit="matmul_float32"),
            Part(name="aten::mm", calls=48.0, seconds=2.1e-3, share=0.113, fraction=0.11, limit="matmul_float32"),
            Part(name="aten::copy_", calls=310.0, seconds=0.9e-3, share=0.048),
        ),
    )  # fmt: skip


def profiled_on_gpu():
    gemm = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off"
    add = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3>>"
    return ProfiledTime(
        device="cuda", num_steps=20, step_s=10.4e-3, busy_s=4.5e-3, tensor_core_share=0.42,
        idle=idle(("Python", "forward", 2.6), ("input", "data", 2.5), ("synchronisation", "unattributed", 0.5),
                  ("starting", "", 0.2), ("copies", "copy", 0.1)),
        parts=(
            Part(name=gemm, calls=24.0, seconds=1.9e-3, share=0.183, operator="aten::mm", tensor_cores=True,
                 fraction=0.61, limit="matmul_bfloat16"),
            Part(name=add, calls=310.0, seconds=1.1e-3, share=0.106, operator="aten::add_", tensor_cores=False),
        ),
    )  # fmt: skip


def why():
    """Only measured and diagnosed: a small transformer whose many operations cost more to start than to do."""
    plain = anatomy(
        {"backward": 8.1, "forward": 4.6, "optimizer": 2.9, "data": 0.4, "sync": 0.3, "loss": 0.2, "unattributed": 0.4}
    )
    places = ("char_gpt.py:88, once a step", "char_gpt.py:91, once a step")
    census = replace(CENSUS, num_operations=2316, num_syncs=2, sync_places=places)
    return replace(
        lenet(),
        command="why",
        script="char_gpt.py",
        typed="char_gpt.py --layers 4",
        header=header("char_gpt.py"),
        anatomy=plain,
        tuned_anatomy=None,
        census=census,
        reads=reads(
            read_site("char_gpt.py", 88, "loss.item()", 0.21),
            read_site("char_gpt.py", 91, "scheduler.step(loss)", 0.06),
            read_site("char_gpt.py", 97, "logits.argmax(-1).tolist()", 0.04, often=0.01),
        ),
        diagnosis=LAUNCHES,
        profiled=profiled_on_cpu(),
        baseline_steps_per_s=59.2,
        tuned_steps_per_s=59.2,
        baseline_window_step_s=(16.9e-3, 17.0e-3, 16.8e-3, 16.9e-3),
        verdict="inconclusive",
        tuning_s=11.8,
        trials=(),
        untried=(),
        remeasured=None,
        plan=None,
        plan_path=None,
        break_even_steps=None,
        timeline=timeline([("baseline", "plain", 40, 16.9, 8), ("anatomy", "plain", 40, 17.4, 4)], seed=11),
        run=".flatout/char_gpt-1",
    )


def huge():
    """Names that are long, foreign, and hostile."""
    names = {f"a_lever_with_a_long_name_{number}": {"value": 12345 * number} for number in range(1, 6)}
    evil = {"<img src=x onerror=alert(1)>": {"path": "</text><script>alert(2)</script>"}}
    wide = {"訓練を速くするとても長い名前のレバー": {"値": "とても長い設定の値とても長い設定の値"}}
    money = {"$\\frac{1}{2}$": {"a": "$x^2", "b": "100%"}}
    dots = {"x" * 90: {}}
    trials = (
        *(trial(dict(list(names.items())[:n]), 1.0 + n / 10, 1.0 + n / 11, 1.0 + n / 9, agreement="agrees",
                agreement_detail="gradient error 2.4e-07, noise 0.7; " * 6) for n in range(1, 6)),
        trial(evil, 123.4, 99.9, 151.0, agreement="agrees", agreement_detail='"><b>bold</b> & <i>'),
        trial(wide, 0.5, 0.4, 0.6, "slower", reason="ゆっくり" * 20),
        trial(money, 1.0, 0.99, 1.01, "no difference"),
        unmeasured(dots, "failed", "RuntimeError: \x1b[31mred\x1b[0m\n  File \"x\"\x00 " + "y" * 300),
    )  # fmt: skip
    return replace(
        lenet(),
        script="<script>alert(1)</script>.py",
        typed="'<script>alert(1)</script>.py' --name 'a  b' " + " ".join(f"--option-{n} value-{n}" for n in range(12)),
        header=header("<script>alert(1)</script>.py", framework="$frame$", framework_version="<9>"),
        machine=replace(MACHINE, cpu="<b>CPU</b> & " + "Sons " * 12, hostname="h\x07ost\u202egnp.exe"),
        trials=trials,
        remeasured=replace(trials[5], remeasured=True),
        plan=plan_of(trials[5]),
        census=replace(
            CENSUS,
            operations=(
                operation("<svg onload=alert(3)>", "64x6x14x14 " * 20, 1, 30.7, 712, 282),
                operation("$\\alpha_1$ & co", "64x1", 3, 3.7, 12, 28),
                *CENSUS.operations,
            ),
            sync_places=("/home/user/" + "deep/" * 30 + "train.py:1, once a step",),
        ),
        reads=reads(
            read_site(
                "/home/user/" + "deep/" * 30 + "<b>.py",
                1,
                "<script>alert(4)</script>`\x1b[31m" * 9,
                9.0,
                often=4096.0,
            ),
            read_site("<stdin>", 1, "", 0.5),
        ),
        untried=tuple(Untried(lever=f"lever_{n}", reason=f"reason <{n}> " * 4) for n in range(12)),
        warnings=("a <warning> & " * 20, "second"),
        refused=tuple(f"/path/{'x' * 60}/{n}" for n in range(20)),
        run=".flatout/" + "r" * 100,
        timeline=timeline([("baseline", "plain", 1000, 4.0, 10), ("trial", trials[5].label, 1000, 1.0, 10)], seed=2),
    )


def hollow():
    """Whatever may be missing is missing, and whatever may be NaN is NaN."""
    empty = Anatomy(
        step_s=0.0,
        phases_s={"unattributed": NAN},
        spread_fraction={},
        outside_s={},
        not_observed=("data", "copy", "forward", "loss", "backward", "optimizer", "communication", "sync"),
        num_steps=0,
        num_windows=0,
    )
    nothing_known = trial(
        {}, NAN, NAN, NAN, "inconclusive", took_s=0.0, engage_s=0.0, num_pairs=0, peak_memory_bytes=None,
        baseline_peak_memory_bytes=None, baseline_step_s=(NAN,), candidate_step_s=(),
    )  # fmt: skip
    return replace(
        lenet(),
        script="",
        typed="",
        created="",
        header=header("", arguments=(), framework="", framework_version="", python=""),
        machine=replace(MACHINE, cpu="", hostname="", cpu_features=(), operating_system="", shm_bytes=None),
        facts=replace(FACTS, models=(), optimizers=(), loaders=(), num_threads=0),
        anatomy=empty,
        tuned_anatomy=None,
        diagnosis=replace(lenet().diagnosis, binding="nothing", sentence="", evidence=(), bounds=(), notes=(),
                          model_flops_per_step=None, achieved_flops_per_s=None, model_flops_utilization=None),
        noise=comparison(NAN, NAN, NAN, "inconclusive"),
        baseline_steps_per_s=NAN,
        tuned_steps_per_s=NAN,
        baseline_spread_fraction=NAN,
        baseline_window_step_s=(NAN,),
        verdict="inconclusive",
        tuning_s=NAN,
        ceilings=None,
        census=None,
        trials=(nothing_known,),
        untried=(),
        remeasured=None,
        plan=None,
        plan_path=None,
        break_even_steps=None,
        steps_in_run=None,
        foreign_fraction=None,
        written=(),
        isolation="",
        timeline=(TimelineStep(start_s=NAN, step_s=NAN, group=""),),
        run="",
    )  # fmt: skip


def gpu():
    """One GPU, with the device's own clock, and no winner that could be compared."""
    machine = replace(
        MACHINE,
        num_cores=16,
        num_physical_cores=8,
        cpu="Intel Xeon Platinum 8480+",
        accelerators=(Accelerator(name="NVIDIA H100", memory_bytes=80 * 2**30, compute_capability="9"),),
    )
    plain = anatomy(
        {"forward": 3.1, "data": 2.6, "backward": 1.9, "sync": 1.2, "optimizer": 0.8, "unattributed": 0.3},
        not_observed=("communication",),
    )
    won = trial(
        {"tf32": {}},
        1.24,
        1.22,
        1.27,
        class_="precision",
        agreement="inconclusive",
        agreement_detail="the replayed gradient is not the script's own (cosine 0.912)",
    )
    return replace(
        lenet(),
        script="train.py",
        typed="train.py",
        header=header("train.py", framework_version="2.13.0+cu130", world_size=2),
        machine=machine,
        facts=replace(FACTS, device="cuda:0"),
        anatomy=replace(plain, host_s={"forward": 0.4e-3, "backward": 0.9e-3, "optimizer": 0.2e-3, "sync": 4.8e-3}),
        tuned_anatomy=None,
        trials=(won, trial({"bf16": {}}, 1.32, 1.29, 1.36, "disagrees", class_="precision", agreement="disagrees",
                           agreement_detail="gradient error 0.41 is not small against the noise between batches 0.62")),
        remeasured=replace(won, remeasured=True),
        plan=None,
        plan_path=None,
        verdict="inconclusive",
        break_even_steps=None,
        tuned_steps_per_s=231.2,
        profiled=profiled_on_gpu(),
        reads=reads(
            read_site("train.py", 41, "loss.item()", 1.1, on_device=True),
            read_site("train.py", 47, "if loss.item() > 9:", 0.09, on_device=True),
        ),
        run=".flatout/train-1",
    )  # fmt: skip


EXAMPLES = {
    "lenet": lenet, "nothing": nothing, "busy": busy, "why": why, "huge": huge, "hollow": hollow, "gpu": gpu,
}  # fmt: skip


@functools.cache
def terminal_texts():
    """Every golden file's name with what belongs into it."""
    from flatout.report import machine, terminal
    from proofs import PROOFS
    from shown import as_text, on_screen

    found = {}
    for name, make in EXAMPLES.items():
        found[f"report_{name}.txt"] = on_screen(make())
    found["report_lenet_verbose.txt"] = on_screen(lenet(), verbose=True)
    found["report_lenet_120.txt"] = on_screen(lenet(), width=120)
    found["report_proof.txt"] = on_screen(PROOFS["equivalent"]())
    found["report_machine.txt"] = as_text(terminal.report(machine.view(CEILINGS, now_unix_s=CREATED_UNIX_S)))
    return found


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))  # of what tests share; pytest finds it by itself
    for name, text in terminal_texts().items():
        (HERE / name).write_text(text, encoding="utf-8")
        print(name, len(text.splitlines()), "lines")
