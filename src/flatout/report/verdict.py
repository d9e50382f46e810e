"""What do `tune` and `why` come to? One number, one sentence, what they rest on, and what to type next.

In: a `Result`. Out: a `Headline` and rows, the same for the terminal and the page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from flatout.judge import stats
from flatout.judge.result import Result
from flatout.records.plan import label
from flatout.records.trace import FOREIGN_LIMIT
from flatout.report import energy, evidence, tried, words
from flatout.report.table import On
from flatout.report.view import Item, Listing, Row

WORTH_SAYING = 0.05
"""What lies between steps is said beside ratios of a step from this share of all the time on."""

OVER = 1.2
"""So many times the budget that was asked for is worth a word."""


class Headline(NamedTuple):
    """The beginning of the page: the one number, what it is a number of, and the verdict behind the script's name."""

    number: str
    unit: str
    sentence: str


def headline(result: Result) -> Headline:
    """Of any verdict, and what its numbers are of where that is not all the time."""
    said, more = _headline(result), between(result)
    return said._replace(sentence=f"{said.sentence} {words.sentence(more)}.") if more else said


def between(result: Result) -> str:
    """What lies between steps, where it is so much that it must be said of what speeds and ratios are; else empty."""
    anatomy = result.anatomy
    shares = {name: outside_s / anatomy.all_s for name, outside_s in anatomy.outside_s.items()}
    large = [f"{name} takes {words.percent(share)}" for name, share in shares.items() if share >= WORTH_SAYING]
    return f"{' and '.join(large)} of the time; speeds and ratios are of a training step, without it" if large else ""


def _headline(result: Result) -> Headline:
    found, again, won = tried.best(result), result.remeasured, result.winner
    if result.command == "why":
        bound = "was measured; what binds is" if result.diagnosis.contradictions else "is bound by"
        return Headline(
            *_speed(result, result.baseline_steps_per_s),
            f"{bound} {result.diagnosis.sentence or 'something that was not found'}{doubt(result)}.",
        )
    if result.against_itself:
        return Headline(
            words.ratio(again.ratio) + "x" if again is not None and words.known(again.ratio) else "No ratio",
            "against itself",
            "was measured against itself, as if it were a lever: any difference that this finds is an error.",
        )
    if result.verdict == "faster" and won is not None:
        gain = words.times(won.ratio)
        agrees = ", and its numbers agree." if won.agreement == "agrees" else "."
        said = f"trains {gain.removesuffix('x')} times as fast on this machine{agrees}"
        return Headline(gain, "as fast", said)
    if result.verdict == "no difference":
        number = f"{words.ratio(found.ratio)}x" if found is not None else words.times(1.0)
        said = "is as fast as any lever makes it on this machine. Change nothing."
        return Headline(number, "at best", said)
    if found is not None and found.outcome in ("faster", "disagrees"):  # speed without numbers to trust is no result
        compared = found.outcome == "disagrees"
        became = "does not compute the same." if compared else "could not be shown to compute the same."
        unit = "but other numbers" if compared else "but numbers that nobody compared"
        return Headline(words.times(found.ratio), unit, f"stays as it is: the fastest candidate {became}")
    unit = "95 % interval of the best candidate"
    if not (ends := tried.ends(found) if found is not None else ""):
        became = "could be used" if result.trials else "was measured"
        unit = f"no candidate {became}" if found is None else "too few pairs of windows for an interval"
    said = "may or may not be faster with a lever: this measurement cannot tell."
    return Headline(ends or "No answer", unit, said)


# -- what it rests on --------------------------------------------------------------------------------------------------


def rows(result: Result) -> tuple[Item, ...]:
    """The verdict, what it rests on, what the reader must know, what it cost, and the plan."""
    found: list[Item] = _result(result) if result.command == "tune" else []
    if ranks := on_ranks(result):
        found.append(Row(label="ranks", note=ranks))
    if result.command == "tune" and (reached := tried.input_reached(result)):
        found.append(Row(label="input", note=reached, most=3))
    if result.command == "tune" and result.stopped and result.trials:
        found.append(Row(label="stopped", note=f"the search ended early: {result.stopped}"))
    found += [*_cautions(result), *_energy(result), _cost(result)]
    if result.plan_path:
        nothing = "" if result.plan is not None else ": to change nothing, with what was tried"
        found.append(Row(label="plan", value=result.plan_path, note=nothing, tone="command", on="screen"))
    if result.plan is not None:
        levers = ", ".join(f"`{label({name: how})}`" for name, how in result.plan.levers.items())
        where = f", in `{result.plan_path}`" if result.plan_path else ""
        found.append(Row(label="plan", note=f"{levers}{where}", on="page" if result.plan_path else "both"))
    return tuple(found)


