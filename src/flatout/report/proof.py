"""What is shown of a proof? The verdict, each seed, the metric on its way, and the samples.

In: a `Proof`. Out: a `View`. The words for it are in `proof_words.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from flatout.frameworks import kind
from flatout.judge.equivalence import LARGEST
from flatout.judge.metric import Reading, reached_s
from flatout.judge.proof import Proof, WholeRun, side_name
from flatout.records.plan import label
from flatout.report import drawing as draw
from flatout.report import proof_words, ticks, words
from flatout.report.table import NOTHING, Table, Tone, shown, table
from flatout.report.tuning import machine_rows
from flatout.report.view import Again, Evidence, Figure, Item, Pairs, Row, Section, View, raw

Some = TypeVar("Some")

METRIC, TIME, TARGET, ENERGY = "raw-metric", "raw-time", "raw-target", "raw-energy"

MOST_SEEDS = 40
"""In the figure; the table below it has all."""

MOST_POINTS = 3000
"""Of all lines of a figure together; a line of a hundred points looks the same as one of a thousand."""

LOGARITHMIC = 20.0
"""From so many times the smallest value on, the metric's axis is logarithmic."""

_TONES: dict[str, Tone] = {"equal": "good", "equivalent": "good", "different": "bad"}

_DIFFERENCES = (
    "Each dot is one seed's difference, {}; below it their mean and its 90 % interval. Within the shaded margin "
    "nothing is said to have changed: the interval has to lie inside of it."
)
_CURVES = (
    "The metric on its way, a line for each run{}. Lines that end further to the left are runs that were done earlier."
)


def view(found: Proof) -> View:
    """What `flatout prove` found."""
    word, rest = proof_words.verdict(found)
    sides = "plain against plain" if found.against_itself else f"plain and {label(found.asked.levers)}"
    return View(
        command="flatout prove",
        title=found.asked.script,
        context=(proof_words.finished(found), f"{'A/A: ' if found.against_itself else ''}{sides}, by turns"),
        number=word if word in _TONES else "undecided",
        unit=f"{found.asked.metric.name}, {proof_words.finished(found)}",
        sentence="plain against plain" if found.against_itself else f"under `{label(found.asked.levers)}`",
        source=METRIC,
        verdict=(Row(label="result", value=word, note=rest, tone=_TONES.get(word, "unsure")), *_lines(found)),
        sections=(_seeds(found), _cost(found), _machine(found), raw(evidence(found), _RAW)),
        next=(proof_words.next_command(found),),
        created=found.created,
        version=found.asked.versions[0],
    )


_RAW = (
    "What stands behind each number above. All of it, with the metric on its way, is in `proof.json` and `runs.jsonl`."
)


def _lines(found: Proof) -> list[Item]:
    """What became of time, target and energy, and what the reader must know."""
    energy = ENERGY if found.energy is not None else ""
    rows: list[Item] = [
        Row(label=name, value=text, tone="plain", source=source, most=2 if name == "energy" else 0)
        for name, source, text in (
            ("time", TIME, proof_words.time(found)),
            ("target", TARGET, proof_words.target(found)),
            ("energy", energy, proof_words.energy(found)),
        )
        if text
    ]
    rows += [Row(label="note", value=note, tone="caution", most=3) for note in found.notes]
    if found.stopped:
        goes_on = "; the command below goes on" if found.interrupted else ""
        rows.append(Row(label="stopped", note=f"{found.stopped}{goes_on}"))
    return [*rows, Row(label="seeds", note=proof_words.seeds(found), on="screen")]


def _seeds(found: Proof) -> Section:
    items: list[Item] = []
    if (drawing := differences(found)) is not None:
        what = "one plain run from the other" if found.against_itself else "with the plan from without"
        items.append(Figure(drawing=drawing, caption=_DIFFERENCES.format(what)))
    items.append(seeds(found))
    if (lines := curves(found)) is not None:
        legend = tuple((side, "", side_name(side, found.asked.levers), "") for side in ("plain", "plan"))
        dashed = "; dashed, the target" if found.target is not None else ""
        items.append(Figure(drawing=lines, caption=_CURVES.format(dashed), legend=legend))
    return Section(name="seeds", title="Seed by seed", items=tuple(items))


