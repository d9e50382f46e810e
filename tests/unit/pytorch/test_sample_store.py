"""Are batches of kept items the script's own, whatever becomes of the dataset, and is memory left to others?"""

import functools
import gc
import os
import random
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
psutil = pytest.importorskip("psutil")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils.data import ConcatDataset, DataLoader, RandomSampler, Subset, TensorDataset  # noqa: E402

from flatout.frameworks.pytorch.facts import find  # noqa: E402
from flatout.frameworks.pytorch.input.items import cached_batches as stored_module  # noqa: E402
from flatout.frameworks.pytorch.input.items import item_cache as store_module  # noqa: E402
from flatout.frameworks.pytorch.input.items.item_cache import ItemCache, Room  # noqa: E402
from flatout.frameworks.pytorch.input.items.rows import Unvectorised  # noqa: E402
from flatout.frameworks.pytorch.input.items.shadow import AT_ONCE, EVERY, difference  # noqa: E402
from flatout.frameworks.pytorch.input.items.sources import state_of  # noqa: E402
from flatout.frameworks.pytorch.input.loaders import Loaders  # noqa: E402
from flatout.frameworks.pytorch.levers import registry  # noqa: E402
from flatout.frameworks.pytorch.numerics.batches import compare_batches  # noqa: E402
from flatout.frameworks.pytorch.seams.calls import Calls  # noqa: E402
from flatout.frameworks.pytorch.seams.random_states import RandomStates  # noqa: E402
from flatout.frameworks.pytorch.session import Session  # noqa: E402
from handmade import MACHINE  # noqa: E402
from unit.pytorch.test_fused_fetch import make  # noqa: E402

WORKS = """
def __getitem__(self, i):
    x = torch.from_numpy(self.images[i]).float() / self.n
    return x, int(self.labels[i])
"""


@pytest.fixture
def made(tmp_path, monkeypatch):
    return functools.partial(make, tmp_path, monkeypatch)


@pytest.fixture
def loaders():
    owner = Loaders()
    owner.install()
    owner.parts.fused.engage(True)
    owner.parts.stored.engage(True)
    yield owner
    owner.remove()


def epochs(loader, num=3, between=lambda number: None):
    """All batches of some passes, and the random state after each."""
    torch.manual_seed(0)
    found, states = [], []
    for number in range(num):
        between(number)
        found.append(list(loader))
        states.append(RandomStates())
    return found, states


def check(made_dataset, num=3, between=lambda dataset, number: None, least=0, most_bytes=None, **options):
    """Passes under the store are those of plain, on datasets of the same making; the store, for more questions."""
    options = {"batch_size": 6, "shuffle": True, **options}
    dataset = made_dataset()
    plain, plain_states = epochs(DataLoader(dataset, **options), num, functools.partial(between, dataset))
    dataset = made_dataset()
    owner = Loaders()
    owner.store_memory_bytes = most_bytes
    owner.install()
    owner.parts.fused.engage(True)
    owner.parts.stored.engage(True)
    try:
        loader = DataLoader(dataset, **options)
        ours, our_states = epochs(loader, num, functools.partial(between, dataset))
    finally:
        owner.remove()
    assert difference(ours, plain) is None
    assert all(a.equals(b) for a, b in zip(our_states, plain_states, strict=True))
    assert owner.parts.stored.num_batches >= least, owner.parts.stored.keeper(loader).why_not
    return owner.parts.stored.keeper(loader)


# -- what is kept ---------------------------------------------------------------------------------------------------


KEPT = {
    "numbers": WORKS,
    "a dictionary": """
        def __getitem__(self, i):
            x = torch.from_numpy(self.images[i]).double() * 2
            return {"x": x, "pair": (i, i * 1.5)}
    """,
    "half precision": """
        def __getitem__(self, i):
            return (torch.from_numpy(self.images[i]).float() / 3).bfloat16(), i
    """,
    "truth": """
        def __getitem__(self, i):
            return (torch.from_numpy(self.images[i]).float() - 100).clamp(0, 1).bool()
    """,
    "complex": """
        def __getitem__(self, i):
            return self.waves[i] * 2.0
    """,
    "made of texts and numbers": """
        def __getitem__(self, i):
            x = torch.from_numpy(self.images[i]).float() / 2
            if self.names[i] == "":
                raise IndexError
            return x, self.numbers[i], self.large[i] % 7
    """,
    "windows": """
        def __getitem__(self, i):
            x = torch.from_numpy(self.text[i:i + self.n].astype(np.int64)) * 2
            return x, i
    """,
}


