"""Which costly candidate next? What compiles and what needs a process, on top of what was screened.

In: the levers' descriptions, and the trials so far. Out: the next `Candidate`, or None; and which trial is the best.
Levers that can be switched while a script runs are not tried one by one: `flatout.trials.search.screen`. Nothing here
measures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from flatout.frameworks.lever import ranks_of
from flatout.records.plan import Candidate, Trial, allows
from flatout.records.trace import Levers
from flatout.trials.search.space import (
    CHEAP,
    COMPILED,
    NEW_PROCESS,
    WORTH_A_PROCESS,
    WORTH_TRYING,
    Space,
    clash,
    contains,
    cost_of,
    widest_class,
)

WORTH_ADDING = 1.01
"""A lever stays in a combination where it makes it at least this much faster."""

EARNED_BACK_S = 600.0
"""A run goes on for about so long: what engaging takes, compiling above all, has to be earned back in it. (`compile` on
`char_gpt.py` took 46 s, won 1.02 in windows, and whole runs of 150 s under it took 7 % longer.)"""


def next_candidate(
    space: Space, trials: Sequence[Trial], is_worth: Callable[[Candidate], bool] = lambda candidate: True
) -> Candidate | None:
    """The next set of levers to measure, given what has been measured; None when the search is over.

    Args:
        space: What there is to choose from.
        trials: What has been measured.
        is_worth: Whether a candidate may be tried.

    A set that was tried is not proposed again, nor is one that contains a set that failed or disagrees, nor one in
    which two levers exclude each other. Where gradients disagree beyond rounding, a set of a wider class may still
    contain the lever: beside bf16 that is little, and the set is judged as a whole.
    """

    def forgiven(trial: Trial, candidate: Candidate) -> bool:
        gradients = all(space.levers[name].check == "gradients" for name in trial.levers)
        wider = not allows(widest_class(trial.levers, space.levers), widest_class(candidate.levers, space.levers))
        return trial.outcome == "disagrees" and gradients and wider

    tried = {Candidate(levers=t.levers).key for t in trials}
    broken = [t for t in trials if _is_broken(t)]
    for candidate in _in_order(space, trials):
        if candidate.key in tried or clash(candidate.levers, space) or not is_worth(candidate):
            continue
        if not any(contains(candidate.levers, t.levers) and not forgiven(t, candidate) for t in broken):
            return candidate
    return None


def _is_broken(trial: Trial) -> bool:
    return trial.outcome in ("failed", "disagrees")


def _in_order(space: Space, trials: Sequence[Trial]) -> list[Candidate]:
    """All that is worth trying now, cheapest first; what compiles or needs processes is put on top of the best.

    Where a lever that needs a process promises enough, it comes before those that compile: compiling costs as much.
    Sets without levers that need a process are grown from the best of their kind: growing one that has such levers
    takes processes for every step of it, and comes last.
    """
    inside = [t for t in trials if cost_of(t.levers, space.levers) < NEW_PROCESS]
    own = [space.own] if space.own is not None and cost_of(space.own.levers, space.levers) != CHEAP else []
    order = [*own, *_grown(space, inside)]
    compiled: list[Candidate] = []
    for candidate in space.singles:
        if cost_of(candidate.levers, space.levers) == COMPILED:
            compiled += _on_top(candidate, space, inside)
    in_processes = _in_new_processes(space, trials, inside)
    order += [*in_processes, *compiled] if promises_a_process(space) else [*compiled, *in_processes]
    if len(inside) < len(trials):
        order += _grown(space, trials)
    return order


def promises_a_process(space: Space) -> bool:
    """Whether a lever that needs a process should bring enough, by what was counted, to be worth it."""
    needing = (c for c in space.singles if cost_of(c.levers, space.levers) == NEW_PROCESS)
    return any(all(space.promised.get(name, 1.0) >= WORTH_A_PROCESS for name in c.levers) for c in needing)


def _on_top(candidate: Candidate, space: Space, trials: Sequence[Trial]) -> list[Candidate]:
    """A costly lever added to the best so far; alone where that broke, for the company may be what broke it."""
    best = best_of(trials)
    if not _still_worth(candidate, space, best, trials):
        return []
    if best is None:
        return [candidate]
    stacked = Candidate(levers=_stacked(candidate.levers, best, space))
    broke = any(_is_broken(t) and Candidate(levers=t.levers).key == stacked.key for t in trials)
    return [stacked, candidate] if broke else [stacked]


def _stacked(levers: Levers, best: Trial | None, space: Space) -> Levers:
    """Levers on top of the best, without those of the best that they exclude."""
    base = best.levers if best is not None else {}
    return {**{n: s for n, s in base.items() if not clash({n: s, **levers}, space)}, **levers}


def _in_new_processes(space: Space, trials: Sequence[Trial], inside: Sequence[Trial]) -> list[Candidate]:
    """Levers that need a process, as many as bear each other in one: each pair of it takes two starts of the script.

    A group that wins is taken apart, to keep what it needs; one that breaks or surely costs something too, for the rest
    of it may gain. Where a group makes no difference nothing of it is pursued: a small gain that a small loss beside it
    hides is not found, which is the price.
    """
    best, base = best_of(trials), best_of(inside)
    order: list[Candidate] = []
    if best is not None and len(best.levers) > 1:
        order += [_less(best, name) for name in best.levers if cost_of([name], space.levers) == NEW_PROCESS]
    if best is not None and ranks_of(best.levers, space.levers) is not None:
        for candidate in (one for one in space.singles if _is_for_ranks(one, space)):
            order += _on_top(candidate, space, trials)
    for group in _groups(space, base):
        levers = {name: settings for candidate in group for name, settings in candidate.levers.items()}
        seen = [t for t in trials if contains(t.levers, _stacked(levers, base, space)) and not _is_broken(t)]
        if seen and (len(group) == 1 or not all(_costs(t, base) for t in seen)):
            continue
        worth = {n: s for one in group if _still_worth(one, space, best, trials) for n, s in one.levers.items()}
        stacked = Candidate(levers=_stacked(worth, best, space)) if worth else None
        broke = stacked is None or any(_is_broken(t) and contains(stacked.levers, t.levers) for t in trials)
        if stacked is not None and not seen and not broke:
            order.append(stacked)
        else:
            order += [apart for one in group for apart in _on_top(one, space, trials)]
    return order


def _costs(trial: Trial, base: Trial | None) -> bool:
    """Whether a set is surely slower than what it was put on top of."""
    high = trial.ratio if trial.ratio_high is None else trial.ratio_high
    return (high or 0.0) * WORTH_TRYING < ((base.ratio if base is not None else None) or 1.0)


def _groups(space: Space, base: Trial | None) -> list[list[Candidate]]:
    """Single levers that can share a process; what costs the best a lever is no company for others."""

    def bear(group: Sequence[Candidate], candidate: Candidate) -> bool:
        levers = {name: settings for one in group for name, settings in one.levers.items()}
        if any(space.levers[name].divides for name in {**levers, **candidate.levers}):
            return False  # what cannot be divided says nothing of the others
        return not levers.keys() & candidate.levers.keys() and not clash({**levers, **candidate.levers}, space)

    groups: dict[bool, list[list[Candidate]]] = {}
    for candidate in space.singles:
        if cost_of(candidate.levers, space.levers) == NEW_PROCESS and not _is_for_ranks(candidate, space):
            costs = base is not None and any(clash({**candidate.levers, n: s}, space) for n, s in base.levers.items())
            alike = groups.setdefault(costs, [])
            group = next((one for one in alike if bear(one, candidate)), None)
            if group is None:
                alike.append(group := [])
            group.append(candidate)
    return [group for _, alike in sorted(groups.items()) for group in alike]


def _is_for_ranks(candidate: Candidate, space: Space) -> bool:
    """Whether it has something to do on ranks alone, beside what divides the training."""
    return any(space.levers[name].modes for name in candidate.levers)


def _still_worth(candidate: Candidate, space: Space, best: Trial | None, trials: Sequence[Trial]) -> bool:
    """Whether the lever is not part of the best yet, and, of one that takes words, what its other words brought."""
    ((name, settings),) = candidate.levers.items()
    lever = space.levers[name]
    if lever.divides:
        return best is None or best.levers.get(name) != settings
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


def _grown(space: Space, trials: Sequence[Trial]) -> list[Candidate]:
    """Where the best has a costly lever: it with one lever less, or with one more that may gain beside it.

    What can be switched in a running process was screened in all combinations, but not beside that.
    """
    best = best_of(trials)
    if best is None or cost_of(best.levers, space.levers) == CHEAP:
        return []
    alone = [t for t in trials if usable(t) and t.agreement != "inconclusive" and len(t.levers) == 1]
    parts = [t for t in alone if (t.ratio_high or t.ratio or 0.0) > WORTH_ADDING]
    parts.sort(key=lambda t: -(t.ratio or 0.0))
    found = [
        Candidate(levers={**best.levers, **part.levers}) for part in parts if not contains(best.levers, part.levers)
    ]
    return [*(_less(best, name) for name in best.levers if len(best.levers) > 1), *found]


def _less(best: Trial, name: str) -> Candidate:
    rest = {n: s for n, s in best.levers.items() if n != name}
    return Candidate(levers=rest)


def to_beat(trials: Sequence[Trial]) -> float:
    """The ratio below which a set is worth nothing: surely slower than the best so far."""
    best = best_of(trials)
    if best is None:
        return 1.0
    return max((best.ratio or 1.0) if best.ratio_low is None else best.ratio_low, 1.0)


def usable(trial: Trial) -> bool:
    """Whether the trial's levers may be part of a plan: measured, working, and agreeing where judged."""
    return trial.ratio is not None and not _is_broken(trial) and trial.outcome != "ruled out"


