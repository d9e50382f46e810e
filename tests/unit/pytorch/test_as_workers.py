"""Do images whose pixel work is done in place of workers leave everything as the workers' own would?"""

import gc
import multiprocessing
import random

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
pytest.importorskip("PIL.Image")

from torch.utils.data import DataLoader  # noqa: E402

import imagery  # noqa: E402
from flatout.frameworks.pytorch.input.items.shadow import difference  # noqa: E402
from flatout.frameworks.pytorch.input.loaders import Loaders  # noqa: E402
from flatout.frameworks.pytorch.input.pixels.as_workers import PixelsInProcess  # noqa: E402
from flatout.frameworks.pytorch.input.worker_settings import IN_PROCESS  # noqa: E402
from flatout.frameworks.pytorch.seams.random_states import RandomStates  # noqa: E402


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return imagery.photographs(tmp_path_factory.mktemp("photographs")) * 2


def nothing(dataset, epoch):
    """Between epochs."""


def passes(dataset, in_process, *, stop=None, epochs=3, between=nothing, own=False, **options):
    """What a loop sees: batches and errors, the random states after each; the loader's owner, and its problems."""
    loaders, problems = Loaders(), []
    loaders.install()
    loaders.on_failure = lambda stage, problem: problems.append(str(problem))
    try:
        if in_process:
            loaders.change({"in_process": True})
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(2)
        options = {"batch_size": 4, "num_workers": 2, "shuffle": True, **options}
        loader = DataLoader(dataset, generator=torch.Generator().manual_seed(5) if own else None, **options)
        found, states = [], []
        for epoch in range(epochs):
            between(dataset, epoch)
            try:
                for number, batch in enumerate(loader):
                    found.append(batch)
                    torch.rand(3), random.random(), np.random.rand()  # as a training that draws
                    states.append(RandomStates([loader.generator]))
                    if (epoch, number) == stop:
                        break
            except Exception as problem:
                found.append([type(problem).__name__, str(problem)])
            states.append(RandomStates([loader.generator]))
        return found, states, loaders, problems
    finally:
        loaders.remove()
        gc.collect()


def agree(make_dataset, **options):
    """Both ways give the same; what ours were built by."""
    plain, plain_states, _, _ = passes(make_dataset(), False, **options)
    ours, states, loaders, problems = passes(make_dataset(), True, **options)
    assert difference(ours, plain) is None
    assert all(a.equals(b) for a, b in zip(states, plain_states, strict=True))
    assert not multiprocessing.active_children()
    return loaders.pipeline.pixels.num_batches, len(plain), problems


OPTIONS = {
    "two workers": {},
    "one worker": {"num_workers": 1},
    "more workers than batches": {"num_workers": 3, "batch_size": 16},
    "far ahead": {"prefetch_factor": 5},
    "in order": {"shuffle": False},
    "a generator of the script's": {"own": True},
    "an epoch that breaks off": {"stop": (1, 2)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_batches_and_random_streams_are_those_of_workers(paths, name):
    num_ours, num, problems = agree(lambda: imagery.DrawingEverywhere(paths), **OPTIONS[name])
    assert num_ours == num - 2 and problems == [], "but for the first two, which are computed both ways"


def test_an_image_that_cannot_be_read_raises_the_workers_own_error(paths, tmp_path):
    broken = tmp_path / "broken.jpg"
    with open(paths[0], "rb") as file:
        broken.write_bytes(file.read()[:400])
    many = paths[:30]
    many[17] = str(broken)
    num_ours, _, problems = agree(lambda: imagery.DrawingEverywhere(many), shuffle=False, epochs=2)
    assert num_ours >= 2 and problems, "until there"


def test_a_transform_that_is_replaced_between_epochs_counts_from_the_next_on(paths):
    crop, flip = imagery.TRANSFORMS["crop"], imagery.TRANSFORMS["jitter"]

    def between(dataset, epoch):
        dataset.transform = (crop, flip)[epoch % 2]

    num_ours, num, _ = agree(lambda: imagery.Photos(paths, crop), between=between)
    assert num_ours >= num - 6


def another_size(dataset):
    dataset.transform.transforms[0].size = (20, 20)


def another_type(dataset):
    torch.set_default_dtype(torch.float64)


def fewer(dataset):
    dataset.paths[:] = dataset.paths[:1] * len(dataset.paths)


@pytest.mark.parametrize("change", [another_size, another_type, fewer])
def test_what_changes_in_the_middle_of_a_pass_counts_from_the_next_on(paths, change, monkeypatch):
    """Workers were forked when the pass began."""

    def looked(ours):
        torch.manual_seed(0)
        dataset = imagery.Photos(list(paths), imagery.T.Compose([imagery.T.RandomCrop(16), imagery.T.ToTensor()]))
        loaders = Loaders()
        loaders.install()
        if ours:
            loaders.change({IN_PROCESS: True})
        try:
            loader, found = DataLoader(dataset, batch_size=4, num_workers=2), []
            for epoch in range(2):
                for number, batch in enumerate(loader):
                    found.append(batch)
                    if (epoch, number) == (0, 3):
                        change(dataset)
            return found, loaders.pipeline.pixels.num_batches
        finally:
            torch.set_default_dtype(torch.float32)
            loaders.remove()

    plain, (ours, num) = looked(False)[0], looked(True)
    assert difference(ours, plain) is None and num > 8


def test_what_asks_for_its_worker_is_left_to_workers(paths):
    num_ours, _, problems = agree(lambda: imagery.AskingWhoIt(paths))
    assert num_ours == 0 and problems == []


@pytest.mark.parametrize(
    "options",
    [
        {"persistent_workers": True},
        {"worker_init_fn": print},
        {"in_order": False},
        {"num_workers": 0},
        {"collate_fn": list},
        {"timeout": 60},
        {"multiprocessing_context": "spawn"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_kinds_of_workers_are_left_as_they_are(paths, options):
    loader = DataLoader(imagery.DrawingEverywhere(paths), **{"num_workers": 2, **options})
    assert Loaders().pipeline.workers.why_not(loader) is not None


def test_the_next_batch_is_begun_as_soon_as_one_is_given(paths):
    loaders = Loaders()
    loader = DataLoader(imagery.DrawingEverywhere(paths), batch_size=4, num_workers=2)
    iterator = loaders.pipeline.workers.begin(loader, fast=True)
    assert type(iterator) is PixelsInProcess
    next(iterator)
    assert iterator._begun is not None
    *_, _ = iterator
    assert iterator._begun is None


def test_the_lever_applies(paths):
    loaders = Loaders()
    loaders.reopen = loaders.studies = True
    loader = DataLoader(imagery.DrawingEverywhere(paths), batch_size=4, num_workers=2)
    assert loaders.why_not("workers", loader, for_workers=True) is None
