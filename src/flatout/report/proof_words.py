"""What is said of a proof? The verdict, what became of time and energy, and what to type next.

In: a `Proof`. Out: words, the same for the terminal and the page.
"""

from __future__ import annotations

from flatout.judge.equivalence import Equivalence
from flatout.judge.proof import NOT_AT_WORK, Aim, Proof, side_name
from flatout.judge.stats import MIN_PAIRS, Comparison
from flatout.report import words


def finished(proof: Proof) -> str:
    """Of how many seeds both runs came to their end."""
    num = proof.time.num_pairs
    if num == 0:
        return "no seed with both runs"
    if proof.interrupted and num < proof.num_seeds:
        return f"{num} of {words.plural(proof.num_seeds, 'seed')}"
    return words.plural(num, "seed")


def number(value: float | None) -> str:
    """A metric with five digits, which is what one compares by eye.

    >>> number(0.98163), number(1234.5678), number(float("inf")), number(None)
    ('0.98163', '1234.6', 'infinity', '')
    """
    if value is None:
        return ""
    return f"{value:.5g}" if words.known(value) else words.not_finite(value)


def signed(value: float) -> str:
    """A difference with its sign."""
    return "0" if value == 0 else f"{value:+.2g}" if words.known(value) else ""


def verdict(proof: Proof) -> tuple[str, str]:
    """The verdict in a word or a few, and the rest of the sentence."""
    found, name = proof.equivalence, proof.asked.metric.name
    if found.verdict == "identical":
        seeds = words.plural(found.num_seeds, "seed")
        losses = ", and so is every loss on the way" if proof.losses_equal else ""
        return "equal", f": the same {name}, to the last digit, with all {seeds}{losses}"
    if found.verdict == "equivalent":
        return "equivalent", f": {_between(found, name)}"
    if found.verdict == "different":
        return "different", f": {found.reason or _between(found, name)}"
    if found.reason.startswith(NOT_AT_WORK):
        return "nothing was proved", f": {found.reason}"
    if found.num_diverged:
        return "nothing to compare", f": {found.reason}: mend the training first, or name another metric"
    return "not enough seeds to tell", f": {_ignored(proof) if proof.seeds_ignored else _undecided(proof)}"


def _between(found: Equivalence, name: str) -> str:
    return (
        f"{name} differs by {signed(found.difference)} on average, 90 % interval [{signed(found.low)}, "
        f"{signed(found.high)}]; nothing is said to change within ± {found.margin:.3g} ({found.margin_source})"
    )


def _undecided(proof: Proof) -> str:
    found = proof.equivalence
    more = ""
    if found.more_seeds is not None:
        wanted = found.num_seeds + found.more_seeds
        more = f"; about {found.more_seeds:,} more would do"
        if not proof.interrupted or wanted > proof.num_seeds:
            more += f": `--seeds {wanted}` goes on from here"
    elif found.reason.startswith("the interval"):
        more = "; no reasonable number of them would: a wider `--margin`, perhaps"
    detail = f"; {_between(found, proof.asked.metric.name)}" if words.known(found.low) else ""
    return f"{found.reason}{more}{detail}"


def _ignored(proof: Proof) -> str:
    """That seeds make no difference, what one seed says nevertheless, and what could be done about it."""
    same = len({run.value for run in proof.runs}) == 1
    told = f"; {side_name('plan', proof.asked.levers)} it has the same {proof.asked.metric.name}" if same else ""
    option = proof.asked.seed_option
    mend = f"`{option}` changes nothing in it" if option else "`--seed-option` names its own option, if it has one"
    return f"the script ignores seeds: its runs are the very same with each, so there is one to judge{told}; {mend}"


def time(proof: Proof) -> str:
    """What became of the wall time."""
    if proof.time.num_pairs >= MIN_PAIRS:
        return f"a whole run {_compared(proof.time)}; its training steps {_compared(proof.training_time)}"
    seen = _ratios(proof)
    first = (
        f"{words.interval(min(seen), max(seen))} as fast in {words.plural(len(seen), 'whole run')}, " if seen else ""
    )
    return f"{first}compared from {MIN_PAIRS} seeds on"


def _ratios(proof: Proof) -> list[float]:
    """How many times as fast whole runs were, seed by seed."""
    pairs = [(a, b) for _, a, b in proof.by_seed() if a is not None and b is not None]
    return [a.wall_s / b.wall_s for a, b in pairs if not (a.problem or b.problem) and a.wall_s and b.wall_s]


def energy(proof: Proof) -> str:
    """What became of the energy; empty where that is not known."""
    if proof.energy is None or proof.energy.num_pairs < MIN_PAIRS:
        return ""
    return f"a whole run takes {_compared(proof.energy, 'less', 'more')}"


def _compared(found: Comparison, faster: str = "faster", slower: str = "slower") -> str:
    if not words.known(found.ratio):
        return f"not compared ({found.reason})"
    word = {"faster": faster, "slower": slower}.get(found.verdict, found.verdict)
    ends = words.interval(found.low, found.high)
    if found.verdict == "inconclusive" and not found.low <= 1 <= found.high and words.known(found.low99):
        ends += f", 99 % {words.interval(found.low99, found.high99)}"  # which decides
    return f"{words.ratio(found.ratio)}x {ends} {word}"


def target(proof: Proof) -> str:
    """With how many seeds the target was reached, and what became of the time to it; empty without one."""
    if proof.target is None:
        return ""
    plain, plan = proof.reached
    name = f"{proof.asked.metric.name} of at {'least' if proof.rising else 'most'} {number(proof.target)}"
    seeds = words.plural(proof.time.num_pairs, "seed")
    reached = f"{name} reached with {plain} and, {side_name('plan', proof.asked.levers)}, {plan} of {seeds}"
    if proof.target_time is None or proof.target_time.num_pairs < MIN_PAIRS:
        return f"{reached}; when, was seen too rarely to compare"
    return f"{reached}; until then {_compared(proof.target_time)}"


def seeds(proof: Proof) -> str:
    """What a seed is."""
    if proof.asked.seed_option:
        return f"passed as `{proof.asked.seed_option}`"
    return "0 is the script's own; for each other one, what the script seeds its generators with is replaced"


def next_command(proof: Proof) -> str:
    """What to type now."""
    found, script = proof.equivalence, proof.asked.script
    if proof.interrupted or found.num_diverged:
        return again(proof, proof.num_seeds)
    if found.reason.startswith(NOT_AT_WORK):
        return f"flatout levers {script}"
    if proof.against_itself and (found.verdict != "undecided" or proof.seeds_ignored):
        return f"flatout tune {script}"
    if found.verdict in ("identical", "equivalent"):
        few = _ratios(proof) if proof.time.num_pairs < MIN_PAIRS else []
        if "slower" in (proof.time.verdict, proof.training_time.verdict) or (few and max(few) < 1):
            return f"flatout tune {script}"
        return " ".join(filter(None, ("flatout run", proof.options, script)))
    if found.verdict == "different" or proof.seeds_ignored:
        return f"flatout tune --accept exact {script}"
    return again(proof, found.num_seeds + (found.more_seeds or 1))


def again(proof: Proof, num_seeds: int) -> str:
    """The command of this proof, over so many seeds."""
    over = "" if num_seeds == Aim().num_seeds else f"--seeds {num_seeds}"
    parts = ("flatout prove", over, proof.options, proof.metric_options, proof.asked.script)
    return " ".join(filter(None, parts))