def best_of(trials: Sequence[Trial]) -> Trial | None:
    """The fastest set that may become a plan: faster than plain, and its numbers agree.

    A larger set must earn its size: it is preferred to a smaller one only where it is `WORTH_ADDING` times as fast; and
    one that takes long to engage, that. What is known only roughly counts for less: of many candidates the one that
    looks best is otherwise the luckiest.
    """
    candidates = [t for t in trials if usable(t) and (t.ratio or 0.0) > WORTH_ADDING and t.agreement == "agrees"]
    best: Trial | None = None
    for trial in sorted(candidates, key=lambda t: (len(t.levers), -_worth(t))):
        if best is None:
            is_better = (trial.ratio or 0.0) > _earned_back(trial.engage_s)
        else:
            size = WORTH_ADDING if len(trial.levers) > len(best.levers) else 1.0
            is_better = _worth(trial) > _worth(best) * max(size, _earned_back(trial.engage_s - best.engage_s))
        if is_better:
            best = trial
    return best


def _earned_back(engage_s: float) -> float:
    """How many times as fast a set must be to earn back what engaging it takes.

    >>> _earned_back(0.0), round(_earned_back(60.0), 2)
    (1.0, 1.11)
    """
    return EARNED_BACK_S / max(EARNED_BACK_S - engage_s, 1.0) if engage_s > 0 else 1.0


def second_to(best: Trial, trials: Sequence[Trial]) -> Trial | None:
    """What may be measured again where the best turns out to have been lucky: a set that was seen to be faster."""
    return best_of([t for t in trials if t.is_won and t is not best])


def _worth(trial: Trial) -> float:
    """The ratio, moved half the way to the lower end of its interval (on the logarithm)."""
    ratio = trial.ratio or 0.0
    low = ratio if trial.ratio_low is None else trial.ratio_low
    return math.sqrt(max(ratio * low, 0.0))