@pytest.mark.parametrize("name", KEPT)
def test_batches_of_kept_items_are_those_of_the_script(made, name):
    waves = torch.complex(torch.arange(50.0), -torch.arange(50.0))[:, None].repeat(1, 3)
    parts = {
        "names": [f"n{i}" for i in range(50)], "waves": waves, "numbers": [i / 3 for i in range(50)],
        "large": [i * 10**30 for i in range(50)],
    }  # fmt: skip
    kept = check(lambda: made(KEPT[name], **parts), least=5)
    assert kept.store.num_kept == 50 and kept.store.why_stopped is None


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": False, "batch_size": 7, "drop_last": True},
        {"shuffle": False, "sampler": [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]},
        {"shuffle": False, "sampler": RandomSampler(range(50), replacement=True, num_samples=80)},
        {"shuffle": False, "sampler": [-1, 5, -50, 7, 49, 0]},
        {"num_workers": 0, "batch_size": 64},
    ],
)
def test_samplers_of_all_kinds(made, options):
    check(lambda: made(WORKS), num=4, **options)


def test_parts_of_datasets(made):
    assert check(lambda: Subset(made(WORKS), [4, 8, 15, 16, 23, 42] * 3), least=3).store.num_kept == 18


def test_items_with_texts_are_not_kept(made):
    source = "def __getitem__(self, i): return torch.from_numpy(self.images[i]) * 2, self.names[i]"
    kept = check(lambda: made(source, names=[f"n{i}" for i in range(50)]))
    assert "not all dense tensors" in kept.why_not


def test_what_takes_items_as_they_lie_is_not_kept(made):
    for dataset, why in [
        (TensorDataset(torch.arange(50)), "as they lie"),
        (ConcatDataset([made(WORKS), made(WORKS)]), "ConcatDataset"),
        (made("def __getitem__(self, i): return torch.rand(1)"), "rand"),
    ]:
        assert why in Loaders().parts.stored.why_not(DataLoader(dataset))


def test_the_loop_may_change_batches_in_place(made, loaders):
    loader = DataLoader(made(WORKS), batch_size=5)
    plain = list(iter(DataLoader(made(WORKS), batch_size=5)))
    for _ in range(4):
        for (x, y), (plain_x, plain_y) in zip(loader, plain, strict=True):
            assert torch.equal(x, plain_x) and torch.equal(y, plain_y)
            assert x.untyped_storage().resizable() and not x._is_view()
            x.zero_(), y.fill_(-1)
    assert loaders.parts.stored.num_batches > 10


# -- datasets that change -------------------------------------------------------------------------------------------


def write_array(dataset, number):
    dataset.images = dataset.images if dataset.images.flags.owndata else dataset.images.copy()
    dataset.images[number * 7 % 50] += 1


def write_label(dataset, number):
    dataset.labels[number] = 5


def new_array(dataset, number):
    dataset.images = dataset.images + 1


def new_parameter(dataset, number):
    dataset.n = 2.0 + number // 3


def new_type(dataset, number):
    dataset.n = [8, 8.0, 8, np.float32(8)][number % 4]


def new_default(dataset, number):
    torch.set_default_dtype(torch.float64 if number % 3 == 2 else torch.float32)


def test_items_of_a_branch_that_was_not_read_are_computed_each_time(made):
    source = """
        def __getitem__(self, i):
            x = torch.from_numpy(self.images[i]).float() / self.n
            if self.labels[i] == 3:
                x = x + torch.rand(1)
            return x, self.labels[i]
    """
    labels = [0] * 50
    labels[17] = 3
    assert check(lambda: made(source, labels=labels), num=4, batch_size=2, least=40).store.num_kept < 50


@pytest.mark.parametrize("change", [write_array, write_label, new_array, new_parameter, new_type, new_default])
def test_a_dataset_that_changes_is_followed(made, change):
    images = np.random.default_rng(5).integers(0, 256, (50, 6, 5), dtype=np.uint8)
    try:
        check(lambda: made(WORKS, images=images.copy(), labels=list(range(50))), num=8, between=change)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_tensor_that_is_written_to_is_followed(made):
    source = """
        def __getitem__(self, i):
            return self.images[i].float() / 2, self.labels[i] * 3
    """
    images = torch.arange(200, dtype=torch.uint8).view(50, 4)

    def change(dataset, number):
        if number % 2:
            dataset.images[number * 11 % 50].add_(1)
            dataset.labels[7] += number

    check(lambda: made(source, images=images.clone(), labels=torch.arange(50)), num=6, between=change)


