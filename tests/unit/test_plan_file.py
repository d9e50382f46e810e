"""Plans on disk: readable, shared by several scripts and people, and never trusted blindly."""

import errno
import fcntl
import multiprocessing
import os
import stat
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.errors import FlatoutError, MachineError, RecordError, UsageError
from flatout.records import output_file, plan_file
from flatout.records.ceilings import Accelerator
from flatout.records.plan_file import check_place, key_of, misfits, read, scripts, seen_from, write
from handmade import MACHINE, plan

ODD_NAMES = [
    "train.py",
    "a folder/my train.py",
    'quo"te.py',
    "apo'strophe.py",
    "back\\slash.py",
    "dots.in.name.py",
    "-m package.module",
    "[brackets].py",
    "plan.machine",
    "über/训练.py",
    "#comment.py",
    "=",
    "tab\there.py",
    "line\nbreak.py",
    "../up/one.py",
    "emoji🚂.py",
    "format",
    "",
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "flatout.toml"


def refusal(call, *arguments, kind=RecordError):
    with pytest.raises(kind) as caught:
        call(*arguments)
    problem = caught.value
    assert problem.error and problem.cause and problem.hint
    assert str(problem).startswith(f"error: {problem.error}\ncause: ")
    return problem


# -- there and back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_plan_survives_its_file_whatever_its_script_is_called(path, name):
    write(plan(name), path)
    assert read(path, name) == plan(name)
    assert scripts(path) == (name,)


def test_arguments_and_agreements_of_any_text_survive(path):
    made = plan(arguments=("--name", 'a "b" \n\t\\ é', ""), agreement="x: 'y'\n# z", run="")
    write(made, path)
    assert read(path, made.script) == made


def test_a_plan_that_changes_nothing_survives(path):
    write(plan(levers={}, arguments=()), path)
    assert read(path, "train.py").levers == {} and read(path, "train.py").arguments == ()


def test_settings_keep_their_types(path):
    levers = {"a": {"num": 2, "on": True, "share": 0.5, "word": "x"}, "b": {}}
    write(plan(levers=levers), path)
    found = read(path, "train.py").levers
    assert found == levers and found["a"]["on"] is True


def test_a_machine_with_everything_and_one_with_gaps_survive(path):
    full = replace(
        MACHINE,
        cores_quota=1.5,
        memory_limit_bytes=2**33,
        shm_bytes=2**26,
        cxx_compiler="/usr/bin/c++",
        accelerators=(
            Accelerator(name="NVIDIA H200", memory_bytes=2**37, compute_capability="9.0"),
            Accelerator(name="a card whose driver says little", memory_bytes=2**30),
        ),
    )
    for machine in (full, MACHINE):
        write(plan(machine=machine), path)
        assert read(path, "train.py").machine == machine


def test_numbers_are_written_as_people_read_them(path):
    write(plan(ratio=1.23456789, baseline_steps_per_s=231.123456789), path)
    text = path.read_text()
    assert "ratio = 1.23457\n" in text and "baseline_steps_per_s = 231.123\n" in text
    assert "# bf16 threads=1: 1.23x [1.45, 1.55]" in text


def test_a_second_write_of_the_same_plan_changes_nothing(path):
    write(plan("a.py"), path)
    write(plan("b.py"), path)
    before = path.read_text()
    write(plan("a.py"), path)
    assert path.read_text() == before


# -- what stays -----------------------------------------------------------------------------------------------------


def test_other_plans_stay_as_they_were(path):
    for name in ("a.py", "b.py", "c.py"):
        write(plan(name), path)
    write(plan("b.py", levers={"compile": {}}, ratio=2.0), path)
    assert scripts(path) == ("a.py", "b.py", "c.py")
    assert read(path, "a.py") == plan("a.py") and read(path, "c.py") == plan("c.py")
    assert read(path, "b.py").levers == {"compile": {}} and read(path, "b.py").ratio == 2.0


def test_the_former_plan_of_the_same_script_leaves_nothing_behind(path):
    accelerator = Accelerator(name="NVIDIA H200", memory_bytes=2**37)
    write(plan(machine=replace(MACHINE, accelerators=(accelerator,))), path)
    write(plan(levers={"compile": {}}), path)
    assert read(path, "train.py") == plan(levers={"compile": {}})
    assert "threads" not in path.read_text() and "H200" not in path.read_text()
    assert path.read_text().count("1.50x") == 1


COMMENTED = """\
# ours to keep
format = 1  # the version

# team: ask Ada before you change anything here
[plan."a.py"]
# bf16 threads=1: 1.50x [1.45, 1.55]
# found on a quiet evening
ratio = 1.5

# about b, which follows
[plan."b.py"]
ratio = 2.0  # b's own

[notes]
text = "not a # comment"
# the end
"""


@pytest.mark.parametrize("name", ["a.py", "b.py", "c.py"])
def test_every_comment_of_the_users_stays_whichever_plan_is_written(path, name):
    path.write_text(COMMENTED)
    for _ in range(2):
        write(plan(name), path)
    text = path.read_text()
    for comment in (
        "# ours to keep",
        "# the version",
        "# team: ask Ada before you change anything here",
        "# found on a quiet evening",
        "# about b, which follows",
        "# the end",
    ):
        assert text.count(comment) == 1, comment
    assert ("# b's own" in text) == (name != "b.py")  # what stands behind a value goes with it
    assert tomllib.loads(text)["notes"] == {"text": "not a # comment"}
    assert read(path, name) == plan(name)


def test_our_own_line_about_the_former_plan_goes_with_it(path):
    path.write_text(COMMENTED)
    write(plan("a.py", ratio=9.0), path)
    assert "1.50x" not in path.read_text() and "# bf16 threads=1: 9.00x" in path.read_text()


@pytest.mark.parametrize(
    "text",
    [
        'format = 1\nplan."b.py".ratio = 1.0\n',
        'format = 1\n[plan]\n[plan."b.py"]\nratio = 1.0\n',
        'format = 1\n[plan."b.py".machine]\ncpu = "x"\n[plan."b.py"]\nratio = 1.0\n',
        'format = 1\n[plan."b.py"]\nratio = 1.0\n[tool]\nx = nan\n[plan."d.py"]\nratio = 2.0\n',
        'format = 1\r\n[plan."b.py"]\r\nratio = 1.0\r\n',
    ],
    ids=["dotted", "with a head", "parts first", "out of order", "windows line ends"],
)
@pytest.mark.parametrize("name", ["a.py", "b.py"])
def test_files_that_people_have_rearranged_are_added_to_or_left_alone(path, text, name):
    path.write_bytes(text.encode())
    try:
        write(plan(name), path)
    except RecordError as problem:
        assert path.read_bytes() == text.encode() and problem.hint
        return
    assert read(path, name) == plan(name)
    if name != "b.py":
        assert tomllib.loads(path.read_text())["plan"]["b.py"]["ratio"] == 1.0


def test_a_link_to_a_shared_file_stays_a_link(tmp_path, path):
    shared = tmp_path / "elsewhere" / "shared.toml"
    shared.parent.mkdir()
    write(plan("a.py"), shared)
    path.symlink_to(shared)
    write(plan("b.py"), path)
    assert path.is_symlink() and scripts(shared) == ("a.py", "b.py")


def test_every_way_of_typing_a_script_is_one_name_in_the_file(tmp_path, monkeypatch):
    (tmp_path / "one").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "one")
    monkeypatch.chdir(tmp_path)
    ways = ("one/train.py", "./one/../one/train.py", f"{tmp_path}/one/train.py", "link/train.py")
    assert {key_of(way, Path("flatout.toml")) for way in ways} == {"one/train.py"}
    monkeypatch.chdir("one")
    assert key_of("train.py", Path("../flatout.toml")) == "one/train.py"
    assert key_of("train.py", Path("flatout.toml")) == "train.py"
    assert key_of("-m package.train", Path("../flatout.toml")) == "-m package.train"


