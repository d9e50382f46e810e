"""What does a proof look like on a terminal? In: a `Proof`. Out: lines; nothing is computed here."""

from __future__ import annotations

from typing import Any

from flatout.equivalence import Equivalence
from flatout.plan import label
from flatout.proof import Aim, Proof, WholeRun, side_name
from flatout.report import words
from flatout.report.screen import Report, Screen, show
from flatout.stats import MIN_PAIRS, Comparison


def print_proof(proof: Proof) -> None:
    """Print on stdout."""
    show(Report(lambda screen: _compose(screen, proof)))


def _energy(screen: Screen, proof: Proof) -> None:
    why = next((run.why_no_energy for run in proof.runs if run.why_no_energy), "")
    if proof.energy is not None and proof.energy.num_pairs >= MIN_PAIRS:
        screen.say("energy", f"a whole run takes {_compared(proof.energy, 'less', 'more')}")
    elif why:
        screen.say("energy", f"not known: {why}", most=2)


def _compose(screen: Screen, proof: Proof) -> None:
    sides = "A/A: plain against plain" if proof.against_itself else f"plain and {label(proof.asked.levers)}"
    screen.say("", f"{proof.asked.script} · {_finished(proof)} · {sides}, by turns", indent=0)
    screen.blank()
    _table(screen, proof)
    screen.blank()
    screen.say("result", *verdict(proof))
    _times(screen, proof)
    _energy(screen, proof)
    for number, note in enumerate(proof.notes):
        screen.say("note" if number == 0 else "", (note, "yellow"), most=3)
    if proof.stopped:
        screen.say("stopped", proof.stopped + ("; the command below goes on" if proof.interrupted else ""))
    screen.say("seeds", _seeds(proof))
    screen.command("next", _next(proof))


def _finished(proof: Proof) -> str:
    """Of how many seeds both runs came to their end."""
    num = proof.time.num_pairs
    if num == 0:
        return "no seed with both runs"
    if proof.interrupted and num < proof.num_seeds:
        return f"{num} of {words.plural(proof.num_seeds, 'seed')}"
    return words.plural(num, "seed")


def _table(screen: Screen, proof: Proof) -> None:
    second = "again" if proof.against_itself else "under it"
    screen.row(f"{proof.asked.metric.name} of each run, and its wall time")
    screen.row(("seed", "bold"), f"{'plain':>13}{second:>13}{'difference':>13}{'plain took':>15}{second:>13}")
    sides = {(r.seed, r.side): r for r in proof.runs}
    for seed in sorted({r.seed for r in proof.runs}):
        plain, plan = sides.get((seed, "plain")), sides.get((seed, "plan"))
        screen.row(
            f"{seed:>4}{_value(plain):>13}{_value(plan):>13}{_difference(plain, plan):>13}"
            f"{_wall(plain):>15}{_wall(plan):>13}"
        )


def number(value: float | None) -> str:
    """A metric with five digits, which is what one compares by eye.

    >>> number(0.98163), number(1234.5678), number(float("inf")), number(None)
    ('0.98163', '1234.6', 'infinity', '')
    """
    if value is None:
        return ""
    return f"{value:.5g}" if words.known(value) else words.not_finite(value)


def _value(run: WholeRun | None) -> str:
    return "" if run is None else "failed" if run.problem else number(run.value)


def _difference(plain: WholeRun | None, plan: WholeRun | None) -> str:
    if plain is None or plan is None or plain.value is None or plan.value is None:
        return ""
    return _signed(plan.value - plain.value)


def _signed(difference: float) -> str:
    return "0" if difference == 0 else f"{difference:+.2g}" if words.known(difference) else ""


def _wall(run: WholeRun | None) -> str:
    return "" if run is None else words.duration(run.wall_s)


def verdict(proof: Proof) -> tuple[tuple[str, str], str]:
    """The verdict in one word, and the rest of the sentence."""
    found, name = proof.equivalence, proof.asked.metric.name
    seeds = words.plural(found.num_seeds, "seed")
    if found.verdict == "identical":
        losses = ", and so is every loss on the way" if proof.losses_equal else ""
        return ("equal", "bold green"), f": the same {name}, to the last digit, with all {seeds}{losses}"
    if found.verdict == "equivalent":
        return ("equivalent", "bold green"), f": {_between(found, name)}"
    if found.verdict == "different":
        return ("different", "bold red"), f": {found.reason or _between(found, name)}"
    if found.num_diverged:
        return ("nothing to compare", "bold yellow"), f": {found.reason}: {_MEND}"
    return ("not enough seeds to tell", "bold yellow"), f": {_undecided(proof)}"


_MEND = "mend the training first, or name another metric"