def _result(result: Result) -> list[Item]:
    found: list[Item] = []
    noise = result.noise_fraction
    equal = f"two equal runs differ by up to {words.percent(noise)} here" if noise is not None else ""
    source = evidence.headline(result)
    if result.against_itself:
        word, rest = tried.against_itself(result)
        found.append(Row(label="result", value=word, note=rest, source=source))
    elif result.verdict == "faster":
        found += _won(result, equal, source)
    elif result.verdict == "no difference":
        limit = f"{_limit(result)}. {words.sentence(equal)}" if equal else _limit(result)
        found.append(Row(label="result", value="no difference", note=f"{_best(result)}. {limit}", source=source))
    else:
        rest = _best(result) + _open_question(result, equal)
        found.append(Row(label="result", value="inconclusive", note=rest, tone="unsure", source=source))
    return found


def _speed(result: Result, steps_per_s: float) -> tuple[str, str]:
    """How fast, and in what, for a headline."""
    if result.goal == "latency":
        return words.seconds(1 / steps_per_s), "in the models"
    return words.rate(steps_per_s).removesuffix(" steps/s"), "steps a second"


def _said(result: Result, steps_per_s: float) -> str:
    """The same in a row."""
    return " ".join(_speed(result, steps_per_s)) if result.goal == "latency" else words.rate(steps_per_s)


def _won(result: Result, equal: str, source: str) -> list[Item]:
    won = result.winner
    plain, tuned = _speed(result, result.baseline_steps_per_s)[0], _said(result, result.tuned_steps_per_s)
    ends = tried.ends(won) if won else ""
    again = "when measured again" if won and won.remeasured else ""
    rest = "  " + " ".join(filter(None, (ends, again))) if ends else ""
    note = f": {plain} → {tuned}{rest}{'; ' + equal if equal else ''}"
    gain = f"{words.times(won.ratio if won else None)} faster"
    found: list[Item] = [Row(label="result", value=gain, note=note, tone="good", source=source)]
    if won is not None:
        class_, colon, detail = tried.remark(won).partition(":")
        note = f"{colon}{detail}"
        found.append(Row(label="numerics", value=class_, note=note, source=evidence.NUMERICS, most=2, tone="plain"))
    return found


def _best(result: Result) -> str:
    found = tried.best(result)
    if found is None:
        return f": {tried.nothing_usable(result)}"
    again = " when measured again" if found.remeasured else ""
    among = f"best of {words.plural(len(result.trials), 'candidate')}"
    return f": {among} {words.ratio(found.ratio)}x {tried.ends(found)}".rstrip() + again


def _limit(result: Result) -> str:
    used = result.diagnosis.model_flops_utilization
    binding, _, rest = result.diagnosis.sentence.partition(": ")
    at = (
        f", at {words.percent(used)} of this machine's {result.diagnosis.arithmetic} ceiling"
        if used is not None
        else ""
    )
    if result.diagnosis.contradictions:
        return f"What binds is {result.diagnosis.sentence}"
    if result.diagnosis.binding == "nothing":
        return f"{words.sentence(rest)}{at}"
    return f"The step is bound by {binding}{at}: {rest}" if rest else f"The step is bound by {binding}{at}"


def _open_question(result: Result, equal: str) -> str:
    """Why a verdict is open, from the best trial to the noise, as the rest of a sentence."""
    found = tried.best(result)
    said = ""
    if found is not None and found.outcome == "faster":
        said = f", but its numbers could not be compared: {found.agreement_detail or 'nothing was captured'}"
    elif found is not None:
        said = f", {tried.remark(found)}"
    if result.noise is not None and result.noise.reason:
        return f"{said}. Plain against plain: {result.noise.reason}"
    return f"{said}. {words.sentence(equal)}" if equal else said


def _cautions(result: Result) -> list[Item]:
    found: list[Item] = []
    if result.num_discarded:
        pairs = words.plural(result.num_discarded, "pair")
        note = f"{pairs} of windows that others, a compilation or a restarted loader disturbed"
        found.append(Row(label="discarded", note=note, on="screen"))
    found += [Row(label="warning", value=text, tone="caution", most=2) for text in tried.warnings(result)]
    if result.refused:
        lead = f"{words.plural(len(result.refused), 'write')} of trials: "
        found.append(Listing(label="refused", entries=_paths(result.refused), lead=lead, most=2, on="screen"))
    if result.written:
        lead = "by trials, and thrown away: "
        found.append(Listing(label="written", entries=_paths(result.written), lead=lead, verbose=True, on="screen"))
    return found


