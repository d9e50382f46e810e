"""What is shown of a proof? The verdict, each seed, the metric on its way, and the samples.

In: a `Proof`. Out: a `View`. The words for it are in `proof_words.py`.
"""

from __future__ import annotations

from pathlib import Path

from flatout.frameworks import kind
from flatout.judge.equivalence import LARGEST
from flatout.judge.metric import reached_s
from flatout.judge.proof import Proof, WholeRun, side_name
from flatout.records.plan import label
from flatout.report import drawing as draw
from flatout.report import proof_words, ticks, words
from flatout.report.table import NOTHING, Table, Tone, shown, table
from flatout.report.tuning import machine_rows
from flatout.report.view import Again, Evidence, Figure, Item, Pairs, Row, Section, View, raw

RUNS = "raw-runs"

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
_RAW = (
    "What stands behind each number above. All of it, with the metric on its way, is in `proof.json` and `runs.jsonl`."
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
        source=RUNS,
        verdict=(Row(label="result", value=word, note=rest, tone=_TONES.get(word, "unsure")), *_lines(found)),
        sections=(_seeds(found), _cost(found), raw([evidence(found)], _RAW)),
        next=(proof_words.next_command(found),),
        created=found.created,
        version=found.asked.versions[0],
    )


def _lines(found: Proof) -> list[Item]:
    """What became of time, target and energy, and what the reader must know."""
    told = (
        ("time", proof_words.time(found)), ("target", proof_words.target(found)), ("energy", proof_words.energy(found))
    )  # fmt: skip
    rows: list[Item] = [Row(label=name, value=text, tone="plain", source=RUNS) for name, text in told if text]
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
    lead = f"{words.plural(len(found.runs), 'whole run')} by turns, {took} in all. Seeds: {proof_words.seeds(found)}."
    if found.run:
        lead += f" What runs printed is in `{words.nearby(Path(found.run))}`."
    again = Again(command=proof_words.again(found, found.num_seeds))
    version, framework, python = (*found.asked.versions, "", "")[:3]
    versions = {"flatout": version, "framework": f"{kind().label} {framework}", "Python": python}
    pairs = tuple((name, value) for name, value in (*machine_rows(found.machine), *versions.items()) if value)
    return Section(name="cost", title="What it cost, and where", items=(again, Pairs(pairs=pairs)), lead=(lead,))


# -- the table and the samples -----------------------------------------------------------------------------------------


def seeds(found: Proof) -> Table:
    """Each seed; its numbers lead to its readings."""

    def value(run: WholeRun | None) -> str:
        return "" if run is None else "failed" if run.problem else proof_words.number(run.value)

    rows = []
    for seed, plain, plan in found.by_seed():
        values = [None if run is None else run.value for run in (plain, plan)]
        less = "" if None in values else proof_words.signed((values[1] or 0.0) - (values[0] or 0.0))
        walls = ("" if run is None else words.duration(run.wall_s) for run in (plain, plan))
        rows.append((str(seed), value(plain), value(plan), less, *walls))
    second = "again" if found.against_itself else "under it"
    head = ("seed", "plain", second, "difference", "plain took", f"{second} took")
    links = {column: [RUNS] * len(rows) for column in range(1, 6)}
    named = table(f"{found.asked.metric.name} of each run, and its wall time", head, rows, links=links)
    return shown(named, (*range(6), NOTHING))


def evidence(found: Proof) -> Evidence:
    """The samples behind all numbers."""
    head, rows = ["seed", "run", found.asked.metric.name, "took", "its training"], []
    head += ["to the target"] if found.target is not None else []
    head += ["energy"] if found.energy is not None else []
    for run in found.runs:
        value = repr(run.value) if run.value is not None else run.problem or "no reading was kept"
        cells = [str(run.seed), side_name(run.side, found.asked.levers), value]
        cells += [f"{seconds:.2f} s" for seconds in (run.wall_s, run.training_s)]
        if found.target is not None:
            at_s = reached_s(run.readings, found.target, rising=found.rising)
            cells.append("not seen" if at_s is None else f"{at_s:.2f} s")
        rows.append([*cells, *([words.joules(run.joules)] if found.energy is not None else [])])
    judged, because = found.equivalence, f" ({found.time.reason})" if found.time.reason else ""
    how = (
        "differences are judged by their mean over seeds, in two one-sided t tests of 5 % each against the margin of "
        f"± {judged.margin:.3g} ({judged.margin_source}); times seed by seed{because}"
    )
    tables = (table("Whole runs", head, rows, texts=3),)
    command = proof_words.again(found, found.num_seeds)
    return Evidence(anchor=RUNS, title="Whole runs", how=how, command=command, tables=tables)


