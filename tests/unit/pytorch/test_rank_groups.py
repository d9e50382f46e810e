"""What do ranks ask of a device beside their exchanges? Without a device and without other ranks."""

from datetime import timedelta
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from flatout.frameworks.pytorch.parallel import group as groups  # noqa: E402
from flatout.frameworks.pytorch.parallel.batch import _Normalised  # noqa: E402


def test_nccl_waits_as_long_as_all_exchanges_do(monkeypatch):
    made = []

    class Nccl:
        class Options:
            _timeout = timedelta(minutes=10)

        def __init__(self, store, rank, world, options):
            made.append(options)

    monkeypatch.setattr(groups.dist, "ProcessGroupNCCL", Nccl, raising=False)
    monkeypatch.setattr(groups.dist, "PrefixStore", lambda name, store: store)
    monkeypatch.setattr(groups.Group, "processes", SimpleNamespace(_register_backend=lambda *_: None))
    group = object.__new__(groups.Group)
    group.store, group.rank, group.world, group.limit = None, 0, 2, timedelta(hours=2)
    group._has_cuda = False
    group.serve(torch.device("cuda", 0))
    assert [options._timeout for options in made] == [timedelta(hours=2)]


def test_nothing_is_copied_from_the_host_to_normalise_a_batch():
    class MadeOfPython(TorchDispatchMode):
        """Notes tensors that come from Python's numbers, which on a device are copied there and waited for."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func._overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    seen = []
    group = SimpleNamespace(gather=lambda row, name: torch.stack([row, row]))
    x = torch.randn(4, 3, 5, 5)
    with MadeOfPython():
        _Normalised.apply(x, None, None, group, (None, None, None), 1e-5, torch.nn.functional.batch_norm)
    assert "var_mean" in seen
    assert not {"lift_fresh", "_to_copy", "copy_", "scalar_tensor"} & {*seen}
