"""Under which levers does the user's run go, and why? The choice before a run in the foreground.

In: the script, what was asked for, and the plan file. Out: an `Engagement`: levers, and the line that says so; or an
error where a plan was named and does not fit. A plan found by default never stops a run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from flatout.errors import FlatoutError, MachineError, RecordError, UsageError, did_you_mean
from flatout.frameworks.lever import Lever, input_levers, unfit_on_ranks
from flatout.records import plan_file
from flatout.records.ceilings import Machine
from flatout.records.facts import NOT_LOOKED_AT, Facts
from flatout.records.plan import CLASSES, PLAN_FILE, Plan, allows, label
from flatout.records.trace import Levers, Setting

LEAVE_IT_OUT = "leave the lever out; `flatout levers SCRIPT` says what can be engaged here"

EACH_CLASS = "each class admits those before it: " + ", ".join(CLASSES)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What the user asked for: a plan file by name (None: the one found by default), or exactly these levers.

    With `recheck` a plan that does not fit here is tested first instead of refused.
    """

    plan: Path | None = None
    levers: Levers | None = None
    accept: str = "precision"
    recheck: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Engagement:
    """What to engage, the line that is said at the start, the plan behind it, and how here differs from its place."""

    levers: Levers = field(default_factory=dict)
    line: str = ""
    plan: Plan | None = None
    misfits: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Where the run takes place: script and arguments, the machine, versions, the levers there are.

    `python` is empty where it is not compared. The machine is asked for where there are levers to engage: with a GPU
    that takes its time, and a plain run shall start at once.
    """

    script: str
    arguments: tuple[str, ...]
    machine: Callable[[], Machine]
    framework_version: str
    registry: Mapping[str, Lever]
    python: str = ""


def engagement(wish: RunOptions, here: Environment) -> Engagement:
    """Choose what to engage.

    Raises:
        FlatoutError: Levers or a plan were named that cannot be engaged.
    """
    if wish.levers is not None:
        return _as_named(wish.levers, wish, here)
    path = wish.plan or Path(PLAN_FILE)
    if wish.plan is None and not path.exists():
        return Engagement(line=f"no plan for `{here.script}` here, running plainly; `flatout tune` makes one")
    try:
        plan = plan_file.read(path, plan_file.key_of(here.script, path))
    except FlatoutError as problem:
        if wish.plan is not None:
            raise
        return Engagement(line=f"{problem.error}: {problem.cause}; running plainly")
    try:
        _check_levers(plan, here, path)
        _check_class(plan, wish, here, path)
    except FlatoutError as problem:
        if wish.plan is not None:
            raise
        return Engagement(line=f"{problem.error}; running plainly")
    return _fitting(plan, path, wish, here)


def check_alone(option: str, beside: Mapping[str, bool], *, cause: str, hint: str) -> None:
    """Refuse an option beside the first of the others that was given.

    Raises:
        UsageError: One was.
    """
    if (named := next((other for other, given in beside.items() if given), None)) is not None:
        raise UsageError(f"`{option}` and `{named}` cannot be combined", cause=cause, hint=hint)


def for_one_process(chosen: Engagement, registry: Mapping[str, Lever]) -> Engagement:
    """The engagement without what a plan found for ranks."""
    return for_ranks(chosen, "", registry)


def for_ranks(chosen: Engagement, division: str, registry: Mapping[str, Lever], *, named: bool = False) -> Engagement:
    """The engagement on ranks that divide the work so, or on one where that is empty, without what has no place there.

    The lever that divides is gone from it: whoever starts the ranks knows. What the user has named stays.
    """
    own = {name: settings for name, settings in chosen.levers.items() if not registry[name].divides}
    dividing = next((one for one in registry.values() if one.divides), None)
    beside: Levers = {dividing.name: {dividing.parameter or "": division}} if dividing is not None and division else {}
    line, unfit = chosen.line, {} if named else unfit_on_ranks({**own, **beside}, registry)
    for reason in dict.fromkeys(unfit.values()):
        line += f"; without {', '.join(name for name in unfit if unfit[name] == reason)}: {reason}"
    return replace(chosen, levers={name: s for name, s in own.items() if name not in unfit}, line=line)


def _as_named(levers: Levers, wish: RunOptions, here: Environment) -> Engagement:
    if not levers:
        return Engagement(line="no levers, as you said: running plainly")
    for name in levers:
        wanted = here.registry[name].class_
        if not allows(wish.accept, wanted):
            raise UsageError(
                f"the lever `{name}` is of class {wanted}, `--accept {wish.accept}` does not admit it",
                cause=EACH_CLASS,
                hint=f"`--accept {wanted}`",
            )
    lacking = _lacking(levers, here)
    if lacking is not None:
        raise MachineError(
            f"the lever `{lacking[0]}` cannot be engaged on this machine", cause=lacking[1], hint=LEAVE_IT_OUT
        )
    chosen = [here.registry[name] for name in levers]
    unchecked = [lever for lever in chosen if lever.check != "none" and not lever.checks_itself]  # only `tune` does
    batches = next((lever.name for lever in unchecked if lever.check == "batches"), None)
    if batches is not None and wish.accept == "exact":
        raise UsageError(
            f"whether the lever `{batches}` is exact here was not checked",
            cause="items that draw random numbers may become others: `tune` compares batches, `--levers` does not",
            hint=f"`flatout tune --accept exact --levers {batches} {here.script}`, then run under its plan",
        )
    beside = "; numbers were not compared" if unchecked else ""
    trained = [lever.name for lever in chosen if lever.class_ == "semantics"]
    if trained:
        changes = f"{'change' if len(trained) > 1 else 'changes'} what is trained"
        beside = f"; {' and '.join(trained)} {changes}: only `flatout prove` judges that"
    return Engagement(levers=levers, line=f"levers {label(levers)}, as you said{beside}")


def _lacking(levers: Levers, here: Environment) -> tuple[str, str] | None:
    """The first lever that cannot be engaged on this machine whatever the script does, and why; None where all can."""
    reasons = ((name, here.registry[name].lacks(here.machine())) for name in levers)
    return next(((name, why) for name, why in reasons if why is not None), None)


def _fitting(plan: Plan, path: Path, wish: RunOptions, here: Environment) -> Engagement:
    misfits = plan_file.misfits(plan, here.machine(), here.framework_version, here.python)
    if misfits and not wish.recheck:
        if wish.plan is not None:
            raise RecordError(
                f"`{path}` was made elsewhere: {misfits[0]}",
                cause="a plan is only as good as the machine it was measured on"
                + (f"; also: {'; '.join(misfits[1:])}" if len(misfits) > 1 else ""),
                hint=f"`flatout tune {here.script}` here, or `--recheck` beside `--plan {path}` to test its levers",
            )
        where = f"the plan in `{path}` was made elsewhere ({', '.join(misfits)})"
        return Engagement(line=f"{where}, running plainly; `--recheck` tests it", misfits=misfits)
    lacking = None if misfits else _lacking(plan.levers, here)  # where there are misfits, trials are to tell
    if lacking is not None:  # it was edited by hand, or what the machine had is gone
        error = f"`{path}` names the lever `{lacking[0]}`, which cannot be engaged on this machine"
        if wish.plan is not None:
            raise RecordError(error, cause=lacking[1], hint=LEAVE_IT_OUT)
        return Engagement(line=f"{error}: {lacking[1]}; running plainly")
    num, ratio = len(plan.levers), f"{plan.ratio:.2g}" if plan.ratio < 100 else f"{plan.ratio:.0f}"
    other = "" if plan.arguments == here.arguments else ", made with other arguments"
    line = f"{num} lever{'s' * (num != 1)} from {path}, {ratio}x expected{other}"
    line = line if num else f"the plan in {path} is to change nothing"
    return Engagement(levers=plan.levers, line=line, plan=plan, misfits=misfits)


def _check_levers(plan: Plan, here: Environment, path: Path) -> None:
    unknown = [name for name in plan.levers if name not in here.registry]
    if unknown:
        raise RecordError(
            f"`{path}` names the lever `{unknown[0]}`, which this version does not have",
            cause="another version of flatout wrote the plan, or it was edited by hand",
            hint="`flatout levers` lists those there are; tune again, or upgrade",
        )
    try:
        for name, settings in plan.levers.items():
            check_settings(here.registry[name], settings)
        _check_conflicts(plan.levers, here.registry)
    except UsageError as problem:
        raise RecordError(
            f"`{path}`: {problem.error}", cause=problem.cause, hint=f"`flatout tune {here.script}`, or mend the plan"
        ) from None


def check_settings(lever: Lever, settings: Mapping[str, Setting]) -> None:
    """Make sure that a lever's settings are what it takes: its one parameter, a whole number or a word, or nothing.

    Raises:
        UsageError: One is missing, unknown, or not of those that it may be.
    """
    for name in settings:
        if name != lever.parameter:
            raise UsageError(
                f"the lever `{lever.name}` has no setting `{name}`",
                cause=f"it takes {f'`{lever.parameter}`' if lever.parameter else 'none'}",
                hint=f"e.g. `{_example(lever)}`",
            )
    if lever.parameter is None or (lever.optional and not settings):
        return
    value = settings.get(lever.parameter)
    if lever.pattern:
        wanted, what = re.fullmatch(lever.pattern, str(value)) is not None, "a word of its own kind"
    elif lever.choices:
        wanted, what = value in lever.choices, f"one of {', '.join(lever.choices)}"
    else:
        number = isinstance(value, int) and not isinstance(value, bool)
        wanted = number and lever.least <= value <= lever.most  # type: ignore[operator]
        what = f"a whole number from {lever.least} to {lever.most}"
    if not wanted:
        raise UsageError(
            f"the lever `{lever.name}` needs a {'word' if lever.choices or lever.pattern else 'number'}"
            + ("" if value is None else f", not `{value}`"),
            cause=f"its setting `{lever.parameter}` is {what}",
            hint=f"e.g. `{_example(lever)}`",
        )


def _example(lever: Lever) -> str:
    least = "2:replicate" if lever.divides else max(lever.least, 1)
    value = lever.choices[0] if lever.choices else least
    return lever.name if lever.parameter is None else f"{lever.name}={value}"


def _check_conflicts(levers: Levers, registry: Mapping[str, Lever]) -> None:
    pair = next(((one, other) for one in levers for other in levers if other in registry[one].conflicts), None)
    if pair is not None:
        raise UsageError(
            f"`{pair[0]}` and `{pair[1]}` cannot be combined",
            cause="each decides what the other needs",
            hint="name one of them",
        )


def _check_class(plan: Plan, wish: RunOptions, here: Environment, path: Path) -> None:
    """The file's own word is not enough: it may have been edited."""
    widest = max((plan.class_, *(here.registry[name].class_ for name in plan.levers)), key=CLASSES.index)
    if not allows(wish.accept, widest):
        raise RecordError(
            f"the plan in `{path}` has levers of class {widest}, `--accept {wish.accept}` does not admit them",
            cause=EACH_CLASS,
            hint=f"`--accept {widest}`, or tune again with `--accept {wish.accept}`",
        )


