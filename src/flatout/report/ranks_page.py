"""How does a tuning for ranks become one self-contained HTML page? In the style of the page of a measurement.

In: a `RankTuning`. Out: a file. First the verdict, then time, memory, exchanges and agreement of each division, then
what was refused, how it was obtained and the samples.
"""

from __future__ import annotations

from pathlib import Path

from flatout.judge.rank_tuning import RankTrial, RankTuning
from flatout.report import rank_words, ranks_figures, words
from flatout.report.evidence import Evidence
from flatout.report.html import machine_rows, rendered, write_whole
from flatout.report.ranks_figures import ONE, mark, name
from flatout.report.tables import Table, table

BASELINE = "raw-one-process"

UNTIMED = ("refused", "failed")


def write_html(found: RankTuning, path: Path | str) -> Path:
    """Write the page whole or not at all; returns its path.

    Raises:
        OSError: The file cannot be written.
    """
    return write_whole(html_text(found), path)


def html_text(found: RankTuning) -> str:
    """The page as text."""
    number, unit, sentence = headline(found)
    samples = evidence(found)
    shown = found.winner or found.fastest
    return rendered(
        "ranks.html.j2",
        {
            "found": found,
            "created": words.moment(found.created),
            "number": number,
            "unit": unit,
            "sentence": sentence,
            "number_anchor": _anchor(found, shown) if shown is not None else BASELINE,
            "lines": lines(found),
            "levers": rank_words.under(found) if found.levers else "",
            "next": " ".join(rank_words.next_command(found)),
            "ratios": ranks_figures.ratios(found),
            "marks": {mark(t) for t in found.trials if t.ratio is not None},
            "times": times(found),
            "memory_figure": ranks_figures.memory(found),
            "memory_table": memory(found),
            "on_gpu": bool(found.machine.accelerators),
            "exchanges_figure": ranks_figures.exchanges(found),
            "exchanges_table": exchanges(found),
            "agreement": agreement(found),
            "undivided": [(name(t), _why(t), t.hint) for t in found.trials if t.outcome in UNTIMED],
            "sources": sources(found),
            "anchors": {one.anchor for one in samples},
            "evidence": samples,
            "machine": _machine(found),
        },
    )


def headline(found: RankTuning) -> tuple[str, str, str]:
    """The one number, what it is a number of, and the verdict; the script's name stands before that."""
    won, best = found.winner, found.fastest
    if won is not None:
        gain = words.times(won.ratio)
        agrees = "" if won.class_ == "statistical" else ", and its numbers agree"
        sentence = f"trains {gain.removesuffix('x')} times as fast on {won.label}{agrees}."
        return gain, "as fast as one process", sentence
    if best is None:
        why = rank_words.why_none(found).removesuffix(", as said above")
        return "No ratio", f"of {words.plural(len(found.trials), 'division')}", f"stays one process: {why}."
    said = {
        "one rank is faster": "is faster as one process than divided.",
        "no difference": "is as fast as one process as divided; one process is simpler.",
    }.get(found.verdict, "may or may not be faster on ranks: these runs cannot tell.")
    return words.times(best.ratio), f"as fast as one process: {name(best)}, the best division", said


def lines(found: RankTuning) -> list[tuple[str, str]]:
    """What is said at the top, each with its subject."""
    shown, leanest = found.winner or found.fastest, found.leanest
    spread = f" ± {words.percent(found.spread_fraction)}" if words.known(found.spread_fraction) else ""
    said = [("one process", f"{words.seconds(found.step_s)} a step{spread}, in runs of {found.num_steps:,} steps")]
    if shown is not None:
        ends = f", ratio {words.ratio(shown.ratio)} {rank_words.ends(shown)}".rstrip()
        said.append((name(shown), f"{words.seconds(shown.step_s)} a step{ends}"))
    if leanest is not None and found.step_memory_bytes is not None:
        shrinks = (leanest.step_memory_bytes or 0) < found.step_memory_bytes
        least = "a rank holds least with" if shrinks else "no rank holds less; the least is that of"
        said.append((
            "memory",
            f"one process holds {words.memory(found.step_memory_bytes)} within a step; {least} {name(leanest)}: "
            f"{rank_words.within_step(found, leanest)}",
        ))  # fmt: skip
    if shown is not None and shown.exchanges_share is not None:
        kinds = rank_words.costliest(shown, 2)
        most = f", most of it for {kinds}" if kinds else ""
        said.append((
            "exchanges", f"{words.percent(shown.exchanges_share)} of the training time of {name(shown)}{most}",
        ))  # fmt: skip
    return said


