"""The trace file: written line by line, read back whole, followed while it grows."""

import json
import math
import os
import subprocess
import sys
import threading

import pytest

from flatout.errors import RecordError
from flatout.records import trace_file
from flatout.records.exported_models import ExportedModel, ModelExport
from flatout.records.host_reads import HostRead, HostReads
from flatout.records.profile import Span, profile_of
from flatout.records.stacks import StackRow, Stacks
from flatout.records.trace import (
    Census,
    End,
    Failure,
    Inputs,
    Operation,
    PassEnd,
    Ready,
    Refused,
    Remark,
    Scaling,
    Toggle,
    Window,
)
from flatout.records.trace_file import KINDS, Follower, Reader, append, decode, encode
from handmade import FACTS, HEADER, gradients, measured, window

EACH = (
    HEADER,
    FACTS,
    window(phases={"forward": 0.004}, losses=(0.5, math.inf)),
    Census(
        num_operations=2, num_syncs=1, flops=10, moved_bytes=20, uncounted=("sort",), sync_places=("train.py:3",),
        operations=(Operation(name="mm", shape="2x2", dtype="float32", num_calls=1, flops=10, moved_bytes=20,
                              self_s=1e-6, counted=True),),
    ),
    Scaling(full_s=(0.2,), half_s=(0.1,)),
    ModelExport(runtime="onnx", models=(ExportedModel(name="Net", batch=4, batch_is_free=True),)),
    Stacks(rows=(StackRow(phase="data", kind="decode", place="a.py:1 in f", wall_s=0.1, waiting_s=0.0, num_samples=3),),
           num_steps=2, wall_s=0.2, num_samples=3, levers={"workers": {"num": 0}}),
    HostReads(rows=(HostRead(file="/a/\udcff.py", line=3, read="item", on_device=True, num=2, waited_s=0.1),),
              num_steps=2, wall_s=0.2),
    profile_of([Span("kernel", "gemm", 7, 5, 9, 3, "aten::mm")], device="cuda", ends_ns=(0, 10), zero_s=1.5),
    measured(gradients()),
    Toggle(engaged={"threads": {"num": 1}}, released=("bf16",), took_s=0.1, step=3, evidence={"threads": "1 thread"}),
    Failure(stage="script", error="ValueError", message="no\nsuch \udcff file", filename="x"),
    Refused(path="/etc/x"),
    Inputs(paths=("/home/x/config.json", "/home/x/\udcff.py")),
    Remark(text="store `x`: 5 of 5 items \udcff"),
    PassEnd(num_steps=7),
    Ready(order=2, num_steps=7),
    End(num_steps=9, wall_s=1.5, exit_code=0),
)  # fmt: skip


def written(path, *records):
    for record in records:
        append(record, path)
    return path


def read(path):
    """All records of a trace, and whether it is torn."""
    reader = Reader(path)
    return tuple(reader), reader.torn


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace-1.jsonl"


def refusal(path):
    with pytest.raises(RecordError) as caught:
        read(path)
    return caught.value


def test_the_examples_cover_every_kind():
    assert {type(record) for record in EACH} == set(KINDS.values())


@pytest.mark.parametrize("record", EACH, ids=lambda record: type(record).__name__)
def test_every_kind_of_record_is_one_line_of_ascii_and_comes_back(record):
    line = encode(record)
    assert "\n" not in line and line.isascii()
    assert decode(line) == record


def test_nan_losses_make_no_json_that_other_readers_refuse():
    line = encode(window(losses=(0.5, math.nan)))
    json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert math.isnan(decode(line).losses[1])


def test_a_trace_comes_back_in_order_with_its_header(path):
    assert read(written(path, *EACH)) == (EACH, False)


def test_a_trace_that_ends_in_the_middle_of_a_character_is_read_up_to_there(path):
    written(path, HEADER, FACTS)
    path.write_bytes(path.read_bytes() + '{"kind": "end", "é'.encode()[:-1])
    assert read(path) == ((HEADER, FACTS), True)


def test_a_broken_line_before_the_last_is_an_error_that_names_it(path):
    written(path, HEADER, FACTS, EACH[-1])
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([lines[0], lines[1][:40], *lines[2:]]))
    assert refusal(path).error == f"`{path}` line 2 is not a record"


