"""Records made by hand, for tests: every field that a test does not care about has a plain value."""

import random
from dataclasses import replace

from flatout.frameworks.lever import Lever
from flatout.judge.agreement import Judgement
from flatout.judge.anatomy import Anatomy
from flatout.judge.causes import Findings
from flatout.judge.diagnosis import diagnose
from flatout.judge.result import FORMAT as RESULT_FORMAT
from flatout.judge.result import Result, TimelineStep, Untried
from flatout.judge.stats import compare
from flatout.records.ceilings import Machine
from flatout.records.difference import Difference
from flatout.records.facts import Facts, LoaderFacts, ModelFacts, OptimizerFacts
from flatout.records.plan import PLAN_FORMAT, Plan, Trial
from flatout.records.trace import Agreement, Header, Window
from flatout.trials.search.screen import Answer, screen
from flatout.trials.search.space import clash

HEADER = Header(
    format=1,
    flatout="0.1.0",
    started_unix_s=1.8e9,
    script="train.py",
    arguments=("--epochs", "3"),
    python="3.11.7",
    framework="pytorch",
    framework_version="2.13.0",
    pid=7,
)
MACHINE = Machine(
    hostname="here",
    cpu="AMD EPYC",
    architecture="x86_64",
    num_cores=2,
    num_physical_cores=1,
    num_cores_total=2,
    memory_bytes=16 * 2**30,
    operating_system="Linux 6.1.0",
    cpu_features=("avx2", "fma"),
)
MODEL = ModelFacts(name="Net", num_parameters=100, num_modules=3, dtypes=("float32",), convolution_dims=(2,))
OPTIMIZER = OptimizerFacts(name="SGD", fused=False, foreach=False, can_fuse=True)
LOADER = LoaderFacts(
    dataset="Images",
    batch_size=16,
    num_batches=100,
    num_workers=0,
    prefetch_factor=None,
    pinned=False,
)
FACTS = Facts(device="cpu", models=(MODEL,), optimizers=(OPTIMIZER,), loaders=(LOADER,), num_threads=2)


def window(step_s=(0.01, 0.01), phases=None, *, outside_s=None, observe="phases", **changes):
    """A window; `phases` are seconds per step, one number for all steps or one for each."""
    rows = {
        name: tuple(value) if isinstance(value, (list, tuple)) else (value,) * len(step_s)
        for name, value in (phases or {}).items()
    }
    fields = dict(
        index=0,
        purpose="anatomy",
        levers={},
        observe=observe,
        step_s=tuple(step_s),
        outside_s=tuple(outside_s) if outside_s is not None else (0.0,) * len(step_s),
        start_s=0.0,
        phases=rows,
    )
    return Window(**{**fields, **changes})


def anatomy(phases_s, *, not_observed=("copy", "communication", "sync"), **changes):
    """An anatomy with these seconds by phase."""
    fields = dict(
        step_s=sum(phases_s.values()),
        phases_s=dict(phases_s),
        spread_fraction={},
        outside_s={},
        not_observed=tuple(name for name in not_observed if name not in phases_s),
        num_steps=40,
        num_windows=4,
    )
    return Anatomy(**{**fields, **changes})


def measured(*differences, missing=""):
    """What the checks found at one point of training."""
    return Agreement(levers={"some": {}}, differences=differences, missing=missing)


def gradients(error=1e-7, **changes):
    return replace(Difference(check="gradients", error=error, noise=0.7), **changes)


def trial(levers, ratio=1.2, outcome="faster", agreement="agrees", num_pairs=9, **changes):
    return Trial(levers=levers, ratio=ratio, outcome=outcome, agreement=agreement, num_pairs=num_pairs, **changes)


def plan(script="train.py", levers=None, **changes):
    fields = dict(
        format=PLAN_FORMAT,
        flatout="0.1.0",
        script=script,
        arguments=("--epochs", "3"),
        levers={"bf16": {}, "threads": {"num": 1}} if levers is None else levers,
        ratio=1.5,
        ratio_low=1.45,
        ratio_high=1.55,
        num_pairs=10,
        agreement="precision: gradient error 0.01, noise 0.7",
        class_="precision",
        baseline_steps_per_s=100.0,
        tuned_steps_per_s=150.0,
        machine=MACHINE,
        python="3.11.7",
        framework="pytorch",
        framework_version="2.13.0",
        created="2026-11-21T10:46:07+00:00",
        run=".flatout/train-1",
    )
    return Plan(**{**fields, **changes})


def lever(name="some", **changes):
    """A lever that fulfils the contract, but for what is changed; None takes an attribute away."""
    attributes = dict(
        name=name,
        summary="does something",
        class_="rounding",
        shortens=("forward", "backward"),
        check="gradients",
        applies=lambda self, facts, machine: None,
        engage=lambda self, session, settings: None,
        release=lambda self, session: None,
        evidence=lambda self, session: "seen",
    )
    attributes = {key: value for key, value in {**attributes, **changes}.items() if value is not None}
    return type(name.title(), (Lever,), attributes)()


def registry(*levers):
    return {each.name: each for each in levers}


ANATOMY = anatomy({"data": 0.005, "forward": 0.002, "backward": 0.002, "unattributed": 0.001})
NOISE = compare([1.0, 1.01, 0.99, 1.0, 1.02], [1.01, 1.0, 1.0, 0.99, 1.0])
WON = trial({"bf16": {}}, 1.5, ratio_low=1.45, ratio_high=1.55, num_discarded=1, took_s=3.0, remeasured=True)


def result(**changes):
    """What a `tune` with a winner found."""
    fields = dict(
        format=RESULT_FORMAT,
        command="tune",
        flatout="0.1.0",
        created="2026-11-21T10:46:07+00:00",
        script="train.py",
        typed="train.py --epochs 3",
        header=HEADER,
        machine=MACHINE,
        facts=FACTS,
        anatomy=ANATOMY,
        diagnosis=diagnose(Findings(anatomy=ANATOMY, facts=FACTS, num_cores=2, counterfactuals={})),
        noise=NOISE,
        baseline_steps_per_s=100.0,
        baseline_spread_fraction=0.01,
        baseline_window_step_s=(0.01, 0.0101),
        verdict="faster",
        tuned_steps_per_s=150.0,
        tuning_s=60.0,
        trials=(trial({"bf16": {}}, 1.48, num_discarded=2, took_s=2.0), trial({}, None, outcome="failed")),
        untried=(Untried(lever="compile", reason="no compiler"),),
        remeasured=WON,
        plan=plan(),
        plan_path="flatout.toml",
        break_even_steps=18_000,
        steps_in_run=5_000,
        timeline=(TimelineStep(start_s=0.0, step_s=0.01, group="baseline"),),
        run=".flatout/train-1",
    )
    return Result(**{**fields, **changes})


def screened(where, speed, broken=lambda levers: "", limit=200, seed=0):
    """What comes of screening, and all that it asked for; a step takes a second without levers, and little noise."""
    lots, asks = random.Random(seed), []

    def answer(ask):
        asks.append(ask)
        assert not clash(ask.levers, where)
        outcome = broken(ask.levers)
        if ask.what == "window":
            broke = "it broke" if outcome == "failed" else ""
            return Answer(step_s=lots.lognormvariate(0, 0.002) / speed(ask.levers), failure=broke)
        return Answer(judgement=Judgement(verdict="disagrees" if outcome == "disagrees" else "agrees", detail="seen"))

    asking = screen(where, lambda gain: len(asks) < limit, random.Random(seed))
    try:
        ask = next(asking)
        while True:
            ask = asking.send(answer(ask))
    except StopIteration as end:
        return end.value, asks
