"""What a run in the foreground engages, and what it says."""

from dataclasses import replace
from pathlib import Path

import pytest

from flatout import api
from flatout.errors import FlatoutError, MachineError, RecordError, UsageError
from flatout.frameworks.lever import input_levers
from flatout.frameworks.pytorch import levers as pytorch_levers
from flatout.records import plan_file
from flatout.records.ceilings import Accelerator
from flatout.run import choice, launcher_command
from flatout.run.choice import Engagement, Environment, RunOptions, check_settings, engagement, of_input, parse_levers
from flatout.run.script import Script
from flatout.trials import tune
from handmade import MACHINE, lever, plan, registry


def numbers(self, facts, machine):
    return ({"num": 1},)


LEVERS = registry(
    lever("bf16", class_="precision"),
    lever("threads", parameter="num", settings=numbers),
    lever("workers", parameter="num", settings=numbers, class_="exact", check="batches"),
    lever("fused", conflicts=("foreach",)),
    lever("foreach"),
    lever("seeds", class_="statistical"),
    lever("compile", parameter="mode", settings=numbers, choices=("dynamic", "regional"), optional=True),
    lever("attention", parameter="backend", settings=numbers, choices=("math", "flash")),
)
ELSEWHERE = replace(MACHINE, num_cores=64)
GPU = Accelerator(name="NVIDIA H100", memory_bytes=80 * 2**30, compute_capability="9.0")
WITH_A_GPU = replace(MACHINE, accelerators=(GPU,))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def here(**changes):
    fields = dict(
        script="train.py",
        arguments=("--epochs", "3"),
        machine=lambda: MACHINE,
        framework_version="2.13.0",
        registry=LEVERS,
        python="3.11.9",
    )
    return Environment(**{**fields, **changes})


def found(name="flatout.toml", **changes):
    """A plan in a file of the working folder."""
    path = Path(name)
    plan_file.write(plan(**changes), path)
    return path


def set_aside(wish=None, **changes):
    chosen = engagement(wish or RunOptions(), here(**changes))
    assert chosen.levers == {} and chosen.plan is None
    assert "\n" not in chosen.line and "running plainly" in chosen.line
    return chosen


def refusal(wish, kind=RecordError, **changes):
    with pytest.raises(kind) as caught:
        engagement(wish, here(**changes))
    assert caught.value.error and caught.value.cause and caught.value.hint
    return caught.value


# -- no plan --------------------------------------------------------------------------------------------------------


def test_without_a_plan_the_script_runs_plainly_and_is_told_how_to_get_one():
    assert set_aside().line == "no plan for `train.py` here, running plainly; `flatout tune` makes one"


def test_a_plan_for_another_script_alone_is_no_plan():
    found(script="other.py")
    assert set_aside().line == "`flatout.toml` has no plan for `train.py`: it has plans for `other.py`; running plainly"


# -- a plan that fits -----------------------------------------------------------------------------------------------


def test_a_plan_that_fits_is_engaged_with_one_line():
    found()
    chosen = engagement(RunOptions(), here())
    assert chosen == Engagement(
        levers=plan().levers, line="2 levers from flatout.toml, 1.5x expected", plan=plan(), misfits=()
    )


def test_a_plan_that_was_named_is_engaged_from_where_it_lies(folder):
    (folder / "plans").mkdir()
    path = found("plans/mine.toml", script="../train.py")
    chosen = engagement(RunOptions(plan=path), here())
    assert chosen.levers == plan().levers and "from plans/mine.toml" in chosen.line


def test_a_plan_of_another_folders_script_of_the_same_name_is_not_taken(folder, monkeypatch):
    found()
    (folder / "other").mkdir()
    monkeypatch.chdir("other")
    assert "has no plan for `other/train.py`" in refusal(RunOptions(plan=Path("../flatout.toml"))).error
    assert engagement(RunOptions(plan=Path("../flatout.toml")), here(script="../train.py")).levers == plan().levers


def test_other_arguments_are_said_and_stop_nothing():
    found()
    assert engagement(RunOptions(), here(arguments=("--epochs", "90"))).line.endswith(", made with other arguments")


