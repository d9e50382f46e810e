"""What may the search choose from, and how much could each lever bring? Single candidates, with reasons for the rest.

In: facts, a diagnosis, the levers' descriptions, the user's choice. Out: a `Space`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from flatout.frameworks.lever import ONLY_PROVED, Lever, ranks_of, typed, unfit_on_ranks
from flatout.judge.diagnosis import Diagnosis
from flatout.judge.remedies import MEASURED
from flatout.judge.result import BRINGS, NOT_NAMED, Untried
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.plan import CLASSES, Candidate, allows
from flatout.records.trace import Levers

WORTH_TRYING = 1.02
"""A lever whose cause, taken away, was measured to bring less than this is ruled out."""

FREE_DATA = "free data"

WORTH_A_PROCESS = 1.05
"""What a lever that needs a process must promise to be tried before those that compile, of which nobody knows."""

CHEAP, COMPILED, NEW_PROCESS = 0, 2, 3
"""What trying a set takes: windows of the running process; seconds to minutes of compiling; processes of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What the search may choose from.

    Attributes:
        singles: One candidate per lever and setting, cheap first.
        untried: Levers left out, and why.
        levers: All levers by name.
        promised: By lever what it should bring by what was counted, as a ratio; without those of which nobody knows.
        own: What this very script was tuned to before: it comes first, whatever it costs.
    """

    singles: tuple[Candidate, ...]
    untried: tuple[Untried, ...]
    levers: Mapping[str, Lever] = field(default_factory=dict)
    promised: Mapping[str, float] = field(default_factory=dict)
    own: Candidate | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How the user narrows the search.

    Attributes:
        accept: How far levers may go.
        only: Names of the only levers to try; None for all.
        without: Names of levers to leave out.
        ruled_out: Levers that cannot be tried here whatever the script does, and why.
        num_ranks: On how many ranks it may be tried at most; None for one process.
    """

    accept: str = "precision"
    only: tuple[str, ...] | None = None
    without: tuple[str, ...] = ()
    ruled_out: Mapping[str, str] = field(default_factory=dict)
    num_ranks: int | None = None


def space_of(
    levers: Mapping[str, Lever], facts: Facts, machine: Machine, diagnosis: Diagnosis, choice: Choice
) -> Space:
    """The single candidates worth trying, those that cost least first, and why the rest is left out."""
    rows: list[tuple[tuple[int, float, int, int], Candidate]] = []
    untried: list[Untried] = []
    for lever in levers.values():
        seen = _on_ranks(lever, facts, choice)
        reason = left_out(lever, choice) or lever.applies(seen, machine)
        if lever.only_by_name and choice.only is None and reason is not None:
            reason = lever.applies(seen, machine) or f"{reason}{_known_to_bring(lever.frees(seen, machine), diagnosis)}"
        bound = bound_of(lever, diagnosis)
        if reason is None and bound < WORTH_TRYING and choice.only is None:
            reason = f"ruled out: {FREE_DATA} was measured to bring {bound:.2f}x at most"
        tried = lever.settings(seen, machine) if reason is None else ()
        if not tried:
            untried.append(Untried(lever=lever.name, reason=reason or "no other setting than the present one"))
        # of equal bounds the lever that may change more comes first: it is the one that can bring most; of equal ones
        # that which a single trial tells all about, before those with a number to be found
        order = _cost(lever), -bound, -CLASSES.index(lever.class_), len(tried)
        rows += [(order, Candidate(levers={lever.name: settings})) for settings in tried]
    rows.sort(key=lambda row: row[0])
    return Space(
        singles=tuple(c for _, c in rows),
        untried=tuple(untried),
        levers=dict(levers),
        promised={n: ratio for _, c in rows for n in c.levers if (ratio := levers[n].promise(facts)) > 1},
    )


def _known_to_bring(freed: Iterable[str], diagnosis: Diagnosis) -> str:
    remedies = {MEASURED[name][0] for name in freed}
    known = [bound for bound in diagnosis.bounds if bound.remedy in remedies and bound.low > 1]
    return "".join(f"; {BRINGS} {bound.ratio:.2f}x" for bound in known[:1])


