"""Files read ahead: the right ones, at the right time, and nothing that the script can see?"""

import importlib.util
import os
import pathlib
import random
import threading
import time
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils.data import (  # noqa: E402
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from flatout.frameworks.pytorch.facts import find  # noqa: E402
from flatout.frameworks.pytorch.input.items.shadow import difference  # noqa: E402
from flatout.frameworks.pytorch.input.loaders import Loaders  # noqa: E402
from flatout.frameworks.pytorch.input.read_ahead import owner as owner_module  # noqa: E402
from flatout.frameworks.pytorch.input.read_ahead import readers as readers_module  # noqa: E402
from flatout.frameworks.pytorch.input.read_ahead.names import columns_of  # noqa: E402
from flatout.frameworks.pytorch.input.read_ahead.owner import ReadAhead  # noqa: E402
from flatout.frameworks.pytorch.input.read_ahead.readers import NUM_LOOKED_AT, Reading, read  # noqa: E402
from flatout.frameworks.pytorch.levers import registry  # noqa: E402
from flatout.frameworks.pytorch.seams.calls import Calls  # noqa: E402
from flatout.frameworks.pytorch.seams.random_states import RandomStates  # noqa: E402
from flatout.frameworks.pytorch.session import Session  # noqa: E402
from handmade import MACHINE  # noqa: E402
from vision import torchvision  # noqa: E402

pytestmark = pytest.mark.skipif(os.sys.platform != "linux", reason="files are read ahead on Linux only")


class Files(Dataset):
    """The length of each file, and a random number."""

    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with open(self.paths[index], "rb") as file:
            return len(file.read()), torch.rand(1), random.random()


@pytest.fixture
def paths(tmp_path):
    found = [str(tmp_path / f"{number}.bin") for number in range(150)]
    for number, path in enumerate(found):
        pathlib.Path(path).write_bytes(bytes(100 + number))
    return found


@pytest.fixture
def slow(monkeypatch):
    """Storage on which every file takes a while; the paths that were read ahead, in order."""
    done = []

    def reading(path):
        if read(path) is None:
            return None
        done.append(path)
        return True

    monkeypatch.setattr(readers_module, "read", reading)
    return done


@pytest.fixture(autouse=True)
def nothing_is_swallowed(monkeypatch):
    """Whatever goes wrong in looking ahead is kept from the script, but not from the tests."""
    problems, plain = [], owner_module.DrawnEarly._look

    def look(self, value):
        try:
            plain(self, value)
        except Exception as problem:
            problems.append(problem)
            raise

    monkeypatch.setattr(owner_module.DrawnEarly, "_look", look)
    yield
    assert problems == []


def passes(loader, *, on, num=2, stop=None, meanwhile=lambda number: None):
    """Batches, random states and the script's generators after each step; and the part that reads."""
    owner = Loaders()
    if on:
        owner.install()
        owner.parts.files.engage(True)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    own = [g for g in (loader.generator, getattr(loader.sampler, "generator", None)) if g is not None]
    found, states = [], []
    try:
        for _ in range(num):
            for number, batch in enumerate(loader):
                found.append(batch)
                meanwhile(number)
                states.append(RandomStates(own))
                if number == stop:
                    break
            states.append(RandomStates(own))
    finally:
        owner.remove()
    return found, states, owner


def check(make, **options):
    plain, plain_states, _ = passes(make(), on=False, **options)
    ours, our_states, owner = passes(make(), on=True, **options)
    assert difference(ours, plain) is None
    assert all(a.equals(b) for a, b in zip(our_states, plain_states, strict=True))
    return owner.parts.files if owner._parts is not None else None


# -- the order ------------------------------------------------------------------------------------------------------


def generator():
    return torch.Generator().manual_seed(7)


SAMPLERS = {
    "in order": SequentialSampler,
    "shuffled": RandomSampler,
    "shuffled by a generator": lambda data: RandomSampler(data, generator=generator()),
    "shuffled several times": lambda data: RandomSampler(data, num_samples=3 * len(data) + 1),
    "with replacement": lambda data: RandomSampler(data, replacement=True, num_samples=70),
    "a subset": lambda data: SubsetRandomSampler(range(3, len(data)), generator()),
    "a listed subset": lambda data: SubsetRandomSampler(list(range(len(data)))[::2]),
    "weighted": lambda data: WeightedRandomSampler([1.0] * len(data), 40, generator=generator()),
    "distributed": lambda data: DistributedSampler(data, num_replicas=3, rank=1),
    "a range": lambda data: range(len(data)),
}


class Named(Dataset):
    """Items that are numbers, and names of files that are there."""

    def __init__(self, num, path):
        self.paths = [path] * num

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return index


@settings(deadline=None, max_examples=150)
@given(st.sampled_from(sorted(SAMPLERS)), st.integers(1, 40), st.integers(1, 9), st.booleans())
def test_asking_early_changes_no_order_and_moves_nothing_before_plain_does(kind, num, batch_size, drop_last):
    found = []
    for on in (False, True):
        torch.manual_seed(3)
        data = Named(max(num, 4), __file__)
        sampler = SAMPLERS[kind](data)
        loader = DataLoader(data, sampler=sampler, batch_size=batch_size, drop_last=drop_last)
        own = [one for one in (getattr(sampler, "generator", None),) if one is not None]
        iterator, ahead = iter(loader), ReadAhead()
        ahead.engage(on)
        ahead.attach(loader, iterator)
        assert (type(iterator._sampler_iter) is owner_module.DrawnEarly) is on
        found.append([(batch.tolist(), RandomStates(own)) for batch in iterator] + [([], RandomStates(own))])
    assert [batch for batch, _ in found[0]] == [batch for batch, _ in found[1]]
    assert all(plain.equals(ours) for (_, plain), (_, ours) in zip(*found, strict=True))


def test_orders_that_may_follow_from_what_the_script_does_are_not_asked_early(paths):
    class Own(SequentialSampler):
        pass

    piecewise = RandomSampler(paths, replacement=True, num_samples=70, generator=generator())
    for sampler, why in [(Own(paths), "sampler of"), ([3, 1, 2], "a list"), (piecewise, "bit by bit")]:
        assert why in ReadAhead().why_not(DataLoader(Files(paths), sampler=sampler))
    assert "made up" in ReadAhead().why_not(DataLoader(Files(paths), batch_size=None))


# -- the names ------------------------------------------------------------------------------------------------------


class Holding(Dataset):
    """Has attributes, and code that must not run."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __len__(self):
        raise AssertionError

    def __getattr__(self, name):
        raise AssertionError

    @property
    def files(self):
        raise AssertionError


def names(dataset, index=1):
    return [column.path(index) for column in columns_of(dataset, index)]


NAMED = ["/a/0", "/a/1", "/a/2"]


@pytest.mark.parametrize(
    "attributes",
    [
        {"paths": NAMED},
        {"paths": tuple(map(pathlib.Path, NAMED)), "length": 3},
        {"samples": [(name, 7) for name in NAMED]},
        {"samples": [[7, name] for name in NAMED]},
        {"rows": [{"label": 1, "file": name} for name in NAMED]},
        {"paths": np.array(NAMED)},
        {"paths": np.array(NAMED, dtype=object)},
        {"inner": Holding(paths=NAMED)},
    ],
    ids=lambda attributes: next(iter(attributes)),
)
def test_names_are_found_where_they_lie_open(attributes):
    assert names(Holding(**attributes)) == ["/a/1"]


def test_names_are_found_through_subsets():
    assert names(Subset(Holding(paths=NAMED), [2, 0, 1])) == ["/a/0"]
    assert names(Subset(Subset(Holding(paths=NAMED), np.array([2, 0, 1])), [0, 2])) == ["/a/1"]


def test_names_that_are_no_whole_paths_may_lie_in_any_folder_that_the_dataset_names():
    dataset = Holding(root="/data", split="train", names=["0.jpg", "1.jpg"])
    assert {"/data/1.jpg", "1.jpg", "train/1.jpg"} == set(names(dataset))


def test_names_in_a_table_of_pandas_are_found():
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"label": [1, 2], "file": ["/a/0", "/a/1"]})
    assert names(Holding(table=table)) == ["/a/1"]
    assert names(Holding(files=table["file"])) == ["/a/1"]


def test_nothing_of_the_scripts_own_kind_is_looked_into():
    class Own(list):
        def __getitem__(self, index):
            raise AssertionError

        __len__ = __iter__ = __getitem__

    class Text(str):
        def __fspath__(self):
            raise AssertionError

        __str__ = __fspath__

    odd = {"paths": Own(NAMED), "texts": [Text("/a/0"), Text("/a/1")], "order": Own([1])}
    assert names(Holding(**odd)) == []
    assert names(Subset(Holding(paths=NAMED), Own([0, 1, 2]))) == []
    assert names(object()) == names(Holding(paths=[1, None, b"/a"], number=3, short=["/a/0"])) == []


# -- reading --------------------------------------------------------------------------------------------------------


def test_only_regular_files_of_some_size_are_read(tmp_path, paths, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "link").symlink_to(paths[3])
    for name in ("pipe", "empty", "loop", "none", "", "a" * 300, "\0"):
        assert read(str(tmp_path / name) if name else "") is None
    assert read("/dev/null") is None
    assert read(str(tmp_path / "link")) is not None
    monkeypatch.setattr(readers_module, "MOST_FILE_BYTES", 100)
    assert read(paths[0]) is not None
    assert read(paths[1]) is None


def test_reading_leaves_no_descriptor(paths):
    descriptors = os.listdir("/proc/self/fd")
    assert read(paths[5]) is not None
    assert os.listdir("/proc/self/fd") == descriptors


def test_a_file_that_is_in_memory_is_not_read(paths, monkeypatch):
    pathlib.Path(paths[0]).read_bytes()
    assert read(paths[0]) is False
    monkeypatch.setattr(readers_module, "_in_memory", lambda descriptor, size: False)
    monkeypatch.setattr(readers_module, "QUICK_S", 0.0)
    monkeypatch.setattr(readers_module, "QUICK_BYTES_PER_S", 1e18)
    assert read(paths[0]) is True


def judged(*slow):
    reading = Reading(SimpleNamespace(engaged=True, num_files=0))
    for number, one in enumerate(slow):
        reading.judge(number, slow=one)
    return reading


def test_who_finds_the_files_in_memory_rests():
    assert judged(*[True] * 3 * NUM_LOOKED_AT).wants(0)
    resting = judged(*[False] * NUM_LOOKED_AT)
    assert not resting.wants(NUM_LOOKED_AT + 100) and resting.wants(NUM_LOOKED_AT + readers_module.REST)
    assert judged(*([False] * 8 + [True] * 8)).wants(0)


# -- loaders --------------------------------------------------------------------------------------------------------


def settled(done, num):
    """Wait until so many files were read."""
    until_s = time.monotonic() + 20
    while len(done) < num and time.monotonic() < until_s:
        time.sleep(0.01)
    return done


def threads():
    return [one for one in threading.enumerate() if one.name == "flatout-reading"]


LOADERS = {
    "in order": {},
    "shuffled": {"shuffle": True},
    "a generator": {"shuffle": True, "generator": "own"},
    "last dropped": {"shuffle": True, "drop_last": True},
    "workers": {"num_workers": 2, "shuffle": True},
    "kept workers": {"num_workers": 2, "shuffle": True, "persistent_workers": True},
}


def made(dataset, name):
    options = {"batch_size": 8, **LOADERS[name]}
    if "generator" in options:
        options["generator"] = generator()
    return DataLoader(dataset, **options)


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("stop", [None, 3])
def test_files_are_read_ahead_and_the_script_sees_what_it_always_saw(paths, slow, name, stop):
    part = check(lambda: made(Files(paths), name), stop=stop, meanwhile=lambda number: time.sleep(0.005))
    assert part.num_files >= 30 and set(slow) <= set(paths)


def test_files_are_read_in_the_order_in_which_they_will_be_opened(paths, slow, monkeypatch):
    owner = Loaders()
    owner.install()
    owner.parts.files.engage(True)
    monkeypatch.setattr(readers_module, "NUM_THREADS", 1)
    try:
        iterator = iter(DataLoader(Files(paths), batch_size=8))
        next(iterator)
        assert settled(slow, 64) == paths[8 : 8 + 64]
        next(iterator)
        assert settled(slow, 72) == paths[8 : 8 + 72]
    finally:
        owner.remove()


def test_threads_and_descriptors_end_with_the_pass(paths, slow):
    descriptors = len(os.listdir("/proc/self/fd"))
    passes(DataLoader(Files(paths), batch_size=8), on=True, num=1)
    until_s = time.monotonic() + 10
    while threads() and time.monotonic() < until_s:
        time.sleep(0.01)
    assert threads() == [] and len(os.listdir("/proc/self/fd")) == descriptors


def test_files_in_memory_are_looked_at_and_then_left_alone(paths, monkeypatch):
    looked = []
    monkeypatch.setattr(readers_module, "read", lambda path, *_: looked.append(path) or False)
    part = check(lambda: DataLoader(Files(paths), batch_size=8), meanwhile=lambda number: time.sleep(0.005))
    assert part.num_files == 0 and 2 * NUM_LOOKED_AT <= len(looked) <= 2 * (NUM_LOOKED_AT + readers_module.NUM_THREADS)


def test_names_that_change_under_way_harm_nobody(paths, slow, tmp_path):
    dataset = Files(list(paths))

    def meanwhile(number):
        dataset.paths[40:] = [str(tmp_path / "149.bin")] * 110 if number % 2 else [*paths[40:]]
        vars(dataset)["other"] = [None, 3]

    check(lambda: DataLoader(dataset, batch_size=8), meanwhile=meanwhile)


def test_an_error_comes_when_plain_has_it(paths, slow):
    found = []
    for on in (False, True):
        dataset = Files([*paths[:50], str(paths[0]) + ".gone", *paths[51:]])
        owner, number = Loaders(), 0
        if on:
            owner.install()
            owner.parts.files.engage(True)
        try:
            with pytest.raises(FileNotFoundError) as raised:
                for _ in DataLoader(dataset, batch_size=8):
                    number += 1
            found.append((number, str(raised.value)))
        finally:
            owner.remove()
    assert found[0] == found[1] and found[0][0] == 6


def test_a_process_that_was_forked_goes_on(paths, slow):
    owner = Loaders()
    owner.install()
    owner.parts.files.engage(True)
    try:
        iterator = iter(DataLoader(Files(paths), batch_size=8))
        next(iterator)
        if (child := os.fork()) == 0:
            os._exit(0 if len([*iterator]) == 18 else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert len([*iterator]) == 18
    finally:
        owner.remove()


def test_engaged_or_released_in_the_middle_of_a_pass(paths, slow):
    owner = Loaders()
    owner.install()
    try:
        iterator = iter(DataLoader(Files(paths), batch_size=8))
        found = [next(iterator) for _ in range(3)]
        owner.parts.files.engage(True)
        owner.attach()
        found += [next(iterator) for _ in range(3)]
        assert len(settled(slow, 20)) >= 20
        owner.parts.files.engage(False)
        time.sleep(0.1)
        num = len(slow)
        found += [next(iterator) for _ in range(2)]
        time.sleep(0.1)
        assert len(slow) == num
        owner.parts.files.engage(True)
        found += list(iterator)
        assert [size for batch in found for size in batch[0]] == [100 + number for number in range(150)]
    finally:
        owner.remove()


class Photos(Dataset):
    def __init__(self, paths, transform):
        self.samples = [(path, 0) for path in paths]
        self.transform = transform

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        path, label = self.samples[index]
        return self.transform(Image.open(path).convert("RGB")), label


def test_images_are_read_ahead_beside_the_other_levers(tmp_path, slow):
    transforms = torchvision().transforms
    transform = transforms.Compose([transforms.RandomCrop(20), transforms.ToTensor()])
    photos = [str(tmp_path / f"{number}.jpg") for number in range(60)]
    for number, path in enumerate(photos):
        Image.fromarray(np.random.default_rng(number).integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(path)

    def batches(*parts):
        owner = Loaders()
        owner.install()
        for part in parts:
            getattr(owner.parts, part).engage(True)
        torch.manual_seed(0)
        try:
            loader = DataLoader(Photos(photos, transform), batch_size=4, shuffle=True)
            return [batch for _ in range(3) for batch in loader], torch.get_rng_state()
        finally:
            owner.remove()

    plain, state = batches()
    ours, our_state = batches("decoded", "files")
    assert difference(ours, plain) is None and torch.equal(our_state, state)
    assert len(slow) > 0 and set(slow) <= set(photos)


# -- on storage that is slow ------------------------------------------------------------------------------------------


def throttled_mount():
    """The benchmarks' module."""
    path = pathlib.Path(__file__).parents[3] / "benchmarks" / "throttled_mount.py"
    spec = importlib.util.spec_from_file_location("throttled_mount", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_on_a_slow_mount_files_are_read_ahead_and_once_they_are_in_memory_no_more(paths, tmp_path_factory):
    mounts = throttled_mount()
    if (why := mounts.why_not()) is not None:
        pytest.skip(why)
    folder, mount = pathlib.Path(paths[0]).parent, tmp_path_factory.mktemp("mount")
    with mounts.throttled(folder, mount, 5.0, 100.0):
        names = [str(mount / os.path.basename(path)) for path in paths]
        loader = DataLoader(Files(names), batch_size=8, shuffle=True)
        owner = Loaders()
        owner.install()
        owner.parts.files.engage(True)
        try:
            sizes = [size for batch in loader for size in batch[0]]
            assert sorted(map(int, sizes)) == [100 + number for number in range(150)]
            first = owner.parts.files.num_files
            assert first >= 40
            list(loader)
            assert owner.parts.files.num_files - first < first
        finally:
            owner.remove()
    assert os.listdir(mount) == []


# -- the lever ------------------------------------------------------------------------------------------------------


def test_the_lever_applies_to_slow_files_only(paths, monkeypatch):
    loaders = Loaders()
    loaders.reopen = loaders.studies = True
    session = Session(Calls(), loaders, registry())
    lever = session.levers["read_ahead"]

    def why(loader):
        loaders._training.clear()
        loaders.note(loader, 1)
        return lever.applies(find(session, 1), MACHINE)

    assert lever.applies(SimpleNamespace(loaders=()), MACHINE) == "no DataLoader feeds the training"
    assert "in memory" in why(DataLoader(Files(paths)))
    assert "no list" in why(DataLoader(range(8)))
    monkeypatch.setattr(owner_module, "read", lambda *_: True)
    assert why(DataLoader(Files(paths), num_workers=0)) is None
    assert "sampler of the script" in why(DataLoader(Files(paths), batch_sampler=[[1, 2]]))


def test_the_lever_shows_its_effect_and_is_released(paths, slow):
    loaders = Loaders()
    loaders.install()
    session = Session(Calls(), loaders, registry())
    try:
        session.engage_exactly({"read_ahead": {}})
        for _ in DataLoader(Files(paths), batch_size=8):
            time.sleep(0.002)
        assert "files read ahead" in session.evidence()[0]["read_ahead"]
        session.engage_exactly({})
        assert type(iter(DataLoader(Files(paths))).inner._sampler_iter).__name__ != "DrawnEarly"
    finally:
        loaders.remove()
