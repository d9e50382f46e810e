"""Do a recorded log and recorded windows come together to the joules of a step, on both sides of a trial?"""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from flatout.machine.energy_counters import EnergyMeter, Found, Probe
from flatout.records.energy import Counter, load
from flatout.run.script import Script
from flatout.trials.bench import Bench
from flatout.trials.budget import Size
from flatout.trials.joules import FILE, Joules
from flatout.trials.terms import Terms
from handmade import FACTS, trial, window

LEVERS = {"bf16": {}}
PLAIN_W, TUNED_W = 40.0, 60.0
ZERO_S = 500.0


class Replayed(EnergyMeter):
    """A meter whose clock and power are a recording: 40 W, and 60 W from second 510 to 520."""

    def __init__(self, *, until_s=530.0, every_s=0.01, resolution_s=1e-3, device="cpu"):
        self.clock_s = ZERO_S
        counter = Counter(
            name="package-0" if device == "cpu" else "gpu-0", device=device, source="RAPL", resolution_s=resolution_s,
            resolution_joules=1e-6, range_joules=300.0,
        )  # fmt: skip
        super().__init__(
            every_s, found=Found(probes=(Probe(counter=counter, read=self.shown),)), now=lambda: self.clock_s
        )
        self.open()
        while self.clock_s < until_s:
            self.clock_s += every_s
            self.note()

    def shown(self):
        high_s = min(max(self.clock_s - 510.0, 0.0), 10.0)
        return (PLAIN_W * (self.clock_s - ZERO_S) + (TUNED_W - PLAIN_W) * high_s) % 300.0


def bench_of(*windows, facts=FACTS, children=None):
    names = children or ["1"] * len(windows)
    return SimpleNamespace(
        facts=facts,
        levers={},
        windows=list(zip(names, windows, strict=True)),
        zero_s={"1": ZERO_S, "old": None},
        size=Size(num_steps=25, skip_steps=2, loader_skip_steps=3),
        step_guess_s=0.01,
    )


def ends(start_s, step_s=(0.01,) * 25, *, purpose="baseline", levers=None, **changes):
    """A window of step ends; its start is on the child's clock, which began at second 500 of ours."""
    return window(step_s, observe="ends", purpose=purpose, levers=levers or {}, start_s=start_s, **changes)


def test_windows_on_the_childs_clock_are_found_in_the_log_on_ours():
    bench = bench_of(
        ends(2.0), ends(3.0), ends(11.0, purpose="trial", levers=LEVERS), ends(12.0, purpose="trial", levers=LEVERS)
    )
    assert Joules(bench, Replayed()).beside(LEVERS, 0.0) == {
        "baseline_joules_per_step": pytest.approx(PLAIN_W * 0.01),
        "candidate_joules_per_step": pytest.approx(TUNED_W * 0.01),
    }


def test_only_windows_of_this_trial_count():
    bench = bench_of(ends(2.0), ends(15.0), ends(16.0, purpose="trial", levers=LEVERS))
    found = Joules(bench, Replayed()).beside(LEVERS, ZERO_S + 14.0)
    assert found["baseline_joules_per_step"] == pytest.approx(TUNED_W * 0.01)


@pytest.mark.parametrize(
    "changes", [{"foreign_fraction": 0.4}, {"recompilations": 1}, {"outside_s": (0.05, *(0.0,) * 24)}]
)
def test_a_window_of_others_of_a_compilation_or_with_an_evaluation_does_not_count(changes):
    disturbed = replace(ends(2.0), **changes)
    bench = bench_of(disturbed, ends(11.0, purpose="trial", levers=LEVERS))
    found = Joules(bench, Replayed()).beside(LEVERS, 0.0)
    assert found == {"why_no_energy": "others, a compilation, evaluation or checkpoints fell into every window"}


def test_a_child_of_a_former_version_whose_clock_is_not_known_has_no_energy():
    found = Joules(bench_of(ends(2.0), children=["old"]), Replayed()).beside(LEVERS, 0.0)
    assert set(found) == {"why_no_energy"}


