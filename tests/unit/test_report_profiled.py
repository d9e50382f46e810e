"""Is it said of profiled steps how much of them computes, why nothing does, and what takes most?"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from flatout.judge import result as results
from flatout.judge.profiled_time import profiled_time
from flatout.records.as_json import from_json, to_json
from flatout.records.profile import Span, profile_of
from flatout.records.trace_file import append
from flatout.report.export import export
from handmade import HEADER, window
from shown import on_page, on_screen

sys.path.insert(0, str(Path(__file__).parents[1] / "golden"))

import report_examples as examples


def said(result, **options):
    return " ".join(on_screen(result, width=200, **options).split())


def test_a_terminal_says_busy_idle_and_the_largest_three():
    text = said(replace(examples.why(), profiled=examples.profiled_on_gpu()))
    assert (
        "device busy 43 % of the step; tensor cores 42 % of that; idle for Python between launches 25 %, input" in text
    )
    assert "`sm90_xmma_gemm_bf16" in text and "18 % (61 % of bfloat16)" in text
    assert "`vectorized_elementwise" in text


def test_of_a_cpu_it_says_operators_and_where_python_was():
    text = said(examples.why())
    assert "operators 59 % of the step; Python in forward 17 %" in text and "`addmm` 16 % (9 % of float32)" in text


def test_profiled_steps_that_are_far_longer_are_said_to_be():
    long = replace(examples.profiled_on_cpu(), step_s=0.4)
    assert "took 24x as long" in said(replace(examples.why(), profiled=long))
    assert "as long as others" not in said(examples.why())


def test_the_page_has_a_strip_a_table_and_how_it_was_obtained():
    page = on_page(examples.gpu())
    assert 'id="raw-profile"' in page and "What takes most" in page and "tensor cores" in page
    assert 'id="raw-profile"' not in on_page(replace(examples.gpu(), profiled=None))


def test_json_has_it_and_a_result_of_a_former_version_has_none():
    value = to_json(examples.gpu())
    assert from_json(results.Result, value, where="result").profiled == examples.profiled_on_gpu()
    assert to_json(results.summary_of(examples.why()))["profiled"]["busy_s"] == 10.9e-3
    del value["profiled"]
    assert from_json(results.Result, value, where="result").profiled is None


def test_an_export_for_perfetto_has_what_was_profiled_at_its_time_and_what_asked_for_it(tmp_path):
    spans = [
        Span("launch", "cudaLaunchKernel", 0, 100, 200, 5), Span("kernel", "gemm", 7, 300, 900, 5, "aten::mm"),
        Span("phase", "forward", 0, 0, 500),
    ]  # fmt: skip
    profile = profile_of(spans, device="cuda", ends_ns=(0, 1000), zero_s=12.0)
    for record in (replace(HEADER, zero_monotonic_s=10.0), window((0.004,)), profile):
        append(record, tmp_path / "trace-1.jsonl")
    export(str(tmp_path), tmp_path / "steps.json")
    events = json.loads((tmp_path / "steps.json").read_text())["traceEvents"]
    (kernel,) = [event for event in events if event["name"] == "gemm"]
    assert (kernel["ts"], kernel["dur"], kernel["args"]) == (2e6 + 0.3, 0.6, {"link": 5, "operator": "aten::mm"})
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert {"profiled: cuda, stream 7", "profiled: calls", "profiled: phases"} <= tracks
    export(str(tmp_path), tmp_path / "steps.csv")
    assert len((tmp_path / "steps.csv").read_text().splitlines()) == 2
    assert profiled_time(profile).busy_s > 0