def _on_ranks(lever: Lever, facts: Facts, choice: Choice) -> Facts:
    """The facts as a lever for ranks will find them on the ranks that were asked for."""
    if choice.num_ranks is None or not (lever.divides or lever.modes):
        return facts
    mode = next((mode for mode in lever.modes if mode != "auto"), "")
    return replace(facts, num_ranks=choice.num_ranks, rank_mode=mode)


def left_out(lever: Lever, choice: Choice) -> str | None:
    """Why a lever is not to be tried whatever the script does; None where it may be."""
    if choice.num_ranks is None and (lever.divides or lever.modes):
        return "for several ranks: `--ranks N` tries it"
    if choice.only is not None and lever.name not in choice.only:
        return NOT_NAMED
    if lever.name in choice.without:
        return "left out by `--without`"
    if lever.name in choice.ruled_out:
        return choice.ruled_out[lever.name]
    if lever.class_ == "semantics":
        return f"{ONLY_PROVED} (`flatout prove --levers {typed(lever)} --accept semantics`)"
    if choice.only is None and lever.only_by_name:
        return f"only by name (`--levers {lever.name}`): {lever.only_by_name}"
    if not allows(choice.accept, lever.class_):
        return f"class {lever.class_} needs `--accept {lever.class_}`"
    return None


def _cost(lever: Lever) -> int:
    return NEW_PROCESS if lever.toggles == "process" else COMPILED if lever.compiles else CHEAP


def cost_of(levers: Iterable[str], known: Mapping[str, Lever]) -> int:
    """What trying a set takes, by the costliest of its levers: `CHEAP`, `COMPILED` or `NEW_PROCESS`."""
    return max((_cost(known[name]) for name in levers), default=CHEAP)


def begun_with(space: Space, levers: Levers) -> Space:
    """The same, begun with a set of levers, where the search could have put it together itself."""
    singles = {candidate.key: candidate.levers for candidate in space.singles}
    keys = [Candidate(levers={name: settings}).key for name, settings in levers.items()]
    if not keys or not all(key in singles for key in keys) or clash(levers, space):
        return space
    # with the settings as they are here: a file may say `true` for 1, which is equal
    here = {name: settings for key in keys for name, settings in singles[key].items()}
    return replace(space, own=Candidate(levers=here))


def bound_of(lever: Lever, diagnosis: Diagnosis) -> float:
    """The most that a lever can bring, as a ratio, by what was measured with its cause removed; else infinite.

    The share of a phase rules nothing out: workers that take the cores from the model make its phases longer, not
    theirs.
    """
    bound = math.inf
    for known in diagnosis.bounds:
        if known.remedy == FREE_DATA and set(lever.shortens) <= {"data"}:
            # A worker takes the fetch off the step; the measured counterfactual includes what sharing a core costs.
            bound = min(bound, max(known.ratio if math.isnan(known.high) else known.high, 1.0))
    return bound


def widest_class(levers: Levers, known: Mapping[str, Lever]) -> str:
    """The widest class among some levers."""
    return max((known[name].class_ for name in levers), key=CLASSES.index, default="exact")


def checks_of(levers: Levers, known: Mapping[str, Lever], *, infers: bool = False) -> tuple[str, ...]:
    """Every check that some lever names; updates too where the state is moved or fused.

    Where nothing is trained outputs take the place of gradients and updates, and answers that of outputs.
    """
    checks = {str(known[name].check) for name in levers} - {"none"}
    if any(known[name].moves_state for name in levers):
        checks |= {"gradients", "updates"}
    if infers and checks - {"batches"}:
        checks = ({"answers"} if "answers" in checks else {"outputs"}) | checks & {"batches"}
    return tuple(c for c in ("batches", "answers", "outputs", "gradients", "updates") if c in checks)


def contains(levers: Levers, part: Levers) -> bool:
    """Whether a set has all levers of another, with the same settings."""
    return all(name in levers and dict(levers[name]) == dict(settings) for name, settings in part.items())


def clash(levers: Levers, space: Space) -> bool:
    """Whether two levers of a set exclude each other, or one has no place on the ranks of another."""
    if any(other in space.levers[name].conflicts for name in levers for other in levers):
        return True
    return ranks_of(levers, space.levers) is not None and bool(unfit_on_ranks(levers, space.levers))
