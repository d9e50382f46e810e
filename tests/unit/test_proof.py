"""What do whole runs prove? With runs made by hand, and with a `prove` whose runs are."""

import json
from dataclasses import replace

import pytest

from flatout.errors import RecordError, ScriptError
from flatout.judge import proof
from flatout.judge.metric import Reading
from flatout.judge.proof import Aim
from flatout.records.as_json import to_json
from flatout.report.proof_words import number
from flatout.run.script import Script
from flatout.trials.proving import inputs, loop
from flatout.trials.proving.loop import Proving, former
from flatout.trials.proving.whole_run import Setting
from flatout.trials.terms import Show
from handmade import MACHINE
from proofs import ASKED, proved, runs, whole
from shown import on_screen

NAN, INF = float("nan"), float("inf")


def text(found):
    return " ".join(on_screen(found).split())


def test_equal_values_in_less_time():
    found = proved(runs(8, gain=2.0), target=0.9)
    assert found.equivalence.verdict == "identical" and found.time.verdict == "faster" and found.losses_equal
    assert found.reached == (8, 8) and found.target_time.verdict == "faster"
    said = text(found)
    assert "equal: the same acc, to the last digit, with all 8 seeds, and so is every loss" in said
    assert "1.99x" in said or "2.00x" in said or "2.01x" in said
    assert "next flatout run train.py --epochs 3" in said


def test_a_time_that_is_not_compared_yet_is_shown_and_nothing_slower_is_recommended():
    for gain, wanted in ((2.0, "flatout run"), (0.5, "flatout tune")):
        found = proved(runs(3, gain=gain))
        assert found.equivalence.verdict == "identical"
        said = text(found)
        assert "as fast in 3 whole runs, compared from 4 seeds on" in said and f"next {wanted}" in said


def test_worse_values_are_told_as_what_they_are_whatever_the_time():
    found = proved(runs(6, gain=2.0, shift=-0.05))
    assert found.equivalence.verdict == "different" and not found.losses_equal
    assert "different: acc differs by -0.0" in text(found)


def test_a_run_that_failed_leaves_its_seed_out_and_is_named():
    found = proved([*runs(4)[:-1], whole(3, "plan", None, problem="ended with exit code 1: boom")])
    assert found.equivalence.num_seeds == 3 and found.notes == ("seed 3, plan: ended with exit code 1: boom",)
    assert "failed" in text(found) and "boom" in text(found)


def test_a_plan_that_breaks_the_script_with_one_seed_is_not_proved_by_the_others():
    same = [whole(seed, side, 0.9 + seed / 100) for seed in range(4) for side in proof.SIDES]
    broken = whole(3, "plan", None, problem="ended with exit code 1: boom", exit_code=1)
    found = proved([*same[:-1], broken]).equivalence
    assert found.verdict == "different" and found.num_seeds == 3 and "failed with seed 3" in found.reason
    assert "failed with seed 3" in text(proved([*same[:-1], broken]))
    silent = whole(3, "plan", None, problem="the metric was not found")
    assert proved([*same[:-1], silent]).equivalence.verdict == "undecided"
    assert proved([*same, broken]).equivalence.verdict == "identical", "a later run of this seed came to its end"
    alike = [replace(one, problem="x", exit_code=1) if one.seed == 3 else one for one in same]
    assert proved(alike).equivalence.verdict == "identical", "plain fails with it as well"


def test_a_run_that_begins_beyond_the_target_has_reached_it():
    def beyond(seed, side):
        return whole(seed, side, 0.96, readings=(Reading(value=0.95, at_s=4.0), Reading(value=0.94, at_s=9.0)))

    found = proved([*runs(4), beyond(4, "plain"), beyond(4, "plan")], target=0.9)
    assert found.reached == (5, 5)


def test_what_differs_in_kind_is_noted():
    many = [
        *runs(3),
        whole(3, "plain"),
        whole(3, "plan", num_steps=90, num_readings=1, fault="step: RuntimeError: no"),
    ]
    notes = " ".join(proved(many).notes)
    assert "100 steps without the plan, 90 with it" in notes and "found 2 times without the plan, 1" in notes
    assert "broke under the plan with seed 3: step: RuntimeError: no" in notes
    assert "others" not in notes.replace("other processes", "")


