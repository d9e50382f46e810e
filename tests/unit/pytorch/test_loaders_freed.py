"""Is a loader freed when the script drops it, with all that was known about it?"""

import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset  # noqa: E402

from flatout.frameworks.pytorch.input.loaders import Loaders  # noqa: E402


class Rows(Dataset):
    def __init__(self):
        self.rows = torch.arange(24.0).reshape(12, 2)

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
    "fused_fetch": lambda loaders: loaders.parts.fused.engage(True),
    "sample_store": lambda loaders: loaders.parts.stored.engage(True),
    "decoded_store": lambda loaders: loaders.parts.decoded.engage(True),
    "read_ahead": lambda loaders: loaders.parts.files.engage(True),
    "virtual_workers": lambda loaders: loaders.set(in_process=True),
}


@pytest.mark.parametrize("name", ENGAGED)
def test_a_loader_and_its_dataset_are_freed(name, loaders):
    ENGAGED[name](loaders)
    dataset = Rows()
    loader = DataLoader(dataset, batch_size=4, num_workers=2 if name == "virtual_workers" else 0)
    for _ in range(3):
        assert len(list(loader)) == 3
    gone = [weakref.ref(dataset), weakref.ref(loader)]
    del dataset, loader
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
