"""What changed between two runs: only what their windows show, and never as if unlike were like."""

import json
import math
import random
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flatout import report
from flatout.judge import contrast, trace_windows
from flatout.records.plan import Trial
from flatout.records.trace_file import encode
from flatout.report import figures, svg
from flatout.report.contrast import headline
from handmade import FACTS, HEADER, MACHINE, anatomy, window
from shown import on_page, on_screen

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))
sys.path.insert(0, str(Path(__file__).parent))

import report_examples as examples
from test_report_page import Page
from test_result import result

PHASES = {"data": 0.005, "forward": 0.002, "backward": 0.002}


def run(name, *, faster=(), by=2.0, phases=PHASES, seed=1, num_windows=4, **changes):
    """A result with the samples of its folder; the phases in `faster` take `1 / by` of their time."""
    chance = random.Random(seed)
    mean_s = {phase: value / (by if phase in faster else 1) for phase, value in phases.items()}
    step_s = sum(mean_s.values()) + 0.001

    def noisy(value_s, num):
        return [value_s * math.exp(chance.gauss(0, 0.01)) for _ in range(num)]

    windows = []
    for index in range(num_windows):
        rows = {phase: noisy(value_s, 40) for phase, value_s in mean_s.items()}
        total = [sum(step) + rest for *step, rest in zip(*rows.values(), noisy(0.001, 40), strict=True)]
        windows.append(window(total, rows, index=index))
    found = result(
        run=name, baseline_window_step_s=tuple(noisy(step_s, 12)), tuned_anatomy=None,
        anatomy=anatomy({**mean_s, "unattributed": 0.001}, num_windows=num_windows), **changes,
    )  # fmt: skip
    gathered = trace_windows.Samples(windows=tuple(trace_windows._sample(one) for one in windows))
    return found, gathered


def contrasted(first, second):
    return contrast.contrast(first[0], second[0], first[1], second[1])


def changes_of(found):
    return {change.name: change for change in found.phases}


@pytest.fixture
def sooner():
    """Data in half the time, all else as before."""
    return contrasted(run("a", seed=1), run("b", seed=2, faster=("data",)))


def test_a_phase_that_changed_is_told_from_those_that_did_not(sooner):
    verdicts = {name: change.verdict for name, change in changes_of(sooner).items()}
    assert verdicts == {
        "data": "faster", "forward": "no difference", "backward": "no difference", "unattributed": "no difference",
    }  # fmt: skip
    assert sooner.step.verdict == "faster"
    data = changes_of(sooner)["data"]
    assert data.compared.low < 2 < data.compared.high and data.difference_s == pytest.approx(-0.0025)
    assert sooner.like_with_like


def test_a_phase_that_one_run_did_not_see_is_not_observed_and_never_zero():
    found = contrasted(run("a"), run("b", phases={**PHASES, "copy": 0.003}))
    assert "copy" in run("a")[0].anatomy.not_observed
    copy = changes_of(found)["copy"]
    assert (copy.first_s, copy.second_s, copy.difference_s) == (None, pytest.approx(0.003), None)
    assert copy.compared is None and copy.verdict == "not observed"
    assert found.not_observed == ("communication", "sync")
    text = on_screen(found)
    assert "copy in a" in text and "communication, sync in either" in text
    assert report.summary_of(found)["phases"]["copy"]["first_s"] is None


def outside(side, **seconds):
    return replace(side[0], anatomy=replace(side[0].anatomy, outside_s=seconds)), side[1]


def test_a_phase_that_was_looked_for_and_never_came_took_no_time():
    second = outside(run("b", phases={**PHASES, "garbage": 0.003}), checkpoint=0.01)
    found = contrasted(run("a"), second)
    garbage, checkpoint = (changes_of(found)[name] for name in ("garbage", "checkpoint"))
    assert (garbage.first_s, checkpoint.first_s) == (0.0, 0.0) and checkpoint.difference_s == pytest.approx(0.01)
    assert garbage.verdict == "inconclusive" and "no ratio" in garbage.compared.reason
    assert checkpoint.verdict == "not compared"
    text = on_screen(found)
    assert "garbage in a" not in text and "checkpoint in a" not in text and "0 s" in text


def test_the_times_of_the_runs_are_never_cut():
    runs = [(replace(one, created=f"2026-11-23T17:2{n}:00+00:00", typed="train.py " + "--long " * 20), more)
            for n, (one, more) in enumerate((run("a"), run("b")))]  # fmt: skip
    found = contrasted(*runs)
    for shown in (on_screen(found), on_page(found)):
        assert "2026-11-23 17:20 UTC" in shown and "2026-11-23 17:21 UTC" in shown


