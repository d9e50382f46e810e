"""The chain as verbs: what the command line does, for programs. No logic of its own.

    import flatout
    result = flatout.tune("train.py", ["--epochs", "3"])
    print(result.verdict, result.winner.ratio if result.winner else "")

In: a script and options. Out: records.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flatout.errors import FlatoutError, UsageError
from flatout.frameworks import kind
from flatout.frameworks.contract import Settings
from flatout.frameworks.lever import Lever
from flatout.machine.read import read_machine
from flatout.records import plan_file
from flatout.records.plan import PLAN_FILE, allows, label
from flatout.records.ranks import RankConfig as RankTerms
from flatout.report.export import Exported, export
from flatout.report.run_folders import report
from flatout.run import choice, folder, foreground, launcher_command, on_ranks
from flatout.run.choice import Engagement, Environment, RunOptions
from flatout.run.outcome import Outcome
from flatout.run.script import Script, check, check_command

if TYPE_CHECKING:
    from flatout.judge.proof import Proof
    from flatout.judge.result import Result
    from flatout.records.ceilings import Ceilings
    from flatout.records.exported_models import ModelExport
    from flatout.records.trace import Levers
    from flatout.run.controller import Learner
    from flatout.trials.levers import describe_levers
    from flatout.trials.prove import ProveRequest
    from flatout.trials.search.space import Choice
    from flatout.trials.terms import Goal, Show, Terms

#: What only measuring needs is loaded when it is asked for: `run` starts a script, and the script is waiting.
_MEASURING = {
    "Choice": "flatout.trials.search.space",
    "Goal": "flatout.trials.terms",
    "ProveRequest": "flatout.trials.prove",
    "Show": "flatout.trials.terms",
    "Terms": "flatout.trials.terms",
    "describe_levers": "flatout.trials.levers",
}


def __getattr__(name: str) -> Any:
    if name in _MEASURING:
        return getattr(importlib.import_module(_MEASURING[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


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
    from flatout.trials import tune
    from flatout.trials.terms import Goal, Show

    return tune.measured("tune", _script(script, arguments), goal or Goal(), show or Show(), plan)


def why(
    script: str | Script, arguments: Sequence[str] = (), *, goal: Goal | None = None, show: Show | None = None
) -> Result:
    """Measure and diagnose only."""
    from flatout.trials import tune
    from flatout.trials.terms import Goal, Show

    return tune.measured("why", _script(script, arguments), goal or Goal(), show or Show(), None)


def prove(script: str | Script, arguments: Sequence[str] = (), *, request: Any = None, show: Any = None) -> Proof:
    """Whole runs over several seeds, plain and under the plan: is the trained model as good, and what time is saved?

    Args:
        script: Path of the script, or a `Script`.
        arguments: The script's own arguments.
        request: A `flatout.trials.prove.ProveRequest`; its defaults without it.
        show: Who is told of progress.

    Raises:
        FlatoutError: See `flatout.errors`.
    """
    from flatout.trials import prove
    from flatout.trials.terms import Show

    return prove.proved(_script(script, arguments), request or prove.ProveRequest(), show or Show())


def export_models(
    script: str | Script,
    arguments: Sequence[str] = (),
    *,
    to: str,
    folder: Path,
    terms: Terms | None = None,
    show: Show | None = None,
) -> ModelExport:
    """The models that a script calls as files of another runtime, each checked against the model itself.

    Args:
        script: Path of the script, or a `Script`.
        arguments: The script's own arguments.
        to: `onnx`, `openvino` or `torchscript`.
        folder: Where the files go; it must be new or empty.
        terms: How the script may be run; the defaults of `flatout export` without it.
        show: Who is told of progress.

    Raises:
        FlatoutError: See `flatout.errors`.
    """
    from flatout.trials import model_export
    from flatout.trials.terms import Show, Terms

    return model_export.exported(_script(script, arguments), to, folder, terms or Terms(), show or Show())


def machine(*, refresh: bool = False) -> Ceilings:
    """This machine's measured ceilings."""
    from flatout.machine import calibrate

    return calibrate.ceilings(kind().package, refresh=refresh)


def levers() -> dict[str, Lever]:
    """Every lever by name."""
    return kind().levers()


