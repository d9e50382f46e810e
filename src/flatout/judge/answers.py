"""Does a model that may lose something, as in 8-bit numbers, still give the answers that it gave?

In: counts of answers that were compared. Out: a verdict and a sentence.
"""

from __future__ import annotations

from typing import Literal

from flatout.records.difference import Answers

#: Share of answers that may change, as far as their number can tell: its upper 95 % bound.
MOST_CHANGED = 0.01

#: Answers from which that can be told: of fewer, none that changed still leaves more.
FEWEST_ANSWERS = 300


def upper_bound(num_changed: int, num: int) -> float:
    """The upper 95 % bound (one-sided) of a share of which `num_changed` of `num` were seen, exact.

    Source: Clopper and Pearson, Biometrika 26 (1934).

    >>> round(upper_bound(0, 300), 4), round(upper_bound(3, 512), 4), upper_bound(5, 5)
    (0.0099, 0.0151, 1.0)
    """
    from scipy.special import betaincinv

    return 1.0 if num_changed >= num else float(betaincinv(num_changed + 1, num - num_changed, 0.95))


def judge(found: Answers, *, finite: bool) -> tuple[Literal["agrees", "disagrees", "inconclusive"], str]:
    """Whether few enough answers change, and the numbers behind it.

    >>> judge(Answers(num=1000, num_changed=2, num_changed_by_rounding=0, num_inputs=96, num_shared=32), finite=True)
    ('agrees', '2 of 1,000 answers differ (at most 0.63 %), 0 by rounding alone')
    """
    if not finite:
        return "disagrees", "NaN or infinity in the answers that plain does not have"
    if found.num < FEWEST_ANSWERS:
        return "inconclusive", (
            f"the script calls with {found.num_inputs} different inputs: too few to calibrate and to judge "
            f"({found.num} answers beside the calibration, {FEWEST_ANSWERS} are needed)"
        )
    bound = upper_bound(found.num_changed, found.num)
    said = (
        f"{found.num_changed:,} of {found.num:,} answers differ (at most {100 * bound:.2g} %), "
        f"{found.num_changed_by_rounding:,} by rounding alone"
    )
    if bound > MOST_CHANGED:
        return "disagrees", f"{said}: up to {MOST_CHANGED:.0%} is believed".replace("1%", "1 %")
    return "agrees", said
