"""Killed without notice, as the kernel does where memory runs out: a run's script, a trial's child in each stage."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

import handmade
from faulting import CEILINGS, FLATOUT, REASON, copied, environment, flatout, left_behind, parts
from flatout.errors import ScriptError
from flatout.machine.read import read_machine
from flatout.records.plan import Candidate
from flatout.run.script import Script
from flatout.trials import child_failures
from flatout.trials.conclude import result_of
from flatout.trials.conduct import Conduct
from flatout.trials.search.space import Choice
from flatout.trials.terms import Goal, Show, Terms
from tiers import some

pytest.importorskip("torch")


class Killer:
    """Kills the child while it is waited for, in the stages that it is told, once in each."""

    def __init__(self, *stages, always=False):
        self.stages, self.always = stages, always
        self.conduct = None
        self.seen, self.killed = [], []
        self._ticks = 0
        self._last = None

    def stage(self, text, share):
        self.seen.append(text)
        self._ticks = 0

    def tick(self):
        self._ticks += 1
        text = self.seen[-1]
        child = self.conduct.bench._child
        stage = next((s for s in self.stages if text.startswith(s) and (self.always or s not in self.killed)), None)
        if stage is not None and self._ticks >= 2 and child is not None and child.alive and child is not self._last:
            self.killed.append(stage)
            self._ticks, self._last = 0, child  # which may take a while to end, and is killed once
            os.kill(child.session_id, signal.SIGKILL)


@pytest.fixture
def conducted(folder):
    """A `tune` or `why` without ceilings and without isolation, whose children a `Killer` kills."""
    opened = []

    def start(killer, command="tune", levers=("fused_optimizer", "fused_fetch"), budget_s=25.0):
        script = Script(path=str(copied("tiny_training.py", folder)))
        goal = Goal(budget_s=budget_s, choice=Choice(only=levers), terms=Terms(isolate=False))
        run_folder = folder / ".flatout" / "tiny_training-1"
        run_folder.mkdir(parents=True)
        show = Show(stage=killer.stage, tick=killer.tick)
        killer.conduct = Conduct(script, run_folder, read_machine(), goal, show, command)
        opened.append(killer.conduct.bench)
        return killer.conduct

    yield start
    for bench in opened:
        bench.end()
    assert left_behind(folder) == []


def test_a_candidate_that_is_killed_has_failed_and_the_next_one_is_measured_in_a_fresh_child(conducted):
    killer = Killer("trying", "measuring")
    conduct = conducted(killer, budget_s=600.0)
    killer.stage("starting", None)
    conduct.bench.start()
    conduct.bench.settle()
    killer.stage("trying", None)
    first = conduct.try_out(Candidate(levers={"ahead": {"num": 1}}))
    assert (first.outcome, first.reason) == ("failed", "killed by SIGKILL")
    fused = {"fused_optimizer": {}}
    assert conduct.bench.window({}, purpose="baseline").num_steps
    killer.stage("measuring", None)
    with pytest.raises(child_failures.CandidateFailed, match="killed by SIGKILL"):
        conduct.bench.window(fused, purpose="winner", num_steps=10_000)
    assert killer.killed == ["trying", "measuring"]
    assert conduct.bench.window(fused, purpose="trial").levers == fused
    assert conduct.bench.window({}, purpose="baseline").num_steps


@pytest.mark.parametrize("stage", ["starting", "plain against"])
def test_a_child_that_is_killed_while_plain_is_measured_is_an_error_at_once(conducted, stage):
    killer = Killer(stage, always=True)
    with pytest.raises(ScriptError, match=r"`tiny_training.py` was killed by SIGKILL|`.*` was killed") as raised:
        conducted(killer, "why").run()
    assert len(killer.killed) == 1
    assert set(parts(str(raised.value))) == {"error", "cause", "hint"}


def test_where_plain_is_killed_what_was_tried_before_is_kept(conducted, monkeypatch):
    killer = Killer("afterwards", always=True)
    conduct = conducted(killer, levers=("fused_optimizer",), budget_s=10.0)
    tried = handmade.trial({"fused_optimizer": {}}, 1.2)

    def try_all():
        conduct.trials.append(tried)
        conduct._stage("afterwards")
        for _ in range(99):
            conduct.bench.window({}, purpose="baseline")

    monkeypatch.setattr(conduct, "try_all", try_all)
    monkeypatch.setattr(conduct, "remeasure", lambda: None)
    conduct.run()
    found = result_of(conduct)
    assert len(killer.killed) == 1
    assert list(found.trials) == [tried] and found.anatomy is not None
    assert "was killed by SIGKILL" in found.stopped and found.plan is None


@pytest.mark.skipif(REASON is not None, reason=f"trials cannot be isolated here: {REASON}")
def test_a_terminal_that_is_closed_ends_a_measurement_and_leaves_nothing(folder):
    script = copied("tiny_training.py", folder)
    process = _started("tune", script)
    while not list(folder.glob(".flatout/*/trace-1.jsonl")):
        assert process.poll() is None
        time.sleep(0.05)
    for _ in range(2):  # the kernel says so, and the shell as well
        process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=60) == 128 + signal.SIGHUP
    assert _ended(script.name) and left_behind(folder) == []
    assert sorted(path.name for path in (folder / ".flatout").iterdir()) == [".gitignore", "lock"]


@pytest.mark.skipif(REASON is not None, reason=f"trials cannot be isolated here: {REASON}")
def test_a_measurement_without_a_terminal_is_not_ended_by_its_closing(folder):
    script = copied("tiny_training.py", folder)
    process = _started("why", script, "nohup")
    while not list(folder.glob(".flatout/*/trace-1.jsonl")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGHUP)
    assert process.wait(timeout=120) == 0


@pytest.mark.smoke
@pytest.mark.skipif(REASON is not None, reason=f"trials cannot be isolated here: {REASON}")
def test_a_script_that_has_not_begun_to_train_ends_with_flatout_that_is_killed(folder):
    script = folder / "prepares.py"
    script.write_text("import time\ntime.sleep(600)\nimport torch\n")
    process = _started("why", script)
    deadline = time.monotonic() + 60
    while not _trainer(script.name):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    assert _ended(script.name)


def _started(command, script, *before):
    return subprocess.Popen(
        [*before, *FLATOUT, command, "--budget", "15s", script.name], env=environment(XDG_CACHE_HOME=str(CEILINGS)),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def _ended(name):
    """Whether no process runs a script any more, a moment later."""
    deadline = time.monotonic() + 5
    while left := _trainer(name):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return not left


def _trainer(name):
    """The processes that run a script of this test's folder, the innermost last."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            is_here = os.readlink(entry / "cwd") == os.getcwd()
        except OSError:
            continue
        if is_here and words[-2:-1] == [name.encode()] and b"flatout" not in words:
            found.append(int(entry.name))
    return sorted(found)


@pytest.mark.parametrize("levers", some(["none", "threads=1"], "threads=1"))
def test_a_run_that_is_killed_ends_by_that_signal_and_its_steps_are_there_to_be_exported(folder, levers):
    copied("endless.py", folder)
    process = subprocess.Popen(
        [*FLATOUT, "run", "--levers", levers, "endless.py"], env=environment(), stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout.readline() == "ready\n"
    time.sleep(2.5)
    (script,) = _trainer("endless.py")
    os.kill(script, signal.SIGKILL)
    said = process.communicate(timeout=30)[1]
    assert process.returncode == -signal.SIGKILL
    assert re.search(r"flatout: at least [\d,]+ steps in ", said.splitlines()[-1]), said
    done = flatout("report", "endless-1", "--export", "steps.csv")
    assert done.returncode == 0, done.stderr
    assert len(Path("steps.csv").read_text().splitlines()) > 100
    assert left_behind(folder) == []
