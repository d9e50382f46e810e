"""Does the comparison of batches see what workers would change, and leave everything as it was?"""

import random

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler  # noqa: E402

from flatout.frameworks.pytorch.numerics.batches import compare_batches  # noqa: E402
from flatout.frameworks.pytorch.seams.random_states import RandomStates  # noqa: E402
from flatout.frameworks.pytorch.seams.trees import digest  # noqa: E402

TWO = {"workers": {"num": 2}}


class Items(Dataset):
    def __init__(self, num=40):
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, k):
        return torch.tensor([k])


class RandomItems(Items):
    def __init__(self, draw):
        super().__init__()
        self.draw = draw

    def __getitem__(self, k):
        return k, self.draw()


class ByOwnNumbers(Items):
    """Augments from a generator that the dataset holds."""

    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)

    def __getitem__(self, k):
        return k, self.rng.random()


class Remembering(Sampler):
    """Another order at each pass, from a state of its own."""

    def __init__(self, num):
        super().__init__()
        self.num, self.epoch, self.rng = num, 0, random.Random(3)

    def __iter__(self):
        self.epoch += 1
        order = list(range(self.num))
        self.rng.shuffle(order)
        return iter(order)

    def __len__(self):
        return self.num


class DrawingAsItGoes(Remembering):
    def __iter__(self):
        for _ in range(self.num):
            yield int(torch.randint(self.num, ()))


@pytest.fixture
def compared(watch):
    """The difference for a loader that has trained in a watched script, and the script's framework."""

    def compare(loader, levers=TWO):
        watched = watch(trial=False)
        watched.pytorch.loaders.note(loader, 1)
        return compare_batches(watched.pytorch.session, levers), watched

    return compare


@pytest.mark.parametrize("num", [1, 5, 40])
@pytest.mark.parametrize("generator", [None, 5])
def test_deterministic_items_are_equal_however_short_the_loader_is(compared, num, generator):
    own = torch.Generator().manual_seed(generator) if generator else None
    found, _ = compared(DataLoader(Items(num), batch_size=4, num_workers=1, shuffle=True, generator=own))
    assert found.error == 0 and found.baseline_error == 0 and found.random_states_equal
    assert "`Items`" in found.detail


@pytest.mark.parametrize("draw", [torch.rand, np.random.rand, random.random], ids=["torch", "numpy", "python"])
def test_random_items_are_reported_as_different(compared, draw):
    loader = DataLoader(
        RandomItems(lambda: draw(1) if draw is not random.random else draw()), batch_size=4, num_workers=1
    )
    found, _ = compared(loader)
    assert found.error > 0.4 and found.baseline_error == 0, "the first worker of two draws as the only one"


def test_items_from_numbers_that_the_dataset_itself_moves_on_are_inconclusive(compared):
    found, _ = compared(DataLoader(ByOwnNumbers(), batch_size=4))
    assert found.baseline_error > 0


def test_a_sampler_that_remembers_is_drawn_from_as_it_is_and_not_moved_on(compared):
    sampler = Remembering(40)
    found, _ = compared(DataLoader(Items(), batch_size=4, num_workers=1, sampler=sampler))
    assert found.error == 0 and found.baseline_error == 0 and found.random_states_equal
    assert sampler.epoch == 0 and sampler.rng.random() == random.Random(3).random()


def test_a_sampler_with_a_generator_of_its_own_is_not_moved_on(compared):
    own = torch.Generator().manual_seed(3)
    before = own.get_state()
    found, _ = compared(DataLoader(Items(), batch_size=4, num_workers=1, sampler=RandomSampler(Items(), generator=own)))
    assert found.error == 0 and found.random_states_equal
    assert torch.equal(own.get_state(), before)


def test_a_sampler_that_draws_while_training_draws_is_reported_by_its_random_states(compared):
    found, _ = compared(DataLoader(Items(), batch_size=4, num_workers=1, sampler=DrawingAsItGoes(40)))
    assert found.error == 0 and not found.random_states_equal


def test_random_generators_and_settings_stand_where_they_stood(compared):
    own = torch.Generator().manual_seed(3)
    loader = DataLoader(
        RandomItems(lambda: (torch.rand(1), random.random())), batch_size=4, num_workers=1, shuffle=True, generator=own
    )
    before, attributes = RandomStates([own]), dict(vars(loader))
    _, watched = compared(loader)
    assert before.equals(RandomStates([own]))
    assert dict(vars(loader)) == attributes and watched.pytorch.loaders.settings == {}


def test_the_scripts_own_persistent_workers_and_its_pass_under_way_are_not_touched(compared):
    loader = DataLoader(Items(), batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
    passing = iter(loader)
    seen = next(passing)[:, 0].tolist()
    found, _ = compared(loader)
    assert found.error == 0 and found.random_states_equal
    for batch in passing:
        seen += batch[:, 0].tolist()
    assert sorted(seen) == list(range(40))
    assert len(list(loader)) == 10
    loader._iterator._shutdown_workers()


def test_an_evaluation_loader_is_not_what_is_compared(watch):
    watched = watch(trial=False)
    assert compare_batches(watched.pytorch.session, TWO) == "no training loader was seen"


def test_a_loader_that_is_made_anew_for_each_pass_is_compared_before_its_first_step_too(watch):
    watched = watch(trial=False)
    loader = DataLoader(Items(), batch_size=2, shuffle=True)
    under_way = iter(loader)
    next(under_way)
    assert compare_batches(watched.pytorch.session, TWO).error == 0.0


def test_a_comparison_in_a_trial_does_not_disturb_the_order_of_training(watch, workload):
    def labels(compare):
        torch.manual_seed(3)
        watched, script = watch(), workload("mlp")
        loader, seen = DataLoader(Items(), batch_size=2, num_workers=1, shuffle=True), []
        if compare:
            watched.at(5, lambda: watched.answers.append(watched.pytorch.compare(TWO, ("batches",))))
        for batch in loader:
            seen += batch[:, 0].tolist()
            script.train(1)
        watched.pytorch.detach()
        return seen, watched.answers

    plain, _ = labels(compare=False)
    compared, answers = labels(compare=True)
    assert compared == plain and answers[0].differences[0].error == 0


class Pair:
    def __init__(self, x):
        self.x = x


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([1.0]), torch.tensor([2.0])),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor([1]), torch.tensor([1], dtype=torch.int32)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        ({"x": torch.ones(1)}, {"y": torch.ones(1)}),
        ([1, 2], (1, 2)),
        (np.float32(1), np.float32(2)),
        (np.array(["a"], dtype=object), np.array(["b"], dtype=object)),
        (Pair(torch.ones(1)), Pair(torch.zeros(1))),
        ("text", "test"),
    ],
)
def test_any_difference_between_two_batches_shows(one, other):
    assert digest(one) != digest(other)


def test_equal_batches_are_equal_whatever_memory_they_lie_in():
    whole = torch.arange(10.0)
    assert digest(whole[2:4]) == digest(torch.tensor([2.0, 3.0]))
    assert digest([Pair(whole[2:4])]) == digest([Pair(whole[2:4].clone().share_memory_())])
    assert digest(torch.zeros(3, 4).t()) == digest(torch.zeros(4, 3))
    assert digest(torch.eye(2).to_sparse()) == digest(torch.eye(2).to_sparse())
