"""What items change, or do besides, is seen before a batch that was made ahead is taken; or nothing is made ahead."""

import collections
import enum
import functools
import io
import itertools
import logging
import logging.handlers
import multiprocessing
import os
import random
import sqlite3
import sys
import threading
import types
import weakref
import zipfile
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")
import numpy as np  # noqa: E402
from torch.utils.data import DataLoader, Dataset, default_collate  # noqa: E402

from flatout.frameworks.pytorch.input.loaders import Loaders  # noqa: E402
from flatout.frameworks.pytorch.input.reach import UnknownError, held_apart, read_outside  # noqa: E402
from flatout.frameworks.pytorch.input.watch import Watch  # noqa: E402
from made_ahead import dropout, nothing, seen  # noqa: E402

NUM, BATCH = 96, 8
LOG = logging.getLogger("items")
LOCKED = threading.Lock()


class Thing(types.SimpleNamespace):
    pass


class Slotted:
    __slots__ = ("num",)
    taken = 0

    def __init__(self):
        self.num = 0


def counting(i, cache={}):  # noqa: B006
    return cache.setdefault("n", 0) + i


@functools.lru_cache
def looked_up(i):
    return random.random()


def holder():
    num = 0

    def count(i):
        nonlocal num
        num += 1
        return num

    return count


class Pair:
    def __init__(self):
        self.first = []


PAIR = Pair()


class Private:
    __slots__ = ("__num",)
    __state__: ClassVar = {"n": 0}

    def __init__(self):
        self.__num = 0

    def count(self):
        self.__num += 1


class Level(enum.Enum):
    LOW = 1


@functools.lru_cache
def kept_in_a_cache():
    return []


kept_in_a_cache()


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    monkeypatch.setenv("OF_ITEMS", "")


@pytest.mark.parametrize(
    ("thing", "change"),
    [
        (Thing(a=1), lambda t: setattr(t, "a", 2)),
        (Thing(a=1), lambda t: setattr(t, "b", 2)),
        (Thing(a=1), lambda t: delattr(t, "a")),
        ([1, 2, 3], lambda t: t.append(4)),
        (list(range(10**6)), lambda t: t.__setitem__(765_432, 1)),
        ([(str(k), k) for k in range(10**5)], lambda t: t.__setitem__(54_321, ("x", 2))),
        ([None] * 1000, lambda t: t.__setitem__(543, np.ones(3))),
        ([[k] for k in range(1000)], lambda t: t[765].append(1)),
        ({"a": [{"b": 1}]}, lambda t: t["a"][0].update(b=2)),
        ({k: k for k in range(1000)}, lambda t: t.update({765: 1})),
        ({k: k for k in range(1000)}, lambda t: t.update({0: t.pop(0)})),
        ({1, 2}, lambda t: t.add(3)),
        (collections.deque([1]), lambda t: t.append(2)),
        (collections.Counter(), lambda t: t.update("a")),
        (np.zeros(3), lambda t: t.fill(1)),
        (np.zeros(10**5), lambda t: t.__setitem__(54_321, 1)),
        (np.zeros((300, 300)).T[::2], lambda t: t.__setitem__((7, 7), 1)),
        (np.array([{}, None]), lambda t: t[0].update(a=1)),
        (torch.zeros(10**7), lambda t: t[5].add_(1)),
        (torch.zeros(3), lambda t: t.numpy().fill(1)),
        (torch.zeros(3), lambda t: setattr(t, "data", torch.zeros(3))),
        (Slotted(), lambda t: setattr(t, "num", 1)),
        (Slotted(), lambda t: setattr(Slotted, "taken", 1)),
        (counting, lambda t: t(1)),
        (looked_up, lambda t: t(1)),
        (holder(), lambda t: t(1)),
        (functools.partial(max, [1]), lambda t: t.args[0].append(1)),
        (functools.partial(holder()), lambda t: t(1)),
        (Thing(call=Thing(a=[]).a.append), lambda t: t.call(1)),
        (types.MappingProxyType({"a": []}), lambda t: t["a"].append(1)),
        (kept_in_a_cache, lambda t: t().append(1)),
        (weakref.ref(PAIR), lambda t: t().first.append(1)),
        (Private(), lambda t: t.count()),
        (Level.LOW, lambda t: setattr(t, "count", 1)),
        (Private, lambda t: t.__state__.update(n=1)),
        (bytearray(b"ab"), lambda t: t.append(1)),
        (collections.namedtuple("Row", "a")([]), lambda t: t.a.append(1)),
        ([{"id": k, "boxes": [[k, k]]} for k in range(50_000)], lambda t: t[43_210]["boxes"][0].append(1)),
        (np.random.default_rng(1), lambda t: t.spawn(1)),
        (None, lambda t: os.environ.update(OF_ITEMS="1")),
    ],
)
def test_whatever_changes_is_seen(thing, change):
    watch = Watch(Thing(thing=thing), default_collate)
    assert watch.changed() is None
    change(thing)
    assert watch.changed()


