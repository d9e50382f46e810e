"""The law of time on a device with a queue: a window over the truth is 1, whatever costs what."""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from conducting import in_this_process
from flatout.child.orders import Order
from flatout.child.run import Run
from flatout.frameworks.pytorch.observe import devices
from flatout.records.facts import Facts
from flatout.records.trace import Failure, Window
from simulated_device import Mixture, Script, Stream
from simulated_training import mixtures, train

_this_process, train = in_this_process, train

ROUNDING = 1e-8
"""Windows are written down in whole nanoseconds."""


TYPICAL = Mixture(host_s=5e-6, device_s=1e-4, forward=30, backward=60, optimizer=10)
"""A step of 10 ms that Python is through with in half a millisecond."""


def test_a_window_is_as_long_as_the_work_of_its_steps(train):
    watched = train().settle()

    @settings(max_examples=1000, suppress_health_check=list(HealthCheck))
    @given(
        mixture=mixtures, num_steps=st.integers(1, 6), skip_steps=st.integers(0, 3),
        observe=st.sampled_from(["ends", "ends", "phases", "reads"]),
    )  # fmt: skip
    def law(mixture, num_steps, skip_steps, observe):
        watched.take(mixture)
        window, ends_s = watched.window(num_steps=num_steps, skip_steps=skip_steps, observe=observe)
        assert window.step_s == pytest.approx([b - a for a, b in itertools.pairwise(ends_s)], abs=ROUNDING)
        assert window.training_step_s == pytest.approx(watched.script.true_step_s(), abs=ROUNDING)
        if observe == "phases":
            sums = [sum(row) for row in zip(*window.device_phases.values(), strict=True)]
            assert sums == pytest.approx(window.step_s, abs=ROUNDING)

    law()


@pytest.mark.parametrize("num_steps", [1, 3])
def test_what_a_run_compares_is_as_long_as_the_work_of_its_steps(train, num_steps):
    one = train(TYPICAL, conductor=Run, mode="run", levers={}, learns=True).settle()
    for _ in range(3):
        window, ends_s = one.window(num_steps=num_steps, purpose="check")
        assert window.step_s == pytest.approx([b - a for a, b in itertools.pairwise(ends_s)], abs=ROUNDING)
        assert window.training_step_s == pytest.approx(one.script.true_step_s(), abs=ROUNDING)


def test_a_run_that_is_taken_apart_leaves_out_the_step_that_fills_the_queue(train):
    one = train(dataclasses.replace(TYPICAL, fetch_s=5e-3), conductor=Run, mode="run", takes_apart=True).settle()
    for _ in range(40):
        one.script.step()
    windows = one.of(Window)
    assert len(windows) >= 3 and {window.observe for window in windows} == {"phases"}
    assert [w.training_step_s for w in windows] == pytest.approx(
        [one.script.true_step_s()] * len(windows), abs=ROUNDING
    )


@pytest.mark.parametrize("reads", [(), ("end",), ("loss", "end")])
def test_a_read_is_not_blamed_for_the_work_that_it_waits_for(train, reads):
    one = train(dataclasses.replace(TYPICAL, reads=reads)).settle()
    window, _ = one.window(num_steps=4, observe="phases")
    shares = {name: sum(row) / sum(window.step_s) for name, row in window.device_phases.items()}
    assert shares["forward"] == pytest.approx(0.3, abs=0.02) and shares["backward"] == pytest.approx(0.6, abs=0.02)
    assert shares.get("sync", 0.0) < 0.03 and shares["optimizer"] == pytest.approx(0.1, abs=0.02)
    python = {name: sum(row) for name, row in window.phases.items()}
    assert not reads or max(python, key=python.__getitem__) == "sync", "where Python was is kept"


def test_a_batch_that_is_late_shows_as_data_and_one_that_is_not_as_nothing(train):
    window, _ = train(dataclasses.replace(TYPICAL, fetch_s=5e-3)).settle().window(num_steps=4, observe="phases")
    assert sum(window.device_phases["data"]) == 0 and sum(window.phases["data"]) == pytest.approx(4 * 5e-3)
    window, _ = train(dataclasses.replace(TYPICAL, fetch_s=50e-3)).settle().window(num_steps=4, observe="phases")
    assert sum(window.device_phases["data"]) / sum(window.step_s) == pytest.approx(40e-3 / 50e-3, abs=0.03)


@pytest.mark.parametrize("observe", ["ends", "phases"])
def test_an_evaluation_is_charged_to_what_lies_between_steps_not_to_the_next_step(train, observe):
    one = train(TYPICAL).settle()
    window, ends_s = one.window(
        num_steps=3, observe=observe, at=3, evaluates=50
    )  # 1,500 kernels: more than are waited for
    evaluated_s = one.script.evaluated_s - ends_s[1]
    assert window.outside_s == pytest.approx((0.0, evaluated_s, 0.0), abs=ROUNDING) and evaluated_s > 0.14
    trained_s = [step - outside for step, outside in zip(window.step_s, window.outside_s, strict=True)]
    assert trained_s == pytest.approx([10e-3] * 3, abs=3e-4)
    assert window.account["evaluation"] == pytest.approx((0.0, evaluated_s, 0.0), abs=ROUNDING)


@pytest.mark.parametrize("observe", ["ends", "phases"])
def test_a_checkpoint_is_not_charged_with_the_work_that_it_waits_for(train, observe):
    one = train(TYPICAL).settle()
    window, _ = one.window(num_steps=3, observe=observe, at=3, save_s=0.2)
    assert window.outside_s == pytest.approx((0.0, 0.2, 0.0), abs=ROUNDING)
    assert window.account["checkpoint"] == pytest.approx((0.0, 0.2, 0.0), abs=ROUNDING)
    assert window.training_s == pytest.approx(30e-3, abs=1e-3)


