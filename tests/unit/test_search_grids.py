"""Grids for the benchmark of the search: which sets are in one, in which order, and where its scripts run."""

import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "search")]

import record  # noqa: E402
import replay  # noqa: E402

import measuring  # noqa: E402
import sides  # noqa: E402
from flatout.judge.paired import Pairs  # noqa: E402
from flatout.records.plan import Candidate  # noqa: E402
from flatout.trials.search.space import Choice, Space, clash, space_of  # noqa: E402
from handmade import lever, registry  # noqa: E402


def space_with(**settings):
    """A space of levers with so many settings each; `compile` compiles, `loading` works on the input alone."""
    kinds = {"compile": {"compiles": True}, "loading": {"shortens": ("data",), "check": "batches", "class_": "exact"}}
    levers = registry(*(lever(name, parameter="num", **kinds.get(name, {})) for name in settings))
    singles = [Candidate(levers={n: {"num": i}}) for n, num in settings.items() for i in range(num)]
    return Space(singles=tuple(singles), untried=(), levers=levers)


def sizes(space, most=128):
    """How many settings of each lever are in the grid, and how many sets it has."""
    sets = record.sets_of(space, most)
    found = {name: len({one[name]["num"] for one in sets if name in one}) for name in space.levers}
    return {name: num for name, num in found.items() if num}, len(sets)


def test_a_grid_takes_levers_up_until_it_has_64_sets():
    space = space_with(a=1, b=2, c=2, d=2, e=1, compile=3)
    assert sizes(space) == ({"a": 1, "b": 2, "c": 2, "d": 2, "compile": 1}, 2 * 2 * 3 * 3 * 3 - 1)


def test_a_lever_that_would_make_too_many_is_in_the_grid_with_fewer_settings():
    space = space_with(a=1, b=1, c=1, d=1, e=1, f=4)
    assert sizes(space) == ({"a": 1, "b": 1, "c": 1, "d": 1, "e": 1, "f": 3}, 127)
    assert sizes(space, most=64) == ({"a": 1, "b": 1, "c": 1, "d": 1, "e": 1, "f": 1}, 63)


def test_a_lever_for_which_there_is_no_room_leaves_its_place_to_the_next():
    space = space_with(a=7, b=3, c=1)
    space.levers["a"].conflicts, space.levers["c"].conflicts = ("c",), ("a",)
    assert sizes(space, most=8) == ({"a": 7, "c": 1}, 8)


def test_few_levers_make_a_grid_of_all_that_they_may_be_told():
    assert sizes(space_with(a=1, compile=3)) == ({"a": 1, "compile": 3}, 7)


def test_no_set_of_a_grid_has_levers_that_exclude_each_other():
    space = space_with(a=2, b=2, compile=1)
    space.levers["a"].conflicts = ("b",)
    sets = record.sets_of(space, 128)
    assert len(sets) == (2 + 2 + 1) * 2 - 1 and not any(clash(levers, space) for levers in sets)


def test_sets_of_the_same_compiled_graphs_are_measured_side_by_side_in_an_order_drawn_by_lot():
    space = space_with(compile=2, a=2, loading=3)
    sets = record.sets_of(space, 128)
    blocks = record.blocks_of(sets, space, random.Random(0))
    graphs = [{tuple(sorted((n, s["num"]) for n, s in one.items() if n != "loading")) for one in b} for b in blocks]
    compiled = [found for block, found in zip(blocks, graphs, strict=True) if "compile" in block[0]]
    assert sorted(map(str, (one for block in blocks for one in block))) == sorted(map(str, sets))
    assert len(compiled) == len(blocks) - 1 == 2 * 3 and all(len(found) == 1 for found in compiled)
    assert blocks == record.blocks_of(sets, space, random.Random(0)) != record.blocks_of(sets, space, random.Random(1))


def test_the_time_left_counts_compiling_once_for_each_block_that_is_left():
    took_s = {True: [40.0, 20.0], False: [2.0, 4.0]}
    assert record.left_s(took_s, num_sets=10, num_compiled=4) == 2 * 30.0 + 8 * 3.0
    assert record.left_s(took_s, num_sets=1, num_compiled=4) == 30.0
    assert record.left_s({True: [], False: [2.0]}, num_sets=3, num_compiled=1) == record.COMPILING_S + 2 * 2.0
    assert record.left_s({True: [9.0], False: []}, num_sets=2, num_compiled=1) == 18.0, "nothing else is known yet"
    assert record.left_s(took_s, num_sets=0, num_compiled=2) == 0


@pytest.mark.parametrize(("pairs_s", "outcome"), [([], "disturbed"), ([0.01], "measured")])
def test_a_set_of_which_no_pair_was_undisturbed_does_not_count_as_measured(monkeypatch, pairs_s, outcome):
    found = Pairs(baseline_s=pairs_s, candidate_s=pairs_s, num_discarded=3)
    monkeypatch.setattr(record.windows, "measure", lambda bench, levers, extent, purpose: found)
    row = record._row(SimpleNamespace(bench=None), {"a": {}}, 1)
    assert row["outcome"] == outcome and row["num_discarded"] == 3 and row["baseline_step_s"] == pairs_s


def test_a_grid_of_more_pairs_is_one_of_fewer_as_well(tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "RESULTS", tmp_path)
    monkeypatch.setattr(measuring, "ROOT", tmp_path)
    assert not record.is_recorded("some", 1)
    measuring.write("search_grid_some", {"rows": [{"outcome": "failed"}, {"baseline_step_s": [1.0] * 3}]})
    assert record.is_recorded("some", 3) and not record.is_recorded("some", 4)


def test_a_public_script_runs_in_a_copy_with_its_own_options_and_leaves_nothing_behind(tmp_path, monkeypatch):
    checkout, place = tmp_path / "examples", tmp_path / "place"
    (checkout / "vae").mkdir(parents=True)
    (checkout / "vae" / "main.py").touch()
    place.mkdir()
    monkeypatch.setattr(sides, "checked", lambda examples: examples)
    monkeypatch.setattr(sides, "_torchvision_needs_operators", lambda: True)
    before, folder = dict(os.environ), Path.cwd()
    with record.script_named("vae", checkout, place) as script:
        assert (script.path, script.arguments) == ("main.py", ("--epochs", "1000"))
        assert Path.cwd() == place / "script" and Path("main.py").exists()
        assert os.environ["PYTHONPATH"].split(os.pathsep)[0] == str(sides.OPERATORS)
    assert dict(os.environ) == before and Path.cwd() == folder


@pytest.mark.parametrize("path", sorted(replay.RESULTS.glob("search_grid_*.json")), ids=lambda path: path.name[12:20])
def test_recorded_grids_are_read_with_all_that_was_known_then(path):
    """A fact that changed its name would silently take a lever out of every search that is played."""
    grid = replay.Grid.read(path)
    in_grid = {name for row in grid.rows.values() for name in row["levers"]}
    space = space_of(
        {name: replay.LEVERS[name] for name in in_grid},
        grid.facts,
        grid.machine,
        grid.diagnosis,
        Choice(),
    )
    assert not [trial for trial in space.untried if "not looked at" in trial.reason]
