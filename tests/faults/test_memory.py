"""Memory runs out under a plan: the run says so, and the next one goes without what took the memory."""

import json
from pathlib import Path

import pytest

from faulting import copied, flatout, last_lines, plain, write_plan
from flatout.frameworks.pytorch.levers import registry
from flatout.records.plan import Plan
from flatout.records.trace import Failure
from flatout.run import shortage
from handmade import plan

pytest.importorskip("torch")
from flatout.run.choice import Engagement
from flatout.run.outcome import Outcome


@pytest.mark.smoke
def test_a_run_that_is_short_of_memory_goes_on_and_the_next_one_goes_without(folder):
    copied("faulty.py", folder)
    write_plan("faulty.py", "foreach_optimizer", "bf16")
    written = Path("flatout.toml").read_text()
    first = flatout("run", "faulty.py", "memory")
    assert first.returncode == 0 and "Traceback" not in first.stderr
    assert "OutOfMemoryError" in first.stderr and "the levers were released" in first.stderr
    assert last_lines(first)[-1] == "out of memory under the plan: the next run goes without foreach_optimizer"
    second = flatout("run", "--json", "told.json", "faulty.py", "memory")
    assert "without foreach_optimizer: out of memory before" in last_lines(second)[0]
    assert json.loads(Path("told.json").read_text())["levers"] == ["bf16"]
    assert json.loads(Path("told.json").read_text())["left_out_next"] == ["bf16"]
    third = flatout("run", "faulty.py", "memory")
    assert "without foreach_optimizer, bf16" in last_lines(third)[0] and "failed" not in third.stderr
    assert third.stdout == plain("faulty.py").stdout
    assert Path("flatout.toml").read_text() == written, "a plan is never edited by a run"


# -- what is noted -------------------------------------------------------------------------------------------------


NOTED = Plan(**{name: getattr(plan("train.py"), name) for name in Plan.__slots__})


@pytest.mark.smoke
def test_levers_that_take_memory_are_to_blame_and_all_where_none_does():
    levers = registry()
    assert shortage.suspects({"bf16": {}, "device_store": {}, "workers": {"num": 1}}, levers) == (
        "device_store",
        "workers",
    )
    assert shortage.suspects({"bf16": {}, "threads": {"num": 1}}, levers) == ("bf16", "threads")


@pytest.mark.smoke
def test_a_note_adds_up_and_lapses_with_the_plan(tmp_path):
    from dataclasses import replace

    one = replace(NOTED, levers={"bf16": {}, "device_store": {}}, created="2026-01-01T00:00:00+00:00")
    assert shortage.left_out(tmp_path, one) == ()
    assert shortage.note(tmp_path, one, ("device_store",))
    assert shortage.left_out(tmp_path, one) == ("device_store",)
    assert shortage.note(tmp_path, one, ("bf16",))
    assert shortage.left_out(tmp_path, one) == ("bf16", "device_store")
    assert shortage.left_out(tmp_path, replace(one, created="2026-01-02T00:00:00+00:00")) == ()
    assert shortage.left_out(tmp_path, replace(one, script="other.py")) == ()


@pytest.mark.smoke
@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"format": 2, "plans": {}}', '{"format": 1, "plans": []}', "[" * 100_000, "\ufeff\x00",
     '{"format": 1, "plans": {"train.py": 3}}', '{"format": 1, "plans": {"train.py": {"levers": 3}}}'],
)  # fmt: skip
def test_a_note_that_was_edited_into_nonsense_notes_nothing_and_is_written_anew(tmp_path, text):
    (tmp_path / shortage.FILE).write_text(text)
    assert shortage.left_out(tmp_path, NOTED) == ()
    assert shortage.note(tmp_path, NOTED, (next(iter(NOTED.levers)),))
    assert shortage.left_out(tmp_path, NOTED) == (next(iter(NOTED.levers)),)


@pytest.mark.smoke
def test_a_note_that_cannot_be_written_is_not_promised(tmp_path):
    assert not shortage.note(tmp_path / "gone", NOTED, ("bf16",))


def memory_ran_out(stage):
    return Failure(stage=stage, error="OutOfMemoryError", message="", out_of_memory=True)


@pytest.mark.smoke
def test_memory_that_runs_out_for_the_script_counts_while_levers_are_at_work():
    raised = memory_ran_out("script")
    assert Outcome(raised=raised, engaged=True).out_of_memory
    assert not Outcome(raised=raised, engaged=False).out_of_memory
    assert Outcome(failures=[memory_ran_out("step")]).out_of_memory
    assert not Outcome(failures=[Failure(stage="step", error="ValueError", message="")], engaged=True).out_of_memory


def test_levers_that_were_named_are_engaged_as_they_were_said(folder):
    outcome = Outcome(failures=[memory_ran_out("step")])
    shortage.note_if_any(Engagement(levers={"bf16": {}}), outcome, registry())
    assert outcome.short_of_memory == () and not Path(".flatout").exists()
