"""How are the steps of ranks taken apart? A short run that finds how long a step takes, and one that is looked at.

In: a script, how it is divided. Out: a `RankAnatomy` in a run folder.
"""

from __future__ import annotations

import datetime
import shlex
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace

from flatout.errors import Inconclusive, ScriptError, UsageError
from flatout.frameworks import kind
from flatout.judge import stats
from flatout.judge.anatomy import Anatomy, dissect
from flatout.judge.rank_steps import FILE, RankAnatomy
from flatout.machine.read import read_machine
from flatout.records import files
from flatout.records.ranks import RankConfig as RankTerms
from flatout.records.trace import Window
from flatout.run import folder, isolation, launcher_command, on_ranks
from flatout.run.script import Script, check_source
from flatout.trials.child_failures import launcher_failed
from flatout.trials.short_runs import Setting, ShortRun, Wanted, forget_all, take
from flatout.trials.terms import Goal, Show

LOOKED_AT_S = 10.0
"""Without a budget steps are looked at for about so long."""

FIRST_STEPS = 12
"""Of the short run."""

FEWEST_STEPS, MOST_STEPS = 60, 1020

COUNTED_SHARE = 0.31
"""Of the steps, the last ones are counted. Calls are computed both ways at the first, second, fourth ... call, which
takes longer: with 4 steps less than a power of two in all, none of those is among them, where a step calls once."""


def looked(script: Script, terms: RankTerms | None, goal: Goal, show: Show) -> RankAnatomy:
    """Take the steps of a script on ranks apart, and keep what was found in a run folder.

    Args:
        script: What is run.
        terms: How many ranks there are and how they divide the work; None for those that the goal's launcher starts.
        goal: The budget and how the script may be run.
        show: Who is told of progress.

    Raises:
        UsageError: There are no such ranks.
        ScriptError: It cannot be divided, or does not train.
        Inconclusive: It has too few steps.
    """
    check_source(script)
    if terms is not None and terms.num_ranks < 2:
        raise UsageError(
            f"`--ranks {terms.num_ranks}` has nobody to communicate with", cause="one process is one rank",
            hint="e.g. `--ranks 2`, or without it `flatout why` for one process",
        )  # fmt: skip
    machine = read_machine()
    if terms is None:
        ranks = Wanted(num_steps=1, mode=launcher_command.name_of(goal.launcher), launcher=goal.launcher)
    else:
        on_ranks.devices(terms, lambda: machine, show.remark)
        mode = "replicate" if terms.mode == "auto" else terms.mode
        ranks = Wanted(num_ranks=terms.num_ranks, mode=mode, num_steps=1)
    isolation.require()
    with folder.claimed(folder.working_folder(), script.stem) as run_folder:
        setting = Setting(
            script=script, registry=kind().levers(), run_folder=run_folder, terms=goal.terms, machine=machine
        )  # fmt: skip
        try:
            found = _looked_at(setting, ranks, goal.budget_s, show)
            files.write(found, run_folder / FILE)
        finally:
            forget_all(run_folder)
            shutil.rmtree(run_folder / "compiled", ignore_errors=True)
            if not folder.is_kept(run_folder):
                shutil.rmtree(run_folder, ignore_errors=True)
    return found


def _looked_at(setting: Setting, ranks: Wanted, budget_s: float | None, show: Show) -> RankAnatomy:
    begun_s = time.perf_counter()
    show.stage("how long a step takes", 0.1)
    first = _made(ranks, take(setting, replace(ranks, num_steps=FIRST_STEPS, takes_apart=True), 0, show.tick))
    step_s = stats.summarize(first.step_s).median if first.step_s else 1.0
    first.forget()
    left_s = LOOKED_AT_S if budget_s is None else max(budget_s - 2 * (time.perf_counter() - begun_s), LOOKED_AT_S / 2)
    show.stage("where each step goes", 0.4)
    num = num_steps(left_s / max(step_s, 1e-6))
    wanted = replace(ranks, num_steps=num, takes_apart=True, step_guess_s=2 * step_s)
    sample = _made(ranks, take(setting, wanted, 1, show.tick))
    show.stage("done", 1.0)
    exchanges, header = sample.exchanges, sample.header
    assert header is not None
    typed = f"-- {shlex.join(ranks.launcher)}" if ranks.launcher else setting.script.typed
    return RankAnatomy(
        script=setting.script.name, typed=typed, num_ranks=len(sample.windows),
        mode=ranks.mode, is_launched=bool(ranks.launcher),
        machine=setting.machine, framework=header.framework, framework_version=header.framework_version,
        ranks=tuple(_anatomy(windows) for windows in sample.windows),
        kinds=dict(exchanges.kinds) if exchanges is not None else {}, peak_memory_bytes=sample.peak_memory_bytes,
        num_left_out=int(sample.num_steps * (1 - COUNTED_SHARE)),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        run=str(setting.run_folder), took_s=time.perf_counter() - begun_s,
    )  # fmt: skip


def num_steps(about: float) -> int:
    """Four less than a power of two.

    >>> num_steps(3), num_steps(300), num_steps(1e9)
    (60, 252, 1020)
    """
    found = FEWEST_STEPS
    while (found + 4) * 2 - 4 <= min(about, MOST_STEPS):
        found = (found + 4) * 2 - 4
    return found


def _made(ranks: Wanted, sample: ShortRun) -> ShortRun:
    """The sample, where it has steps.

    Raises:
        ScriptError: It has none, for this reason.
        Inconclusive: Too few.
    """
    if sample.problem is not None and not sample.ended:
        raise sample.problem if not ranks.launcher else launcher_failed(ranks.launcher, sample.problem)
    if not sample.num_steps and sample.problem is not None:
        raise ScriptError("the script makes no steps", cause=sample.problem.cause, hint=sample.problem.hint)
    return sample


def _anatomy(windows: Sequence[Window]) -> Anatomy:
    """Of the last windows of one rank."""
    num = sum(w.num_steps for w in windows)
    counted: list[Window] = []
    seen = 0
    for window in reversed(windows):
        if counted and seen + window.num_steps > COUNTED_SHARE * num:
            break
        counted.append(window)
        seen += window.num_steps
    if not counted:
        raise Inconclusive(
            "no step was taken apart", cause="the script ended before", hint="give it more steps, e.g. more epochs"
        )
    return dissect(counted)
