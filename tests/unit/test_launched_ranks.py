"""Which script a launcher starts, what makes one rank of it stand alone, and what all ranks say of its winner."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from flatout.errors import FlatoutError, ScriptError, UsageError
from flatout.frameworks import kind
from flatout.judge.agreement import Judgement
from flatout.records.plan import Trial
from flatout.records.trace import Failure
from flatout.report import verdict
from flatout.run import launcher_command
from flatout.trials import conclude, starts
from flatout.trials.child_failures import why_ended
from flatout.trials.short_runs import Setting, ShortRun
from flatout.trials.terms import Goal, Show, Terms
from flatout.trials.tune_launcher import LaunchedRanks, alone
from handmade import HEADER, MACHINE, plan, result

WORDS = ("torchrun", "--nproc-per-node", "2", "train.py", "--epochs", "3")


def test_the_script_is_the_first_python_file_or_the_last_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    found = launcher_command.script_of(WORDS)
    assert found.path == "train.py" and found.arguments == ("--epochs", "3")
    found = launcher_command.script_of(("python", "-m", "torch.distributed.run", "-m", "package.train", "--lr", "1"))
    assert found.module == "package.train" and found.arguments == ("--lr", "1")
    with pytest.raises(UsageError, match="no script in `torchrun"):
        launcher_command.script_of(("torchrun", "--nproc-per-node", "2", "other.py"))


def test_a_launcher_is_a_program_that_is_no_script_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("python", "train.py")
    assert launcher_command.launched_by(words) == words
    assert (
        launcher_command.launched_by(("train.py",)) == ()
        and launcher_command.launched_by(("no-such-program", "x")) == ()
    )
    assert launcher_command.launched_by(words, module="package") == ()
    with pytest.raises(UsageError, match="cannot be combined"):
        launcher_command.launched_by(words, num_ranks=2)


def test_a_rank_alone_believes_in_a_world_of_one(monkeypatch):
    monkeypatch.setenv("MINE", "1")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    found = alone(
        {
            "MINE": "1", "OMP_NUM_THREADS": "1", "RANK": "0", "WORLD_SIZE": "4", "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "none", "FLATOUT_SESSION": "x", "ACCELERATE_MIXED_PRECISION": "no",
        }
    )  # fmt: skip
    assert found["WORLD_SIZE"] == "1" and found["RANK"] == "0" and found["MASTER_PORT"] == "0"
    assert found["OMP_NUM_THREADS"] == "1" and found["ACCELERATE_MIXED_PRECISION"] == "no"
    assert not {"MINE", "TORCHELASTIC_RUN_ID", "FLATOUT_SESSION"} & {*found}


WON = Trial(
    levers={"workers": {"num": 2}}, outcome="faster", ratio=1.8, ratio_low=1.7, ratio_high=1.9, num_pairs=16,
    agreement="agrees", agreement_detail="items and random streams equal", class_="exact", remeasured=True,
)  # fmt: skip


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Ranks whose runs take what `steps_s` says, plain and under levers; `problem` ends those under levers."""

    class Ranks(LaunchedRanks):
        steps_s = (0.01, 0.006)
        problem: FlatoutError | None = None
        judged = Judgement(verdict="agrees", detail="parameters 1e-7")

        def __init__(self) -> None:
            setting = Setting(
                script=launcher_command.script_of(("python", "-m", "train")), registry=kind().levers(),
                run_folder=tmp_path,
                terms=Terms(), machine=MACHINE,
            )  # fmt: skip
            super().__init__(WORDS, setting, Show())
            self.taken: list[dict] = []

        def take(self, setting, wanted, number, wait):
            self.taken.append(dict(wanted.levers))
            step_s = self.steps_s[bool(wanted.levers)] * (1 + 0.001 * (number % 3))
            return ShortRun(
                folder=tmp_path / f"sample-{number}", num_steps=20, step_s=(step_s,) * 10,
                header=replace(HEADER, world_size=2), problem=self.problem if wanted.levers else None,
            )  # fmt: skip

    found = Ranks()
    monkeypatch.setattr(starts, "take", found.take)
    monkeypatch.setattr(ShortRun, "environment", lambda sample: {"LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"})
    monkeypatch.setattr(starts, "_told", lambda samples, class_, accept: (found.judged, class_))
    monkeypatch.setattr(conclude, "plan_of", lambda won, *_, **__: plan(levers=won.levers, ratio=won.ratio))
    goal = found.begin(Goal())
    assert "threads" in goal.choice.ruled_out and goal.terms.environment["WORLD_SIZE"] == "1"
    return found


