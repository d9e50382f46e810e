"""What does a proof look like on a terminal? In: a `Proof`. Out: lines; nothing is computed here."""

from __future__ import annotations

from pathlib import Path

from flatout.judge.proof import Proof
from flatout.records.plan import label
from flatout.report import proof_words, words
from flatout.report.screen import Report, Screen


def proof(found: Proof, *, page: Path | str | None = None) -> Report:
    """What `prove` prints; `page` is where its page was written."""
    return Report(lambda screen: _compose(screen, found, page))


def _compose(screen: Screen, found: Proof, page: Path | str | None) -> None:
    sides = "A/A: plain against plain" if found.against_itself else f"plain and {label(found.asked.levers)}"
    screen.say("", f"{found.asked.script} · {proof_words.finished(found)} · {sides}, by turns", indent=0)
    screen.blank()
    _table(screen, found)
    screen.blank()
    screen.say("result", *proof_words.verdict(found))
    screen.say("time", proof_words.time(found))
    if reached := proof_words.target(found):
        screen.say("target", reached)
    if energy := proof_words.energy(found):
        screen.say("energy", energy, most=2)
    for number, note in enumerate(found.notes):
        screen.say("note" if number == 0 else "", (note, "yellow"), most=3)
    if found.stopped:
        screen.say("stopped", found.stopped + ("; the command below goes on" if found.interrupted else ""))
    screen.say("seeds", proof_words.seeds(found))
    if page is not None:
        screen.command("report", str(words.nearby(Path(page))))
    screen.command("next", proof_words.next_command(found))


def _table(screen: Screen, found: Proof) -> None:
    second = proof_words.second_name(found)
    screen.row(f"{found.asked.metric.name} of each run, and its wall time")
    screen.row(("seed", "bold"), f"{'plain':>13}{second:>13}{'difference':>13}{'plain took':>15}{second:>13}")
    for seed, plain, plan in found.by_seed():
        screen.row(
            f"{seed:>4}{proof_words.value_of(plain):>13}{proof_words.value_of(plan):>13}"
            f"{proof_words.difference(plain, plan):>13}{proof_words.wall(plain):>15}{proof_words.wall(plan):>13}"
        )
