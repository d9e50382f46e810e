"""The run is sacred: under every lever, and under levers together, a script sees and leaves what it would plainly."""

import importlib.util
import subprocess

import matrix
import pytest

import warm
from tiers import some

pytest.importorskip("torch")
if importlib.util.find_spec("torchvision") is None:  # its compiled part, which does not load everywhere, is not needed
    pytest.skip("needs torchvision", allow_module_level=True)

from flatout.machine.read import read_machine

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
    """The plain run of a script, made once for each way to start and to end."""
    made = {}

    def once(script, end, start=warm.run):
        if (script, end, start) not in made:
            made[script, end, start] = matrix.run(script, end, None, folder, start)
        return made[script, end, start]

    return once


def compared(plain, folder, levers, script, end):
    start = warm.run if matrix.as_a_fork(levers) else subprocess.run
    ours = matrix.run(script, end, levers, folder, start)
    return matrix.differences(plain(script, end, start), ours, levers), ours


@pytest.mark.smoke
def test_plain_is_plain(plain, folder):
    """Otherwise no other test here would mean anything."""
    for script, end in ENDS.items():
        assert matrix.differences(plain(script, end), matrix.run(script, end, None, folder), ()) == {}
        assert len(plain(script, end).aspects) > 60


AT_WORK = [name for name in ENGAGED if name not in matrix.NOT_HERE]
WITHOUT_EFFECT = matrix.in_groups(name for name in ENGAGED if name in matrix.NOT_HERE)


@pytest.mark.parametrize(
    "names", some([*((name,) for name in AT_WORK), *WITHOUT_EFFECT], *WITHOUT_EFFECT), ids="+".join
)
def test_under_a_lever_a_script_sees_and_leaves_what_it_would_plainly(names, plain, folder):
    at_work = set()
    for script, end in ENDS.items():
        different, ours = compared(plain, folder, names, script, end)
        assert different == {}, script
        at_work |= ours.at_work
    assert {*names} & at_work == {*names} - {*matrix.NOT_HERE}, "those that were at work"


SETS = matrix.together(AT_WORK)
FEW = tuple(name for name in ("bf16", "fused_fetch", "threads") if name in ENGAGED)
EXITS = ("3", "raise", "chained", "0", "return")
KILLED = ("SIGTERM", "SIGKILL", "SIGINT")


def sets_and_ends():
    """Each set of levers with a way to end, each way to end with a set."""
    ends = EXITS + KILLED
    for number in range(max(len(SETS), len(ends))):
        yield SETS[number] if number < len(SETS) else FEW, ends[number % len(ends)]


@pytest.mark.smoke
@pytest.mark.parametrize(("names", "end"), [pytest.param(*one, id="+".join(one[0])) for one in sets_and_ends()])
def test_under_levers_together_a_script_sees_leaves_and_ends_as_it_would_plainly(names, end, plain, folder):
    for script, how in (("rows.py", end), ("pictures.py", "0")):
        different, _ = compared(plain, folder, names, script, how)
        assert different == {}, script


@pytest.mark.smoke
def test_without_a_lever_a_script_sees_and_leaves_what_it_would_plainly(plain, folder):
    for script, end in ENDS.items():
        assert compared(plain, folder, (), script, end)[0] == {}


@pytest.mark.smoke
def test_the_table_of_exceptions_names_levers_that_there_are():
    assert {*matrix.NOT_HERE, *matrix.NOT_COMPARED, *matrix.DOCUMENTED} <= {*matrix.LEVERS}


@pytest.mark.smoke
def test_each_set_is_run_and_each_way_to_end_is_met_under_levers():
    met = list(sets_and_ends())
    assert {*SETS} <= {names for names, _ in met} and {end for _, end in met} == {*EXITS, *KILLED}


@pytest.mark.smoke
def test_every_pair_of_levers_that_goes_together_is_together_once():
    pairs = {frozenset((a, b)) for names in SETS for a in names for b in names if a != b}
    for a in ENGAGED:
        for b in ENGAGED:
            rivals = matrix.are_rivals(a, b)
            assert a == b or {a, b} & {*matrix.NOT_HERE} or rivals != (frozenset((a, b)) in pairs)
