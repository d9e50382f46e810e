"""The chain as verbs: what the command line does, for programs. No logic of its own.

    import flatout
    result = flatout.tune("train.py", ["--epochs", "3"])
    print(result.verdict, result.winner.ratio)

In: a script and options. Out: records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from flatout import plan_file, result
from flatout.ceilings import Ceilings
from flatout.errors import MachineError, UsageError
from flatout.plan import CLASSES, Lever
from flatout.result import Result
from flatout.run import calibrate, folder, isolation
from flatout.run.machine import read_machine
from flatout.run.script import Script, check_source
from flatout.search import Choice
from flatout.trials.bench import Terms, opened
from flatout.trials.conduct import Conduct, Goal, Show, registry_of


def tune(
    script: str | Script,
    arguments: Sequence[str] = (),
    *,
    goal: Goal | None = None,
    plan: Path | None = None,
    show: Show | None = None,
) -> Result:
    """Measure, diagnose, try, choose; write the plan where there is a winner.

    Args:
        script: Path of the script, or a `Script`.
        arguments: The script's own arguments.
        goal: Budget, accepted classes of levers, terms; the defaults of `flatout tune` without it.
        plan: Where the plan goes; `flatout.toml` in the working folder without it.
        show: Who is told of progress.

    Raises:
        FlatoutError: See `flatout.errors`.
    """
    return _conduct("tune", _script(script, arguments), goal or Goal(), show or Show(), plan)


def why(
    script: str | Script, arguments: Sequence[str] = (), *, goal: Goal | None = None, show: Show | None = None
) -> Result:
    """Measure and diagnose only."""
    return _conduct("why", _script(script, arguments), goal or Goal(), show or Show(), None)


def machine(*, refresh: bool = False) -> Ceilings:
    """This machine's measured ceilings."""
    return calibrate.ceilings(refresh=refresh)


def levers() -> dict[str, Lever]:
    """Every lever by name."""
    return registry_of("pytorch")


def report(run: str | None = None) -> Result:
    """The result of a run folder; the newest without a name."""
    return result.load(folder.find(Path.cwd(), run))


def _script(script: str | Script, arguments: Sequence[str]) -> Script:
    return script if isinstance(script, Script) else Script(path=script, arguments=tuple(arguments))


def _conduct(command: str, script: Script, goal: Goal, show: Show, plan: Path | None) -> Result:
    check_source(script)
    _check_goal(goal)
    goal = _with_isolation(goal)
    with folder.claimed(Path.cwd(), script.stem) as run_folder:
        conduct = Conduct(script, run_folder, read_machine(), goal, show)
        with opened(conduct.bench):
            show.stage("measuring this machine's ceilings", 0.0)
            conduct.ceilings = _ceilings(conduct)
            found = conduct.run("tune" if command == "tune" else "why")
        if found.plan is not None:
            place = plan or Path(plan_file.DEFAULT)
            plan_file.write(found.plan, place)
            found = result.with_plan_path(found, str(place))
        result.save(found, run_folder)
    return found


def _ceilings(conduct: Conduct) -> Ceilings | None:
    try:
        return calibrate.ceilings()
    except MachineError as problem:
        conduct.bench.warnings[f"no ceilings: {problem.error}"] = None
        return None


def _check_goal(goal: Goal) -> None:
    if goal.budget_s <= 0:
        raise UsageError(
            "a budget of `0` leaves no time to measure",
            cause="every judgement needs windows of the running script",
            hint="`--budget 1m`, or `flatout run` for a plan that is there already",
        )
    known = levers()
    for name in (*(goal.choice.only or ()), *goal.choice.without):
        if name not in known:
            raise unknown_lever(name)
    if goal.choice.accept not in CLASSES:
        raise UsageError(
            f"no such class: `{goal.choice.accept}`", cause="classes are " + ", ".join(CLASSES), hint="`flatout levers`"
        )


def unknown_lever(name: str) -> UsageError:
    """The error for a lever that is not there."""
    import difflib

    near = difflib.get_close_matches(name, levers(), n=1)
    return UsageError(
        f"no such lever: `{name}`",
        cause="levers are " + ", ".join(levers()),
        hint=f"did you mean `{near[0]}`?" if near else "`flatout levers` lists them",
    )


def _with_isolation(goal: Goal) -> Goal:
    if goal.terms.isolate:
        isolation.require()
    return goal


@contextmanager
def observe() -> Iterator[None]:
    """Record the training steps made inside the block, in this very process."""
    raise NotImplementedError
    yield


__all__ = ["Goal", "Show", "Terms", "Choice", "levers", "machine", "observe", "report", "tune", "unknown_lever", "why"]
