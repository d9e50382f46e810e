"""Is energy a quiet line where it is known, and no line at all where it is not, unless everything is asked for?"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.api import Ran
from flatout.cli.foreground import closing_line, run_summary
from flatout.machine.energy_counters import Counter, Found
from flatout.records.energy import Energy, EnergySummary
from flatout.report import evidence, machine, terminal
from flatout.run.choice import Engagement
from flatout.run.outcome import Outcome
from shown import as_text, on_page, on_screen

sys.path.insert(0, str(Path(__file__).parent.parent / "golden"))
import report_examples as examples

KNOWN = EnergySummary(
    sources=("package-0: RAPL",), baseline=Energy(joules=1.214), tuned=Energy(joules=0.803), measuring_joules=4210.0
)
UNKNOWN = EnergySummary(baseline=Energy(why_not="RAPL: no counters"))


def terminal_text(energy, *, verbose=False):
    return on_screen(replace(examples.lenet(), energy=energy), verbose=verbose, width=120)


def test_where_it_is_known_one_line_says_what_a_step_uses_before_and_with_the_plan():
    line = next(line for line in terminal_text(KNOWN).splitlines() if line.startswith("energy"))
    assert "1.21 J → 803 mJ a step" in line and "package-0: RAPL" in line


def test_where_it_is_not_known_nobody_is_bothered():
    assert terminal_text(UNKNOWN) == terminal_text(None)
    text = terminal_text(UNKNOWN, verbose=True)
    assert "energy     not readable here; `flatout machine` says why\n" in text and "RAPL" not in text


def test_counters_that_were_there_and_gave_no_number_say_why_at_once():
    found = replace(UNKNOWN, sources=("package-0: RAPL",), baseline=Energy(why_not="too few windows were calm"))
    assert "energy     not known: too few windows were calm" in terminal_text(found, verbose=True)


def test_the_page_says_how_it_was_obtained_or_why_not():
    page = on_page(replace(examples.lenet(), energy=KNOWN))
    assert "803" in page and "803" not in on_page(examples.lenet())
    said = [
        next(one.how for one in evidence.evidence(replace(examples.lenet(), energy=energy)) if one.title == "Energy")
        for energy in (KNOWN, UNKNOWN)
    ]
    assert said[0].startswith("package-0: RAPL, at the start and the end") and said[0].endswith("took 4.21 kJ")
    assert said[1] == "not known: RAPL: no counters"


PACKAGE = Counter(name="package-0", device="cpu", source="RAPL", update_s=1e-3, read=float)


@pytest.mark.parametrize(
    ("found", "line"),
    [
        (Found(counters=(PACKAGE,)), "energy     package-0: RAPL"),
        (
            Found(missing=("RAPL: none", "GPU: none")),
            "energy     not readable: RAPL: none\n           not readable: GPU",
        ),
    ],
)
def test_a_machine_says_what_can_be_read_or_what_is_missing(found, line):
    assert line in as_text(terminal.report(machine.view(examples.CEILINGS, energy=found)))


def test_a_run_says_what_it_used_where_it_is_known():
    def ran(energy):
        outcome = Outcome(num_steps=20, steps_s=1.0, ended=True, began=True, energy=energy)
        return Ran(engagement=Engagement(), outcome=outcome, registry={}, run="")

    assert closing_line(ran(Energy(joules=4210.0))) == "20 steps in 1 s, 4.21 kJ for all of the run"
    assert closing_line(ran(Energy(why_not="none"))) == "20 steps in 1 s"
    assert run_summary(ran(Energy(joules=4210.0)))["joules"] == 4210.0
    assert run_summary(ran(Energy()))["joules"] is None
