"""Which raw samples stand behind each number of the page, and which command obtains it again?

In: a `Result`, and the `Samples` of its run folder where they are at hand. Out: an `Evidence` for each anchor that a
number of the page leads to. Where samples are missing it says why, and still names the command.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from flatout.judge.diagnosis import EASED, SHARE, Bound
from flatout.judge.result import Result
from flatout.judge.samples import Samples, WindowSample
from flatout.records.plan import Trial, label
from flatout.records.trace import PHASES
from flatout.report import words
from flatout.report.table import Table, milliseconds, table
from flatout.report.thinned import Dot, slowest
from flatout.report.tried import best, remark
from flatout.report.view import Evidence

BASELINE, NOISE, ANATOMY, TUNED = "raw-baseline", "raw-noise", "raw-anatomy", "raw-tuned"
FREE_DATA, THREADS, LAUNCHES, CENSUS = "raw-free-data", "raw-threads", "raw-launches", "raw-census"
FINAL, STEPS, READS = "raw-final", "raw-steps", "raw-reads"
"""Where the raw samples behind the numbers are in the page."""

MOST_SLOW = 40
"""Steps in the table of the slowest ones."""

SOURCES = {
    "steps a second": BASELINE,
    "where a step goes": ANATOMY,
    "two equal runs": NOISE,
    "the final ratio": FINAL,
    "FLOP and bytes": CENSUS,
    "values read on the host": READS,
    "ceilings": "raw-ceiling-0",
}
"""The numbers that the section on cost names, and where their samples are."""


def evidence(result: Result, samples: Samples | None, dots: Sequence[Dot]) -> tuple[Evidence, ...]:
    """Everything that numbers of the page lead to, in the order of the page; `dots` are all steps of the result."""
    found = [*_plain(result, samples or Samples(), dots), *_tried(result, samples or Samples()), *_limits(result)]
    lacking = _lacking(samples)
    return tuple(
        one if any(t.rows for t in one.tables) or one.missing else replace(one, tables=(), missing=lacking)
        for one in found
    )  # fmt: skip


def _lacking(samples: Samples | None) -> str:
    if samples is None:
        return "this page was made without the traces of the run folder"
    return "; ".join(samples.remarks) or "the traces of this run do not hold them"


def headline(result: Result) -> str:
    """Where the samples behind the one number are."""
    if result.command == "why":
        return BASELINE
    found = best(result)
    return behind_trial(result, found) if found is not None else NOISE


def behind_bound(bound: Bound) -> str:
    """Where the samples of a bound are."""
    if bound.how in (SHARE, EASED):
        return ANATOMY
    return {"free data": FREE_DATA, "threads that fit": THREADS, "free launches": LAUNCHES}.get(bound.remedy, CENSUS)


def behind_trial(result: Result, trial: Trial) -> str:
    """Where the samples of a trial are."""
    if trial is result.remeasured:
        return FINAL
    return next((f"raw-trial-{number}" for number, one in enumerate(result.trials) if one is trial), "")


def behind_numerics(trial: Trial) -> str:
    """Where the comparisons behind a trial's numerics are; the same levers have the same."""
    return f"raw-numerics-{zlib.crc32(trial.label.encode('utf-8', 'replace')):x}"


# -- the plain script ------------------------------------------------------------------------------------------------


def _plain(result: Result, samples: Samples, dots: Sequence[Dot]) -> list[Evidence]:
    why, tune = f"flatout why {result.typed}", f"{result.tune_command} {result.typed}"
    return [
        _baseline(result, tune if result.winner is not None else why),
        _noise(samples, why),
        *_apart(result, samples, why, tune),
        *_counterfactuals(result, samples, why),
        *_launches(result, samples, why),
        *_reads(result, samples, why),
        _census(result, why),
        *_steps(result, dots, why if result.command == "why" else tune),
    ]


def _baseline(result: Result, command: str) -> Evidence:
    rows = [(str(number), milliseconds(value)) for number, value in enumerate(result.baseline_window_step_s, 1)]
    return Evidence(
        anchor=BASELINE,
        title="Steps a second, plain",
        how="the median of these windows; only the ends of steps were timed",
        command=command,
        tables=(table("Baseline windows", ("window", "a step"), rows),),
        missing="" if rows else "no window was measured",
    )


