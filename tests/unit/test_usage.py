"""What is typed wrongly is said in three parts, and a result is shown again as it was."""

import json
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import click
import pytest

from flatout import api
from flatout.cli import flatout
from flatout.cli.foreground import misplaced
from flatout.cli.output import show
from flatout.cli.progress import trial_line
from flatout.cli.run_command import command as run_command
from flatout.judge.result import save
from flatout.records import plan_file
from flatout.records.plan import Trial
from flatout.run.child_process import Ended
from flatout.run.script import Script
from flatout.trials import tune
from flatout.trials.child_failures import cannot_measure
from flatout.trials.search.space import Choice
from flatout.trials.terms import Goal, Show
from handmade import MACHINE, plan

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))

import report_examples as examples


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    return tmp_path


def complaint(capsys, *words, code=2):
    """The three parts of the error that a command line ends in."""
    assert flatout.main(list(words), prog_name="flatout") == code
    out, err = capsys.readouterr()
    error, cause, hint = err.splitlines()
    assert (out, error[:7], cause[:7], hint[:7]) == ("", "error: ", "cause: ", "hint:  ")
    return error[7:], cause[7:], hint[7:]


# -- failures of our own --------------------------------------------------------------------------------------------


def breaks(*_, **__):
    raise AssertionError


@pytest.mark.parametrize("kept_in", [".flatout", None])
def test_what_nobody_foresaw_ends_in_three_parts_and_its_traceback_lies_in_a_file(
    capsys, monkeypatch, tmp_path, kept_in
):
    monkeypatch.setattr(tune, "measured", breaks)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    place = tmp_path / (kept_in or "temporary")
    place.mkdir()
    error, cause, hint = complaint(capsys, "why", "train.py", code=7)
    assert error == "flatout itself failed"
    assert re.fullmatch(r"`AssertionError` at line \d+ of `test_usage.py`; the script is not to blame", cause)
    (file,) = place.iterdir()
    assert hint == f"please report it, with the command that you typed and `{file}`"
    assert file.read_text().startswith("flatout ") and "Traceback" in file.read_text()


def test_a_failure_of_our_own_that_no_file_can_be_written_of_is_said_all_the_same(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(tune, "measured", breaks)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    assert complaint(capsys, "why", "train.py", code=7)[2] == "please report it, with the command that you typed"


# -- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "error", "hint"),
    [
        (("tun", "train.py"), "no such command: `tun`", "did you mean `flatout tune`?"),
        (("train.py", "--lr", "1"), "no such command: `train.py`", "`flatout tune train.py` or `flatout run train.py`"),
        (("wrong",), "no such command: `wrong`", "`flatout --help`"),
        (("tune", "--bugdet", "10s", "train.py"), "no such option: `--bugdet`", "did you mean `--budget`?"),
        (("tune", "--bugdet=10s", "--", "train.py"), "no such option: `--bugdet`", "did you mean `--budget`?"),
        (("run", "--lever", "-m", "train"), "no such option: `--lever`", "did you mean `--levers`?"),
        (("exec", "--plna", "x", "--", "torchrun"), "no such option: `--plna`", "did you mean `--plan`?"),
        (("why", "-x", "train.py"), "no such option: `-x`", "`flatout why --help`"),
        (("report", "--htm", "x"), "no such option: `--htm`", "did you mean `--html`?"),
        (("--versio",), "no such option: `--versio`", "did you mean `--version`?"),
        (("--magic", "tune", "train.py"), "no such option: `--magic`", "`flatout --help`"),
    ],
)
def test_an_option_that_does_not_exist_is_no_script_and_the_nearest_is_suggested(capsys, words, error, hint):
    assert complaint(capsys, *words)[::2] == (error, hint)


@pytest.mark.parametrize("command", ["run", "tune", "exec"])
@pytest.mark.parametrize("size", ["lots", "-1", "4 GB of it", "", "1e9", "iB", "4iB", "nan", "1.5.2", "4PB"])
def test_a_size_that_is_none_is_refused(capsys, command, size):
    error, _, hint = complaint(capsys, command, f"--store-memory={size}", "--", "train.py")
    assert error == f"`--store-memory {size}` is no size" and hint == "e.g. `--store-memory 4GB`"