def test_a_way_back_out_of_a_linked_folder_is_followed_as_the_system_follows_it(tmp_path, monkeypatch):
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "link").symlink_to(tmp_path / "far" / "deep")
    monkeypatch.chdir(tmp_path / "here")
    assert key_of("link/../train.py", Path("flatout.toml")) == "../far/train.py"


def test_a_plan_that_is_a_pipe_is_not_waited_for(path):
    os.mkfifo(path)
    assert "not a file" in refusal(read, path, "train.py").cause


def test_where_no_plan_can_be_written_is_known_before_one_is_made(path):
    check_place(path)
    assert "make its folder first" in refusal(check_place, path.parent / "gone" / "plan.toml", kind=MachineError).hint
    long = path.parent / ("x" * 300) / "plan.toml"
    assert refusal(check_place, long, kind=MachineError).cause
    path.write_text("garbage = [")
    assert "is no plan file" in refusal(check_place, path).error
    path.write_text('format = 1\n[plan."a.py"]\n[notes]\n[plan."b.py"]\n')
    assert "follow each other" in refusal(check_place, path).cause


def test_names_in_a_file_reached_through_a_link_are_seen_from_where_it_lies(tmp_path, monkeypatch):
    for name in ("shared", "one"):
        (tmp_path / name).mkdir()
    (tmp_path / "one" / "flatout.toml").symlink_to("../shared/plans.toml")
    monkeypatch.chdir(tmp_path / "one")
    seen = seen_from(Path("flatout.toml"), plan("train.py", run=".flatout/train-1"))
    assert (seen.script, seen.run) == ("../one/train.py", "../one/.flatout/train-1")


