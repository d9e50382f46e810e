"""A device with a queue, and a script that trains on it, whose clocks are numbers: what takes how long is known.

The host has one clock, `now_s`: it goes on while Python works, while a kernel is launched, and while the host is
blocked. Each stream has its own: a kernel begins when it was launched and all that its stream was told before is done.
Launching blocks while as many kernels wait as the queue holds. An event is done when its stream has come to it. So the
true time of a step is known without a clock of ours: from when all work of the step before is done until all of its own
is, which is what an endless training would see where nobody waits.

`SimulatedDevice.stands_in` puts it in the place of the few calls of `flatout.frameworks.pytorch.observe.devices`. Left
out: what launching costs more on a full queue, the host's part of recording an event, kernels side by side.
"""

from dataclasses import dataclass

import torch
from torch import nn

from flatout.frameworks.pytorch import adapter
from flatout.frameworks.pytorch.observe import devices, observer
from flatout.frameworks.pytorch.observe.profile_recorder import MARK


class Stream:
    """Work in its order; `done_s` is when each kernel is done, or the host was when an event was recorded."""

    def __init__(self):
        self.done_s = []

    @property
    def last_s(self):
        return self.done_s[-1] if self.done_s else 0.0


class SimulatedDevice:
    """One device, and the host that drives it."""

    def __init__(self, depth=1000):
        self.depth = depth
        """Kernels that wait at most."""
        self.now_s = 0.0
        self.streams = {"main": Stream()}
        self.current = "main"
        self.capturing = False
        self.log = []
        """What a profiler sees, as it would say it."""
        self.num_events = self.num_waits = 0

    @property
    def stream(self):
        return self.streams.setdefault(self.current, Stream())

    def work(self, host_s):
        """Python computes."""
        self.now_s += host_s

    def launch(self, host_s, device_s, what="kernel"):
        """One kernel, or a copy."""
        done_s = self.stream.done_s
        if len(done_s) >= self.depth:
            self.now_s = max(self.now_s, done_s[-self.depth])
        asked_s, self.now_s = self.now_s, self.now_s + host_s
        begun_s = max(self.now_s, self.stream.last_s)
        done_s.append(begun_s + device_s)
        link = len(self.log) + 1
        call, name = ("cudaLaunchKernel", "gemm") if what == "kernel" else ("cudaMemcpyAsync", "Memcpy HtoD")
        self.log += [Seen("cuda_runtime", call, asked_s, self.now_s, link), Seen(what, name, begun_s, done_s[-1], link)]

    def synchronize(self):
        """The host waits for all that it has launched."""
        self.now_s = max(self.now_s, *(stream.last_s for stream in self.streams.values()))

    def save(self, host_s):
        """A checkpoint: all is waited for, and then written."""
        self.synchronize()
        self.now_s += host_s

    def read(self, host_s, device_s):
        """A copy that the host waits for: a value that is read, or what lies in memory that is not page-locked."""
        self.launch(host_s, device_s, "gpu_memcpy")
        begun_s, self.now_s = self.now_s, max(self.now_s, self.stream.last_s)
        self.log.append(Seen("cuda_runtime", "cudaStreamSynchronize", begun_s, self.now_s))

    def allocate(self, host_s):
        """Memory is asked for, which waits for nothing here."""
        begun_s, self.now_s = self.now_s, self.now_s + host_s
        self.log.append(Seen("cuda_runtime", "cudaMalloc", begun_s, self.now_s))

    def stands_in(self, monkeypatch):
        """What the seam asks of PyTorch is asked of this one."""
        given = {
            "new_event": lambda device: Event(self), "record": lambda event, stream: event.record(stream),
            "current_stream": lambda device: self.stream,
            "is_capturing": lambda device: self.capturing, "waits": lambda device: [(Synchronizer, "synchronize")],
            "of": lambda parameters: torch.device("cuda", 0), "in_use": lambda: torch.device("cuda", 0),
            "reads": lambda args, kwargs: isinstance(args[0], OnDevice),
            "copies": lambda args, kwargs: isinstance(args[0], OnDevice),
            "to_device": lambda args, kwargs: False, "reset_peak": lambda device: None,
            "peak_bytes": lambda device: 0, "memory_counts": lambda device: {},
        }  # fmt: skip
        for name, function in given.items():
            monkeypatch.setattr(devices, name, function)
        Synchronizer.device = self

    def times(self, pytorch, script, monkeypatch):
        """It stands in, its host's clock is that of what watches a script, and the script's own calls wait for it."""
        self.stands_in(monkeypatch)
        for module in (adapter, observer):
            monkeypatch.setattr(module, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(pytorch.observer.clock, "_now", lambda: self.now_s)
        for name, wait in {"item": script.item, "to": script.to}.items():
            monkeypatch.setattr(torch.Tensor, name, waiting(getattr(torch.Tensor, name), wait))
        monkeypatch.setattr(torch, "save", lambda seconds, _: self.save(seconds))


def waiting(original, wait):
    """A method of tensors that waits for the simulated device where they lie there."""

    def method(tensor, *args, **kwargs):
        if not isinstance(tensor, OnDevice):
            return original(tensor, *args, **kwargs)
        wait()
        return tensor

    return method


@dataclass(frozen=True)
class Seen:
    """What PyTorch's profiler would tell of something, by the names of its methods."""

    what: str
    called: str
    begun_s: float
    ended_s: float
    link: int = 0

    def __getattr__(self, name):
        found = {
            "activity_type": self.what, "name": self.called, "start_ns": round(1e9 * self.begun_s),
            "duration_ns": round(1e9 * self.ended_s) - round(1e9 * self.begun_s), "correlation_id": self.link,
            "linked_correlation_id": 0, "device_resource_id": 7, "start_thread_id": 1,
        }  # fmt: skip
        if name not in found:
            raise AttributeError(name)
        return lambda: found[name]


class Profiler:
    """In the place of PyTorch's."""

    device = None

    def __init__(self, where):
        self.since = None

    def start(self):
        self.since = len(self.device.log)

    def mark(self):
        self.device.log.append(Seen("user_annotation", MARK, self.device.now_s, self.device.now_s))

    def stop(self):
        return self.device.log[self.since :]


class Synchronizer:
    """The module that a script synchronises by."""

    device = None

    def synchronize():
        Synchronizer.device.synchronize()


class Event:
    """A point on a stream of the simulated device."""

    def __init__(self, device):
        self.device = device
        self.at_s = None
        device.num_events += 1

    def record(self, stream):
        assert not self.device.capturing, "what is recorded in a capture cannot be read"
        self.at_s = max(self.device.now_s, stream.last_s)

    def query(self):
        return self.at_s <= self.device.now_s

    def synchronize(self):
        assert not self.device.capturing, "waiting would break the capture"
        self.device.num_waits += 1
        self.device.now_s = max(self.device.now_s, self.at_s)

    def elapsed_time(self, other):
        assert self.query() and other.query(), "not done yet"
        return (other.at_s - self.at_s) * 1e3


# -- a script --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mixture:
    """What a step of a script costs; seconds."""

    host_s: float = 5e-6
    """Of launching a kernel."""
    device_s: float = 100e-6
    """Of a kernel."""
    forward: int = 3
    backward: int = 6
    optimizer: int = 2
    """Kernels."""
    depth: int = 1000
    fetch_s: float = 0.0
    """Of a batch, in the training process."""
    copy_s: float = 0.0
    """Of a blocking copy of it to the device."""
    allocate_s: float = 0.0
    """Of memory that is asked for in each forward."""
    python_s: float = 0.0
    """Of the script's own lines behind the step."""
    reads: tuple = ()
    """Where a value is read: `loss`, in the middle of a step, or `end`, behind it."""

    @property
    def launch_s(self):
        """The least by which two steps may differ."""
        return self.host_s + self.device_s


class OnDevice(torch.Tensor):
    """A tensor that the script thinks lies on the device; its values are somebody's on the CPU."""


class Kernels(torch.autograd.Function):
    """A model's operations: their forward and their backward launch kernels."""

    @staticmethod
    def forward(ctx, weight, script):
        ctx.script = script
        if script.mixture.allocate_s:
            script.device.allocate(script.mixture.allocate_s)
        script.launch(script.mixture.forward)
        return weight * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.script.launch(ctx.script.mixture.backward)
        return gradient * 2, None


class Model(nn.Module):
    def __init__(self, script):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.__dict__["script"] = script

    def forward(self):
        return Kernels.apply(self.weight, self.script)


class Update(torch.optim.Optimizer):
    """An optimizer whose update launches kernels."""

    def __init__(self, script):
        self.script = script
        super().__init__(script.model.parameters(), {})

    def step(self, closure=None):
        script = self.script
        script.launch(script.mixture.optimizer)
        script.ends_s.append(script.device.stream.last_s)


class Script:
    """A training loop; `pytorch` is flatout's side of it, where it is watched, whose seam in loaders is told."""

    def __init__(self, mixture, device=None, pytorch=None):
        self.mixture = mixture
        self.device = device or SimulatedDevice(mixture.depth)
        self.pytorch = pytorch
        self.model = Model(self)
        self.optimizer = Update(self)
        self.value = torch.ones(()).as_subclass(OnDevice)
        self.ends_s = []
        """When all work of each step is done."""
        self.evaluated_s = 0.0

    def launch(self, num):
        for _ in range(num):
            self.device.launch(self.mixture.host_s, self.mixture.device_s)

    def step(self, *, evaluates=0, save_s=0.0):
        """One step, after an evaluation of so many calls that reads one value at its end, and a checkpoint."""
        mixture = self.mixture
        if evaluates:
            with torch.no_grad():
                for _ in range(evaluates):
                    self.model()
            self.evaluated_s = self.device.stream.last_s
            self.value.item()
        if save_s:
            torch.save(save_s, None)
        self.fetch()
        if mixture.copy_s:
            self.value.to("cuda")
        loss = self.model()
        if "loss" in mixture.reads:
            self.value.item()
        loss.backward()
        self.optimizer.step()
        if "end" in mixture.reads:
            self.value.item()
        self.device.work(mixture.python_s)

    def fetch(self):
        observer = self.pytorch.loaders.observer if self.pytorch is not None else None
        if observer is not None:
            observer.before_fetch()
        self.device.work(self.mixture.fetch_s)
        if observer is not None:
            observer.after_fetch()

    def item(self):
        self.device.read(self.mixture.host_s, self.mixture.device_s)

    def to(self):
        self.device.read(self.mixture.host_s, self.mixture.copy_s or 1e-4)

    def true_step_s(self, num=40):
        """Of a step that nobody looks at, once the queue is as full as it gets."""
        alone = Script(self.mixture)
        for _ in range(num):
            alone.plain_step()
        half = num // 2
        return (alone.ends_s[-1] - alone.ends_s[-1 - half]) / half

    def plain_step(self):
        """The same without PyTorch."""
        mixture, device = self.mixture, self.device
        device.work(mixture.fetch_s)
        if mixture.copy_s:
            device.read(mixture.host_s, mixture.copy_s)
        self.launch(mixture.forward)
        if "loss" in mixture.reads:
            self.item()
        self.launch(mixture.backward + mixture.optimizer)
        self.ends_s.append(device.stream.last_s)
        if "end" in mixture.reads:
            self.item()
        device.work(mixture.python_s)