def test_the_first_idea_of_a_step_is_not_the_time_of_launching_it(train):
    for mixture in (TYPICAL, dataclasses.replace(TYPICAL, reads=("end",)), Mixture(host_s=2e-4, device_s=1e-6)):
        (facts,) = train(mixture).settle().of(Facts)
        assert facts.device == "cuda"
        assert facts.warm_up_step_s == pytest.approx(Script(mixture).true_step_s(), rel=0.02)


def test_one_that_is_read_is_waited_for_once_and_nothing_else_is(train):
    one = train(TYPICAL).settle()
    one.device.num_waits = 0
    for observe in ("ends", "phases", "ends"):
        one.window(num_steps=4, observe=observe)
    assert one.device.num_waits == 3
    num_events = one.device.num_events
    for observe in ("ends", "phases"):
        one.window(num_steps=4, observe=observe)
    assert one.device.num_events == num_events, "events are used again"


def test_where_nothing_is_measured_nobody_waits_and_no_event_is_recorded(train):
    one = train(TYPICAL).settle()
    one.device.num_waits = one.device.num_events = 0
    window, _ = one.window(num_steps=4, observe="off")
    one.pytorch.coast()
    one.script.step()
    assert one.device.num_waits == one.device.num_events == 0 and window.num_steps == 4 and not window.device_phases


def test_values_and_copies_on_the_cpu_are_no_events_and_no_phases(train):
    one = train(TYPICAL).settle()
    plain, _ = one.window(num_steps=2, observe="phases")
    small, kept = torch.ones(1), one.script.fetch
    one.script.fetch = lambda: [kept(), *((small.item(), bool(small), small.to(torch.float64)) for _ in range(100))]
    marks, record = [], devices.record
    devices.record = lambda event, stream: [marks.append(event), record(event, stream)]
    try:
        window, _ = one.window(num_steps=2, observe="phases")
    finally:
        devices.record = record
    assert window.phases.keys() - {"garbage"} == plain.phases.keys() - {"garbage"}
    assert "sync" not in window.device_phases and "copy" not in window.device_phases
    assert len(marks) <= 2 * 12 + 1, "of each part one where it begins and one where it ends"


def test_what_a_batch_is_made_with_belongs_to_the_data(train):
    one = train(TYPICAL).settle()
    kept = one.device.work
    one.device.work = lambda host_s: [
        kept(host_s),
        one.pytorch.observer.clock.top == "data" and one.script.value.item(),
    ]
    window, _ = one.window(num_steps=2, observe="phases")
    assert sum(window.phases["data"]) > 15e-3 and "sync" not in window.phases


def test_a_step_that_is_captured_is_none_and_its_events_are_nobodys(train):
    one = train(TYPICAL).settle()
    one.pipe.waiting.append(Order(number=1, kind="window", observe="phases", num_steps=3))
    for number in range(8):
        one.device.capturing = number == 3
        one.script.step()
    (window,) = one.of(Window)
    assert window.num_steps == 3 and not one.of(Failure)


def test_where_the_clock_fails_no_window_is_told(train, monkeypatch):
    one = train(TYPICAL).settle()
    one.pipe.waiting.append(Order(number=1, kind="window", observe="phases", num_steps=3))
    one.script.step()
    one.script.step()
    monkeypatch.setattr(devices, "record", lambda event, stream: 1 / 0)
    for _ in range(5):
        one.script.step()
    monkeypatch.undo()
    assert not one.of(Window) and any("failed" in failure.message for failure in one.of(Failure))


def test_work_on_another_stream_that_nobody_waits_for_is_in_no_step(train):
    one = train(TYPICAL).settle()
    one.device.streams["side"] = Stream()
    one.device.streams["side"].done_s.append(1e9)
    window, _ = one.window(num_steps=2)
    assert window.training_step_s == pytest.approx(10e-3, rel=0.02)


def test_a_copy_on_another_stream_takes_no_time_of_the_steps_own(train):
    one = train(TYPICAL).settle()
    fetch = one.script.fetch

    def prefetch():
        fetch()
        one.device.current = "side"
        one.script.value.to("cuda")
        one.device.current = "main"

    one.script.fetch = prefetch
    window, ends_s = one.window(num_steps=3, observe="phases")
    assert window.step_s == pytest.approx([b - a for a, b in itertools.pairwise(ends_s)], abs=ROUNDING)
    assert all(seconds >= 0 for row in window.device_phases.values() for seconds in row)
    assert sum(window.device_phases.get("copy", ())) < 1e-4 < sum(window.phases["copy"])


def test_a_device_is_the_one_on_which_most_parameters_lie():
    assert devices.of([torch.ones(1, device="meta"), torch.ones(1)]) is None
    here, there = (SimpleNamespace(device=torch.device("cuda", index)) for index in (1, 2))
    assert devices.of([here, there, there, torch.ones(1)]) == torch.device("cuda", 2)


def test_amds_devices_are_not_nvidias_though_pytorch_calls_them_so(monkeypatch):
    here = torch.device("cuda", 0)
    assert devices.has_queue(here) and not devices.not_measured(here)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert not devices.has_queue(here) and "ROCm" in devices.not_measured(here)


def test_where_the_clock_of_a_device_is_not_known_that_is_said(train, monkeypatch):
    one = train(TYPICAL)
    monkeypatch.setattr(devices, "of", lambda parameters: torch.device("mps"))
    one.settle()
    (facts,) = one.of(Facts)
    assert facts.device == "mps" and "`mps` is not known" in facts.not_measured
    assert any("no step was measured" in text for text in one.pytorch.remarks())
