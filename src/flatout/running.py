"""Under which levers does the user's run go, and why? The choice before a run in the foreground.

In: the script, what was asked for, and the plan file. Out: `Terms of engagement`: levers, and the line that says so;
or an error where a plan was named and does not fit. A plan found by default never stops a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flatout import plan_file
from flatout.ceilings import Machine
from flatout.errors import FlatoutError, RecordError, UsageError
from flatout.plan import Lever, Plan, allows, label
from flatout.trace import Levers, Setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What the user asked for.

    Attributes:
        plan: The plan file that was named, or None for the one found by default.
        levers: Exactly these levers, without a plan; None otherwise.
        accept: How far levers may go.
        recheck: Whether a plan that does not fit here is tested first instead of refused.
    """

    plan: Path | None = None
    levers: Levers | None = None
    accept: str = "precision"
    recheck: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Engagement:
    """What to engage.

    Attributes:
        levers: Empty for a plain run.
        line: What is said at the start.
        plan: The plan behind it, where there is one.
        misfits: How here differs from where the plan was made.
    """

    levers: Levers = field(default_factory=dict)
    line: str = ""
    plan: Plan | None = None
    misfits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """Where the run takes place: script and arguments, the machine, the framework's version, the levers there are."""

    script: str
    arguments: tuple[str, ...]
    machine: Machine
    framework_version: str
    registry: Mapping[str, Lever]


def engagement(wish: Wish, here: Here) -> Engagement:
    """Choose what to engage.

    Raises:
        FlatoutError: Levers or a plan were named that cannot be engaged.
    """
    if wish.levers is not None:
        return Engagement(levers=wish.levers, line=f"levers {label(wish.levers)}, as you said")
    path = wish.plan or Path(plan_file.DEFAULT)
    if wish.plan is None and not path.exists():
        return Engagement(line=f"no plan for `{here.script}` here, running plainly; `flatout tune` makes one")
    try:
        plan = plan_file.read(path, here.script)
        _check_levers(plan, here, path)
        _check_class(plan, wish, path)
    except FlatoutError as problem:
        if wish.plan is not None:
            raise
        return Engagement(line=f"{problem.error}; running plainly")
    return _fitting(plan, path, wish, here)


def _fitting(plan: Plan, path: Path, wish: Wish, here: Here) -> Engagement:
    misfits = plan_file.misfits(plan, here.machine, here.framework_version)
    if misfits and not wish.recheck:
        if wish.plan is not None:
            raise RecordError(
                f"`{path}` was made elsewhere: {misfits[0]}",
                cause="a plan is only as good as the machine it was measured on"
                + (f"; also: {'; '.join(misfits[1:])}" if len(misfits) > 1 else ""),
                hint=f"`flatout tune {here.script}` here, or `flatout run --recheck {here.script}` to test its levers",
            )
        return Engagement(
            line=f"the plan in `{path}` was made elsewhere ({misfits[0]}), running plainly; `--recheck` tests it",
            misfits=misfits,
        )
    num = len(plan.levers)
    other = "" if plan.arguments == here.arguments else ", made with other arguments"
    return Engagement(
        levers=plan.levers,
        line=f"{num} lever{'s' * (num != 1)} from {path}, {plan.ratio:.2g}x expected{other}",
        plan=plan,
        misfits=misfits,
    )


def _check_levers(plan: Plan, here: Here, path: Path) -> None:
    unknown = plan_file.unknown_levers(plan, here.registry)
    if unknown:
        raise RecordError(
            f"`{path}` names the lever `{unknown[0]}`, which this version does not have",
            cause="another version of flatout wrote the plan, or it was edited by hand",
            hint="`flatout levers` lists those there are; tune again, or upgrade",
        )
    for name, settings in plan.levers.items():
        check_settings(here.registry[name], settings)


def check_settings(lever: Lever, settings: Mapping[str, Setting]) -> None:
    """Make sure that a lever's settings are what it takes.

    Raises:
        UsageError: One is missing, unknown, or not a whole number.
    """
    known = {lever.parameter} if lever.parameter else set()
    for name in settings:
        if name not in known and name != "prefetch":
            raise UsageError(
                f"the lever `{lever.name}` has no setting `{name}`",
                cause=f"it takes {', '.join(known) or 'none'}",
                hint="tune again, or mend the plan",
            )
    if lever.parameter is None:
        return
    value = settings.get(lever.parameter)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 1024:
        raise UsageError(
            f"the lever `{lever.name}` needs a number" + ("" if value is None else f", not `{value}`"),
            cause=f"its setting `{lever.parameter}` is a whole number from 0 to 1024",
            hint=f"e.g. `{lever.name}=1`",
        )


def _check_class(plan: Plan, wish: Wish, path: Path) -> None:
    if not allows(wish.accept, plan.class_):
        raise RecordError(
            f"the plan in `{path}` has levers of class {plan.class_}, `--accept {wish.accept}` does not admit them",
            cause="each class admits those before it: exact, rounding, precision, statistical, semantics",
            hint=f"`--accept {plan.class_}`, or tune again with `--accept {wish.accept}`",
        )


def parse_levers(words: tuple[str, ...], registry: Mapping[str, Lever]) -> Levers:
    """Levers as typed: `bf16`, `threads=1`.

    Raises:
        UsageError: No such lever, or its number is missing or wrong.
    """
    found: dict[str, dict[str, Setting]] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in registry:
            raise UsageError(
                f"no such lever: `{name}`",
                cause="levers are " + ", ".join(registry),
                hint="`flatout levers` says what each does",
            )
        lever = registry[name]
        settings: dict[str, Setting] = {}
        if value and lever.parameter is None:
            raise UsageError(f"the lever `{name}` takes no number", cause=f"you wrote `{word}`", hint=f"`{name}`")
        if value and lever.parameter is not None:
            settings[lever.parameter] = int(value) if value.isdigit() else value
        check_settings(lever, settings)
        found[name] = settings
    clashes = [(a, b) for a in found for b in found if b in registry[a].conflicts]
    if clashes:
        raise UsageError(
            f"`{clashes[0][0]}` and `{clashes[0][1]}` cannot be combined",
            cause="both decide the same thing", hint="name one of them",
        )  # fmt: skip
    return found