def test_changes_within_a_pass_count_at_once(made, loaders):
    dataset = made(
        WORKS.replace("torch.from_numpy(self.images[i])", "self.images[i]"),
        images=torch.zeros(50, 2, dtype=torch.uint8),
        labels=list(range(50)),
    )
    loader = DataLoader(dataset, batch_size=10)
    for _ in range(3):
        list(loader)
    iterator = iter(loader)
    next(iterator)
    dataset.images[25], dataset.n = 80, 10
    later = torch.cat([x for x, _ in iterator])
    assert later[15].tolist() == [8.0, 8.0] and later.count_nonzero() == 2
    assert loaders.parts.stored.keeper(loader).why_not is None


def test_what_changes_all_the_time_is_not_kept_any_more(made, loaders):
    dataset = made(WORKS)
    loader = DataLoader(dataset, batch_size=10)
    for number in range(10):
        dataset.n = 1 + number
        assert difference(list(loader), list(iter_plain(loader))) is None
    assert "all the time" in loaders.parts.stored.keeper(loader).why_not


def iter_plain(loader):
    return torch.utils.data.dataloader._SingleProcessDataLoaderIter(loader)


def test_kept_items_that_are_not_the_scripts_are_found_and_end_it(made, loaders):
    dataset = made(WORKS)
    loader = DataLoader(dataset, batch_size=10, sampler=[i % 50 for i in range(4 * AT_ONCE * EVERY)])
    keeper = loaders.parts.stored.keeper(loader)
    batches = iter(loader)
    for _ in range(20):
        next(batches)
    for column in keeper.store._columns:
        column.rows += 1
    right = [
        bool(labels[0] % 10 == 0 and labels[0] == number % 5 * 10 % 10) for number, (_, labels) in enumerate(batches)
    ]
    assert "kept batches differ: item" in keeper.why_not and keeper.store is None
    assert (
        difference(list(iter(DataLoader(dataset, batch_size=10))), list(iter_plain(DataLoader(dataset, batch_size=10))))
        is None
    )
    assert len(right)


# -- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("free_bytes", [0, None, 2**30, 2**30 + 2 * 20 * 120])
def test_where_not_all_items_have_room_none_is_kept(made, monkeypatch, free_bytes):
    monkeypatch.setattr(store_module, "free_memory_bytes", lambda: free_bytes)
    kept = check(lambda: made(WORKS))
    assert kept.store is None and kept.why_not == "no memory for all items"


def test_all_stores_of_a_process_share_the_memory_that_they_were_given():
    class Fake:
        def __init__(self, taken_bytes):
            self.taken_bytes = taken_bytes

    room, one, other = Room(1000), Fake(0), Fake(0)
    assert room.free_bytes(one) == 1000
    one.taken_bytes = 700
    assert room.free_bytes(other) == 300 and room.free_bytes(one) == 1000
    other.taken_bytes = 600
    assert room.free_bytes(Fake(0)) == 0
    del one
    gc.collect()
    assert room.free_bytes(Fake(0)) == 400


@pytest.mark.parametrize("num", [49, 50])
def test_all_is_kept_where_memory_may_be_taken_for_it(made, num):
    item_bytes = 6 * 5 * 4 + 8
    keeper = check(lambda: made(WORKS), most_bytes=num * item_bytes, num=4)
    assert keeper.store.num_kept == 50 if num == 50 else keeper.why_not == "no memory for all items"


def test_without_memory_nothing_is_kept(made):
    keeper = check(lambda: made(WORKS), most_bytes=0)
    assert keeper.store is None and keeper.why_not == "`--store-memory 0` keeps nothing"


def test_nothing_is_added_where_memory_runs_short(monkeypatch):
    free = iter([2**40, 2**40, 5])
    monkeypatch.setattr(store_module, "free_memory_bytes", lambda: next(free))
    monkeypatch.setattr(store_module, "LOOK_EVERY_BYTES", 1000)
    store = ItemCache(100)
    for first in range(0, 100, 10):
        store.places([first], ()), store.put(list(range(first, first + 10)), (), torch.zeros(10, 20))
    assert store.num_kept == store.taken_bytes == 0 and store.why_stopped == "memory ran short"


# -- what items are made of -----------------------------------------------------------------------------------------


