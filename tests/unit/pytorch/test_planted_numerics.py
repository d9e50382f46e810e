"""Is every planted bug caught by the check that its lever names, and does no sound lever fall with it?

A fast part of `benchmarks/claims/numerics.py`: each bug in one family of scripts, a few sound levers on hard scripts.
"""

import sys
from functools import partial
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "claims"))

from numerics_bugs import (  # noqa: E402
    BUGS,
    PLANTED_IN,
    copied_once,
    rate_kept,
)
from numerics_judging import judged  # noqa: E402
from numerics_planting import NAME, around, planted  # noqa: E402
from numerics_precision import bf16_scaled  # noqa: E402
from numerics_scripts import FAMILIES  # noqa: E402
from numerics_sound import FORCED, SCRIPTS  # noqa: E402
from numerics_truth import CASES  # noqa: E402

IN_TURN = [(bug, bug.families[number % len(bug.families)]) for number, bug in enumerate(BUGS)]

HARD = {
    "frozen body": {"channels_last": {}, "fused_optimizer": {}},
    "zero gamma, not trained": {"channels_last": {}},
    "cumulative statistics": {"bf16": {}, "channels_last": {}, "fused_optimizer": {}},
    "batch of one": {"threads": {"num": 2}},
    "model in bfloat16": {"foreach_optimizer": {}},
    "autocast of its own": {"channels_last": {}, "fused_optimizer": {}},
    "learning rate 1e-7": {"fused_optimizer": {}},
    "inputs offset by 1000": {"channels_last": {}},
    "loss near zero": {"bf16": {}},
    "sparse embedding": {"fused_optimizer": {}},
    "gan": {"bf16": {}},
    "3D, groups, weight norm": {"threads": {"num": 2}},
    "checkpoints, 4 micro-batches": {"foreach_optimizer": {}},
    "gpt at its start": {"fused_fetch": {}},
    "whole numbers": {"bf16": {}},
    "two calls": {"threads": {"num": 2}},
    "growing buffer": {"bf16": {}},
    "scheduled momentum": {"fused_optimizer": {}},
    "whole learning rate": {"fused_optimizer": {}},
    "turning double": {"bf16": {}, "fused_optimizer": {}, "threads": {"num": 2}},
    "complex weights": {"bf16": {}, "foreach_optimizer": {}, "threads": {"num": 2}},
}


def test_there_are_more_than_twenty_bugs_in_five_families():
    assert len({bug.name for bug in BUGS}) >= 20 and len(FAMILIES) == 5
    assert {bug.check for bug in BUGS} == {"gradients", "updates", "batches"}
    assert {bug.class_ for bug in BUGS} == {"exact", "rounding"}


@pytest.mark.parametrize(("bug", "family"), [pytest.param(b, f, id=f"{b.name}, {f}") for b, f in IN_TURN])
def test_a_planted_bug_is_caught_by_the_check_that_its_lever_names(bug, family):
    found = judged(PLANTED_IN[family], {NAME: {}}, {NAME: bug.lever()})
    assert found.word == "disagrees", found.detail
    assert found.checks == (bug.check,)


@pytest.mark.parametrize("bug", ["gradients scaled by 1.01", "momentum or beta off", "the input of an earlier step"])
def test_complex_weights_are_looked_at_in_both_parts(bug):
    lever = next(one for one in BUGS if one.name == bug)
    found = judged(SCRIPTS["complex weights"], {NAME: {}}, {NAME: lever.lever()})
    assert found.word == "disagrees" and found.checks == (lever.check,), found.detail


@pytest.mark.parametrize("script", HARD)
def test_a_sound_lever_is_not_refused_where_that_is_hard(script):
    found = judged(SCRIPTS[script], HARD[script], applying=True, forced=FORCED)
    assert found is None or found.word == "agrees", found.detail


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("case", [case for case in CASES if case[3]], ids=lambda case: case[0])
def test_a_lever_that_is_closer_to_float64_is_never_refused_and_one_that_is_farther_is(case, dropout):
    _, script, plant, wanted = case
    found = judged(partial(script, dropout), {NAME: {}}, {NAME: planted(plant, "rounding", "gradients")})
    assert found.word == wanted, found.detail
    made = [d for point in found.points for d in point.differences]
    assert all(d.truth_error is not None for d in made), "the truth is known, with dropout as well"
    if wanted == "agrees":
        assert all(d.truth_error < d.baseline_truth_error for d in made)


@pytest.mark.parametrize(("factor", "place", "word"), [(1.0, "all", "agrees"), (1.05, "all", "disagrees"),
                                                       (0.0, "largest", "disagrees")])  # fmt: skip
def test_bfloat16_that_scales_or_loses_gradients_is_told_from_bfloat16(factor, place, word):
    assert judged(FAMILIES["gpt"], {NAME: {}}, {NAME: bf16_scaled(factor, place)}).word == word


def test_a_model_that_draws_noise_in_a_narrow_type_has_a_truth_too_or_says_why_not(watch, workload):
    watched, script = watch(), workload("transformer")
    watched.compare(8, {"threads": {"num": 2}})
    script.train(14)
    found = watched.difference()
    assert found.fault == "" and (found.rounding is None or 0 < found.rounding < 1e-4)


# -- what shows only where something has moved since the lever was engaged, or beside the model ----------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("plant", "check", "said"), [(copied_once, "gradients", "earlier step"),
                                                      (rate_kept, "updates", "updates of")])  # fmt: skip
def test_what_was_kept_when_the_lever_was_engaged_is_seen_before_anything_has_moved(family, plant, check, said):
    found = judged(FAMILIES[family], {NAME: {}}, {NAME: planted(plant, "rounding", check)})
    assert found.word == "disagrees" and said in found.detail, found.detail


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        return value.clone()

    @staticmethod
    def backward(context, gradient):
        return 1.5 * gradient


def two_models():
    """One computes from what the other did."""
    first, second = torch.nn.Linear(16, 32), torch.nn.Linear(32, 4)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.05)
    while True:
        optimizer.zero_grad()
        second(torch.tanh(first(torch.randn(8, 16)))).square().mean().backward()
        optimizer.step()
        yield


@pytest.mark.parametrize(
    ("change", "said"), [(torch.Tensor.detach, "no gradient any more for an input"), (Scaled.apply, "is off by 0.5")]
)
def test_gradients_that_another_model_learns_from_are_compared_too(change, said):
    def changed(module, compute, args, kwargs):
        return compute(*[change(x) if x.requires_grad else x for x in args], **kwargs)

    found = judged(two_models, {NAME: {}}, {NAME: planted(around(changed), "rounding", "gradients")})
    assert found.word == "disagrees" and said in found.detail, found.detail
    assert judged(two_models, {"bf16": {}}).word == "agrees"