def test_one_lever_is_one_lever_and_a_large_ratio_is_a_plain_number():
    found(levers={"bf16": {}}, ratio=123.4)
    assert engagement(RunOptions(), here()).line == "1 lever from flatout.toml, 123x expected"


def test_a_plan_to_change_nothing_is_a_plan():
    found(levers={}, class_="exact")
    chosen = engagement(RunOptions(accept="exact"), here())
    assert chosen.levers == {} and chosen.plan is not None
    assert chosen.line == "the plan in flatout.toml is to change nothing"


# -- a plan that does not fit here ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"machine": ELSEWHERE}, "usable cores"),
        ({"framework_version": "2.11.0"}, "pytorch 2.11.0 then, 2.13.0 now"),
        ({"python": "3.14.1"}, "Python 3.14.1 then, 3.11.9 now"),
    ],
)
def test_a_plan_made_elsewhere_is_set_aside_with_one_line_and_refused_where_it_was_named(changes, word):
    path = found(**changes)
    chosen = set_aside()
    assert word in chosen.line and "`--recheck` tests it" in chosen.line and len(chosen.misfits) == 1
    problem = refusal(RunOptions(plan=path))
    assert problem.error.startswith("`flatout.toml` was made elsewhere: ") and word in problem.error
    assert "--recheck" in problem.hint


def test_everything_that_differs_is_said_where_the_plan_was_named():
    path = found(machine=ELSEWHERE, framework_version="2.11.0")
    assert "also: pytorch 2.11.0 then" in refusal(RunOptions(plan=path)).cause


@pytest.mark.parametrize("named", [True, False])
def test_to_recheck_a_misfit_it_is_handed_on_with_what_differs(named):
    path = found(machine=ELSEWHERE)
    chosen = engagement(RunOptions(plan=path if named else None, recheck=True), here())
    assert chosen.levers == plan().levers and chosen.misfits


# -- a plan that cannot be engaged ----------------------------------------------------------------------------------


def broken_plans():
    yield "missing", lambda: Path("nowhere.toml"), "cannot read the plan"
    yield "unknown lever", lambda: found("p.toml", levers={"magic": {}}), "names the lever `magic`"
    yield "unknown setting", lambda: found("p.toml", levers={"threads": {"num": 1, "x": 2}}), "has no setting `x`"
    yield "setting of none", lambda: found("p.toml", levers={"bf16": {"num": 1}}), "has no setting `num`"
    yield "missing setting", lambda: found("p.toml", levers={"threads": {}}), "needs a number"
    yield "wrong setting", lambda: found("p.toml", levers={"threads": {"num": "two"}}), "not `two`"
    yield "conflict", lambda: found("p.toml", levers={"foreach": {}, "fused": {}}), "cannot be combined"
    yield "class", lambda: found("p.toml", class_="statistical"), "levers of class statistical"
    yield "edited class", lambda: found("p.toml", levers={"seeds": {}}, class_="exact"), "levers of class statistical"


@pytest.mark.parametrize(("make", "words"), [(make, words) for _, make, words in broken_plans()],
                         ids=[name for name, _, _ in broken_plans()])  # fmt: skip
def test_a_named_plan_that_cannot_be_engaged_is_an_error_that_names_the_file(make, words):
    path = make()
    problem = refusal(RunOptions(plan=path))
    assert words in problem.error and str(path) in problem.error


@pytest.mark.parametrize(("make", "words"), [(make, words) for name, make, words in broken_plans()
                         if name != "missing"])  # fmt: skip
def test_the_same_plan_found_by_default_never_stops_a_run(make, words):
    make().rename("flatout.toml")
    assert words in set_aside().line


def test_a_plan_with_a_lever_that_this_machine_cannot_have_is_not_engaged():
    """Somebody has edited it: one that was made on another machine is a misfit."""
    levers = pytorch_levers.registry()
    found("flatout.toml", levers={"tf32": {}})
    chosen = engagement(RunOptions(), here(registry=levers))
    assert not chosen.levers and "`tf32`, which cannot be engaged on this machine: needs a CUDA device" in chosen.line
    with pytest.raises(FlatoutError) as caught:
        engagement(RunOptions(plan=Path("flatout.toml")), here(registry=levers))
    assert "`flatout.toml` names the lever `tf32`" in caught.value.error and "CUDA" in caught.value.cause


