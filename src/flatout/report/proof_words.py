"""What is said of a proof? The verdict, what became of time and energy, and what to type next.

In: a `Proof`. Out: words, the same for the terminal and the page.
"""

from __future__ import annotations

from flatout.judge.equivalence import Equivalence
from flatout.judge.proof import NOT_AT_WORK, Aim, Proof, WholeRun, side_name
from flatout.judge.stats import MIN_PAIRS, Comparison
from flatout.report import words

_MEND = "mend the training first, or name another metric"


def finished(proof: Proof) -> str:
    """Of how many seeds both runs came to their end."""
    num = proof.time.num_pairs
    if num == 0:
        return "no seed with both runs"
    if proof.interrupted and num < proof.num_seeds:
        return f"{num} of {words.plural(proof.num_seeds, 'seed')}"
    return words.plural(num, "seed")


def second_name(proof: Proof) -> str:
    """What the second run of a seed is called in a table."""
    return "again" if proof.against_itself else "under it"


def number(value: float | None) -> str:
    """A metric with five digits, which is what one compares by eye.

    >>> number(0.98163), number(1234.5678), number(float("inf")), number(None)
    ('0.98163', '1234.6', 'infinity', '')
    """
    if value is None:
        return ""
    return f"{value:.5g}" if words.known(value) else words.not_finite(value)


def value_of(run: WholeRun | None) -> str:
    """What a run came to, if it was made."""
    return "" if run is None else "failed" if run.problem else number(run.value)


def difference(plain: WholeRun | None, plan: WholeRun | None) -> str:
    """The metric under the plan minus plain, where there are both."""
    if plain is None or plan is None or plain.value is None or plan.value is None:
        return ""
    return signed(plan.value - plain.value)


def signed(value: float) -> str:
    """A difference with its sign."""
    return "0" if value == 0 else f"{value:+.2g}" if words.known(value) else ""


def wall(run: WholeRun | None) -> str:
    """How long a run took, if it was made."""
    return "" if run is None else words.duration(run.wall_s)


def verdict(proof: Proof) -> tuple[str, str]:
    """The verdict in a word or a few, and the rest of the sentence."""
    found, name = proof.equivalence, proof.asked.metric.name
    seeds = words.plural(found.num_seeds, "seed")
    if found.verdict == "identical":
        losses = ", and so is every loss on the way" if proof.losses_equal else ""
        return "equal", f": the same {name}, to the last digit, with all {seeds}{losses}"
    if found.verdict == "equivalent":
        return "equivalent", f": {_between(found, name)}"
    if found.verdict == "different":
        return "different", f": {found.reason or _between(found, name)}"
    if found.reason.startswith(NOT_AT_WORK):
        return "nothing was proved", f": {found.reason}"
    if found.num_diverged:
        return "nothing to compare", f": {found.reason}: {_MEND}"
    return "not enough seeds to tell", f": {_undecided(proof)}"


def _between(found: Equivalence, name: str) -> str:
    ends = f"[{signed(found.low)}, {signed(found.high)}]"
    return (
        f"{name} differs by {signed(found.difference)} on average, 90 % interval {ends}; "
        f"nothing is said to change within ± {found.margin:.3g} ({found.margin_source})"
    )


def _undecided(proof: Proof) -> str:
    found = proof.equivalence
    if proof.seeds_ignored:
        return _ignored(proof)
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


def _ignored(proof: Proof) -> str:
    """That seeds make no difference, what one seed says nevertheless, and what could be done about it."""
    first = next((r.value for r in proof.runs if r.side == "plain"), None)
    same = first is not None and {r.value for r in proof.runs} == {first}
    told = f"; {side_name('plan', proof.asked.levers)} it has the same {proof.asked.metric.name}" if same else ""
    option = proof.asked.seed_option
    mend = f"`{option}` changes nothing in it" if option else "`--seed-option` names its own option, if it has one"
    return f"the script ignores seeds: its runs are the very same with each, so there is one to judge{told}; {mend}"


def time(proof: Proof) -> str:
    """What became of the wall time."""
    if proof.time.num_pairs < MIN_PAIRS:
        seen = _few(proof)
        first = (
            f"{words.interval(min(seen), max(seen))} as fast in {words.plural(len(seen), 'whole run')}, "
            if seen
            else ""
        )
        return f"{first}compared from {MIN_PAIRS} seeds on"
    return f"a whole run {_compared(proof.time)}; its training steps {_compared(proof.training_time)}"


def _few(proof: Proof) -> list[float]:
    """How many times as fast whole runs were, seed by seed."""
    wall_s = {(run.seed, run.side): run.wall_s for run in proof.runs if not run.problem}
    pairs = ((wall_s.get((seed, "plain")), wall_s.get((seed, "plan"))) for seed in sorted({s for s, _ in wall_s}))
    return [plain_s / plan_s for plain_s, plan_s in pairs if plain_s and plan_s]


def energy(proof: Proof) -> str:
    """What became of the energy, or why that is not known; empty where nothing is to be said."""
    if proof.energy is not None and proof.energy.num_pairs >= MIN_PAIRS:
        found = _compared(proof.energy, "less", "more")
        return f"a whole run takes {found}" if words.known(proof.energy.ratio) else found
    why = next((run.why_no_energy for run in proof.runs if run.why_no_energy), "")
    return f"not known: {why}" if why else ""


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
    found = proof.equivalence
    if proof.interrupted or found.num_diverged:
        return again(proof, proof.num_seeds)
    if found.reason.startswith(NOT_AT_WORK):
        return f"flatout levers {proof.asked.script}"
    if proof.against_itself and (found.verdict != "undecided" or proof.seeds_ignored):
        return f"flatout tune {proof.asked.script}"
    if found.verdict in ("identical", "equivalent"):
        few = _few(proof) if proof.time.num_pairs < MIN_PAIRS else []
        if "slower" in (proof.time.verdict, proof.training_time.verdict) or (few and max(few) < 1):
            return f"flatout tune {proof.asked.script}"
        return " ".join(filter(None, ("flatout run", proof.options, proof.asked.script)))
    if found.verdict == "different" or proof.seeds_ignored:
        return f"flatout tune --accept exact {proof.asked.script}"
    return again(proof, found.num_seeds + (found.more_seeds or 1))


def again(proof: Proof, num_seeds: int) -> str:
    """The command of this proof, over so many seeds."""
    options = " ".join(filter(None, (proof.options, proof.metric_options)))
    over = "" if num_seeds == Aim().num_seeds else f"--seeds {num_seeds}"
    return " ".join(filter(None, ("flatout prove", over, options, proof.asked.script)))
