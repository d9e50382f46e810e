"""What changed between two runs, and what did not? Two results side by side, phase by phase.

In: two results, each with the raw samples of its run folder. Out: a `Contrast`. The runs were not measured in turn, so
everything is judged by `flatout.judge.stats.compare_unpaired`; and where machine, versions, script, arguments or
threads differ, the contrast says first that it is not like with like.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flatout.judge import stats
from flatout.judge.anatomy import AS_IT_COMES, Anatomy
from flatout.judge.result import Result
from flatout.judge.samples import Samples
from flatout.judge.stats import Comparison
from flatout.records.ceilings import differences
from flatout.records.facts import Facts
from flatout.records.plan import label
from flatout.records.trace import OUTSIDE, PHASES

FORMAT = 1  # 1: first version

BUSY = 0.1
"""Where others used more of the CPU than this share, times say as much about them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two runs.

    Attributes:
        run: Its folder.
        typed: The script and its arguments.
        created: When its result was made.
        command: `tune` or `why`.
        again: What to type to measure it once more, under the same terms.
        verdict: What `tune` came to; empty for `why`.
        binding: What binds.
        levers: The plan's levers; empty without a plan.
        foreign_fraction: CPU that others used; None where not observed.
        anatomy: The plain step, taken apart.
    """

    run: str
    typed: str
    created: str
    command: str
    again: str
    verdict: str
    binding: str
    levers: str
    foreign_fraction: float | None
    anatomy: Anatomy


@dataclass(frozen=True, slots=True, kw_only=True)
class Unlike:
    """Something besides time in which the two runs differ.

    Attributes:
        what: Which thing.
        first: What it was in the first run.
        second: What it was in the second.
        decisive: Whether the two are no longer like with like.
    """

    what: str
    first: str
    second: str
    decisive: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One time in both runs.

    Attributes:
        name: `step`, `with the plan`, or a phase.
        first_s: Seconds a step in the first run; None where it was not observed.
        second_s: The same in the second.
        difference_s: The second less the first; None where one of them was not observed.
        first_spread_fraction: Half the interquartile range of the samples over their median; NaN of fewer than two.
        second_spread_fraction: The same of the second.
        first_samples_s: The samples of the first run: windows, of a phase quarters of windows.
        second_samples_s: The same of the second.
        compared: The judgement; None where one of them was not observed, or where it lies between steps.
    """

    name: str
    first_s: float | None
    second_s: float | None
    difference_s: float | None
    first_spread_fraction: float
    second_spread_fraction: float
    first_samples_s: tuple[float, ...] = ()
    second_samples_s: tuple[float, ...] = ()
    compared: Comparison | None = None

    @property
    def verdict(self) -> str:
        """The verdict; `not observed` where one run did not see it, `not compared` for what lies between steps."""
        if self.compared is not None:
            return self.compared.verdict
        return "not compared" if self.name in OUTSIDE and self.difference_s is not None else "not observed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contrast:
    """Two runs side by side.

    Attributes:
        first: The earlier named.
        second: The later named; ratios say how many times as fast it is as the first.
        unlike: What differs besides time.
        step: The whole plain step.
        tuned_step: The step with each run's own plan; None unless both have one.
        phases: The plain step's phases, the largest first; those between steps last. `step` and these hold together:
            their intervals are widened for their number.
        not_observed: Phases that neither run could see.
        alike: Whether phases changed, and one factor lies in the interval of every phase that was judged.
        cautions: What the reader must know.
    """

    format: int
    first: Side
    second: Side
    unlike: tuple[Unlike, ...]
    step: Change
    tuned_step: Change | None
    phases: tuple[Change, ...]
    not_observed: tuple[str, ...]
    alike: bool
    cautions: tuple[str, ...]

    @property
    def like_with_like(self) -> bool:
        """Whether nothing decisive differs besides time, as far as is recorded."""
        return not any(one.decisive for one in self.unlike)


def contrast(first: Result, second: Result, first_samples: Samples, second_samples: Samples) -> Contrast:
    """Two results side by side, each with the samples of its run folder."""
    phases = _phases(first, second, first_samples, second_samples)
    windows = (first.baseline_window_step_s, second.baseline_window_step_s)
    step = _change("step", (_step_s(first), _step_s(second)), windows)
    return Contrast(
        format=FORMAT,
        first=_side(first),
        second=_side(second),
        unlike=unlike(first, second),
        step=step,
        tuned_step=_tuned(first, second),
        phases=phases,
        not_observed=tuple(name for name in first.anatomy.not_observed if name in second.anatomy.not_observed),
        alike=_alike(phases),
        cautions=_cautions(first, second, first_samples, second_samples),
    )


