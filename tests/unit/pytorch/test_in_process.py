"""Do batches that are computed in place of workers leave everything as the workers' own would?"""

import gc
import multiprocessing

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402
    DataLoader,
    RandomSampler,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
)

from flatout.frameworks.pytorch.facts import find  # noqa: E402
from flatout.frameworks.pytorch.input.items import fused as fused_module  # noqa: E402
from flatout.frameworks.pytorch.input.items.shadow import difference  # noqa: E402
from flatout.frameworks.pytorch.input.loaders import Loaders  # noqa: E402
from flatout.frameworks.pytorch.levers import registry  # noqa: E402
from flatout.frameworks.pytorch.numerics.batches import compare_batches  # noqa: E402
from flatout.frameworks.pytorch.seams.calls import Calls  # noqa: E402
from flatout.frameworks.pytorch.seams.random_states import RandomStates  # noqa: E402
from flatout.frameworks.pytorch.session import Session  # noqa: E402
from handmade import MACHINE  # noqa: E402

ITEMS = torch.randn(90, 3)


class Told(Sampler):
    """Tells when it is asked."""

    def __init__(self):
        self.asked = []

    def __len__(self):
        return len(ITEMS)

    def __iter__(self):
        self.asked.append("begin")
        return self._numbers()

    def _numbers(self):
        for number in torch.randperm(len(ITEMS)).tolist():
            self.asked.append(number)
            yield number


def passes(in_process, *, stop=None, epochs=3, dataset=None, **options):
    """What a loop sees: batches, and the random states after each."""
    loaders = Loaders()
    loaders.install()
    try:
        if in_process:
            loaders.change({"in_process": True})
        if options.pop("own", False):
            options["generator"] = torch.Generator().manual_seed(5)
        if callable(options.get("sampler")):
            options["sampler"] = options["sampler"]()
        torch.manual_seed(2)
        dataset = TensorDataset(ITEMS, torch.arange(90)) if dataset is None else dataset
        loader = DataLoader(dataset, **{"batch_size": 4, "num_workers": 2, **options})
        batches, states = [], []
        for epoch in range(epochs):
            for number, batch in enumerate(loader):
                batches.append([part.clone() for part in batch])
                states.append(RandomStates([loader.generator]))
                if (epoch, number) == stop:
                    break
            states.append(RandomStates([loader.generator]))
        return batches, states, loader, loaders.num_changed
    finally:
        loaders.remove()


OPTIONS = {
    "in order": {},
    "shuffled": {"shuffle": True},
    "shuffled with a generator": {"shuffle": True, "own": True},
    "workers that are kept": {"shuffle": True, "persistent_workers": True},
    "far ahead": {"shuffle": True, "prefetch_factor": 9},
    "one worker": {"shuffle": True, "num_workers": 1, "drop_last": True},
    "weighted": {"sampler": lambda: WeightedRandomSampler([1.0] * 90, 50)},
    "with replacement": {"sampler": lambda: RandomSampler(range(90), replacement=True, num_samples=70)},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("stop", [None, (1, 3)])
def test_batches_and_random_streams_are_those_of_workers_after_each_batch(name, stop):
    plain, plain_states, _, none = passes(False, stop=stop, **OPTIONS[name])
    ours, our_states, _, num = passes(True, stop=stop, **OPTIONS[name])
    assert difference(ours, plain) is None and (none, num) == (0, 3)
    assert all(a.equals(b) for a, b in zip(plain_states, our_states, strict=True))
    assert not multiprocessing.active_children()


def test_a_sampler_is_asked_when_workers_would_have_asked_it():
    asked = [passes(on, epochs=1, stop=(0, 5), sampler=Told)[2].sampler.asked for on in (False, True)]
    assert asked[0] == asked[1]
    assert len(asked[0]) > 4 * 6, "workers are ahead"


def test_an_exception_is_the_workers_own_with_no_word_of_ours():
    said = []
    for on in (False, True):
        with pytest.raises(IndexError) as caught:
            passes(on, sampler=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 99, 1], epochs=1)
        said.append(str(caught.value))
        assert caught.value.__context__ is None and caught.value.__cause__ is None
    assert said[0] == said[1] and "worker process" in said[0]
    del caught
    gc.collect()  # the traceback and its frames hold the workers' iterator and each other


