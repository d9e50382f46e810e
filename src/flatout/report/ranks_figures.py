"""What do the figures of a tuning for ranks look like? Ratios, memory of a rank, and time in exchanges.

In: a `RankTuning`. Out: SVG for the page, or None where there is nothing to draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from markupsafe import Markup

from flatout.judge.rank_tuning import RankTrial, RankTuning
from flatout.report import forest as forests
from flatout.report import rank_words, ticks, words
from flatout.report.svg import FONT, LETTER, Canvas, both, colour, cut
from flatout.report.tried import Mark

ONE = "one process"

BAR = 14
"""Height of a bar, in units."""

LEFT = 236
"""The left margin of a wide figure, as in that of the ratios."""

_MARKS: dict[str, Mark] = {
    "faster": "yes", "no difference": "even", "inconclusive": "even", "disagrees": "never",
}  # fmt: skip

Bar = tuple[str, int | None, int | None, bool]
"""Whose memory; within a step, at most; whether it is that of one process."""


def mark(trial: RankTrial) -> Mark:
    """The mark of a division's verdict."""
    return _MARKS.get(trial.outcome, "no")


def name(trial: RankTrial) -> str:
    """What a division is called."""
    return trial.label


# -- ratios --------------------------------------------------------------------------------------------------------


def ratios(found: RankTuning) -> Markup | None:
    """Each division's ratio to one process, with its 95 % interval."""
    return forests.forest("ratios", [_line(found, t) for t in found.trials], beside=ONE)


def _line(found: RankTuning, trial: RankTrial) -> forests.Line:
    ratio, low, high = (math.nan if x is None else x for x in (trial.ratio, trial.ratio_low, trial.ratio_high))
    return forests.Line(
        name=name(trial), whole_name=name(trial), ratio=ratio, low=low, high=high, ends=rank_words.ends(trial),
        outcome=trial.outcome, mark=mark(trial), chosen=trial is found.winner,
    )  # fmt: skip


# -- memory --------------------------------------------------------------------------------------------------------


def memory(found: RankTuning) -> Markup | None:
    """What one process and a rank of each division hold: within a step as a bar, at most as a line beyond it."""
    bars: list[Bar] = [(ONE, found.step_memory_bytes, found.peak_memory_bytes, True)]
    bars += [(name(t), t.step_memory_bytes, t.peak_memory_bytes, False) for t in found.trials]
    shown = [bar for bar in bars if any(bar[1:3])]
    if len(shown) < 2:
        return None
    label = "; ".join(f"{bar[0]} {_amounts(bar)}" for bar in shown)
    heights = (28 * len(shown) + 30, 48 * len(shown) + 30)
    return both("memory", label, heights, lambda canvas: _draw_memory(canvas, shown))


def _amounts(bar: Bar) -> str:
    """Both amounts in words.

    >>> _amounts(("2 ranks, shard", 2**29, 2**30, False))
    '512 MiB, at most 1 GiB'
    """
    held, most = (words.memory(x) if x is not None else "" for x in bar[1:3])
    return ", ".join(filter(None, (held, f"at most {most}" if most else "")))


def _draw_memory(canvas: Canvas, bars: Sequence[Bar]) -> None:
    left, right, each = (2, 14, 48) if canvas.narrow else (LEFT, 176, 28)
    axes = canvas.axes(left, 0, right, 30)
    longest = max(max(bar[1] or 0, bar[2] or 0) for bar in bars)
    axes.set_xlim(0, longest * 1.02)
    axes.set_ylim(canvas.height - 30, 0)
    for number, bar in enumerate(bars):
        _, held, most, alone = bar
        top = each * number
        y = top + (32 if canvas.narrow else 14)
        if most:
            axes.plot((min(held or 0, most), most), (y, y), color=colour("aside"), linewidth=2, solid_capstyle="butt")
            axes.plot((most, most), (y - 6, y + 6), color=colour("aside"), linewidth=2, solid_capstyle="butt")
        if held:
            axes.barh(y, held, BAR, color=colour("plain" if alone else "plan"), linewidth=0)
        if bars[0][1] and bars[0][3]:
            dash = (y - 12, y + 12) if canvas.narrow else (top, top + each)
            axes.plot((bars[0][1],) * 2, dash, color=colour("ink"), linewidth=1, linestyle=(0, (3, 3)))
        amounts = _amounts(bar)
        shorter = amounts.replace(", at most", " /") if canvas.narrow else amounts
        _names(canvas, top + (12 if canvas.narrow else 14), bar[0], shorter)
    places = ticks.even(longest / 2**20, 3 if canvas.narrow else 4)
    axes.set_yticks([])
    ticks.place(axes.xaxis, [place * 2**20 for place in places], lambda x: words.memory(x) if x else "0")
    axes.get_xticklabels()[0].set_horizontalalignment("left")


def _names(canvas: Canvas, y: float, left: str, right: str) -> None:
    room = canvas.width - 0.9 * LETTER * (len(right) + 1) if canvas.narrow else LEFT - 6
    canvas.write(2, y, cut(left, int(room / LETTER)))
    canvas.write(canvas.width - 2, y, right, ha="right", fontsize=FONT - 1)


# -- exchanges -----------------------------------------------------------------------------------------------------


def exchanges(found: RankTuning) -> Markup | None:
    """Which share of training each division spends in exchanges, cut by their kinds."""
    shown = [t for t in found.trials if t.exchanges_share is not None]
    if not shown:
        return None
    label = "; ".join(f"{name(t)} {words.percent(t.exchanges_share)} ({_kinds(t, 9)})" for t in shown)
    heights = (48 * len(shown) + 30, 66 * len(shown) + 30)
    return both("exchanges", label, heights, lambda canvas: _draw_exchanges(canvas, shown))


def _kinds(trial: RankTrial, most: int) -> str:
    return rank_words.costliest(trial, most).replace("`", "") or "no kind was told"


def _draw_exchanges(canvas: Canvas, trials: Sequence[RankTrial]) -> None:
    left, right, each = (2, 14, 66) if canvas.narrow else (LEFT, 60, 48)
    axes = canvas.axes(left, 0, right, 30)
    axes.set_xlim(0, 1)
    axes.set_ylim(canvas.height - 30, 0)
    for number, trial in enumerate(trials):
        top = each * number
        y = top + (32 if canvas.narrow else 14)
        share = min(trial.exchanges_share or 0.0, 1.0)
        axes.barh(y, 1.0, BAR, color=colour("band"), linewidth=0)
        axes.barh(y, share, BAR, color=colour("communication"), linewidth=0)
        for end in _cuts(trial, share):
            axes.plot((end, end), (y - BAR / 2, y + BAR / 2), color=colour("paper"), linewidth=1.5)
        _names(canvas, top + (12 if canvas.narrow else 14), name(trial), words.percent(trial.exchanges_share))
        room = int((canvas.width - left) / LETTER)
        said = cut(_kinds(trial, 2 if canvas.narrow else 3), room)
        canvas.write(left, y + 19, said, color=colour("soft"), fontsize=FONT - 1)
    ticks.place(axes.xaxis, [0.0, 0.25, 0.5, 0.75, 1.0], words.percent)
    axes.set_yticks([])
    axes.get_xticklabels()[0].set_horizontalalignment("left")
    axes.get_xticklabels()[-1].set_horizontalalignment("right")


def _cuts(trial: RankTrial, share: float) -> list[float]:
    """Where one kind ends and the next one begins."""
    found, end = [], 0.0
    for part in trial.exchange_shares.values():
        end += part
        if part >= rank_words.WORTH_SAYING and end < share:
            found.append(end)
    return found
