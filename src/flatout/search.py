"""Which candidate next? The search over sets of levers, as plain logic over what has been measured.

In: facts, anatomy, diagnosis, the levers' descriptions, and the trials so far. Out: the next `Candidate`, or None.
Single levers first, cheap ones before those that compile, known partners together even where each alone loses; then
combinations grown from the best, because levers interact. Nothing here measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from flatout.anatomy import Anatomy
from flatout.ceilings import Machine
from flatout.diagnosis import Diagnosis
from flatout.facts import Facts
from flatout.plan import CLASSES, Candidate, Lever, Trial, allows
from flatout.result import NOT_NAMED, Untried
from flatout.trace import Levers

WORTH_TRYING = 1.02
"""A lever whose phases, freed entirely, would bring less than this is ruled out."""

WORTH_ADDING = 1.01
"""A lever stays in a combination where it makes it at least this much faster."""

NOT_HOPELESS = 0.75
"""A single lever below this ratio is not added to the best so far; one that loses a little alone may gain there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """What the search may choose from.

    Attributes:
        singles: One candidate per lever and setting, cheap first.
        untried: Levers left out, and why.
        levers: All levers by name.
        num_cores: Cores that this process may use.
        bounds: By lever the most that it can bring, as a ratio.
    """

    singles: tuple[Candidate, ...]
    untried: tuple[Untried, ...]
    levers: Mapping[str, Lever] = field(default_factory=dict)
    num_cores: int = 1
    bounds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How the user narrows the search.

    Attributes:
        accept: How far levers may go.
        only: Names of the only levers to try; None for all.
        without: Names of levers to leave out.
    """

    accept: str = "precision"
    only: tuple[str, ...] | None = None
    without: tuple[str, ...] = ()


def space_of(
    levers: Mapping[str, Lever], facts: Facts, machine: Machine, found: tuple[Anatomy, Diagnosis], choice: Choice
) -> Space:
    """The single candidates worth trying, most promising first, and why the rest is left out."""
    anatomy, diagnosis = found
    rows: list[tuple[tuple[int, bool, float, int, int], Candidate]] = []
    untried: list[Untried] = []
    bounds: dict[str, float] = {}
    for lever in levers.values():
        reason = _left_out(lever, choice) or lever.applies(facts, machine)
        bound = bounds[lever.name] = bound_of(lever, anatomy, diagnosis)
        if reason is None and bound < WORTH_TRYING and choice.only is None:
            reason = f"ruled out: what it shortens, entirely free, would bring {bound:.2f}x"
        tried = lever.settings(facts, machine) if reason is None else ()
        if not tried:
            untried.append(Untried(lever=lever.name, reason=reason or "no other setting than the present one"))
        for settings in tried:
            candidate = Candidate(levers={lever.name: settings}, reason=f"bound {bound:.2f}x")
            late = _leaves_cores_idle(candidate, machine)
            # of equal bounds the lever that may change more comes first: it is the one that can bring most; of equal
            # ones that which a single trial tells all about, before those with a number to be found
            rows.append(((_cost(lever), late, -bound, -CLASSES.index(lever.class_), len(tried)), candidate))
    rows.sort(key=lambda row: row[0])
    return Space(
        singles=tuple(c for _, c in rows),
        untried=tuple(untried),
        levers=dict(levers),
        num_cores=machine.num_cores,
        bounds=bounds,
    )


def _leaves_cores_idle(candidate: Candidate, machine: Machine) -> bool:
    """Fewer threads than cores: rarely faster alone, so it is tried after what might be."""
    return int(candidate.levers.get("threads", {}).get("num", machine.num_cores)) < machine.num_cores


def _left_out(lever: Lever, choice: Choice) -> str | None:
    if choice.only is not None and lever.name not in choice.only:
        return NOT_NAMED
    if lever.name in choice.without:
        return "left out by `--without`"
    if choice.only is None and lever.only_by_name:
        return f"only by name (`--levers {lever.name}`): {lever.only_by_name}"
    if not allows(choice.accept, lever.class_):
        return f"class {lever.class_} needs `--accept {lever.class_}`"
    return None


def _cost(lever: Lever) -> int:
    return 3 if lever.toggles == "process" else 2 if lever.compiles else 0


def bound_of(lever: Lever, anatomy: Anatomy, diagnosis: Diagnosis) -> float:
    """The most that a lever can bring: its phases entirely free, and no more than a measured counterfactual allows.

    Time that no phase explains may belong to any, so it counts for every lever that computes.
    """
    hidden = any(phase in anatomy.not_observed for phase in lever.shortens)
    share = sum(anatomy.share(phase) or 0.0 for phase in lever.shortens)
    bound = math.inf  # what cannot be seen cannot be ruled out
    if share > 0 or not hidden:
        if hidden or set(lever.shortens) & {"forward", "backward", "optimizer"}:
            share += max(anatomy.share("unattributed") or 0.0, 0.0)
        bound = 1 / max(1 - share, 1e-3)
    for known in diagnosis.bounds:
        if known.remedy == "free data" and set(lever.shortens) <= {"data"}:
            # A worker takes the fetch off the step; the measured counterfactual includes what sharing a core costs.
            bound = min(bound, max(known.ratio if math.isnan(known.high) else known.high, 1.0))
    return bound


def widest_class(levers: Levers, known: Mapping[str, Lever]) -> str:
    """The widest class among some levers."""
    return max((known[name].class_ for name in levers), key=CLASSES.index, default="exact")


def checks_of(levers: Levers, known: Mapping[str, Lever]) -> tuple[str, ...]:
    """Every check that some lever names; updates too where the state is moved, fused or flushed."""
    checks = {known[name].check for name in levers} - {"none"}
    if {"channels_last", "fused_optimizer", "denormals"} & {*levers}:
        checks |= {"gradients", "updates"}
    return tuple(c for c in ("batches", "gradients", "updates") if c in checks)


def gain_s(candidate: Candidate, space: Space, trials: Sequence[Trial], run_s: float) -> float:
    """The most that trying a candidate can save of a run that takes `run_s` plainly, beyond the best so far, seconds.

    What its levers shorten, entirely free, on top of the best; never more than all that is left.
    """
    best = best_of(trials)
    present = best.levers if best is not None else {}
    left_s = run_s / (best.ratio or 1.0) if best is not None else run_s
    bound = 1.0
    for name, settings in candidate.levers.items():
        if present.get(name) != settings:
            bound *= space.bounds.get(name, math.inf)
    return left_s * (1 - 1 / bound)


def next_candidate(
    space: Space, trials: Sequence[Trial], pays: Callable[[Candidate], bool] = lambda candidate: True
) -> Candidate | None:
    """The next set of levers to measure, given what has been measured; None when the search is over.

    Args:
        space: What there is to choose from.
        trials: What has been measured.
        pays: Whether a candidate can earn back what trying it costs.

    A set that was tried is not proposed again, nor is one that contains a set that failed or disagrees, nor one in
    which two levers exclude each other. Where gradients disagree beyond rounding, a set of a wider class may still
    contain the lever: beside bf16 that is little, and the set is judged as a whole.
    """
    tried = {Candidate(levers=t.levers).key for t in trials}
    broken = [t for t in trials if _is_broken(t)]
    for candidate in _in_order(space, trials):
        if candidate.key in tried or _clash(candidate.levers, space) or not pays(candidate):
            continue
        if not any(_contains(candidate.levers, t.levers) and not _forgiven(t, candidate, space) for t in broken):
            return candidate
    return None


def _is_broken(trial: Trial) -> bool:
    return trial.outcome in ("failed", "disagrees")


def _forgiven(trial: Trial, candidate: Candidate, space: Space) -> bool:
    """Whether what disagreed was gradients alone, and the candidate is of a class with wider limits for them."""
    gradients = all(space.levers[name].check == "gradients" for name in trial.levers)
    wider = not allows(widest_class(trial.levers, space.levers), widest_class(candidate.levers, space.levers))
    return trial.outcome == "disagrees" and gradients and wider


def _contains(levers: Levers, part: Levers) -> bool:
    return all(name in levers and dict(levers[name]) == dict(settings) for name, settings in part.items())


def _clash(levers: Levers, space: Space) -> bool:
    return any(other in space.levers[name].conflicts for name in levers for other in levers)


def _in_order(space: Space, trials: Sequence[Trial]) -> list[Candidate]:
    """All that is worth trying now, cheapest first; what compiles or needs processes is put on top of the best."""
    order = _with_partners([c for c in space.singles if _single_cost(c, space) == 0], space)
    order += _grown(space, trials)
    for cost in (2, 3):
        for candidate in space.singles:
            if _single_cost(candidate, space) == cost:
                order += _on_top(candidate, space, trials)
    return order


def _on_top(candidate: Candidate, space: Space, trials: Sequence[Trial]) -> list[Candidate]:
    """A costly lever added to the best so far; alone where that broke, for the company may be what broke it."""
    best = best_of(trials)
    if not _still_worth(candidate, space, best, trials):
        return []
    if best is None:
        return [candidate]
    base = {n: s for n, s in best.levers.items() if not _clash({n: s, **candidate.levers}, space)}
    stacked = Candidate(levers={**base, **candidate.levers}, reason="added to the best so far")
    broke = any(_is_broken(t) and Candidate(levers=t.levers).key == stacked.key for t in trials)
    return [stacked, candidate] if broke else [stacked]


def _still_worth(candidate: Candidate, space: Space, best: Trial | None, trials: Sequence[Trial]) -> bool:
    """Whether the lever is not part of the best yet, and, of one that takes words, what its other words brought."""
    ((name, settings),) = candidate.levers.items()
    lever = space.levers[name]
    if not lever.choices:
        return best is None or name not in best.levers
    brought: dict[str, str] = {}
    for trial in trials:
        if name not in trial.levers or dict(trial.levers[name]) == dict(settings):
            continue
        word = str(trial.levers[name].get(lever.parameter or "", ""))
        if best is not None and dict(best.levers.get(name, {"": ""})) == dict(trial.levers[name]):
            brought[word] = "best"
        elif brought.get(word, "failed") == "failed":
            brought[word] = "failed" if _is_broken(trial) else "measured"
    return lever.worth_after(settings, brought)


def _single_cost(candidate: Candidate, space: Space) -> int:
    return max(_cost(space.levers[name]) for name in candidate.levers)


def _with_partners(cheap: Sequence[Candidate], space: Space) -> list[Candidate]:
    """The single levers, each first partner followed by the pairs that it makes."""
    order = []
    for single in cheap:
        order.append(single)
        for other in cheap:
            levers = {**single.levers, **other.levers}
            if _are_partners(single.levers, other.levers, space) and _sensible(levers, space):
                order.append(Candidate(levers=levers, reason="gain together what neither gains alone"))
    return order


def _are_partners(first: Levers, second: Levers, space: Space) -> bool:
    return any(name in space.levers[other].partners for other in first for name in second)


def _sensible(levers: Levers, space: Space) -> bool:
    """Workers and threads share the cores: as many threads as the workers leave, at least one."""
    if not {"workers", "threads"} <= set(levers):
        return True
    workers = int(levers["workers"]["num"])
    return workers > 0 and int(levers["threads"]["num"]) == max(space.num_cores - workers, 1)


def _grown(space: Space, trials: Sequence[Trial]) -> list[Candidate]:
    """The best so far, with one more lever or pair of partners, or with one lever less; most promising first."""
    best = best_of(trials)
    if best is None:
        return []
    parts = [t for t in trials if usable(t) and t.agreement != "inconclusive" and _is_part(t, space)]
    parts.sort(key=lambda t: -(t.ratio or 0.0))
    found = [
        Candidate(levers={**best.levers, **part.levers}, reason="added to the best so far")
        for part in parts
        if not _contains(best.levers, part.levers)
    ]
    for name in best.levers if len(best.levers) > 1 else ():
        rest = {n: s for n, s in best.levers.items() if n != name}
        found.append(Candidate(levers=rest, reason=f"the best so far without {name}"))
    return found


def _is_part(trial: Trial, space: Space) -> bool:
    """A lever that is not hopeless alone, or partners that gain together."""
    if len(trial.levers) == 1:
        return (trial.ratio or 0.0) >= NOT_HOPELESS
    pair = len(trial.levers) == 2 and _are_partners(trial.levers, trial.levers, space)
    return pair and (trial.ratio or 0.0) > WORTH_ADDING


def usable(trial: Trial) -> bool:
    """Whether the trial's levers may be part of a plan: measured, working, and agreeing where judged."""
    return trial.ratio is not None and not _is_broken(trial) and trial.outcome != "ruled out"


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The fastest set that may become a plan: faster than plain, and its numbers agree.

    A larger set must earn its size: it is preferred to a smaller one only where it is `WORTH_ADDING` times as fast.
    What is known only roughly counts for less: of many candidates the one that looks best is otherwise the luckiest.
    """
    candidates = [t for t in trials if usable(t) and (t.ratio or 0.0) > WORTH_ADDING and t.agreement == "agrees"]
    best: Trial | None = None
    for trial in sorted(candidates, key=lambda t: (len(t.levers), -_worth(t))):
        size = WORTH_ADDING if best is not None and len(trial.levers) > len(best.levers) else 1.0
        if best is None or _worth(trial) > _worth(best) * size:
            best = trial
    return best


def second_to(best: Trial, trials: Sequence[Trial]) -> Trial | None:
    """What may be measured again where the best turns out to have been lucky: a set that was seen to be faster."""
    return best_of([t for t in trials if t.is_won and t is not best])


def _worth(trial: Trial) -> float:
    """The ratio, moved half the way to the lower end of its interval (on the logarithm)."""
    ratio = trial.ratio or 0.0
    low = ratio if trial.ratio_low is None else trial.ratio_low
    return math.sqrt(max(ratio * low, 0.0))
