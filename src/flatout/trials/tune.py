"""How is a script measured into a run folder, and what is kept of it? In: a script and a goal. Out: a `Result`."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

from flatout.errors import FlatoutError, MachineError, UsageError, did_you_mean
from flatout.frameworks import kind
from flatout.frameworks.lever import input_levers, of_one_process, ranks_of
from flatout.judge import result
from flatout.judge.result import Result
from flatout.machine import calibrate
from flatout.machine.read import read_machine
from flatout.records import plan_file
from flatout.records.ceilings import Ceilings, Machine
from flatout.records.plan import CLASSES, PLAN_FILE, Plan, allows
from flatout.records.ranks import RankConfig as RankTerms
from flatout.records.trace import Levers
from flatout.run import folder, isolation, on_ranks
from flatout.run.script import Script, check_source
from flatout.trials.bench import opened
from flatout.trials.conclude import plan_to_change_nothing, result_of
from flatout.trials.conduct import STOPPED, Conduct
from flatout.trials.search.space import Choice, left_out
from flatout.trials.short_runs import Setting, forget_all
from flatout.trials.terms import Goal, Show, Terms
from flatout.trials.tune_launcher import LaunchedRanks

RANKS_BUDGET_S = 360.0
"""What is taken for ranks where nothing was asked for: each pair is two whole starts."""

LEAST_CEILINGS_S = 8.0
"""Starting a framework and measuring the least take so long; less is not begun with."""


def measured(
    command: Literal["tune", "why"],
    script: Script,
    goal: Goal,
    show: Show,
    plan: Path | None,
    *,
    write_plan: bool = True,
) -> Result:
    """Measure a script, and keep what was found: the plan, where there is one, and the result in a run folder.

    Raises:
        FlatoutError: See `flatout.errors`.
    """
    check_source(script)
    machine = read_machine()
    typed, goal = goal.choice, replace(goal, choice=_without_groups(goal.choice))
    _check_goal(goal, machine)
    place = plan or Path(PLAN_FILE)
    if command == "tune" and write_plan:
        plan_file.check_place(place)
    goal = with_isolation(goal)
    own = _planned(script, place)
    if goal.choice.num_ranks is not None:
        goal = _for_ranks(goal, own, machine, show)
    with folder.claimed(folder.working_folder(), script.stem) as run_folder, _discarded_if_stopped(run_folder):
        ranks, known = None, kind().levers()
        if goal.launcher:
            setting = Setting(script=script, registry=known, run_folder=run_folder, terms=goal.terms, machine=machine)
            ranks = LaunchedRanks(goal.launcher, setting, show)
            goal = ranks.begin(goal)
        conduct = Conduct(script, run_folder, machine, goal, show, command)
        with opened(conduct.bench), conduct.joules.meter:
            conduct.plain.measure_ceilings = lambda: _ceilings(conduct)
            conduct.own = own if goal.choice.num_ranks is not None else of_one_process(own, conduct.levers)
            conduct.run() if ranks is None else ranks.alone(conduct)
            found = result_of(conduct)
        found = replace(found if ranks is None else ranks.confirm(found), options=_options(typed, plan, goal.terms))
        chosen = found.plan
        if chosen is None and command == "tune" and conduct.stopped != STOPPED:
            chosen = _to_change_nothing(found, script, goal, is_there=bool(own))
        if chosen is None or not write_plan:
            return _saved(found, run_folder)
        chosen = replace(chosen, infers=goal.terms.infers, goal=found.goal)
        former = ranks_of(own, known)
        if former is not None and goal.choice.num_ranks is None and ranks_of(chosen.levers, known) is None:
            num = former[0]
            show.remark(f"the plan had {num} ranks: `flatout tune --ranks {num}` measures them anew")
        return _planned_and_saved(found, chosen, place, run_folder)


def _planned_and_saved(found: Result, chosen: Plan, place: Path, run_folder: Path) -> Result:
    try:
        plan_file.write(plan_file.seen_from(place, chosen), place)
    except FlatoutError:
        _saved(found, run_folder)
        raise
    return _saved(replace(found, plan_path=str(place)), run_folder)


def _to_change_nothing(found: Result, script: Script, goal: Goal, *, is_there: bool) -> Plan | None:
    """Where nothing won; None where a plan is there and may still be right, or no search was asked for."""
    searched = goal.exactly is None and goal.choice.only != () and not goal.launcher and goal.choice.num_ranks is None
    if not searched or (is_there and found.verdict != "no difference"):
        return None
    return plan_to_change_nothing(found, (script.name, script.arguments))


def _planned(script: Script, place: Path) -> Levers:
    """The levers of the plan that is there already; none where there is none."""
    with contextlib.suppress(FlatoutError):
        return plan_file.read(place, plan_file.key_of(script.name, place)).levers
    return {}


def _for_ranks(goal: Goal, own: Levers, machine: Machine, show: Show) -> Goal:
    """The goal of `--ranks`: levers of the plan that is there, ranks, and levers that only ranks have.

    Raises:
        UsageError: There are no such ranks, or no GPU for each of them.
    """
    num_ranks, choice = goal.choice.num_ranks or 0, goal.choice
    if num_ranks < 2:
        raise UsageError(
            f"`--ranks {num_ranks}` leaves nothing to compare",
            cause="one process is one rank",
            hint="e.g. `--ranks 2`, or without it `flatout tune` for levers",
        )
    if not allows(choice.accept, "rounding"):
        raise UsageError(
            f"`--accept {choice.accept}` admits no ranks",
            cause="sums over a batch are made in another order, which is of class rounding",
            hint="`--accept rounding`",
        )
    on_ranks.devices(RankTerms(num_ranks=num_ranks), lambda: machine, show.remark)
    isolation.require()  # of ranks above 0 without `--allow-writes` too: all would write to the same files
    beside = tuple(name for name, one in kind().levers().items() if one.divides or one.modes)
    only = dict.fromkeys((*(own if choice.only is None else choice.only), *beside))
    return replace(goal, choice=replace(choice, only=tuple(only)), budget_s=goal.budget_s or RANKS_BUDGET_S)


def _without_groups(choice: Choice) -> Choice:
    """The same with the levers that `input` stands for in its place."""

    def each(names: tuple[str, ...]) -> tuple[str, ...]:
        found = [one for name in names for one in (input_levers(kind().levers()) if name == "input" else [name])]
        return tuple(dict.fromkeys(found))

    return replace(choice, only=None if choice.only is None else each(choice.only), without=each(choice.without))


def _options(choice: Choice, plan: Path | None, terms: Terms | None = None) -> str:
    """What is to be typed again for the same search."""
    terms = terms or Terms()
    words = ["--infer"] if terms.infers else []
    words += ["--client", shlex.join(terms.client)] if terms.client else []
    words += ["--goal", terms.goal] if terms.goal else []
    words += [] if choice.accept == Choice().accept else ["--accept", choice.accept]
    if choice.only is not None:
        words += ["--levers", ",".join(choice.only) or "none"]
    if choice.num_ranks is not None:
        words += ["--ranks", str(choice.num_ranks)]
    if choice.without:
        words += ["--without", ",".join(choice.without)]
    if plan is not None:
        words += ["--plan", str(plan)]
    return shlex.join(words)


@contextlib.contextmanager
def _discarded_if_stopped(run_folder: Path) -> Iterator[None]:
    """Who stops a measurement before it came to a result gets no folder; a failure keeps what the script said."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if not (run_folder / result.FILE).exists():
            shutil.rmtree(run_folder, ignore_errors=True)
        raise
    finally:
        forget_all(run_folder)
        with contextlib.suppress(OSError):  # where a launcher's ranks failed nothing is in it
            run_folder.rmdir()


