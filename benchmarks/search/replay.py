"""How good is the search, and what does it cost, on grids that were recorded once? Beside it rivals.

    python benchmarks/search/replay.py [--draws 50]

Each play has its own order of the levers and its own noise: a trial's pairs are drawn, with replacement, from those
recorded for its set. What a play ends with is scored by the truth, the median of all recorded pairs: the ratio of
its choice over that of the best set of the grid; and its cost by the share of what trying every set costs.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from flatout.frameworks.pytorch.levers import registry
from flatout.judge import stats
from flatout.judge.agreement import Judgement
from flatout.judge.anatomy import Anatomy
from flatout.judge.diagnosis import Diagnosis
from flatout.judge.paired import SCREENING, Extent, Pairs, is_done
from flatout.records.as_json import from_json
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.plan import Candidate, Key, Trial
from flatout.records.trace import Levers
from flatout.trials.search import strategy
from flatout.trials.search.screen import Answer, Ask, screen
from flatout.trials.search.space import Choice, space_of
from measuring import RESULTS, write

ENOUGH, MOST_COST = 0.95, 0.25
MOST_WINDOWS = 120
DRIFT, REMEMBERED = 0.02, 0.95
"""The machine's speed drifts from window to window: by how much, and how much of it is left in the next."""

LEVERS = registry()


@dataclass(slots=True)
class Grid:
    """What was recorded of one script."""

    name: str
    rows: Mapping[Key, dict[str, Any]]
    facts: Facts
    anatomy: Anatomy
    diagnosis: Diagnosis
    machine: Machine
    noise: float
    truth: dict[Key, float] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Grid:
        """The grid in a file."""
        found = json.loads(path.read_text(encoding="utf-8"))
        present = [
            row for row in found["rows"] if row["levers"].keys() <= LEVERS.keys()
        ]  # some have been deleted since
        rows = {Candidate(levers=row["levers"]).key: row for row in present}
        grid = cls(
            name=found["script"],
            rows=rows,
            facts=from_json(Facts, found["facts"], where="grid"),
            anatomy=from_json(Anatomy, found["anatomy"], where="grid"),
            diagnosis=from_json(Diagnosis, found["diagnosis"], where="grid"),
            machine=from_json(Machine, found["machine"], where="grid"),
            noise=found["noise"],
        )
        grid.truth = {key: _true_ratio(row) for key, row in rows.items()}
        return grid

    @property
    def best(self) -> float:
        """The ratio of the best set; 1 where none wins, for plain is always there."""
        return max([1.0, *self.truth.values()])

    @property
    def whole_cost_s(self) -> float:
        """What trying every set costs, each as long as a trial that is not cut short."""
        return sum(_cost_s(row, SCREENING.at[-1]) for row in self.rows.values())


def _is_timed(row: Mapping[str, Any]) -> bool:
    return row["outcome"] == "measured" and bool(row["baseline_step_s"])


def _true_ratio(row: Mapping[str, Any]) -> float:
    """Of a set that may become a plan; 0 of others."""
    if row["outcome"] != "measured" or row.get("missing") or not row["baseline_step_s"]:
        return 0.0
    if row.get("agreement", "agrees") != "agrees":
        return 0.0
    return median(a / b for a, b in zip(row["baseline_step_s"], row["candidate_step_s"], strict=True))


def _cost_s(row: Mapping[str, Any], num_pairs: int) -> float:
    """Seconds for so many pairs, engaging and judging included."""
    recorded = max(len(row.get("baseline_step_s", ())) + row.get("num_discarded", 0), 1)
    apart_s = row.get("engage_s", 0.0) + row.get("judging_s", 0.0)
    return apart_s + max(row["took_s"] - apart_s, 0.0) / recorded * num_pairs


