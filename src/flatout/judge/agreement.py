"""Do the numbers with a lever agree with the numbers without it?

The child measures (`Difference`: relative error, slope, beside the noise that the script already has); here
the measurements are judged. In: the differences at several points of training and the widest class among the levers.
Out: a `Judgement` in one word with the numbers behind it. Nothing measured means *inconclusive*, never *agrees*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from flatout.judge import answers
from flatout.records.difference import Difference
from flatout.records.trace import Agreement

#: Relative error up to which a change of rounding alone is believed (float32 has 6e-8; sums over a batch and
#: normalisation amplify it; measured: 2e-7 for fused optimizers, 1e-6 to 3e-5 for compilation and memory format).
ROUNDING_ERROR = 1e-3

#: Multiples of what one unit in the last place of every number moves, up to which the worst parameter's error is
#: rounding (measured: sound levers up to 13, in a ResNet whose activations change sides of zero; one layer in float16
#: from 850, the epsilon of a norm changed from 200; see `benchmarks/claims.md`).
ROUNDINGS = 50.0

#: So many times as many are rounding where lever and plain are the same in float64 (measured: `channels_last` on images
#: of 224 pixels, whose kernel sums the pixels of a batch in float32 where plain's does in float64: 64 to 262).
SAME_IN_FLOAT64 = 10.0

#: The same for levers of class precision, in units of bfloat16 (measured: bfloat16 itself up to 0.89).
PRECISION_ROUNDINGS = 3.0

#: The same for parameters and moments after three updates from the same gradients (measured: fused and foreach up to
#: 1.4; weight decay applied twice from 74).
UPDATE_ROUNDINGS = 5.0

#: Share of the script's own noise between batches that the error of a precision lever may reach (measured for bf16:
#: 0.05 on LeNet, 0.01 on a GPT, 0.07 on a ResNet after 36 steps, 0.32 on the same ResNet before its first step).
NOISE_SHARE = 1 / 3

#: Distance of the slope from 1 up to which a precision lever scales nothing systematically (measured for bf16:
#: 0.000 on LeNet and a GPT, 0.004 on a ResNet after 36 steps, 0.050 before its first step).
SLOPE_ERROR = 0.02

#: Points of training from which it can be told whether slopes scatter around 1 or stay off it. At a low loss a batch's
#: gradient is that of one or two examples, which bfloat16 scales by a few per cent up or down.
POINTS_FOR_SCATTER = 6

#: A lever whose distance from float64 is at most so many times plain's is never rejected for its error.
CLOSER = 1.0

#: The same on a device, where two sound kernels round in TF32 each in its own way: who is closer is a matter of luck.
CLOSER_ON_DEVICE = 1.1

#: Two plain runs may differ by chance on a GPU: up to so many times that, a lever differs no more than plain does.
NOISE_FLOOR = 3.0

#: Classes that may draw other random numbers, so that equal numbers cannot be asked of them.
OTHER_NUMBERS = ("statistical", "semantics")

#: What is compared after some steps of two runs, in which rounding grows: also judged beside what rounding moves there.
OF_RUNS = ("losses", "parameters")

#: Share of them, or of how far training has moved them, that rounding alone may move by then; beyond, two runs tell
#: nothing of each other. A bias before a normalisation has no gradient but rounding, which Adam makes as large as any.
CHAOS = {"losses": 0.05, "parameters": 0.2}

#: The same share up to which an error is believed although rounding was seen to move less (measured: a small net with
#: batch normalisation under AdamW on two ranks: 0.05 after 20 steps, twice what rounding had moved).
SMALL_OF_RUNS = 0.02

#: The same for levers of class precision (measured: gradients sent between ranks as bfloat16, after 20 steps; see
#: `docs/decisions/0015-tune-ranks.md`). Each tensor is not judged by itself: its rounding is not that of float32.
PRECISION_OF_RUNS = 0.05

#: What differs from batch to batch, so that many points tell more than two: outputs are compared with gradients.
SCATTERING = ("gradients", "outputs")

SAME_ITEMS = "items and random streams equal"

#: Cosine between the replayed gradient and the script's own below which gradients bypass the model's outputs.
EXPLAINED = 0.999

Word = Literal["agrees", "disagrees", "inconclusive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Whether the numbers agree, and why, in one line."""

    verdict: Word
    detail: str
    by_scatter: bool = False
    """Whether what decided it scatters from batch to batch, so that more points of training can tell: a slope that is
    off, an error beside the noise, or a multiple of rounding that not every point has."""


