"""How is a plan proved on whole runs, into a run folder? In: a script and what to prove. Out: a `Proof`."""

from __future__ import annotations

import platform
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from flatout import __version__
from flatout.errors import UsageError
from flatout.frameworks import kind
from flatout.judge.metric import Metric
from flatout.judge.proof import RUNS, Aim, Asked, Proof
from flatout.machine.read import read_machine
from flatout.records.ceilings import Machine
from flatout.run import choice, folder, isolation, sources
from flatout.run.choice import Engagement, Environment, RunOptions
from flatout.run.launcher_command import framework_version
from flatout.run.script import Script, check_source
from flatout.trials.proving import inputs
from flatout.trials.proving.loop import Proving, former
from flatout.trials.proving.whole_run import Setting
from flatout.trials.terms import Show


@dataclass(frozen=True, slots=True, kw_only=True)
class ProveRequest:
    """What is to be proved, and how.

    Attributes:
        plan: The plan file that was named.
        levers: Exactly these levers, as typed; None for the plan's.
        accept: How far levers may go.
        metric: Where the metric is found.
        aim: Seeds, margin, target.
        seed_option: The script's option for a seed; without it, what the script seeds with is replaced.
        isolate: Whether files of the user are kept from the runs.
        fresh: Whether former runs are left aside.
    """

    plan: Path | None = None
    levers: tuple[str, ...] | None = None
    accept: str = "precision"
    metric: Metric = field(default_factory=Metric)
    aim: Aim = field(default_factory=Aim)
    seed_option: str = ""
    isolate: bool = True
    fresh: bool = False


def proved(script: Script, request: ProveRequest, show: Show) -> Proof:
    """Run the script whole, several times, plain and under its plan, and judge.

    Raises:
        FlatoutError: See `flatout.errors`.
    """
    check_source(script)
    if request.aim.num_seeds < 1:
        raise UsageError(
            f"`--seeds {request.aim.num_seeds}` leaves nothing to run",
            cause="a proof compares whole runs, seed by seed",
            hint="`--seeds 5`",
        )
    machine = read_machine()
    here = _here(script, machine)
    chosen = _chosen(script, request, here)
    if request.isolate:
        isolation.require()
    asked = Asked(
        script=script.typed,
        source_hash=sources.hash_of(script),
        levers=chosen.levers,
        metric=request.metric,
        seed_option=request.seed_option,
        versions=(__version__, here.framework_version, here.python),
        machine_key=machine.machine_key(),
    )
    place = folder.root(folder.working_folder())
    there = [] if request.fresh else [path.parent for path in place.glob(f"*/{RUNS}")]
    found, edited = former(there, asked)
    if edited:
        show.remark(f"earlier runs read other files than there are now, {inputs.named(edited)}: beginning anew")
    with folder.claimed(folder.working_folder(), script.stem, found) as run_folder:
        setting = Setting(
            script=script,
            asked=asked,
            registry=here.registry,
            run_folder=run_folder,
            machine=machine,
            isolate=request.isolate,
        )
        show.remark(chosen.line)
        return Proving(setting, request.aim, _typed(request), show).run()


def _here(script: Script, machine: Machine) -> Environment:
    return Environment(
        script=script.name,
        arguments=script.arguments,
        machine=lambda: machine,
        framework_version=framework_version(kind().package),
        registry=kind().levers(),
        python=platform.python_version(),
    )


def _typed(request: ProveRequest) -> tuple[str, str]:
    """What names the levers, and what else is to be typed again."""
    named = [] if request.plan is None else ["--plan", str(request.plan)]
    if request.levers is not None:
        named += ["--levers", ",".join(request.levers) or "none"]
    named += [] if request.accept == ProveRequest().accept else ["--accept", request.accept]
    metric, aim = request.metric, request.aim
    name = metric.key if metric.file is not None else metric.pattern
    options = {"--metric-file": metric.file, "--metric": name, "--margin": aim.margin, "--target": aim.target}
    rest = [word for option, value in options.items() if value is not None for word in (option, str(value))]
    rest += [f"--seed-option={request.seed_option}"] if request.seed_option else []
    rest += [] if request.isolate else ["--allow-writes"]
    return shlex.join(named), shlex.join(rest)


def _chosen(script: Script, request: ProveRequest, here: Environment) -> Engagement:
    """The levers to prove.

    Raises:
        UsageError: There is no plan, and no levers were named.
    """
    named = request.levers is not None
    wanted = choice.parse_levers(request.levers, here.registry, here.machine) if request.levers is not None else None
    found = choice.engagement(RunOptions(plan=request.plan, levers=wanted, accept=request.accept), here)
    if not named:
        found = choice.for_one_process(found, here.registry)
    if not found.levers and not named:
        raise UsageError(
            f"there is nothing to prove for `{script.name}`",
            cause=found.line.replace(", running plainly", "").partition(";")[0],
            hint=f"`flatout tune {script.typed}` makes a plan, `--levers NAMES` names levers",
        )
    return found