def _cost(found: Proof) -> Section:
    took = words.duration(sum(run.wall_s for run in found.runs))
    output = f"`{words.nearby(Path(found.run) / 'output-plain-0.log')}`" if found.run else ""
    lead = (
        f"{words.plural(len(found.runs), 'whole run')} by turns, {took} in all. Seeds: {proof_words.seeds(found)}."
        + (f" What a run printed is in the run folder, as {output}." if output else "")
    )
    again = Again(command=proof_words.again(found, found.num_seeds))
    return Section(name="cost", title="What it cost, and how to check it", items=(again,), lead=(lead,))


def _machine(found: Proof) -> Section:
    versions = dict(zip(("flatout", "framework", "Python"), found.asked.versions, strict=False))
    if versions.get("framework", "")[:1].isdigit():  # of a version that noted no name
        versions["framework"] = f"{kind().label} {versions['framework']}"
    pairs = tuple((name, value) for name, value in (*machine_rows(found.machine), *versions.items()) if value)
    return Section(name="machine", title="Machine and versions", items=(Pairs(pairs=pairs),))


# -- the table and the samples -----------------------------------------------------------------------------------------


def seeds(found: Proof) -> Table:
    """Each seed; its numbers lead to its readings."""
    second = proof_words.second_name(found)
    head = ("seed", "plain", second, "difference", "plain took", f"{second} took")
    rows = []
    for seed, plain, plan in found.by_seed():
        cells = [cell(run) for cell in (proof_words.value_of, proof_words.wall) for run in (plain, plan)]
        rows.append((str(seed), *cells[:2], proof_words.difference(plain, plan), *cells[2:]))
    links = {column: [METRIC if column < 4 else TIME] * len(rows) for column in range(1, 6)}
    named = table(f"{found.asked.metric.name} of each run, and its wall time", head, rows, links=links)
    return shown(named, (*range(6), NOTHING))


def evidence(found: Proof) -> list[Evidence]:
    """The samples behind each number."""
    command = proof_words.again(found, found.num_seeds)
    judged = found.equivalence
    wanted: list[tuple[str, str, str, Callable[[WholeRun], str]]] = [
        (
            METRIC,
            f"Difference of {found.asked.metric.name}",
            f"the mean of the seeds' differences; two one-sided t tests of 5 % each against the margin of "
            f"± {judged.margin:.3g} ({judged.margin_source})",
            lambda run: repr(run.value) if run.value is not None else run.problem or "no reading was kept",
        ),
        (TIME, "Wall time of whole runs", f"each seed's two runs as a pair{_because(found)}", _wall),
    ]
    if found.target is not None:
        wanted.append((TARGET, "Time to the target", "when a run first was at it", _to_target(found)))
    if found.energy is not None:
        wanted.append((ENERGY, "Energy of whole runs", "counters read by the parent while it ran", _joules))
    return [
        Evidence(anchor=anchor, title=title, how=how, command=command, tables=(_pairs(found, title, cell),))
        for anchor, title, how, cell in wanted
    ]


def _because(found: Proof) -> str:
    return f"; {found.time.reason}" if found.time.reason else ""


def _wall(run: WholeRun) -> str:
    return f"{run.wall_s:.2f} s, training {run.training_s:.2f} s"


def _joules(run: WholeRun) -> str:
    return words.joules(run.joules) if run.joules is not None else run.why_no_energy


def _to_target(found: Proof) -> Callable[[WholeRun], str]:
    target = found.target or 0.0

    def cell(run: WholeRun) -> str:
        at_s = reached_s(run.readings, target, rising=found.rising)
        return "not seen" if at_s is None else f"{at_s:.2f} s"

    return cell


def _pairs(found: Proof, title: str, cell: Callable[[WholeRun], str]) -> Table:
    rows = [
        (f"seed {seed}", *(cell(run) if run is not None else words.MISSING for run in (plain, plan)))
        for seed, plain, plan in found.by_seed()
    ]
    return table(title, ("", "plain", proof_words.second_name(found)), rows)


# -- the figures -------------------------------------------------------------------------------------------------------


