"""Is energy a quiet line where it is known, and no line at all where it is not, unless everything is asked for?"""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.cli.foreground import closing_line, run_summary
from flatout.records.energy import Counter, Energy, EnergySummary, Log, Series
from flatout.report import machine, screen, tables, terminal
from shown import on_page, on_screen

sys.path.insert(0, str(Path(__file__).parent.parent / "golden"))
import report_examples as examples

PACKAGE = Counter(name="package-0", device="cpu", source="RAPL", resolution_s=1e-3, resolution_joules=1e-6)
KNOWN = EnergySummary(
    counters=(PACKAGE,),
    missing=("GPU: none",),
    noted_every_s=0.015,
    baseline=Energy(joules=1.214, parts={"package-0": 1.214}, num_windows=9),
    tuned=Energy(joules=0.803, parts={"package-0": 0.803}, num_windows=9),
    measuring_joules=4210.0,
)
UNKNOWN = EnergySummary(missing=("RAPL: no counters",), baseline=Energy(why_not="no energy counter could be read"))


def terminal_text(result, *, verbose=False):
    return on_screen(result, verbose=verbose, width=120)


def test_where_it_is_known_one_line_says_what_a_step_uses_before_and_with_the_plan():
    text = terminal_text(replace(examples.lenet(), energy=KNOWN))
    line = next(line for line in text.splitlines() if line.startswith("energy"))
    assert "1.21 J → 803 mJ a step" in line and "package-0: RAPL, changes every 1 ms" in line
    assert "GPU: none" not in text


def test_where_it_is_not_known_nobody_is_bothered():
    assert terminal_text(replace(examples.lenet(), energy=UNKNOWN)) == terminal_text(examples.lenet())
    text = terminal_text(replace(examples.lenet(), energy=UNKNOWN), verbose=True)
    assert "energy     not readable here; `flatout machine` says why\n" in text and "RAPL" not in text


def test_the_machine_says_the_reason_that_the_short_line_leaves_to_it():
    found = machine.view(examples.lenet().ceilings, energy=Log(missing=UNKNOWN.missing))
    assert "not readable: RAPL: no counters" in screen.plain(terminal.report(found), width=120)


def test_counters_that_were_there_and_gave_no_number_say_why_at_once():
    found = replace(UNKNOWN, counters=(PACKAGE,), baseline=Energy(why_not="too few windows were calm"))
    text = terminal_text(replace(examples.lenet(), energy=found), verbose=True)
    assert "energy     not known: too few windows were calm" in text


def test_all_of_it_is_there_for_whoever_asks():
    text = terminal_text(replace(examples.lenet(), energy=KNOWN), verbose=True)
    assert "GPU: none" in text


def test_the_page_has_its_parts_and_says_how_it_was_obtained():
    result = replace(examples.lenet(), energy=KNOWN)
    rows = {row[0]: row[1:] for row in tables.used(result).rows}
    assert rows["a plain step"] == ("1.21 J", "9")
    assert rows["a step with the plan"][0] == "803 mJ"
    assert rows["all of this measurement"][0] == "4.21 kJ"
    assert "803 mJ" in on_page(result) and "803 mJ" not in on_page(examples.lenet())
    said = [how for one in tables.sources(result) for number, how, _ in one.numbers if number == "energy"]
    assert len(said) == 1 and "noted every 15 ms" in said[0]


def test_the_page_says_why_where_it_is_not_known():
    sources = tables.sources(replace(examples.lenet(), energy=UNKNOWN))
    said = {number: how for one in sources for number, how, _ in one.numbers}
    assert said["energy"] == "not known: RAPL: no counters"
    assert tables.used(replace(examples.lenet(), energy=UNKNOWN)).rows == ()


def test_trials_have_their_energy_in_the_table_of_the_page_where_any_has():
    result = examples.lenet()
    assert "energy a step" not in tables.trials(result).head
    first = replace(result.trials[0], baseline_joules_per_step=1.2, candidate_joules_per_step=1.1)
    found = tables.trials(replace(result, trials=(first, *result.trials[1:])))
    assert found.head[-2:] == ("energy a step", "plain") and found.rows[0][-2:] == ("1.1 J", "1.2 J")
    assert "energy 1.1 J a step (plain 1.2 J)" in terminal_text(
        replace(result, trials=(first, *result.trials[1:])), verbose=True
    )


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (Log(series=(Series(counter=PACKAGE),)), "energy     package-0: RAPL, changes every 1 ms"),
        (Log(missing=("RAPL: none", "GPU: none")), "energy     not readable: RAPL: none\n           not readable: GPU"),
    ],
)
def test_a_machine_says_what_can_be_read_or_what_is_missing(log, line):
    assert line in screen.plain(terminal.report(machine.view(examples.CEILINGS, energy=log)))


def test_a_run_says_what_it_used_where_it_is_known(ran):
    assert closing_line(ran(Energy(joules=4210.0))) == "20 steps in 1 s, 4.21 kJ for all of the run"
    assert closing_line(ran(Energy(why_not="none"))) == "20 steps in 1 s"
    assert run_summary(ran(Energy(joules=4210.0)))["joules"] == 4210.0
    assert run_summary(ran(Energy()))["joules"] is None


@pytest.fixture
def ran():
    from flatout.api import Ran
    from flatout.run.choice import Engagement
    from flatout.run.outcome import Outcome

    def of(energy):
        outcome = Outcome(num_steps=20, steps_s=1.0, ended=True, began=True, energy=energy)
        return Ran(engagement=Engagement(), outcome=outcome, registry={}, run="")

    return of