@pytest.mark.parametrize("line", [b"[1, 2]", b'{"num_steps": 3}', b'{"kind": ["end"]}', b"[" * 100000, b"\xff\xfe"])
def test_whatever_stands_in_a_line_the_error_has_three_parts(path, line):
    path.write_bytes(encode(HEADER).encode() + b"\n" + line + b"\n")
    problem = refusal(path)
    assert "line 2" in problem.error and problem.cause and problem.hint


def test_a_record_that_lacks_a_field_is_named_with_line_and_field(path):
    path.write_text(encode(HEADER) + '\n{"kind": "end", "num_steps": 3}\n')
    assert refusal(path).error == f"`{path}` line 2 lacks the field `wall_s`"


def test_kinds_from_the_future_are_passed_over(path):
    path.write_text(encode(HEADER) + '\n{"kind": "from_the_future", "x": 1}\n' + encode(EACH[-1]) + "\n")
    assert read(path) == ((HEADER, EACH[-1]), False)


def test_a_newer_format_is_said_before_anything_else_even_where_fields_have_changed(path):
    path.write_text('{"kind": "header", "format": 99, "renamed": 1}\n')
    problem = refusal(path)
    assert problem.error == f"`{path}` has format 99, this version reads up to {trace_file.FORMAT}"
    assert "newer" in problem.cause and "upgrade" in problem.hint


@pytest.mark.parametrize("content", ["", "\n", encode(FACTS) + "\n", '{"kind": "header"'])
def test_a_trace_without_a_header_is_refused(path, content):
    path.write_text(content)
    assert refusal(path).error == f"`{path}` has no header"


def test_a_missing_trace_and_a_folder_are_refused_in_three_parts(path, tmp_path):
    assert "No such file" in refusal(path).cause
    assert "directory" in refusal(tmp_path).cause


def test_every_record_is_on_disk_when_write_returns(path):
    for number, record in enumerate(EACH, 1):
        append(record, path)
        assert path.read_bytes().count(b"\n") == number


def test_a_long_record_is_one_write_so_that_threads_never_mix_lines(path):
    long = window(step_s=(0.001,) * 2000, purpose="x" * 100_000)

    def work():
        for _ in range(10):
            append(long, path)

    append(HEADER, path)
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read(path) == ((HEADER, *[long] * 40), False)


def test_a_full_disk_is_an_oserror_of_the_writer():
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    with pytest.raises(OSError, match="No space left"):
        append(HEADER, "/dev/full")


def test_a_follower_of_a_file_that_is_not_there_yet_waits(path):
    follower = Follower(path)
    assert follower.new() == []
    written(path, HEADER)
    assert follower.new() == [HEADER]
    assert follower.new() == []


def test_a_broken_line_costs_a_follower_no_other_record(path):
    lines = [encode(HEADER), encode(FACTS), "broken", encode(EACH[-1])]
    path.write_text("\n".join(lines) + "\n")
    assert Follower(path).new() == [HEADER, FACTS, EACH[-1]]


def test_an_empty_window_has_no_step_time_instead_of_zero():
    empty = window(step_s=())
    assert empty.num_steps == 0 and math.isnan(empty.training_step_s)


def test_evaluation_inside_a_step_does_not_count_as_training():
    found = window(step_s=(1.0, 3.0), outside_s=(0.0, 2.0))
    assert found.training_s == 2.0 and found.training_step_s == 1.0
    assert isinstance(found, Window)


def test_what_the_users_process_imports_is_the_standard_library_alone():
    ours = ", ".join(f"flatout.records.{name}" for name in ("trace", "trace_file", "plan", "ceilings", "as_json"))
    code = f"import sys; before = set(sys.modules); import {ours}; print(*sorted(set(sys.modules) - before))"
    names = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    foreign = {name.partition(".")[0] for name in names} - set(sys.stdlib_module_names) - {"flatout"}
    assert not foreign
    assert not {"asyncio", "multiprocessing", "subprocess", "email", "http", "ssl", "logging"} & set(names)
