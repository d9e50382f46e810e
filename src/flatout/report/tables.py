"""Which numbers stand behind each figure of a result, and where does each come from?

In: a `Result`. Out: a `Table` each, for the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flatout.judge import stats
from flatout.judge.anatomy import Anatomy
from flatout.judge.read_sites import ReadSite
from flatout.judge.result import Result
from flatout.records.plan import Trial
from flatout.report import words
from flatout.report.evidence import ANATOMY, CEILINGS, CENSUS, FINAL, NUMERICS, READS, STEPS, TRIALS, behind_bound
from flatout.report.table import Look, Table, shown, table
from flatout.report.thinned import KINDS, Dot
from flatout.report.tried import ends, remark

LONGEST_CODE, LONGEST_PATH = 40, 50
"""Characters of a line of code and of its path."""


def steps(result: Result) -> Table:
    """Every phase with its time, before and with the plan, and what it would bring if it were free."""
    tuned = result.tuned_anatomy if result.plan is not None else None
    plain, bounds = result.anatomy, result.diagnosis.bounds
    names = list(dict.fromkeys([*plain.phases_s, *(tuned.phases_s if tuned else ())]))
    alone = {b.shortens[0]: b for b in reversed(bounds) if len(b.shortens) == 1 and b.shortens[0] in names}
    shares = {name: plain.share(name) or 0.0 for name in plain.phases_s}
    largest = max(shares.values(), default=0.0)
    rows, looks = [], []
    for name in names:
        bound = alone.get(name)
        gain = [words.times(bound.ratio), words.interval(bound.low, bound.high)] if bound else ["", ""]
        with_plan = _phase(tuned, name)[:2] if tuned else []
        rows.append([name, bound.how if bound else "", *_phase(plain, name), *with_plan, *gain])
        looks.append(Look(bar=shares.get(name, 0.0) / largest if largest > 0 else 0.0, minor=name not in shares))
    head = ["where a step goes", "", "a step", "share", "spread", *(["with the plan", "share"] if tuned else [])]
    most = len(head)
    head += ["if free, at most" if alone else "", "95 %"]
    links = dict.fromkeys((2, 5) if tuned else (2,), [ANATOMY] * len(rows))
    found = table("Time of a step by phase", head, rows, texts=2, links=links)
    return shown(found, (0, 3, most, 1), looks, whole=(0, 3, 2, most, 1))


def _phase(anatomy: Anatomy, name: str) -> list[str]:
    if name not in anatomy.phases_s:
        return ["not observed", "", ""]
    wide = anatomy.spread_fraction.get(name)
    spread = f"± {words.percent(wide)}" if words.known(wide) else ""
    return [words.seconds(anatomy.phases_s[name]), words.share(anatomy.share(name)), spread]


def bounds(result: Result) -> Table:
    """What each remedy could bring at most."""
    rows = [
        (b.remedy, b.how, ", ".join(b.shortens), words.ratio(b.ratio), words.interval(b.low, b.high))
        for b in result.diagnosis.bounds
    ]
    head = ("remedy", "how", "shortens", "at most", "95 %")
    anchors = [behind_bound(b) for b in result.diagnosis.bounds]
    return table("what a remedy can bring at most", head, rows, texts=3, links={3: anchors})


def timeline(found: Sequence[Dot]) -> Table:
    """Each kind of step in a few numbers."""
    rows = []
    for kind, name in KINDS.items():
        samples = [dot.step_s for dot in found if dot.kind == kind]
        if samples:
            summary = stats.summarize(samples)
            values = (summary.low, summary.median, summary.high, max(samples))
            rows.append([name, words.count(len(samples)), *(words.seconds(value) for value in values)])
    head = ("steps", "number", "5 %", "median", "95 %", "slowest")
    return table("Steps by what they were measured for", head, rows, links={5: [STEPS] * len(rows)})


def trials(result: Result) -> Table:
    """Every trial with what it brought and cost."""
    rows = [_trial(t, t.label) for t in result.trials]
    anchors = [TRIALS] * len(rows)
    if result.remeasured is not None:
        rows.append(_trial(result.remeasured, f"{result.remeasured.label}, measured again"))
        anchors.append(FINAL)
    links = {1: ["" if row[3] else to for to, row in zip(anchors, rows, strict=True)], 3: anchors}
    head = ("levers", "verdict", "remark", "ratio", "95 %", "pairs", "discarded", "took", "engaging", "memory", "plain")
    return table("Every trial", head, rows, texts=3, links=links)


def _trial(trial: Trial, name: str) -> list[str]:
    return [
        name,
        trial.outcome,
        remark(trial),
        words.ratio(trial.ratio),
        ends(trial),
        words.count(trial.num_pairs),
        words.count(trial.num_discarded),
        words.duration(trial.took_s),
        words.duration(trial.engage_s) if trial.engage_s >= 0.05 else "",
        words.memory(trial.peak_memory_bytes) if trial.peak_memory_bytes is not None else "",
        words.memory(trial.baseline_peak_memory_bytes) if trial.baseline_peak_memory_bytes is not None else "",
    ]


def read_sites(result: Result) -> Table:
    """Where values are read on the host."""
    head = ("where", "reads", "how often", "takes of a step")
    sites = result.reads.sites if result.reads is not None else ()
    rows = [(place(one), f"`{code(one)}`", often(one), words.seconds(one.waited_s)) for one in sites]
    return table("Values read on the host", head, rows, texts=2, links={3: [READS] * len(rows)})


def place(site: ReadSite) -> str:
    """File and line, as they are typed here; of a long path the end."""
    name = str(words.nearby(Path(site.file)))
    return f"{name if len(name) <= LONGEST_PATH else f'…{name[1 - LONGEST_PATH :]}'}:{site.line}"


def code(site: ReadSite) -> str:
    """What stands in the line that reads."""
    return words.shortened(" ".join(site.code.replace("`", "'").split()), LONGEST_CODE) or site.read


def often(site: ReadSite) -> str:
    """How often in a step."""
    return f"{words.three(site.reads_per_step)} a step"


def operations(result: Result) -> Table:
    """The heaviest operations of one step."""
    rows = []
    for op in result.census.operations if result.census else ():
        timed = op.self_s > 0
        rows.append([
            op.name, op.shape, op.dtype, words.count(op.num_calls), words.seconds(op.self_s),
            words.scaled(op.flops, "FLOP") if op.counted else "no formula",
            words.scaled(op.moved_bytes, "B"),
            words.scaled(op.flops / op.self_s, "FLOP/s") if op.counted and op.flops and timed else "",
            words.scaled(op.moved_bytes / op.self_s, "B/s") if op.moved_bytes and timed else "",
        ])  # fmt: skip
    head = ("operation", "shapes", "type", "calls", "time", "FLOP", "moved", "rate", "traffic")
    return table("The heaviest operations of one step", head, rows, texts=3, links={4: [CENSUS] * len(rows)})


def numerics(result: Result) -> Table:
    """What the comparison of numbers said for every trial whose numbers were compared."""
    again = [result.remeasured] if result.remeasured is not None else []
    judged = [t for t in (*again, *result.trials) if t.agreement]
    rows = [
        (f"{t.label}{', measured again' if t.remeasured else ''}", t.class_, t.agreement, t.agreement_detail)
        for t in judged
    ]
    head = ("levers", "class", "verdict", "error and noise")
    return table("Numerics of every trial", head, rows, texts=4, links={2: [NUMERICS] * len(rows)})


def ceilings(result: Result) -> Table:
    """The machine's measured limits."""
    values = result.ceilings.values if result.ceilings else ()
    rows = [
        (words.ceiling(c.name), c.source, words.limit(c.value, c.unit), f"± {words.percent(c.spread_fraction)}")
        for c in values
    ]
    links = {2: [CEILINGS] * len(rows)}
    return table("Measured ceilings", ("limit", "measured on", "value", "spread"), rows, texts=2, links=links)
