"""What does a conducted `tune` or `why` come to? The verdict, the plan and the record of all that was measured.

In: a `Conduct` that is done. Out: its `Result`.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from flatout import __version__
from flatout.frameworks.lever import input_levers
from flatout.judge import stats
from flatout.judge.result import FORMAT, Result, TimelineStep
from flatout.records.ceilings import Machine
from flatout.records.plan import PLAN_FORMAT, Plan, Trial, label
from flatout.records.trace import FOREIGN_LIMIT, Header, Window
from flatout.trials.conduct import Conduct


def result_of(conduct: Conduct) -> Result:
    """Everything that was found."""
    bench = conduct.bench
    assert bench.facts is not None and bench.header is not None
    assert conduct.plain.diagnosis is not None
    won = conduct.final if conduct.final is not None and conduct.final.is_won else None
    baseline = won.baseline_step_s if won else tuple(w.compared_s for w in conduct.plain.baseline)
    summary = stats.summarize(baseline)
    baseline_step_s = summary.median
    tuned_step_s = baseline_step_s / won.ratio if won and won.ratio else baseline_step_s
    seen = [w for _, w in bench.windows]
    foreign = [w.foreign_fraction for w in seen if w.foreign_fraction is not None]
    saved_s = baseline_step_s - tuned_step_s
    speeds = 1 / baseline_step_s, 1 / tuned_step_s
    typed, run = (conduct.script.name, conduct.script.arguments), str(conduct.run_folder)
    plan = None
    if won is not None and won.levers:
        plan = plan_of(won, typed, bench.header, conduct.machine, steps_per_s=speeds, run=run)
    return Result(
        format=FORMAT, command=conduct.command, flatout=__version__,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), script=conduct.script.name,
        typed=conduct.script.typed, header=bench.header, machine=conduct.machine, facts=bench.facts,
        anatomy=conduct.plain.anatomy, diagnosis=conduct.plain.diagnosis, noise=conduct.plain.noise,
        baseline_steps_per_s=speeds[0],
        baseline_spread_fraction=summary.spread_fraction if summary.num > 1 else float("nan"),
        baseline_window_step_s=baseline, verdict=_verdict(conduct, won), tuned_steps_per_s=speeds[1],
        tuning_s=conduct.budget.spent_s, ceilings=conduct.plain.ceilings, census=conduct.plain.census,
        reads=conduct.plain.reads, profiled=conduct.plain.profiled,
        tuned_anatomy=conduct.tuned_anatomy, trials=tuple(conduct.trials),
        untried=tuple(conduct.untried), remeasured=conduct.final, input_trial=_input_trial(conduct),
        break_even_steps=math.ceil(conduct.budget.spent_s / saved_s) if saved_s > 0 else None,
        goal="latency" if any(w.goal == "latency" for w in seen) else "throughput",
        steps_in_run=bench.longest_run_steps, foreign_fraction=sum(foreign) / len(foreign) if foreign else None,
        refused=tuple(bench.refused), written=tuple(bench.written),
        isolation="namespaces with overlays" if conduct.goal.terms.isolate else "none (`--allow-writes`)",
        warnings=_warnings(bench.warnings, foreign) + _gpu_warnings(seen),
        timeline=tuple(_timeline(bench.windows)), plan=plan, run=run,
        stopped=conduct.stopped, short_budget_s=conduct.short_budget_s, asked_budget_s=conduct.goal.budget_s,
        energy=conduct.joules.summary(conduct.final),
    )  # fmt: skip


def _warnings(said: Iterable[str], foreign: Sequence[float]) -> tuple[str, ...]:
    """What was said on the way, and that the machine was busy, where nobody has said so yet."""
    mean = sum(foreign) / len(foreign) if foreign else 0.0
    if mean <= FOREIGN_LIMIT or any("kept the machine busy" in warning for warning in said):
        return tuple(said)
    return (
        f"others used {100 * mean:.0f} % of the CPU meanwhile: what binds may read otherwise when they do not",
        *said,
    )


def _gpu_warnings(windows: Sequence[Window]) -> tuple[str, ...]:
    """What the driver has said of the GPU meanwhile, where it makes times mean less."""
    found = []
    used = [w.foreign_gpu_fraction for w in windows if w.foreign_gpu_fraction is not None]
    if used and sum(used) / len(used) > FOREIGN_LIMIT:
        found.append(f"others used {100 * sum(used) / len(used):.0f} % of the GPU meanwhile")
    held = [w for w in windows if w.gpu_held_back]
    if held:
        reasons = ", ".join(dict.fromkeys(reason for w in held for reason in w.gpu_held_back))
        seen = sum(w.gpu_clock_mhz is not None for w in windows)
        found.append(
            f"the GPU's clock was held back in {len(held)} of {seen} windows ({reasons}): a long run may be slower"
        )
    return tuple(found)


def _verdict(conduct: Conduct, won: Trial | None) -> Literal["faster", "no difference", "inconclusive"]:
    if won is not None:
        return "faster"
    if conduct.final is not None:
        return "no difference" if conduct.final.outcome == "no difference" else "inconclusive"
    # Nothing came near a gain: the trials themselves say whether that is known.
    unclear = [t for t in conduct.trials if _may_gain(t)]
    quiet = conduct.plain.noise is not None and conduct.plain.noise.verdict == "no difference"
    known = quiet and not unclear and conduct.screened.is_settled
    return "no difference" if known and not conduct.stopped else "inconclusive"


def _input_trial(conduct: Conduct) -> Trial | None:
    """The fastest trial of nothing but levers for the input; the one that was measured again where there is one.

    None where none of them brings anything alone, but the winner has one beside others.
    """
    names = {*input_levers(conduct.levers)}
    found = [t for t in conduct.trials if t.levers and {*t.levers} <= names and t.ratio is not None]
    best = max(
        (t for t in found if t.outcome not in ("disagrees", "failed")), key=lambda t: t.ratio or 0.0, default=None
    )
    final = conduct.final
    if best is None or final is None:
        return best
    if final.levers == best.levers:
        return final
    mixed = final.is_won and names & {*final.levers}
    return None if mixed and (best.ratio or 0.0) <= 1 else best


def _may_gain(trial: Trial) -> bool:
    """Whether a trial leaves open that its levers help: its ratio is not known well enough, or its numbers are not."""
    if trial.outcome == "faster":
        return trial.agreement != "agrees"
    return trial.outcome == "inconclusive" and (trial.ratio_high or 9.0) > 1 + stats.NEGLIGIBLE


def plan_of(
    won: Trial, script: tuple[str, tuple[str, ...]], header: Header, machine: Machine, *,
    steps_per_s: tuple[float, float], run: str,
) -> Plan:  # fmt: skip
    """What a winner becomes.

    Args:
        won: It, whose ratio and interval are known.
        script: Its name and arguments.
        header: Of the process that was measured.
        machine: Where.
        steps_per_s: Plain, and under the plan.
        run: The run folder.
    """
    assert won.ratio is not None and won.ratio_low is not None and won.ratio_high is not None
    return Plan(
        format=PLAN_FORMAT, flatout=__version__, script=script[0], arguments=script[1], levers=won.levers,
        ratio=won.ratio, ratio_low=won.ratio_low, ratio_high=won.ratio_high, num_pairs=won.num_pairs,
        agreement=f"{won.class_}: {won.agreement_detail}", class_=won.class_,
        baseline_steps_per_s=steps_per_s[0], tuned_steps_per_s=steps_per_s[1],
        machine=machine, python=header.python, framework=header.framework, framework_version=header.framework_version,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), run=run,
    )  # fmt: skip


def plan_to_change_nothing(found: Result, script: tuple[str, tuple[str, ...]]) -> Plan:
    """What a search without a winner becomes: `run` accepts it, and the next reader knows what was tried.

    Args:
        found: The result.
        script: Its name and arguments.
    """
    tried = ", ".join(dict.fromkeys(trial.label for trial in found.trials if trial.levers)) or "nothing"
    nothing = Trial(
        levers={}, outcome=found.verdict, ratio=1.0, ratio_low=1.0, ratio_high=1.0,
        agreement_detail="nothing is changed",
    )  # fmt: skip
    speeds = found.baseline_steps_per_s, found.baseline_steps_per_s
    plan = plan_of(nothing, script, found.header, found.machine, steps_per_s=speeds, run=found.run)
    return replace(plan, created=found.created, reason=f"{found.verdict}; tried: {tried}")


def _timeline(windows: list[tuple[str, Window]]) -> list[TimelineStep]:
    found: list[TimelineStep] = []
    offset_s, child, now_s = 0.0, "", 0.0
    for name, window in windows:
        if name != child:  # a new child begins its clock anew: put it behind the former one
            offset_s, child = now_s, name
        now_s = offset_s + window.start_s
        calls_s = window.call_s if len(window.call_s) == len(window.step_s) else (None,) * len(window.step_s)
        for step_s, outside_s, call_s in zip(window.step_s, window.outside_s, calls_s, strict=True):
            found.append(TimelineStep(
                start_s=now_s, step_s=step_s, outside_s=outside_s, group=window.purpose, label=label(window.levers),
                call_s=call_s,
            ))  # fmt: skip
            now_s += step_s
    return found
