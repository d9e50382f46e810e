"""What does a terminal show? The result of `tune` and `why`, a machine, and the levers, on one screen each.

In: records. Out: a `Report`, which `flatout.report.screen.show` prints and `plain` turns into text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flatout import stats
from flatout.ceilings import Ceilings
from flatout.plan import CLASSES, Lever, label
from flatout.report import PAGE, tried, words
from flatout.report.screen import Part, Report, Screen
from flatout.report.trials_table import show_trials
from flatout.result import Result

BAR = 22
"""Columns of the longest bar."""

NAME = 14
"""Columns of a phase's name."""


def tune(result: Result, *, verbose: bool = False) -> Report:
    """What `flatout tune` found: where a step goes, what was tried, and the verdict."""

    def compose(screen: Screen) -> None:
        _measured(screen, result, verbose=verbose)
        screen.blank()
        show_trials(screen, result, verbose=verbose)
        screen.blank()
        _verdict(screen, result)
        _cautions(screen, result, verbose=verbose)
        _cost(screen, result)
        _places(screen, result)

    return Report(compose)


def why(result: Result, *, verbose: bool = False) -> Report:
    """What `flatout why` found: where a step goes, what holds it back, and how that is known."""

    def compose(screen: Screen) -> None:
        _measured(screen, result, verbose=verbose)
        _evidence(screen, result, verbose=verbose)
        screen.blank()
        _cautions(screen, result, verbose=verbose)
        _cost(screen, result)
        _places(screen, result)

    return Report(compose)


def machine(ceilings: Ceilings, *, now_unix_s: float | None = None) -> Report:
    """This machine and its measured ceilings.

    Args:
        ceilings: What was measured.
        now_unix_s: The present, for the age of the measurement; without it no age is shown.
    """

    def compose(screen: Screen) -> None:
        here = ceilings.machine
        screen.row((here.hostname, "bold"), f" · {here.cpu} · {here.operating_system}")
        screen.blank()
        quota = f", a quota of {words.three(here.cores_quota)}" if here.cores_quota else ""
        total = f" of {here.num_cores_total}" if here.num_cores_total != here.num_cores else ""
        screen.say(
            "cores", f"{here.num_cores}{total} usable ({words.plural(here.num_physical_cores, 'physical core')}{quota})"
        )
        screen.say("features", " ".join(here.cpu_features) or "none that decide the speed of matrix products")
        limit = f", limited to {words.memory(here.memory_limit_bytes)}" if here.memory_limit_bytes else ""
        shm = f" · /dev/shm {words.memory(here.shm_bytes)}" if here.shm_bytes is not None else ""
        screen.say("memory", f"{words.memory(here.memory_bytes)}{limit}{shm}")
        for accelerator in here.accelerators:
            screen.say("gpu", f"{accelerator.name}, {words.memory(accelerator.memory_bytes)}")
        screen.say("compiler", here.cxx_compiler or "none: `torch.compile` needs one on a CPU")
        screen.blank()
        _ceilings_table(screen, ceilings, now_unix_s)
        screen.command("next", "flatout why SCRIPT")

    return Report(compose)


def levers(rows: Sequence[Lever]) -> Report:
    """Every lever with its class, what it can shorten and what it does, from the safest class to the widest."""

    def compose(screen: Screen) -> None:
        name = max((len(lever.name) for lever in rows), default=0)
        for class_ in CLASSES:
            here = [lever for lever in rows if lever.class_ == class_]
            if not here:
                continue
            screen.blank()
            screen.row((class_, "bold"), f"  {_CLASS_WORDS[class_]}")
            for lever in here:
                screen.say(f"  {lever.name}", lever.summary, indent=name + 4)
        screen.blank()
        screen.say("classes", "each includes those above it; `--accept CLASS` says how far levers may go")
        screen.command("next", "flatout tune SCRIPT")

    return Report(compose)


_CLASS_WORDS = {
    "exact": "same batches, same random numbers, same bits",
    "rounding": "the order of float operations",
    "precision": "the width of floats",
    "statistical": "which random numbers are drawn; only with `--accept statistical`",
    "semantics": "batch size, learning rate, the model; only with `--accept semantics`",
}


# -- measured ------------------------------------------------------------------------------------------------------


def _measured(screen: Screen, result: Result, *, verbose: bool) -> None:
    _head(screen, result)
    screen.blank()
    _ceilings(screen, result)
    _baseline(screen, result)
    screen.blank()
    _anatomy(screen, result, verbose=verbose)
    binding, _, rest = result.diagnosis.sentence.partition(":")
    screen.say("binding", (binding or "not known", "bold"), f":{rest}" if rest else "")


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
    named = [found.get(name) for name in ("matmul_float32", "matmul_tf32", "matmul_bfloat16", "memory_copy")]
    parts = [f"{words.ceiling(c.name)} {words.limit(c.value, c.unit)}" for c in named if c is not None]
    created = words.unix_s(result.created)
    age = words.age(found.age_s(created)) if created is not None else ""
    screen.say("ceilings", " · ".join(parts) or "not measured", (f"  (measured {age})" if age else "", "dim"))


def _baseline(screen: Screen, result: Result) -> None:
    spread = result.baseline_spread_fraction
    windows = [s for s in result.baseline_window_step_s if words.known(s)]
    details = []
    if windows:
        step = words.seconds(stats.summarize(windows).median)
        details.append(f"{step} a step, median of {words.plural(len(windows), 'window')}")
    if result.foreign_fraction is not None:
        details.append(f"others used {words.percent(result.foreign_fraction)} of the CPU")
    screen.say(
        "baseline",
        (words.rate(result.baseline_steps_per_s), "bold"),
        f" ± {words.percent(spread)}" if words.known(spread) else "",
        (f"  ({'; '.join(details)})" if details else "", "dim"),
    )


