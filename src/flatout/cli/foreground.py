"""What does flatout say around a run? One line before and one after, on stderr. In: the request. Out: the exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from flatout import api
from flatout.cli.options import behind_the_script
from flatout.errors import UsageError
from flatout.judge import stats
from flatout.records import output_file
from flatout.records.plan import label
from flatout.run.controller import untoggled
from flatout.run.exit_status import leave_as
from flatout.run.monitor import DUE
from flatout.run.outcome import Outcome
from flatout.run.script import Script

if TYPE_CHECKING:
    from flatout.trials.learn import Learned

WORTH_SAYING_S, WORTH_SAYING_SHARE = 1.0, 0.1
"""Shorter trainings, and smaller differences between ranks, tell nothing about exchanges."""

MOST_LINES = 30
"""So much of what a failed rank said is shown."""

MOST_CHANGES = 4
"""So many of the changes on the way are said one by one."""


def run_in_foreground(request: api.RunRequest, *, json_file: Path | None, quiet: bool, verbose: bool = False) -> None:
    """Run, say what there is to say, and end as the script ended, whatever becomes of the saying."""

    def say(line: str) -> None:
        if not quiet:
            talk(line)

    ran = _rechecked(request, say, quiet=quiet) if request.recheck else api.run(request, say)
    try:
        for rank, frames in ran.outcome.stacks.items():
            stands = ", the innermost call first:" if frames else " does not say where it is"
            say("\n  ".join([f"rank {rank}{stands}", *frames[:MOST_LINES]]))
        if ran.outcome.failed_rank is not None:  # what it said nobody has heard
            rank, how, said = ran.outcome.failed_rank
            lines = said.splitlines()[-MOST_LINES:]
            say("\n  ".join([f"rank {rank} {how}{':' if lines else ''}", *lines]))
        say(closing_line(ran) + misplaced(request.script, ran.outcome.exit_code))
        for remark in [*ran.outcome.remarks, *(ran.outcome.details if verbose else [])]:
            say(remark)
        if json_file is not None:
            write_summary(json_file, ran)
    except BaseException as problem:  # noqa: BLE001  the script's own status is what counts, Ctrl-C here or not
        talk(f"no summary: {type(problem).__name__}: {problem}")
    if ran.outcome.ranks_problem is not None:
        raise ran.outcome.ranks_problem
    leave_as(ran.outcome.exit_code)


def _rechecked(request: api.RunRequest, say: Callable[[str], None], *, quiet: bool) -> api.Ran:
    """Run, with what only a recheck needs: it may take a minute, in which children are at work."""
    from flatout.cli.progress import Progress, end_children_when_told_to_end

    end_children_when_told_to_end()
    progress = Progress()
    show = api.Show(stage=progress.show.stage, tick=progress.show.tick, remark=progress.show.remark)

    def say_in_its_place(line: str) -> None:
        progress.clear()
        say(line)

    return api.run(request, say_in_its_place, None if quiet or not sys.stderr.isatty() else show)


def misplaced(script: Script | None, exit_code: int) -> str:
    """That an option of this command stood behind the script, which failed: then the script got it."""
    if script is None or not exit_code:
        return ""
    found = behind_the_script(
        click.get_current_context().command, script.arguments, Path(script.path) if script.path else None
    )
    return f"; {found}" if found else ""


def talk(text: str) -> None:
    """A line or some on stderr, where there is one that can be written."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print("\n".join(f"flatout: {line}" for line in text.splitlines()), file=sys.stderr, flush=True)


def write_summary(path: Path, ran: api.Ran) -> None:
    """Write what was measured as JSON; a file that cannot be written is said, also to those who want quiet.

    The script may have written a file of that name meanwhile, and keeps it.
    """
    try:
        output_file.check(path, output_file.SUMMARY, option="--json")
        output_file.write_whole([json.dumps(run_summary(ran)) + "\n"], path)
    except OSError as problem:
        talk(f"cannot write `{path}`: {problem.strerror or problem}")
    except UsageError as problem:
        talk(f"no summary: {problem.error}: {problem.cause}")


