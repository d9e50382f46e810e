"""The run is sacred: under every lever, and under levers together, a script sees and leaves what it would plainly."""

import importlib.util

import matrix
import pytest

pytest.importorskip("torch")
if importlib.util.find_spec("torchvision") is None:  # its compiled part, which does not load everywhere, is not needed
    pytest.skip("needs torchvision", allow_module_level=True)

from flatout.run.machine import read_machine

ENDS = {"rows.py": "3", "pictures.py": "raise"}
ENGAGED = [
    name
    for name, lever in matrix.LEVERS.items()
    if matrix.can_be_engaged(lever, read_machine()) and name not in matrix.NOT_COMPARED
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """One folder for all runs: its path is in what scripts see."""
    return tmp_path_factory.mktemp("behaviour") / "project"


@pytest.fixture(scope="session")
def plain(folder):
    """The plain run of a script, made once for each way to end."""
    made = {}

    def once(script, end):
        if (script, end) not in made:
            made[script, end] = matrix.run(script, end, None, folder)
        return made[script, end]

    return once


def compared(plain, folder, levers, script, end):
    ours = matrix.run(script, end, levers, folder)
    return matrix.differences(plain(script, end), ours, levers), ours


def test_plain_is_plain(plain, folder):
    """Otherwise no other test here would mean anything."""
    for script, end in ENDS.items():
        assert matrix.differences(plain(script, end), matrix.run(script, end, None, folder), ()) == {}
        assert len(plain(script, end).aspects) > 60


@pytest.mark.parametrize("name", ENGAGED)
def test_under_a_lever_a_script_sees_and_leaves_what_it_would_plainly(name, plain, folder):
    at_work = set()
    for script, end in ENDS.items():
        different, ours = compared(plain, folder, (name,), script, end)
        assert different == {}, script
        at_work |= ours.at_work
    assert (name in at_work) != (name in matrix.NOT_HERE), "whether it was at work"


SETS = matrix.together([name for name in ENGAGED if name not in matrix.NOT_HERE])


@pytest.mark.parametrize("names", SETS, ids="+".join)
def test_under_levers_together_a_script_sees_and_leaves_what_it_would_plainly(names, plain, folder):
    ends = {"rows.py": "SIGTERM", "pictures.py": "0"}
    if "checkpoints" in names:  # a process that is killed loses what it was writing, as it says
        ends["rows.py"] = "3"
    for script, end in ends.items():
        different, _ = compared(plain, folder, names, script, end)
        assert different == {}, script


@pytest.mark.parametrize("end", ["raise", "chained", "0", "return", "SIGKILL", "SIGINT"])
def test_under_levers_a_script_ends_as_it_would_plainly(end, plain, folder):
    names = [name for name in ("bf16", "fused_fetch", "threads") if name in ENGAGED]
    assert compared(plain, folder, names, "rows.py", end)[0] == {}


def test_without_a_lever_a_script_sees_and_leaves_what_it_would_plainly(plain, folder):
    for script, end in ENDS.items():
        assert compared(plain, folder, (), script, end)[0] == {}


def test_the_table_of_exceptions_names_levers_that_there_are():
    assert {*matrix.NOT_HERE, *matrix.NOT_COMPARED, *matrix.DOCUMENTED} <= {*matrix.LEVERS}


def test_every_pair_of_levers_that_goes_together_is_together_once():
    pairs = {frozenset((a, b)) for names in SETS for a in names for b in names if a != b}
    for a in ENGAGED:
        for b in ENGAGED:
            rivals = b in matrix.LEVERS[a].conflicts or a in matrix.LEVERS[b].conflicts
            assert a == b or {a, b} & {*matrix.NOT_HERE} or rivals != (frozenset((a, b)) in pairs)