@pytest.mark.parametrize("content", [b"format = 1\n[plan", b"format = 99\n", b"\xff", b"", b"plan = 3\nformat = 1\n"])
def test_a_torn_or_newer_default_plan_never_stops_a_run(content):
    Path("flatout.toml").write_bytes(content)
    set_aside()
    refusal(RunOptions(plan=Path("flatout.toml")))


def test_a_default_plan_that_is_a_folder_never_stops_a_run():
    Path("flatout.toml").mkdir()
    set_aside()


@pytest.mark.parametrize(("accept", "fits"), [("exact", False), ("rounding", False), ("precision", True),
                                              ("statistical", True), ("semantics", True)])  # fmt: skip
def test_a_plan_is_engaged_where_its_class_is_accepted(accept, fits):
    path = found()
    if fits:
        assert engagement(RunOptions(plan=path, accept=accept), here()).levers
        return
    problem = refusal(RunOptions(plan=path, accept=accept))
    assert "class precision" in problem.error and "`--accept precision`" in problem.hint
    assert "class precision" in set_aside(RunOptions(accept=accept)).line


def test_a_plan_that_names_what_to_import_engages_nothing():
    path = found(levers={"os.system": {}, "__import__": {}})
    refusal(RunOptions(plan=path))


# -- levers as typed ------------------------------------------------------------------------------------------------


def test_levers_that_were_named_are_engaged_without_a_plan():
    found()
    levers = parse_levers(("bf16", "threads=1"), LEVERS, lambda: MACHINE)
    chosen = engagement(RunOptions(levers=levers), here())
    line = "levers bf16 threads=1, as you said; numbers were not compared"
    assert chosen == Engagement(levers={"bf16": {}, "threads": {"num": 1}}, line=line)


def test_a_run_whose_training_is_another_one_says_at_once_that_only_a_proof_judges_it():
    there = replace(here(), registry=pytorch_levers.registry())
    levers = parse_levers(("batch_size=2048",), there.registry, lambda: MACHINE)
    with pytest.raises(UsageError) as caught:
        engagement(RunOptions(levers=levers), there)
    assert caught.value.hint == "`--accept semantics`"
    chosen = engagement(RunOptions(levers=levers, accept="semantics"), there)
    assert chosen.line == (
        "levers batch_size=2048, as you said; batch_size changes what is trained: only `flatout prove` judges that"
    )


def test_no_levers_is_a_wish_too():
    found()
    assert (
        set_aside(RunOptions(levers=parse_levers((), LEVERS, lambda: MACHINE))).line
        == "no levers, as you said: running plainly"
    )


def test_a_lever_whose_batches_nobody_compared_is_not_taken_for_exact():
    wanted = {"workers": {"num": 1}}
    problem = refusal(RunOptions(levers=wanted, accept="exact"), UsageError)
    assert problem.hint == "`flatout tune --accept exact --levers workers train.py`, then run under its plan"
    chosen = engagement(RunOptions(levers=wanted), here())
    assert chosen.levers == wanted
    assert chosen.line == "levers workers=1, as you said; numbers were not compared"


def test_a_lever_that_compares_its_batches_itself_is_exact_as_it_is(monkeypatch):
    monkeypatch.setattr(type(LEVERS["workers"]), "checks_itself", True)
    chosen = engagement(RunOptions(levers={"workers": {"num": 1}}, accept="exact"), here())
    assert chosen.line == "levers workers=1, as you said"


def test_a_plan_with_such_a_lever_was_checked_when_it_was_made():
    found(levers={"workers": {"num": 1}}, class_="exact")
    assert engagement(RunOptions(accept="exact"), here()).levers == {"workers": {"num": 1}}