@dataclass(slots=True)
class Play:
    """One search over one grid, with its own noise."""

    grid: Grid
    lots: random.Random
    cost_s: float = 0.0
    trials: list[Trial] = field(default_factory=list)
    costs_s: list[float] = field(default_factory=list)
    """What it had cost after each trial."""
    num_windows: int = 0
    drift: float = 0.0

    def try_out(self, levers: Levers, to_beat: float = 1.0) -> Trial:
        """A trial as `tune` makes it, from pairs that are drawn among the recorded ones."""
        row = self.grid.rows.get(Candidate(levers=levers).key)
        if row is None or row["outcome"] != "measured" or not row["baseline_step_s"]:
            self.cost_s += _cost_s(row, 2) if row is not None else 0.0
            trial = Trial(levers=levers, outcome="failed")
        else:
            trial = self._measured(levers, row, to_beat)
        self.trials.append(trial)
        self.costs_s.append(self.cost_s)
        return trial

    def answer(self, ask: Ask) -> Answer:
        """A window as the screening of `tune` sees it, drawn among the recorded ones, or a judgement."""
        row = self.grid.rows.get(Candidate(levers=ask.levers).key)
        if ask.what != "window":
            assert row is not None
            self.cost_s += row.get("judging_s", 0.0)
            verdict = row.get("agreement", "agrees") or "agrees"
            return Answer(judgement=Judgement(verdict=verdict, detail=""))
        self.num_windows += 1
        self.drift = REMEMBERED * self.drift + self.lots.gauss(0, DRIFT)
        if row is None and ask.levers:
            return Answer(failure="not recorded")
        measured = row if row is not None else self.lots.choice([r for r in self.grid.rows.values() if _is_timed(r)])
        if not _is_timed(measured):
            return Answer(failure="broke when it was recorded")
        self.cost_s += (_cost_s(measured, 1) - measured.get("judging_s", 0.0)) / 2
        side = "candidate_step_s" if row is not None else "baseline_step_s"
        step_s = self.lots.choice(measured[side]) / median(measured["baseline_step_s"]) * math.exp(self.drift)
        return Answer(step_s=step_s, missing=measured.get("missing") or {})

    def _measured(self, levers: Levers, row: Mapping[str, Any], to_beat: float) -> Trial:
        recorded = list(zip(row["baseline_step_s"], row["candidate_step_s"], strict=True))
        pairs = Pairs(noise=self.grid.noise)
        extent = Extent(looks=SCREENING, enough="known", to_beat=to_beat)
        while not is_done(pairs, extent):
            baseline_s, candidate_s = self.lots.choice(recorded)
            pairs.baseline_s.append(baseline_s)
            pairs.candidate_s.append(candidate_s)
        compared = pairs.compare()
        ratio, low, high = compared.ratio, compared.low, compared.high
        if not math.isfinite(ratio):
            ratios = [a / b for a, b in zip(pairs.baseline_s, pairs.candidate_s, strict=True)]
            ratio, low, high = median(ratios), min(ratios), max(ratios)
        won = ratio > 1
        self.cost_s += _cost_s({**row, "judging_s": row.get("judging_s", 0.0) if won else 0.0}, len(pairs.baseline_s))
        agrees = row.get("agreement", "agrees") if won else ""
        return Trial(
            levers=levers,
            outcome="disagrees" if agrees == "disagrees" else compared.verdict,
            ratio=ratio,
            ratio_low=low,
            ratio_high=high,
            num_pairs=len(pairs.baseline_s),
            agreement=agrees,
        )

    @property
    def score(self) -> float:
        """The true ratio of what it ends with, over the best of the grid."""
        return self._score(self.trials)

    def reached(self) -> float:
        """The share of the cost after which it would have ended with `ENOUGH` of the best; infinite where never."""
        for num, cost_s in enumerate(self.costs_s, 1):
            if self._score(self.trials[:num]) >= ENOUGH:
                return cost_s / self.grid.whole_cost_s
        return 0.0 if self._score([]) >= ENOUGH else math.inf

    def _score(self, trials: Sequence[Trial]) -> float:
        best = strategy.best_of(trials)
        found = self.grid.truth.get(Candidate(levers=best.levers).key, 0.0) if best is not None else 1.0
        return max(found, 1e-9) / self.grid.best

    @property
    def share(self) -> float:
        """What it has cost, of what trying everything costs."""
        return self.cost_s / self.grid.whole_cost_s


def ours(play: Play) -> None:
    """The search of `tune`, with the levers in an order of its own."""
    names = [name for name, lever in LEVERS.items() if lever.toggles != "process"]
    play.lots.shuffle(names)
    grid = play.grid
    shuffled = {name: LEVERS[name] for name in names}
    space = space_of(shuffled, grid.facts, grid.machine, grid.diagnosis, Choice())
    space = replace(space, singles=tuple(one for one in space.singles if one.key in grid.rows))
    asking = screen(
        space, lambda gain: play.num_windows < MOST_WINDOWS, play.lots,
        fits=lambda levers: Candidate(levers=levers).key in grid.rows,
    )  # fmt: skip
    ask = next(asking)
    try:
        while True:
            ask = asking.send(play.answer(ask))
    except StopIteration as end:
        play.trials += end.value.trials
        play.costs_s += [play.cost_s] * len(end.value.trials)
    best = strategy.best_of(play.trials)
    if best is not None and strategy.next_candidate(space, play.trials, lambda c: c.key in grid.rows) is not None:
        play.trials.remove(best)
        play.try_out(best.levers)
    while (candidate := strategy.next_candidate(space, play.trials, lambda c: c.key in grid.rows)) is not None:
        play.try_out(candidate.levers, strategy.to_beat(play.trials))


def at_random(play: Play) -> None:
    """Sets by lot, for as much as the search may cost."""
    rows = list(play.grid.rows.values())
    play.lots.shuffle(rows)
    for row in rows:
        if play.share >= MOST_COST:
            return
        play.try_out(row["levers"])


