"""What does a terminal show of a result? What `tune` and `why` found, on one screen each.

In: records. Out: a `Report`, which `flatout.report.screen.show` prints and `plain` turns into text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flatout.judge.result import Result
from flatout.records.plan import label
from flatout.report import PAGE, answer, energy, reads, tried, words
from flatout.report.screen import LABEL, Part, Report, Screen
from flatout.report.trials_table import show_trials

BAR, NARROW_BAR = 22, 6
"""Columns of the longest bar."""

NAME = 14
"""Columns of a phase's name."""


def tune(result: Result, *, verbose: bool = False, page: Path | str | None = None) -> Report:
    """What `flatout tune` found: where a step goes, what was tried, and the verdict.

    Args:
        result: What to show.
        verbose: Everything instead of one screen.
        page: Where its page is; in the run folder without it.
    """

    def compose(screen: Screen) -> None:
        _measured(screen, result, verbose=verbose)
        screen.blank()
        show_trials(screen, result, verbose=verbose)
        screen.blank()
        _verdict(screen, result)
        if ranks := answer.on_ranks(result):
            screen.say("ranks", ranks)
        if reached := tried.input_reached(result):
            screen.say("input", reached, most=3)
        _cautions(screen, result, verbose=verbose)
        energy.show(screen, result, verbose=verbose)
        _cost(screen, result)
        _places(screen, result, page)

    return Report(compose)


def why(result: Result, *, verbose: bool = False, page: Path | str | None = None) -> Report:
    """What `flatout why` found: where a step goes, what holds it back, and how that is known."""

    def compose(screen: Screen) -> None:
        _measured(screen, result, verbose=verbose)
        _evidence(screen, result, verbose=verbose)
        screen.blank()
        _cautions(screen, result, verbose=verbose)
        energy.show(screen, result, verbose=verbose)
        _cost(screen, result)
        _places(screen, result, page)

    return Report(compose)


# -- measured ------------------------------------------------------------------------------------------------------


def _measured(screen: Screen, result: Result, *, verbose: bool) -> None:
    _head(screen, result)
    screen.blank()
    _ceilings(screen, result)
    _baseline(screen, result, verbose=verbose)
    screen.blank()
    _anatomy(screen, result, verbose=verbose)
    said = answer.binding(result)
    screen.say("binding", (said.head, "bold"), said.rest, (said.aside, "dim"))
    if result.command == "tune":
        reads.show(screen, result, verbose=verbose)


def _head(screen: Screen, result: Result) -> None:
    here = result.machine
    framework = words.framework(result.header.framework, result.header.framework_version)
    precision = "" if here.bfloat16_in_hardware() else "no "
    name = f"{here.cpu}, " if here.cpu else ""
    cpu = f"{words.plural(here.num_cores, 'CPU core')} ({name}{precision}bf16 in hardware)"
    parts = [framework, *_gpus(result), cpu]
    if result.header.world_size > 1:
        parts.append(f"{result.header.world_size} ranks")
    screen.say("", (result.script or "a script", "bold"), "".join(f" · {part}" for part in parts if part), indent=0)


def _gpus(result: Result) -> list[str]:
    if result.facts.device == "cpu":
        return []
    return [accelerator.name for accelerator in result.machine.accelerators[:1]] or [result.facts.device]


def _ceilings(screen: Screen, result: Result) -> None:
    found = result.ceilings
    if found is None:
        screen.say("ceilings", "not measured")
        return
    named = found.peaks()
    if (memory := found.get("memory_copy")) is not None:
        named[words.ceiling(memory.name)] = memory
    rates = [(name, words.limit(c.value, c.unit)) for name, c in named.items()]
    parts = []
    for number, (name, rate) in enumerate(rates):
        value, _, unit = rate.partition(" ")
        again = number + 1 < len(rates) and rates[number + 1][1].endswith(f" {unit}")
        parts.append(f"{name} {value if again else rate}")
    created = words.unix_s(result.created)
    text = " · ".join(parts) or "not measured"
    age = f"  ({words.age(found.age_s(created))})" if created is not None else ""
    screen.say("ceilings", text, (age if LABEL + len(text) + len(age) <= screen.width else "", "dim"))


def _baseline(screen: Screen, result: Result, *, verbose: bool) -> None:
    said = answer.baseline(result, windows=verbose)
    screen.say("baseline", (said.head, "bold"), said.rest, (said.aside, "dim"))


