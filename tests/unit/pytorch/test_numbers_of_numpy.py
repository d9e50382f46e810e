"""Are sizes and counts that are NumPy's taken for what they are where a model is divided over ranks?"""

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from flatout.frameworks.pytorch.parallel.assembly import Share  # noqa: E402
from flatout.frameworks.pytorch.parallel.call_signature import has_numbers_of_floats, skeleton  # noqa: E402
from flatout.frameworks.pytorch.parallel.random_numbers import BatchRandom  # noqa: E402


@pytest.fixture
def noise():
    """Of rank 1 of 2, for a batch of 8."""
    return BatchRandom(Share.of((), (), 8, 2), 1, ())


@pytest.mark.parametrize("size", [4, np.int64(4), torch.tensor(4)])
def test_noise_of_one_size_is_a_part_of_the_whole_batchs_whatever_the_size_is_made_of(noise, size):
    torch.manual_seed(0)
    wanted = torch.rand(8)[4:]
    torch.manual_seed(0)
    with noise.on():
        assert torch.equal(torch.rand(size), wanted)
        torch.manual_seed(0)
        assert torch.equal(torch.rand((size,)), wanted)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: torch.randint(10, 20, (4,)),
        lambda: torch.randint(10, np.int64(20), (np.int64(4),)),
        lambda: torch.randint(10, np.int64(20), size=(4,)),
        lambda: torch.randint(np.int64(10), high=np.int64(20), size=(4,)),
        lambda: torch.randint(low=10, high=20, size=(4,)),
    ],
)
def test_whole_numbers_are_drawn_between_limits_of_any_kind_named_or_not(noise, draw):
    torch.manual_seed(0)
    wanted = torch.randint(10, 20, (8,))[4:]
    torch.manual_seed(0)
    with noise.on():
        assert torch.equal(draw(), wanted)


def test_numbers_beside_tensors_tell_calls_apart_and_floats_are_known():
    assert skeleton((torch.zeros(2), np.int64(3))) != skeleton((torch.zeros(2), np.int64(4)))
    assert has_numbers_of_floats({"loss": np.float32(0.5)}) and has_numbers_of_floats([np.float64(0.5), 1])
    assert not has_numbers_of_floats([np.int64(3), 3, True, "a", torch.ones(1)])