def test_an_option_before_the_command_belongs_after_it(capsys):
    _, cause, hint = complaint(capsys, "--budget", "2m", "tune", "train.py")
    assert cause == "it is an option of `tune`, `why`, and stands after the command"
    assert hint == "e.g. `flatout tune --budget ...`"


def test_after_two_dashes_a_name_that_looks_like_an_option_is_a_script(capsys):
    assert complaint(capsys, "run", "--", "--odd.py")[0] == "no such script: `--odd.py`"


@pytest.mark.parametrize(
    ("script", "exit_code", "said"),
    [
        (Script(path="train.py", arguments=("--levers", "bf16")), 2, "`--levers` stood after the script"),
        (Script(module="train", arguments=("--lr", "1", "-q")), 1, "`-q` stood after the script"),
        (Script(path="train.py", arguments=("--levers", "bf16")), 0, ""),
        (Script(path="train.py", arguments=("--lr", "--leversx")), 2, ""),
        (None, 2, ""),
    ],
)
def test_an_option_that_the_script_got_and_failed_with_is_said(script, exit_code, said):
    with click.Context(run_command):
        found = misplaced(script, exit_code)
    assert said in found and bool(said) == bool(found) and "\n" not in found


def test_an_option_that_is_the_scripts_own_is_not_blamed(folder):
    script = Script(path="train.py", arguments=("--levers", "3"))
    for text, said in (('parser.add_argument("--levers", type=int)', False), ("# --levers is not spoken of", True)):
        (folder / "train.py").write_text(text)
        with click.Context(run_command):
            assert bool(misplaced(script, 1)) == said


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("train.py", "--json"), 1, True),
        (("-m", "train", "--json"), 2, True),
        (("train.py", "--lr", "1"), 2, False),
        (("--json", "train.py"), 2, False),
    ],
)
def test_an_error_of_a_script_that_got_such_an_option_says_so_too(capsys, monkeypatch, words, code, said):
    def fails(command, script, *rest, **more):
        raise cannot_measure(script, Ended(exit_code=code), 90.0)

    monkeypatch.setattr(tune, "measured", fails)
    assert flatout.main(["why", *words]) == 3
    hint = capsys.readouterr().err.splitlines()[-1]
    assert ("`--json` stood after the script and so went to the script" in hint) == said
    assert "shows the same" in hint


@pytest.mark.parametrize("command", ["why", "tune", "run", "prove"])
def test_no_script_at_all_is_said(capsys, command):
    error, cause, hint = complaint(capsys, command)
    assert error == "no script was given" and cause == "the command needs one" and "train.py" in hint


def test_a_lever_in_the_place_of_a_script_is_told_apart(capsys, folder):
    error, _, hint = complaint(capsys, "levers", "heap")
    assert error == "`heap` is a lever, and no script is called so" and hint.startswith("`flatout levers` without")


def test_a_lever_that_is_nearly_named_is_shown(capsys):
    assert complaint(capsys, "run", "--levers", "channel_last", "train.py")[2] == "did you mean `channels_last`?"


def test_trials_find_settings_themselves_and_none_stands_alone(capsys, folder):
    (folder / "train.py").write_text("print(1)")
    error, cause, hint = complaint(capsys, "tune", "--levers", "bf16,threads=2", "train.py")
    assert error == "a setting cannot be chosen here: `threads=2`" and "`threads` themselves" in cause
    assert hint.endswith("`flatout run --levers threads=2` engages exactly that")
    assert complaint(capsys, "tune", "--levers", "none,bf16", "train.py")[0] == "no such lever: `none`"
    assert complaint(capsys, "tune", "--levers", "nonsense=2", "train.py")[0] == "no such lever: `nonsense=2`"


# -- nothing left to try --------------------------------------------------------------------------------------------


def test_levers_that_are_all_left_out_again_are_refused_before_anything_runs(capsys, folder):
    error, cause, _ = complaint(capsys, "tune", "--levers", "bf16,threads", "--without", "threads,bf16", "train.py")
    assert error == "no lever of `--levers` can be tried" and "`bf16`: left out by `--without`" in cause
    assert not (folder / ".flatout").exists()


