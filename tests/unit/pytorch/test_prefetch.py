"""Images begun while the training computes, and decoded ones kept: are batches and random streams the script's own?"""

import os
import random
import time

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

from torch.utils.data import DataLoader, Dataset  # noqa: E402

from flatout.frameworks.pytorch.batches import compare_batches  # noqa: E402
from flatout.frameworks.pytorch.calls import Calls  # noqa: E402
from flatout.frameworks.pytorch.facts import find  # noqa: E402
from flatout.frameworks.pytorch.loaders import Loaders  # noqa: E402
from flatout.frameworks.pytorch.pipeline.pixels import decoded as decoded_module  # noqa: E402
from flatout.frameworks.pytorch.pipeline.shadow import difference  # noqa: E402
from flatout.frameworks.pytorch.random_states import RandomStates  # noqa: E402
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
    loaders.reopen = True
    loaders.install()
    session = Session(Calls(), loaders)
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
    loaders.reopen = True
    loaders.install()
    session = Session(Calls(), loaders)
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
