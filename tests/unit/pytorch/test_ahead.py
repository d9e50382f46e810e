"""Batches made ahead by processes are plain's to the bit, and so is every random number after them; or plain's own."""

import functools
import itertools
import os
import random
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

torch = pytest.importorskip("torch")
import numpy as np  # noqa: E402
from torch.utils.data import (  # noqa: E402
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from flatout.frameworks.pytorch.input.ahead.ahead import refusal  # noqa: E402
from flatout.frameworks.pytorch.input.ahead.generators import Draws, Movements, Place, skip  # noqa: E402
from flatout.frameworks.pytorch.input.loaders import Loaders  # noqa: E402
from flatout.frameworks.pytorch.seams.trees import digest  # noqa: E402
from made_ahead import dropout, more, nothing, reseeds, seen, sometimes, three  # noqa: E402

NUM, BATCH = 96, 8
SETTINGS = {"scale": 1.0}


class Items(Dataset):
    """Items whose code does what `what` says."""

    def __init__(self, what="crop"):
        self.x = torch.arange(NUM * 16, dtype=torch.float32).view(NUM, 4, 4)
        self.what, self.num, self.seen = what, 0, []

    def __len__(self):
        return NUM

    def __getitem__(self, i):
        return getattr(self, self.what)(i), i % 10

    def plain(self, i):
        return self.x[i] * 2

    def crop(self, i):
        flip = random.random() < 0.5
        top = int(torch.randint(0, 3, ()))
        shift = np.random.rand()
        return (self.x[i].flip(0) if flip else self.x[i])[top : top + 2] + shift

    def noise(self, i):
        return self.x[i] + torch.randn(4, 4)

    def odd_noise(self, i):
        return self.x[i] + torch.randn(())

    def rejection(self, i):
        return self.x[i] + float(np.random.randint(0, 9))

    def gauss(self, i):
        return self.x[i] + random.gauss(0, 1) + np.random.randn()

    def only_some(self, i):
        return self.x[i] + (torch.rand(()) if i % 3 else 0)

    def counts(self, i):
        self.num += 1
        return self.x[i] + self.num

    def notes(self, i):
        self.seen.append(i)
        return self.x[i]

    def prints(self, i):
        print(f"item {i}")
        return self.x[i]

    def settings(self, i):
        return self.x[i] * SETTINGS["scale"]

    def worker(self, i):
        return self.x[i] + (torch.utils.data.get_worker_info() is not None)

    def fails(self, i):
        if i == 77:
            raise KeyError("item 77")
        return self.x[i] + torch.rand(())

    def warns(self, i):
        if i == 5:
            warnings.warn("an odd item", stacklevel=1)
        return self.x[i] + torch.rand(())


class AtOnce(Items):
    def __getitems__(self, indices):
        return [(self.x[i] + torch.rand(()), i) for i in indices]


def loader_of(what, **changes):
    return DataLoader(Items(what), **{"batch_size": BATCH, "shuffle": True, **changes})


@pytest.mark.parametrize("num", [1, 2, 3])
@pytest.mark.parametrize("training", [nothing, dropout, three], ids=lambda one: one.__name__)
@pytest.mark.parametrize("what", ["plain", "crop", "noise", "rejection", "gauss", "only_some", "odd_noise"])
def test_batches_and_every_later_random_number_are_plains(what, training, num):
    plain, _, _ = seen(loader_of(what), training)
    ours, num_taken, problems = seen(loader_of(what), training, num=num)
    assert ours == plain and not problems
    if what in ("plain", "crop", "noise"):
        assert num_taken >= 3 * (NUM // BATCH) - 6, "all but the first three, and one a pass"


@pytest.mark.parametrize("training", [sometimes, more, reseeds], ids=lambda one: one.__name__)
def test_a_training_that_draws_otherwise_from_step_to_step_is_plains(training):
    assert seen(loader_of("crop"), training, num=2)[0] == seen(loader_of("crop"), training)[0]


def test_items_that_draw_nothing_do_not_ask_what_the_training_draws():
    ours, num_taken, problems = seen(loader_of("plain"), more, num=2)
    assert ours == seen(loader_of("plain"), more)[0] and num_taken > 24 and not problems


@pytest.mark.parametrize(
    "changes",
    [
        {"shuffle": False},
        {"drop_last": True, "batch_size": 7},
        {"batch_size": 5},
        {"batch_size": None, "shuffle": False},
        {"shuffle": False, "sampler": RandomSampler(range(NUM), replacement=True, num_samples=60)},
        {"collate_fn": lambda items: {"x": [x for x, _ in items], "label": torch.rand(2)}},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_orders_and_collations_are_plains(changes):
    loader = loader_of("crop", **changes)
    assert seen(loader, dropout, num=2)[0] == seen(loader, dropout)[0]


class DrawingAsItGoes(Sampler):
    """Draws each number when it is asked, between what the training draws."""

    def __len__(self):
        return NUM

    def __iter__(self):
        return (int(torch.randint(NUM, ())) for _ in range(NUM))


class Endless(IterableDataset):
    def __iter__(self):
        return itertools.repeat(1.0)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"sampler": DrawingAsItGoes()}, "a sampler of the script's"),
        ({"batch_size": 1, "batch_sampler": [[1, 2], [3]]}, "a sampler of the script's"),
        ({"batch_size": 1, "batch_sampler": BatchSampler(DrawingAsItGoes(), 4, False)}, "a sampler of the script's"),
        ({"sampler": list(range(NUM))}, "a sampler of the script's"),
        ({"generator": torch.Generator()}, "a generator of the script's"),
        ({"sampler": RandomSampler(range(NUM), generator=torch.Generator())}, "a generator of the script's"),
        ({"num_workers": 1}, "has workers"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else value,
)
def test_an_order_that_would_be_asked_or_moved_early_is_refused_by_name(changes, why):
    loader = loader_of("crop", **{"shuffle": False, **changes})
    assert why in refusal(loader)
    changes = {name: value for name, value in changes.items() if name == "sampler"}
    if changes:
        assert seen(loader, dropout, num=2)[1] == 0


def test_an_iterable_dataset_is_refused_by_name():
    assert "iterable" in refusal(DataLoader(Endless(), batch_size=4))


@pytest.mark.parametrize("dataset", [AtOnce(), Subset(Items(), range(10, 90)), TensorDataset(torch.arange(64.0))])
def test_datasets_of_other_kinds(dataset):
    def made():
        return DataLoader(dataset, batch_size=BATCH, shuffle=True)

    assert seen(made(), dropout, num=2)[0] == seen(made(), dropout)[0]


@pytest.mark.parametrize("stop", [0, 2, 5])
def test_a_loop_that_is_left_early_leaves_the_generators_as_plain_does(stop):
    assert seen(loader_of("crop"), dropout, num=2, stop=stop)[0] == seen(loader_of("crop"), dropout, stop=stop)[0]


def test_an_item_that_raises_does_so_where_it_does_in_plain():
    ours, _, _ = seen(loader_of("fails"), dropout, num=2)
    plain, _, _ = seen(loader_of("fails"), dropout)
    assert ours == plain and any("item 77" in str(one) for one in ours)


@pytest.mark.parametrize("what", ["counts", "notes"])
def test_items_that_change_their_dataset_are_plains_and_it_is_said(what):
    ours, _, problems = seen(loader_of(what), num=2)
    assert ours == seen(loader_of(what))[0]
    assert len(problems) == 1 and "changes `Items." in problems[0]


def test_what_items_print_is_printed_once_each(capsys):
    seen(loader_of("prints", shuffle=True), epochs=1)
    plain = capsys.readouterr().out
    _, _, problems = seen(loader_of("prints", shuffle=True), epochs=1, num=2)
    assert capsys.readouterr().out == plain and "prints" in problems[0]


def test_items_that_write_are_left_to_plain(tmp_path, monkeypatch):
    def writes(self, i):
        with open(tmp_path / "log", "a") as file:
            file.write(f"{i}\n")
        return self.x[i]

    monkeypatch.setattr(Items, "plain", writes)
    _, _, problems = seen(loader_of("plain"), epochs=1, num=2)
    assert "writes to a file" in problems[0]


def test_items_see_no_worker():
    assert seen(loader_of("worker"), num=2)[0] == seen(loader_of("worker"))[0]


def test_settings_that_the_loop_changes_are_followed():
    def training(step):
        SETTINGS["scale"] = 1.0 + step // 12

    plain = seen(loader_of("settings"), training)[0]
    SETTINGS["scale"] = 1.0
    assert seen(loader_of("settings"), training, num=2)[0] == plain
    SETTINGS["scale"] = 1.0


def test_two_loops_at_once_are_plains():
    def zipped(num):
        owner = Loaders()
        owner.install()
        if num:
            owner.change({"ahead": num})
        torch.manual_seed(1), np.random.seed(2), random.seed(3)
        try:
            found = []
            for _ in range(2):
                for one, other in zip(loader_of("crop"), loader_of("noise"), strict=True):
                    found += [digest(one), digest(other)]
                    owner.num_steps += 1
            return [*found, torch.rand(1).item(), random.random()]
        finally:
            owner.remove()

    assert zipped(2) == zipped(0)


def test_no_process_and_no_thread_is_left_behind():
    import multiprocessing

    before = threading.active_count()
    seen(loader_of("crop"), dropout, num=2)
    seen(loader_of("crop"), dropout, num=2, stop=4)
    until_s = time.monotonic() + 10  # a queue's thread ends a little later
    while time.monotonic() < until_s and threading.active_count() > before:
        time.sleep(0.05)
    assert not multiprocessing.active_children() and threading.active_count() == before


# -- the generators ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1, 623, 624, 625, 2000])
@pytest.mark.parametrize("draws", [Draws(), Draws(1), Draws(623, 1, 624), Draws(624, 625, 5), Draws(70_000, 3, 3000)])
def test_what_was_drawn_is_counted_and_drawn_again(first, draws):
    torch.manual_seed(first), np.random.seed(first), random.seed(first)
    skip(Draws(first, first, first))
    here = Place.now()
    skip(draws)
    there = Place.now()
    assert here.draws_to(there) == draws
    here.put()
    assert Place.now() == here
    skip(draws)
    assert Place.now() == there


def test_a_place_that_drawing_does_not_reach_has_no_number():
    here = Place.now()
    skip(Draws(5))
    later = Place.now()
    torch.manual_seed(99)
    assert here.draws_to(Place.now()) is None and later.draws_to(here) is None


def test_movements_are_known_at_once_and_after_a_miss_when_two_in_a_row_are_alike():
    known = Movements()

    def saw(num):
        skip(Draws(torch=7))
        before = Place.now()
        skip(Draws(python=num))
        known.saw(before, Place.now())

    known.saw(None, Place.now())
    assert known.batch is None and known.gap is None
    saw(3)
    assert (known.batch, known.gap) == (Draws(python=3), Draws(torch=7))
    known.forget()
    saw(3)
    assert known.batch is None and known.gap is None
    saw(3)
    assert known.batch == Draws(python=3) and known.gap is None, "whose first was not seen"
    saw(4)
    assert known.batch is None and known.gap == Draws(torch=7) and not known.draws_nothing


# -- datasets, samplers and loops that nobody would write for a test

COUNTER = [0]


@functools.lru_cache(maxsize=16)
def looked_up(i):
    return torch.rand(())


class Point:
    def __init__(self, x):
        self.x = x

    def __eq__(self, other):
        return isinstance(other, Point) and bool((self.x == other.x).all())

    __hash__ = None


class Awkward(Items):
    taken = 0

    def __init__(self, what):
        super().__init__(what)
        self.own = np.random.default_rng(4)
        self.generator = torch.Generator().manual_seed(5)
        self.random = random.Random(6)
        self.cache = {}
        self.local = threading.local()
        self.last = None

    def own_generator(self, i):
        return self.x[i] + self.own.random()

    def torch_generator(self, i):
        return self.x[i] + torch.rand((), generator=self.generator)

    def own_python(self, i):
        return self.x[i] + self.random.random()

    def reseeds(self, i):
        torch.manual_seed(i)
        return self.x[i] + torch.rand(())

    def restores(self, i):
        state = torch.get_rng_state()
        torch.manual_seed(i)
        found = self.x[i] + torch.rand(())
        torch.set_rng_state(state)
        return found

    def caches(self, i):
        if i not in self.cache:
            self.cache[i] = torch.rand(())
        return self.x[i] + self.cache[i]

    def remembers(self, i):
        return self.x[i] + looked_up(i)

    def of_the_class(self, i):
        type(self).taken += 1
        return self.x[i] + type(self).taken

    def of_the_module(self, i):
        COUNTER[0] += 1
        return self.x[i] + COUNTER[0]

    def of_the_thread(self, i):
        self.local.num = getattr(self.local, "num", 0) + 1
        return self.x[i] + self.local.num

    def of_the_environment(self, i):
        os.environ["AWKWARD"] = str(int(os.environ.get("AWKWARD", "0")) + 1)
        return self.x[i] + int(os.environ["AWKWARD"])

    def of_the_former(self, i):
        before, self.last = self.last, i
        return self.x[i] + (before or 0)

    def of_the_process(self, i):
        return self.x[i] + (os.getpid() == PID)

    def in_threads(self, i):
        with ThreadPoolExecutor(2) as pool:
            return self.x[i] + sum(pool.map(float, range(4)))

    def in_a_program(self, i):
        if i % 40:
            return self.x[i]
        return self.x[i] + int(subprocess.run([sys.executable, "-S", "-c", "print(7)"], capture_output=True).stdout)

    def writes_to_the_dataset(self, i):
        self.x[i] += 1
        return self.x[i].clone()

    def views(self, i):
        return self.x[i]

    def many(self, i):
        return {"a": [self.x[i], (i, str(i))], "b": np.float32(i), "c": torch.tensor(1j * i), "d": np.arange(3) + i}

    def empty(self, i):
        return torch.zeros(0, 4) + torch.rand(())

    def of_half(self, i):
        return self.x[i].half() + torch.rand(()).half()

    def as_wide_as_it_likes(self, i):
        return torch.rand(1 + i % 3).sum()

    def stops(self, i):
        if i == 31:
            raise StopIteration
        return self.x[i] + torch.rand(())

    def leaves(self, i):
        if i == 31:
            raise KeyError("gone")
        return self.x[i] + torch.rand(())

    def sets_threads(self, i):
        torch.set_num_threads(torch.get_num_threads())
        return self.x[i] + torch.rand(())

    def normal_pairs(self, i):
        return self.x[i] + sum(random.gauss(0, 1) for _ in range(1 + i % 2))

    def shuffles(self, i):
        order = list(range(4))
        random.shuffle(order)
        return self.x[i][order] + float(np.random.permutation(4)[0])


PID = os.getpid()
KINDS = [name for name in vars(Awkward) if not name.startswith("_") and name != "taken"]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    def begin():
        monkeypatch.setenv("AWKWARD", "0")
        Awkward.taken, COUNTER[0] = 0, 0
        looked_up.cache_clear()

    yield begin


@pytest.mark.parametrize("training", [nothing, dropout], ids=lambda one: one.__name__)
@pytest.mark.parametrize("what", KINDS)
def test_awkward_items_are_plains(what, training, _fresh):
    def again(num):
        _fresh()
        try:
            return seen(DataLoader(Awkward(what), batch_size=BATCH, shuffle=True), training, num=num)
        except RuntimeError as problem:  # what `StopIteration` in an item comes to
            return [type(problem).__name__], 0, []

    ours, plain = again(2), again(0)
    assert ours[0] == plain[0]


def test_there_are_at_least_two_dozen_awkward_kinds():
    assert len(KINDS) >= 24


class Listens:
    """A sampler that draws what the training has marked as hard."""

    def __init__(self):
        self.hard = []

    def __len__(self):
        return NUM

    def __iter__(self):
        for i in range(NUM):
            yield self.hard.pop() if self.hard and i % 3 == 2 else i


class Grows(Dataset):
    def __init__(self):
        self.num = 40

    def __len__(self):
        return self.num

    def __getitem__(self, i):
        return torch.rand(()) + i


def test_a_sampler_that_listens_to_the_training_is_plains():
    def again(num):
        sampler = Listens()
        loader = DataLoader(Items("crop"), batch_size=BATCH, sampler=sampler)
        return seen(loader, lambda step: sampler.hard.append(step % NUM), num=num)[0]

    assert again(2) == again(0)


def test_a_dataset_that_grows_between_passes_is_plains():
    def again(num):
        data = Grows()

        def training(step):
            data.num = 40 + 8 * (step // 10)

        return seen(DataLoader(data, batch_size=8, shuffle=True), training, num=num)[0]

    assert again(2) == again(0)


@pytest.mark.parametrize(
    "changes",
    [
        {"shuffle": False, "sampler": WeightedRandomSampler([1.0] * NUM, 64)},
        {"shuffle": False, "batch_size": 1, "batch_sampler": BatchSampler(range(NUM), 7, drop_last=True)},
        {"pin_memory": False, "persistent_workers": False, "timeout": 0},
        {"collate_fn": list},
        {"collate_fn": lambda items: (len(items), np.stack([x.numpy() for x, _ in items]), torch.rand(2))},
    ],
    ids=["weighted", "batch sampler", "written out", "a list", "numpy"],
)
def test_awkward_loaders_are_plains(changes):
    assert seen(loader_of("crop", **changes), dropout, num=2)[0] == seen(loader_of("crop", **changes), dropout)[0]


def test_datasets_one_behind_the_other_are_plains():
    def again(num):
        data = ConcatDataset([Items("noise"), Items("odd_noise"), Items("plain")])
        return seen(DataLoader(data, batch_size=BATCH, shuffle=True), dropout, num=num)[0]

    assert again(2) == again(0)


def test_a_batch_that_the_training_writes_into_changes_no_later_one():
    def again(num):
        data = Awkward("views")
        loader = DataLoader(data, batch_size=None, shuffle=True)
        return seen(loader, lambda step: data.x.mul_(1.01), num=num)[0]

    assert again(2) == again(0)