# -- tables ----------------------------------------------------------------------------------------------------------


def _anchor(found: RankTuning, trial: RankTrial) -> str:
    """Where the samples of a division are; of a refused one there are none."""
    return "" if trial.outcome in UNTIMED else f"raw-division-{found.trials.index(trial)}"


def _measured(found: RankTuning) -> list[RankTrial]:
    return [t for t in found.trials if t.outcome not in UNTIMED]


def times(found: RankTuning) -> Table:
    """Step times and ratios."""
    spread = f"± {words.percent(found.spread_fraction)}" if words.known(found.spread_fraction) else ""
    rows = [(ONE, "", words.seconds(found.step_s), spread, "1", "", "")]
    anchors = [BASELINE]
    for t in (t for t in found.trials if t.ratio is not None):
        wide = f"± {words.percent(t.spread_fraction)}" if words.known(t.spread_fraction) else ""
        ratio = words.ratio(t.ratio)
        rows.append((name(t), t.outcome, words.seconds(t.step_s), wide, ratio, rank_words.ends(t), str(t.num_pairs)))
        anchors.append(_anchor(found, t))
    head = ("division", "verdict", "a step", "spread", "ratio", "95 %", "pairs of runs")
    return table("Time of a step", head, rows, texts=2, links={2: anchors, 4: anchors})


def memory(found: RankTuning) -> Table:
    """What one process and a rank of each division hold."""
    whole = [(ONE, found.step_memory_bytes, "100 %", found.peak_memory_bytes)]
    whole += [
        (name(t), t.step_memory_bytes, words.percent(found.memory_fraction(t)), t.peak_memory_bytes)
        for t in _measured(found)
    ]
    rows = [
        (who, *((words.memory(held), of) if held is not None else ("not observed", "")),
         words.memory(most) if most is not None else "not observed")
        for who, held, of, most in whole
        if held is not None or most is not None
    ]  # fmt: skip
    anchors = {ONE: BASELINE} | {name(t): _anchor(found, t) for t in _measured(found)}
    behind = [anchors[row[0]] for row in rows]
    head = ("division", "within a step", "of one process", "at most, from the start on")
    return table("Memory of a rank", head, rows, links={1: behind, 3: behind})


def exchanges(found: RankTuning) -> Table:
    """Each kind of exchange with its share, division by division."""
    rows, anchors = [], []
    for t in (t for t in found.trials if t.exchanges_share is not None):
        kinds = [(kind, share) for kind, share in t.exchange_shares.items() if share >= rank_words.WORTH_SAYING]
        rows.append((name(t), "all", words.percent(t.exchanges_share)))
        rows += [("", kind, words.percent(share)) for kind, share in kinds]
        anchors += [_anchor(found, t)] * (1 + len(kinds))
    return table(
        "Share of training in exchanges", ("division", "kind", "share"), rows, texts=2, links={2: anchors}
    )  # fmt: skip


def agreement(found: RankTuning) -> Table:
    """What each division trains, beside what one process trains."""
    rows = [(name(t), t.agreement, t.agreement_detail) for t in found.trials if t.agreement]
    return table("Agreement with one process", ("division", "verdict", "how far it differs"), rows, texts=3)