def test_one_window_says_nothing_of_how_windows_differ():
    found = contrasted(run("a", num_windows=1), run("b", faster=("data",)))
    assert changes_of(found)["data"].verdict == "inconclusive"
    assert changes_of(found)["data"].compared.reason == "1 of at least 4 windows that are needed on each side"


def test_without_traces_the_phases_are_shown_and_not_judged():
    one, other = run("a"), run("b", faster=("data",))
    gone = trace_windows.gather(Path("nowhere"))
    found = contrast.contrast(one[0], other[0], gone, gone)
    assert changes_of(found)["data"].first_s == 0.005 and changes_of(found)["data"].verdict == "inconclusive"
    assert found.step.verdict == "faster"
    assert "first run: the traces of this run are not there any more" in found.cautions


@pytest.mark.parametrize(
    ("what", "changes"),
    [
        ("script", {"script": "other.py"}),
        ("arguments", {"header": replace(HEADER, arguments=("--epochs", "4"))}),
        ("framework", {"header": replace(HEADER, framework_version="2.14.0")}),
        ("Python", {"header": replace(HEADER, python="3.12.1")}),
        ("flatout", {"flatout": "0.2.0"}),
        ("threads", {"facts": replace(FACTS, num_threads=1)}),
        ("trained on", {"facts": replace(FACTS, device="cuda")}),
        ("ranks", {"header": replace(HEADER, world_size=2)}),
        ("CPU", {"machine": replace(MACHINE, cpu="Other")}),
        ("architecture", {"machine": replace(MACHINE, architecture="aarch64")}),
        ("CPU features", {"machine": replace(MACHINE, cpu_features=("avx2",))}),
        ("memory", {"machine": replace(MACHINE, memory_bytes=2**30)}),
        ("models", {"facts": replace(FACTS, models=())}),
        ("data", {"facts": replace(FACTS, loaders=(replace(FACTS.loaders[0], batch_size=32),))}),
    ],
)
def test_what_differs_besides_time_is_said_before_any_number(what, changes):
    found = contrasted(run("a"), run("b", faster=("data",), **changes))
    assert what in {one.what for one in found.unlike if one.decisive}
    assert not found.like_with_like and not report.summary_of(found)["like_with_like"]
    text = on_screen(found)
    assert text.index("not like with like") < text.index("a step")
    page = Page(on_page(found))
    assert page.text.index("Not like with like.") < page.text.index("Changed")
    assert "but not like with like" in page.text


def test_another_host_of_the_same_kind_and_other_workers_are_said_but_decide_nothing():
    facts = replace(FACTS, loaders=(replace(FACTS.loaders[0], num_workers=2),))
    found = contrasted(run("a"), run("b", machine=replace(MACHINE, hostname="there"), facts=facts))
    assert {one.what for one in found.unlike} == {"host", "loader workers"}
    assert found.like_with_like


def test_the_first_caution_is_that_the_runs_were_not_measured_in_turn(sooner):
    assert sooner.cautions[0].startswith("the two were not measured in turn")
    busy = contrasted(run("a", foreign_fraction=0.4), run("b"))
    assert "others used 40 % of the CPU during the first run" in busy.cautions


def test_both_plans_are_compared_where_both_have_one():
    won = Trial(
        levers={"bf16": {}}, outcome="faster", ratio=2.0, candidate_step_s=(0.005, 0.0051, 0.0049, 0.005, 0.005)
    )
    one, other = run("a", remeasured=won), run("b", remeasured=won)
    assert contrasted(one, other).tuned_step.name == "with the plan"
    assert contrasted(one, (replace(other[0], verdict="no difference"), other[1])).tuned_step is None
    stalled = replace(other[0], tuned_steps_per_s=0.0), other[1]
    assert contrasted(one, stalled).tuned_step.verdict == "not observed"


def test_the_summary_is_json_and_has_no_number_that_is_not_known(sooner):
    text = json.dumps(report.summary_of(sooner), allow_nan=False)
    assert set(json.loads(text)["phases"]) == {*PHASES, "unattributed"}
    hollow = contrast.contrast(examples.hollow(), examples.lenet(), trace_windows.Samples(), trace_windows.Samples())
    json.dumps(report.summary_of(hollow), allow_nan=False)


