"""How does a proof become one self-contained HTML page? In the style of the page of a measurement.

In: a `Proof`. Out: a file. First the verdict, then each seed, then how it was obtained and the samples.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from flatout.judge.metric import Reading, reached_s
from flatout.judge.proof import Proof, WholeRun, side_name
from flatout.records.plan import label
from flatout.report import proof_figures, proof_words, words
from flatout.report.evidence import Evidence
from flatout.report.html import machine_rows, rendered, write_whole
from flatout.report.tables import Table, table

METRIC, TIME, TARGET, ENERGY = "raw-metric", "raw-time", "raw-target", "raw-energy"

MOST_READINGS = 40
"""Of a run in the page; `proof.json` has more."""

ALL_READINGS = 800
"""Of all runs together."""


def write_html(found: Proof, path: Path | str) -> Path:
    """Write the page whole or not at all; returns its path.

    Raises:
        OSError: The file cannot be written.
    """
    return write_whole(html_text(found), path)


def html_text(found: Proof) -> str:
    """The page as text."""
    samples = evidence(found)
    (word, _), sentence = proof_words.verdict(found)
    return rendered(
        "proof.html.j2",
        {
            "proof": found,
            "flatout": found.asked.versions[0],
            "created": words.moment(found.created),
            "number": word if word in ("equal", "equivalent", "different") else "undecided",
            "unit": f"{found.asked.metric.name}, {proof_words.finished(found)}",
            "sides": "plain against plain" if found.against_itself else f"under `{label(found.asked.levers)}`",
            "said": words.sentence(f"{word}{sentence}"),
            "lines": _lines(found),
            "stopped": found.stopped + ("; the command below goes on" if found.interrupted else ""),
            "next": proof_words.next_command(found),
            "differences": proof_figures.differences(found),
            "curves": proof_figures.curves(found),
            "legend": [(side, side_name(side, found.asked.levers)) for side in ("plain", "plan")],
            "seeds": seeds(found),
            "what_seeds_are": proof_words.seeds(found),
            "again": proof_words.again(found, found.num_seeds),
            "whole_s": sum(run.wall_s for run in found.runs),
            "outputs": str(words.nearby(Path(found.run) / "output-plain-0.log")) if found.run else "",
            "evidence": samples,
            "anchors": {one.anchor for one in samples},
            "machine": _machine(found),
        },
    )


def _lines(found: Proof) -> list[tuple[str, str, str]]:
    """What became of time, target and energy: a name, where its samples are, and a sentence."""
    lines = [
        ("time", TIME, proof_words.time(found)),
        ("target", TARGET, proof_words.target(found)),
        ("energy", ENERGY if found.energy is not None else "", proof_words.energy(found)),
    ]
    return [line for line in lines if line[2]]


def seeds(found: Proof) -> Table:
    """Each seed; its numbers lead to its readings."""
    second = proof_words.second_name(found)
    head = ("seed", "plain", second, "difference", "plain took", second)
    rows, anchors = [], []
    for seed, plain, plan in found.by_seed():
        cells = [cell(run) for cell in (proof_words.value_of, proof_words.wall) for run in (plain, plan)]
        rows.append((str(seed), *cells[:2], proof_words.difference(plain, plan), *cells[2:]))
        anchors.append(_anchor(seed))
    links = {1: anchors, 2: anchors, 3: [METRIC] * len(rows), 4: [TIME] * len(rows), 5: [TIME] * len(rows)}
    return table(f"{found.asked.metric.name} of each run, and its wall time", head, rows, links=links)


def _anchor(seed: int) -> str:
    return f"raw-seed-{seed}"


def evidence(found: Proof) -> list[Evidence]:
    """The samples behind each number."""
    command = proof_words.again(found, found.num_seeds)
    judged = found.equivalence
    wanted: list[tuple[str, str, str, Callable[[WholeRun], str]]] = [
        (
            METRIC,
            f"Difference of {found.asked.metric.name}",
            f"the mean of the seeds' differences; two one-sided t tests of 5 % each against the margin of "
            f"± {judged.margin:.3g} ({judged.margin_source})",
            lambda run: repr(run.value) if run.value is not None else run.problem,
        ),
        (TIME, "Wall time of whole runs", f"each seed's two runs as a pair{_because(found)}", _wall),
    ]
    if found.target is not None:
        wanted.append((TARGET, "Time to the target", "when a run first was at it", _to_target(found)))
    if found.energy is not None:
        wanted.append((ENERGY, "Energy of whole runs", "counters read by the parent while it ran", _joules))
    shown = [
        Evidence(anchor=anchor, title=title, how=how, command=command, tables=(_pairs(found, title, cell),))
        for anchor, title, how, cell in wanted
    ]
    return [*shown, *_readings(found, command)]


def _because(found: Proof) -> str:
    return f"; {found.time.reason}" if found.time.reason else ""


def _wall(run: WholeRun) -> str:
    return f"{run.wall_s:.2f} s, training {run.training_s:.2f} s"


def _joules(run: WholeRun) -> str:
    return words.joules(run.joules) if run.joules is not None else run.why_no_energy


def _to_target(found: Proof) -> Callable[[WholeRun], str]:
    target = found.target or 0.0

    def cell(run: WholeRun) -> str:
        at_s = reached_s(run.readings, target, rising=found.rising)
        return "not seen" if at_s is None else f"{at_s:.2f} s"

    return cell


def _pairs(found: Proof, title: str, cell: Callable[[WholeRun], str]) -> Table:
    rows = [
        (f"seed {seed}", *(cell(run) if run is not None else words.MISSING for run in (plain, plan)))
        for seed, plain, plan in found.by_seed()
    ]
    return table(title, ("", "plain", proof_words.second_name(found)), rows)


def _readings(found: Proof, command: str) -> list[Evidence]:
    shown = []
    for seed, *runs in found.by_seed():
        tables = [
            table(
                f"{side_name(run.side, found.asked.levers)}",
                ("at", found.asked.metric.name),
                _rows(found, run.readings),
            )
            for run in runs
            if run is not None
        ]
        problems = "; ".join(run.problem for run in runs if run is not None and run.problem)
        shown.append(
            Evidence(
                anchor=_anchor(seed),
                title=f"Readings of seed {seed}",
                how="the metric on its way, thinned; the last reading counts"
                + (", of recorded losses the mean over the last tenth of the steps" if _is_loss(found) else ""),
                command=command,
                tables=tuple(tables),
                missing="" if any(one.rows for one in tables) else problems or "no reading was kept",
            )
        )
    return shown


def _is_loss(found: Proof) -> bool:
    return found.asked.metric.pattern is None and found.asked.metric.file is None


def _rows(found: Proof, readings: tuple[Reading, ...]) -> list[tuple[str, str]]:
    shown = proof_figures.thinned(readings, min(MOST_READINGS, ALL_READINGS // len(found.runs)))
    return [(words.seconds(r.at_s) if r.at_s is not None else "", proof_words.number(r.value)) for r in shown]


def _machine(found: Proof) -> list[tuple[str, str]]:
    versions = zip(("flatout", "framework", "Python"), found.asked.versions, strict=False)
    return [(name, value) for name, value in (*machine_rows(found.machine), *versions) if value]
