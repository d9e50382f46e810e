"""Does `batch_size` cut the same items into other batches, with the learning rate that belongs to them, and say so?"""

import threading
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler  # noqa: E402

from flatout.frameworks.pytorch.levers.batch_size import BatchSize, why_not_resized  # noqa: E402
from handmade import FACTS, LOADER, MACHINE  # noqa: E402
from optimizers import Own  # noqa: E402

ITEMS = torch.arange(64.0)
MAKE = {
    "SGD": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, weight_decay=0.01),
    "Adam": lambda p, lr: torch.optim.Adam(p, lr=lr),
    "AdamW": lambda p, lr: torch.optim.AdamW(p, lr=lr),
    "RMSprop": lambda p, lr: torch.optim.RMSprop(p, lr=lr),
}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(ITEMS)


class Downwards(torch.utils.data.Sampler):
    def __iter__(self):
        return iter(range(63, -1, -1))

    def __len__(self):
        return 64


def within(kind):
    """An optimizer of a class for which there is a rule, whose update is another's within its own."""

    def step(self, closure=None):
        kind.step(self)
        self.rates.append(self.param_groups[0]["lr"])

    own = type(kind.__name__, (kind,), {"step": step})

    def make(parameters, lr):
        optimizer = own(parameters, lr)
        optimizer.rates = []
        return optimizer

    return make


@pytest.fixture
def under(watch):
    """Attach with the lever, as a process that is started under it; at the end it is released."""
    started = []

    def start(num, **options):
        started.append(watch({"batch_size": {"num": num}}, **options))
        return started[-1]

    yield start
    for watched in started:
        if "batch_size" in watched.pytorch.session.engaged:
            watched.pytorch.session.release("batch_size")


def loader(size=8, **options):
    return DataLoader(ITEMS, batch_size=size, **{"shuffle": True, **options})


