"""What must a lever implement? The contract, and what its description says of a set of levers.

A lever is one change to how a script runs: one file of a framework's package and one line in its registry. In: facts
and machines, then a session of the framework. Out: whether it applies, and its effect.

This module is imported in the user's process: it needs the standard library only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, get_args

from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.plan import CLASSES, LeverClass
from flatout.records.ranks import SHARDED_MODES, division
from flatout.records.trace import PHASES, Levers, Setting

#: When a lever can be engaged or released: between two steps, when a pass begins, or only in a new process.
Toggles = Literal["step", "epoch", "process"]

#: How the numerics of a lever are judged.
Check = Literal["gradients", "updates", "batches", "answers", "none"]

#: Words that mean something else where a lever's name could stand.
RESERVED = ("free_data", "input", "none", "plain")

#: Why levers of class semantics are never tried, only proved.
ONLY_PROVED = "changes what is trained: only `prove` judges it"


class Lever(ABC):
    """One change to how a script runs.

    A lever is one file with one subclass and one line in the registry. The description (`name` to `settings`) is
    read by the parent without a framework; `engage`, `release` and `evidence` run in the script's process, at a step
    boundary, with a framework session (for PyTorch `flatout.frameworks.pytorch.session.Session`).
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    class_: ClassVar[LeverClass]
    shortens: ClassVar[tuple[str, ...]]
    """The phases that it can make shorter."""
    toggles: ClassVar[Toggles] = "step"
    check: ClassVar[Check]
    checks_itself: ClassVar[bool] = False
    """Whether nothing has to be compared beforehand: it gives the script's own batches, or holds those that it makes
    against the script's own as long as the script runs."""
    moves_state: ClassVar[bool] = False
    """Whether parameters or an optimizer's state lie or are computed otherwise, so that updates are compared too."""
    deals_out_cores: ClassVar[bool] = False
    """Whether it deals out the cores of a machine to one process: each of several ranks would take them all."""
    needs_whole_parameters: ClassVar[bool] = False
    """Whether it computes with parameters, gradients or an optimizer's state as one process holds them, or keeps the
    memory that sharding lets go of."""
    divides: ClassVar[bool] = False
    """Whether it divides the training over ranks, as its setting says (`flatout.records.ranks.division`): then the
    script is started on them, and it is tried where somebody says on how many."""
    modes: ClassVar[tuple[str, ...]] = ()
    """The modes of ranks in which alone it has something to do; empty where it does not depend on ranks."""
    keeps_items: ClassVar[bool] = False
    """Whether `--store-memory` says how much it may keep."""
    compiles: ClassVar[bool] = False
    """Whether engaging it for the first time takes seconds to minutes."""
    compiles_faster: ClassVar[float] = 1.0
    """How many times as fast as a compiler of kernels it is with that."""
    warm_up_steps: ClassVar[int] = 0
    """So many steps a trial takes under it before it measures: it has to see inputs first."""
    proves_once: ClassVar[bool] = False
    """Whether its evidence takes time of the script's and holds for as long as it is engaged: it is looked for once."""
    takes_memory: ClassVar[bool] = False
    """Whether it holds batches, items or workspace that plain does not: who runs out of memory is told of it."""
    parameter: ClassVar[str | None] = None
    """The one setting that must be given, e.g. `num`; None where the lever has none."""
    least: ClassVar[int] = 0
    """The smallest value that it may have, where it is a number."""
    most: ClassVar[int] = 1024
    """The largest; more threads or workers than any machine has cores."""
    choices: ClassVar[tuple[str, ...]] = ()
    """The words that it may be; empty where it is a number."""
    pattern: ClassVar[str] = ""
    """What a word that it may be looks like, a regular expression; empty where `choices` or numbers say it."""
    optional: ClassVar[bool] = False
    """Whether it may be left out; then the lever does what its name alone says."""
    only_by_name: ClassVar[str] = ""
    """Why it is neither tried nor part of a plan unless somebody names it, in a few words; empty where it may be."""
    conflicts: ClassVar[tuple[str, ...]] = ()
    """Names of levers that it cannot be combined with."""
    partners: ClassVar[tuple[str, ...]] = ()
    """Names of levers with which it may gain what neither gains alone: they are tried together early."""
    contains: ClassVar[tuple[str, ...]] = ()
    """Names of levers that it does the work of as well, among those that it cannot be combined with."""

    @abstractmethod
    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """None where the lever can be tried here, else why not, in a few words."""

    def why_not(self, session: Any, loader: Any) -> str | None:
        """Why it cannot do its work with a loader of the script's, in whose process this runs; None where it can.

        Where a lever has this method of its own, what it says is among the loader's facts.
        """
        return None

    def in_part(self, facts: Facts) -> str | None:
        """What it does nevertheless where it does not apply, in a few words; None where nothing."""
        return None

    def lacks(self, machine: Machine) -> str | None:
        """What this machine lacks, so that it cannot be engaged whatever the script does; None where nothing."""
        return None

    def settings(self, facts: Facts, machine: Machine) -> tuple[Mapping[str, Setting], ...]:
        """The settings worth trying, most promising first."""
        return ({},)

    def promise(self, facts: Facts) -> float:
        """What it brings as a ratio by what was counted in the plain script; 1 where nothing that counts is known."""
        return 1.0

    def frees(self, facts: Facts, machine: Machine) -> Mapping[str, Mapping[str, Setting]]:
        """By the name of what they take away, settings whose gain is a measured cause."""
        return {}

    def brings_back(self, facts: Facts) -> Mapping[str, Setting] | None:
        """The setting under which the training thread does itself what is done beside it; None where nothing is."""
        return None

    def worth_after(self, settings: Mapping[str, Setting], brought: Mapping[str, str]) -> bool:
        """Whether a setting is still worth trying after what others of the lever brought, where each trial is costly.

        `brought` has the other words, empty for none, and for each `best` (part of the best so far), `failed`
        (disagreement included) or `measured`.
        """
        return True

    def environment(self, settings: Mapping[str, Setting]) -> dict[str, str]:
        """Environment variables that must be there before the process starts (`toggles = "process"`)."""
        return {}

    def engage(self, session: Any, settings: Mapping[str, Setting]) -> None:  # noqa: B027  not where `process`
        """Take effect from the next step on; the whole state moves along."""

    def release(self, session: Any) -> None:  # noqa: B027
        """Undo `engage`, so that engage then release is the identity."""

    def evidence(self, session: Any) -> str | None:
        """Proof that it took effect in the steps since `engage`, or None where none was seen."""
        return None

    def why_no_evidence(self, session: Any) -> str:
        """Why there is none, where it knows, in a few words."""
        return ""


