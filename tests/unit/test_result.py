"""The record of a `tune` or `why`: saved whole, read back, and summed up for programs."""

import json
import math
import os
from dataclasses import replace

import pytest

from flatout.errors import MachineError, RecordError
from flatout.judge import result as results
from flatout.judge.result import load, save, summary_of
from flatout.judge.stats import Comparison, compare
from handmade import ANATOMY, result

SAME = [1.0, 1.1, 1.0, 1.05, 1.02]


def refusal(path):
    with pytest.raises(RecordError) as caught:
        load(path)
    assert caught.value.cause and caught.value.hint
    return caught.value


def same(one, other):
    """Equal up to NaN, which is not equal to itself."""
    return results.to_json(one) == results.to_json(other)


def test_a_result_survives_its_file_found_by_folder_or_by_name(tmp_path):
    made = result()
    save(made, tmp_path)
    path = tmp_path / "result.json"
    assert same(load(tmp_path), made) and same(load(path), made)
    assert os.listdir(tmp_path) == ["result.json"]


def test_a_why_without_trials_survives_its_file(tmp_path):
    made = result(
        command="why", verdict="inconclusive", trials=(), remeasured=None, plan=None, plan_path=None, noise=None
    )
    save(made, tmp_path)
    assert same(load(tmp_path), made)


def test_numbers_that_are_not_known_make_a_file_that_every_reader_takes(tmp_path):
    unknown = Comparison(verdict="inconclusive", ratio=math.nan, low=math.nan, high=math.inf, low99=math.nan,
                         high99=math.inf, num_pairs=1, reason="too few")  # fmt: skip
    save(result(noise=unknown), tmp_path)
    path = tmp_path / "result.json"
    json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    found = load(path).noise
    assert math.isnan(found.ratio) and found.high == math.inf


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"[" * 100_000, b'{"format": 1}', b"\xff\xfe"])
def test_a_torn_file_is_refused_in_three_parts(tmp_path, content):
    (tmp_path / "result.json").write_bytes(content)
    assert str(tmp_path) in refusal(tmp_path).error


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff\xfe"])
def test_a_torn_file_is_not_said_to_be_missing(tmp_path, content):
    (tmp_path / "result.json").write_bytes(content)
    assert refusal(tmp_path).error == f"`{tmp_path / 'result.json'}` is torn"


def test_a_newer_file_is_said_to_be_newer_even_where_fields_have_changed(tmp_path):
    (tmp_path / "result.json").write_text('{"format": 2, "other": 1}')
    problem = refusal(tmp_path)
    assert "has format 2, this version reads up to 1" in problem.error and "newer" in problem.cause


def test_a_missing_file_says_what_writes_one(tmp_path):
    problem = refusal(tmp_path)
    assert problem.error == f"there is no result in `{tmp_path}`" and "`tune` and `why` write one" in problem.hint


@pytest.mark.parametrize(
    ("stopped", "short_budget_s", "again"),
    [
        ("", None, "flatout tune --levers bf16"),
        ("you stopped it", None, "flatout tune --levers bf16"),
        ("the budget of 90 s was too short for more", 90.0, "flatout tune --budget 180s --levers bf16"),
    ],
)
def test_where_the_budget_was_spent_the_next_one_is_twice_as_large(stopped, short_budget_s, again):
    assert result(stopped=stopped, short_budget_s=short_budget_s, options="--levers bf16").retry_command == again


def test_a_budget_that_was_asked_for_is_asked_for_again():
    asked = result(command="tune", asked_budget_s=90.0, short_budget_s=None, options="--levers bf16")
    assert asked.tune_command == asked.retry_command == "flatout tune --budget 90s --levers bf16"
    spent = replace(asked, short_budget_s=90.0, tuning_s=88.0)
    assert spent.retry_command == "flatout tune --budget 180s --levers bf16"
    assert replace(asked, command="why").tune_command == "flatout tune --levers bf16"


def test_a_plan_that_lies_elsewhere_is_named_in_what_to_type_next():
    assert result(plan_path="flatout.toml").run_command == "flatout run"
    assert result(plan_path="my plans/a.toml").run_command == "flatout run --plan 'my plans/a.toml'"


def test_a_field_of_another_type_is_named_by_its_path(tmp_path):
    save(result(), tmp_path)
    path = tmp_path / "result.json"
    value = json.loads(path.read_text())
    value["trials"][0]["ratio"] = "fast"
    path.write_text(json.dumps(value))
    assert "`trials[0].ratio` is `fast`, not float" in refusal(path).error


def test_a_folder_that_cannot_be_written_is_an_error_in_three_parts(tmp_path):
    with pytest.raises(MachineError) as caught:
        save(result(), tmp_path / "gone")
    assert caught.value.cause and caught.value.hint


def test_the_noise_is_how_far_plain_against_plain_reaches_from_one():
    noise = Comparison(verdict="inconclusive", ratio=1.0, low=0.97, high=1.02, low99=0.9, high99=1.1, num_pairs=5)
    assert result(noise=noise).noise_fraction == pytest.approx(0.03)
    assert result(noise=None).noise_fraction is None
    assert result(noise=compare([1.0], [1.0])).noise_fraction is None
    assert result(noise=compare(SAME, SAME)).noise_fraction == 0.0


def test_costs_are_summed_over_trials_and_windows_left_out_over_the_winner_too():
    assert result().trials_s == 2.0
    assert result().num_discarded == 3 and result(remeasured=None).num_discarded == 2


@pytest.mark.parametrize(
    ("steps", "per_run", "runs"),
    [(18_000, 5_000, 4), (10, 5_000, 1), (0, 5_000, 1), (None, 5_000, None), (9, None, None)],
)
def test_the_run_within_which_tuning_is_earned_back_counts_from_one(steps, per_run, runs):
    assert result(break_even_steps=steps, steps_in_run=per_run).break_even_runs == runs


def test_the_summary_of_a_tune_is_its_verdict_with_the_measured_ratio():
    found = summary_of(result())
    assert (found["verdict"], found["ratio"], found["ratio_low"], found["ratio_high"]) == ("faster", 1.5, 1.45, 1.55)
    assert found["levers"] == ["bf16"] and found["plan"] == "flatout.toml"


def test_without_a_plan_the_summary_claims_no_gain_though_a_candidate_was_measured_again():
    found = summary_of(result(plan=None, plan_path=None, verdict="inconclusive", tuned_steps_per_s=100.0))
    assert (found["ratio"], found["levers"], found["plan"]) == (1.0, [], None)


def test_the_summary_of_a_why_is_its_diagnosis():
    found = summary_of(result(command="why"))
    assert found["binding"] == "input" and found["phases"]["data"] == pytest.approx(0.5)
    assert sum(found["phases"].values()) == pytest.approx(1.0)
    assert set(found["bounds"]) == {"free data", "free code between the parts"} and "copy" in found["not_observed"]


@pytest.mark.parametrize("command", ["tune", "why"])
def test_a_summary_is_json_that_every_reader_takes(command):
    odd = replace(ANATOMY, phases_s={**ANATOMY.phases_s, "data": math.nan})
    text = json.dumps(summary_of(result(command=command, anatomy=odd, baseline_steps_per_s=math.inf)), allow_nan=False)
    assert "NaN" not in text