def closing_line(ran: api.Ran) -> str:
    """What was measured, in one line, and which levers were at work, where some were not."""
    outcome = ran.outcome
    if not outcome.recorded:
        return "nothing was recorded"
    if not outcome.num_steps:
        seen = (
            "training began, and ended before its steps were counted" if outcome.began else "no training step was seen"
        )
        return seen + _failed(outcome)
    least = "" if outcome.ended else "at least "
    kind = "ranks" if ran.num_ranks > 1 else "processes"
    are_elsewhere = ran.num_ranks > max(outcome.num_processes, 1)  # some, on other machines
    of_all = f" of {ran.num_ranks}" if are_elsewhere else ""
    who = f"{outcome.num_processes}{of_all} {kind}, " if outcome.num_processes > 1 or of_all else ""
    steps = f"{who}{least}{outcome.num_steps:,} step{'s' * (outcome.num_steps != 1)}"
    if outcome.steps_s:
        steps += f" in {outcome.steps_s:.3g} s" if outcome.steps_s < 100 else f" in {outcome.steps_s:,.0f} s"
    if outcome.energy.joules is not None:
        from flatout.report import words  # the script has ended: before it started, this would have cost it time

        steps += f", {words.joules(outcome.energy.joules)} for all of the run"
    steps += _exchanges(outcome)
    said = f"{steps}{_measured(ran)}{_learned(ran)}{_changed(outcome)}{_at_work(ran)}{_failed(outcome)}{_raised(ran)}"
    if outcome.facts is None or not outcome.facts.infers:
        return said
    from flatout.report.words import in_calls  # as above

    return in_calls(said)


def _exchanges(outcome: Outcome) -> str:
    """What exchanging cost, and who kept the others waiting."""
    found = outcome.exchanges
    if found is None or found.training_s < WORTH_SAYING_S:
        return ""
    late = found.most_share - found.least_share
    waited = (
        f"; others waited {100 * late:.0f} % of it for rank {found.waited_for}" if late > WORTH_SAYING_SHARE else ""
    )
    from flatout.report import words  # as above

    held = f", up to {words.memory(found.memory_bytes)} held by a rank" if found.memory_bytes else ""
    most = [f"{name} {100 * part:.0f} %" for name, part in found.kinds.items() if part >= WORTH_SAYING_SHARE][:3]
    of_which = f" ({', '.join(most)})" if most else ""
    return f", {100 * found.least_share:.0f} % of the time in exchanges{of_which}{waited}{held}"


def _at_work(ran: api.Ran) -> str:
    """Which levers work here, where some do not or bring nothing, and why."""
    if not ran.inapplicable:
        return ""
    working = [name for name in ran.engagement.levers if name not in ran.inapplicable]
    working += [f"{name} ({done})" for name, done in ran.in_part.items()]
    text = f"\n  at work: {', '.join(working) or 'none'}"
    for is_useless, head in ((True, "at work, with nothing to be gained"), (False, "not at work, or not as a whole")):
        by_reason: dict[str, list[str]] = {}
        for name, why in ran.inapplicable.items():
            if (name in ran.useless) is is_useless:
                by_reason.setdefault(why, []).append(name)
        if by_reason:
            text += f"\n  {head}: " + "; ".join(f"{why}: {', '.join(names)}" for why, names in by_reason.items())
    return text


def _changed(outcome: Outcome) -> str:
    """What was released on the way, and engaged again."""
    changes = [decision for decision in outcome.decisions if decision.kind != "kept"]
    lines = []
    for one in changes[:MOST_CHANGES]:
        pairs = f"{one.num_pairs} pair{'s' * (one.num_pairs != 1)} of windows"
        pace = "" if one.ratio is None else f", {one.ratio:.2f}x in {pairs}"
        seen = "; ".join(text for text in (one.why if one.why != DUE else "", one.beside) if text)
        lines.append(f"\n  from step {one.num_steps:,} on {one.kind}{pace}" + (f" ({seen})" if seen else ""))
    if len(changes) > MOST_CHANGES:
        lines.append(f"\n  and {len(changes) - MOST_CHANGES} changes more, which the trace has")
    return "".join(lines)


def _learned(ran: api.Ran) -> str:
    """What the run has found out about itself."""
    if not ran.learning:
        return ""
    found = ran.outcome.learned
    if found is None:
        return "; it ended before it had learned anything"
    tried = (
        f"{len(found.trials)} set{'s' * (len(found.trials) != 1)} of levers tried in {found.took_s:.0f} s of training"
    )
    if not found.levers:
        return f"; {tried}: nothing helps" + (f" ({found.stopped})" if found.stopped else "")
    ratio = next((trial.ratio for trial in found.trials if trial.levers == found.levers), None)
    brings = "" if ratio is None else f" {ratio:.2f}x when it was tried"
    end = "engaged to the end" if ran.outcome.is_engaged else "released again"
    chosen = f"{tried}, which cost {found.lost_s:.0f} s of it: {label(found.levers)}{brings}, {end}"
    return f"\n  {chosen}" + (f"\n  not all was tried: {found.stopped}" if found.stopped else "")