def _anatomy(screen: Screen, result: Result, *, verbose: bool) -> None:
    anatomy, bounds = result.anatomy, result.diagnosis.bounds
    alone = {b.shortens[0]: b for b in reversed(bounds) if len(b.shortens) == 1 and b.shortens[0] in anatomy.phases_s}
    head = "where a step goes".ljust(2 + NAME + BAR + 9)
    screen.row((head, "bold"), ("if it were free, at most" if alone else "", "bold"))
    largest = max((anatomy.share(name) or 0.0 for name in anatomy.phases_s), default=0.0)
    for name in anatomy.phases_s:
        share = anatomy.share(name)
        bar = screen.bar((share or 0.0) / largest if largest > 0 else 0.0, BAR)
        own = words.seconds(anatomy.phases_s[name]) if verbose else ""
        bound = alone.get(name)
        end = own if bound is None else f"{words.times(bound.ratio):<5} {own or bound.how}"
        screen.row(f"  {screen.fit(name, NAME)}", (bar, "cyan"), f"{words.share(share):>6}   ", end)
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
    for number, place in enumerate(result.census.sync_places[:4] if result.census else ()):
        screen.say("reads at" if number == 0 else "", place)
    notes = [note for note in diagnosis.notes if not note.startswith("not observed: ")]  # stands above already
    for number, note in enumerate(notes):
        screen.say("notes" if number == 0 else "", note)
    if verbose:
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
    peak = result.ceilings.get("matmul_float32") if result.ceilings else None
    if diagnosis.model_flops_utilization is None or peak is None:
        return
    achieved = words.scaled(diagnosis.achieved_flops_per_s, "FLOP/s")
    screen.say(
        "arithmetic",
        (f"{words.percent(diagnosis.model_flops_utilization)} of the float32 ceiling", "bold"),
        f": {achieved} over the whole step, of {words.limit(peak.value, peak.unit)}",
    )


# -- the verdict ---------------------------------------------------------------------------------------------------


def _verdict(screen: Screen, result: Result) -> None:
    if result.stopped:
        screen.say("stopped", f"the search ended early: {result.stopped}")
    noise = result.noise_fraction
    equal = f"two equal runs differ by up to {words.percent(noise)} here" if noise is not None else ""
    if result.verdict == "faster":
        _faster(screen, result, equal)
    elif result.verdict == "no difference":
        screen.say("result", ("no difference", "bold"), f"{_best_words(result)}. {_limit_words(result)}")
    else:
        screen.say("result", ("inconclusive", "bold yellow"), _best_words(result), *_open_questions(result, equal))


def _faster(screen: Screen, result: Result, equal: str) -> None:
    won = result.winner
    gain = words.times(won.ratio if won else None)
    speeds = f"{words.rate(result.baseline_steps_per_s).removesuffix(' steps/s')} → "
    ends = words.interval(won.ratio_low, won.ratio_high) if won else ""
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
        return ": no candidate was measured"
    again = " when measured again" if found.remeasured else ""
    among = f"best of {words.plural(len(result.trials), 'candidate')}"
    return f": {among} {words.ratio(found.ratio)}x {words.interval(found.ratio_low, found.ratio_high)}{again}"


def _limit_words(result: Result) -> str:
    used = result.diagnosis.model_flops_utilization
    binding, _, rest = result.diagnosis.sentence.partition(": ")
    at = f", at {words.percent(used)} of this machine's float32 ceiling" if used is not None else ""
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
        number = words.plural(result.num_discarded, "window")
        screen.say("discarded", f"{number}: others used the CPU, or something was compiled")
    for number, warning in enumerate(result.warnings):
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
    parts: list[Part] = [words.duration(result.tuning_s)]
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


def _places(screen: Screen, result: Result) -> None:
    if result.plan_path:
        screen.command("plan", result.plan_path)
    elif result.plan is not None:
        screen.say("plan", label(result.plan.levers))
    if result.run:
        screen.command("report", str(_nearby(Path(result.run)) / PAGE))
    screen.command("next", *_next(result))


def _next(result: Result) -> tuple[str, ...]:
    if result.command == "why":
        return ("flatout tune", result.typed)
    if result.plan is not None:
        return ("flatout run", result.typed)
    return ("flatout why" if result.verdict == "no difference" else "flatout tune", result.typed)


def _nearby(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


# -- machine -------------------------------------------------------------------------------------------------------


def _ceilings_table(screen: Screen, ceilings: Ceilings, now_unix_s: float | None) -> None:
    age = words.age(ceilings.age_s(now_unix_s)) if now_unix_s is not None else ""
    framework = words.framework(ceilings.framework, ceilings.framework_version)
    threads = words.plural(ceilings.num_threads, "thread")
    took = words.duration(ceilings.measuring_s)
    screen.row(
        ("ceilings", "bold"),
        (f"   {framework} on {ceilings.device}, {threads}, measured {age + ' ' if age else ''}in {took}", "dim"),
    )
    name = max((len(words.ceiling(c.name)) for c in ceilings.values), default=0)
    for c in ceilings.values:
        spread = f"± {words.percent(c.spread_fraction)}"
        head = f"  {words.ceiling(c.name):<{name}}  {words.limit(c.value, c.unit):>12} {spread:<8} "
        screen.row(head, (c.source, "dim"))
    for remark in ceilings.remarks:
        screen.say("remark", (remark, "yellow"))
    if ceilings.foreign_cpu_fraction is not None:
        screen.say("others", f"used {words.percent(ceilings.foreign_cpu_fraction)} of the CPU meanwhile")
