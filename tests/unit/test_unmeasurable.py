"""What is said of a script that gave nothing to measure, and of a result that could not be kept."""

import errno
from dataclasses import replace
from types import SimpleNamespace

import pytest

from flatout.errors import Inconclusive, MachineError, ScriptError, cannot_write
from flatout.judge import result
from flatout.records.trace import Failure, Ready, Window
from flatout.run.child_process import Ended
from flatout.run.script import Script
from flatout.trials import bench, tune
from flatout.trials.child_failures import CandidateFailed, cannot_measure
from flatout.trials.conduct import Conduct
from flatout.trials.terms import Goal, Show, Terms
from handmade import FACTS, HEADER, MACHINE, lever, registry


@pytest.mark.parametrize(
    ("end", "error", "cause"),
    [
        (Ended(exit_code=None, hung=True), "made no training step within 90 s", "it printed nothing"),
        (Ended(exit_code=None, hung=True, output="a\nb\n"), "made no training step", "line it printed: `b`"),
        (Ended(exit_code=None, hung=True, trained=True), "did not make its first few training steps", "very long"),
        (Ended(exit_code=None, hung=True, trained=True, num_steps=40), "stopped making", "after 40 steps"),
        (Ended(exit_code=0, finished=True), "ended without a training step", "no optimizer update was seen"),
        (Ended(exit_code=0, finished=True, num_steps=3), "ended after 3 training steps", "too few"),
        (Ended(exit_code=-9), "was killed by SIGKILL", "it printed nothing"),
        (Ended(exit_code=1, output="\x1b[1mred\x1b[0m \x1b[2J"), "failed: ended with exit code 1", "`red \\x1b[2J`"),
        (Ended(exit_code=3, output="bad luck"), "failed: ended with exit code 3", "`bad luck`"),
    ],
)
def test_each_end_has_its_own_error(end, error, cause):
    found = cannot_measure(Script(path="train.py"), end, 90.0)
    busy = cannot_measure(Script(path="train.py"), end, 90.0, 0.7)
    assert "busy" not in found.cause and (
        "the machine is busy: others use 70 % of the CPU" in busy.cause or not end.hung
    )
    assert error in found.error and cause in found.cause and found.hint


def test_a_folder_that_a_trial_cannot_rename_is_explained():
    failure = Failure(stage="script", error="OSError", message="[Errno 18] Invalid cross-device link: 'a' -> 'b'")
    problem = cannot_measure(Script(path="train.py"), Ended(exit_code=1, failure=failure), 90.0)
    assert "shutil.move" in problem.hint and "--allow-writes" in problem.hint


def test_a_folder_that_takes_nothing_in_a_trial_alone_is_explained():
    failure = Failure(stage="script", error="OSError", message="[Errno 30] Read-only file system: '/data/model.pt'")
    problem = cannot_measure(Script(path="train.py"), Ended(exit_code=1, failure=failure), 90.0)
    assert "--allow-writes" in problem.hint and "shows the same" not in problem.hint


def test_a_script_that_asks_is_told_that_nobody_answers_in_a_trial():
    failure = Failure(stage="script", error="EOFError", message="EOF when reading a line")
    problem = cannot_measure(Script(path="train.py"), Ended(exit_code=1, failure=failure), 90.0)
    assert "as an argument" in problem.hint and "shows the same" not in problem.hint


@pytest.mark.parametrize("end", [Ended(exit_code=None, hung=True), Ended(exit_code=-9)])
def test_who_ends_before_it_is_isolated_is_not_told_that_isolation_was_refused(tmp_path, end):
    under = bench.Bench(Script(path="train.py"), tmp_path, {}, Terms())
    under._scratch = tmp_path / "scratch-1"
    under._scratch.mkdir()
    assert isinstance(under._no_start(end), ScriptError)
    assert isinstance(under._no_start(Ended(exit_code=126)), MachineError)


def test_a_script_that_raised_is_told_its_line_and_where_its_output_is_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    failure = Failure(stage="script", error="ValueError", message="boom", place=f"{tmp_path}/lib/train.py:20")
    path = str(tmp_path / ".flatout" / "train-1" / "output-1.log")
    end = Ended(exit_code=1, failure=failure, output="ValueError: boom\n", output_path=path)
    problem = cannot_measure(Script(path="train.py"), end, 90.0)
    assert problem.error == "`train.py` failed: ValueError: boom"
    assert problem.cause == "it came from line 20 of `lib/train.py`"
    assert problem.hint.endswith("; all that it printed is in `.flatout/train-1/output-1.log`")


def test_where_no_line_is_known_the_last_one_that_was_printed_stands_for_it():
    end = Ended(exit_code=1, failure=Failure(stage="script", error="ValueError", message="boom"), output="last words")
    assert cannot_measure(Script(path="train.py"), end, 90.0).cause == "the last line it printed: `last words`"


