"""Images begun while the training computes, and decoded ones kept: are batches and random streams the script's own?"""

import os
import random
import shutil
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset  # noqa: E402

from flatout.frameworks.pytorch.facts import find  # noqa: E402
from flatout.frameworks.pytorch.input.items.shadow import difference  # noqa: E402
from flatout.frameworks.pytorch.input.loaders import Loaders  # noqa: E402
from flatout.frameworks.pytorch.input.pixels import decoded as decoded_module  # noqa: E402
from flatout.frameworks.pytorch.levers import registry  # noqa: E402
from flatout.frameworks.pytorch.numerics.batches import compare_batches  # noqa: E402
from flatout.frameworks.pytorch.seams.calls import Calls  # noqa: E402
from flatout.frameworks.pytorch.seams.random_states import RandomStates  # noqa: E402
from flatout.frameworks.pytorch.session import Session  # noqa: E402
from handmade import MACHINE  # noqa: E402
from vision import torchvision  # noqa: E402

T = torchvision().transforms
USUAL = T.Compose([T.RandomResizedCrop(24), T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize([0.5] * 3, [0.25] * 3)])


class Photos(Dataset):
    def __init__(self, paths):
        self.paths = paths
        self.transform = USUAL

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with open(self.paths[index], "rb") as file:
            image = Image.open(file).convert("RGB")
        return self.transform(image), index


TURN = T.RandomHorizontalFlip(1.0)
SMALLER = T.Compose([T.Resize((20, 20)), TURN, T.ToTensor()])


class Changing(Dataset):
    def __init__(self, folders):
        self.folders = folders
        self.transform, self.scale = SMALLER, 1.0
        self.labels, self.table = list(range(30)), dict.fromkeys(range(30), 0)
        self.records = [{"y": number} for number in range(100)]
        self.array, self.large, self.tensor = np.arange(30.0), np.zeros((30, 3000)), torch.zeros(30)

    def __len__(self):
        return 30

    def __getitem__(self, index):
        image = Image.open(f"{index}.jpg").convert("RGB").resize((30, 30))
        numbers = self.array[index] * 2, self.large[index].sum(), self.tensor[index] * 2
        return (
            self.transform(image) * self.scale,
            self.labels[index],
            self.table[index],
            self.records[index]["y"],
            numbers,
        )


class Leaving(Photos):
    def __init__(self, paths, problem):
        super().__init__(paths)
        self.problem = problem

    def __getitem__(self, index):
        if index == 21:
            raise SystemExit("21") if self.problem is SystemExit else OSError("21")
        return self.transform(Image.open(self.paths[index]).convert("RGB")), index


@pytest.fixture
def paths(tmp_path, monkeypatch):
    """Small photographs, whose files nobody has written to for long: when they were changed last cannot be set."""
    monkeypatch.setattr(decoded_module, "SETTLED_NS", 0)
    found = []
    for number in range(30):
        pixels = np.random.default_rng(number).integers(0, 256, (40 + number, 50, 3), dtype=np.uint8)
        found.append(str(tmp_path / f"{number}.jpg"))
        Image.fromarray(pixels).save(found[-1], quality=90)
    return found


def passes(loader, meanwhile=lambda number: None, num=3, stop=None, between=lambda number: None, **engaged):
    """Batches and random states after each step of some passes, under levers."""
    owner = Loaders()
    if engaged:
        owner.install()
        for name in engaged:
            owner.engage(name, True)
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    found, states = [], []
    try:
        for epoch in range(num):
            between(epoch)
            for number, batch in enumerate(loader):
                found.append(batch)
                meanwhile(number)
                states.append(RandomStates())
                if number == stop:
                    break
    finally:
        owner.remove()
    return found, states, owner.pipeline


def check(paths, levers, **options):
    plain, plain_states, _ = passes(DataLoader(Photos(paths), batch_size=4, shuffle=True), **options)
    ours, our_states, pipeline = passes(DataLoader(Photos(paths), batch_size=4, shuffle=True), **options, **levers)
    assert difference(ours, plain) is None
    assert all(a.equals(b) for a, b in zip(our_states, plain_states, strict=True))
    return pipeline