def _measured(ran: api.Ran) -> str:
    outcome = ran.outcome
    if not ran.levers:
        return ""
    if not outcome.engaged:
        broke = any(failure.stage in ("engage", "release", "step") for failure in outcome.failures)
        return "; the levers were released" if broke else "; ended before the levers were engaged"
    held = untoggled(ran.levers, ran.registry)
    compared = stats.compare(outcome.plain_s, outcome.plan_s) if outcome.plain_s else None
    if compared is None or not math.isfinite(compared.ratio):
        plan = None if ran.is_idle else ran.engagement.plan
        if outcome.num_busy > len(outcome.plan_s):
            return "; not checked: other processes used the CPU"
        why = "its levers cannot be toggled within a run"
        if ran.num_ranks > 1:
            why = "ranks toggle nothing, for they would wait for each other"
        elif held != ran.levers:
            why = "nothing is toggled" if ran.fixed else "the run was too short"
        return f"; not checked: {why}" if plan is None else f"; rests on the recorded {plan.ratio:.2f}x: {why}"
    toggled = ", ".join(name for name in ran.levers if name not in held) if held else "the plan"
    interval = f"{compared.ratio:.2f}x [{compared.low:.2f}, {compared.high:.2f}]"
    if outcome.released:
        return f"; {toggled} made it slower here, {interval} against its own plain windows, and was released"
    kept = "; perhaps slower, but not surely: it was kept" if compared.high < 1 else ""
    if not held:
        return f", {interval} against its own plain windows{kept}"
    return f"; {toggled} {interval} in its own windows, {', '.join(held)} as recorded{kept}"


def _failed(outcome: Outcome) -> str:
    if not outcome.failures:
        return ""
    first = outcome.failures[0]
    if first.error == "SetAsideError":
        return f"\n  a loader was left to the script's own way: {first.message}"
    return f"; {first.stage} failed, running on without: {first.error}: {(first.message.splitlines() or [''])[0][:100]}"


def _raised(ran: api.Ran) -> str:
    """That memory ran out, or that the script raised, under levers, which may be the reason, and what to type."""
    if ran.levers and ran.outcome.out_of_memory:
        names = [name for name in ran.levers if ran.registry[name].takes_memory] or [*ran.levers]
        return f"\n  out of memory under levers: `flatout tune --without {','.join(names)}` plans without"
    raised = ran.outcome.raised
    if raised is None or raised.error == "KeyboardInterrupt" or not ran.outcome.is_engaged:
        return ""
    return (
        f"\n  it raised {raised.error} under {label(ran.engagement.levers)}: `--levers none` tells whether plain does"
    )


def _learned_summary(found: Learned) -> dict[str, object]:
    return {
        "levers": {name: dict(settings) for name, settings in found.levers.items()},
        "steps": found.num_steps,
        "took_s": found.took_s,
        "lost_s": found.lost_s,
        "stopped": found.stopped,
        "trials": [
            {"levers": t.label, "outcome": t.outcome, "ratio": t.ratio, "agreement": t.agreement, "reason": t.reason}
            for t in found.trials
        ],
    }


def run_summary(ran: api.Ran) -> dict[str, object]:
    """What `--json FILE` holds."""
    outcome = ran.outcome
    compared = stats.compare(outcome.plain_s, outcome.plan_s) if outcome.plain_s else None
    known = compared if compared is not None and math.isfinite(compared.ratio) else None
    return {
        "exit_code": outcome.exit_code,
        "steps": outcome.num_steps,
        "steps_s": outcome.steps_s,
        "levers": list(ran.levers),
        "engaged": outcome.is_engaged,
        "released": outcome.released,
        "decisions": [
            {"kind": d.kind, "step": d.num_steps, "ratio": d.ratio, "pairs": d.num_pairs, "why": d.why,
             "beside": d.beside}
            for d in outcome.decisions
        ],
        "looking_s": outcome.looking_s,
        "learned": None if outcome.learned is None else _learned_summary(outcome.learned),
        "inapplicable": dict(ran.inapplicable),
        "ratio": known.ratio if known else None,
        "ratio_low": known.low if known else None,
        "ratio_high": known.high if known else None,
        "joules": outcome.energy.joules,
        "exchanges": None if outcome.exchanges is None else dataclasses.asdict(outcome.exchanges),
        "remarks": list(outcome.remarks),
        "processes": max(outcome.num_processes, 1),
        "run": ran.run,
    }  # fmt: skip
