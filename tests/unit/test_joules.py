"""Do recorded counters and recorded windows come together to the joules of a step, on both sides of a trial?"""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from flatout.machine.energy_counters import Counter, EnergyMeter, Found
from flatout.run.script import Script
from flatout.trials.bench import Bench
from flatout.trials.budget import Size
from flatout.trials.joules import Joules
from flatout.trials.terms import Terms
from handmade import FACTS, trial, window

LEVERS = {"bf16": {}}
PLAIN_W, TUNED_W = 40.0, 60.0
ZERO_S = 500.0


class Replayed(EnergyMeter):
    """A meter whose clock and power are a recording: 40 W, and 60 W from second 510 to 520."""

    def __init__(self, *, every_s=0.01):
        self.clock_s = ZERO_S
        counter = Counter(
            name="package-0", device="cpu", source="RAPL", update_s=1e-3, range_joules=300.0, read=self.shown
        )
        super().__init__(every_s, found=Found(counters=(counter,)), now=lambda: self.clock_s)
        self.open()
        while self.clock_s < 530.0:
            self.clock_s += every_s
            self.note()

    def shown(self):
        high_s = min(max(self.clock_s - 510.0, 0.0), 10.0)
        return (PLAIN_W * (self.clock_s - ZERO_S) + (TUNED_W - PLAIN_W) * high_s) % 300.0


def bench_of(*windows, children=None):
    names = children or ["1"] * len(windows)
    named = list(zip(names, windows, strict=True))
    return SimpleNamespace(facts=FACTS, windows=named, zero_s={"1": ZERO_S, "old": None})


def ends(start_s, step_s=(0.01,) * 25, *, purpose="baseline", levers=None, **changes):
    """A window of step ends; its start is on the child's clock, which began at second 500 of ours."""
    return window(step_s, observe="ends", purpose=purpose, levers=levers or {}, start_s=start_s, **changes)


def test_windows_on_the_childs_clock_are_found_on_ours_and_the_summary_has_both_sides_and_the_run():
    anatomy = window((0.01,) * 20, {"forward": 0.006, "backward": 0.004}, purpose="anatomy", start_s=10.5)
    tuned = (ends(start_s, purpose="winner", levers=LEVERS) for start_s in (11.0, 12.0))
    other = ends(25.0, purpose="trial", levers={"threads": {"num": 1}})
    plain = (ends(start_s) for start_s in (2.0, 8.0, 9.0))
    joules = Joules(bench_of(*plain, *tuned, other, anatomy), Replayed())
    joules.final_s["bf16"] = ZERO_S + 7.5, ZERO_S + 13.0
    summary = joules.summary(trial(LEVERS, 1.2))
    assert summary.baseline.joules == pytest.approx(PLAIN_W * 0.01)
    assert summary.tuned.joules == pytest.approx(TUNED_W * 0.01)
    assert summary.measuring_joules == pytest.approx(30 * PLAIN_W + 10 * (TUNED_W - PLAIN_W), rel=1e-3)
    assert summary.sources == ("package-0: RAPL",)


def test_both_sides_are_of_the_windows_of_the_final_measurement_whatever_levers_these_name():
    """A lever that needs a process of its own is not among a window's; others of the tune are at another power."""
    before = (ends(2.0), ends(3.0, purpose="trial"))
    final = (ends(11.0), ends(12.0, purpose="trial"))
    joules = Joules(bench_of(*before, *final), Replayed())
    joules.final_s["heap"] = ZERO_S + 10.5, ZERO_S + 13.0
    summary = joules.summary(trial({"heap": {}}, 1.2))
    assert summary.baseline.joules == pytest.approx(TUNED_W * 0.01)
    assert summary.tuned.joules == pytest.approx(TUNED_W * 0.01)
    assert joules.summary(trial(LEVERS, 1.2)).tuned is None, "it was never measured to its end"


@pytest.mark.parametrize(
    "changes", [{"foreign_fraction": 0.4}, {"recompilations": 1}, {"outside_s": (0.05, *(0.0,) * 24)}]
)
def test_a_window_of_others_of_a_compilation_or_with_an_evaluation_does_not_count(changes):
    found = Joules(bench_of(replace(ends(2.0), **changes)), Replayed()).summary(None)
    assert found.baseline.joules is None and found.tuned is None
    assert found.baseline.why_not == "others, a compilation, evaluation or checkpoints fell into every window"


def test_a_child_of_a_former_version_whose_clock_is_not_known_has_no_energy():
    assert Joules(bench_of(ends(2.0), children=["old"]), Replayed()).summary(None).baseline.joules is None


def test_windows_of_fewer_than_ten_readings_say_so():
    assert "are too short" in Joules(bench_of(ends(2.0)), Replayed(every_s=0.1)).summary(None).baseline.why_not


def test_without_counters_there_is_the_reason_alone():
    meter = EnergyMeter(found=Found(missing=("RAPL: none",)))
    summary = Joules(bench_of(ends(2.0)), meter).summary(None)
    assert (summary.baseline.joules, summary.baseline.why_not, summary.sources) == (None, "RAPL: none", ())


SCRIPT = """
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    optimizer.zero_grad()
    model(torch.ones(512, 64)).sum().backward()
    optimizer.step()
"""


def test_a_childs_windows_lie_where_we_waited_for_them(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    steady = Counter(
        name="package-0", device="cpu", source="RAPL", update_s=1e-3, read=lambda: 40.0 * time.perf_counter()
    )
    bench = Bench(Script(path="train.py"), tmp_path, {}, Terms(isolate=False))
    joules = Joules(bench, EnergyMeter(0.002, found=Found(counters=(steady,))))
    with joules.meter:
        try:
            bench.start()
            begun_s = time.perf_counter()
            bench.size = Size(num_steps=1000, skip_steps=2, loader_skip_steps=3)
            measured = bench.window({}, purpose="baseline")
            ended_s = time.perf_counter()
        finally:
            bench.end()
    start_s, end_s = joules.span("1", replace(measured, foreign_fraction=None))
    assert begun_s < start_s < end_s < ended_s
    assert joules.meter.joules("cpu", start_s, end_s).joules == pytest.approx(40.0 * sum(measured.step_s), rel=1e-3)