def test_a_disk_that_is_full_is_named_as_what_ended_the_child(tmp_path, monkeypatch):
    monkeypatch.setattr(bench.shutil, "disk_usage", lambda place: SimpleNamespace(free=100))
    with pytest.raises(MachineError) as caught:
        bench.Bench(Script(path="train.py"), tmp_path, {}, Terms())._no_start(Ended(exit_code=1))
    assert caught.value.cause == "the disk is full"


def test_a_result_that_cannot_be_kept_is_shown_with_a_warning(tmp_path, monkeypatch):
    def refuse(found, folder):
        raise cannot_write(folder, OSError(errno.ENOSPC, ""))

    monkeypatch.setattr(result, "save", refuse)
    monkeypatch.setattr(tune, "replace", lambda found, **changes: SimpleNamespace(**{**vars(found), **changes}))
    found = tune._saved(SimpleNamespace(warnings=("one",)), tmp_path)
    assert found.warnings == ("one", f"cannot write `{tmp_path}`: the disk is full")


class Ending:
    """A child that ends at each order, in the ways that are listed; after that, as in the last."""

    alive = True

    def __init__(self, *ways):
        self.ways, self.records = list(ways), []

    def ask(self, limit_s, wait, pause_s=0.0, /, **what):
        way = self.ways.pop(0) if len(self.ways) > 1 else self.ways[0]
        stays = Failure(stage="release", error="NotReleased", message="bf16: KeyError: 'gone'\nmore of it")
        self.records = [stays] if way == "unreleased" else []
        raise {
            "unreleased": Ended(exit_code=1, trained=True),
            "killed": Ended(exit_code=-9, trained=True),
            "over": Ended(exit_code=0, finished=True, trained=True, num_steps=8),
        }[way]


@pytest.mark.parametrize(
    ("ways", "kind", "error", "cause"),
    [
        (
            ("unreleased",),
            Inconclusive,
            "a lever could not be released",
            "release: NotReleased: bf16: KeyError: 'gone'",
        ),
        (("unreleased", "killed"), ScriptError, "was killed by SIGKILL", "it printed nothing"),
        (("unreleased", "over"), Inconclusive, "ends before 2 steps can be measured", "too few training steps"),
    ],
)
def test_plain_windows_that_never_came_are_told_by_what_ended_the_last_child(
    tmp_path, monkeypatch, ways, kind, error, cause
):
    one, child = bench.Bench(Script(path="train.py"), tmp_path, {}, Terms()), Ending(*ways)
    one.facts, one.size = SimpleNamespace(loaders=()), replace(one.size, num_steps=2)
    monkeypatch.setattr(one, "start", lambda process_levers: setattr(one, "_child", child))
    with pytest.raises(kind, match=error) as caught:
        one.window({}, purpose="baseline")
    assert cause in caught.value.cause


def test_a_lever_that_a_child_could_not_release_once_is_no_reason_to_stop(tmp_path, monkeypatch):
    one, child = bench.Bench(Script(path="train.py"), tmp_path, {}, Terms()), Ending("unreleased")
    came = Window(index=0, purpose="baseline", levers={}, observe="ends", step_s=(1.0,), outside_s=(0.0,), start_s=0.0)
    plain = SimpleNamespace(alive=True, ask=lambda *_, **what: [came])
    children = [child, plain]
    monkeypatch.setattr(one, "start", lambda process_levers: setattr(one, "_child", children.pop(0)))
    assert one.window({}, purpose="baseline").step_s == (1.0,)
    assert one.unreleased == "release: NotReleased: bf16: KeyError: 'gone'"


class Standing:
    """A child that stands at its first boundary, and has written no more than these."""

    alive = True

    def __init__(self, *records):
        self.records = [*records, Ready(order=-1, num_steps=6)]

    def ready(self, limit_s, wait):
        return self.records

    def ask(self, limit_s, wait, pause_s=0.0, /, **what):
        return self.records

    def end(self):
        pass


LOST = Failure(stage="recorder", error="TypeError", message="Facts: `loaders[].batch_size` is `a.B`, not a number")


@pytest.mark.parametrize(
    ("written", "cause"),
    [
        ((HEADER, LOST), "recorder: TypeError: Facts: `loaders[].batch_size` is `a.B`, not a number"),
        ((LOST,), "recorder: TypeError: Facts: `loaders[].batch_size` is `a.B`, not a number"),
        ((HEADER,), "the record is not there, and nothing says why"),
    ],
)
def test_a_script_whose_facts_could_not_be_written_is_refused_with_the_reason(tmp_path, monkeypatch, written, cause):
    one = bench.Bench(Script(path="train.py"), tmp_path, {}, Terms(isolate=False))
    monkeypatch.setattr(one, "_launch", lambda environment: setattr(one, "_child", Standing(*written)))
    with pytest.raises(Inconclusive, match=r"`train\.py` trains, but what it does could not be recorded") as caught:
        one.start()
    assert caught.value.cause == cause and "report" in caught.value.hint


