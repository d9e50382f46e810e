"""Is it said of what speeds and ratios are, where much of the time lies between steps?"""

import pytest

from flatout.judge.causes import Findings
from flatout.judge.diagnosis import diagnose
from flatout.judge.result import Untried
from flatout.report.verdict import headline
from handmade import FACTS, anatomy, result
from shown import on_screen


def beside_evaluation(share, **changes):
    step = anatomy({"forward": 0.004, "backward": 0.006}, outside_s={"evaluation": 0.010 * share / (1 - share)})
    found = diagnose(Findings(anatomy=step, facts=FACTS, num_cores=2, counterfactuals={}))
    return result(anatomy=step, diagnosis=found, **changes)


@pytest.mark.parametrize("command", ["why", "tune"])
def test_evaluation_that_takes_most_of_the_time_is_said_before_ratios_that_are_without_it(command):
    found = beside_evaluation(0.77, command=command)
    said = "evaluation takes 77 % of the time; speeds and ratios are of a training step, without it"
    assert headline(found).sentence.endswith(f" {said.capitalize()}.")
    text = on_screen(found, width=200)
    assert text.index(f"between    {said}") < text.index("where a step goes")
    assert "between steps: 77 % of all the time, in no ratio" in text
    assert "4.3x of all the time with free evaluation" in text
    assert "binding    evaluation: training waits while the model is evaluated, 77 % of the time" in text


def test_evaluation_that_takes_little_is_no_news():
    found = beside_evaluation(0.03)
    assert "without it" not in headline(found).sentence and "between    " not in on_screen(found, width=200)


def test_what_goes_by_name_only_and_was_measured_to_bring_much_is_the_first_that_was_not_tried():
    named = "only by name (`--levers no_debug`): somebody may want what is checked; measured to bring 1.70x"
    rest = [Untried(lever=f"lever_{n}", reason=f"it has no place here, {n}") for n in range(30)]
    text = on_screen(result(untried=(*rest, Untried(lever="no_debug", reason=named))))
    assert "not tried:  no_debug (only by name (`--levers no_debug`)" in text and "1.70x" in text
