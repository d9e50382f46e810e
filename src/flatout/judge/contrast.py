"""What changed between two runs, and what did not? Two results side by side, phase by phase.

In: two results, each with the raw samples of its run folder. Out: a `Contrast`. The runs were not measured in turn, so
everything is judged by `flatout.judge.stats.compare_unpaired`; and where machine, versions, script, arguments or
threads differ, the contrast says first that it is not like with like.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.judge import stats
from flatout.judge.anatomy import Anatomy
from flatout.judge.result import Result
from flatout.judge.stats import Comparison
from flatout.judge.trace_windows import Samples
from flatout.records.ceilings import differences
from flatout.records.plan import label
from flatout.records.trace import OUTSIDE

BUSY = 0.1
"""Where others used more of the CPU than this share, times say as much about them."""

OTHER_LENGTH = 1.1
"""From this ratio on a step that was taken apart is no longer as long as one that was not."""


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
        compared: The judgement; None where one of them was not observed, or where it lies between steps.
    """

    name: str
    first_s: float | None
    second_s: float | None
    compared: Comparison | None = None

    @property
    def difference_s(self) -> float | None:
        """The second less the first; None where one of them was not observed."""
        return None if self.first_s is None or self.second_s is None else self.second_s - self.first_s

    @property
    def verdict(self) -> str:
        """The verdict; `not observed` where one run did not see it, `not compared` for what lies between steps."""
        if self.compared is not None:
            return self.compared.verdict
        return "not observed" if self.difference_s is None else "not compared"


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
        cautions: What the reader must know.
    """

    first: Result
    second: Result
    unlike: tuple[Unlike, ...]
    step: Change
    tuned_step: Change | None
    phases: tuple[Change, ...]
    not_observed: tuple[str, ...]
    cautions: tuple[str, ...]

    @property
    def like_with_like(self) -> bool:
        """Whether nothing decisive differs besides time, as far as is recorded."""
        return not any(one.decisive for one in self.unlike)


def contrast(first: Result, second: Result, first_samples: Samples, second_samples: Samples) -> Contrast:
    """Two results side by side, each with the samples of its run folder."""
    windows = (first.baseline_window_step_s, second.baseline_window_step_s)
    tuned = None
    if first.winner is not None and second.winner is not None:
        rates = (first.tuned_steps_per_s, second.tuned_steps_per_s)
        one_s, other_s = (1 / rate if rate > 0 else None for rate in rates)
        tuned = _change(
            "with the plan", (one_s, other_s), (first.winner.candidate_step_s, second.winner.candidate_step_s)
        )
    return Contrast(
        first=first,
        second=second,
        unlike=unlike(first, second),
        step=_change("step", (_median(windows[0]), _median(windows[1])), windows),
        tuned_step=tuned,
        phases=tuple(_phases((first.anatomy, second.anatomy), (first_samples, second_samples))),
        not_observed=tuple(name for name in first.anatomy.not_observed if name in second.anatomy.not_observed),
        cautions=tuple(_cautions((first, second), (first_samples, second_samples))),
    )


def summary_of(found: Contrast) -> dict[str, Any]:
    """What `--json` prints, as `flatout.records.as_json` writes it; raw samples apart, which `--export` gives."""
    return {
        "like_with_like": found.like_with_like,
        "unlike": found.unlike,
        "step": _entry(found.step),
        "tuned_step": None if found.tuned_step is None else _entry(found.tuned_step),
        "phases": {change.name: _entry(change) for change in found.phases},
        "not_observed": found.not_observed,
        "cautions": found.cautions,
        "first": found.first.run,
        "second": found.second.run,
    }


def _entry(change: Change) -> dict[str, Any]:
    judged = change.compared
    return {
        "verdict": change.verdict,
        "first_s": change.first_s,
        "second_s": change.second_s,
        "difference_s": change.difference_s,
        "ratio": judged.ratio if judged else None,
        "ratio_low": judged.low if judged else None,
        "ratio_high": judged.high if judged else None,
        "reason": judged.reason if judged else "",
    }


# -- times ---------------------------------------------------------------------------------------------------------


def _median(windows: Sequence[float]) -> float | None:
    known = [x for x in windows if math.isfinite(x)]
    return stats.summarize(known).median if known else None


def _phases(anatomies: tuple[Anatomy, Anatomy], samples: tuple[Samples, Samples]) -> Iterator[Change]:
    one, other = anatomies

    def order(name: str) -> tuple[bool, float]:
        values = (one.phases_s.get(name), other.phases_s.get(name))
        return name == "unattributed", -max(x if x is not None and math.isfinite(x) else 0.0 for x in values)

    among = sum(name in other.phases_s for name in one.phases_s)
    for name in sorted(dict.fromkeys([*one.phases_s, *other.phases_s]), key=order):
        samples_s = (_quarters(one, samples[0], name), _quarters(other, samples[1], name))
        yield _change(name, (_seen_s(one, name), _seen_s(other, name)), samples_s, among)
    for name in OUTSIDE:
        if name in one.outside_s or name in other.outside_s:
            yield Change(name=name, first_s=_seen_s(one, name), second_s=_seen_s(other, name))


def _seen_s(anatomy: Anatomy, name: str) -> float | None:
    """Seconds a step: 0 where it was looked for and never came; None where it could not be seen."""
    looked = anatomy.num_windows > 0 and name not in anatomy.not_observed
    return {**anatomy.outside_s, **anatomy.phases_s}.get(name, 0.0 if looked else None)


def _quarters(anatomy: Anatomy, samples: Samples, name: str) -> tuple[float, ...]:
    """Seconds of a phase in each quarter of each window that the anatomy was made of; of one window in the whole.

    Quarters of a single window say nothing of how windows differ.
    """
    windows = samples.calmest(anatomy.num_windows)
    parts = [part for window in windows for part in (window.quarters if len(windows) > 1 else (window.whole,))]
    return tuple(part.phases_s.get(name, 0.0) for part in parts)


def _change(
    name: str,
    step_s: tuple[float | None, float | None],
    samples_s: tuple[Sequence[float], Sequence[float]],
    among: int = 1,
) -> Change:
    return Change(
        name=name,
        first_s=step_s[0],
        second_s=step_s[1],
        compared=None if None in step_s else stats.compare_unpaired(*samples_s, among=among),
    )


# -- what differs besides time -------------------------------------------------------------------------------------


def unlike(first: Result, second: Result) -> tuple[Unlike, ...]:
    """What differs besides time: the machine, the versions, the script, its arguments, threads, what it does.

    Other work is decisive, other settings are what one may have tuned.
    """
    here, there = first.machine, second.machine
    found = [*_machine(first, second)]
    if here.hostname != there.hostname:
        decisive = here.machine_key() != there.machine_key()
        found.insert(0, Unlike(what="host", first=here.hostname, second=there.hostname, decisive=decisive))
    one, other = _deeds(first), _deeds(second)
    found += [
        Unlike(what=what, first=one[what] or "none", second=other[what] or "none", decisive=what not in _TUNED)
        for what in one
        if one[what] != other[what]
    ]
    return tuple(found)


_TUNED = ("loader workers", "autocast", "what binds", "plan")


def _machine(first: Result, second: Result) -> Iterator[Unlike]:
    for text in differences(first.machine, second.machine):  # `what: `now` here, `then` there`
        what, _, values = text.partition(": ")
        now, _, then = values.partition(" here, ")
        if what.startswith("CPU features only"):
            now, then = ("", now) if what.endswith("there") else (now, "")
            what = "CPU features"
        then, now = (value.removesuffix(" there").strip("`") or "none" for value in (then, now))
        yield Unlike(what=what, first=then, second=now, decisive=what != "C++ compiler")


def _deeds(result: Result) -> dict[str, str]:
    """What was run, and what the script does in a step."""
    header, facts = result.header, result.facts
    return {
        "script": result.script,
        "arguments": " ".join(header.arguments),
        "trained on": facts.device,
        "threads": str(facts.num_threads),
        "ranks": str(header.world_size),
        "framework": f"{header.framework} {header.framework_version}",
        "Python": header.python,
        "flatout": result.flatout,
        "models": ", ".join(
            f"{one.name} ({one.num_parameters:,} parameters{'' if one.trained else ', not trained'})"
            for one in facts.models
        ),
        "optimizers": ", ".join(one.name for one in facts.optimizers),
        "data": ", ".join(f"{one.dataset}, batches of {one.batch_size}" for one in facts.loaders),
        "loader workers": ", ".join(str(one.num_workers) for one in facts.loaders),
        "autocast": str(facts.autocast).lower(),
        "what binds": result.diagnosis.binding,
        "plan": label(result.plan.levers) if result.plan is not None else "",
    }


def _cautions(results: tuple[Result, Result], samples: tuple[Samples, Samples]) -> Iterator[str]:
    yield (
        "the two were not measured in turn: an interval says how surely these two measurements differ, not why, nor "
        "what a third would bring"
    )
    if results[0].script == results[1].script:
        yield "whether the text of the script is the same is not recorded"
    for name, result, gathered in zip(("first", "second"), results, samples, strict=True):
        if (share := result.foreign_fraction or 0.0) > BUSY:
            yield f"others used {100 * share:.0f} % of the CPU during the {name} run"
        step_s, apart_s = _median(result.baseline_window_step_s) or math.nan, result.anatomy.step_s
        if step_s > 0 and not 1 / OTHER_LENGTH <= apart_s / step_s <= OTHER_LENGTH and math.isfinite(apart_s / step_s):
            yield (
                f"phases of the {name} run were timed in windows of their own, in which a step took "
                f"{1e3 * apart_s:.3g} instead of {1e3 * step_s:.3g} ms"
            )
        yield from (f"{name} run: {remark}" for remark in gathered.remarks)
