"""What does a terminal show of a tuning for ranks? One process, each division beside it, and which one the plan has.

In: a `RankTuning`. Out: lines; nothing is computed here.
"""

from __future__ import annotations

from pathlib import Path

from flatout.judge.rank_tuning import RankTrial, RankTuning
from flatout.records.plan import label
from flatout.report import rank_words, words
from flatout.report.screen import Report, Screen

NAME = 22
"""Columns of what a division is called."""

HEAD = f"{'step':>8}  {'ratio':>5}  {'95 %':<12}  {'a rank':>7}  {'exchanges':>9}"

WIDE = len(HEAD) + NAME + 32
"""Columns from which on the costliest kind of exchange has room in the table."""

_MARKS = {"faster": ("✔", "green"), "no difference": ("·", "yellow"), "inconclusive": ("·", "yellow")}


def ranks(found: RankTuning, *, verbose: bool = False, page: Path | str | None = None) -> Report:
    """What `flatout tune --ranks` prints; `page` is where its page was written."""
    return Report(lambda screen: _compose(screen, found, verbose=verbose, page=page))


def _compose(screen: Screen, found: RankTuning, *, verbose: bool, page: Path | str | None) -> None:
    machine = found.machine
    gpus = [f"{words.plural(len(machine.accelerators), 'GPU')} ({one.name})" for one in machine.accelerators[:1]]
    device = gpus[0] if gpus else words.plural(machine.num_cores, "CPU core")
    framework = words.framework(found.framework, found.framework_version)
    screen.say("", (found.script, "bold"), f" · {framework} · {device}", indent=0)
    screen.blank()
    screen.say("baseline", (f"one process, {words.seconds(found.step_s)} a step", "bold"), rank_words.baseline(found))
    if found.levers:
        screen.say("under", rank_words.under(found))
    screen.blank()
    _table(screen, found, verbose=verbose)
    screen.blank()
    screen.say("result", *rank_words.verdict(found))
    for number, remark in enumerate((*([found.stopped] if found.stopped else []), *found.remarks)):
        screen.say("note" if number == 0 else "", (remark, "yellow"))
    screen.say(
        "cost", f"{words.duration(found.tuning_s)}, {words.plural(found.num_runs, 'run')} of the script's beginning"
    )
    if found.plan_path is not None:
        screen.command("plan", found.plan_path)
    if page is not None:
        screen.command("report", str(words.nearby(Path(page))))
    screen.command("next", *rank_words.next_command(found))


def _table(screen: Screen, found: RankTuning, *, verbose: bool) -> None:
    title = f"tried {words.plural(len(found.trials), 'division')}"
    wide = screen.width >= WIDE and any(rank_words.costliest(trial) for trial in found.trials)
    screen.row((f"{title:<{NAME + 6}}{HEAD}{'  most of them' * wide}", "bold"))
    won = found.winner
    for trial in found.trials:
        mark, style = _MARKS.get(trial.outcome, ("✖" if trial.ratio is None else "–", "dim"))
        head = ("▸ " if trial is won else "  ", "bold")
        name = screen.fit(_name(trial), NAME)
        most = f"  {rank_words.costliest(trial, 1)}" if wide else ""
        screen.row(head, (name, "bold" if trial is won else ""), " ", (mark, style), _numbers(trial), most)
        for line in _said(found, trial, verbose=verbose):
            screen.say("", (line, "dim"), indent=6)


def _name(trial: RankTrial) -> str:
    """A division, or below it the last lever that it has more."""
    last = list(trial.levers.items())[-1:]
    return f"  {label(dict(last))}" if last else f"{trial.num_ranks} ranks {trial.mode}"


def _numbers(trial: RankTrial) -> str:
    if trial.ratio is None:
        return f"  {trial.outcome}"
    ends = rank_words.ends(trial) or words.plural(trial.num_pairs, "pair")
    memory = words.memory(trial.peak_memory_bytes) if trial.peak_memory_bytes is not None else ""
    share = words.percent(trial.exchanges_share) if trial.exchanges_share is not None else ""
    numbers = f"{words.seconds(trial.step_s):>8}  {words.ratio(trial.ratio):>5}  {ends:<12}"
    return f"  {numbers}  {memory:>7}  {share:>9}"


def _said(found: RankTuning, trial: RankTrial, *, verbose: bool) -> list[str]:
    """Why it is so, and whether it trains the same."""
    if trial.outcome in ("refused", "failed"):
        return [": ".join(filter(None, (trial.reason, trial.cause))), *([f"hint: {trial.hint}"] if trial.hint else [])]
    lines = [trial.reason] if trial.reason and trial.reason != trial.agreement_detail else []
    if trial.class_ == "statistical":
        lines.append(trial.agreement_detail)
    elif trial.agreement:
        lines.append(f"{trial.agreement}: {trial.agreement_detail}")
    if verbose:
        kinds, memory = rank_words.costliest(trial), rank_words.within_step(found, trial)
        lines += [f"exchanges: {kinds}"] if kinds else []
        lines += [f"a rank holds {memory}"] if memory else []
        pairs = zip(trial.baseline_step_s, trial.candidate_step_s, strict=True)
        lines += [f"{words.seconds(one)} beside {words.seconds(other)}" for one, other in pairs]
        lines.append(f"took {words.duration(trial.took_s)}")
    return lines
