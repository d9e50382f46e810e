"""Does a profiled window of a device with a queue say what the device waits for?"""

import pytest
from hypothesis import HealthCheck, given, settings

from conducting import in_this_process
from flatout.judge.anatomy import dissect
from flatout.judge.causes import Findings
from flatout.judge.diagnosis import diagnose
from flatout.judge.profiled_time import profiled_time
from flatout.records.facts import Facts
from flatout.records.profile import Profile
from flatout.records.trace import Failure
from simulated_device import Mixture, Profiler
from simulated_training import mixtures, train

_this_process, train = in_this_process, train

COMPUTES = Mixture(host_s=5e-6, device_s=1e-4, forward=30, backward=60, optimizer=10)
STARVED = Mixture(**{**COMPUTES.__dict__, "fetch_s": 20e-3})
LAUNCHES = Mixture(host_s=40e-6, device_s=4e-6, forward=30, backward=60, optimizer=10)
WAITS = Mixture(host_s=5e-6, device_s=1e-4, forward=20, backward=40, optimizer=40, python_s=9e-3, reads=("end",))
COPIES = Mixture(**{**COMPUTES.__dict__, "copy_s": 20e-3})
ALLOCATES = Mixture(**{**COMPUTES.__dict__, "allocate_s": 30e-3})


@pytest.fixture
def profiled(train, monkeypatch):
    """Profiles steps of a mixture."""
    from flatout.frameworks.pytorch.observe import profile_recorder

    monkeypatch.setattr(profile_recorder, "Kineto", Profiler)

    def profile(mixture, num_steps=5, **parts):
        watched = train(mixture).settle()
        monkeypatch.setattr(Profiler, "device", watched.device)
        watched.window(num_steps=num_steps, observe="profile", purpose="profile", **parts)
        assert not watched.of(Failure)
        (record,) = watched.of(Profile)
        return watched, record, profiled_time(record)

    return profile


@pytest.mark.parametrize(
    ("mixture", "cause"),
    [
        (STARVED, "input"),
        (LAUNCHES, "Python"),
        (WAITS, "synchronisation"),
        (COPIES, "copies"),
        (ALLOCATES, "allocation"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_planted_cause_is_what_the_device_waits_for(profiled, mixture, cause):
    _, _, found = profiled(mixture)
    assert next(iter(found.by_cause)) == cause
    assert found.idle_s(cause) > 0.9 * (found.step_s - found.busy_s)


@pytest.mark.parametrize(
    ("mixture", "binding"),
    [
        (COMPUTES, "compute"), (STARVED, "input"), (LAUNCHES, "launch overhead"), (WAITS, "host synchronisation"),
        (COPIES, "copies"), (ALLOCATES, "allocation"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)  # fmt: skip
def test_a_planted_cause_is_what_binds(profiled, mixture, binding):
    watched, _, found = profiled(mixture)
    window, _ = watched.window(num_steps=5, observe="phases", purpose="anatomy")
    (facts,) = watched.of(Facts)
    seen = Findings(anatomy=dissect([window]), facts=facts, num_cores=2, counterfactuals={}, profiled=found)
    assert diagnose(seen).binding == binding


def test_a_device_that_computes_all_the_time_is_busy(profiled):
    _, _, found = profiled(COMPUTES)
    assert found.busy_share == pytest.approx(1.0)


@given(mixture=mixtures)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_busy_and_idle_are_the_step_and_the_step_is_the_true_one(profiled, mixture):
    watched, record, found = profiled(mixture, num_steps=4)
    assert found.busy_s + sum(one.seconds for one in found.idle) == pytest.approx(found.step_s, rel=1e-9)
    ends_s = watched.script.ends_s
    assert found.num_steps == record.num_steps == 3
    assert found.step_s == pytest.approx((ends_s[-1] - ends_s[-4]) / 3, rel=1e-5, abs=1e-8)
    own = mixture.forward + mixture.backward + mixture.optimizer
    assert found.busy_s == pytest.approx(own * mixture.device_s, rel=1e-4, abs=1e-8)
