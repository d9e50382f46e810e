"""What does a terminal show of a tuning for ranks? One process, each division beside it, and which one the plan has.

In: a `RankTuning`. Out: lines; nothing is computed here.
"""

from __future__ import annotations

from flatout.plan import PLAN_FILE, label
from flatout.rank_tuning import RankTrial, RankTuning
from flatout.report import words
from flatout.report.screen import Report, Screen
from flatout.stats import MIN_PAIRS

NAME = 22
"""Columns of what a division is called."""

HEAD = f"{'step':>8}  {'ratio':>5}  {'95 %':<12}  {'a rank':>7}  {'exchanges':>9}"

_MARKS = {"faster": ("✔", "green"), "no difference": ("·", "yellow"), "inconclusive": ("·", "yellow")}


def ranks(found: RankTuning, *, verbose: bool = False) -> Report:
    """What `flatout tune --ranks` prints."""
    return Report(lambda screen: _compose(screen, found, verbose=verbose))


def _compose(screen: Screen, found: RankTuning, *, verbose: bool) -> None:
    machine = found.machine
    gpus = [f"{words.plural(len(machine.accelerators), 'GPU')} ({one.name})" for one in machine.accelerators[:1]]
    device = gpus[0] if gpus else words.plural(machine.num_cores, "CPU core")
    framework = words.framework(found.framework, found.framework_version)
    screen.say("", (found.script, "bold"), f" · {framework} · {device}", indent=0)
    screen.blank()
    screen.say("baseline", (f"one process, {words.seconds(found.step_s)} a step", "bold"), _scatter(found))
    if found.levers:
        screen.say(
            "under", f"{label(found.levers)}, the levers of the plan; on ranks without those of one process's cores"
        )
    screen.blank()
    _table(screen, found, verbose=verbose)
    screen.blank()
    screen.say("result", *_verdict(found))
    for number, remark in enumerate((*([found.stopped] if found.stopped else []), *found.remarks)):
        screen.say("note" if number == 0 else "", (remark, "yellow"))
    screen.say(
        "cost", f"{words.duration(found.tuning_s)}, {words.plural(found.num_runs, 'run')} of the script's beginning"
    )
    if found.plan_path is not None:
        screen.command("plan", found.plan_path)
    screen.command("next", *_next(found))


def _scatter(found: RankTuning) -> str:
    """How sure the baseline is, and what it takes."""
    spread = f" ± {words.percent(found.spread_fraction)}" if words.known(found.spread_fraction) else ""
    memory = f"; memory {words.memory(found.peak_memory_bytes)}" if found.peak_memory_bytes is not None else ""
    return f"{spread}  (runs of {words.plural(found.num_steps, 'step')}{memory})"


def _table(screen: Screen, found: RankTuning, *, verbose: bool) -> None:
    title = f"tried {words.plural(len(found.trials), 'division')}"
    screen.row((f"{title:<{NAME + 6}}{HEAD}", "bold"))
    won = found.winner
    for trial in found.trials:
        mark, style = _MARKS.get(trial.outcome, ("✖" if trial.ratio is None else "–", "dim"))
        head = ("▸ " if trial is won else "  ", "bold")
        name = screen.fit(_name(trial), NAME)
        screen.row(head, (name, "bold" if trial is won else ""), " ", (mark, style), _numbers(trial))
        for line in _said(trial, verbose=verbose):
            screen.say("", (line, "dim"), indent=6)


def _name(trial: RankTrial) -> str:
    """A division, or below it the last lever that it has more."""
    last = list(trial.levers.items())[-1:]
    return f"  {label(dict(last))}" if last else f"{trial.num_ranks} ranks {trial.mode}"


def _numbers(trial: RankTrial) -> str:
    if trial.ratio is None:
        return f"  {trial.outcome}"
    ends = words.interval(trial.ratio_low, trial.ratio_high) if trial.num_pairs >= MIN_PAIRS else ""
    ends = ends or words.plural(trial.num_pairs, "pair")
    memory = words.memory(trial.peak_memory_bytes) if trial.peak_memory_bytes is not None else ""
    share = words.percent(trial.exchanges_share) if trial.exchanges_share is not None else ""
    numbers = f"{words.seconds(trial.step_s):>8}  {words.ratio(trial.ratio):>5}  {ends:<12}"
    return f"  {numbers}  {memory:>7}  {share:>9}"


def _said(trial: RankTrial, *, verbose: bool) -> list[str]:
    """Why it is so, and whether it trains the same."""
    if trial.outcome in ("refused", "failed"):
        return [": ".join(filter(None, (trial.reason, trial.cause))), *([f"hint: {trial.hint}"] if trial.hint else [])]
    lines = [trial.reason] if trial.reason and trial.reason != trial.agreement_detail else []
    if trial.class_ == "statistical":
        lines.append(trial.agreement_detail)
    elif trial.agreement:
        lines.append(f"{trial.agreement}: {trial.agreement_detail}")
    if verbose:
        pairs = zip(trial.baseline_step_s, trial.candidate_step_s, strict=True)
        lines += [f"{words.seconds(one)} beside {words.seconds(other)}" for one, other in pairs]
        lines.append(f"took {words.duration(trial.took_s)}")
    return lines


def _verdict(found: RankTuning) -> tuple[str | tuple[str, str], ...]:
    won = found.winner
    if won is not None:
        ends = words.interval(won.ratio_low, won.ratio_high)
        speeds = f": {words.seconds(found.step_s)} → {words.seconds(won.step_s)} a step  {ends}"
        return (f"{words.times(won.ratio)} faster", "bold green"), f" on {won.label}{speeds}"
    timed = [t for t in found.trials if t.ratio is not None and not t.levers]
    best = max(timed, key=lambda t: t.ratio or 0.0, default=None)
    if best is None:
        is_open = found.verdict == "inconclusive"
        why = "no division could be compared with it" if is_open else "no division trains what it trains, as said above"
        return ("one process", "bold"), f": {why}"
    beside = (
        f": {words.seconds(found.step_s)} a step, and {words.seconds(best.step_s)} on {best.label}, the best of them: "
        f"{words.ratio(best.ratio)}x {words.interval(best.ratio_low, best.ratio_high)}"
    ).rstrip()
    if found.verdict == "one rank is faster":
        return ("one rank is faster", "bold"), beside
    if found.verdict == "no difference":
        return ("no difference", "bold"), f"{beside}. One process is simpler"
    return ("inconclusive", "bold yellow"), f"{beside}; {best.reason or 'not all could be told apart'}"


def _next(found: RankTuning) -> tuple[str, str]:
    """What to type next."""
    if found.winner is not None:
        named = found.plan_path is not None and found.plan_path != PLAN_FILE
        return f"flatout run --plan {found.plan_path}" if named else "flatout run", found.typed
    if found.verdict == "inconclusive":
        return f"flatout tune --ranks {found.num_ranks} --budget {max(2 * found.tuning_s, 60):.0f}s", found.typed
    return ("flatout run" if found.levers else "flatout tune"), found.typed