def differences(found: Proof) -> draw.Intervals | None:
    """Each seed's difference as a dot, their mean with its interval below; what lies within the margin is shaded."""
    dots = [(f"seed {seed}", b.value - a.value) for seed, a, b in found.by_seed() if _comparable(a, b)]  # type: ignore[union-attr,operator]
    judged = found.equivalence
    if not dots or not words.known(judged.difference):
        return None
    ends = [x for x in (judged.margin, judged.low, judged.high) if words.known(x)]
    reach = max([abs(x) for _, x in dots] + [abs(x) for x in ends])
    if not 0 < reach < LARGEST:
        return None
    lines = [draw.Line(name=n, value=v, said=proof_words.signed(v), shape="ring") for n, v in dots[:MOST_SEEDS]]
    mean = draw.Line(
        name="mean", value=judged.difference, low=judged.low, high=judged.high,
        said=proof_words.signed(judged.difference), bold=True,
    )  # fmt: skip
    return draw.Intervals(
        name="differences",
        label="; ".join(f"{name} {proof_words.signed(v)}" for name, v in (*dots, ("mean", judged.difference))),
        lines=(*lines, mean),
        zero=0.0,
        band=(-judged.margin, judged.margin) if words.known(judged.margin) and judged.margin > 0 else None,
        ends=("← lower than plain", "higher →"),
        ticks=lambda low, high, most: ticks.said((-reach, 0.0, reach), proof_words.signed),
    )


def _comparable(plain: WholeRun | None, plan: WholeRun | None) -> bool:
    return all(r is not None and not r.problem and words.known(r.value) for r in (plain, plan))


def curves(found: Proof) -> draw.Plot | None:
    """The metric on its way in each run; None where no run says when it had which."""
    lines = [(run, timed(run.readings)) for run in found.runs]
    lines = [(run, points) for run, points in lines if len(points) > 1]
    if not lines:
        return None
    last_s = max(points[-1][0] for _, points in lines)
    values = [value for _, points in lines for _, value in points]
    label_ = (
        f"{found.asked.metric.name} of {words.plural(len(lines), 'run')} in {words.duration(last_s)}, "
        f"between {proof_words.number(min(values))} and {proof_words.number(max(values))}"
    )
    few = MOST_POINTS // len(lines)
    paths = [draw.Path(points=tuple(thinned(points, few)), colour=run.side) for run, points in lines]
    if found.target is not None:
        paths.append(draw.Path(points=((0.0, found.target), (1.02 * last_s, found.target)), dashed=True))
        values.append(found.target)
    return draw.Plot(
        name="curves",
        label=label_,
        x=draw.Axis(low=0.0, high=1.02 * last_s,
                    ticks=lambda most: ticks.times(0.0, last_s, most)),
        y=_metric_axis(min(values), max(values)),
        paths=tuple(paths),
    )  # fmt: skip


def _metric_axis(low: float, high: float) -> draw.Axis:
    if low > 0 and high > LOGARITHMIC * low:
        first, last = low / 1.1, high * 1.1
        return draw.Axis(low=first, high=last, log=True,
                         ticks=lambda _: ticks.said(ticks.logarithmic(first, last), proof_words.number))  # fmt: skip
    room = 0.06 * (high - low) or 0.05 * abs(high) or 0.05
    first, last = low - room, high + room
    return draw.Axis(low=first, high=last,
                     ticks=lambda most: ticks.said(ticks.between(first, last, most), proof_words.number))  # fmt: skip


def thinned(items: Sequence[Some], most: int) -> list[Some]:
    """Every so many of them one, and the last: about `most` in all.

    >>> thinned([1, 2, 3, 4, 5, 6, 7, 8], 4)
    [1, 3, 5, 7, 8]
    """
    stride = max(math.ceil(len(items) / max(most, 1)), 1)
    found = list(items[::stride])
    return found if not items or (len(items) - 1) % stride == 0 else [*found, items[-1]]


def timed(readings: Sequence[Reading]) -> list[tuple[float, float]]:
    """Seconds and value of the readings that have both and can be drawn."""
    return [(r.at_s, r.value) for r in readings if r.at_s is not None and abs(r.value) < LARGEST]
