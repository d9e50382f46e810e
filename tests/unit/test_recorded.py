"""Does a change of rules show? Recorded runs of scripts with a planted bottleneck, diagnosed again."""

import json
from pathlib import Path

import pytest

from flatout.judge.causes import Findings
from flatout.judge.diagnosis import diagnose
from flatout.records.as_json import from_json

TRACES = sorted((Path(__file__).parent.parent / "traces").glob("*.json"))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_a_recorded_run_is_diagnosed_as_it_was(path):
    value = json.loads(path.read_text())
    found = diagnose(from_json(Findings, value["findings"], where=path.name))
    named = [found.part if name == "input" and found.part else name for name in (found.binding, *found.also)]
    assert named == value["expected"] and set(value["planted"].split("+")) <= set(named)


def test_there_are_recorded_runs_of_many_kinds():
    assert len({json.loads(path.read_text())["planted"] for path in TRACES}) >= 12