def _noise(samples: Samples, command: str) -> Evidence:
    first = next((n for n, w in enumerate(samples.windows) if w.purpose == "anatomy"), len(samples.windows))
    windows = [w for w in samples.windows[:first] if w.purpose == "baseline"]
    return Evidence(
        anchor=NOISE,
        title="Two equal runs",
        how="plain against plain: neighbouring windows are compared; those that others or a compilation disturbed "
        "were left out",
        command=command,
        tables=(_windows("Plain windows in turn", windows),),
    )


def _apart(result: Result, samples: Samples, why: str, tune: str) -> list[Evidence]:
    plain = Evidence(
        anchor=ANATOMY,
        title="Where a step goes",
        how=f"means over the {words.plural(result.anatomy.num_windows, 'window')} that were disturbed least; the "
        "phases of each step were timed, which costs time, so these windows enter no ratio",
        command=why,
        tables=(_windows("Windows taken apart", samples.of("anatomy", observe="phases"), phases=True),),
    )
    if result.tuned_anatomy is None:
        return [plain]
    windows = samples.of("winner", observe="phases")
    tuned = Evidence(
        anchor=TUNED,
        title="Where a step goes with the plan",
        how="means over these windows",
        command=tune,
        tables=(_windows("Windows taken apart with the plan", windows, phases=True),),
    )
    return [plain, tuned]


def _counterfactuals(result: Result, samples: Samples, command: str) -> list[Evidence]:
    wanted = {behind_bound(bound) for bound in result.diagnosis.bounds}
    known = (
        (FREE_DATA, "If data were free", lambda name: name == "free_data"),
        (THREADS, "If threads fitted", lambda name: name.startswith("threads")),
    )
    return [
        Evidence(
            anchor=anchor,
            title=title,
            how="windows with it in turn with plain ones",
            command=command,
            tables=(_windows(title, _in_turn(samples, is_lever)),),
        )
        for anchor, title, is_lever in known
        if anchor in wanted
    ]


def _launches(result: Result, samples: Samples, command: str) -> list[Evidence]:
    if LAUNCHES not in {behind_bound(bound) for bound in result.diagnosis.bounds}:
        return []
    pairs = [pair for one in samples.scalings for pair in itertools.zip_longest(one.full_s, one.half_s)]
    rows = [(str(number), *(milliseconds(x) for x in pair)) for number, pair in enumerate(pairs, 1)]
    return [
        Evidence(
            anchor=LAUNCHES,
            title="If launches were free",
            how="the model calls of one step replayed: what half the batch does not halve is fixed cost",
            command=command,
            tables=(table("Model calls replayed", ("replay", "whole batch", "half of it"), rows),),
        )
    ]


def _reads(result: Result, samples: Samples, command: str) -> list[Evidence]:
    if result.reads is None or not result.reads.sites:
        return []
    return [
        Evidence(
            anchor=READS,
            title="Values read on the host",
            how="the calls that read were timed in these windows, which enter no ratio; their sums are in the traces "
            "(`host_reads`)",
            command=command,
            tables=(_windows("Windows in which reads were timed", samples.of("reads")),),
        )
    ]


def _census(result: Result, command: str) -> Evidence:
    census = result.census
    rows = [] if census is None else [
        ("operations", words.count(census.num_operations)),
        ("FLOP", words.count(census.flops)),
        ("bytes moved", words.count(census.moved_bytes)),
        ("values read back", words.count(census.num_syncs)),
    ]  # fmt: skip
    return Evidence(
        anchor=CENSUS,
        title="Operations of one step",
        how="one step of its own, each operation counted by formula and by its arguments' bytes; the heaviest are in "
        "the table above",
        command=command,
        tables=(table("One step", ("what", "number"), rows),),
        missing="" if rows else "no step was counted",
    )


def _in_turn(samples: Samples, is_lever: Callable[[str], bool]) -> list[WindowSample]:
    """The windows of a counterfactual, with the plain ones between and beside them."""
    places = [n for n, w in enumerate(samples.windows) if w.purpose == "counterfactual" and is_lever(w.levers)]
    if not places:
        return []
    around = samples.windows[max(places[0] - 1, 0) : places[-1] + 2]
    return [w for w in around if w.purpose == "baseline" or is_lever(w.levers)]


