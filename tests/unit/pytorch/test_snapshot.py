"""A twin of a dataset has what a worker's copy would have, and shares the data."""

from collections import OrderedDict

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from torch import nn  # noqa: E402
from torch.utils.data import ConcatDataset, Dataset, Subset  # noqa: E402

from flatout.frameworks.pytorch.input.items.snapshot import MOST_ELEMENTS, copied  # noqa: E402


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor


class Cropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.size, self.weight, self.inner = 3, nn.Parameter(torch.ones(2)), nn.Linear(2, 2)


class Locked:
    """Copies itself otherwise than by its attributes."""

    def __getstate__(self):
        raise AssertionError("no code of the script's runs")


class Items(Dataset):
    def __init__(self):
        self.images, self.labels = torch.zeros(5, 2), np.arange(5)
        self.samples = [("a", {"boxes": [1, 2]}), ("b", {"boxes": [3]})]
        self.many = [[number] for number in range(MOST_ELEMENTS + 1)]
        self.by_name = OrderedDict(a=[1])
        self.transform, self.crop, self.lock = Scaled(2), Cropped(), Locked()
        self.itself, self.pair = self, (self.transform, 3)

    def __len__(self):
        return 5


def test_what_is_written_to_a_dataset_is_not_in_its_twin():
    dataset = Items()
    twin = copied(dataset)
    dataset.samples[0][1]["boxes"].append(9)
    dataset.samples.append(None)
    dataset.many.append(None)
    dataset.by_name["a"].append(None)
    dataset.transform.factor, dataset.crop.size = 5, 5
    assert twin.samples == [("a", {"boxes": [1, 2]}), ("b", {"boxes": [3]})]
    assert len(twin.many) == MOST_ELEMENTS + 1 and twin.by_name == {"a": [1]} and type(twin.by_name) is OrderedDict
    assert (twin.transform.factor, twin.crop.size) == (2, 3)


def test_data_are_shared_and_what_is_the_same_stays_the_same():
    dataset = Items()
    twin = copied(dataset)
    assert twin.images is dataset.images and twin.labels is dataset.labels and twin.crop.weight is dataset.crop.weight
    assert twin.many[0] is dataset.many[0] and twin.lock is dataset.lock
    assert twin.itself is twin and twin.pair[0] is twin.transform and twin is not dataset
    assert list(twin.crop.state_dict()) == list(dataset.crop.state_dict())


def test_datasets_of_datasets_have_twins_all_the_way_down():
    inner = Items()
    joined, part = ConcatDataset([inner, inner]), Subset(inner, [0, 1])
    twins = copied(joined), copied(part)
    inner.transform, part.indices[0] = None, 4
    assert all(one.transform.factor == 2 for one in twins[0].datasets) and twins[0].datasets[0] is twins[0].datasets[1]
    assert twins[1].dataset.transform.factor == 2 and twins[1].indices == [0, 1]


def test_a_dataset_that_copies_itself_is_left_alone():
    class Own(Items):
        def __copy__(self):
            raise AssertionError("no code of the script's runs")

    with pytest.raises(TypeError, match="copies itself"):
        copied(Own())
