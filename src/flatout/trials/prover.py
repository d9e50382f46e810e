"""How is a plan proved on whole runs, into a run folder? In: a script and what to prove. Out: a `Proof`."""

from __future__ import annotations

import platform
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from flatout import __version__
from flatout.errors import FlatoutError, UsageError
from flatout.frameworks import kind
from flatout.judge import result
from flatout.judge.metric import Metric
from flatout.judge.proof import Aim, Asked, Proof
from flatout.judge.proof_file import RUNS
from flatout.machine.read import read_machine
from flatout.records.ceilings import Machine
from flatout.records.plan import Plan
from flatout.run import choice, folder, isolation, sources
from flatout.run.choice import Engagement, Here, Wish
from flatout.run.launched import framework_version
from flatout.run.script import Script, check_source
from flatout.trials.proving import inputs
from flatout.trials.proving.conduct import Proving, Show, former
from flatout.trials.proving.whole_run import Setting


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
    _check(request)
    machine = read_machine()
    chosen = _chosen(script, request, machine)
    if request.isolate:
        isolation.require()
    asked = _asked(script, request, chosen, machine)
    place = folder.root(folder.working_folder())
    there = [] if request.fresh else [path.parent for path in place.glob(f"*/{RUNS}")]
    found, edited = former(there, asked)
    if edited:
        show.remark(f"earlier runs read other files than there are now, {inputs.named(edited)}: beginning anew")
    with folder.claimed(folder.working_folder(), script.stem, found) as run_folder:
        setting = Setting(
            script=script,
            levers=chosen.levers,
            registry=kind().levers(),
            metric=request.metric,
            run_folder=run_folder,
            isolate=request.isolate,
            seed_option=request.seed_option,
            machine=machine,
        )
        show.remark(chosen.line)
        proving = Proving(asked, setting, request.aim, machine, show)
        show.remark(proving.estimate(_usual_s(chosen.plan)))
        proving.typed = (_levers_typed(request), _rest_typed(request))
        return proving.run()


def _levers_typed(request: ProveRequest) -> str:
    words = [] if request.plan is None else ["--plan", str(request.plan)]
    if request.levers is not None:
        words += ["--levers", ",".join(request.levers) or "none"]
    words += [] if request.accept == ProveRequest().accept else ["--accept", request.accept]
    return shlex.join(words)


def _rest_typed(request: ProveRequest) -> str:
    metric = request.metric
    words = [] if metric.file is None else ["--metric-file", metric.file]
    name = metric.key if metric.file is not None else metric.pattern
    words += [] if name is None else ["--metric", name]
    words += [f"--seed-option={request.seed_option}"] if request.seed_option else []
    words += [] if request.aim.margin is None else ["--margin", f"{request.aim.margin}"]
    words += [] if request.aim.target is None else ["--target", f"{request.aim.target}"]
    words += [] if request.isolate else ["--allow-writes"]
    return shlex.join(words)


def _check(request: ProveRequest) -> None:
    if request.aim.num_seeds < 1:
        raise UsageError(
            f"`--seeds {request.aim.num_seeds}` leaves nothing to run",
            cause="a proof compares whole runs, seed by seed",
            hint="`--seeds 5`",
        )
    if request.seed_option and not request.seed_option.startswith("-"):
        raise UsageError(
            f"`--seed-option {request.seed_option}` is no option",
            cause="it is put behind the script's own arguments, with the number of the seed",
            hint="e.g. `--seed-option=--seed`",
        )


def _chosen(script: Script, request: ProveRequest, machine: Machine) -> Engagement:
    """The levers to prove.

    Raises:
        UsageError: There is no plan, and no levers were named.
    """
    levers = kind().levers()
    here = Here(
        script=script.name,
        arguments=script.arguments,
        machine=lambda: machine,
        framework_version=framework_version(kind().package),
        registry=levers,
        python=platform.python_version(),
    )
    wanted = choice.parse_levers(request.levers, levers, here.machine) if request.levers is not None else None
    found = choice.engagement(Wish(plan=request.plan, levers=wanted, accept=request.accept), here)
    if request.levers is None:
        found = choice.for_one_process(found, levers)
    if not found.levers and request.levers is None:
        raise UsageError(
            f"there is nothing to prove for `{script.name}`",
            cause=found.line.replace(", running plainly", "").partition(";")[0],
            hint=f"`flatout tune {script.typed}` makes a plan, `--levers NAMES` names levers",
        )
    return found


def _asked(script: Script, request: ProveRequest, chosen: Engagement, machine: Machine) -> Asked:
    return Asked(
        script=script.typed,
        source_hash=sources.hash_of(script),
        levers=chosen.levers,
        metric=request.metric,
        seed_option=request.seed_option,
        versions=(__version__, framework_version(kind().package), platform.python_version()),
        machine_key=machine.machine_key(),
    )


def _usual_s(plan: Plan | None) -> float | None:
    """Seconds that a plain run takes, as far as the measurement behind the plan knows how many steps it has."""
    if plan is None or not plan.run:
        return None
    try:
        found = result.load(Path(plan.run))
    except FlatoutError:
        return None
    if found.steps_in_run is None or not found.baseline_steps_per_s > 0:
        return None
    return (found.header.start_s or 0.0) + found.steps_in_run / found.baseline_steps_per_s
