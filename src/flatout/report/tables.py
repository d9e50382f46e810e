"""Which numbers stand behind each figure of a result, and where does each come from?

In: a `Result`. Out: a `Table` each, for the page; and the commands that obtain the numbers again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flatout.judge import stats
from flatout.judge.anatomy import Anatomy
from flatout.judge.read_sites import ReadSite
from flatout.judge.result import Result
from flatout.records.plan import Trial
from flatout.report import energy, words
from flatout.report.evidence import (
    ANATOMY,
    CENSUS,
    READS,
    SOURCES,
    STEPS,
    TUNED,
    behind_bound,
    behind_numerics,
    behind_trial,
)
from flatout.report.table import Look, Table, shown, table
from flatout.report.thinned import KINDS, Dot
from flatout.report.tried import ends, remark
from flatout.report.view import Again

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
    head += ["if it were free, at most" if alone else "", "95 %"]
    links = {2: [ANATOMY] * len(rows), **({5: [TUNED] * len(rows)} if tuned else {})}
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
    again = [result.remeasured] if result.remeasured is not None else []
    rows = [_trial(t, t.label) for t in result.trials] + [_trial(t, f"{t.label}, measured again") for t in again]
    shown = (*result.trials, *again)
    anchors = [(behind_trial(result, t), bool(words.ratio(t.ratio))) for t in shown]
    links = {1: ["" if there else to for to, there in anchors], 3: [to for to, _ in anchors]}
    head = ["levers", "verdict", "remark", "ratio", "95 %", "pairs", "discarded", "took", "engaging", "memory", "plain"]
    if any(t.candidate_joules_per_step is not None for t in shown):
        head += ["energy a step", "plain"]
        rows = [[*row, *_energy(trial)] for row, trial in zip(rows, shown, strict=True)]
    return table("Every trial", head, rows, texts=3, links=links)


def _energy(trial: Trial) -> list[str]:
    found = (trial.candidate_joules_per_step, trial.baseline_joules_per_step)
    return [words.joules(value) if value is not None else "" for value in found]


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


def used(result: Result) -> Table:
    """The energy of a step."""
    head = ("energy of", "joules", "windows")
    return table("Energy", head, energy.rows(result))


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
    anchors = [behind_numerics(t) for t in judged]
    head = ("levers", "class", "verdict", "error and noise")
    return table("Numerics of every trial", head, rows, texts=4, links={2: anchors})


def sources(result: Result) -> list[Again]:
    """Each command with the numbers that it obtains again, and how each was obtained."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    for number, how, command in _sources(result):
        found.setdefault(command, []).append((number, how, SOURCES.get(number, "")))
    return [Again(command=command, numbers=tuple(numbers)) for command, numbers in found.items()]


def _sources(result: Result) -> list[tuple[str, str, str]]:
    why, tune = f"flatout why {result.typed}", f"{result.tune_command} {result.typed}"
    windows = words.plural(len(result.baseline_window_step_s), "window")
    rows = [
        ("steps a second", f"median of {windows} of the plain script; only the ends of steps are timed", why),
        (
            "where a step goes",
            f"means over {words.plural(result.anatomy.num_steps, 'step')} in "
            f"{words.plural(result.anatomy.num_windows, 'window')} of their own; watching costs time, so these windows "
            "enter no ratio",
            why,
        ),
        ("if it were free, at most", "each as its row says; measured before anything was tried", why),
    ]
    if result.noise is not None:
        rows.append(("two equal runs", "95 % interval of plain against plain, in alternating windows", why))
    if result.trials:
        rows.append(
            (
                "ratios",
                "windows of plain and candidate in turn; 95 %: signed ranks from 8 pairs on, below that Student's t",
                tune,
            )
        )
    if result.remeasured is not None and result.remeasured.remeasured:
        pairs = words.plural(result.remeasured.num_pairs, "further pair")
        how = f"{pairs} after the choice: the best of many is partly luck"
        rows.append(("the final ratio", how, tune))
    if any(trial.agreement for trial in result.trials):
        rows.append(("numerics", "the same batch and random state with and without; norm of the difference", tune))
    if result.census is not None:
        how = "one step, each operation counted by formula (two per multiply-add) and by its arguments' bytes"
        rows.append(("FLOP and bytes", how, why))
    if result.ceilings is not None:
        rows.append(("ceilings", "microbenchmarks, the 90th percentile of their windows", "flatout machine --refresh"))
    if result.reads is not None and result.reads.sites:
        how = "windows of their own, in which each call that reads was timed"
        rows.append(("values read on the host", how, why))
    rows += energy.sources(result, tune if result.trials else why)
    rows.append(("this page", "from `result.json` beside it", f"flatout report {result.run}".rstrip()))
    return rows


def ceilings(result: Result) -> Table:
    """The machine's measured limits."""
    values = result.ceilings.values if result.ceilings else ()
    rows = [
        (words.ceiling(c.name), c.source, words.limit(c.value, c.unit), f"± {words.percent(c.spread_fraction)}")
        for c in values
    ]
    anchors = [f"raw-ceiling-{number}" for number in range(len(rows))]
    return table("Measured ceilings", ("limit", "measured on", "value", "spread"), rows, texts=2, links={2: anchors})
