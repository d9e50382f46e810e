"""What the tests of the PyTorch side share: a framework attached in this process, and small training scripts."""

import gc
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import warm

torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'flatout[pytorch]'")
np = pytest.importorskip("numpy")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def one_thread_and_one_seed():
    """Two cores are shared; every test begins from the same random numbers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    seed(0)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def what_was_there_before_is_left_out():
    """Owners of parameters are looked for among all objects that Python's collector knows, and the process that runs
    the tests holds some hundred thousand of its own: frozen, they are not among them."""
    gc.freeze()
    yield
    gc.collect()  # what the test leaves, cheaply: once it is frozen no collection sees it
    gc.unfreeze()


def seed(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


# -- an attached framework -----------------------------------------------------------------------------------------


class Listener:
    """Keeps what it is told, and runs what a test wants to happen at a step or before an update."""

    def __init__(self):
        self.stamps = []
        self.failures = []
        self.at_step = {}
        self.each_step = None
        self.last = None
        self.waiting = None
        self.num_passes_ended = 0

    @property
    def num_steps(self):
        return len(self.stamps)

    def on_step(self, step):
        self.stamps.append(step.ended_s)
        self.last = step
        if self.each_step is not None:
            self.each_step(self.num_steps)
        for act in self.at_step.pop(self.num_steps, []):
            act()

    def on_pass_end(self):
        self.num_passes_ended += 1

    def on_update(self):
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            waiting()

    def on_failure(self, stage, problem):
        self.failures.append((stage, problem))


class Watched:
    """A framework in this process with its listener."""

    def __init__(self, levers=None, *, trial=True, settings=None):
        from flatout.frameworks.pytorch.adapter import PyTorch

        self.pytorch = PyTorch(settings)
        self.listener = Listener()
        self.pytorch.prepare(levers or {}, trial=trial)
        self.pytorch.attach(self.listener)
        self.answers = []

    def at(self, step, act):
        """Do something when so many steps have ended."""
        self.listener.at_step.setdefault(step, []).append(act)

    def engage(self, step, levers):
        self.at(step, lambda: self.pytorch.engage(levers))

    def compare(self, step, levers, *checks):
        """Order a comparison as the conductor does; the answers come in `answers`."""

        def ask():
            found = self.pytorch.compare(levers, checks or ("gradients",))
            if found is None:  # of a further step
                self.listener.waiting = ask
            else:
                self.answers.append(found)

        def begin():
            self.pytorch.engage({})
            self.pytorch.begin_capture()
            self.listener.waiting = ask

        self.at(step, begin)

    def difference(self, check="gradients"):
        (answer,) = self.answers
        assert not answer.missing, answer.missing
        return next(d for d in answer.differences if d.check == check)


@pytest.fixture
def watch(monkeypatch):
    """Attach a framework; it is detached at the end, and nothing of ours may have failed."""
    opened = []
    # optimizers of other scripts that a test compares with are not to be waited for
    monkeypatch.setattr("flatout.frameworks.pytorch.seams.step_period.PATIENCE", 0)

    def start(levers=None, **options):
        opened.append(Watched(levers, **options))
        return opened[-1]

    start.may_fail = False
    yield start
    for watched in opened:
        watched.pytorch.detach()
        if not start.may_fail:
            for stage, problem in watched.listener.failures:
                raise AssertionError(f"failed in `{stage}`") from problem


@pytest.fixture
def whatever_runs_the_tests_trains(monkeypatch):
    """What runs the tests has the word `backward` in it, and is no script that trains."""
    monkeypatch.setattr("flatout.frameworks.pytorch.inference.trains", lambda main: False)


# -- small training scripts ----------------------------------------------------------------------------------------


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.BatchNorm2d(8), nn.ReLU(),
            nn.Conv2d(8, 8, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Dropout(0.3),
        )  # fmt: skip
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        return self.head(torch.flatten(self.body(x), 1))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 17)

    def forward(self, tokens):
        return self.head(self.encoder(self.embed(tokens)))


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 8)
        self.lstm = nn.LSTM(8, 12, batch_first=True)
        self.head = nn.Linear(12, 17)

    def forward(self, tokens, state=None):
        out, state = self.lstm(self.embed(tokens), state)
        return self.head(out), state


class Workload:
    """A small training script: `train(n)` makes n steps, the batch of a step depends on its number alone."""

    def __init__(self, name, optimizer=None, scheduler=False):
        seed(1)
        self.name = name
        self.done = 0
        build = getattr(self, f"_build_{name}")
        self.models = build()
        make = (
            optimizer
            or {
                "conv": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-4),
                "transformer": lambda p: torch.optim.AdamW(p, lr=1e-3),
                "mlp": lambda p: torch.optim.Adam(p, lr=1e-3),
                "lstm": lambda p: torch.optim.RMSprop(p, lr=1e-3),
                "gan": lambda p: torch.optim.Adam(p, lr=2e-4, betas=(0.5, 0.999)),
            }[name]
        )
        self.optimizers = [make(list(model.parameters())) for model in self.models]
        self.schedulers = [torch.optim.lr_scheduler.StepLR(o, 3, 0.7) for o in self.optimizers] if scheduler else []

    @property
    def model(self):
        return self.models[0]

    @property
    def optimizer(self):
        return self.optimizers[0]

    def train(self, num):
        for _ in range(num):
            generator = torch.Generator().manual_seed(100 + self.done)
            getattr(self, f"_step_{self.name}")(generator)
            for scheduler in self.schedulers:
                scheduler.step()
            self.done += 1
        return self

    def state(self):
        """Every bit that training has changed: parameters, buffers, moments, learning rates, random states."""
        found = {}
        for number, model in enumerate(self.models):
            found |= {f"model{number}.{name}": value.clone() for name, value in model.state_dict().items()}
        for number, optimizer in enumerate(self.optimizers):
            for position, state in optimizer.state_dict()["state"].items():
                found |= {f"state{number}.{position}.{k}": torch.as_tensor(v).clone() for k, v in state.items()}
            lrs = [float(group["lr"]) for group in optimizer.param_groups]
            found[f"lr{number}"] = torch.tensor(lrs, dtype=torch.float64)
        found["torch"] = torch.get_rng_state()
        found["python"] = torch.tensor(hash(random.getstate()))
        found["numpy"] = torch.tensor(np.random.get_state()[1].astype("int64"))
        return found

    # conv

    def _build_conv(self):
        return [ConvNet()]

    def _step_conv(self, generator):
        images = torch.randn(8, 3, 8, 8, generator=generator)
        labels = torch.randint(0, 5, (8,), generator=generator)
        self.optimizer.zero_grad()
        F.cross_entropy(self.model(images), labels).backward()
        self.optimizer.step()

    # transformer

    def _build_transformer(self):
        return [Transformer()]

    def _step_transformer(self, generator):
        tokens = torch.randint(0, 17, (4, 9), generator=generator)
        self.optimizer.zero_grad(set_to_none=False)
        logits = self.model(tokens[:, :-1])
        F.cross_entropy(logits.reshape(-1, 17), tokens[:, 1:].reshape(-1)).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()

    # mlp, with gradients accumulated over two batches

    def _build_mlp(self):
        return [nn.Sequential(nn.Linear(10, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.Linear(32, 3))]

    def _step_mlp(self, generator):
        for _ in range(2):
            rows = torch.randn(16, 10, generator=generator)
            (F.mse_loss(self.model(rows), rows[:, :3]) / 2).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    # lstm

    def _build_lstm(self):
        return [Tagger()]

    def _step_lstm(self, generator):
        tokens = torch.randint(0, 17, (4, 7), generator=generator)
        logits, _ = self.model(tokens)
        loss = F.cross_entropy(logits.transpose(1, 2), tokens)
        self.model.zero_grad()
        loss.backward()
        self.optimizer.step()

    # gan: discriminator first

    def _build_gan(self):
        generator = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
        discriminator = nn.Sequential(nn.Linear(4, 16), nn.LeakyReLU(0.2), nn.Dropout(0.2), nn.Linear(16, 1))
        return [discriminator, generator]

    def _step_gan(self, generator):
        discriminator, maker = self.models
        real = torch.randn(8, 4, generator=generator)
        fake = maker(torch.randn(8, 6, generator=generator))
        self.optimizers[0].zero_grad()
        F.softplus(-discriminator(real)).mean().backward()
        F.softplus(discriminator(fake.detach())).mean().backward()
        self.optimizers[0].step()
        self.optimizers[1].zero_grad()
        F.softplus(-discriminator(fake)).mean().backward()
        self.optimizers[1].step()


WORKLOADS = ("conv", "transformer", "mlp", "lstm", "gan")


@pytest.fixture(scope="session")
def shuffled_epochs():
    """A plain run of the script of this name, which several tests hold a run of theirs beside."""
    script = Path(__file__).resolve().parents[2] / "scripts" / "shuffled_epochs.py"
    return warm.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=True)


@pytest.fixture
def workload():
    return Workload


@pytest.fixture
def different():
    """The names of the entries in which two states differ."""

    def compare(a, b):
        assert a.keys() == b.keys()
        return [k for k in a if a[k].dtype != b[k].dtype or not torch.equal(a[k], b[k])]

    return compare


@pytest.fixture
def layouts():
    """Strides of everything a script trains: parameters, gradients, buffers and moments."""

    def find(script):
        found = {}
        for number, model in enumerate(script.models):
            for name, p in model.named_parameters():
                found[f"{number}.{name}"] = (p.stride(), p.grad.stride() if p.grad is not None else None)
            found |= {f"{number}.{name}": b.stride() for name, b in model.named_buffers()}
        for number, optimizer in enumerate(script.optimizers):
            for position, state in optimizer.state_dict()["state"].items():
                found |= {f"state{number}.{position}.{k}": v.stride() for k, v in state.items() if hasattr(v, "stride")}
        return found

    return find


@pytest.fixture
def settings_of_torch():
    """Process-wide settings that levers may touch."""

    def find():
        import torch._inductor.config as inductor

        return SimpleNamespace(
            threads=torch.get_num_threads(),
            benchmark=torch.backends.cudnn.benchmark,
            matmul_tf32=torch.backends.cuda.matmul.allow_tf32,
            cudnn_tf32=torch.backends.cudnn.allow_tf32,
            precision=torch.get_float32_matmul_precision(),
            matmul=getattr(torch.backends.cuda.matmul, "fp32_precision", None),
            cpu=[
                getattr(getattr(torch.backends.mkldnn, name, None), "fp32_precision", None)
                for name in ("matmul", "conv")
            ],
            fallback_random=inductor.fallback_random,
            autocast=torch.is_autocast_enabled("cpu"),
            cache=os.environ.get("TORCHINDUCTOR_CACHE_DIR"),
        )

    return find