@pytest.mark.parametrize("stop", [None, 2])
def test_batches_begun_early_are_those_of_the_script(paths, stop):
    assert check(paths, {"ahead": True}, stop=stop).ahead.num_batches >= 4


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), lambda: random.random(), lambda: np.random.rand()])
def test_a_training_that_draws_has_its_own_numbers(paths, draw):
    assert check(paths, {"ahead": True}, meanwhile=lambda number: draw()).ahead.num_batches == 0
    assert check(paths, {"ahead": True}, meanwhile=lambda number: number % 4 or draw()).ahead.num_batches > 0


@pytest.mark.parametrize(
    "change",
    [
        lambda dataset, number: setattr(dataset, "scale", number + 2.0),
        lambda dataset, number: setattr(dataset, "transform", USUAL if number == 4 else SMALLER),
        lambda dataset, number: setattr(TURN, "p", float(number % 2)),
        lambda dataset, number: dataset.labels.__setitem__(slice(None), [number] * len(dataset)),
        lambda dataset, number: dataset.records[9].update(y=number),
        lambda dataset, number: dataset.table.__setitem__(3, number),
        lambda dataset, number: dataset.array.__iadd__(1),
        lambda dataset, number: dataset.large.__iadd__(1),
        lambda dataset, number: dataset.tensor.add_(1),
        lambda dataset, number: torch.set_default_dtype((torch.float64, torch.float32)[number % 2]),
        lambda dataset, number: os.chdir(dataset.folders[number % 2]),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "within", [lambda dataset: dataset, lambda dataset: Subset(ConcatDataset([dataset]), range(30))]
)
def test_what_the_training_changes_counts_for_the_next_batch(change, within, paths, tmp_path, monkeypatch):
    folders = [str(tmp_path / name) for name in ("one", "other")]
    for number, folder in enumerate(folders):
        os.mkdir(folder)
        for place in range(30):
            shutil.copy(paths[place - number], os.path.join(folder, f"{place}.jpg"))
    found = []
    monkeypatch.setattr(TURN, "p", 1.0)
    for engaged in ({}, {"ahead": True}):
        monkeypatch.chdir(folders[0])
        dataset = Changing(folders)
        loader = DataLoader(within(dataset), batch_size=4, shuffle=True)
        try:
            found.append(passes(loader, lambda number: change(dataset, number), **engaged))  # noqa: B023
        finally:
            torch.set_default_dtype(torch.float32)
    (plain, plain_states, _), (ours, our_states, pipeline) = found
    assert difference(ours, plain) is None and pipeline.pixels.num_batches > 0
    assert all(a.equals(b) for a, b in zip(our_states, plain_states, strict=True))


@pytest.mark.parametrize("change", [os.unlink, lambda path: shutil.copy(path.replace("7.jpg", "8.jpg"), path)])
def test_a_file_that_the_training_changes_counts_for_the_next_batch(paths, change):
    content, found = Path(paths[7]).read_bytes(), []
    for engaged in ({}, {"ahead": True}):
        loader = DataLoader(Photos(paths), batch_size=1)
        try:
            found.append(passes(loader, lambda number: number == 6 and change(paths[7]), num=1, **engaged)[0])
        except FileNotFoundError as problem:
            found.append(str(problem))
        Path(paths[7]).write_bytes(content)
    assert found[0] == found[1] if isinstance(found[0], str) else difference(found[1], found[0]) is None


def test_batches_of_a_training_in_inference_mode_are_such(paths):
    found = []
    for engaged in (False, True):
        owner = Loaders()
        owner.install()
        owner.engage("ahead", engaged)
        try:
            iterator, kinds = iter(DataLoader(Photos(paths), batch_size=3)), []
            for number in range(8):
                with torch.inference_mode(number % 3 == 0):
                    kinds.append(next(iterator)[0].is_inference())
            found.append(kinds)
        finally:
            owner.remove()
    assert found[0] == found[1] == [number % 3 == 0 for number in range(8)]


@pytest.mark.parametrize("problem", [SystemExit, OSError])
def test_an_error_of_an_item_is_raised_with_its_own_batch(paths, problem):
    dataset = Leaving(paths, problem)
    owner = Loaders()
    owner.install()
    owner.engage("ahead", True)
    try:
        iterator = iter(DataLoader(dataset, batch_size=5))
        for _ in range(4):
            next(iterator)
        with pytest.raises(problem, match="21"):
            next(iterator)
    finally:
        owner.remove()


def test_levers_that_build_on_the_threads_do_not_take_them_from_each_other(paths):
    loaders = Loaders()
    pixels = loaders.pipeline.pixels
    loaders.engage("ahead", True)
    loaders.engage("pixels", True)
    loaders.engage("pixels", False)
    assert pixels.engaged
    loaders.engage("ahead", False)
    assert not pixels.engaged


def test_the_lever_applies_shows_its_effect_and_is_released(paths):
    loaders = Loaders()
    loaders.reopen = loaders.studies = True
    loaders.install()
    session = Session(Calls(), loaders, registry())
    try:
        loader = DataLoader(Photos(paths), batch_size=4, shuffle=True)
        loaders.note(loader, 1)
        assert session.levers["prefetch"].applies(find(session, 1), MACHINE) is None
        session.engage_exactly({"prefetch": {}})
        list(loader)
        assert "batches begun early" in session.evidence()[0]["prefetch"]
        agreement = compare_batches(session, {"prefetch": {}})
        assert (agreement.error, agreement.random_states_equal) == (0.0, True)
        session.engage_exactly({})
        assert type(iter(loader)._inner._dataset_fetcher).__name__ != "AheadFetcher"
    finally:
        loaders.remove()


# -- decoded images that are kept -----------------------------------------------------------------------------------


def test_decoded_images_are_given_again_and_batches_are_the_scripts_own(paths):
    for levers in ({"decoded": True}, {"decoded": True, "ahead": True}):
        decoded = check(paths, levers).pixels.decoded
        assert decoded.num_given >= 30 and decoded.num_bytes == sum(50 * (40 + n) * 4 for n in range(30))


def test_a_file_that_changes_is_decoded_anew(paths):
    own = [open(path, "rb").read() for path in paths]  # noqa: SIM115

    def between(epoch):
        for number, path in enumerate(paths):
            content = own[(number + epoch * (number % 3 == 0)) % 30]
            if epoch == 1:
                _written(path, content)
            elif number % 3 == 0:
                os.replace(_written(path + ".new", content), path)

    check(paths, {"decoded": True}, between=between, num=4)


def _written(path, content):
    with open(path, "wb") as file:
        file.write(content)
    return path


def test_who_changes_an_image_changes_no_kept_one(paths):
    class Painting(Photos):
        def __getitem__(self, index):
            image = Image.open(self.paths[index])
            image.putpixel((0, 0), (index, 255, 0))
            return self.transform(image), index

    found = []
    for on in (False, True):
        owner = Loaders()
        owner.install()
        owner.engage("decoded", on)
        torch.manual_seed(0)
        try:
            found.append([list(DataLoader(Painting(paths), batch_size=4)) for _ in range(3)])
        finally:
            owner.remove()
    assert difference(found[0], found[1]) is None


@pytest.mark.parametrize("free_bytes", [0, None, 2**30, 2**30 + 2 * 4 * 50 * 200])
def test_where_memory_is_short_a_part_is_kept_or_nothing(paths, monkeypatch, free_bytes):
    monkeypatch.setattr(decoded_module, "free_memory_bytes", lambda: free_bytes)
    decoded = check(paths, {"decoded": True}).pixels.decoded
    assert decoded.full and decoded.num_bytes <= max(0, ((free_bytes or 0) - 2**30) / 2)
    assert (decoded.num_given > 0) is ((free_bytes or 0) > 2**30)


def test_a_file_that_was_written_just_now_is_not_kept(paths):
    now = os.stat(paths[0])
    assert decoded_module.identity_of(now) is None or now.st_ctime_ns < time.time_ns() - decoded_module.SETTLED_NS


def test_the_lever_of_decoded_images(paths):
    loaders = Loaders()
    loaders.reopen = loaders.studies = True
    loaders.install()
    session = Session(Calls(), loaders, registry())
    try:
        loader = DataLoader(Photos(paths), batch_size=4, shuffle=True)
        loaders.note(loader, 1)
        assert session.levers["decoded_store"].applies(find(session, 1), MACHINE) is None
        session.engage_exactly({"decoded_store": {}, "prefetch": {}})
        for _ in range(2):
            list(loader)
        assert "not decoded again" in session.evidence()[0]["decoded_store"]
        session.engage_exactly({"prefetch": {}})
        assert loaders.pipeline.pixels.engaged and not loaders.pipeline.pixels.decoded.engaged
    finally:
        loaders.remove()