def _script(script: str | Script, arguments: Sequence[str]) -> Script:
    return script if isinstance(script, Script) else Script(path=script, arguments=tuple(arguments))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A run in the foreground.

    Attributes:
        script: The script; None under a launcher.
        launcher: The launcher's command; empty for a script.
        plan: The plan file that was named.
        levers: Exactly these levers, as typed; None for the plan's.
        accept: How far levers may go.
        fixed: Never toggle a lever.
        recheck: Test a plan that was made elsewhere before trusting it.
        terms: How the trials of a recheck may run; the defaults of `flatout tune` without it.
        store_memory_bytes: Memory for kept items; None: half of what is free.
        ranks: How the script is run on many ranks (one of them is one process); None: as the plan says.
        hang_timeout_s: After so many seconds without a rank the others end, where the plan says how many there are.
        learn: Whether the run tries levers on itself and goes on under what wins, in place of a plan.
        infers: Whether calls of models are its steps although it may train as well; a plan may say so, too.
    """

    script: Script | None = None
    launcher: tuple[str, ...] = ()
    plan: Path | None = None
    levers: tuple[str, ...] | None = None
    accept: str = "precision"
    fixed: bool = False
    recheck: bool = False
    terms: Terms | None = None
    store_memory_bytes: int | None = None
    learn: bool = False
    infers: bool = False
    ranks: RankTerms | None = None
    hang_timeout_s: float = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """What a run in the foreground came to.

    Attributes:
        inapplicable: Engaged levers that have nothing to work on in this script, and why.
        in_part: What some of them do nevertheless.
        fixed: Whether no lever was to be toggled.
        num_ranks: Ranks that it was run on.
        learning: Whether the run was to find its levers itself.
    """

    engagement: Engagement
    outcome: Outcome
    registry: dict[str, Lever]
    run: str
    inapplicable: dict[str, str] = field(default_factory=dict)
    in_part: dict[str, str] = field(default_factory=dict)
    fixed: bool = False
    learning: bool = False
    num_ranks: int = 1

    @property
    def useless(self) -> set[str]:
        """Levers that have shown their effect though they have nothing to bring here, such as bf16 in software."""
        return {name for name in self.inapplicable if name in self.outcome.evidence and name not in self.in_part}

    @property
    def is_idle(self) -> bool:
        """Whether levers were engaged, and none of them had anything to work on."""
        done = {*self.in_part, *self.useless}
        return bool(self.levers) and all(name in self.inapplicable and name not in done for name in self.levers)

    @property
    def levers(self) -> Levers:
        """The levers of the run: what it was started with, or what it has learned."""
        return self.engagement.levers if self.outcome.learned is None else self.outcome.learned.levers


def run(request: RunRequest, say: Callable[[str], None] = lambda line: None, show: Show | None = None) -> Ran:
    """Run a script under its plan, in the foreground; signals, output and exit status are the script's.

    Args:
        request: What to run, and under what.
        say: Is given each line that the user shall see.
        show: Who is told of the progress of a recheck.

    Raises:
        FlatoutError: Before the start; the script's own failure is in the outcome.
    """
    registry = levers()
    check_command(request.launcher) if request.script is None else check(request.script)
    here = _here(request, registry)
    if request.ranks is not None and request.ranks.num_ranks != 1:
        choice.check_alone(
            "--ranks", {"--learn": request.learn, "--recheck": request.recheck},
            cause="levers are tried in one process, where no other rank waits for it",
            hint="`flatout tune` first, then `flatout run --ranks`",
        )  # fmt: skip
    chosen, learner = _chosen(request, here, say)
    if chosen.misfits and request.recheck and request.script is not None:
        chosen = _recheck(choice.for_one_process(chosen, registry), request, say, show)
    terms = None  # a launcher starts its own ranks
    if request.script is not None:
        terms = on_ranks.decided(request.ranks, chosen, registry, request.plan, request.hang_timeout_s, say)
    request = dataclasses.replace(request, ranks=terms)
    devices = on_ranks.devices(request.ranks, here.machine, say) if request.ranks is not None else ()
    division = f"{request.ranks.num_ranks}:{request.ranks.mode}" if request.ranks is not None else ""
    chosen = choice.for_ranks(chosen, division, registry, named=request.levers is not None)
    with folder.for_run(request.script.stem if request.script else "exec") as (run_folder, problem):
        if run_folder is None:  # levers reach the script through files
            chosen = Engagement(line="running plainly")
        if request.ranks is not None:
            chosen = dataclasses.replace(chosen, line=chosen.line.replace("running plainly", "without levers"))
        say(chosen.line if problem is None else f"{chosen.line}; no record is kept: {problem.error}, {problem.cause}")
        keeping = [name for name in chosen.levers if registry[name].keeps_items]
        if request.store_memory_bytes is not None and not keeping:
            say("`--store-memory` has nothing to do here: no lever that keeps items is engaged")
        what = _foreground(request, chosen, here, run_folder)
        outcome = foreground.run(dataclasses.replace(what, learner=learner, devices=devices))
    place = str(run_folder or "") if problem is None else ""
    if request.learn:
        _learning().keep(outcome, here, place, say)
    missing = {name: why for name, why in outcome.missing.items() if name not in outcome.evidence}
    idle, in_part = choice.idle(chosen.levers, outcome.facts, registry, here.machine, missing)
    return Ran(
        engagement=chosen, outcome=outcome, registry=registry, run=place, inapplicable=idle, in_part=in_part,
        fixed=request.fixed, learning=request.learn, num_ranks=request.ranks.num_ranks if request.ranks else 1,
    )  # fmt: skip


def _foreground(
    request: RunRequest, chosen: Engagement, here: Environment, run_folder: Path | None
) -> foreground.Foreground:
    script = request.script
    widest = request.accept if chosen.plan is None else chosen.plan.class_
    return foreground.Foreground(
        command=tuple(script.command) if script else request.launcher,
        script=here.script,
        arguments=here.arguments,
        run_folder=run_folder,
        levers=chosen.levers,
        registry=here.registry,
        toggle=not request.fixed,
        cores_quota=here.machine().cores_quota if chosen.levers else None,
        settings=Settings(
            cache_folder=_compiled(chosen, request.plan or Path(PLAN_FILE)),
            store_memory_bytes=request.store_memory_bytes,
            admits_random=request.levers is not None or allows(widest, "statistical"),
            infers=request.infers or (chosen.plan is not None and chosen.plan.infers),
            goal=chosen.plan.goal if chosen.plan is not None else "throughput",
        ),
        launcher=bool(request.launcher),
        ranks=request.ranks,
        script_folder=script.folder if script else None,
    )


def _chosen(request: RunRequest, here: Environment, say: Callable[[str], None]) -> tuple[Engagement, Learner | None]:
    """Under what the run begins, and who tries levers on it where it is to find them itself."""
    if not request.learn:
        registry, words = here.registry, request.levers
        wanted = choice.parse_levers(words, registry, here.machine) if words is not None else None
        if left_out := choice.of_input(words or (), registry, here.machine)[1]:
            say(f"`input` without what the levers beside it rule out: {', '.join(left_out)}")
        wish = RunOptions(plan=request.plan, levers=wanted, accept=request.accept, recheck=request.recheck)
        return choice.engagement(wish, here), None
    learning = _learning()
    beside = {"--plan": request.plan is not None, "--levers": request.levers is not None}
    choice.check_alone(
        "--learn", {**beside, "--fixed": request.fixed, "--recheck": request.recheck},
        cause="a run that learns begins plainly and finds its levers itself",
        hint="leave out one of them; `flatout tune` tries levers before a run",
    )  # fmt: skip
    return Engagement(line=learning.LINE), learning.learner(here, request.accept)


def _learning() -> ModuleType:
    """Loaded where a run learns: what measures takes a while to load, and the script is waiting."""
    return importlib.import_module("flatout.trials.learn")


def _compiled(chosen: Engagement, path: Path) -> str | None:
    """The kernels that the trials compiled, where they are still there."""
    if chosen.plan is None or not chosen.plan.run:
        return None
    place = plan_file.folder_of(path) / chosen.plan.run / "compiled"
    return str(place.resolve()) if place.is_dir() else None


def _here(request: RunRequest, registry: dict[str, Lever]) -> Environment:
    script = request.script
    path = request.plan or Path(PLAN_FILE)
    if script is not None:
        name, arguments = script.name, script.arguments
    else:
        # The plan of a launched script is found by the first word that names a script with a plan.
        known = launcher_command.scripts_of(path, named=request.plan is not None)
        found = launcher_command.planned(request.launcher, known, path)
        name = found.name if found is not None else launcher_command.called(request.launcher)
        arguments = found.arguments if found is not None else ()
    version = launcher_command.framework_version(kind().package) if request.levers is None and path.exists() else ""
    return Environment(
        script=name,
        arguments=arguments,
        machine=functools.cache(read_machine),
        framework_version=version,
        registry=registry,
        python=platform.python_version(),
    )


def _recheck(chosen: Engagement, request: RunRequest, say: Callable[[str], None], show: Show | None) -> Engagement:
    """Measure the plan's own set of levers here, and engage it only where it wins here too."""
    from flatout.trials import tune
    from flatout.trials.search.space import Choice
    from flatout.trials.terms import Goal, Show, Terms

    assert request.script is not None
    say(f"testing {label(chosen.levers)} here first, a minute or two ({', '.join(chosen.misfits)})")
    goal = Goal(choice=Choice(accept=request.accept), terms=request.terms or Terms(), exactly=chosen.levers)
    try:
        found = tune.measured("tune", request.script, goal, show or Show(), None, write_plan=False)
    except UsageError:
        raise
    except FlatoutError as problem:  # the run does not depend on it
        return Engagement(line=f"the plan could not be tested here ({problem.error}), running plainly")
    if found.plan is None:
        return Engagement(line=f"the plan does not win here ({found.verdict}), running plainly")
    ratio = found.plan.ratio
    plan = plan_file.seen_from(request.plan or Path(PLAN_FILE), found.plan)
    return Engagement(levers=chosen.levers, plan=plan, line=f"the plan holds here: {ratio:.2g}x expected")


__all__ = [
    "Choice",
    "Exported",
    "Goal",
    "ProveRequest",
    "Ran",
    "RunRequest",
    "Show",
    "Terms",
    "describe_levers",
    "export",
    "levers",
    "machine",
    "prove",
    "report",
    "run",
    "tune",
    "why",
]