def train(make, size, lr, epochs=3, schedule=None):
    """What a script may do; returns its model, the rates that it reads, and its optimizer."""
    torch.manual_seed(5)
    batches, model = loader(size), nn.Linear(1, 1)
    model.batches = batches  # it lives as long
    optimizer = make(model.parameters(), lr)
    scheduler = schedule(optimizer, epochs * len(batches)) if schedule else None
    rates = []
    for _ in range(epochs):
        for batch in batches:
            optimizer.zero_grad()
            (model(batch[:, None] / 64) - batch[:, None].sin()).square().mean().backward()
            optimizer.step()
            rates.append(optimizer.param_groups[0]["lr"])
            if scheduler:
                scheduler.step()
    return model, rates, optimizer


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# -- batches -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num", [1, 24, 64])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_pass_gives_the_same_items_in_the_same_order_cut_otherwise(num, workers, under):
    torch.manual_seed(1)
    plain = list(loader())
    under(num)
    torch.manual_seed(1)
    changed = loader(num_workers=workers)
    batches = list(changed)
    assert torch.equal(torch.cat(batches), torch.cat(plain))
    assert {len(batch) for batch in batches[:-1]} <= {num} and len(batches) == len(changed) == -(-64 // num)
    assert changed.batch_size == num


LEFT = {
    "in order, as an evaluation": (lambda: loader(shuffle=False), "does not shuffle"),
    "dropping the last": (lambda: loader(drop_last=True), "drop_last"),
    "a sampler of the script's own": (lambda: loader(shuffle=None, sampler=Downwards()), "`Downwards`"),
    "batches of the script's own": (
        lambda: DataLoader(ITEMS, batch_sampler=BatchSampler(RandomSampler(ITEMS), 8, drop_last=False)),
        "makes its batches itself",
    ),
    "no batches": (lambda: DataLoader(ITEMS, batch_size=None, shuffle=None), "makes its batches itself"),
    "a stream": (lambda: DataLoader(Stream(), batch_size=8), "iterable"),
}


@pytest.mark.parametrize(("make", "why"), LEFT.values(), ids=LEFT)
def test_a_loader_that_it_must_not_change_is_left_as_it_is_with_a_reason(make, why, under):
    torch.manual_seed(2)
    plain = [batch.tolist() for batch in make()]
    under(32)
    torch.manual_seed(2)
    left = make()
    assert [batch.tolist() for batch in left] == plain
    assert why in why_not_resized(left)


def test_a_loader_of_fewer_items_than_a_batch_is_left_and_that_is_why_nothing_is_shown(under):
    watched = under(65)
    train(MAKE["SGD"], 8, 0.01)
    assert watched.pytorch.evidence() == ({}, {"batch_size": "no loader that it could change was made"})


def test_a_loader_that_is_made_anew_around_its_batches_has_them_and_the_facts_say_so(under):
    watched = under(32)
    batches = DataLoader(ITEMS, batch_sampler=loader().batch_sampler)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for _ in range(9):
        for batch in batches:
            optimizer.zero_grad()
            model(batch[:, None] / 64).square().mean().backward()
            optimizer.step()
    assert "18 updates" in watched.pytorch.evidence()[0]["batch_size"]
    assert BatchSize().applies(watched.pytorch.facts(), MACHINE) is None


def test_after_the_release_loaders_are_the_scripts_and_the_class_is_as_it_was(under):
    before = DataLoader.__init__
    watched = under(32)
    watched.pytorch.session.release("batch_size")
    assert loader().batch_size == 8 and DataLoader.__init__ is before
    model, _, _ = train(MAKE["SGD"], 8, 0.01)
    watched.pytorch.detach()
    assert torch.equal(weights(model), weights(train(MAKE["SGD"], 8, 0.01)[0]))


# -- learning rates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "factor"), [("SGD", 4), ("Adam", 2), ("AdamW", 2), ("RMSprop", 2)])
def test_the_training_is_the_one_that_has_the_size_and_the_rate_by_the_rule_to_the_bit(name, factor, under):
    by_hand, _, _ = train(MAKE[name], 32, 0.01 * factor)
    watched = under(32)
    model, rates, _ = train(MAKE[name], 8, 0.01)
    assert torch.equal(weights(model), weights(by_hand))
    assert {*rates} == {0.01}, "the script reads its own"
    proof = f"batches of 32 instead of 8; 6 updates of `{name}` at {factor} times its rate"
    assert watched.pytorch.evidence() == ({"batch_size": proof}, {})


def test_smaller_batches_have_a_smaller_rate(under):
    by_hand, _, _ = train(MAKE["SGD"], 4, 0.01)
    under(4)
    assert torch.equal(weights(train(MAKE["SGD"], 16, 0.04)[0]), weights(by_hand))


def test_the_proof_is_there_when_the_function_that_trained_has_returned_and_its_loader_is_gone(under):
    watched = under(32)
    del train(MAKE["SGD"], 8, 0.01)[0].batches
    assert not watched.pytorch.session.loaders.training
    assert "6 updates" in watched.pytorch.evidence()[0]["batch_size"]


def test_a_schedule_that_is_told_the_length_of_the_loader_follows_and_keeps_the_scripts_numbers(under):
    def cycle(factor):
        return lambda optimizer, num: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02 * factor, total_steps=num + 1)

    by_hand, scaled, _ = train(MAKE["SGD"], 32, 0.01, schedule=cycle(4))
    under(32)
    model, rates, optimizer = train(MAKE["SGD"], 8, 0.01, schedule=cycle(1))
    assert torch.allclose(weights(model), weights(by_hand), rtol=1e-5)
    assert rates == pytest.approx([rate / 4 for rate in scaled])
    assert optimizer.state_dict()["param_groups"][0]["max_lr"] == 0.02


def test_a_rate_that_is_a_tensor_is_the_same_tensor_after_the_update(under):
    under(32)
    rate = torch.tensor(0.01)
    model, rates, _ = train(MAKE["Adam"], 8, rate)
    assert all(one is rate for one in rates) and rate.item() == pytest.approx(0.01)
    assert weights(model).isfinite().all()


def test_an_update_within_another_one_has_the_rate_once_and_leaves_it_to_the_rest_of_the_outer(under):
    watched = under(32)
    _, rates, optimizer = train(within(torch.optim.SGD), 8, 0.01)
    assert {*rates} == {0.01}
    assert optimizer.rates == pytest.approx([0.04] * 6)
    assert watched.pytorch.session.kept["batch_size"].updates == {"SGD": 6}


