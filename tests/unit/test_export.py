"""The steps of a run for other programs: whole, exact, and never over somebody's file."""

import csv
import errno
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from flatout import api
from flatout.cli import flatout
from flatout.errors import MachineError, RecordError, UsageError
from flatout.records import output_file
from flatout.records.trace_file import encode
from handmade import HEADER, window

APART = window(
    (0.01, 0.012), {"data": (0.004, 0.005), "forward": (0.002, 0.002), "wait_for_disk": (0.001, 0.001)},
    losses=(2.5, math.nan), start_s=1.5, purpose="anatomy", peak_memory_bytes=1000, outside_s=(0.0, 0.003),
)  # fmt: skip
ENDS = window((0.009,), observe="ends", index=1, purpose="trial", levers={"threads": {"num": 1}}, start_s=2.0)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / ".flatout" / "train-1"
    run.mkdir(parents=True)
    write(run / "trace-1.jsonl", HEADER, APART, ENDS)
    return run


def write(path, header, *windows):
    path.write_text("".join(encode(one) + "\n" for one in (header, *windows)))


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def complaint(capsys, *words, code):
    assert flatout.main(["report", *words]) == code
    out, err = capsys.readouterr()
    error, cause, hint = err.splitlines()
    assert (out, error[:7], cause[:7], hint[:7]) == ("", "error: ", "cause: ", "hint:  ")
    return error[7:], cause[7:], hint[7:]


# -- the table -------------------------------------------------------------------------------------------------------


def test_every_step_is_one_row_and_what_was_not_observed_is_an_empty_cell(tmp_path):
    done = api.export("train-1", tmp_path / "steps.csv")
    assert (done.num_steps, done.remarks) == (3, ())
    first, second, third = rows_of(tmp_path / "steps.csv")
    assert [float(row["start_s"]) for row in (first, second, third)] == [1.5, 1.51, 2.0]
    assert (first["step_s"], first["data_s"], first["wait_for_disk_s"]) == ("0.01", "0.004", "0.001")
    assert (first["loss"], second["loss"]) == ("2.5", "") and second["outside_s"] == "0.003"
    assert (third["purpose"], third["levers"], third["step"]) == ("trial", "threads=1", "0")
    assert first["copy_s"] == third["data_s"] == third["loss"] == ""


def test_the_columns_are_the_same_whatever_was_observed(tmp_path, place):
    api.export("train-1", tmp_path / "one.csv")
    write(place / "trace-1.jsonl", HEADER, ENDS)
    api.export("train-1", tmp_path / "other.csv")
    one, other = (set(rows_of(tmp_path / name)[0]) for name in ("one.csv", "other.csv"))
    assert one - other == {"wait_for_disk_s"} and len(other) == len(list(other))


def test_numbers_in_the_table_are_those_of_the_trace_to_the_last_bit(tmp_path):
    api.export("train-1", tmp_path / "steps.csv")
    assert tuple(float(row["step_s"]) for row in rows_of(tmp_path / "steps.csv")) == (*APART.step_s, *ENDS.step_s)


# -- the trace for Perfetto ------------------------------------------------------------------------------------------


def events(path, name="X"):
    return [e for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == name]


def test_windows_steps_and_phases_have_a_track_each_and_losses_and_memory_are_counters(tmp_path, place):
    write(place / "trace-2.jsonl", replace(HEADER, started_unix_s=HEADER.started_unix_s + 60), ENDS)
    api.export("train-1", tmp_path / "trace.json")
    found = events(tmp_path / "trace.json")
    assert {(e["pid"], e["tid"]) for e in found} == {(1, 1), (1, 2), (1, 3), (2, 1), (2, 2)}
    assert [e["dur"] for e in found if e["tid"] == 2] == pytest.approx([10_000, 12_000, 9_000, 9_000])
    assert [e["ts"] for e in found if e["pid"] == 2 and e["tid"] == 2] == pytest.approx([62e6])
    counters = events(tmp_path / "trace.json", "C")
    assert [(e["name"], *e["args"].values()) for e in counters] == [("loss", 2.5), ("peak memory", 1000)]
    named = {e["args"]["name"] for e in events(tmp_path / "trace.json", "M")}
    assert {"train.py (1)", "train.py (2)", "windows", "steps"} <= named
    assert any("order within a step is not recorded" in name for name in named)