def _anatomy(screen: Screen, result: Result, *, verbose: bool) -> None:
    anatomy, bounds = result.anatomy, result.diagnosis.bounds
    alone = {b.shortens[0]: b for b in reversed(bounds) if len(b.shortens) == 1 and b.shortens[0] in anatomy.phases_s}
    cells = min(max(BAR - (80 - screen.width), NARROW_BAR), BAR)
    head = "where a step goes".ljust(2 + NAME + cells + (20 if verbose else 9))
    screen.row(
        (head, "bold"), (("if free, at most" if verbose else "if it were free, at most") if alone else "", "bold")
    )
    largest = max((anatomy.share(name) or 0.0 for name in anatomy.phases_s), default=0.0)
    for name in anatomy.phases_s:
        share = anatomy.share(name)
        bar = screen.bar((share or 0.0) / largest if largest > 0 else 0.0, cells)
        own = f"{words.seconds(anatomy.phases_s[name]):>8}   " if verbose else ""
        bound = alone.get(name)
        gain = "" if bound is None else f"{words.times(bound.ratio):<5} "
        before = f"{words.share(share):>6}   {own}{gain}"
        indent = 2 + NAME + cells + len(before)
        how, *more = screen.folded("" if bound is None or verbose else bound.how, screen.width - indent)
        screen.row(f"  {screen.fit(name, NAME)}", (bar, "cyan"), before, how)
        for line in more:
            screen.row(" " * indent, line)
    _not_in_the_account(screen, result)
    together = [b for b in bounds if len(b.shortens) != 1 or b.shortens[0] not in anatomy.phases_s]
    if together:
        parts = ", ".join(f"{words.times(b.ratio)} with {b.remedy}" for b in together)
        screen.say("at most", parts)


def _not_in_the_account(screen: Screen, result: Result) -> None:
    anatomy = result.anatomy
    if anatomy.not_observed:
        screen.say("  not observed", (", ".join(anatomy.not_observed), "dim"), indent=NAME + 2)
    if anatomy.device_s:
        clock = " · ".join(f"{name} {words.seconds(value)}" for name, value in anatomy.device_s.items())
        screen.say("  on the GPU", clock, indent=NAME + 2)
    for name, outside_s in anatomy.outside_s.items():
        screen.say(f"  {name}", f"{words.seconds(outside_s)} a step, between steps, in no ratio", indent=NAME + 2)


# -- why -----------------------------------------------------------------------------------------------------------


def _evidence(screen: Screen, result: Result, *, verbose: bool) -> None:
    diagnosis = result.diagnosis
    for number, line in enumerate(diagnosis.evidence):
        screen.say("evidence" if number == 0 else "", line)
    _utilization(screen, result)
    if result.reads is not None and result.reads.sites:
        reads.show(screen, result, verbose=verbose)
    else:
        for number, place in enumerate(result.census.sync_places[:4] if result.census else ()):
            screen.say("reads at" if number == 0 else "", place)
    notes = [note for note in diagnosis.notes if not note.startswith("not observed: ")]  # stands above already
    for number, note in enumerate(notes):
        screen.say("notes" if number == 0 else "", note)
    if verbose and diagnosis.bounds:
        _bounds(screen, result)


def _bounds(screen: Screen, result: Result) -> None:
    screen.blank()
    screen.row(("what a remedy can bring at most", "bold"))
    name = max((len(bound.remedy) for bound in result.diagnosis.bounds), default=0)
    for bound in result.diagnosis.bounds:
        ends = words.interval(bound.low, bound.high)
        text = f"{words.ratio(bound.ratio):>5}  {ends + ' ' if ends else ''}{bound.how}"
        screen.say(f"  {bound.remedy}", text, indent=name + 4)


def _utilization(screen: Screen, result: Result) -> None:
    diagnosis = result.diagnosis
    if diagnosis.model_flops_utilization is None:
        return
    peak = result.ceilings.peak(diagnosis.arithmetic) if result.ceilings else None
    achieved = words.scaled(diagnosis.achieved_flops_per_s, "FLOP/s")
    screen.say(
        "arithmetic",
        (f"{words.percent(diagnosis.model_flops_utilization)} of the {diagnosis.arithmetic} ceiling", "bold"),
        f": {achieved} over the whole step",
        f", of {words.limit(peak.value, peak.unit)}" if peak is not None else "",
    )


# -- the verdict ---------------------------------------------------------------------------------------------------


def _verdict(screen: Screen, result: Result) -> None:
    if result.stopped and result.trials:
        screen.say("stopped", f"the search ended early: {result.stopped}")
    noise = result.noise_fraction
    equal = f"two equal runs differ by up to {words.percent(noise)} here" if noise is not None else ""
    if result.against_itself:
        word, rest = tried.against_itself(result)
        screen.say("result", (word, "bold"), rest)
    elif result.verdict == "faster":
        _faster(screen, result, equal)
    elif result.verdict == "no difference":
        limit = f"{_limit_words(result)}. {equal[:1].upper()}{equal[1:]}" if equal else _limit_words(result)
        screen.say("result", ("no difference", "bold"), f"{_best_words(result)}. {limit}")
    else:
        screen.say("result", ("inconclusive", "bold yellow"), _best_words(result), *_open_questions(result, equal))


