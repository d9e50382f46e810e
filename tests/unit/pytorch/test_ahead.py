"""Is a batch that was begun early the one that plain would have given, whatever the training does meanwhile?"""

import random

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)

from flatout.frameworks.pytorch.input.items.ahead import MOST_MISSES, AheadFetcher, Peeked, why_not_ahead  # noqa: E402
from flatout.frameworks.pytorch.input.items.shadow import difference  # noqa: E402
from flatout.frameworks.pytorch.seams.random_states import RandomStates  # noqa: E402


class Noisy(Dataset):
    """Items that draw from all three streams."""

    def __init__(self, num=20, fails_at=None):
        self.num, self.fails_at = num, fails_at

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        if index == self.fails_at:
            raise KeyError(index)
        return index, torch.rand(2), random.random(), float(np.random.rand())


class Begun:
    """A batch that was drawn at once; what is left to do is to hand it out."""

    def __init__(self, indices, dataset):
        self.before, self.problem, self.dropped, self.indices = RandomStates(), None, False, indices
        try:
            self.batch = default_collate([dataset[index] for index in indices])
        except KeyError as problem:
            self.problem = problem
        self.after = RandomStates()

    def holds(self):
        return True

    def drop(self):
        self.dropped = True


class Beginner:
    """Fetches in two parts, as a fetcher with threads does."""

    def __init__(self, dataset, original):
        self.dataset, self.original, self.begun = dataset, original, []

    def fetch(self, indices):
        return self.finish(self.begin(indices))

    def begin(self, indices, *, states=False):
        self.begun.append(Begun(indices, self.dataset))
        return self.begun[-1]

    def finish(self, pending):
        assert not pending.dropped
        if pending.problem is not None:
            pending.before.restore()
            return self.original.fetch(pending.indices)
        return pending.batch


class Owner:
    engaged, num_batches = True, 0