def test_marks_differ_when_anything_does():
    def same(one, other):
        return state_of(one) == state_of(other)

    assert same([1, (2.0, "a")], [1, (2.0, "a")]) and same({"a": torch.ones(3)}, {"a": torch.ones(3)})
    assert not same(1, 1.0) and not same(1, True) and not same([1], (1,)) and not same({"a": 1}, {"b": 1})
    assert not same(torch.ones(3), torch.ones(3, dtype=torch.float64)) and not same(np.zeros(3), np.zeros(4))
    assert not same(0.0, 1e-300) and not same(np.float32(1), 1.0)
    for unknown in (object(), torch.zeros(2**16), np.zeros(2**16), np.array([object()]), list(range(100))):
        with pytest.raises(Unvectorised):
            state_of(unknown)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 19), min_size=1, max_size=6), min_size=1, max_size=12),
    st.integers(19, 21),
    st.integers(0, 11),
)
def test_a_store_gives_what_was_put_or_says_that_it_is_not_there(asked, capacity, change_at):
    values = torch.arange(20.0)[:, None].repeat(1, 5)
    store = ItemCache(20, Room(capacity * 5 * 4))
    for number, indices in enumerate(asked):
        if number == change_at:
            values = values + 100
        mark = number >= change_at
        places = store.places(indices, mark)
        if places is not None:
            assert torch.equal(store.take(places), values[indices])
        store.put(indices, mark, values[indices])
        assert store.num_kept <= (0 if capacity < 20 else 20)
        if number < change_at:
            assert (store.places(indices, mark) is None) is (capacity < 20)


# -- the lever ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_the_lever_applies_where_items_are_computed_shows_its_effect_and_is_released(made, workers):
    loaders = Loaders()
    loaders.reopen = loaders.studies = True
    loaders.install()
    session = Session(Calls(), loaders, registry())
    lever = session.levers["sample_store"]
    try:
        loader = DataLoader(made(WORKS), batch_size=5, num_workers=workers)
        loaders.note(loader, 1)
        assert lever.applies(find(session, 1), MACHINE) is None
        wanted = {"sample_store": {}, **({"virtual_workers": {}} if workers else {})}
        session.engage_exactly(wanted)
        for _ in range(2):
            list(loader)
        assert "batches of kept items" in session.evidence()[0]["sample_store"]
        assert compare_batches(session, wanted).error == 0.0
        session.engage_exactly({})
        assert loaders.parts.stored.num_batches == 0 and lever.evidence(session) is None
    finally:
        loaders.remove()


def test_a_dataset_that_takes_long_to_compute_is_not_filled_in_a_trial(made, monkeypatch):
    monkeypatch.setattr(stored_module, "MOST_FILLING_S", 0.0)
    keeper = Loaders().parts.stored.keeper(DataLoader(made(WORKS)))
    keeper.fill_for_trial()
    assert "longer than a trial has" in keeper.why_not and keeper.store is None


# -- what an attack found -------------------------------------------------------------------------------------------


BRANCH = """
def __getitem__(self, i):
    x = torch.from_numpy(self.images[i]).float() * 2
    if self.labels[i] == 7:
        x = x * self.boost + RARE
    return x
"""


@pytest.mark.parametrize("rare", ["0", "torch.rand(1)", "len(self.seen.append(i) or self.seen)"])
def test_items_on_a_way_that_was_not_read_are_not_kept(made, rare):
    def boost(dataset, number):
        dataset.boost = number + 1

    labels = [7 if i == 33 else 1 for i in range(50)]
    source = BRANCH.replace("RARE", rare)
    check(lambda: made(source, labels=labels, boost=1, seen=[]), num=5, between=boost)


@pytest.mark.parametrize("rare", ["torch.rand(1)", "random.random()", "np.random.rand()"])
def test_in_place_of_workers_what_was_not_read_is_drawn_by_workers(made, rare):
    labels = [7 if i == 33 else 1 for i in range(50)]
    source = BRANCH.replace("RARE", rare).replace("\n    x =", "\n    import random\n    x =", 1)
    source = source.replace("    import random\n", "")
    found = []
    for on in (False, True):
        dataset, owner = made(source, before="import random", labels=labels, boost=1), Loaders()
        owner.install()
        if on:
            owner.change({"in_process": True})
        try:
            torch.manual_seed(0), random.seed(0), np.random.seed(0)
            loader = DataLoader(dataset, batch_size=5, num_workers=2)
            found.append(([list(loader), list(loader)], RandomStates()))
        finally:
            owner.remove()
    assert difference(found[0][0], found[1][0]) is None and found[0][1].equals(found[1][1])


def test_a_tensor_in_the_place_of_another_is_another(made):
    source = "def __getitem__(self, i): return self.x[i] * 2"

    def replaced(dataset, number):
        dataset.x = None
        dataset.x = torch.full((50, 200), float(number))

    check(lambda: made(source, x=torch.zeros(50, 200)), num=6, between=replaced)