def _faster(screen: Screen, result: Result, equal: str) -> None:
    won = result.winner
    gain = words.times(won.ratio if won else None)
    speeds = f"{words.rate(result.baseline_steps_per_s).removesuffix(' steps/s')} → "
    ends = tried.ends(won) if won else ""
    again = "when measured again" if won and won.remeasured else ""
    rest = "  " + " ".join(filter(None, (ends, again))) if ends else ""
    screen.say(
        "result",
        (f"{gain} faster", "bold green"),
        f": {speeds}{words.rate(result.tuned_steps_per_s)}{rest}{'; ' + equal if equal else ''}",
    )
    if won is not None:
        screen.say("numerics", tried.remark(won), most=2)


def _best_words(result: Result) -> str:
    found = tried.best(result)
    if found is None:
        return f": {tried.nothing_usable(result)}"
    again = " when measured again" if found.remeasured else ""
    among = f"best of {words.plural(len(result.trials), 'candidate')}"
    return f": {among} {words.ratio(found.ratio)}x {tried.ends(found)}".rstrip() + again


def _limit_words(result: Result) -> str:
    used = result.diagnosis.model_flops_utilization
    binding, _, rest = result.diagnosis.sentence.partition(": ")
    ceiling = f"this machine's {result.diagnosis.arithmetic} ceiling"
    at = f", at {words.percent(used)} of {ceiling}" if used is not None else ""
    if result.diagnosis.contradictions:
        return f"What binds is {result.diagnosis.sentence}"
    if result.diagnosis.binding == "nothing":
        return f"{rest[:1].upper()}{rest[1:]}{at}"
    return f"The step is bound by {binding}{at}: {rest}" if rest else f"The step is bound by {binding}{at}"


def _open_questions(result: Result, equal: str) -> list[str]:
    """Why a verdict is open, from the best trial to the noise, as the rest of a sentence and further ones."""
    found = tried.best(result)
    lines = []
    if found is not None and found.outcome == "faster":
        lines.append(f", but its numbers could not be compared: {found.agreement_detail or 'nothing was captured'}")
    elif found is not None:
        lines.append(f", {tried.remark(found)}")
    if result.noise is not None and result.noise.reason:
        lines.append(f". Plain against plain: {result.noise.reason}")
    elif equal:
        lines.append(f". {equal[:1].upper()}{equal[1:]}")
    return lines


def _cautions(screen: Screen, result: Result, *, verbose: bool) -> None:
    if result.num_discarded:
        pairs = words.plural(result.num_discarded, "pair")
        screen.say("discarded", f"{pairs} of windows that others, a compilation or a restarted loader disturbed")
    for number, warning in enumerate(tried.warnings(result)):
        screen.say("warning" if number == 0 else "", (warning, "yellow"), most=0 if verbose else 2)
    most = None if verbose else 2
    if result.refused:
        screen.say("refused", f"{words.plural(len(result.refused), 'write')} of trials: {_some(result.refused, most)}")
    if result.written and verbose:
        screen.say("written", f"by trials, and thrown away: {_some(result.written, None)}")


def _some(names: Sequence[str], most: int | None) -> str:
    shown = names if most is None else names[:most]
    rest = f" and {len(names) - len(shown):,} more: --verbose" if len(shown) < len(names) else ""
    whole = most is None
    return ", ".join(f"`{name if whole or len(name) <= 50 else f'{name[:16]}…{name[-33:]}'}`" for name in shown) + rest


def _cost(screen: Screen, result: Result) -> None:
    parts: list[Part] = [answer.took(result)]
    if result.plan is not None and result.break_even_steps is None:
        parts.append(", which the gain never earns back")
    elif result.plan is not None and result.break_even_steps is not None:
        parts.append(f", earned back after {words.three(result.break_even_steps)} steps{_pays(result)}")
    screen.say("cost", *parts)


def _pays(result: Result) -> str:
    runs, steps = result.break_even_runs, result.steps_in_run
    if runs is None or steps is None:
        return ""
    pays = "it pays within this very run" if runs == 1 else f"it pays from the {words.ordinal(runs)} run on"
    return f". This run has {words.count(steps)}: {pays}"


def _places(screen: Screen, result: Result, page: Path | str | None) -> None:
    if result.plan_path:
        screen.command("plan", result.plan_path)
    elif result.plan is not None:
        screen.say("plan", label(result.plan.levers))
    if page is not None or result.run:
        screen.command("report", str(words.nearby(Path(page) if page is not None else Path(result.run) / PAGE)))
    screen.command("next", *answer.next_command(result))
