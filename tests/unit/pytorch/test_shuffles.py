"""Which samplers may be asked before the script asks?"""

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from flatout.frameworks.pytorch.input.shuffles import why_not_ahead  # noqa: E402

ITEMS = list(range(20))


def generator():
    return torch.Generator().manual_seed(7)


@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": True},
        {},
        {"shuffle": True, "generator": generator()},
        {"sampler": SubsetRandomSampler(range(13), generator())},
        {"sampler": WeightedRandomSampler([1.0] * 20, 30)},
        {"sampler": [1, 2, 3, 1, 2, 9]},
    ],
)
def test_samplers_that_draw_their_whole_order_at_once_may_be_asked_early(options):
    assert why_not_ahead(DataLoader(ITEMS, batch_size=4, **options)) is None


def test_samplers_of_the_scripts_own_are_never_asked_early():
    class Counting(SequentialSampler):
        pass

    for options, why in [
        ({"batch_sampler": [[1, 2]]}, "made up by a sampler"),
        ({"sampler": Counting(ITEMS)}, "a sampler of the script"),
        ({"sampler": RandomSampler(ITEMS, replacement=True, generator=generator())}, "bit by bit"),
        ({"batch_size": None}, "made up"),
    ]:
        assert why in why_not_ahead(DataLoader(ITEMS, **options))
    assert why_not_ahead(DataLoader(ITEMS, batch_sampler=BatchSampler(range(5), 2, False))) is None


def test_an_order_that_lies_in_a_list_may_change_on_the_way():
    loader = DataLoader(ITEMS, batch_size=4, sampler=[1, 2, 3])
    assert "a list" in why_not_ahead(loader, of_list=False)