def test_windows_of_fewer_than_ten_updates_say_so_in_the_trial():
    bench = bench_of(ends(2.0), ends(11.0, purpose="trial", levers=LEVERS))
    found = Joules(bench, Replayed(every_s=0.1)).beside(LEVERS, 0.0)
    assert "tells too little" in found["why_no_energy"]


def test_without_counters_a_trial_says_nothing_of_energy():
    meter = EnergyMeter(found=Found(missing=("RAPL: none",)))
    joules = Joules(bench_of(ends(2.0)), meter)
    assert joules.beside(LEVERS, 0.0) == {}
    summary = joules.summary(SimpleNamespace(final=None))
    assert summary.baseline.joules is None and summary.counters == ()


def test_the_summary_has_both_sides_and_the_run():
    anatomy = window((0.01,) * 20, {"forward": 0.006, "backward": 0.004}, purpose="anatomy", start_s=5.0)
    bench = bench_of(ends(2.0), ends(11.0, purpose="winner", levers=LEVERS), anatomy)
    joules = Joules(bench, Replayed())
    joules.beside(LEVERS, 0.0)
    summary = joules.summary(SimpleNamespace(final=trial(LEVERS, 1.2)))
    assert summary.baseline.joules == pytest.approx(0.4) and summary.tuned.joules == pytest.approx(0.6)
    assert summary.measuring_joules == pytest.approx(30 * PLAIN_W + 10 * (TUNED_W - PLAIN_W), rel=1e-3)
    assert summary.counters[0].resolution_s == 1e-3


class Windowing:
    """A bench that measures a window as soon as one is asked for."""

    def __init__(self, facts):
        self.facts, self.levers, self.windows, self.zero_s = facts, {}, [], {"1": ZERO_S}
        self.size, self.step_guess_s = Size(num_steps=25, skip_steps=2, loader_skip_steps=3), 0.01
        self.asked = []

    def window(self, levers, *, purpose, skip):
        self.asked.append((purpose, self.size.num_steps, skip))


def test_where_windows_are_too_short_for_a_gpus_counter_one_of_each_side_is_long_enough():
    bench = Windowing(replace(FACTS, device="cuda"))
    Joules(bench, Replayed(resolution_s=0.1, device="gpu")).weigh(LEVERS)
    assert bench.asked == [("plain energy", 150, 3), ("energy", 150, 3)]
    assert bench.size.num_steps == 25


def test_where_windows_suffice_none_is_measured_for_energy_alone():
    bench = Windowing(FACTS)
    Joules(bench, Replayed()).weigh(LEVERS)
    Joules(bench, Replayed(resolution_s=0.1, device="gpu")).weigh(LEVERS)  # trains on the processor
    assert bench.asked == []


def test_the_log_is_kept_beside_the_traces(tmp_path):
    meter = EnergyMeter(0.01, found=Replayed()._found)
    with Joules(bench_of(), meter).noted(tmp_path):
        pass
    assert load(tmp_path / FILE).counters == Replayed().log().counters


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
    steady = Counter(name="package-0", device="cpu", source="RAPL", resolution_s=1e-3, resolution_joules=1e-6)
    found = Found(probes=(Probe(counter=steady, read=lambda: 40.0 * time.perf_counter()),))
    bench = Bench(Script(path="train.py"), tmp_path, {}, Terms(isolate=False))
    joules = Joules(bench, EnergyMeter(0.002, found=found))
    with joules.noted(tmp_path):
        try:
            bench.start()
            begun_s = time.perf_counter()
            bench.size = Size(num_steps=1000, skip_steps=2, loader_skip_steps=3)
            measured = bench.window({}, purpose="baseline")
            ended_s = time.perf_counter()
        finally:
            bench.end()
        span = joules._span("1", replace(measured, foreign_fraction=None))
        assert begun_s < span.start_s < span.end_s < ended_s
        used = joules._curves().between(span.start_s, span.end_s, min_updates=0).joules
    assert used == pytest.approx(40.0 * sum(measured.step_s), rel=1e-3)