def test_a_lever_that_was_named_must_be_of_an_accepted_class():
    problem = refusal(RunOptions(levers={"bf16": {}}, accept="exact"), UsageError)
    assert "`bf16` is of class precision" in problem.error and problem.hint == "`--accept precision`"
    refusal(RunOptions(levers={"seeds": {}}), UsageError)
    assert engagement(RunOptions(levers={"seeds": {}}, accept="statistical"), here()).levers == {"seeds": {}}


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("magic",), "no such lever: `magic`"),
        (("",), "no such lever: ``"),
        (("=1",), "no such lever: ``"),
        (("Bf16",), "no such lever: `Bf16`"),
        (("threads",), "the lever `threads` needs a number"),
        (("threads=",), "the lever `threads` needs a number"),
        (("threads=two",), "the lever `threads` needs a number, not `two`"),
        (("threads=-1",), "needs a number, not `-1`"),
        (("threads=1.5",), "needs a number, not `1.5`"),
        (("threads=1=2",), "needs a number, not `1=2`"),
        (("threads=²",), "needs a number, not `²`"),
        (("threads=99999",), "needs a number, not `99999`"),
        (("threads=" + "9" * 5000,), "needs a number"),
        (("bf16=1",), "the lever `bf16` takes no setting"),
        (("bf16=",), "the lever `bf16` takes no setting"),
        (("threads=1", "threads=2"), "the lever `threads` is named twice"),
        (("fused", "foreach"), "`fused` and `foreach` cannot be combined"),
        (("foreach", "fused"), "`fused` and `foreach` cannot be combined"),
    ],
)
def test_levers_that_cannot_be_meant_are_refused_in_three_parts(words, complaint):
    with pytest.raises(UsageError) as caught:
        parse_levers(words, LEVERS, lambda: MACHINE)
    assert complaint in caught.value.error and caught.value.cause and caught.value.hint


def test_ranks_in_a_mode_that_there_is_not_are_refused():
    with pytest.raises(UsageError, match="needs a word, not `2:sideways`"):
        parse_levers(("ranks=2:sideways",), pytorch_levers.registry(), lambda: MACHINE)


def test_zero_and_the_most_are_numbers():
    assert parse_levers(("workers=0", "threads=1024"), LEVERS, lambda: MACHINE) == {
        "workers": {"num": 0},
        "threads": {"num": 1024},
    }


def test_a_setting_may_be_a_word_and_may_be_left_out_where_the_lever_says_so():
    named = ("compile", "attention=flash")
    assert parse_levers(named, LEVERS, lambda: MACHINE) == {"compile": {}, "attention": {"backend": "flash"}}
    assert parse_levers(("compile=dynamic",), LEVERS, lambda: MACHINE) == {"compile": {"mode": "dynamic"}}


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("compile=fast", "needs a word, not `fast`"),
        ("compile=", "needs a word"),
        ("compile=1", "needs a word, not `1`"),
        ("attention", "needs a word"),
        ("attention=none", "needs a word, not `none`"),
    ],
)
def test_a_word_that_the_lever_does_not_know_is_refused_with_those_that_it_does(word, complaint):
    with pytest.raises(UsageError) as caught:
        parse_levers((word,), LEVERS, lambda: MACHINE)
    assert complaint in caught.value.error and "is one of" in caught.value.cause and "=" in caught.value.hint


@pytest.mark.parametrize("value", [True, 1.0, "1", -1, 1025])
def test_a_setting_is_a_whole_number_of_a_sane_size(value):
    with pytest.raises(UsageError):
        check_settings(LEVERS["threads"], {"num": value})


def test_every_refusal_is_an_error_of_ours():
    for _, make, _ in broken_plans():
        with pytest.raises(FlatoutError):
            engagement(RunOptions(plan=make()), here())


@pytest.mark.parametrize(
    ("words", "name", "arguments"),
    [
        ("torchrun --nproc 2 train.py --lr 1", "train.py", ("--lr", "1")),
        ("python -m torch.distributed.run -m pkg.train --lr 1", "-m pkg.train", ("--lr", "1")),
        ("python -m pkg.train", "-m pkg.train", ()),
    ],
)
def test_the_first_word_of_a_launcher_that_has_a_plan_is_found(words, name, arguments):
    known = ("train.py", "-m pkg.train")
    script = launcher_command.planned(tuple(words.split()), known, Path("flatout.toml"))
    assert (script.name, script.arguments) == (name, arguments)
    assert launcher_command.planned(("python", "other.py", "-m"), known, Path("flatout.toml")) is None