def test_plain_runs_that_computed_the_same_are_one_seed():
    same = [whole(seed, side, 0.98, losses_hash="x") for seed in range(4) for side in proof.SIDES]
    found = proved(same)
    assert found.seeds_ignored and found.equivalence.verdict == "undecided"
    assert "ignores seeds" in text(found) and "under the plan it has the same acc" in text(found)
    assert not proof.seeds_ignored(runs(4)) and not proof.seeds_ignored(same[:1])


@pytest.mark.parametrize(
    ("value", "losses_hash", "ignored"),
    [(0.98123456, "", True), (0.98, "", False), (NAN, "same", False)],
    ids=["readings of many digits", "of few, which may be chance", "all diverged at once"],
)
def test_without_losses_readings_say_whether_seeds_are_ignored(value, losses_hash, ignored):
    same = [whole(seed, "plain", value, losses_hash=losses_hash, readings=(Reading(value=value),)) for seed in range(3)]
    assert proof.seeds_ignored(same) == ignored


def test_an_interruption_before_the_first_pair_says_so_and_proposes_what_was_typed():
    one = proof.prove(ASKED, Aim(), runs(1)[:1], MACHINE, "2026-11-23T00:00:00+00:00", proof.INTERRUPTED)
    said = text(one)
    assert "no seed with both runs" in said and "0 seeds" not in said
    assert said.endswith("next flatout prove train.py --epochs 3")


def test_plain_against_plain_is_not_said_to_be_under_a_plan():
    broken = whole(4, "plan", None, exit_code=1, problem="ended with exit code 1: boom")
    itself = replace(ASKED, levers={})
    for seen in (runs(4), [*runs(4), whole(4, "plain"), broken], [replace(r, losses_hash="one") for r in runs(3)]):
        said = text(proof.prove(itself, Aim(target=0.5), seen, MACHINE, "2026-11-23T00:00:00+00:00"))
        assert "A/A: plain against plain" in said and "under it" not in said and "under the plan" not in said


def diverged(num, plain, plan):
    return [whole(seed, side, value, losses_hash=f"{seed}") for seed in range(num)
            for side, value in (("plain", plain), ("plan", plan))]  # fmt: skip


@pytest.mark.parametrize(("plain", "plan"), [(0.9, NAN), (INF, 0.9)])
def test_one_side_that_came_to_nan_is_different_also_when_the_runs_are_read_again(tmp_path, plain, plan):
    for run in diverged(3, plain, plan):
        proof.append(run, tmp_path)
    found = proved(proof.finished_runs(tmp_path))
    assert found.equivalence.verdict == "different" and "only one side came to NaN or infinity" in text(found)
    proof.save(found, tmp_path)
    assert text(proof.load(tmp_path)) == text(found)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_both_sides_that_diverged_leave_nothing_to_compare(value):
    found = proved(diverged(3, value, value))
    said = text(found)
    assert found.equivalence.verdict == "undecided" and not found.seeds_ignored
    assert "nothing to compare: with every seed both sides came to NaN or infinity: mend the training" in said
    assert "flatout prove train.py" in said and " nan" not in said
    json.dumps(to_json(proof.summary_of(found)), allow_nan=False)
    for run in found.runs:
        assert number(run.value) == {"nan": "NaN"}.get(str(value), str(value).replace("inf", "infinity"))


def test_energy_is_compared_where_it_was_read():
    assert proved(runs(4)).energy is None
    weighed = [replace(run, joules=100.0 + run.seed if run.side == "plain" else 50.0) for run in runs(4)]
    assert proved(weighed).energy.verdict == "faster" and "less" in text(proved(weighed))


def test_a_proof_survives_its_file_and_runs_theirs_even_where_the_last_line_is_cut(tmp_path):
    found = proved(runs(3))
    proof.save(found, tmp_path)
    assert to_json(proof.load(tmp_path)) == to_json(found)
    for run in runs(2):
        proof.append(run, tmp_path)
    file = tmp_path / proof.RUNS
    file.write_text(file.read_text()[:-30])
    assert [(r.seed, r.side) for r in proof.finished_runs(tmp_path)] == [(0, "plain"), (0, "plan"), (1, "plain")]
    proof.append(whole(1, "plan"), tmp_path)
    assert len(proof.finished_runs(tmp_path)) == 4, "what follows a line that was cut is not lost with it"
    for content, said in (("{", "is torn"), ('{"format": 9}', "has format 9, this version reads up to 1")):
        (tmp_path / proof.FILE).write_text(content)
        with pytest.raises(RecordError, match=said):
            proof.load(tmp_path)
    (tmp_path / proof.FILE).unlink()
    with pytest.raises(RecordError, match="no proof in"):
        proof.load(tmp_path)


