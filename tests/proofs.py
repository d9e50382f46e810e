"""Proofs made by hand: whole runs, and what is concluded from them."""

import random
from dataclasses import replace

from flatout.judge import proof
from flatout.judge.metric import Metric, Reading
from flatout.judge.proof import Aim, Asked, WholeRun
from handmade import MACHINE

ASKED = Asked(
    script="train.py --epochs 3", source_hash="ab", levers={"bf16": {}}, metric=Metric(pattern="acc: (.*)"),
    seed_option="", versions=("1", "2.13", "3.11"), machine_key="k",
)  # fmt: skip


def whole(seed, side, value=0.98, wall_s=10.0, **changes):
    found = WholeRun(
        seed=seed, side=side, exit_code=0, wall_s=wall_s, training_s=wall_s - 2, num_steps=100, value=value,
        num_readings=2, readings=(Reading(value=0.5, at_s=wall_s / 2), Reading(value=value or 0.0, at_s=wall_s)),
        losses_hash=f"{seed}{side if value is None else value}",
    )  # fmt: skip
    return replace(found, **changes)


def runs(num, gain=1.0, shift=0.0):
    chance = random.Random(1)
    found = []
    for seed in range(num):
        value = 0.98 + chance.gauss(0, 0.003)
        found.append(whole(seed, "plain", value, 10 + chance.random() / 10))
        found.append(whole(seed, "plan", value + shift * (1 + seed / 20), (10 + chance.random() / 10) / gain))
    return found


def proved(found, **aim):
    return proof.prove(ASKED, Aim(**aim), found, MACHINE, "2026-11-23T00:00:00+00:00")


def curve(run, num=60):
    """The run with a metric that climbs to its value."""
    value = run.value if run.value is not None else 0.5
    points = (Reading(value=value * (1 - 0.8**n), at_s=run.wall_s * n / num) for n in range(1, num + 1))
    return replace(run, readings=tuple(points), num_readings=num)


ODD = "</script><b>\u202e\x07 " + "x" * 80

PROOFS = {
    "identical": lambda: proved([curve(r) for r in runs(8, gain=2.0)], target=0.9),
    "equivalent": lambda: proved([curve(r) for r in runs(8, gain=1.5, shift=0.0004)], target=2.0),
    "different": lambda: proved([replace(r, joules=300.0) for r in runs(8, shift=-0.05)], margin=0.01),
    "undecided": lambda: proved(runs(2)),
    "of many seeds": lambda: proved([curve(r, 400) for r in runs(60, shift=0.001)]),
    "with failures": lambda: proved(
        [replace(r, value=None, problem=f"killed by signal 9: {ODD}") if r.seed == 1 else r for r in runs(5)]
    ),
    "without metric": lambda: proved([replace(r, value=float("nan"), readings=()) for r in runs(4)]),
    "of huge numbers": lambda: proved(
        [replace(r, value=1e300 * (1 + r.seed), readings=(Reading(value=-1e308, at_s=1.0),)) for r in runs(4)]
    ),
    "of odd names": lambda: replace(
        proved(runs(4)), asked=replace(ASKED, script=ODD, metric=Metric(pattern=ODD), levers={ODD: {}}), stopped=ODD
    ),
    "against itself": lambda: replace(proved(runs(4)), asked=replace(ASKED, levers={})),
    "of one run": lambda: proved(runs(1)[:1]),
    "of nothing": lambda: proved([]),
}