def ranks_of(levers: Levers, registry: Mapping[str, Lever]) -> tuple[int, str] | None:
    """On how many ranks a set of levers runs, and how they divide the work; None for one process."""
    for name, settings in levers.items():
        if name in registry and registry[name].divides:
            return division(settings[registry[name].parameter or ""])
    return None


def of_one_process(levers: Levers, registry: Mapping[str, Lever]) -> Levers:
    """A set of levers without what divides the training, and without what only ranks have."""
    those = {name for name in levers if name in registry and (registry[name].divides or registry[name].modes)}
    return {name: settings for name, settings in levers.items() if name not in those}


def unfit_on_ranks(levers: Levers, registry: Mapping[str, Lever]) -> dict[str, str]:
    """Which levers of a set have no place on ranks that divide the work as it says, or without any, and why."""
    ranks = ranks_of(levers, registry)
    known = [registry[name] for name in levers if name in registry]
    if ranks is None:
        return {one.name: "one process sends no gradients" for one in known if one.modes}
    found: dict[str, str] = {}
    for one in known:
        if one.deals_out_cores:
            found[one.name] = "ranks share the cores"
        elif one.needs_whole_parameters and ranks[1] in SHARDED_MODES:
            found[one.name] = "ranks share the parameters"
        elif one.modes and ranks[1] not in one.modes:
            found[one.name] = f"not in mode {ranks[1]}"
    return found


def typed(lever: Lever) -> str:
    """How a lever is named among `--levers`, with `N` where it needs a number."""
    if lever.parameter is None or lever.optional:
        return lever.name
    return f"{lever.name}={lever.choices[0] if lever.choices else 'N'}"


def input_levers(levers: Mapping[str, Lever], *, together: Machine | None = None) -> tuple[str, ...]:
    """What `input` stands for where levers are named: all exact ones for a slow input.

    Args:
        levers: All there are, by name.
        together: Only those that can be engaged together on this machine, as they are, without a number.
    """
    found = {name: one for name, one in levers.items() if one.class_ == "exact" and {*one.shortens} <= {"data", "copy"}}
    if together is not None:
        found = {name: one for name, one in found.items() if one.lacks(together) is None}
        contained = {inner for one in found.values() for inner in one.contains}
        bare = {name: one for name, one in found.items() if one.parameter is None or one.optional}
        found = {name: one for name, one in bare.items() if not one.only_by_name and name not in contained}
    return tuple(found)


def verify(lever: Lever) -> None:
    """Check a lever against the contract, at registration.

    Raises:
        TypeError: Says which lever, which attribute, and what it may be.
    """
    kind = type(lever)

    def must(holds: bool, complaint: str) -> None:
        if not holds:
            raise TypeError(f"lever {kind.__name__} {complaint}")

    for attribute in ("name", "summary", "class_", "shortens", "check"):
        must(bool(getattr(kind, attribute, None)), f"does not state its `{attribute}`")
    for name in (lever.name, *([] if lever.parameter is None else [lever.parameter])):
        must(name.isidentifier() and name not in RESERVED, f"is or takes {name!r}, not an identifier of its own")
    for attribute, allowed in (("class_", CLASSES), ("toggles", get_args(Toggles)), ("check", get_args(Check))):
        value = getattr(lever, attribute)
        must(value in allowed, f"has {value!r} as its `{attribute}`, not one of {', '.join(allowed)}")
    must({*lever.shortens} <= {*PHASES}, f"shortens {lever.shortens!r}, which are not all phases")
    must(lever.name not in (*lever.conflicts, *lever.partners), "is among its own `conflicts` or `partners`")
    must({*lever.contains} <= {*lever.conflicts}, "`contains` what it can be combined with")
    must(lever.check != "none" or lever.class_ == "exact", "changes numbers but names no check")
    typed_as_words = all(word and not word.isdecimal() and not {*word} & {*"=, "} for word in lever.choices)
    must(typed_as_words, f"has `choices` {lever.choices!r}, which cannot all be typed as words")
    if lever.parameter is None:
        must(not lever.choices and not lever.optional, "has no `parameter` that could be a choice or be left out")
    else:
        must(kind.settings is not Lever.settings, f"takes `{lever.parameter}` but has no `settings` to try")
    if lever.divides:  # the parent does it: nothing is engaged within a process
        return
    engages, prepares = kind.engage is not Lever.engage, kind.environment is not Lever.environment
    must(engages or (lever.toggles == "process" and prepares), "has no `engage`, no `environment` for a new process")
    must(not engages or kind.release is not Lever.release, "has `engage` but no `release`")
    must(kind.evidence is not Lever.evidence, "shows no `evidence` that it took effect")
