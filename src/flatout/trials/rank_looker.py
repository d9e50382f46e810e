"""How are the steps of ranks taken apart into a run folder? In: a script and a goal. Out: a `RankAnatomy`."""

from __future__ import annotations

from flatout.errors import UsageError
from flatout.frameworks import kind
from flatout.judge import rank_steps
from flatout.judge.rank_steps import RankAnatomy
from flatout.machine.read import read_machine
from flatout.records.ranks import Terms as RankTerms
from flatout.run import folder, isolation, launched, on_ranks
from flatout.run.script import Script, check_source
from flatout.trials.rank_looks import looked_at
from flatout.trials.samples_of_runs import Setting, Wanted, cleared
from flatout.trials.terms import Goal, Show


def looked(script: Script, terms: RankTerms, goal: Goal, show: Show) -> RankAnatomy:
    """Take the steps of a script on ranks apart.

    Raises:
        UsageError: There are no such ranks.
        FlatoutError: See `flatout.errors`.
    """
    check_source(script)
    if terms.num_ranks < 2:
        raise UsageError(
            f"`--ranks {terms.num_ranks}` has nobody to communicate with", cause="one process is one rank",
            hint="e.g. `--ranks 2`, or without it `flatout why` for one process",
        )  # fmt: skip
    machine = read_machine()
    on_ranks.devices(terms, lambda: machine, show.remark)
    isolation.require()
    with folder.claimed(folder.working_folder(), script.stem) as run_folder, cleared(run_folder):
        setting = Setting(
            script=script, registry=kind().levers(), run_folder=run_folder, terms=goal.terms, machine=machine
        )  # fmt: skip
        mode = "replicate" if terms.mode == "auto" else terms.mode
        ranks = Wanted(num_ranks=terms.num_ranks, mode=mode, num_steps=1)
        found = looked_at(setting, ranks, goal.budget_s, show)
        rank_steps.save(found, run_folder)
    return found


def looked_at_launched(script: Script, goal: Goal, show: Show) -> RankAnatomy:
    """Take the steps of the ranks apart that a launcher starts.

    Raises:
        FlatoutError: See `flatout.errors`.
    """
    check_source(script)
    isolation.require()
    with folder.claimed(folder.working_folder(), script.stem) as run_folder, cleared(run_folder):
        setting = Setting(
            script=script, registry=kind().levers(), run_folder=run_folder, terms=goal.terms, machine=read_machine()
        )  # fmt: skip
        ranks = Wanted(num_steps=1, mode=launched.name_of(goal.launcher), launcher=goal.launcher)
        found = looked_at(setting, ranks, goal.budget_s, show)
        rank_steps.save(found, run_folder)
    return found