def one_at_a_time(play: Play) -> None:
    """Each lever alone, then all that won together, as far as the grid has such a set."""
    singles = [row["levers"] for row in play.grid.rows.values() if len(row["levers"]) == 1]
    play.lots.shuffle(singles)
    won: dict[str, Any] = {}
    for levers in singles:
        trial = play.try_out(levers)
        if strategy.usable(trial) and (trial.ratio or 0.0) > strategy.WORTH_ADDING and trial.agreement == "agrees":
            together = {**won, **levers}
            won = together if Candidate(levers=together).key in play.grid.rows else won
    if len(won) > 1:
        play.try_out(won)


def successive_halving(play: Play) -> None:
    """All sets of the grid get a pair; the better half twice as many pairs, and so on, until one is left.

    Source: Karnin, Koren, Somekh, "Almost optimal exploration in multi-armed bandits", ICML 2013.
    """
    left = [row for row in play.grid.rows.values() if _is_timed(row) and not row.get("missing")]
    play.lots.shuffle(left)
    logs: dict[Key, list[float]] = {}
    num_pairs = 1
    while len(left) > 1 and play.share < MOST_COST:
        for row in left:
            pairs = list(zip(row["baseline_step_s"], row["candidate_step_s"], strict=True))
            some = logs.setdefault(Candidate(levers=row["levers"]).key, [])
            some += [math.log(a / b) for a, b in play.lots.choices(pairs, k=num_pairs)]
            play.cost_s += _cost_s(row, num_pairs) - row.get("judging_s", 0.0)
        left.sort(key=lambda row: -math.fsum(some := logs[Candidate(levers=row["levers"]).key]) / len(some))
        left, num_pairs = left[: math.ceil(len(left) / 2)], 2 * num_pairs
    for row in left:
        if strategy.best_of(play.trials) is None:
            play.try_out(row["levers"])


def tpe(play: Play) -> None:
    """Optuna's tree-structured Parzen estimator over all levers of the grid, for as much as the search may cost."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    options: dict[str, list[str]] = {}
    for row in play.grid.rows.values():
        for name, settings in row["levers"].items():
            word = json.dumps(settings, sort_keys=True)
            if word not in options.setdefault(name, [""]):
                options[name].append(word)
    known: dict[Key, float] = {(): 1.0}

    def objective(trial: Any) -> float:
        words = {name: trial.suggest_categorical(name, words) for name, words in options.items()}
        levers = {name: json.loads(word) for name, word in words.items() if word}
        key = Candidate(levers=levers).key
        if key not in known:
            outcome = play.try_out(levers) if key in play.grid.rows else None
            usable = outcome is not None and strategy.usable(outcome) and outcome.agreement != "inconclusive"
            known[key] = outcome.ratio or 0.0 if usable and outcome is not None else 0.0
        if play.share >= MOST_COST:
            study.stop()
        return known[key]

    study = optuna.create_study(
        direction="maximize", sampler=optuna.samplers.TPESampler(seed=play.lots.randrange(2**31), multivariate=True)
    )
    study.optimize(objective, n_trials=300)


PLAYERS: dict[str, Callable[[Play], None]] = {
    "flatout": ours, "random": at_random, "one at a time": one_at_a_time,
    "halving": successive_halving, "optuna TPE": tpe,
}  # fmt: skip


def played(grids: Sequence[Grid], num_draws: int) -> dict[str, Any]:
    """By player and grid the scores and shares of all draws."""
    rows: dict[str, Any] = {}
    for player, plays in PLAYERS.items():
        for grid in grids:
            found = []
            for draw in range(num_draws):
                lots = random.Random(f"{player} {grid.name} {draw}")
                play = Play(grid, lots)
                plays(play)
                found.append((play.score, play.share, len(play.trials), play.reached()))
            scores, shares, trials, reached = (list(part) for part in zip(*found, strict=True))
            low, high = (stats.quantile(sorted(scores), share) for share in (0.05, 0.95))
            rows.setdefault(player, {})[grid.name] = {
                "score": scores, "share": shares, "num_trials": trials,
                "share_until_enough": [share if math.isfinite(share) else None for share in reached],
                "median_score": median(scores), "median_share": median(shares), "score_5_95": [low, high],
            }  # fmt: skip
            print(
                f"{player:14} {grid.name:14} {median(scores):.3f} of the best, {100 * median(shares):.0f} % of the "
                f"cost; {100 * ENOUGH:.0f} % of the best after {100 * median(reached):.1f} % of it"
            )
    return rows


def main() -> None:
    """Play all, print a table, and keep what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=50)
    parser.add_argument("--grids", nargs="*", help="their files; all that are recorded")
    wanted = parser.parse_args()
    paths = [Path(path) for path in wanted.grids or sorted(RESULTS.glob("search_grid_*.json"))]
    grids = [Grid.read(path) for path in paths]
    sizes = {grid.name: {"sets": len(grid.rows), "best": grid.best, "cost_s": grid.whole_cost_s} for grid in grids}
    write("search_replay", {"grids": sizes, "draws": wanted.draws, "players": played(grids, wanted.draws)})


if __name__ == "__main__":
    main()