# -- the figures -------------------------------------------------------------------------------------------------------


def differences(found: Proof) -> draw.Intervals | None:
    """Each seed's difference as a dot, their mean with its interval below; what lies within the margin is shaded."""
    judged = found.equivalence
    dots = [
        (f"seed {seed}", b.value - a.value)
        for seed, a, b in found.by_seed()
        if a is not None
        and b is not None
        and not (a.problem or b.problem)
        and a.value is not None
        and b.value is not None
    ]
    dots = [(name, value) for name, value in dots if words.known(value)]
    reach = max(
        (abs(x) for x in (*dict(dots).values(), judged.margin, judged.low, judged.high) if words.known(x)), default=0
    )
    if not dots or not words.known(judged.difference) or not 0 < reach < LARGEST:
        return None
    said = [(name, value, proof_words.signed(value)) for name, value in (*dots, ("mean", judged.difference))]
    lines = [draw.Line(name=name, value=value, said=text, shape="ring") for name, value, text in said[:-1][:MOST_SEEDS]]
    name, value, text = said[-1]
    mean = draw.Line(name=name, value=value, low=judged.low, high=judged.high, said=text, bold=True)
    return draw.Intervals(
        name="differences",
        label="; ".join(f"{name} {text}" for name, _, text in said),
        lines=(*lines, mean),
        zero=0.0,
        band=(-judged.margin, judged.margin) if words.known(judged.margin) and judged.margin > 0 else None,
        ends=("← lower than plain", "higher →"),
        ticks=lambda low, high, most: ticks.said((-reach, 0.0, reach), proof_words.signed),
    )


def curves(found: Proof) -> draw.Plot | None:
    """The metric on its way in each run; None where no run says when it had which."""
    lines = [
        (run.side, [(r.at_s, r.value) for r in run.readings if r.at_s is not None and abs(r.value) < LARGEST])
        for run in found.runs
    ]
    lines = [(side, points) for side, points in lines if len(points) > 1]
    if not lines:
        return None
    last_s = max(points[-1][0] for _, points in lines)
    values = [value for _, points in lines for _, value in points]
    between = f"between {proof_words.number(min(values))} and {proof_words.number(max(values))}"
    paths = []
    for side, points in lines:
        stride = -(-len(points) * len(lines) // MOST_POINTS)
        paths.append(draw.Path(points=(*points[:-1:stride], points[-1]), colour=side))
    if found.target is not None:
        paths.append(draw.Path(points=((0.0, found.target), (1.02 * last_s, found.target)), dashed=True))
        values.append(found.target)
    low, high = min(values), max(values)
    log = low > 0 and high > LOGARITHMIC * low
    room = 0.06 * (high - low) or 0.05 * abs(high) or 0.05
    first, last = (low / 1.1, high * 1.1) if log else (low - room, high + room)
    y = draw.Axis(
        low=first, high=last, log=log,
        ticks=lambda most: ticks.said(
            ticks.logarithmic(first, last) if log else ticks.between(first, last, most), proof_words.number
        ),
    )  # fmt: skip
    x = draw.Axis(low=0.0, high=1.02 * last_s, ticks=lambda most: ticks.times(0.0, last_s, most))
    said = f"{found.asked.metric.name} of {words.plural(len(lines), 'run')} in {words.duration(last_s)}, {between}"
    return draw.Plot(name="curves", label=said, x=x, y=y, paths=tuple(paths))
