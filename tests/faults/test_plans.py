"""A plan that was edited into nonsense: an error in three parts where it was named, else a plain run that says so."""

import json
import subprocess
import tomllib
from pathlib import Path

import pytest
import tomlkit
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from faulting import FLATOUT, copied, environment, flatout, parts, write_plan
from flatout import api
from flatout.errors import FlatoutError, RecordError
from flatout.frameworks.pytorch.levers import registry
from flatout.records import plan_file
from flatout.run import choice
from flatout.run.script import Script
from handmade import MACHINE, plan

pytest.importorskip("torch")

PLAN = plan("train.py", levers={"bf16": {}, "threads": {"num": 2}})
HERE = choice.Environment(
    script="train.py",
    arguments=(),
    machine=lambda: MACHINE,
    framework_version=PLAN.framework_version,
    registry=registry(),
    python=PLAN.python,
)

odd = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.binary(max_size=4).map(str),
    st.sampled_from(["bf16", "free_data", "none", "\x00", "-1", "nan", "../../etc/passwd", "a" * 10_000]),
    st.lists(st.integers(), max_size=3), st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)  # fmt: skip


def paths_in(value, before=()):
    """Every place in a nested table."""
    found = [before] if before else []
    for key, inner in value.items() if isinstance(value, dict) else ():
        found += paths_in(inner, (*before, key))
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans") / "flatout.toml"
    plan_file.write(PLAN, path)
    return path, path.read_text()


def outcome_of(path):
    """What a run under this file would do; named and found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)
        found = choice.engagement(choice.RunOptions(), HERE)
        assert found.line and (found.levers or "plain" in found.line or "change nothing" in found.line)
        try:
            named = choice.engagement(choice.RunOptions(plan=path), HERE)
        except FlatoutError as problem:
            assert problem.error and problem.cause and problem.hint
            assert not found.levers
            return None
        assert dict(named.levers) == dict(found.levers)
        for name, given_settings in named.levers.items():
            choice.check_settings(HERE.registry[name], given_settings)
        return named


@pytest.mark.smoke
def test_the_plan_itself_is_engaged(written):
    path, text = written
    path.write_text(text)
    assert dict(outcome_of(path).levers) == PLAN.levers


@pytest.mark.smoke
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(change=st.data())
def test_a_value_that_was_replaced_or_taken_out_is_an_error_in_three_parts_or_a_plan_that_can_be_engaged(
    written, change
):
    path, text = written
    document = tomllib.loads(text)
    place = change.draw(st.sampled_from(paths_in(document)))
    table = document
    for key in place[:-1]:
        table = table[key]
    kind = change.draw(st.sampled_from(["replace", "remove", "add"]))
    value = change.draw(odd.filter(lambda v: v is not None))
    if kind == "remove":
        del table[place[-1]]
    elif kind == "add":
        table[change.draw(st.text(min_size=1, max_size=10))] = value
    else:
        table[place[-1]] = value
    try:
        path.write_text(tomlkit.dumps(document), encoding="utf-8")
    except (UnicodeEncodeError, ValueError, TypeError):  # no TOML at all
        return
    outcome_of(path)


@pytest.mark.smoke
@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(change=st.data())
def test_a_file_with_bytes_changed_cut_or_doubled_is_an_error_in_three_parts_or_a_plan_that_can_be_engaged(
    written, change
):
    path, text = written
    content = bytearray(text.encode())
    for _ in range(change.draw(st.integers(1, 5))):
        at = change.draw(st.integers(0, len(content) - 1))
        kind = change.draw(st.sampled_from(["flip", "cut", "insert", "double"]))
        if kind == "flip":
            content[at] = change.draw(st.integers(0, 255))
        elif kind == "cut":
            del content[at : at + change.draw(st.integers(1, 200))]
        elif kind == "insert":
            content[at:at] = change.draw(st.binary(min_size=1, max_size=20))
        else:
            content[at:at] = content[at : at + change.draw(st.integers(1, 200))]
        if not content:
            break
    path.write_bytes(bytes(content))
    outcome_of(path)


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("num = 2", "num = -5", "the lever `threads` needs a number"),
        ("num = 2", 'num = "many"', "the lever `threads` needs a number"),
        ("num = 2", "num = 1e9", "the lever `threads` needs a number"),
        pytest.param("num = 2", "numb = 2", "has no setting `numb`", marks=pytest.mark.smoke),
        (".threads]", ".thread]", "names the lever `thread`, which this version does not have"),
        ("[plan.", "[[plan.", ""),
    ],
)
def test_nonsense_in_a_plan_stops_a_run_that_names_it_and_no_other(folder, old, new, error):
    copied("tiny.py", folder)
    write_plan("tiny.py", "threads=2")
    path = Path("flatout.toml")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(RecordError) as raised:
        api.run(api.RunRequest(script=Script(path="tiny.py"), plan=path))
    found = parts(str(raised.value))
    assert set(found) == {"error", "cause", "hint"} and error in found["error"]
    if new == "num = -5":
        plainly = flatout("run", "tiny.py")
        assert plainly.returncode == 0 and "running plainly" in plainly.stderr.splitlines()[0]


def test_two_runs_under_one_plan_at_once_are_two_runs(folder):
    copied("faulty.py", folder)
    write_plan("faulty.py", "threads=1", "bf16")
    started = [
        subprocess.Popen(
            [*FLATOUT, "run", "--json", f"told-{number}.json", "faulty.py", "nowhere", "1000"],
            env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    ends = [process.communicate(timeout=100) for process in started]
    assert [process.returncode for process in started] == [0, 0], ends
    told = [json.loads(Path(f"told-{number}.json").read_text()) for number in range(2)]
    assert {one["steps"] for one in told} == {1000} and all(one["levers"] == ["threads", "bf16"] for one in told)
    assert len({one["run"] for one in told}) == 2, "each has a run folder of its own"
