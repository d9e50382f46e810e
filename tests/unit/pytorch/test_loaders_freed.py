"""Is a loader freed when the script drops it, with all that was known about it?"""

import copy
import gc
import pickle
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset  # noqa: E402

from flatout.frameworks.pytorch.input.dataset_state import marks  # noqa: E402
from flatout.frameworks.pytorch.input.loaders import Loaders  # noqa: E402
from flatout.frameworks.pytorch.input.of_loader import NAME, known  # noqa: E402


class HoldsItsLoader(Dataset):
    """As modules of data do that make their loader themselves."""

    def __init__(self, num_workers=0):
        self.rows = torch.arange(24.0).reshape(12, 2)
        self.loader = DataLoader(self, batch_size=4, num_workers=num_workers)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index] * 2 + 1


@pytest.fixture
def loaders():
    ours = Loaders()
    ours.install()
    yield ours
    ours.remove()


ENGAGED = {
    "watched": lambda loaders: None,
    "fused_fetch": lambda loaders: loaders.pipeline.fused.engage(True),
    "sample_store": lambda loaders: loaders.pipeline.stored.engage(True),
    "decoded_store": lambda loaders: loaders.pipeline.decoded.engage(True),
    "read_ahead": lambda loaders: loaders.pipeline.files.engage(True),
    "virtual_workers": lambda loaders: loaders.set(in_process=True),
}


@pytest.mark.parametrize("name", ENGAGED)
def test_a_dataset_that_holds_its_own_loader_is_freed(name, loaders):
    ENGAGED[name](loaders)
    dataset = HoldsItsLoader(2 if name == "virtual_workers" else 0)
    for _ in range(3):
        assert len(list(dataset.loader)) == 3
    gone = [weakref.ref(dataset), weakref.ref(dataset.loader)]
    del dataset
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


def test_what_is_known_is_found_once_and_anew_where_it_does_not_hold():
    class Owner:
        pass

    owner, other, loader = Owner(), Owner(), DataLoader(range(3))
    found = iter(range(10))
    assert [known(loader, owner, lambda value: True, lambda: next(found)) for _ in range(2)] == [0, 0]
    assert known(loader, other, lambda value: True, lambda: next(found)) == 1
    assert known(loader, owner, lambda value: False, lambda: next(found)) == 2
    del owner
    gc.collect()
    assert len(loader.__dict__[NAME].by_owner) == 1


def test_a_copy_of_a_loader_has_nothing_of_it(loaders):
    loaders.pipeline.fused.engage(True)
    dataset = HoldsItsLoader()
    first = [batch.tolist() for batch in dataset.loader]
    before = marks(dataset)
    for copied in (copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))):
        other = copied(dataset.loader)
        assert [batch.tolist() for batch in other] == first
        assert other.__dict__[NAME].is_of(other) and not other.__dict__[NAME].is_of(dataset.loader)
    assert b"flatout.frameworks" not in pickle.dumps(DataLoader(dataset.rows).__class__) + pickle.dumps(
        {name: value for name, value in vars(dataset.loader).items() if name == NAME}
    )
    assert marks(dataset) == before


def test_what_is_known_is_no_change_of_a_dataset_that_holds_its_loader(loaders):
    dataset = HoldsItsLoader()
    before = marks(dataset)
    loaders.pipeline.fused.engage(True)
    list(dataset.loader)
    assert NAME in vars(dataset.loader) and marks(dataset) == before