def test_a_recheck_measures_the_plans_own_levers_as_far_as_the_user_accepts(monkeypatch):
    asked = []

    def measured(command, script, goal, show, plan, *, write_plan):
        asked.append((command, goal.exactly, goal.choice.accept, write_plan))
        raise MachineError("no namespaces", cause="forbidden", hint="allow them")

    monkeypatch.setattr(tune, "measured", measured)
    chosen = Engagement(levers={"bf16": {}}, misfits=("another machine",))
    request = api.RunRequest(script=Script(path="train.py"), accept="statistical", recheck=True)
    found = api._recheck(chosen, request, lambda line: None, None)
    assert asked == [("tune", {"bf16": {}}, "statistical", False)]
    assert not found.levers and "no namespaces" in found.line


def test_input_stands_for_the_exact_levers_of_the_input_that_go_together():
    levers = pytorch_levers.registry()
    found = parse_levers(("input",), levers, lambda: MACHINE)
    assert "sample_store" in found and "fused_fetch" not in found and "workers" not in found and "bf16" not in found
    assert all(levers[name].class_ == "exact" for name in found)
    assert {*parse_levers(("bf16", "input"), levers, lambda: MACHINE)} == {"bf16", *found}
    beside = parse_levers(("input", "fused_fetch"), levers, lambda: MACHINE)
    assert "fused_fetch" in beside and "sample_store" not in beside, "what is named goes before what is meant"
    assert {"sample_store", "fused_fetch"}.isdisjoint(parse_levers(("workers=2", "input"), levers, lambda: MACHINE))
    assert {"fused_fetch", "sample_store", "workers"} <= {*input_levers(levers)}
    assert of_input(("input",), levers, lambda: MACHINE)[1] == []
    kept, left_out = of_input(("workers=2", "input"), levers, lambda: MACHINE)
    assert kept == ["decoded_store", "read_ahead"] and "sample_store" in left_out, "and that is said"


def test_input_stands_for_what_this_machine_can_have_and_the_machine_is_asked_for_it_alone():
    levers = pytorch_levers.registry()
    for_a_gpu = {"pinned_memory", "device_prefetch", "device_store"}
    assert for_a_gpu.isdisjoint(parse_levers(("input",), levers, lambda: MACHINE))
    found = parse_levers(("input",), levers, lambda: WITH_A_GPU)
    assert for_a_gpu <= {*found} and {*parse_levers(("input",), levers, lambda: MACHINE)} == {*found} - for_a_gpu
    named = parse_levers(("pinned_memory",), levers, lambda: pytest.fail("nobody has to ask what machine this is"))
    assert named == {"pinned_memory": {}}
    with pytest.raises(FlatoutError) as caught:
        engagement(RunOptions(levers=named), here(registry=levers))
    assert "cannot be engaged on this machine" in caught.value.error and "CUDA" in caught.value.cause


def test_what_a_plan_found_for_the_cores_of_one_process_is_left_out_on_ranks():
    plan = choice.Engagement(levers={"threads": {"num": 2}, "bf16": {}}, line="2 levers from flatout.toml")
    found = choice.for_ranks(plan, "2:replicate", pytorch_levers.registry())
    assert found.levers == {"bf16": {}}
    assert found.line.endswith("; without threads: ranks share the cores")
    assert choice.for_ranks(found, "2:replicate", pytorch_levers.registry()) == found


def test_levers_of_communication_are_left_out_where_nothing_is_sent_so():
    plan = choice.Engagement(levers={"bf16_gradients": {}, "bf16": {}}, line="a plan")
    alone = choice.for_one_process(plan, pytorch_levers.registry())
    assert alone.levers == {"bf16": {}} and alone.line.endswith("bf16_gradients: one process sends no gradients")
    assert choice.for_ranks(plan, "2:replicate", pytorch_levers.registry()) == plan
    divided = choice.for_ranks(plan, "2:tensor", pytorch_levers.registry())
    assert {*divided.levers} == {"bf16"} and "bf16_gradients: not in mode tensor" in divided.line