def test_a_history_is_followed(made):
    source = "def __getitem__(self, i): return self.x[i] * 2"

    def between(dataset, number):
        dataset.x.requires_grad_(number % 2 == 1)

    plain, ours = made(source, x=torch.ones(50, 3)), made(source, x=torch.ones(50, 3))
    found = []
    for dataset, on in ((plain, False), (ours, True)):
        owner = Loaders()
        owner.install()
        owner.parts.stored.engage(on)
        try:
            loader, seen = DataLoader(dataset, batch_size=10), []
            for number in range(5):
                between(dataset, number)
                seen += [batch.requires_grad for batch in loader]
            found.append(seen)
        finally:
            owner.remove()
    assert found[0] == found[1] and True in found[0]


def test_threads_that_share_a_loader_and_draw_meanwhile(made, loaders):
    dataset = made("def __getitem__(self, i): return self.x[i % 50] * 2, i", x=torch.arange(100.0).view(50, 2))
    loader = DataLoader(dataset, batch_size=5, sampler=[i % 50 for i in range(2 * AT_ONCE * EVERY)])
    wrong = []

    def consume():
        for x, i in loader:
            if not torch.equal(x, dataset.x[i % 50] * 2):
                wrong.append(i)

    threads = [threading.Thread(target=consume) for _ in range(4)]
    torch.manual_seed(3)
    [thread.start() for thread in threads]
    drawn = [torch.rand(1).item() for _ in range(3000)]
    [thread.join() for thread in threads]
    torch.manual_seed(3)
    seeds = [torch.empty((), dtype=torch.int64) for _ in threads]  # what opening a pass draws, at some time or other
    assert not wrong and len(set(drawn)) > 2900 and len(seeds) == 4


# -- arrays that nobody can write to --------------------------------------------------------------------------------


def test_another_array_in_place_of_one_in_a_bytes_object_is_seen(made):
    def make_dataset():
        images = np.frombuffer(bytes(range(200)), np.uint8).reshape(50, 4)
        return made(WORKS, images=images, labels=list(range(50)), n=2)

    def between(dataset, number):
        dataset.images = np.frombuffer(bytes(range(number, 200)) + bytes(number), np.uint8).reshape(50, 4)

    check(make_dataset, between=between, least=0)


def test_where_nothing_is_worth_keeping_batches_are_computed_at_once(loaders):
    loaders.parts.fused.engage(False)
    list(DataLoader(torch.utils.data.TensorDataset(torch.arange(600)), batch_size=50))
    assert loaders.parts.fused.num_batches > 5
    loaders.parts.stored.engage(False)
    assert not loaders.parts.fused.engaged


# -- in a process of its own ----------------------------------------------------------------------------------------

SCRIPT = """
import hashlib, sys
import numpy as np, torch
from torch.utils.data import DataLoader, Dataset

class Digits(Dataset):
    def __init__(self):
        self.data = torch.arange(1900 * 16, dtype=torch.int64).remainder_(251).to(torch.uint8).view(1900, 4, 4)
        self.targets = [i % 10 for i in range(1900)]
    def __len__(self):
        return len(self.data)
    def __getitem__(self, i):
        return (self.data[i].float().div(255) - 0.5) / 0.25, self.targets[i]

torch.manual_seed(0)
model = torch.nn.Linear(16, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
seen = hashlib.sha256()
for epoch in range(2):
    for x, y in DataLoader(Digits(), batch_size=16, shuffle=True):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x.flatten(1)), y)
        loss.backward()
        optimizer.step()
        seen.update(x.numpy().tobytes() + y.numpy().tobytes())
print(seen.hexdigest(), loss.item(), torch.rand(1).item())
"""


def test_a_script_prints_the_same_whatever_memory_kept_items_have(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}

    def runs(*command):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=True
        )
        return done.stdout, done.stderr.splitlines()

    plain, _ = runs(sys.executable, "train.py")
    run = [sys.executable, "-m", "flatout", "run", "--fixed"]
    for memory in (["--store-memory", size] for size in ("0", "100kB", "1GB")):
        out, said = runs(*run, *memory, "--levers", "sample_store", "train.py")
        assert out == plain and any(line.startswith("flatout: 238 steps") for line in said)
        assert any("`--store-memory 0` keeps nothing" in line for line in said) == ("0" in memory)
    out, said = runs(*run, "--store-memory", "0", "train.py")
    assert out == plain
    assert "flatout: `--store-memory` has nothing to do here: no lever that keeps items is engaged" in said