def summary_of(found: Contrast) -> dict[str, Any]:
    """What `--json` prints; raw samples apart, which `--export` gives."""
    return {
        "like_with_like": found.like_with_like,
        "unlike": [
            {"what": u.what, "first": u.first, "second": u.second, "decisive": u.decisive} for u in found.unlike
        ],
        "step": _entry(found.step),
        "tuned_step": None if found.tuned_step is None else _entry(found.tuned_step),
        "phases": {change.name: _entry(change) for change in found.phases},
        "not_observed": list(found.not_observed),
        "alike": found.alike,
        "cautions": list(found.cautions),
        "first": found.first.run,
        "second": found.second.run,
    }


def _entry(change: Change) -> dict[str, Any]:
    judged = change.compared
    return {
        "verdict": change.verdict,
        "first_s": _known(change.first_s),
        "second_s": _known(change.second_s),
        "difference_s": _known(change.difference_s),
        "ratio": _known(judged.ratio) if judged else None,
        "ratio_low": _known(judged.low) if judged else None,
        "ratio_high": _known(judged.high) if judged else None,
        "reason": judged.reason if judged else "",
    }


def _known(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# -- times ---------------------------------------------------------------------------------------------------------


def _step_s(result: Result) -> float | None:
    windows = [x for x in result.baseline_window_step_s if math.isfinite(x)]
    return stats.summarize(windows).median if windows else None


def _tuned(first: Result, second: Result) -> Change | None:
    if first.winner is None or second.winner is None:
        return None
    step_s = (1 / first.tuned_steps_per_s, 1 / second.tuned_steps_per_s)
    return _change("with the plan", step_s, (first.winner.candidate_step_s, second.winner.candidate_step_s))


def _phases(first: Result, second: Result, ours: Samples, theirs: Samples) -> tuple[Change, ...]:
    inside = list(dict.fromkeys([*first.anatomy.phases_s, *second.anatomy.phases_s]))
    anatomies = (first.anatomy, second.anatomy)
    sides = [anatomy.phases_s for anatomy in anatomies]
    known = first.flatout == second.flatout
    among = sum(all(name in side for side in sides) for name in inside)
    ordered = sorted(inside, key=lambda name: -max(_finite(side.get(name)) for side in sides))
    ordered.sort(key=lambda name: name == "unattributed")
    found = [
        _change(
            name,
            (_seen_s(first.anatomy, name, known=known), _seen_s(second.anatomy, name, known=known)),
            (_quarters(first, ours, name), _quarters(second, theirs, name)),
            among,
        )
        for name in ordered
    ]
    between = [name for name in OUTSIDE if any(name in one.outside_s for one in anatomies)]
    return (*found, *(_between(name, anatomies) for name in between))


def _seen_s(anatomy: Anatomy, name: str, *, known: bool = True) -> float | None:
    """Seconds a step: 0 where it was looked for and never came; None where it could not be seen.

    `known` says whether both runs looked for the same phases; if not, only those of the list are sure to have been.
    """
    sure = known or name in {*PHASES} - {*AS_IT_COMES}
    looked = sure and anatomy.num_windows > 0 and name not in anatomy.not_observed
    return {**anatomy.outside_s, **anatomy.phases_s}.get(name, 0.0 if looked else None)


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


def _between(name: str, anatomies: tuple[Anatomy, Anatomy]) -> Change:
    nan = float("nan")
    one, other = (_seen_s(anatomy, name) for anatomy in anatomies)
    return Change(
        name=name, first_s=one, second_s=other, first_spread_fraction=nan, second_spread_fraction=nan,
        difference_s=None if one is None or other is None else other - one,
    )  # fmt: skip


def _quarters(result: Result, samples: Samples, name: str) -> tuple[float, ...]:
    """Seconds of a phase in each quarter of each window that the anatomy was made of; of one window in the whole.

    Quarters of a single window say nothing of how windows differ.
    """
    windows = samples.calmest(result.anatomy.num_windows)
    parts = [part for window in windows for part in (window.quarters if len(windows) > 1 else (window.whole,))]
    return tuple(part.phases_s.get(name, 0.0) for part in parts)


def _change(
    name: str,
    step_s: tuple[float | None, float | None],
    samples_s: tuple[Sequence[float], Sequence[float]],
    among: int = 1,
) -> Change:
    first_s, second_s = step_s
    both = first_s is not None and second_s is not None
    return Change(
        name=name,
        first_s=first_s,
        second_s=second_s,
        difference_s=second_s - first_s if first_s is not None and second_s is not None else None,
        first_spread_fraction=_spread(samples_s[0]),
        second_spread_fraction=_spread(samples_s[1]),
        first_samples_s=tuple(samples_s[0]) if first_s is not None else (),
        second_samples_s=tuple(samples_s[1]) if second_s is not None else (),
        compared=stats.compare_unpaired(*samples_s, among=among) if both else None,
    )


def _spread(samples_s: Sequence[float]) -> float:
    fit = len(samples_s) > 1 and all(math.isfinite(x) and x > 0 for x in samples_s)
    return stats.summarize(samples_s).spread_fraction if fit else float("nan")


def _alike(phases: Sequence[Change]) -> bool:
    """A machine that runs at another speed changes every phase by one factor; another script hardly does."""
    judged = [c.compared for c in phases if c.compared is not None and math.isfinite(c.compared.ratio)]
    changed = [c for c in judged if c.verdict in ("faster", "slower")]
    return len(changed) > 1 and max(c.low for c in judged) <= min(c.high for c in judged)


# -- what differs besides time -------------------------------------------------------------------------------------


def unlike(first: Result, second: Result) -> tuple[Unlike, ...]:
    """What differs besides time: the machine, the versions, the script, its arguments, threads, what it does."""
    one, other = first.header, second.header
    rows = [
        *_machines(first, second),
        ("script", first.script, second.script, True),
        ("arguments", " ".join(one.arguments), " ".join(other.arguments), True),
        ("trained on", first.facts.device, second.facts.device, True),
        ("threads", str(first.facts.num_threads), str(second.facts.num_threads), True),
        ("ranks", str(one.world_size), str(other.world_size), True),
        ("framework", f"{one.framework} {one.framework_version}", f"{other.framework} {other.framework_version}", True),
        ("Python", one.python, other.python, True),
        ("flatout", first.flatout, second.flatout, True),
        *_deeds(first.facts, second.facts),
        ("what binds", first.diagnosis.binding, second.diagnosis.binding, False),
        ("plan", _side(first).levers, _side(second).levers, False),
    ]
    return tuple(
        Unlike(what=what, first=a or "none", second=b or "none", decisive=decisive)
        for what, a, b, decisive in rows
        if a != b
    )


_Row = tuple[str, str, str, bool]


def _machines(first: Result, second: Result) -> list[_Row]:
    here, there = first.machine, second.machine
    found: list[_Row] = [("host", here.hostname, there.hostname, here.machine_key() != there.machine_key())]
    for text in differences(here, there):  # `what: `now` here, `then` there`
        what, _, rest = text.partition(": ")
        now, _, then = rest.partition(" here, ")
        if what.startswith("CPU features only"):
            where = "first" if what.endswith("there") else "second"
            what, now, then = "CPU features", *((rest, "") if where == "second" else ("", rest))
        found.append((what, _bare(then.removesuffix(" there")), _bare(now), what not in ("C++ compiler",)))
    return found


def _bare(text: str) -> str:
    return text.strip("`")


def _deeds(first: Facts, second: Facts) -> list[_Row]:
    """What the script does in a step; other work is decisive, other settings are what one may have tuned."""

    def models(facts: Facts) -> str:
        return ", ".join(f"{m.name} ({m.num_parameters:,} parameters)" for m in facts.models)

    def optimizers(facts: Facts) -> str:
        return ", ".join(one.name for one in facts.optimizers)

    def loaders(facts: Facts) -> str:
        return ", ".join(f"{one.dataset}, batches of {one.batch_size}" for one in facts.loaders)

    def workers(facts: Facts) -> str:
        return ", ".join(str(one.num_workers) for one in facts.loaders)

    return [
        ("models", models(first), models(second), True),
        ("optimizers", optimizers(first), optimizers(second), True),
        ("data", loaders(first), loaders(second), True),
        ("loader workers", workers(first), workers(second), False),
        ("autocast", str(first.autocast).lower(), str(second.autocast).lower(), False),
    ]


def _side(result: Result) -> Side:
    return Side(
        run=result.run,
        typed=result.typed,
        again=f"{result.tune_command if result.command == 'tune' else 'flatout why'} {result.typed}",
        created=result.created,
        command=result.command,
        verdict=result.verdict if result.command == "tune" else "",
        binding=result.diagnosis.binding,
        levers=label(result.plan.levers) if result.plan is not None else "",
        foreign_fraction=result.foreign_fraction,
        anatomy=result.anatomy,
    )


def _cautions(first: Result, second: Result, ours: Samples, theirs: Samples) -> tuple[str, ...]:
    found = [
        "the two were not measured in turn: an interval says how surely these two measurements differ, not why, nor "
        "what a third would bring"
    ]
    if first.script == second.script:
        found.append("whether the text of the script is the same is not recorded")
    for name, result, samples in (("first", first, ours), ("second", second, theirs)):
        if (result.foreign_fraction or 0.0) > BUSY:
            share = 100 * (result.foreign_fraction or 0.0)
            found.append(f"others used {share:.0f} % of the CPU during the {name} run")
        found += [f"{name} run: {remark}" for remark in samples.remarks]
    return tuple(found)