def passes(make, meanwhile, *, on, stop=None, num=2):
    """Batches of some passes, random states after each step, and the fetchers."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    loader, found, states, fetchers, owner = make(), [], [], [], Owner()
    for _ in range(num):
        iterator = iter(loader)
        if on:
            iterator._sampler_iter = Peeked(iterator._sampler_iter, loader.sampler)
            inner = Beginner(loader.dataset, iterator._dataset_fetcher)
            iterator._dataset_fetcher = AheadFetcher(owner, inner, iterator._sampler_iter)
            fetchers.append(iterator._dataset_fetcher)
        own = [g for g in (loader.generator, getattr(loader.sampler, "generator", None)) if g is not None]
        try:
            for number, batch in enumerate(iterator):
                found.append(batch)
                meanwhile(number, own)
                states.append(RandomStates(own))
                if number == stop:
                    break
        except KeyError as problem:
            found.append(str(problem))
        states.append(RandomStates(own))
    return found, states, fetchers, owner


def check(make, meanwhile=lambda number, own: None, **options):
    plain, plain_states, *_ = passes(make, meanwhile, on=False, **options)
    ours, our_states, fetchers, owner = passes(make, meanwhile, on=True, **options)
    assert difference(ours, plain) is None
    assert [a.equals(b) for a, b in zip(our_states, plain_states, strict=True)] == [True] * len(plain_states)
    return fetchers, owner


def generator():
    return torch.Generator().manual_seed(7)


LOADERS = {
    "shuffled": lambda: DataLoader(Noisy(), batch_size=6, shuffle=True),
    "in order": lambda: DataLoader(Noisy(), batch_size=5),
    "a generator": lambda: DataLoader(Noisy(), batch_size=6, shuffle=True, generator=generator()),
    "a generator, whole batches": lambda: DataLoader(Noisy(), batch_size=5, shuffle=True, generator=generator()),
    "a generator, last dropped": lambda: DataLoader(
        Noisy(), batch_size=6, shuffle=True, generator=generator(), drop_last=True
    ),
    "a subset": lambda: DataLoader(Noisy(), batch_size=4, sampler=SubsetRandomSampler(range(13), generator())),
    "weighted": lambda: DataLoader(Noisy(), batch_size=4, sampler=WeightedRandomSampler([1.0] * 20, 30)),
    "a list": lambda: DataLoader(Noisy(), batch_size=4, sampler=[1, 2, 3, 1, 2, 9]),
    "an error": lambda: DataLoader(Noisy(fails_at=13), batch_size=4),
}


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("stop", [None, 1])
def test_batches_and_random_streams_are_those_of_plain_after_each_step(name, stop):
    assert why_not_ahead(LOADERS[name]()) is None
    _, owner = check(LOADERS[name], stop=stop)
    assert owner.num_batches > 0


@pytest.mark.parametrize("draw", [lambda: torch.rand(1), lambda: random.random(), lambda: np.random.rand()])
def test_a_guess_that_was_wrong_is_made_good_and_guessing_ends(draw):
    fetchers, owner = check(lambda: DataLoader(Noisy(40), batch_size=4, shuffle=True), lambda number, own: draw())
    assert owner.num_batches == 0
    for fetcher in fetchers:
        assert sum(begun.dropped for begun in fetcher._inner.begun) == MOST_MISSES


def test_a_step_that_draws_now_and_then_loses_only_those_guesses():
    _, owner = check(lambda: DataLoader(Noisy(60), batch_size=4), lambda number, own: number % 3 or torch.rand(1))
    assert owner.num_batches == 2 * 9


def test_the_scripts_generator_may_be_used_meanwhile():
    for name in ("a generator", "a generator, whole batches", "a generator, last dropped"):
        check(LOADERS[name], lambda number, own: torch.rand(3, generator=own[0]))


def test_two_passes_at_once_each_have_a_guess_of_their_own():
    def paired(on):
        torch.manual_seed(0)
        loader, found = LOADERS["shuffled"](), []
        iterators = [iter(loader), iter(loader)]
        for iterator in iterators if on else []:
            iterator._sampler_iter = Peeked(iterator._sampler_iter, loader.sampler)
            inner = Beginner(loader.dataset, iterator._dataset_fetcher)
            iterator._dataset_fetcher = AheadFetcher(Owner(), inner, iterator._sampler_iter)
        for one, other in zip(*iterators, strict=True):
            found += [one, other]
        return found, RandomStates()

    random.seed(0), np.random.seed(0)
    plain, plain_state = paired(False)
    random.seed(0), np.random.seed(0)
    ours, our_state = paired(True)
    assert difference(ours, plain) is None and our_state.equals(plain_state)


def test_samplers_of_the_scripts_own_are_never_asked_early():
    class Counting(SequentialSampler):
        pass

    for options, why in [
        ({"batch_sampler": [[1, 2]]}, "made up by a sampler"),
        ({"sampler": Counting(Noisy())}, "a sampler of the script"),
        ({"sampler": RandomSampler(Noisy(), replacement=True, generator=generator())}, "bit by bit"),
        ({"batch_size": None}, "made up"),
    ]:
        assert why in why_not_ahead(DataLoader(Noisy(), **options))
    assert why_not_ahead(DataLoader(Noisy(), batch_sampler=BatchSampler(range(5), 2, False))) is None


def test_an_error_of_the_sampler_comes_when_it_is_asked():
    def failing():
        yield 1
        raise OSError("gone")

    peeked = Peeked(failing(), None)
    assert (peeked.peek(), next(peeked), peeked.peek()) == (1, 1, None)
    with pytest.raises(OSError, match="gone"):
        next(peeked)
    with pytest.raises(StopIteration):
        next(peeked)


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(LOADERS)),
    st.lists(st.sampled_from(["torch", "python", "numpy", "own", "none"]), max_size=8),
    st.none() | st.integers(0, 5),
)
def test_whatever_the_steps_draw(name, draws, stop):
    def meanwhile(number, own):
        kind = draws[number % len(draws)] if draws else "none"
        if kind == "torch":
            torch.rand(1)
        elif kind == "python":
            random.random()
        elif kind == "numpy":
            np.random.rand()
        elif kind == "own" and own:
            torch.rand(1, generator=own[0])

    check(LOADERS[name], meanwhile, stop=stop, num=3)
