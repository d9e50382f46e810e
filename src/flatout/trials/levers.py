"""Which levers are there, and do they apply to a script? In: a script, or none. Out: a row for each lever."""

from __future__ import annotations

from flatout.frameworks import kind
from flatout.machine.read import read_machine
from flatout.report.levers import LeverRow
from flatout.run import folder
from flatout.run.script import Script, check_source
from flatout.trials.bench import opened
from flatout.trials.conduct import Conduct
from flatout.trials.terms import Goal, Show, Terms
from flatout.trials.tune import with_isolation


def describe_levers(script: Script | None = None, terms: Terms | None = None) -> list[LeverRow]:
    """Every lever; given a script, a few steps of it are run to see which levers apply."""
    facts = None
    if script is not None:
        check_source(script)
        goal = with_isolation(Goal(terms=terms or Terms()))
        with folder.claimed(folder.working_folder(), script.stem) as run_folder:
            conduct = Conduct(script, run_folder, read_machine(), goal, Show())
            with opened(conduct.bench):
                conduct.bench.start()
                facts = conduct.bench.facts
    here = read_machine()
    return [
        LeverRow(
            name=lever.name,
            class_=lever.class_,
            shortens=lever.shortens,
            summary=lever.summary,
            toggles=lever.toggles,
            known=facts is not None,
            refusal=lever.applies(facts, here) if facts is not None else None,
            parameter=lever.parameter,
            choices=lever.choices,
            optional=lever.optional,
        )
        for lever in kind().levers().values()
    ]
