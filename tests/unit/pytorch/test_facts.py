"""Do the facts say what the script turned out to do, and is nothing fixed by asking?"""

import sys

import pytest

import warm

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset, IterableDataset  # noqa: E402

from flatout.records import trace_file  # noqa: E402


class Rows(Dataset):
    def __init__(self, change=None):
        self.change = change

    def __len__(self):
        return 40

    def __getitem__(self, k):
        return torch.full((3, 8, 8), float(k))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.randn(40, 3, 8, 8))


def train(watch, model, loader, optimizer=None, num=12):
    watched = watch()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(num):
        for x in loader:
            optimizer.zero_grad()
            out = model(x)
            (out[0] if isinstance(out, tuple) else out).pow(2).mean().backward()
            optimizer.step()
    return watched.pytorch.facts()


def images():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 2))


def test_models_are_described_by_what_they_are_made_of(watch):
    facts = train(watch, images(), DataLoader(Rows(), batch_size=20))
    (model,) = facts.models
    assert model.num_parameters == 3 * 4 * 9 + 4 + 144 * 2 + 2
    assert (
        model.convolution_dims == (2,) and model.dtypes == ("float32",) and not model.recurrent and not model.compiled
    )
    assert model.num_modules == 4 and model.calls_per_step == 1
    assert facts.device == "cpu" and facts.num_threads == 1 and not facts.autocast and not facts.distributed


def test_recurrent_layers_mixed_types_and_other_dimensions_are_seen(watch):
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv3d(1, 2, 3)
            self.cell = nn.GRUCell(4, 4)
            self.last = nn.Linear(4, 1).to(torch.bfloat16)

        def forward(self, x):
            x = self.cell(self.first(x[:, None]).mean((1, 3))[:, :, :4].mean(1))
            return self.last(x.to(torch.bfloat16))

    (model,) = train(watch, Mixed(), DataLoader(Rows(), batch_size=20)).models
    assert model.recurrent and model.convolution_dims == (3,) and model.dtypes == ("bfloat16", "float32")


def test_blocks_that_repeat_parts_that_are_compiled_and_shapes_that_differ_are_seen(watch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(5))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    watched, model = watch(), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for num_rows in (1, 2, 3, 4, 4, 4, 4, 4):
        model(torch.randn(num_rows, 4)).sum().backward()
        optimizer.step()
    (found,) = watched.pytorch.facts().models
    assert (found.num_repeated_blocks, found.num_input_shapes, found.compiled) == (5, 3, False)
    model.blocks[2].compile(backend="eager")
    (found,) = watched.pytorch.facts().models
    assert found.compiled, "a part is enough: the lever would compile it once more"


def test_an_autocast_of_the_scripts_own_is_seen(watch):
    watched, model = watch(), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(8):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(torch.randn(3, 4))
        out.float().sum().backward()
        optimizer.step()
    assert watched.pytorch.facts().autocast


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda p: torch.optim.SGD(p, lr=1e-4), {"fused": False, "can_fuse": True}),
        (lambda p: torch.optim.Adam(p, fused=True), {"fused": True, "can_fuse": False, "foreach": False}),
        (lambda p: torch.optim.AdamW(p, foreach=True), {"foreach": True, "can_fuse": False}),
        (lambda p: torch.optim.RMSprop(p, lr=1e-4), {"can_fuse": False, "foreach": False}),
    ],
    ids=["sgd", "fused", "foreach", "rmsprop"],
)
def test_optimizers_are_described_by_what_they_do_and_could_do(watch, make, wanted):
    model = images()
    (optimizer,) = train(watch, model, DataLoader(Rows(), batch_size=20), make(model.parameters())).optimizers
    assert {name: getattr(optimizer, name) for name in wanted} == wanted


def test_loaders_are_described_as_the_script_made_them(watch):
    facts = train(
        watch, images(), DataLoader(Rows(), batch_size=8, shuffle=True, num_workers=1, prefetch_factor=3), num=3
    )
    (loader,) = facts.loaders
    assert (loader.dataset, loader.batch_size, loader.num_batches) == ("Rows", 8, 5)
    assert (loader.num_workers, loader.prefetch_factor, loader.pinned) == (1, 3, False)
    assert loader.changeable and not loader.iterable
    assert loader.batch_bytes == 8 * 3 * 8 * 8 * 4


def test_sizes_and_switches_of_other_kinds_become_plain_in_the_record_of_the_facts(watch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(np.int64(192), np.array((4, 4)).prod()), nn.Linear(np.int64(16), 2))
    loader = DataLoader(Rows(), batch_size=8, num_workers=np.int64(0), pin_memory=np.bool_(False), persistent_workers=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=np.float64(1e-4), momentum=np.float32(0.9))
    facts = train(watch, model, loader, optimizer, num=3)
    read = trace_file.decode(trace_file.encode(facts))
    assert read == facts
    assert (read.loaders[0].num_workers, read.loaders[0].pinned) == (0, False)


@pytest.mark.parametrize("number", [1, np.bool_(True)])
def test_a_switch_that_is_a_number_is_a_switch_in_the_facts(watch, number):
    loader = DataLoader(Rows(), batch_size=8, num_workers=True, persistent_workers=number, pin_memory=number)
    facts = train(watch, images(), loader, num=1)
    (found,) = trace_file.decode(trace_file.encode(facts)).loaders
    assert (found.num_workers, found.pinned) == (1, True)


def test_a_loader_whose_length_raises_has_none_in_the_facts(watch):
    class Endless(torch.utils.data.RandomSampler):
        def __len__(self):
            raise NotImplementedError

    facts = train(watch, images(), DataLoader(Rows(), batch_size=8, sampler=Endless(Rows(), num_samples=40)), num=3)
    assert facts.loaders[0].num_batches is None


def test_a_batch_that_cannot_be_looked_into_has_no_size(watch):
    class Closed:
        def __getattribute__(self, name):
            raise RuntimeError("closed")

    loaders = watch().pytorch.loaders
    loader = DataLoader(Rows(), batch_size=8, collate_fn=lambda rows: Closed())
    next(iter(loader))
    assert loaders.batch_bytes(loader) is None


def test_a_loader_that_only_evaluates_is_not_among_them(watch):
    training, evaluation = (DataLoader(Rows(), batch_size=8) for _ in range(2))
    watched, model = watch(), images()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(3):
        for x in training:
            model(x).sum().backward()
            optimizer.step()
        with torch.no_grad():
            for x in evaluation:
                model(x)
    assert len(watched.pytorch.facts().loaders) == 1
    assert watched.pytorch.loaders.training == [training]


def test_an_iterable_dataset_is_said_and_cannot_be_given_workers(watch):
    (loader,) = train(watch, images(), DataLoader(Stream(), batch_size=8), num=3).loaders
    assert loader.iterable and not loader.changeable and loader.num_batches is None


def test_asking_fixes_no_start_method():
    program = (
        "import multiprocessing, torch\n"
        "from flatout.frameworks.pytorch.adapter import PyTorch\n"
        "from torch.utils.data import DataLoader, TensorDataset\n"
        "framework = PyTorch()\n"
        "loader = DataLoader(TensorDataset(torch.ones(4)), batch_size=2)\n"
        "framework.loaders.note(loader, 1)\n"
        "assert framework.facts().loaders[0].num_batches == 2\n"
        "assert multiprocessing.get_start_method(allow_none=True) is None\n"
        "multiprocessing.set_start_method('spawn')\n"
        "print(framework.facts().loaders[0].refusal('ahead'))\n"
    )
    done = warm.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert "`spawn`" in done.stdout, done.stderr