def test_phases_lie_side_by_side_inside_their_step(tmp_path, place):
    twice = replace(APART, phases={"data": (0.008, 0.001), "forward": (0.008, 0.001)})
    write(place / "trace-1.jsonl", HEADER, twice)
    api.export("train-1", tmp_path / "trace.json")
    found = events(tmp_path / "trace.json")
    data, forward = (next(e for e in found if e["name"] == name) for name in ("data", "forward"))
    assert forward["ts"] == pytest.approx(data["ts"] + data["dur"])
    assert forward["ts"] + forward["dur"] == pytest.approx(1e6 * 1.51) and forward["args"]["phase_s"] == 0.008


# -- where the steps come from ---------------------------------------------------------------------------------------


def test_a_run_without_a_trace_is_refused(capsys, place):
    (place / "trace-1.jsonl").unlink()
    error, cause, _ = complaint(capsys, "train-1", "--export", "steps.csv", code=4)
    assert error.startswith("there is no step to export in") and "are not there any more" in cause
    assert not Path("steps.csv").exists()


@pytest.mark.parametrize("windows", [(), (window((), observe="ends"),)])
@pytest.mark.parametrize("name", ["steps.csv", "steps.json"])
def test_a_run_without_a_step_is_refused_and_no_file_is_left(tmp_path, place, windows, name):
    write(place / "trace-1.jsonl", HEADER, *windows)
    with pytest.raises(RecordError, match="there is no step to export"):
        api.export("train-1", tmp_path / name)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".flatout"]


def test_a_trace_that_is_broken_in_the_middle_is_refused_and_no_file_is_left(tmp_path, place):
    with open(place / "trace-1.jsonl", "a") as file:
        file.write("nonsense\n" + encode(ENDS) + "\n")
    with pytest.raises(RecordError, match="is not a record"):
        api.export("train-1", tmp_path / "steps.csv")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".flatout"]


# -- where they go ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["steps.csv", "steps.json"])
def test_an_earlier_export_is_written_over_and_nothing_else_is(tmp_path, name):
    path = tmp_path / name
    path.write_text("")
    first = api.export("train-1", path)
    assert api.export("train-1", path) == first
    path.write_text("mine")
    with pytest.raises(UsageError, match="would overwrite a file that is no export"):
        api.export("train-1", path)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("name", ["steps.txt", "steps", "steps.csv.gz"])
def test_an_ending_that_means_no_format_is_refused(capsys, name):
    error, cause, hint = complaint(capsys, "train-1", "--export", name, code=2)
    assert error == f"`--export {name}` ends in no format that can be written"
    assert "`.csv`" in cause and "`.json`" in cause and hint == "e.g. `--export steps.csv`"


def test_a_folder_that_is_not_there_is_named(capsys):
    error, _, hint = complaint(capsys, "train-1", "--export", "gone/steps.csv", code=5)
    assert (error, hint) == ("cannot write `gone/steps.csv`", "make its folder first")


def test_a_full_disk_is_said_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(output_file.os, "replace", full)
    with pytest.raises(MachineError) as caught:
        api.export("train-1", tmp_path / "steps.csv")
    assert (caught.value.cause, caught.value.hint) == ("the disk is full", "free some space")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".flatout"]


def test_exporting_beside_a_page_is_refused(capsys):
    assert "`--html`" in complaint(capsys, "train-1", "--html", "a.html", "--export", "steps.csv", code=2)[0]


@pytest.mark.parametrize("kind", ["csv", "json"])
@pytest.mark.parametrize("changes", [{"outside_s": (0.0,)}, {"phases": {"data": (0.004,)}}])
def test_windows_with_more_or_fewer_times_than_steps_are_left_out_and_said(tmp_path, place, changes, kind):
    write(place / "trace-2.jsonl", HEADER, replace(APART, **changes))
    found = api.export("train-1", tmp_path / f"steps.{kind}")
    assert found.num_steps == 3
    assert found.remarks == ("windows of `trace-2.jsonl` left out: 1 with more or fewer times than steps",)


def test_what_was_written_is_printed_or_given_as_json(capsys):
    assert flatout.main(["report", "train-1", "--export", "steps.json"]) is None
    assert "steps.json: 3 steps" in capsys.readouterr().out
    flatout.main(["report", "train-1", "--export", "steps.json", "--json"])
    assert json.loads(capsys.readouterr().out)["num_steps"] == 3


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_a_trace_whose_last_line_was_cut_is_said_to_be(tmp_path, place, kind):
    trace = place / "trace-1.jsonl"
    trace.write_text(trace.read_text()[:-30])
    found = api.export("train-1", tmp_path / f"steps.{kind}")
    assert found.num_steps == 2 and found.remarks == ("`trace-1.jsonl` is cut: its last line is left out",)