def test_a_script_keeps_its_typed_name_where_the_working_folder_is_gone(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert key_of("train.py", tmp_path / "flatout.toml") == "train.py"


def test_the_files_permissions_stay(path):
    write(plan("a.py"), path)
    path.chmod(0o660)
    write(plan("b.py"), path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o660


def _write_many(path, writer):
    for number in range(5):
        write(plan(f"{writer}-{number}.py"), path)


def test_writers_at_the_same_time_lose_nothing(path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(path, writer)) for writer in range(3)]
    for process in writers:
        process.start()
    for process in writers:
        process.join()
    assert [process.exitcode for process in writers] == [0, 0, 0]
    assert set(scripts(path)) == {f"{writer}-{number}.py" for writer in range(3) for number in range(5)}
    assert os.listdir(path.parent) == ["flatout.toml"]


def test_a_network_folder_that_cannot_be_locked_is_written_all_the_same(path, monkeypatch):
    def flock(file, how):
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", flock)
    write(plan(), path)
    assert read(path, "train.py") == plan()


# -- what is refused ------------------------------------------------------------------------------------------------


def test_a_missing_file_is_refused_with_how_to_make_one(path):
    problem = refusal(read, path, "train.py")
    assert "No such file" in problem.cause and "tune" in problem.hint


def test_a_plan_for_another_script_names_those_there_are(path):
    write(plan("a.py"), path)
    problem = refusal(read, path, "b.py")
    assert problem.error == f"`{path}` has no plan for `b.py`"
    assert "`a.py`" in problem.cause and "`flatout tune` makes one" in problem.hint


NO_FORMAT = "it states no `format` from 1 to 1, which every plan file begins with"


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"import torch\n", "Expected '='"),
        (b"[project]\nname = 'mine'\n", NO_FORMAT),
        (b"# Plans made by flatout: what to change\n[plan]\n", NO_FORMAT),
        (b"format = 'x'\n", NO_FORMAT),
        (b"format = true\n", NO_FORMAT),
        (b"format = 0\n", NO_FORMAT),
        (b"format = 1\n[plan.", "does not read as TOML"),
        (b"format = 1\nx = " + b"9" * 5000, "does not read as TOML"),
        (b"format = 1\nx = " + b"[" * 3000 + b"]" * 3000, "does not read as TOML"),
        (b"# Plans made by flatout: what to change\n\xff\xfe", "can't decode"),
        (b"format = 1\nplan = 3\n", "`plan` is not a table"),
        (b"format = 1\nplan = ['train.py']\n", "`plan` is not a table"),
    ],
)
def test_what_is_no_plan_or_a_torn_one_is_refused_and_never_written_over(path, content, cause):
    path.write_bytes(content)
    for call in ((read, path, "train.py"), (scripts, path), (check_place, path)):
        problem = refusal(*call)
        assert problem.error == f"`{path}` is no plan file, or a torn one" and cause in problem.cause
        assert "`--plan` names another" in problem.hint
    assert "is no plan file" in refusal(write, plan(), path).error
    assert path.read_bytes() == content


def test_nobody_is_told_to_delete_a_torn_plan(path):
    path.write_text("format = 1\n[plan.")
    hint = refusal(read, path, "train.py").hint
    assert "mend it" in hint and "delete" not in hint


def test_an_empty_file_is_no_plan_to_read_and_a_place_to_write_one(path):
    path.touch(mode=0o640)
    assert refusal(read, path, "train.py").cause == NO_FORMAT
    check_place(path)
    write(plan(), path)
    assert read(path, "train.py") == plan() and stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_plan_that_is_torn_itself_is_mended_by_a_new_one(path):
    path.write_text("format = 1\n[plan]\n'train.py' = 3\n")
    assert "is not a table" in refusal(read, path, "train.py").cause
    write(plan(), path)
    assert read(path, "train.py") == plan()


def test_a_plan_written_inline_is_left_alone(path):
    text = 'format = 1\nplan = {"b.py" = {ratio = 1.0}}\n'
    path.write_text(text)
    refusal(write, plan(), path)
    assert path.read_text() == text