def _saved(found: Result, run_folder: Path) -> Result:
    """The result, written; a full disk now must not cost what was measured, so it is a warning."""
    try:
        result.save(found, run_folder)
    except MachineError as problem:
        return replace(found, warnings=(*found.warnings, f"{problem.error}: {problem.cause}"))
    return found


def _ceilings(conduct: Conduct) -> Ceilings | None:
    """Those of what the script computes on; a GPU is measured while the script holds none of its memory."""
    facts, left_s = conduct.bench.facts, conduct.budget.end_s - time.perf_counter()
    on_cpu = facts is None or facts.device == "cpu"

    def before() -> None:
        if left_s < LEAST_CEILINGS_S:
            raise MachineError("no time was left to measure them", cause="the budget", hint="`flatout machine`")
        if not on_cpu:
            conduct.bench.end()

    try:
        limit_s = min(left_s, calibrate.LIMIT_S if on_cpu else calibrate.DEVICE_LIMIT_S)
        device = "cpu" if on_cpu and conduct.machine.accelerators else "auto"
        return calibrate.ceilings(kind().package, device=device, limit_s=limit_s, before=before)
    except MachineError as problem:
        conduct.bench.warnings[f"no ceilings: {problem.error}"] = None
        return None


def _check_goal(goal: Goal, machine: Machine) -> None:
    """Refuse what leaves nothing to try, before minutes are spent on a foregone answer."""
    choice, known = goal.choice, kind().levers()
    if goal.budget_s is not None and goal.budget_s <= 0:
        raise UsageError(
            "a budget of `0` leaves no time to measure",
            cause="every judgement needs windows of the running script",
            hint="`--budget 1m`, or `flatout run` for a plan that is there already",
        )
    for name in (*(choice.only or ()), *choice.without):
        bare, _, setting = name.partition("=")
        if setting and bare in known:
            raise UsageError(
                f"a setting cannot be chosen here: `{name}`",
                cause=f"trials find the setting of `{bare}` themselves",
                hint=f"`{bare}` alone; `flatout run --levers {name}` engages exactly that",
            )
        if name not in known:
            raise UsageError(
                f"no such lever: `{name}`",
                cause="levers are " + ", ".join(known) + "; `none` stands alone",
                hint=did_you_mean(name, known, "`flatout levers` lists them"),
            )
    if choice.accept not in CLASSES:
        raise UsageError(
            f"no such class: `{choice.accept}`", cause="classes are " + ", ".join(CLASSES), hint="`flatout levers`"
        )
    reasons = {name: left_out(known[name], choice) or known[name].lacks(machine) for name in choice.only or ()}
    if choice.num_ranks is None and reasons and all(reasons.values()):
        raise UsageError(
            "no lever of `--levers` can be tried",
            cause="; ".join(f"`{name}`: {why}" for name, why in reasons.items()),
            hint="name other levers; `flatout levers SCRIPT` says what can be engaged here",
        )


def with_isolation(goal: Goal) -> Goal:
    """The goal, if trials can be kept off the user's disk here as it asks."""
    if goal.terms.isolate:
        isolation.require()
    return goal