@pytest.mark.parametrize(
    "make",
    [
        threading.Lock, threading.local, itertools.count, lambda: iter([1]), lambda: (k for k in [1]),
        lambda: ThreadPoolExecutor(1), lambda: multiprocessing.Value("i", 0), lambda: sqlite3.connect(":memory:"),
        lambda: sys.stderr.buffer, lambda: random.SystemRandom(), lambda: torch.zeros(2, device="meta"),
        lambda: torch.zeros(2).share_memory_(), lambda: np.zeros(1, "i4,f4")[0], lambda: lambda i: eval("i"),
        lambda: [threading.RLock()], lambda: {"a": (1, itertools.cycle([2]))}, lambda: memoryview(b"x"),
    ],
)  # fmt: skip
def test_what_nobody_can_say_of_is_refused(make):
    with pytest.raises(UnknownError):
        Watch(Thing(thing=make()), default_collate)


SETTINGS = {"size": 8}
LEVEL = 1


class Config:
    level = 1


def helper():
    return SETTINGS["size"]


class Reads:
    def __getitem__(self, k):
        return k * helper() * LEVEL * Config.level + kinds.LEVEL


kinds = types.ModuleType(__name__)
kinds.LEVEL = 1


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setitem(SETTINGS, "size", 9),
        lambda patch: patch.setitem(globals(), "LEVEL", 2),
        lambda patch: patch.setattr(Config, "level", 2),
        lambda patch: patch.setattr(kinds, "LEVEL", 2),
        lambda patch: patch.setattr(Reads, "__getitem__", lambda self, k: 7),
    ],
    ids=["a dictionary", "a name", "a class", "a module", "a method"],
)
def test_a_change_of_what_a_datasets_code_reads_is_seen(change, monkeypatch):
    dataset = Reads()
    watch = Watch(dataset)
    assert watch.changed() is None
    change(monkeypatch)
    assert watch.changed()


def test_functions_of_installed_libraries_are_taken_at_their_word():
    Watch(Thing(draws=[np.random.rand, torch.rand, random.random, np.fft.rfft, torch.nn.functional.relu, np.add]))


def test_names_of_attributes_are_not_taken_for_those_of_the_module():
    def reads(i):
        return i.LOCKED

    assert "LOCKED" not in read_outside(reads)
    Watch(Thing(reads=reads))


def test_what_workers_would_not_have_as_it_is_is_noticed_wherever_it_lies(tmp_path):
    path = tmp_path / "items.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", "b")
    assert held_apart(Thing(path=path, many=[Thing(id=k) for k in range(6_000)])) is None
    with path.open("rb") as file:
        assert "_io.BufferedReader" in held_apart(Thing(parts=[{"file": file}]))
    with zipfile.ZipFile(path) as archive:
        assert held_apart(Thing(inner=Thing(archive=archive)))
    connection = sqlite3.connect(":memory:")
    assert "sqlite3.Connection" in held_apart(Thing(database=connection))
    connection.close()


def test_more_than_can_be_watched_is_refused():
    with pytest.raises(UnknownError, match="more than 5,000"):
        Watch([Thing(id=k) for k in range(6_000)])


def test_what_changed_has_its_name():
    thing = Thing(inner=Thing(num=1))
    watch = Watch(thing)
    thing.inner.num = 2
    assert watch.changed() == "Thing.num"