def proving(tmp_path, monkeypatch, make, **aim):
    done = []

    def run_whole(setting, side, seed, tick):
        tick()
        done.append((seed, side))
        return make(seed, side)

    monkeypatch.setattr(loop, "run_whole", run_whole)
    setting = Setting(script=Script(path="train.py"), asked=ASKED, registry={}, run_folder=tmp_path, machine=MACHINE)
    return Proving(setting, Aim(**aim), ("", ""), Show()), done


def test_each_seed_is_run_twice_in_an_order_drawn_by_lot_and_kept_at_once(tmp_path, monkeypatch):
    made, done = proving(tmp_path, monkeypatch, lambda seed, side: whole(seed, side, 0.9 + seed / 100), num_seeds=12)
    found = made.run()
    assert found.equivalence.verdict == "identical" and len(done) == 24
    firsts = [side for _, side in done[::2]]
    assert done[0] == (0, "plain") and {*firsts} == {"plain", "plan"}
    assert len(proof.finished_runs(tmp_path)) == 24 and (tmp_path / proof.FILE).exists()


def test_ctrl_c_keeps_what_is_there_and_the_next_time_goes_on(tmp_path, monkeypatch):
    def stops(seed, side):
        if seed == 2:
            raise KeyboardInterrupt
        return whole(seed, side, 0.9 + seed / 100)

    made, _ = proving(tmp_path, monkeypatch, stops, num_seeds=4)
    found = made.run()
    assert found.interrupted and found.equivalence.num_seeds == 2
    said = text(found)
    assert "2 of 4 seeds" in said and "you stopped it; the command below goes on" in said
    assert "; about 1 more would do;" in said and "`--seeds 3`" not in said
    assert said.endswith("next flatout prove --seeds 4 train.py --epochs 3")
    again, done = proving(tmp_path, monkeypatch, lambda seed, side: whole(seed, side, 0.9 + seed / 100), num_seeds=4)
    assert again.run().equivalence.num_seeds == 4 and {seed for seed, _ in done} == {2, 3}


BROKEN = {"exit_code": 1, "problem": "ended with exit code 1: ValueError: boom", "value": None}


@pytest.mark.parametrize("failing", [0, 2])
def test_a_script_that_fails_plainly_ends_it_at_once_and_says_with_which_seed(tmp_path, monkeypatch, failing):
    def make(seed, side):
        return (
            whole(seed, side, **BROKEN) if (seed, side) == (failing, "plain") else whole(seed, side, 0.9 + seed / 100)
        )

    made, done = proving(tmp_path, monkeypatch, make, num_seeds=4)
    with pytest.raises(ScriptError) as caught:
        made.run()
    assert done[-1] == (failing, "plain") and len(done) in (1 + 2 * failing, 2 + 2 * failing)
    assert "exit code 1" in caught.value.error and "ValueError: boom" in caught.value.cause
    assert ("it fails with seed 2; `--seeds 2` judges the runs before" in caught.value.hint) == (failing == 2)


def test_a_script_that_fails_under_the_plan_is_a_finding(tmp_path, monkeypatch):
    def make(seed, side):
        return whole(seed, side, **BROKEN) if side == "plan" else whole(seed, side, 0.9 + seed / 100)

    made, done = proving(tmp_path, monkeypatch, make, num_seeds=3)
    found = made.run()
    assert len(done) == 6 and found.equivalence.verdict == "different" and len(found.notes) == 3


def test_an_edit_of_the_script_ends_a_proof_and_what_was_run_before_it_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(seed, side):
        (tmp_path / "model.py").write_text(f"x = {1 + (seed == 1)}")
        return whole(seed, side, 0.9, inputs=inputs.marks(["model.py"]))

    made, done = proving(tmp_path, monkeypatch, make, num_seeds=3)
    with pytest.raises(ScriptError, match="changed while it was being proved"):
        made.run()
    assert len(done) == 3 and [run.seed for run in proof.finished_runs(tmp_path)] == [0, 0]


