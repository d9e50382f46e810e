"""Are switches for debugging seen, held off while a lever is engaged, and given back as the script set them last?"""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from flatout.frameworks.pytorch.levers import registry  # noqa: E402
from flatout.frameworks.pytorch.seams.debug_switches import set_from_outside, switched_on  # noqa: E402
from flatout.frameworks.pytorch.seams.patches import patched  # noqa: E402
from handmade import FACTS, MACHINE  # noqa: E402

LEVER = registry()["no_debug"]

SWITCHES = {
    "deterministic algorithms": lambda on: torch.use_deterministic_algorithms(on, warn_only=on),
    "disabled oneDNN": lambda on: setattr(torch.backends.mkldnn, "enabled", not on),
    "anomaly detection": torch.autograd.set_detect_anomaly,
}


@pytest.fixture(autouse=True)
def all_off():
    yield
    for switch in SWITCHES.values():
        switch(False)
    assert "torch.set_anomaly_enabled" not in patched()


def state():
    return (
        torch.get_deterministic_debug_mode(), torch.backends.mkldnn.enabled, torch.is_anomaly_enabled(),
        torch.is_anomaly_check_nan_enabled(),
    )  # fmt: skip


def names(device="cpu"):
    return switched_on(device, traced=False)


@pytest.mark.parametrize("name", SWITCHES)
def test_each_switch_is_named_while_it_is_on_turned_off_and_given_back(name):
    assert names() == ()
    SWITCHES[name](True)
    assert names() == (name,)
    before, session = state(), SimpleNamespace(kept={}, device="cpu")
    LEVER.engage(session, {})
    assert torch._C._get_deterministic_algorithms() is False and torch._C._get_mkldnn_enabled() is True
    assert torch._C.is_anomaly_enabled() is False
    assert LEVER.evidence(session) == f"off: {name}"
    LEVER.release(session)
    assert state() == before and names() == (name,) and session.kept == {}


def test_nothing_that_is_off_is_evidence_of_anything():
    session = SimpleNamespace(kept={}, device="cpu")
    LEVER.engage(session, {})
    assert LEVER.evidence(session) is None
    LEVER.release(session)


def test_what_costs_a_gpu_alone_is_named_there_alone(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert names() == () and names("cuda") == ("deterministic cuDNN",)
    assert set_from_outside("cpu") == ("OMP_NUM_THREADS=1",)
    assert set_from_outside("cuda") == ("CUDA_LAUNCH_BLOCKING=1", "OMP_NUM_THREADS=1")


def test_a_profiler_that_runs_is_named(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with torch.autograd.profiler.profile():
        assert set_from_outside("cpu") == ("a running profiler",)
    assert set_from_outside("cpu") == ()


class Script:
    """Trains; `in_steps` has each step computed within `detect_anomaly`."""

    def __init__(self, in_steps):
        self.model, self.in_steps = nn.Linear(4, 2), in_steps
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.traced = []

    def train(self, num):
        for _ in range(num):
            if self.in_steps:
                with torch.autograd.detect_anomaly(check_nan=False):
                    self.compute()
            else:
                self.compute()
            self.optimizer.step()

    def compute(self):
        out = self.model(torch.randn(3, 4))
        self.traced.append("traceback_" in out.grad_fn.metadata)
        out.sum().backward()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("in_steps", [True, False])
def test_anomaly_detection_is_held_off_and_given_back_between_steps(in_steps, watch):
    if not in_steps:
        torch.autograd.set_detect_anomaly(True)
    watched, script = watch(), Script(in_steps)
    script.train(9)
    assert watched.pytorch.facts().debug_switches == ("anomaly detection",)
    before = state()
    watched.pytorch.engage({"no_debug": {}})
    script.train(3)
    assert watched.pytorch.evidence() == ({"no_debug": "off: anomaly detection"}, {})
    assert torch.is_anomaly_enabled() is (not in_steps), "the script finds what it has set"
    watched.pytorch.engage({})
    assert state() == before
    script.train(2)
    assert script.traced == [True] * 9 + [False] * 3 + [True] * 2


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_what_the_script_sets_meanwhile_is_what_it_gets_back(watch):
    torch.autograd.set_detect_anomaly(True)
    watched, script = watch(), Script(in_steps=False)
    script.train(9)
    watched.pytorch.engage({"no_debug": {}})
    torch.autograd.set_detect_anomaly(False)
    watched.pytorch.engage({})
    assert not torch.is_anomaly_enabled()
    watched.pytorch.engage({"no_debug": {}})
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    watched.pytorch.engage({})
    assert torch.is_anomaly_enabled() and not torch.is_anomaly_check_nan_enabled()


def test_the_lever_goes_by_name_only_and_says_what_it_would_take_away():
    from dataclasses import replace

    assert LEVER.only_by_name and LEVER.applies(FACTS, MACHINE) == "no such switch is on"
    on = replace(FACTS, debug_switches=("anomaly detection",))
    assert LEVER.applies(on, MACHINE) is None and LEVER.frees(on, MACHINE) == {"debugging_off": {}}
    assert LEVER.frees(FACTS, MACHINE) == {}