def test_a_script_on_a_device_whose_clock_is_not_known_is_refused(tmp_path, monkeypatch):
    facts = replace(FACTS, device="mps", not_measured="the clock of `mps` is not known here")
    one = bench.Bench(Script(path="train.py"), tmp_path, {}, Terms(isolate=False))
    monkeypatch.setattr(one, "_launch", lambda environment: setattr(one, "_child", Standing(HEADER, facts)))
    with pytest.raises(Inconclusive, match="steps on `mps` are not measured here"):
        one.start()


def test_a_plain_window_that_could_not_be_written_is_told_and_one_under_levers_is_a_failed_candidate(tmp_path):
    one = bench.Bench(Script(path="train.py"), tmp_path, {}, Terms())
    one._child = Standing(replace(LOST, message="Window: `losses[]` is `a.B`"))
    with pytest.raises(Inconclusive, match="its steps could not be recorded") as caught:
        one.window({}, purpose="baseline")
    assert "losses" in caught.value.cause
    with pytest.raises(CandidateFailed, match="could not be engaged"):
        one.window({"a": {}}, purpose="trial")


class Short:
    """A script whose runs are so long; it counts orders, and notes the starts."""

    alive = True

    def __init__(self, num_steps, notes):
        self.num_left, self.num_steps, self.notes, self.records = num_steps, 6, notes, []
        notes.append("start")

    def ask(self, limit_s, wait, pause_s=0.0, /, *, kind, levers, num_steps=1, skip_steps=0, purpose="", **what):
        self.num_steps += num_steps + skip_steps
        if self.num_steps > self.num_left:
            raise Ended(exit_code=0, finished=True, trained=True, num_steps=self.num_left)
        self.notes.append(f"{kind} {purpose}".strip() if kind == "compare" else num_steps)
        steps = Window(
            index=0, purpose=purpose, levers=levers, observe="ends", step_s=(0.01,) * num_steps,
            outside_s=(0.0,) * num_steps, start_s=0.0,
        )  # fmt: skip
        return [steps, Ready(order=0, num_steps=self.num_steps)]

    def end(self):
        self.notes.append("end")


def short_runs(tmp_path, monkeypatch, num_steps, size):
    one, notes = bench.Bench(Script(path="train.py"), tmp_path, {}, Terms(isolate=False)), []
    one.facts, one.size, one.step_guess_s = SimpleNamespace(loaders=()), replace(one.size, num_steps=size), 0.01

    def start(process_levers):
        one._child, one._num_steps = Short(num_steps, notes), 6

    monkeypatch.setattr(one, "start", start)
    return one, notes


def test_a_window_that_the_end_of_the_script_cut_is_measured_in_its_next_run_and_nobody_is_blamed(
    tmp_path, monkeypatch
):
    one, notes = short_runs(tmp_path, monkeypatch, 80, 30)
    for levers in ({}, {"a": {}}, {"a": {}}, {}):
        assert one.window(levers, purpose="trial", skip=2).levers == levers
    assert notes == ["start", 30, 30, "start", 20, 20], "of windows that fit into it four times"
    assert one.longest_run_steps == 80 and not one.warnings
    one.start_s = 4.0
    assert one.starting_step_s == 0.05, "so much longer does each step take where its runs are so short"
    one.window({}, purpose="trial", skip=2)
    one.window({}, purpose="trial", skip=2)
    assert notes[-4:] == [20, "end", "start", 20], "it does not wait for the end of a run that has no room for it"


def test_numbers_are_compared_after_the_warm_up_in_a_process_that_was_started_again_too(tmp_path, monkeypatch):
    for steps, warm_up in ((500, 30), (40, 20)):
        one, notes = short_runs(tmp_path, monkeypatch, steps, 10)
        one.longest_run_steps = steps
        one.agreement({"a": {}}, ("gradients",))
        one.agreement({"a": {}}, ("gradients",))
        assert notes == ["start", warm_up, "compare gradients", "compare gradients"]


@pytest.mark.parametrize(
    ("end", "word"),
    [
        (
            Ended(exit_code=1, failure=Failure(stage="script", error="E", message="", out_of_memory=True)),
            "inconclusive",
        ),
        (Ended(exit_code=-9), "inconclusive"),
        (Ended(exit_code=-9, hung=True), "inconclusive"),
        (Ended(exit_code=-11), "disagrees"),
        (Ended(exit_code=1, failure=Failure(stage="script", error="E", message="")), "disagrees"),
    ],
)
def test_a_step_that_has_neither_memory_nor_time_says_nothing_of_a_levers_numbers(tmp_path, monkeypatch, end, word):
    conductor = Conduct(Script(path="train.py"), tmp_path, MACHINE, Goal(), Show())
    conductor.levers = registry(lever("bf16", class_="precision"))
    monkeypatch.setattr(conductor.bench, "agreement", lambda levers, checks: conductor.bench._ended(end, levers))
    found = conductor.judge({"bf16": {}}, "precision")
    assert found.verdict == word and "broke while being compared" in found.detail