def test_an_update_in_another_thread_leaves_the_rate_of_one_under_way(under):
    under(32)
    loader()
    other = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.01)
    seen = []

    class SGD(torch.optim.SGD):
        def step(self, closure=None):
            thread = threading.Thread(target=other.step)
            thread.start()
            thread.join()
            seen.append(self.param_groups[0]["lr"])

    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.01)
    optimizer.step()
    assert seen == [0.04] and optimizer.param_groups[0]["lr"] == 0.01


def test_batches_of_the_scripts_that_have_no_hash_are_not_ours(under):
    class Batches(BatchSampler):
        __hash__ = None

    watched = under(32)
    own = DataLoader(ITEMS, batch_sampler=Batches(RandomSampler(ITEMS), 8, drop_last=False))
    assert not watched.pytorch.session.kept["batch_size"].has_made(own)


def test_after_an_update_that_raised_the_next_one_has_the_rate_once_and_the_script_its_own(under):
    under(32)
    loader()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def closure():
        raise ValueError("no gradient")

    with pytest.raises(ValueError, match="no gradient"):
        optimizer.step(closure)
    before = weights(model).clone()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert torch.allclose(weights(model), before - 2.0)
    assert optimizer.param_groups[0]["lr"] == 0.5


# -- where nothing may be claimed ----------------------------------------------------------------------------------


def test_with_an_optimizer_without_a_rule_nothing_is_claimed(under):
    watched = under(32)
    kept = train(Own, 8, 0.01, epochs=9)
    why = "no rule is known for the learning rate of `Own`"
    assert watched.pytorch.evidence() == ({}, {"batch_size": why}) and kept
    assert "`Own`" in BatchSize().applies(watched.pytorch.facts(), MACHINE)


def test_with_loaders_of_two_sizes_the_rate_stays_and_nothing_is_claimed(under):
    watched = under(32)
    loader(4)
    by_hand, rates, _ = train(MAKE["SGD"], 8, 0.01)
    assert {*rates} == {0.01}
    (_, missing) = watched.pytorch.evidence()
    assert "batches of 4, 8" in missing["batch_size"]
    watched.pytorch.session.release("batch_size")
    watched.pytorch.detach()
    assert torch.equal(weights(by_hand), weights(train(MAKE["SGD"], 32, 0.01)[0]))


def test_a_training_on_batches_of_the_scripts_own_is_not_one_on_the_size(under):
    watched, said = under(32), []
    loader()
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batches in (ITEMS.split(8), loader(shuffle=False)):
        for batch in batches:
            optimizer.zero_grad()
            model(batch[:, None]).square().mean().backward()
            optimizer.step()
        said.append(watched.pytorch.evidence()[1]["batch_size"])
    assert "no loader was seen" in said[0] and "does not shuffle" in said[1]


def test_it_applies_to_one_process_with_loaders_that_can_be_cut_otherwise():
    lever, ready = BatchSize(), replace(FACTS, loaders=(replace(LOADER, why_not={"batch_size": None}),))
    assert lever.applies(ready, MACHINE) is None
    assert "several processes" in lever.applies(replace(ready, distributed=True), MACHINE)
    assert "no optimizer" in lever.applies(replace(ready, step_rhythm="loader"), MACHINE)
    assert "no DataLoader" in lever.applies(replace(ready, loaders=()), MACHINE)
    why = replace(LOADER, why_not={"batch_size": "the dataset is iterable"})
    assert lever.applies(replace(ready, loaders=(why,)), MACHINE) == "the dataset is iterable"
    assert lever.settings(ready, MACHINE) == ()


def test_the_facts_of_a_loader_say_whether_it_could_have_another_size(watch):
    watched = watch()
    kept = train(MAKE["SGD"], 8, 0.01)
    (facts,) = watched.pytorch.facts().loaders
    assert facts.refusal("batch_size") is None and facts.batch_size == len(next(iter(kept[0].batches))) == 8