def _steps(result: Result, dots: Sequence[Dot], command: str) -> list[Evidence]:
    found = slowest(dots, MOST_SLOW)
    if not found:
        return []
    rows = [(words.count(dot.number), words.seconds(dot.start_s), dot.label, milliseconds(dot.step_s)) for dot in found]
    return [
        Evidence(
            anchor=STEPS,
            title="Single steps",
            how=f"the slowest of {words.plural(len(result.timeline), 'step')}, with what lay inside them; "
            f"`flatout report {result.run} --export steps.csv` writes every one",
            command=command,
            tables=(table("The slowest steps", ("step", "begun at", "levers", "took"), rows, texts=3),),
        )
    ]


# -- what was tried --------------------------------------------------------------------------------------------------


def _tried(result: Result, samples: Samples) -> list[Evidence]:
    tune = f"{result.tune_command} {result.typed}"
    again = [result.remeasured] if result.remeasured is not None else []
    trials = [(behind_trial(result, t), t) for t in (*again, *result.trials)]
    found = {anchor: _trial(anchor, trial, tune) for anchor, trial in trials}
    for _, trial in trials:
        if trial.agreement:
            anchor = behind_numerics(trial)
            found[anchor] = _numerics(anchor, trial, samples, tune)
    return list(found.values())


def _trial(anchor: str, trial: Trial, command: str) -> Evidence:
    pairs = zip(trial.baseline_step_s, trial.candidate_step_s, strict=False)
    rows = [(str(number), milliseconds(plain), milliseconds(other)) for number, (plain, other) in enumerate(pairs, 1)]
    name = f"{trial.label}{', measured again' if trial.remeasured else ''}"
    return Evidence(
        anchor=anchor,
        title=f"Ratio of {name}",
        how="windows of plain and candidate in turn; the ratio is that of the pairs",
        command=command,
        tables=(table(name, ("window", "plain", "candidate"), rows),),
        missing="" if rows else f"no pair of windows: {remark(trial) or 'nothing was measured'}",
    )


def _numerics(anchor: str, trial: Trial, samples: Samples, command: str) -> Evidence:
    points = [point for point in samples.agreements if label(point.levers) == trial.label]
    rows = [
        (
            f"point {number}, {one.check}", one.worst or "–", _small(one.error), _small(one.noise),
            _small(one.slope), _small(one.cosine), _small(one.baseline_error), _small(one.output_error),
        )
        for number, point in enumerate(points, 1)
        for one in point.differences
    ]  # fmt: skip
    head = ("compared", "worst parameter", "error", "noise", "slope", "cosine", "plain twice", "outputs")
    return Evidence(
        anchor=anchor,
        title=f"Numerics of {trial.label}",
        how=f"the same batch and random state with and without: {trial.agreement_detail or trial.agreement}",
        command=command,
        tables=(table(f"Numerics of {trial.label}", head, rows, texts=2),),
    )


# -- the machine -----------------------------------------------------------------------------------------------------


def _limits(result: Result) -> list[Evidence]:
    found = []
    for number, one in enumerate(result.ceilings.values if result.ceilings else ()):
        rows = [(str(n), words.limit(value, one.unit)) for n, value in enumerate(one.samples, 1)]
        name = words.ceiling(one.name)
        found.append(
            Evidence(
                anchor=f"raw-ceiling-{number}",
                title=f"Ceiling: {name}",
                how=f"{'the 10th' if one.unit == 's' else 'the 90th'} percentile of "
                f"{words.plural(one.num_samples, 'window')}: {one.source}",
                command="flatout machine --refresh",
                tables=(table(name, ("window", "reached"), rows),),
                missing="" if rows else "an older flatout measured it and kept no samples",
            )
        )
    return found


def _windows(title: str, windows: Sequence[WindowSample], *, phases: bool = False) -> Table:
    names = _phases(windows) if phases else []
    head = ("window", "levers", "steps", "a step", *names, "others' CPU", "compilations")
    rows = [
        (
            f"{w.child}.{w.index}", w.levers, words.count(w.num_steps), milliseconds(w.whole.step_s),
            *(milliseconds(w.whole.phases_s[name]) if name in w.whole.phases_s else "not observed" for name in names),
            words.percent(w.foreign_fraction) if w.foreign_fraction is not None else "not observed",
            words.count(w.recompilations),
        )
        for w in windows
    ]  # fmt: skip
    return table(title, head, rows, texts=2)


def _phases(windows: Iterable[WindowSample]) -> list[str]:
    seen = {name for w in windows for name in w.whole.phases_s}
    return [*(name for name in PHASES if name in seen), *sorted(seen - {*PHASES})]


def _small(value: float | None) -> str:
    return f"{value:.3g}" if value is not None and words.known(value) else "not observed"