def _why(trial: RankTrial) -> str:
    return ": ".join(filter(None, (trial.reason, trial.cause))) or "nothing is known of why"


# -- how it was obtained ---------------------------------------------------------------------------------------------


def sources(found: RankTuning) -> list[tuple[str, list[tuple[str, str]]]]:
    """Commands that obtain numbers again, each with these numbers and how they come about."""
    compared = words.plural(found.num_compared_steps, "step")
    return [
        (
            rank_words.tune_command(found),
            [
                (
                    "a step",
                    "the median settled step of each run (rank 0, no evaluation, no checkpoints); their median",
                ),
                ("ratio", "pairs of runs, one process and ranks by turns in an order drawn by lot; 95 % interval"),
                (
                    "memory within a step",
                    f"the most that a process held in each of {compared}, its median; of the rank with the most",
                ),
                ("memory at most", "the same from the start of a run on, of the run with the most"),
                ("exchanges", "what every rank spent in them while it computed nothing; medians over runs"),
                (
                    "agreement",
                    f"losses, parameters and buffers after {compared} on the same batches, beside what moving "
                    "parameters in their last places changes",
                ),
            ],
        ),
        (
            f"flatout machine --ranks {found.num_ranks}",
            [("what exchanges can reach", "ranks that do nothing else: bandwidth, and the time of the smallest sum")],
        ),
        (
            f"flatout report {words.nearby(Path(found.run))}" if found.run else "flatout report",
            [("this page", "from `rank-tuning.json` in the run folder")],
        ),
    ]


def evidence(found: RankTuning) -> list[Evidence]:
    """The samples behind each number."""
    command = rank_words.tune_command(found)
    longest = max((t.baseline_step_s for t in found.trials), key=len, default=())
    rows = [(str(number), _raw(step_s)) for number, step_s in enumerate(longest, 1)]
    alone = Evidence(
        anchor=BASELINE, title="One process", how="the median settled step of each run", command=command,
        tables=(
            table("Runs of one process", ("run", "a step"), rows),
            _bytes(found.step_memory_bytes, found.peak_memory_bytes),
        ),
        missing="" if rows else "no run was timed",
    )  # fmt: skip
    return [alone, *(_division(found, trial, command) for trial in _measured(found))]


def _division(found: RankTuning, trial: RankTrial, command: str) -> Evidence:
    pairs = zip(trial.baseline_step_s, trial.candidate_step_s, strict=False)
    rows = [(str(number), _raw(one), _raw(other)) for number, (one, other) in enumerate(pairs, 1)]
    kinds = [(kind, f"{100 * share:.3f} %") for kind, share in trial.exchange_shares.items()]
    reason = f"; {trial.reason}" if trial.reason and trial.reason != trial.agreement_detail else ""
    return Evidence(
        anchor=_anchor(found, trial),
        title=name(trial).capitalize(),
        how=f"the median settled step of each run, one process and ranks in the same round{reason}",
        command=command,
        tables=(
            table("Pairs of runs", ("round", ONE, "rank 0"), rows),
            _bytes(trial.step_memory_bytes, trial.peak_memory_bytes),
            table("Kinds of exchange", ("kind", "share of training"), kinds),
        ),
        missing="" if rows else trial.reason or "it was not timed",
    )


def _bytes(held: int | None, most: int | None) -> Table:
    amounts = (("within a step", held), ("at most, from the start on", most))
    return table("Memory", ("memory", "bytes"), [(n, f"{amount:,}") for n, amount in amounts if amount is not None])


def _raw(value_s: float) -> str:
    return f"{1e3 * value_s:,.4f} ms" if words.known(value_s) else words.MISSING


def _machine(found: RankTuning) -> list[tuple[str, str]]:
    rows = [
        *machine_rows(found.machine),
        ("framework", words.framework(found.framework, found.framework_version)),
        ("flatout", found.flatout),
        ("typed", found.typed),
    ]
    return [(key, value) for key, value in rows if value]