def _paths(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"`{name if len(name) <= 50 else f'{name[:16]}…{name[-33:]}'}`" for name in names)


def _energy(result: Result) -> list[Item]:
    """One quiet line where it is known; that it is not, only where everything is asked for."""
    if result.energy is None:
        return []
    if not (said := energy.line(result.energy, with_plan=result.winner is not None)):
        why = result.energy.baseline.why_not
        why = f"not known: {why}" if result.energy.sources else "not readable here; `flatout machine` says why"
        return [Row(label="energy", note=why, verbose=True, on="screen")]
    by = f"  ({'; '.join(result.energy.sources)})"
    return [Row(label="energy", note=f"{said} a step, with all that ran here", aside=by, source=evidence.ENERGY)]


def _cost(result: Result) -> Row:
    asked_s, runs, steps = result.asked_budget_s, result.break_even_runs, result.steps_in_run
    over = asked_s is not None and result.tuning_s > OVER * asked_s
    took = words.duration(result.tuning_s) + (f", where {words.duration(asked_s)} were asked for" if over else "")
    if result.plan is not None and result.break_even_steps is None:
        took += ", which the gain never earns back"
    elif result.plan is not None and result.break_even_steps is not None:
        took += f", earned back after {words.three(result.break_even_steps)} steps"
        if runs is not None and steps is not None:
            pays = "it pays within this very run" if runs == 1 else f"it pays from run {runs:,} on"
            took += f". This run has {words.count(steps)}: {pays}"
    return Row(label="cost", note=took)


# -- what else both say of it ------------------------------------------------------------------------------------------


def baseline(result: Result, label_: str = "baseline", on: On = "both") -> Row:
    """The speed of the plain script."""
    spread = result.baseline_spread_fraction
    measured = [s for s in result.baseline_window_step_s if words.known(s)]
    details = []
    rest = f" ± {words.percent(spread)}" if words.known(spread) else ""
    if measured:
        step_s = stats.summarize(measured).median
        rest = words.scatter(step_s, spread)
        details.append(f"{words.seconds(step_s)} a step" if result.goal != "latency" else _paced(result))
    if result.foreign_fraction is not None:
        details.append(f"others used {words.percent(result.foreign_fraction)} of the CPU")
    return Row(
        label=label_,
        value=_said(result, result.baseline_steps_per_s),
        note=rest,
        aside=f"  ({'; '.join(details)})" if details else "",
        source=evidence.BASELINE,
        on=on,
    )


def _paced(result: Result) -> str:
    plain = (result.latency or {}).get("plain")
    rate = f"{words.rate(plain.steps_per_s)}, " if plain is not None and plain.steps_per_s is not None else ""
    return f"{rate}at the pace of who calls"


def binding(result: Result) -> Row:
    """What binds, and how doubtful that is."""
    head, _, rest = result.diagnosis.sentence.partition(":")
    return Row(label="binding", value=head or "not known", note=f":{rest}" if rest else "", aside=doubt(result))


def doubt(result: Result) -> str:
    """What stands beside what binds where others used a good part of the machine meanwhile."""
    used = result.foreign_fraction or 0.0
    return f" (doubtful: others used {words.percent(used)} of the CPU)" if used > FOREIGN_LIMIT else ""


def next_command(result: Result) -> tuple[str, str]:
    """What to type next, under the terms of this run: the command with its options, and the script as it was typed."""
    if result.command == "why":
        return result.tune_command, result.typed
    if result.plan is not None:
        return result.run_command, result.typed
    if result.against_itself and result.remeasured is not None and words.known(result.remeasured.ratio):
        return "flatout tune", result.typed
    return ("flatout why" if result.verdict == "no difference" else result.retry_command), result.typed


def on_ranks(result: Result) -> str:
    """Where what is told was measured, of ranks that a launcher starts; empty of one process."""
    found = result.launched
    if found is None:
        return ""
    ranks = words.plural(found.num_ranks, "rank")
    if found.alone is None:
        return f"levers were searched on one of {ranks} by itself; none won there, so none was tried on all"
    ends = words.interval(found.alone.ratio_low, found.alone.ratio_high)
    brought = f"{found.alone.label} brought {words.times(found.alone.ratio)} {ends}".rstrip()
    return f"phases and trials are of one of {ranks} by itself, where {brought}; the result is of all, in whole starts"
