"""How is a script tuned for ranks into a run folder, and what becomes of its plan? In: a script. Out: a `RankTuning`.

The levers of a plan that is there stay, and all runs are timed under them: `flatout tune` first finds levers for one
process, `flatout tune --ranks` then says whether ranks bring something beyond.
"""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from pathlib import Path

from flatout import __version__
from flatout.errors import FlatoutError, UsageError
from flatout.frameworks import kind
from flatout.judge import rank_tuning
from flatout.judge.rank_tuning import RankTuning
from flatout.machine.installed import version_of
from flatout.machine.read import read_machine
from flatout.records import plan_file
from flatout.records.ceilings import Machine
from flatout.records.plan import CLASSES, PLAN_FILE, PLAN_FORMAT, Plan, allows
from flatout.records.ranks import Terms as RankTerms
from flatout.records.ranks_of_plan import PlanRanks
from flatout.records.trace import Levers
from flatout.run import choice, folder, isolation, on_ranks
from flatout.run.choice import Engagement, Here, Wish
from flatout.run.script import Script, check_source
from flatout.trials.conduct import Goal, Show
from flatout.trials.rank_conduct import RankConduct
from flatout.trials.samples_of_runs import Setting, cleared


def tuned(script: Script, num_ranks: int, goal: Goal, plan: Path | None, show: Show) -> RankTuning:
    """Measure divisions of a script beside one process, and put the best into its plan.

    Raises:
        UsageError: There are no such ranks, or an option says something about levers.
        FlatoutError: See `flatout.errors`.
    """
    check_source(script)
    _check(num_ranks, goal)
    place = plan or Path(PLAN_FILE)
    plan_file.check_place(place)
    machine = read_machine()
    on_ranks.devices(RankTerms(num_ranks=num_ranks), lambda: machine, show.remark)
    isolation.require()  # of ranks above 0 without `--allow-writes` too: all would write to the same files
    levers = kind().levers()
    chosen, remarks = _engaged(script, place, machine, goal)
    with folder.claimed(folder.working_folder(), script.stem) as run_folder, cleared(run_folder):
        setting = Setting(script=script, registry=levers, run_folder=run_folder, terms=goal.terms, machine=machine)
        conduct = RankConduct(
            setting, chosen, num_ranks, budget_s=goal.budget_s, accept=goal.choice.accept, show=show
        )  # fmt: skip
        found = conduct.run()
        found = replace(found, remarks=(*remarks, *found.remarks))
        found = _with_plan(found, script, chosen.plan, place)
        rank_tuning.save(found, run_folder)
    return found


def _check(num_ranks: int, goal: Goal) -> None:
    if num_ranks < 2:
        raise UsageError(
            f"`--ranks {num_ranks}` leaves nothing to compare", cause="one process is one rank",
            hint="e.g. `--ranks 2`, or without it `flatout tune` for levers",
        )  # fmt: skip
    if goal.choice.only is not None or goal.choice.without:
        option = "--levers" if goal.choice.only is not None else "--without"
        raise UsageError(
            f"`--ranks` and `{option}` cannot be combined",
            cause="levers are searched in one process; on ranks those of the plan are engaged",
            hint="`flatout tune` first, then `flatout tune --ranks`",
        )
    if not allows(goal.choice.accept, "rounding"):
        raise UsageError(
            f"`--accept {goal.choice.accept}` admits no ranks",
            cause="sums over a batch are made in another order, which is of class rounding",
            hint="`--accept rounding`",
        )


def _engaged(script: Script, place: Path, machine: Machine, goal: Goal) -> tuple[Engagement, tuple[str, ...]]:
    """The plan that is there, as `run` would engage it; and what is to be said where it does not fit."""
    here = Here(
        script=script.name, arguments=script.arguments, machine=lambda: machine,
        framework_version=version_of(kind().package, script.python), registry=kind().levers(),
        python=platform.python_version(),
    )  # fmt: skip
    if not place.exists() or not place.stat().st_size:
        return Engagement(), ()
    try:
        found = choice.engagement(Wish(plan=place, accept=goal.choice.accept), here)
    except FlatoutError as problem:
        has_one = plan_file.key_of(script.name, place) in plan_file.scripts(place)
        return Engagement(), (f"without the levers of the plan: {problem.error}",) if has_one else ()
    return choice.for_one_process(found, here.registry), ()


def _with_plan(found: RankTuning, script: Script, former: Plan | None, place: Path) -> RankTuning:
    """Put the winner's ranks into the plan, or take them out of it where one process is to stay."""
    won = found.winner
    if won is None:
        if former is not None and former.ranks is not None and found.verdict in ("one rank is faster", "not divided"):
            plan_file.write(replace(former, ranks=None, levers=_of_one(former.levers)), place)
            return replace(found, plan_path=str(place))
        return found
    assert won.ratio is not None and won.ratio_low is not None and won.ratio_high is not None
    ranks = PlanRanks(
        num=won.num_ranks, mode=won.mode, ratio=won.ratio, ratio_low=won.ratio_low, ratio_high=won.ratio_high,
        num_pairs=won.num_pairs, agreement=f"{won.class_}: {won.agreement_detail}", created=found.created,
        run=os.path.relpath(found.run, plan_file.folder_of(place)),
    )  # fmt: skip
    base = former or plan_file.seen_from(place, _of_one_process(found, script))
    chosen = {**_of_one(base.levers), **won.levers}
    plan = replace(base, ranks=ranks, levers=chosen, class_=max(base.class_, won.class_, key=CLASSES.index))
    plan_file.write(plan, place)
    return replace(found, plan=plan, plan_path=str(place))


def _of_one(levers: Levers) -> Levers:
    """Without levers of communication, which belong to the ranks of the plan."""
    known = kind().levers()
    return {name: settings for name, settings in levers.items() if name not in known or not known[name].modes}


def _of_one_process(found: RankTuning, script: Script) -> Plan:
    """A plan that engages nothing: what ranks are put into where levers were not tuned."""
    steps_per_s = 1 / found.step_s
    return Plan(
        format=PLAN_FORMAT, flatout=__version__, script=script.name, arguments=script.arguments, levers={},
        ratio=1.0, ratio_low=1.0, ratio_high=1.0, num_pairs=0, agreement="", class_="rounding",
        baseline_steps_per_s=steps_per_s, tuned_steps_per_s=steps_per_s, machine=found.machine,
        python=platform.python_version(), framework=found.framework, framework_version=found.framework_version,
        created=found.created, run="",
    )  # fmt: skip