def judge(points: Sequence[Agreement], class_: str, checks: Sequence[str]) -> Judgement:
    """Judge the differences measured for one set of levers.

    The worst of all points decides: one that disagrees, else one that is inconclusive.

    Args:
        points: What was measured, at one or more points of training.
        class_: The widest class among the levers (see `flatout.records.plan.CLASSES`).
        checks: The checks that the levers name; each must have been made at least once. Without any, nothing was
            measured, and only a lever of class exact needs no more.
    """
    missing = next((p.missing for p in points if p.missing), "")
    found = [d for p in points for d in p.differences]
    scattered = set()
    for check in SCATTERING:
        slope = _mean_slope([d for d in found if d.check == check])
        found = [replace(d, slope=slope) if d.check == check else d for d in found]
        found, scatters = _with_multiples(found, check, class_)
        scattered |= {check} if scatters else set()
    results = [_judge_one(d, class_) for d in found]
    results = [
        replace(r, by_scatter=True) if r.verdict == "disagrees" and d.check in scattered else r
        for d, r in zip(found, results, strict=True)
    ]
    for check in SCATTERING:
        results = _without_outliers(found, results, check)
    for result in results:
        if result.verdict == "disagrees":
            return result
    unmade = [c for c in checks if c != "none" and not any(d.check == c for d in found)]
    if unmade:
        why = missing or "nothing was captured"
        return Judgement(verdict="inconclusive", detail=f"{' and '.join(unmade)} not compared: {why}")
    for result in results:
        if result.verdict == "inconclusive":
            return result
    if not results:
        if class_ != "exact":
            return Judgement(verdict="inconclusive", detail=f"nothing was compared, which class {class_} needs")
        return Judgement(verdict="agrees", detail="changes no number")
    return Judgement(verdict="agrees", detail=_summary(found, results))


def needs_more_points(points: Sequence[Agreement], judgement: Judgement) -> bool:
    """Whether what decided scatters from batch to batch, and points are too few to know how it is on the whole."""
    return judgement.by_scatter and len(points) < POINTS_FOR_SCATTER


def _mean_slope(found: Sequence[Difference]) -> float:
    """The slope to be judged: the worst of few, else the mean, moved towards 1 by twice its standard error."""
    slopes = [d.slope for d in found]
    if len(slopes) < POINTS_FOR_SCATTER or not all(math.isfinite(s) for s in slopes):
        return max(slopes, key=lambda s: abs(s - 1) if math.isfinite(s) else math.inf, default=1.0)
    mean = math.fsum(slopes) / len(slopes)
    error = math.sqrt(math.fsum((s - mean) ** 2 for s in slopes) / (len(slopes) - 1) / len(slopes))
    return mean + math.copysign(min(2 * error, abs(1 - mean)), 1 - mean)