class Of(Dataset):
    """A dataset that may hold `held`; items by the function `what`."""

    def __init__(self, what, held=None):
        self.x, self.what, self.held = torch.arange(NUM * 16, dtype=torch.float32).view(NUM, 4, 4), what, held

    def __len__(self):
        return NUM

    def __getitem__(self, i):
        return self.x[i] + self.what(self, i)


def own_numpy(self, i):
    return self.held.random()


def own_python(self, i):
    return self.held.random()


def own_torch(self, i):
    return torch.randn((), generator=self.held)


@pytest.mark.parametrize("training", [nothing, dropout], ids=lambda one: one.__name__)
@pytest.mark.parametrize(
    ("what", "held"),
    [
        (own_numpy, lambda: np.random.default_rng(5)),
        (own_numpy, lambda: np.random.RandomState(5)),
        (own_numpy, lambda: np.random.Generator(np.random.MT19937(5))),
        (own_python, lambda: random.Random(5)),
        (own_torch, lambda: torch.Generator().manual_seed(5)),
    ],
)
def test_generators_that_a_dataset_holds_go_on_as_plains(what, held, training):
    ends = []

    def again(num):
        data = Of(what, held())
        found = seen(DataLoader(data, batch_size=BATCH, shuffle=True), training, num=num)
        ends.append(what(data, 0))
        return found

    (ours, num_taken, problems), plain = again(2), again(0)
    assert ours == plain[0] and ends[0] == ends[1] and not problems
    assert num_taken >= 3 * (NUM // BATCH) - 6


def skips_and_counts(self, i):
    if i == 77:
        self.held["skipped"] += 1
    return self.held["skipped"]


def counts_in_an_array(self, i):
    self.held[i] += 1
    return float(self.held[i])


def counts_in_a_large_array(self, i):
    self.held.reshape(-1)[1000 * i] += 1
    return float(self.held.reshape(-1)[1000 * i])


def counts_in_a_tensors_memory(self, i):
    self.x.numpy()[i] += 1
    return 0.0


def remembers(self, i):
    if self.held[i] is None:
        self.held[i] = random.random()
    return self.held[i]


def turns(self, i):
    self.held.rotate(1)
    return float(self.held[0])


def seldom(self, i):
    if i == 95:
        self.x[0] += 1
    return 0.0


@pytest.mark.parametrize(
    ("what", "held"),
    [
        (skips_and_counts, lambda: collections.Counter()),
        (counts_in_an_array, lambda: np.zeros(NUM)),
        (counts_in_a_large_array, lambda: np.zeros((NUM, 1000))),
        (counts_in_a_large_array, lambda: np.zeros((NUM, 10_000))),
        (counts_in_a_large_array, lambda: torch.zeros(NUM, 10_000).numpy()),
        (counts_in_a_tensors_memory, lambda: None),
        (remembers, lambda: [None] * NUM),
        (turns, lambda: collections.deque(range(NUM))),
        (seldom, lambda: None),
    ],
)
def test_items_that_keep_something_are_plains(what, held):
    def again(num):
        random.seed(3)
        data = Of(what, held())
        return seen(DataLoader(data, batch_size=BATCH, shuffle=True), num=num), data

    ((ours, _, problems), data), ((plain, _, _), same) = again(2), again(0)
    assert ours == plain and problems
    assert str(data.held) == str(same.held) and torch.equal(data.x, same.x)


def test_what_the_training_writes_into_the_dataset_is_in_the_next_batch():
    def again(num):
        data = Of(lambda self, i: float(self.held[i]), np.zeros(NUM))

        def training(step):
            data.held[step % NUM] += 1

        return seen(DataLoader(data, batch_size=BATCH, shuffle=True), training, num=num)[0]

    assert again(2) == again(0)


# -- what code does besides


def appends(self, i):
    with open(self.held / "log", "a") as file:
        file.write(f"{i}\n")
    return 0.0


def appends_and_does_not_care(self, i):
    try:
        appends(self, i)
    except Exception:
        return 1.0
    return 0.0


def removes(self, i):
    (self.held / str(i)).unlink(missing_ok=True)
    return 0.0


def logs(self, i):
    LOG.warning("item %d", i)
    return 0.0


def writes_by_number(self, i):
    os.write(int((self.held / "fd").read_text()), b"x")
    return 0.0


def reads_by_number(self, i):
    return float(os.read(int((self.held / "fd").read_text()), 1)[0])


def saves(self, i):
    torch.save(i, self.held / f"saved {i}")
    return 0.0


def remembers_on_the_disk(self, i):
    path = self.held / f"kept {i}"
    if not path.exists():
        torch.save(torch.rand(()), path)
    return torch.load(path)


def sets_the_environment(self, i):
    os.environ["OF_ITEMS"] = str(i)
    return 0.0


@pytest.mark.parametrize(
    "what",
    [
        appends,
        appends_and_does_not_care,
        removes,
        logs,
        writes_by_number,
        reads_by_number,
        sets_the_environment,
        saves,
        remembers_on_the_disk,
    ],
)
def test_what_items_do_is_done_once(what, tmp_path, monkeypatch):
    monkeypatch.setenv("OF_ITEMS", "")

    def again(num):
        folder = tmp_path / str(num)
        folder.mkdir()
        for k in range(NUM):
            (folder / str(k)).write_text(str(k))
        (folder / "bytes").write_bytes(bytes(range(256)) * 8)
        handler = logging.FileHandler(folder / "logged")
        LOG.addHandler(handler)
        fd = os.open(folder / "bytes", os.O_RDWR | os.O_APPEND if what is writes_by_number else os.O_RDONLY)
        (folder / "fd").write_text(str(fd))
        try:
            found = seen(DataLoader(Of(what, folder), batch_size=BATCH, shuffle=True), epochs=2, num=num)
        finally:
            LOG.removeHandler(handler)
            handler.close()
            os.close(fd)
            (folder / "fd").unlink()
        files = {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
        return found, files, os.environ["OF_ITEMS"]

    ((ours, _, problems), *after), ((plain, _, _), *same) = again(2), again(0)
    assert ours == plain and after == same and problems


@pytest.mark.parametrize("handler", [logging.handlers.MemoryHandler(10_000), logging.StreamHandler(io.StringIO())])
def test_what_items_log_arrives(handler, tmp_path):
    records = []
    handler.emit = lambda record: records.append(record.getMessage())

    def again(num):
        records.clear()
        LOG.addHandler(handler)
        try:
            return seen(DataLoader(Of(logs, tmp_path), batch_size=BATCH, shuffle=True), epochs=1, num=num)[0], [
                *records
            ]
        finally:
            LOG.removeHandler(handler)

    assert again(2) == again(0)


def test_batches_that_are_kept_keep_no_file_open():
    owner, kept = Loaders(), []
    owner.install()
    owner.change({"ahead": 1})
    try:
        before = len(os.listdir("/proc/self/fd"))
        for batch in DataLoader(Of(lambda self, i: 0.0), batch_size=2, shuffle=True):
            kept.append(batch)
            owner.num_steps += 1
        assert owner.num_ahead > 40 and len(os.listdir("/proc/self/fd")) < before + 20
    finally:
        owner.remove()


def test_sums_that_threads_of_the_script_would_share_are_plains():
    def sums(self, i):
        return (self.held * (i + 1)).sum()

    def again(num):
        held = torch.rand(300_000, generator=torch.Generator().manual_seed(1))
        return seen(DataLoader(Of(sums, held), batch_size=BATCH, shuffle=True), epochs=1, num=num)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        (ours, num_taken, problems), plain = again(2), again(0)
    finally:
        torch.set_num_threads(before)
    assert ours == plain[0] and num_taken == 0 and "`torch.sum`" in problems[0]


def test_a_process_that_hangs_is_waited_for_briefly_and_once(monkeypatch):
    from flatout.frameworks.pytorch.input.ahead import ahead

    monkeypatch.setattr(ahead, "LEAST_PATIENCE_S", 1.0)
    own = os.getpid()

    def hangs(self, i):
        if os.getpid() != own:
            threading.Event().wait()
        return 0.0

    def again(num):
        return seen(DataLoader(Of(hangs), batch_size=BATCH, shuffle=True), epochs=1, num=num)

    (ours, _, problems), plain = again(1), again(0)
    assert ours == plain[0] and len(problems) == 1 and "hung" in problems[0]
