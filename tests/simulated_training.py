"""A script that trains on the simulated device, under a conductor, whose clocks are all the device's."""

import itertools

import pytest
from hypothesis import strategies as st

from conducting import FakePipe
from flatout.child.orders import Order, SessionSpec
from flatout.child.trial import Trial
from flatout.frameworks.pytorch import adapter
from flatout.records.facts import Facts
from flatout.records.trace import Failure, Window
from simulated_device import Mixture, Script, SimulatedDevice


class Parent(FakePipe):
    """Thinks a while before it orders anything."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def read(self, *, wait):
        self.device.work(0.1 if self.waiting else 0.0)
        return super().read(wait=wait)


class Trained:
    """A simulated script under a conductor of a trial, on the simulated clocks."""

    def __init__(self, monkeypatch, mixture=None, conductor=Trial, **spec):
        self.pytorch = adapter.PyTorch()
        self.device = SimulatedDevice()
        self.written = []
        self.conductor = conductor(
            SessionSpec(**{"mode": "trial", "trace": "trace", "claim": "claim", "per_process": True, **spec}),
            self.pytorch,
        )
        self.conductor._pipe = self.pipe = Parent(self.device)
        self.conductor._write = self.written.append
        monkeypatch.setattr("flatout.machine.foreign_cpu.take", lambda _: None)  # a look at all processes takes a while
        self.script = Script(mixture or Mixture(), self.device, self.pytorch)
        self.device.times(self.pytorch, self.script, monkeypatch)
        self.conductor.framework.prepare({}, trial=True)
        self.conductor.framework.attach(self.conductor)

    def settle(self):
        while not self.of(Facts):
            self.script.step()
        return self

    def take(self, mixture):
        """Go on with other costs."""
        self.script.mixture, self.device.depth = mixture, mixture.depth

    def of(self, kind):
        return [record for record in self.written if isinstance(record, kind)]

    def window(self, *, num_steps=1, skip_steps=1, observe="ends", purpose="trial", at=None, **parts):
        """Measure one, with an evaluation and the like before the step `at` of it; also the true end of each step."""
        self.pipe.waiting.append(
            Order(number=1, kind="window", purpose=purpose, observe=observe, num_steps=num_steps, skip_steps=skip_steps)
        )
        known = len(self.asked())
        for number in itertools.count():
            self.script.step(**(parts if number == at else {}))
            if len(self.asked()) > known or number > 60:
                break
        assert not self.of(Failure), self.of(Failure)
        window = self.asked()[-1]
        return window, self.script.ends_s[-num_steps - 1 :]

    def asked(self):
        return [window for window in self.of(Window) if window.order >= 0]

    def end(self):
        self.pytorch.detach()


@pytest.fixture
def train(monkeypatch):
    """Makes a simulated script that is watched; one at a time."""
    made = []

    def make(*args, **kwargs):
        for former in made[-1:]:
            former.end()
        made.append(Trained(monkeypatch, *args, **kwargs))
        return made[-1]

    yield make
    for one in made[-1:]:
        one.end()


micro = st.floats(1e-6, 400e-6)
mixtures = st.builds(
    Mixture,
    host_s=micro, device_s=micro,
    forward=st.integers(1, 6), backward=st.integers(1, 8), optimizer=st.integers(1, 4),
    depth=st.one_of(st.integers(2, 40), st.just(1000)),
    fetch_s=st.one_of(st.just(0.0), st.floats(1e-5, 5e-3)),
    copy_s=st.one_of(st.just(0.0), st.floats(1e-5, 5e-3)),
    python_s=st.one_of(st.just(0.0), st.floats(1e-5, 2e-3)),
    reads=st.sampled_from([(), (), ("loss",), ("end",), ("loss", "end")]),
)  # fmt: skip