@pytest.mark.parametrize("first", sorted(examples.EXAMPLES))
@pytest.mark.parametrize("second", ["lenet", "huge", "hollow"])
def test_any_two_runs_have_a_screen_and_a_page(first, second):
    found = contrast.contrast(
        examples.EXAMPLES[first](), examples.EXAMPLES[second](), trace_windows.Samples(), trace_windows.Samples()
    )
    assert "nan" not in on_screen(found).lower().split()
    page = Page(on_page(found))
    assert page.stack == [] and len(page.ids) == len(set(page.ids)) and not page.named("script")
    for link in page.named("a"):
        assert link["href"][1:] in page.ids
    tags = [tag for tag, _ in page.elements]
    assert tags.count("figure") == tags.count("figcaption")


# -- the samples in a run folder -------------------------------------------------------------------------------------


def folder_of(tmp_path, *windows, name="trace-1.jsonl"):
    lines = [encode(HEADER), *(encode(one) for one in windows)]
    (tmp_path / name).write_text("\n".join(lines) + "\n")
    return tmp_path


def test_a_window_is_kept_as_its_mean_step_and_that_of_its_quarters(tmp_path):
    steps = [0.01, 0.01, 0.02, 0.02, 0.03, 0.03, 0.04, 0.04]
    place = folder_of(tmp_path, window(steps, {"data": [s / 2 for s in steps]}))
    (found,) = trace_windows.gather(place).windows
    assert found.whole.step_s == pytest.approx(0.025)
    assert [part.step_s for part in found.quarters] == pytest.approx([0.01, 0.02, 0.03, 0.04])
    assert found.whole.phases_s == pytest.approx({"data": 0.0125, "unattributed": 0.0125})


@pytest.mark.parametrize("num", [1, 2, 3, 5])
def test_short_windows_have_as_many_parts_as_steps_at_most(tmp_path, num):
    (found,) = trace_windows.gather(folder_of(tmp_path, window([0.01] * num))).windows
    assert len(found.quarters) == min(num, 4)


def test_a_trace_that_cannot_be_read_is_a_remark_and_the_others_count(tmp_path):
    folder_of(tmp_path, window([0.01] * 4))
    (tmp_path / "trace-2.jsonl").write_text("nonsense\n")
    found = trace_windows.gather(tmp_path)
    assert len(found.windows) == 1 and "is not a record" in found.remarks[0]


def test_a_window_with_more_or_fewer_times_than_steps_is_left_out_with_a_remark(tmp_path):
    whole = window([0.01] * 4, {"data": [0.005] * 4})
    odd = replace(whole, outside_s=(0.0,) * 3), replace(whole, phases={"data": (0.005,) * 5})
    found = trace_windows.gather(folder_of(tmp_path, *odd, whole))
    assert len(found.windows) == 1
    assert found.remarks == ("windows of `trace-1.jsonl` left out: 2 with more or fewer times than steps",)


def test_a_step_of_another_length_where_it_was_taken_apart_is_said_with_numbers():
    first, second = run("a", seed=1), run("b", seed=2)
    assert "a step took" not in " ".join(contrasted(first, second).cautions)
    slow = (replace(first[0], anatomy=replace(first[0].anatomy, step_s=0.0188)), first[1])
    said = contrasted(slow, second).cautions[-1]
    assert "first run" in said and "a step took 18.8 instead of 10" in said
    hollow = (replace(first[0], baseline_window_step_s=(), anatomy=anatomy({}, num_windows=0)), first[1])
    assert "a step took" not in " ".join(contrasted(hollow, second).cautions)


def test_a_headline_without_a_ratio_reads_as_a_sentence_and_names_stay_whole():
    few = run("lenet-1", seed=1)
    few = (replace(few[0], baseline_window_step_s=(0.01, 0.011)), few[1])
    found = contrasted(few, run("lenet-2", seed=2))
    number, unit, _ = headline(found)
    assert f"{number} {unit}" == "No ratio of `lenet-1` to `lenet-2` can be given"
    page = Page(on_page(found))
    assert "?" not in page.text.partition("Where a step goes")[0]
    assert "<code>lenet-2</code> cannot be held against <code>lenet-1</code>" in on_page(found)


def test_the_last_label_of_an_axis_lies_inside_the_drawing():
    drawn = str(svg.drawn(figures.stacked([("a", run("a")[0].anatomy)])))
    last = [label for label in re.findall(r"<text[^>]*>[^<]*</text>", drawn) if label.endswith(">10 ms</text>")]
    assert len(last) == 2 and all('text-anchor="end"' in label for label in last)