def test_an_edit_during_the_first_run_that_may_write_ends_a_proof_too(tmp_path, monkeypatch):
    """Files that a run with `--allow-writes` wrote are not among its inputs; the script is none that it writes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import model\n")
    (tmp_path / "model.py").write_text("x = 1\n")

    def make(seed, side):
        (tmp_path / "model.py").write_text("x = 2\n")
        return whole(seed, side, 0.9)

    made, done = proving(tmp_path, monkeypatch, make, num_seeds=3)
    with pytest.raises(ScriptError, match="changed while it was being proved") as caught:
        made.run()
    assert len(done) == 1 and not proof.finished_runs(tmp_path)
    assert caught.value.cause == "its file, or one that it imports from beside it, was edited meanwhile"


def test_a_metric_that_is_not_there_costs_one_run(tmp_path, monkeypatch):
    lost = {"value": None, "problem": "the metric was not found"}
    made, done = proving(tmp_path, monkeypatch, lambda seed, side: whole(seed, side, **lost))
    with pytest.raises(RecordError, match="no value of `acc` in the first run"):
        made.run()
    assert len(done) == 1


def test_runs_of_another_question_are_left_alone(tmp_path):
    for name, asked in (("one", ASKED), ("two", replace(ASKED, source_hash="other"))):
        (tmp_path / name).mkdir()
        (tmp_path / name / loop.ASKED).write_text(json.dumps(to_json(asked)))
    (tmp_path / "three").mkdir()
    folders = list(tmp_path.iterdir())
    assert former(folders, ASKED) == (tmp_path / "one", [])
    assert former(folders, replace(ASKED, levers={})) == (None, [])


def test_a_plan_that_was_not_at_work_proves_nothing(tmp_path, monkeypatch):
    idle = {"idle": {"bf16": "no matrix product"}}

    def make(seed, side):
        return whole(seed, side, 0.9 + seed / 100, **(idle if side == "plan" else {}))

    made, done = proving(tmp_path, monkeypatch, make, num_seeds=5)
    found = made.run()
    assert len(done) == 2 and found.stopped == "more seeds would bring nothing new"
    assert found.equivalence.verdict == "undecided"
    said = text(found)
    assert "nothing was proved: nothing of the plan was at work (bf16: no matrix product)" in said
    assert "bf16 was not at work: no matrix product" in said and said.endswith(
        "next flatout levers train.py --epochs 3"
    )


def test_a_lever_that_was_not_at_work_with_some_seeds_is_noted():
    some = [replace(r, idle={"bf16": "too late"}) if (r.seed, r.side) == (1, "plan") else r for r in runs(4)]
    found = proved(some)
    assert found.equivalence.verdict == "identical"
    assert "bf16 was not at work with seed 1: too late" in found.notes


def test_a_metric_found_more_rarely_in_as_many_steps_is_not_the_same_metric():
    some = [replace(r, num_readings=3) if (r.seed, r.side) == (2, "plan") else r for r in runs(4)]
    found = proved(some).equivalence
    assert found.verdict == "undecided" and "with seed 2 the metric was found 2 times and 3 times" in found.reason
    fewer = [replace(r, num_steps=90) if r.num_readings == 3 else r for r in some]  # stopped early: it is the last one
    assert proved(fewer).equivalence.verdict == "identical"


def test_runs_of_other_files_are_not_gone_on_with(tmp_path, monkeypatch):
    read = tmp_path / "config.json"
    read.write_text("1")

    def make(seed, side):
        return whole(seed, side, 0.9 + seed / 100, inputs=inputs.marks([str(read)]))

    folder = tmp_path / "train-1"
    folder.mkdir()
    made, done = proving(folder, monkeypatch, make, num_seeds=3)
    assert not made.run().notes and former([folder], ASKED) == (folder, [])
    again, done = proving(folder, monkeypatch, make, num_seeds=3)
    assert not done and "6 runs made by an earlier command" in again.run().notes[-1]
    read.write_text("2")
    assert former([folder], ASKED) == (None, [str(read)])
    more, _ = proving(folder, monkeypatch, make, num_seeds=4)
    with pytest.raises(ScriptError) as caught:
        more.run()
    assert "config.json" in caught.value.cause and "edited meanwhile" in caught.value.cause
    read.write_text("1")
    assert former([folder], ASKED) == (folder, [])