def _between(found: Equivalence, name: str) -> str:
    ends = f"[{number(found.low)}, {number(found.high)}]"
    return (
        f"{name} differs by {_signed(found.difference)} on average, 90 % interval {ends}; "
        f"nothing is said to change within ± {found.margin:.3g} ({found.margin_source})"
    )


def _undecided(proof: Proof) -> str:
    found = proof.equivalence
    if proof.seeds_ignored:
        first = next((r.value for r in proof.runs if r.side == "plain"), None)
        same = first is not None and {r.value for r in proof.runs} == {first}
        one = (
            f", on which {proof.asked.metric.name} is the same {side_name('plan', proof.asked.levers)}" if same else ""
        )
        return f"the script ignores seeds: plain runs of different ones computed the very same, so all are one run{one}"
    more = ""
    if found.more_seeds is not None:
        wanted = found.num_seeds + found.more_seeds
        more = f"; about {found.more_seeds:,} more would do"
        if not proof.interrupted or wanted > proof.num_seeds:
            more += f": `--seeds {wanted}` goes on from here"
    elif found.reason.startswith("the interval"):
        more = "; no reasonable number of them would: a wider `--margin`, perhaps"
    detail = f"; {_between(found, proof.asked.metric.name)}" if found.low == found.low else ""
    return f"{found.reason}{more}{detail}"


def _times(screen: Screen, proof: Proof) -> None:
    if proof.time.num_pairs < MIN_PAIRS:
        screen.say("time", f"compared from {MIN_PAIRS} seeds on")
    else:
        screen.say("time", f"a whole run {_compared(proof.time)}; its training steps {_compared(proof.training_time)}")
    if proof.target is not None:
        screen.say("target", _target(proof))


def _compared(found: Comparison, faster: str = "faster", slower: str = "slower") -> str:
    if not words.known(found.ratio):
        return f"not compared ({found.reason})"
    word = {"faster": faster, "slower": slower}.get(found.verdict, found.verdict)
    ends = words.interval(found.low, found.high)
    if found.verdict == "inconclusive" and not found.low <= 1 <= found.high and words.known(found.low99):
        ends += f", 99 % {words.interval(found.low99, found.high99)}"  # which decides
    return f"{words.ratio(found.ratio)}x {ends} {word}"


def _target(proof: Proof) -> str:
    plain, plan = proof.reached
    name = f"{proof.asked.metric.name} of at {'least' if proof.rising else 'most'} {number(proof.target)}"
    seeds = words.plural(proof.time.num_pairs, "seed")
    reached = f"{name} reached with {plain} and, {side_name('plan', proof.asked.levers)}, {plan} of {seeds}"
    if proof.target_time is None or proof.target_time.num_pairs < MIN_PAIRS:
        return f"{reached}; when, was seen too rarely to compare"
    return f"{reached}; until then {_compared(proof.target_time)}"


def _seeds(proof: Proof) -> str:
    if proof.asked.seed_option:
        return f"passed as `{proof.asked.seed_option}`"
    return "0 is the script's own; for each other one, what the script seeds torch, numpy and random with is replaced"


def _next(proof: Proof) -> str:
    found = proof.equivalence
    if proof.interrupted or found.num_diverged:
        return _prove(proof, proof.num_seeds)
    if proof.against_itself and (found.verdict != "undecided" or proof.seeds_ignored):
        return f"flatout tune {proof.asked.script}"
    if found.verdict in ("identical", "equivalent"):
        if "slower" in (proof.time.verdict, proof.training_time.verdict):
            return f"flatout tune {proof.asked.script}"
        return " ".join(filter(None, ("flatout run", proof.options, proof.asked.script)))
    if found.verdict == "different" or proof.seeds_ignored:
        return f"flatout tune --accept exact {proof.asked.script}"
    return _prove(proof, found.num_seeds + (found.more_seeds or 1))


def _prove(proof: Proof, num_seeds: int) -> str:
    options = " ".join(filter(None, (proof.options, proof.metric_options)))
    seeds = "" if num_seeds == Aim().num_seeds else f"--seeds {num_seeds}"
    return " ".join(filter(None, ("flatout prove", seeds, options, proof.asked.script)))


def summary_of(proof: Proof) -> dict[str, Any]:
    """The proof for programs."""
    found = proof.equivalence
    return {
        "script": proof.asked.script,
        "levers": proof.asked.levers,
        "metric": proof.asked.metric.name,
        "verdict": found.verdict,
        "equivalence": found,
        "time": proof.time,
        "training_time": proof.training_time,
        "target": proof.target,
        "target_time": proof.target_time,
        "reached": proof.reached,
        "energy": proof.energy,
        "seeds_ignored": proof.seeds_ignored,
        "notes": proof.notes,
        "stopped": proof.stopped,
        "runs": [
            {"seed": r.seed, "side": r.side, "value": r.value, "wall_s": r.wall_s, "problem": r.problem}
            for r in proof.runs
        ],
    }