def test_a_newer_file_is_refused_for_reading_and_never_written_over(path):
    path.write_text("format = 99\n")
    for call in ((read, path, "train.py"), (write, plan(), path), (scripts, path)):
        problem = refusal(*call)
        assert "format 99" in problem.error and "newer" in problem.cause and "upgrade" in problem.hint
    assert path.read_text() == "format = 99\n"


@pytest.mark.parametrize(
    ("line", "other", "complaint"),
    [
        ("ratio = 1.5", 'ratio = "fast"', "`ratio` is `fast`, not float"),
        ("ratio = 1.5", "", "lacks the field `ratio`"),
        ("num_pairs = 10", "num_pairs = 1.5", "`num_pairs` is `1.5`, not int"),
        ("num = 1", "num = 1979-05-27", "`levers.threads.num` is `1979-05-27`, not str or int or float or bool"),
        ('cpu = "AMD EPYC"', "cpu = 7", "`machine.cpu` is `7`, not str"),
        ('class_ = "precision"', 'class_ = "harmless"', "is no plan file"),
        ("ratio = 1.5", "ratio = nan", "is no plan file"),
        ("ratio = 1.5", "ratio = -7.0", "is no plan file"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(path, line, other, complaint):
    write(plan(), path)
    text = path.read_text()
    assert text.count(line + "\n") == 1
    path.write_text(text.replace(line + "\n", other + "\n"))
    assert complaint in refusal(read, path, "train.py").error


def test_a_plan_is_data_and_nothing_in_it_is_evaluated(path, tmp_path):
    trap = tmp_path / "trap"
    evil = f"__import__('os').mkdir('{trap}')"
    write(plan(agreement=evil, run=f"$(mkdir {trap})", arguments=(f"{{{evil}}}", "!!python/object"), script=evil), path)
    found = read(path, evil)
    assert found.agreement == evil and not trap.exists()
    source = Path(plan_file.__file__).read_text()
    assert not any(word in source for word in ("eval(", "exec(", "pickle", "importlib"))


# -- what cannot be written -----------------------------------------------------------------------------------------


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_folder_is_a_machine_error_in_three_parts(path):
    path.parent.chmod(0o500)
    try:
        assert "ermission" in refusal(write, plan(), path, kind=MachineError).cause
    finally:
        path.parent.chmod(0o700)


def test_a_folder_that_is_not_there_is_a_machine_error_in_three_parts(tmp_path):
    problem = refusal(write, plan(), tmp_path / "nowhere" / "flatout.toml", kind=MachineError)
    assert "No such file" in problem.cause


def test_a_plan_that_is_a_folder_is_refused_in_three_parts(tmp_path):
    refusal(write, plan(), tmp_path, kind=FlatoutError)
    refusal(read, tmp_path, "train.py")


def refuse_with(monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(output_file.os, "replace", refuse)


@pytest.mark.parametrize(
    ("number", "cause"),
    [(errno.EACCES, "Permission"), (errno.EROFS, "Read-only"), (errno.ENOSPC, "full"), (errno.EDQUOT, "full")],
)
def test_a_folder_that_refuses_leaves_the_former_file_and_no_draft(path, monkeypatch, number, cause):
    write(plan("a.py"), path)
    before = path.read_bytes()
    refuse_with(monkeypatch, number)
    assert cause in refusal(write, plan("b.py"), path, kind=MachineError).cause
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["flatout.toml"]


def test_a_script_whose_name_is_not_text_is_refused_and_the_file_stays(path):
    write(plan("a.py"), path)
    before = path.read_bytes()
    problem = refusal(write, plan("b\udcff.py"), path, kind=UsageError)
    assert "UTF-8" in problem.cause and path.read_bytes() == before


# -- does it fit here? ----------------------------------------------------------------------------------------------


def test_a_plan_made_here_fits():
    assert misfits(plan(), MACHINE, "2.13.0", "3.11.9") == ()


def test_an_update_of_the_kernel_sets_no_plan_aside():
    assert misfits(plan(), replace(MACHINE, operating_system="Linux 6.1.99", hostname="there"), "2.13.0") == ()


def test_what_differs_from_where_the_plan_was_made_is_said_in_words():
    other = replace(MACHINE, num_cores=64, hostname="there")
    found = misfits(plan(machine=other, framework_version="2.11.0", python="3.14.0"), MACHINE, "2.13.0", "3.11.7")
    assert len(found) == 3
    assert "usable cores" in found[0]
    assert found[1:] == ("pytorch 2.11.0 then, 2.13.0 now", "Python 3.14.0 then, 3.11.7 now")


def test_another_python_is_not_compared_where_it_is_not_known():
    assert misfits(plan(python="3.14.0"), MACHINE, "2.13.0") == ()