@pytest.mark.parametrize("name", ["run", "exec"])
def test_a_summary_is_not_written_over_somebodys_work(capsys, folder, name):
    (folder / "train.py").write_text("print(1)")
    error, cause, _ = complaint(capsys, name, "--json", "train.py", "train.py")
    assert error == "`--json train.py` would overwrite a file that is no summary" and "takes a FILE" in cause
    assert (folder / "train.py").read_text() == "print(1)"


def test_a_place_where_no_plan_can_be_written_is_refused_before_anything_runs(capsys, folder):
    error, _, hint = complaint(capsys, "tune", "--plan", "gone/plan.toml", "train.py", code=5)
    assert error == "cannot write `gone/plan.toml`" and hint == "make its folder first"
    assert not (folder / ".flatout").exists()


@pytest.mark.parametrize(
    ("names", "accept", "reason"),
    [
        ("bf16,tf32", "exact", "`bf16`: class precision needs `--accept precision`"),
        ("bf16,pinned_memory", "exact", "`pinned_memory`: needs a CUDA device, none was found"),
        ("batch_size", "semantics", "`flatout prove --levers batch_size=N --accept semantics`"),
        ("compile", "precision", "C++ compiler"),
    ],
)
def test_levers_of_which_none_can_be_tried_are_refused_before_anything_runs(
    capsys, folder, monkeypatch, names, accept, reason
):
    monkeypatch.setattr(tune, "read_machine", lambda: replace(MACHINE, cxx_compiler=None))
    error, cause, _ = complaint(capsys, "tune", "--levers", names, "--accept", accept, "train.py")
    assert error == "no lever of `--levers` can be tried" and reason in cause
    assert not (folder / ".flatout").exists()


def test_a_lever_that_this_machine_cannot_engage_is_refused_before_a_run(capsys, folder, monkeypatch):
    monkeypatch.setattr(api, "read_machine", lambda: replace(MACHINE, cxx_compiler=None))
    error, cause, _ = complaint(capsys, "run", "--levers", "compile", "train.py", code=5)
    assert error == "the lever `compile` cannot be engaged on this machine" and "C++ compiler" in cause


@pytest.mark.parametrize("only", [(), ("bf16", "threads"), None])
def test_plain_against_plain_and_what_is_partly_left_out_are_measured(monkeypatch, only):
    class Reached(Exception):
        pass

    def reach(goal):
        raise Reached

    monkeypatch.setattr(tune, "with_isolation", reach)
    goal = Goal(choice=Choice(only=only, without=("bf16",)))
    with pytest.raises(Reached):
        tune.measured("tune", Script(path="train.py"), goal, Show(), None)


# -- what is shown --------------------------------------------------------------------------------------------------


def test_a_former_why_is_shown_as_it_was(capsys, folder, monkeypatch):
    found = examples.why()
    place = folder / found.run
    place.mkdir(parents=True)
    save(found, place)
    show(found, as_json=False)
    first = capsys.readouterr().out
    flatout.main(["report"])
    assert capsys.readouterr().out == first
    assert "what a remedy can bring at most" in first


@pytest.mark.parametrize(
    ("trial", "tail"),
    [
        (Trial(levers={"bf16": {}}, outcome="faster", ratio=1.5, remeasured=True), "1.50x  faster (measured again)"),
        (Trial(levers={"bf16": {}}, outcome="disagrees", reason="other items"), "  disagrees: other items"),
        (Trial(levers={"bf16": {}}, outcome="inconclusive", reason="all busy"), "  inconclusive: all busy"),
        (Trial(levers={"bf16": {}}, outcome="inconclusive"), "  inconclusive"),
        (Trial(levers={"bf16": {}}, outcome="failed", reason="no\nroom " + "x" * 99), "x…"),
        (Trial(levers={"bf16": {}}, outcome="failed", reason="no room " * 40), "no room…"),
    ],
)
def test_a_line_of_progress_says_the_outcome_once_and_why_there_is_no_ratio(trial, tail):
    line = trial_line(trial)
    assert line.startswith("  bf16 ") and line.endswith(tail)
    assert line.count(trial.outcome) == 1 and "\n" not in line and len(line) <= 140