def of_input(
    words: tuple[str, ...], registry: Mapping[str, Lever], machine: Callable[[], Machine]
) -> tuple[list[str], list[str]]:
    """The levers that `input` stands for on this machine, and those that a lever named beside it rules out.

    Both are empty where `input` is not among the words; the machine is asked for only where it is.
    """
    if "input" not in words:
        return [], []
    beside = {word.partition("=")[0] for word in words}
    rivals = {other for name in beside & {*registry} for other in registry[name].conflicts}
    those = [name for name in input_levers(registry, together=machine()) if name not in beside]
    left_out = [name for name in those if name in rivals or beside.intersection(registry[name].conflicts)]
    return [name for name in those if name not in left_out], left_out


def parse_levers(words: tuple[str, ...], registry: Mapping[str, Lever], machine: Callable[[], Machine]) -> Levers:
    """Levers as typed: `bf16`, `threads=1`; `input` stands for those of the input that this machine can have.

    Raises:
        UsageError: No such lever, its number is missing or wrong, it is named twice, or two cannot be combined.
    """
    found: dict[str, dict[str, Setting]] = {}
    of_group, _ = of_input(words, registry, machine)
    spelled_out = [name for word in words for name in (of_group if word == "input" else [word])]
    for word in spelled_out:
        name, _, value = word.partition("=")
        if name not in registry:
            raise UsageError(
                f"no such lever: `{name}`",
                cause="levers are " + ", ".join((*registry, "input")),
                hint=did_you_mean(name, registry, "`flatout levers` says what each does"),
            )
        if name in found:
            raise UsageError(f"the lever `{name}` is named twice", cause=f"again in `{word}`", hint="name it once")
        lever = registry[name]
        settings: dict[str, Setting] = {}
        if "=" in word and lever.parameter is None:
            raise UsageError(f"the lever `{name}` takes no setting", cause=f"you wrote `{word}`", hint=f"`{name}`")
        if lever.parameter is not None and (value or ("=" in word and lever.optional)):
            settings[lever.parameter] = int(value) if re.fullmatch("[0-9]{1,9}", value) else value
        check_settings(lever, settings)
        found[name] = settings
    _check_conflicts(found, registry)
    return found


def idle(
    levers: Levers,
    facts: Facts | None,
    registry: Mapping[str, Lever],
    machine: Callable[[], Machine],
    missing: Mapping[str, str],
) -> tuple[dict[str, str], dict[str, str]]:
    """Why levers have nothing to work on in this script, and what some of them do nevertheless.

    `missing` has what was said of those that have shown no effect.
    """
    unseen = {name: why for name, why in missing.items() if name in levers}
    if facts is None:
        return unseen, {}
    reasons = {name: registry[name].applies(facts, machine()) for name in levers}
    found = {name: reason for name, reason in reasons.items() if reason not in (None, NOT_LOOKED_AT)}
    done = {name: registry[name].in_part(facts) for name in found}
    return unseen | found, {name: part for name, part in done.items() if part is not None}