def test_where_items_are_not_what_was_read_workers_go_on(monkeypatch):
    plain, plain_states, *_ = passes(False, shuffle=True)
    number = 0

    def differs(self, batch, own):
        nonlocal number
        number += 1
        self.num_batches += 1
        return "planted" if number == 2 else None

    monkeypatch.setattr(fused_module.Shadow, "of_batch", differs)
    ours, our_states, *_ = passes(True, shuffle=True)
    assert difference(ours, plain) is None and number == 2
    assert all(a.equals(b) for a, b in zip(plain_states, our_states, strict=True))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"num_workers": 0}, "no workers"),
        ({"worker_init_fn": print}, "begin with a function"),
        ({"in_order": False}, "out of order"),
        ({"collate_fn": list}, "function of the script's"),
    ],
)
def test_loaders_that_do_not_come_into_question_say_why(options, why):
    loader = DataLoader(TensorDataset(ITEMS), **{"num_workers": 2, **options})
    assert why in fused_module.FusedFetch().why_not(loader, for_workers=True)


@pytest.mark.parametrize(("lever", "workers"), [("virtual_workers", 2), ("fused_fetch", 0)])
def test_the_lever_applies_where_the_dataset_is_read_shows_its_effect_and_is_released(lever, workers):
    loaders = Loaders()
    loaders.reopen = loaders.studies = True
    loaders.install()
    session = Session(Calls(), loaders, registry())
    try:
        loader = DataLoader(TensorDataset(ITEMS), batch_size=3, num_workers=workers)
        loaders.note(loader, 1)
        facts = find(session, 1)
        assert session.levers[lever].applies(facts, MACHINE) is None
        other = {"virtual_workers": "fused_fetch", "fused_fetch": "virtual_workers"}[lever]
        assert "workers" in session.levers[other].applies(facts, MACHINE)
        session.engage_exactly({lever: {}})
        assert session.evidence() == ({}, {lever: "no effect was seen"})
        assert torch.equal(torch.cat([batch for (batch,) in loader]), ITEMS)
        proof = session.evidence()[0][lever]
        assert proof in ("1 pass without the script's workers", "28 batches computed at once")
        agreement = compare_batches(session, {lever: {}})
        assert (agreement.error, agreement.random_states_equal) == (0.0, True)
        session.engage_exactly({})
        assert type(iter(loader).inner).__name__.startswith("_Multi" if workers else "_Single")
    finally:
        loaders.remove()


GAINS = {"gain": 1.0}


class Scaled(TensorDataset):
    def __getitem__(self, k):
        return self.tensors[0][k] * GAINS["gain"]


class Counted(TensorDataset):
    """Nobody reads what its items are made of."""

    def __getitem__(self, k):
        self.num = getattr(self, "num", 0) + 1
        return self.tensors[0][k] * self.num


@pytest.mark.parametrize("lever", ["fused_fetch", "sample_store", "read_ahead"])
def test_a_lever_of_the_input_that_shows_no_effect_says_why_where_that_is_known(lever):
    loaders = Loaders()
    session = Session(Calls(), loaders, registry())
    loader = DataLoader(Counted(ITEMS), batch_size=8)
    loaders.note(loader, 1)
    session.engage_exactly({lever: {}})
    proofs, missing = session.evidence()
    assert not proofs
    assert missing == {lever: session.levers[lever].why_not(session, loader)}


def test_a_loader_that_was_left_to_plain_says_why_ahead_shows_no_effect():
    loaders = Loaders()
    session = Session(Calls(), loaders, registry())
    loader = DataLoader(Counted(ITEMS), batch_size=8, num_workers=0, shuffle=True)
    session.engage_exactly({"ahead": {"num": 1}})
    list(loaders.open(loader).iterator)
    loaders.note(loader, 1)
    (why,) = session.evidence()[1].values()
    assert why in next(iter(loaders.said), "") and why


def test_items_that_read_what_the_script_may_change_outside_the_dataset_are_left_to_workers():
    loaders = Loaders()
    loaders.studies = True
    loader = DataLoader(Scaled(ITEMS), batch_size=8, num_workers=2)
    assert "`GAINS`" in loaders.parts.fused.why_not(loader, for_workers=True)
    assert loaders.parts.fused.why_not(DataLoader(Scaled(ITEMS), batch_size=8)) is None