@pytest.mark.parametrize("more", [(), ("--html", "c.html"), ("--export", "steps.csv"), ("--json",)], ids=" ".join)
def test_several_runs_are_refused_with_what_to_type_for_the_numbers_of_each(capsys, folder, more):
    error, cause, hint = complaint(capsys, "report", "a-1", "a-2", *more)
    assert error == "`flatout report` shows one run, and 2 are named" and "not measured in turn" in cause
    assert "`flatout report --json a-1`, `flatout report --json a-2`" in hint and "`flatout prove`" in hint
    assert [path.name for path in folder.iterdir()] == ["train.py"]


# -- results that nobody measured -------------------------------------------------------------------------------------


def kept(timeline):
    place = Path(".flatout") / "a-1"
    place.mkdir(parents=True)
    save(replace(examples.lenet(), run=str(place), timeline=timeline), place)
    return place


@pytest.mark.parametrize(
    "where",
    [
        ("anatomy", "step_s"),
        ("anatomy", "phases_s", "data"),
        ("baseline_steps_per_s",),
        ("baseline_spread_fraction",),
        ("baseline_window_step_s", 0),
        ("tuned_steps_per_s",),
        ("noise", "low"),
        ("trials", 0, "ratio"),
        ("ceilings", "values", 0, "value"),
        ("census", "operations", 0, "self_s"),
        ("diagnosis", "bounds", 0, "ratio"),
        ("timeline", 0, "step_s"),
        ("timeline", 0, "start_s"),
        ("tuning_s",),
        ("break_even_steps",),
    ],
    ids=lambda where: ".".join(map(str, where)),
)
def test_a_number_that_is_not_known_is_shown_as_unknown(capsys, where):
    place = kept(examples.lenet().timeline[::500])
    record = json.loads((place / "result.json").read_text())
    holder = record
    for step in where[:-1]:
        holder = holder[step]
    holder[where[-1]] = None
    (place / "result.json").write_text(json.dumps(record))
    code = flatout.main(["report", "a-1"])
    out, err = capsys.readouterr()
    complained = [line[:6] for line in err.splitlines() if line[:6] in ("error:", "cause:", "hint: ")]
    assert (code, bool(out)) == (None, True) or (code, complained) == (4, ["error:", "cause:", "hint: "])
    assert "nan" not in out.lower().replace("channel", "").split()


@pytest.mark.parametrize("num", [0, 1, 2])
def test_results_with_hardly_a_step_are_shown(capsys, num):
    kept(examples.lenet().timeline[:num])
    flatout.main(["report", "a-1"])
    assert "3.6x faster" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["tune", "why", "prove"])
def test_an_early_interruption_says_where_it_came_and_what_to_do(capsys, folder, monkeypatch, command):
    def interrupted(*_, show, **__):
        show.stage("starting the script", 0.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(api, command, interrupted)
    monkeypatch.setattr("flatout.cli.progress.end_children_when_told_to_end", lambda: None)
    assert flatout.main([command, "train.py"]) == 130
    error, cause, hint = capsys.readouterr().err.splitlines()[-3:]
    assert error == "flatout: stopped before there was anything to keep"
    assert cause == "cause: Ctrl-C came at the stage `starting the script`" and hint.startswith("hint:  ")


# -- the plan that is there -----------------------------------------------------------------------------------------


def test_tune_knows_the_plan_that_is_there_and_begins_anew_where_there_is_none(folder):
    script, place = Script(path="train.py"), folder / "flatout.toml"
    assert tune._planned(script, place) == {}
    plan_file.write(plan(levers={"bf16": {}, "threads": {"num": 2}}), place)
    assert tune._planned(script, place) == {"bf16": {}, "threads": {"num": 2}}
    assert tune._planned(Script(path="other.py"), place) == {}
    place.write_text("torn = [")
    assert tune._planned(script, place) == {}