def _with_multiples(found: Sequence[Difference], check: str, class_: str) -> tuple[list[Difference], bool]:
    """One check with the multiple of rounding to be judged: their median over many points, the largest of few.

    A value that lies near a kink (an activation near zero, two maxima) may change sides in one batch, and what is
    moved there by rounding is then not found by moving numbers a few times. A bug shows in every batch. The second
    value says whether more points could tell.
    """
    multiples = [d.multiple or 0.0 for d in found if d.check == check]  # not looked at where nothing differs
    limit = max((believed(d, class_) for d in found if d.check == check), default=0.0)
    if class_ == "exact" or not all(math.isfinite(m) for m in multiples) or max(multiples, default=0.0) <= limit:
        return list(found), False
    if len(multiples) >= POINTS_FOR_SCATTER:
        judged = sorted(multiples)[len(multiples) // 2]
        return [replace(d, multiple=judged) if d.check == check else d for d in found], False
    return list(found), class_ != "rounding" or len(multiples) < 2 or min(multiples) <= limit


def _without_outliers(found: Sequence[Difference], results: Sequence[Judgement], check: str) -> list[Judgement]:
    """Of many points, what scatters from batch to batch counts where half of them have it."""
    num_points = sum(d.check == check for d in found)
    num_off = sum(r.by_scatter for d, r in zip(found, results, strict=True) if d.check == check)
    if num_points < POINTS_FOR_SCATTER or 2 * num_off >= num_points:
        return list(results)
    return [
        Judgement(verdict="agrees", detail=_summary([d])) if r.by_scatter and d.check == check else r
        for d, r in zip(found, results, strict=True)
    ]


def _judge_one(found: Difference, class_: str) -> Judgement:
    if found.fault:
        return Judgement(verdict="disagrees", detail=found.fault)
    if found.check == "batches":
        return _judge_batches(found, class_)
    if found.answers is not None:
        verdict, detail = answers.judge(found.answers, finite=found.finite)
        return Judgement(verdict=verdict, detail=detail)
    if not found.finite:
        return Judgement(verdict="disagrees", detail=f"NaN or infinity in the {found.check} that plain does not have")
    if not math.isfinite(found.error):
        what = "not numbers, with and without the levers" if math.isnan(found.error) else "lost, or there from nothing"
        return Judgement(verdict="disagrees", detail=f"{found.check} are {what}")
    if found.explained_cosine is not None and not found.explained_cosine >= EXPLAINED:
        return Judgement(
            verdict="inconclusive",
            detail="the replayed gradient is not the script's own (cosine "
            f"{found.explained_cosine:.3f}): gradients bypass the model's outputs",
        )
    if not found.random_states_equal:
        if class_ in OTHER_NUMBERS:
            return Judgement(
                verdict="inconclusive", detail=f"class {class_} draws other random numbers: only several seeds can tell"
            )
        return Judgement(verdict="disagrees", detail="the random generators end elsewhere than under plain")
    return _judge_error(found, class_)


def _judge_error(found: Difference, class_: str) -> Judgement:
    if not found.baseline_error <= ROUNDING_ERROR:  # NaN, or more than rounding in another order can be
        if class_ in ("exact", "rounding"):
            return Judgement(
                verdict="inconclusive", detail=f"two plain runs already differ by {found.baseline_error:.1e}"
            )
    elif found.error <= min(NOISE_FLOOR * found.baseline_error, ROUNDING_ERROR) and _is_rounding(found, class_):
        return Judgement(verdict="agrees", detail=_summary([found]))
    if class_ == "exact":
        what = f"differ by {found.error:.1e}" if found.error else f"leave `{found.multiple_of}` elsewhere"
        return Judgement(verdict="disagrees", detail=f"{found.check} {what}, exact means not a bit")
    if _closer_to_truth(found):
        return Judgement(verdict="agrees", detail=_summary([found]))
    if found.check in OF_RUNS:
        return _judge_of_runs(found, class_)
    if not _is_rounding(found, class_):
        return Judgement(
            verdict="disagrees",
            detail=f"{found.check} of `{found.multiple_of}` differ by {_times(found.multiple)} what "
            f"{'bfloat16' if class_ == 'precision' and found.check in SCATTERING else 'rounding'} moves there "
            f"(up to {believed(found, class_):.0f} is believed)",
        )
    if found.error <= ROUNDING_ERROR:
        return Judgement(verdict="agrees", detail=_summary([found]))
    if class_ == "rounding":
        return _judge_large_rounding(found)
    return _judge_precision(found)


def _judge_of_runs(found: Difference, class_: str) -> Judgement:
    """Losses or parameters after some steps, beside those of a run that was moved by what rounding may move.

    Where activations change sides of zero is luck, so that one tensor may differ by many times what rounding moved
    there, and all of them by a few times that.
    """
    what, rounding = found.check, found.rounding
    if rounding is None or not rounding <= CHAOS[what]:
        known = "not measured" if rounding is None else f"{_short(rounding)}, too much to tell"
        return Judgement(verdict="inconclusive", detail=f"what rounding alone moves {what} by: {known}")
    is_coarse = class_ == "precision"
    if not is_coarse and (found.multiple is None or not found.multiple <= ROUNDINGS):
        detail = (
            f"{what} of `{found.multiple_of}` differ by {_times(found.multiple)} what rounding moves there "
            f"(up to {ROUNDINGS:.0f} is believed)"
        )
        return Judgement(verdict="disagrees", detail=detail)
    most = max(UPDATE_ROUNDINGS * rounding, PRECISION_OF_RUNS if is_coarse else SMALL_OF_RUNS)
    if not found.error <= most:
        return Judgement(
            verdict="disagrees", detail=f"{what} differ by {_short(found.error)}, up to {_short(most)} is believed"
        )
    if not abs(found.slope - 1) <= SLOPE_ERROR:
        return Judgement(verdict="disagrees", detail=f"{what} are scaled by {found.slope:.3f}, that is not noise")
    return Judgement(verdict="agrees", detail=_summary([found]))


def most_roundings(check: str, class_: str) -> float:
    """Multiples of a unit in the last place that are believed to be rounding.

    >>> most_roundings("gradients", "exact"), most_roundings("updates", "precision")
    (0.0, 5.0)
    """
    if class_ == "exact":
        return 0.0
    if check == "updates":
        return UPDATE_ROUNDINGS
    return ROUNDINGS if class_ == "rounding" else PRECISION_ROUNDINGS


def believed(found: Difference, class_: str) -> float:
    """Up to how many multiples of a unit in the last place its error is rounding."""
    often = SAME_IN_FLOAT64 if class_ == "rounding" and found.same_in_float64 else 1.0
    return often * most_roundings(found.check, class_)


def _is_rounding(found: Difference, class_: str) -> bool:
    """Whether no parameter's error is more than rounding can be, as far as that was looked at."""
    if found.multiple is None:
        return True
    class_ = "rounding" if found.baseline_error > 0 and class_ == "exact" else class_
    return found.multiple <= believed(found, class_)


def _closer_to_truth(found: Difference) -> bool:
    """Whether float64 says that the lever errs less than plain, and far more in no parameter."""
    if found.truth_error is None or found.baseline_truth_error is None or found.truth_multiple is None:
        return False
    margin = CLOSER_ON_DEVICE if found.on_device else CLOSER
    closer = found.truth_error <= found.baseline_truth_error * margin
    return closer and found.truth_multiple <= ROUNDINGS


def _judge_large_rounding(found: Difference) -> Judgement:
    """An error that is large although a unit in the last place explains it, or of which that is not known."""
    if found.multiple is None:
        return Judgement(
            verdict="disagrees",
            detail=f"{found.check} differ by {found.error:.1e}, rounding explains up to {ROUNDING_ERROR:.0e}"
            + (f" (worst: `{found.worst}`)" if found.worst else ""),
        )
    if found.check == "updates":  # of less than a unit in the last place of what is updated
        if abs(found.slope - 1) <= SLOPE_ERROR:
            return Judgement(verdict="agrees", detail=_summary([found]))
        return Judgement(verdict="inconclusive", detail="updates are smaller than the last place of the parameters")
    return _judge_precision(found)  # the script's own arithmetic is as coarse as that


def _judge_precision(found: Difference) -> Judgement:
    if not abs(found.slope - 1) <= SLOPE_ERROR:
        detail = f"{found.check} are scaled by {found.slope:.3f}, that is not noise"
        return Judgement(verdict="disagrees", detail=detail, by_scatter=True)
    if found.check == "updates":
        return Judgement(verdict="disagrees", detail=f"updates differ by {found.error:.1e} from the same gradients")
    if found.check == "outputs":  # which every batch has its own of: their size beside another batch's says nothing
        return Judgement(verdict="agrees", detail=_summary([found]))
    if found.noise is None or not math.isfinite(found.noise):
        return Judgement(verdict="inconclusive", detail="the gradient's own noise between batches was not measured")
    if found.error > NOISE_SHARE * found.noise:
        return Judgement(
            verdict="disagrees",
            detail=f"gradient error {found.error:.2g} is not small against the noise between batches {found.noise:.2g}",
            by_scatter=True,
        )
    return Judgement(verdict="agrees", detail=_summary([found]))


def _judge_batches(found: Difference, class_: str) -> Judgement:
    if class_ in OTHER_NUMBERS:
        if found.error == 0 and found.random_states_equal:
            return Judgement(verdict="agrees", detail=SAME_ITEMS)
        return Judgement(verdict="agrees", detail=f"{_differing(found)}, which class {class_} admits")
    if found.baseline_error != 0:
        return Judgement(verdict="inconclusive", detail="two plain loaders already give different batches")
    if found.error == 0 and found.random_states_equal:
        return Judgement(verdict="agrees", detail=SAME_ITEMS)
    return Judgement(verdict="disagrees", detail=f"{_differing(found)}: needs `--accept statistical`")


def _differing(found: Difference) -> str:
    return "other items" if found.error != 0 else "same items, but the random generators end elsewhere"


def _summary(found: Sequence[Difference], results: Sequence[Judgement] = ()) -> str:
    words = [r.detail for d, r in zip(found, results, strict=False) if d.answers is not None][:1]
    gradients = [d for d in found if d.check == "gradients"]
    if gradients:
        worst = max(gradients, key=lambda d: d.error)
        noise = f", noise {worst.noise:.2g}" if worst.noise is not None else ""
        slope = f", slope {worst.slope:.3f}" if worst.error > ROUNDING_ERROR else ""
        closer = ", closer to float64 than plain" if _closer_to_truth(worst) else ""
        words.append(f"gradient error {_short(worst.error)}{noise}{slope}{closer}")
    outputs = [d for d in found if d.check == "outputs"]
    if any(d.error for d in outputs):
        words.append(f"output error {_short(max(d.error for d in outputs))}")
    for check, name in zip(OF_RUNS, ("loss", "parameter"), strict=True):
        if errors := [d.error for d in found if d.check == check]:
            words.append(f"{name} error {_short(max(errors))}")
    updates = [d for d in found if d.check == "updates"]
    if updates:
        words.append(f"update error {_short(max(d.error for d in updates))}")
    # Batches may agree because they are equal or because the class admits others: say which, the exception first.
    batches = {r.detail for d, r in zip(found, results, strict=False) if d.check == "batches"}
    words += sorted(batches, key=lambda detail: (detail == SAME_ITEMS, detail))[:1]
    return "; ".join(words)


def _times(multiple: float | None) -> str:
    return "infinitely often" if multiple is None or not math.isfinite(multiple) else f"{multiple:.0f} times"


def _short(value: float) -> str:
    return "0" if value == 0 else f"{value:.1e}" if value < 0.01 else f"{value:.2g}"
