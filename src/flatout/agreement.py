"""Do the numbers with a lever agree with the numbers without it?

The child measures (`Difference`: relative error, slope, cosine, beside the noise that the script already has); here
the measurements are judged. In: the differences at several points of training and the widest class among the levers.
Out: a `Judgement` in one word with the numbers behind it. Nothing measured means *inconclusive*, never *agrees*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from flatout.trace import Agreement, Difference

#: Relative error up to which a change of rounding alone is believed (float32 has 6e-8; sums over a batch and
#: normalisation amplify it; measured: 2e-7 for fused optimizers, 1e-6 to 3e-5 for compilation and memory format).
ROUNDING_ERROR = 1e-3

#: Share of the script's own noise between batches that the error of a precision lever may reach (measured for bf16:
#: 0.05 on LeNet, 0.01 on a GPT, 0.07 on a ResNet after 36 steps, 0.32 on the same ResNet before its first step).
NOISE_SHARE = 1 / 3

#: Distance of the slope from 1 up to which a precision lever scales nothing systematically (measured for bf16:
#: 0.000 on LeNet and a GPT, 0.004 on a ResNet after 36 steps, 0.050 before its first step).
SLOPE_ERROR = 0.02

#: Cosine between the replayed gradient and the script's own below which gradients bypass the model's outputs.
EXPLAINED = 0.999

Word = Literal["agrees", "disagrees", "inconclusive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Whether the numbers agree, and why, in one line."""

    verdict: Word
    detail: str


def judge(points: Sequence[Agreement], class_: str, checks: Sequence[str]) -> Judgement:
    """Judge the differences measured for one set of levers.

    Args:
        points: What was measured, at one or more points of training.
        class_: The widest class among the levers (see `flatout.plan.CLASSES`).
        checks: The checks that the levers name; each must have been made at least once.
    """
    missing = next((p.missing for p in points if p.missing), "")
    found = [d for p in points for d in p.differences]
    unmade = [c for c in checks if c != "none" and not any(d.check == c for d in found)]
    if unmade:
        why = missing or "nothing was captured"
        return Judgement(verdict="inconclusive", detail=f"{' and '.join(unmade)} not compared: {why}")
    results = [_judge_one(d, class_) for d in found]
    for word in ("disagrees", "inconclusive"):
        for result in results:
            if result.verdict == word:
                return result
    if not results:
        return Judgement(verdict="agrees", detail="changes no number")
    return Judgement(verdict="agrees", detail=_summary(found))


def _judge_one(found: Difference, class_: str) -> Judgement:
    if found.check == "batches":
        return _judge_batches(found, class_)
    if not found.finite or not math.isfinite(found.error):
        return Judgement(verdict="disagrees", detail=f"NaN or infinity in the {found.check} that plain does not have")
    if found.explained_cosine is not None and found.explained_cosine < EXPLAINED:
        return Judgement(
            verdict="inconclusive",
            detail="the replayed gradient is not the script's own (cosine "
            f"{found.explained_cosine:.3f}): gradients bypass the model's outputs",
        )
    if not found.random_states_equal:
        return Judgement(verdict="disagrees", detail="the random generators end elsewhere than under plain")
    return _judge_error(found, class_)


def _judge_error(found: Difference, class_: str) -> Judgement:
    floor = 3 * found.baseline_error  # two plain runs may differ by chance on a GPU
    if found.error <= floor:
        return Judgement(verdict="agrees", detail=_summary([found]))
    if class_ == "exact":
        return Judgement(
            verdict="disagrees", detail=f"{found.check} differ by {found.error:.1e}, exact means not a bit"
        )
    if found.error <= ROUNDING_ERROR:
        return Judgement(verdict="agrees", detail=_summary([found]))
    if class_ == "rounding":
        return Judgement(
            verdict="disagrees",
            detail=f"{found.check} differ by {found.error:.1e}, rounding explains up to {ROUNDING_ERROR:.0e}"
            + (f" (worst: `{found.worst}`)" if found.worst else ""),
        )
    return _judge_precision(found)


def _judge_precision(found: Difference) -> Judgement:
    slope_error = abs(found.slope - 1)
    if slope_error > SLOPE_ERROR:
        return Judgement(
            verdict="disagrees", detail=f"{found.check} are scaled by {found.slope:.3f}, that is not noise"
        )
    if found.check == "updates":
        return Judgement(verdict="disagrees", detail=f"updates differ by {found.error:.1e} from the same gradients")
    if found.noise is None:
        return Judgement(verdict="inconclusive", detail="the gradient's own noise between batches was not measured")
    if found.error > NOISE_SHARE * found.noise:
        return Judgement(
            verdict="disagrees",
            detail=f"gradient error {found.error:.2g} is not small against the noise between batches {found.noise:.2g}",
        )
    return Judgement(verdict="agrees", detail=_summary([found]))


def _judge_batches(found: Difference, class_: str) -> Judgement:
    if found.baseline_error > 0:
        return Judgement(verdict="inconclusive", detail="two plain loaders already give different batches")
    if found.error == 0 and found.random_states_equal:
        return Judgement(verdict="agrees", detail="items and random streams equal")
    what = "other items" if found.error else "same items, but the random generators end elsewhere"
    if class_ in ("statistical", "semantics"):
        return Judgement(verdict="agrees", detail=f"{what}: other random numbers, which class {class_} admits")
    return Judgement(verdict="disagrees", detail=f"{what}: needs `--accept statistical`")


def _summary(found: Sequence[Difference]) -> str:
    words = []
    gradients = [d for d in found if d.check == "gradients"]
    if gradients:
        worst = max(gradients, key=lambda d: d.error)
        noise = f", noise {worst.noise:.2g}" if worst.noise is not None else ""
        slope = f", slope {worst.slope:.3f}" if worst.error > ROUNDING_ERROR else ""
        words.append(f"gradient error {_short(worst.error)}{noise}{slope}")
    updates = [d for d in found if d.check == "updates"]
    if updates:
        words.append(f"update error {_short(max(d.error for d in updates))}")
    if any(d.check == "batches" for d in found):
        words.append("items and random streams equal")
    return "; ".join(words)


def _short(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}" if value < 0.01 else f"{value:.2g}"