def of_one_rank():
    return result(remeasured=WON, verdict="faster", plan=plan(levers=WON.levers))


def test_what_wins_on_all_ranks_is_the_result(ranks):
    found = ranks.confirm(of_one_rank())
    assert found.verdict == "faster" and found.launched.alone == WON
    assert found.remeasured.ratio == pytest.approx(1.667, rel=0.01) and found.plan.ratio == found.remeasured.ratio
    assert found.baseline_steps_per_s == pytest.approx(100, rel=0.01)
    assert found.typed == "-- torchrun --nproc-per-node 2 train.py --epochs 3"
    assert verdict.next_command(found)[0].startswith("flatout exec")
    assert "one of 2 ranks by itself, where workers=2 brought 1.8x [1.70, 1.90]" in verdict.on_ranks(found)
    plain, under = ranks.taken.count({}), ranks.taken.count(dict(WON.levers))
    assert plain == under + 1  # two references, one that is compared, then pairs


def test_what_loses_on_all_ranks_makes_no_plan(ranks):
    ranks.steps_s = (0.01, 0.02)
    found = ranks.confirm(of_one_rank())
    assert found.verdict == "no difference" and found.plan is None and found.remeasured.outcome == "slower"


def test_what_trains_something_else_on_ranks_is_not_timed(ranks):
    ranks.judged = Judgement(verdict="disagrees", detail="parameters 0.3")
    found = ranks.confirm(of_one_rank())
    assert found.plan is None and found.remeasured.outcome == "disagrees" and found.remeasured.ratio is None


def test_ranks_that_break_under_the_levers_are_a_finding(ranks):
    ranks.problem = ScriptError("the script did not make 20 steps", cause="ValueError: no", hint="")
    found = ranks.confirm(of_one_rank())
    assert found.plan is None and found.remeasured.outcome == "failed"
    assert found.remeasured.reason.endswith("20 steps: ValueError: no")


def test_where_nothing_wins_alone_nothing_is_tried_on_all(ranks):
    found = ranks.confirm(result(verdict="no difference", remeasured=None, plan=None))
    assert found.launched.alone is None and found.verdict == "no difference" and ranks.taken == [{}, {}]
    assert "none was tried on all" in verdict.on_ranks(found)


def test_what_could_not_be_compared_on_one_rank_is_compared_on_all(ranks):
    unclear = replace(WON, agreement="inconclusive", agreement_detail="nothing was captured")
    found = ranks.confirm(result(remeasured=unclear, verdict="inconclusive", plan=None))
    assert found.verdict == "faster" and found.plan is not None and found.remeasured.agreement == "agrees"


def test_ctrl_c_while_all_ranks_are_compared_keeps_what_one_rank_was_found_to_gain(ranks, monkeypatch):
    def stopped(setting, wanted, number, wait):
        raise KeyboardInterrupt

    monkeypatch.setattr(starts, "take", stopped)
    found = ranks.confirm(of_one_rank())
    assert found.plan is None and found.stopped == "you stopped it" and found.launched.alone == WON
    assert found.remeasured.outcome == "inconclusive" and "not timed on all ranks" in found.remeasured.reason


def test_ranks_that_their_script_starts_itself_are_not_tuned(ranks):
    with pytest.raises(ScriptError, match="2 processes train, and their environment tells them of 1"):
        ranks._require_world(
            SimpleNamespace(num_trained=2, environment=dict)  # as `mp.spawn` leaves it
        )


def test_what_ranks_raised_is_the_cause_and_not_what_the_others_said_of_it(tmp_path):
    lost = Failure(stage="script", error="RuntimeError", message="Connection closed by peer [127.0.0.1]:1")
    boom = Failure(stage="script", error="ValueError", message="boom", place="train.py:3")
    traces = [[HEADER, lost], [replace(HEADER, rank=1), boom]]
    assert why_ended(tmp_path, 20, traces, launched=True).cause == "rank 1: ValueError: boom (train.py:3)"
    assert "Connection closed" in why_ended(tmp_path, 20, traces[:1], launched=True).cause
    (tmp_path / "output-run.log").write_text(
        "Traceback (most recent call last):\nKeyError: 'A'\nsee: https://pytorch\n"
    )
    assert why_ended(tmp_path, 20, [[]], launched=True).cause == "KeyError: 'A'"
    assert why_ended(tmp_path, 20, [[]], launched=False).cause == "see: https://pytorch"
