"""Ranks are compared ever so often, what differs by rounding is mended, and nothing goes unseen."""

from __future__ import annotations

import pytest
import torch

from flatout.frameworks.pytorch.parallel import equality
from flatout.frameworks.pytorch.parallel.equality import RunningCheck
from flatout.frameworks.pytorch.parallel.refusal import NotDivided

pytestmark = pytest.mark.smoke  # in this process


class Two:
    """Two ranks as seen by this one: the other one may hold something else."""

    def __init__(self):
        self.off, self.names = 0.0, []

    def gather(self, mine, name):
        self.names.append(name)
        other = mine.clone()
        if name == "comparison of ranks":
            other[0] += self.off != 0
        else:
            other += self.off
        return torch.stack([mine, other])

    def broadcast(self, tensor, name):
        return tensor


def test_ranks_are_compared_ever_more_rarely_and_then_at_every_160th_call():
    group, found = Two(), []
    check = RunningCheck(group, lambda: [torch.ones(3)])
    for number in range(1, 500):
        check.called()
        if group.names:
            found.append(number)
            group.names.clear()
    assert found == [20, 40, 80, 160, 320, 480]


def test_what_differs_by_rounding_is_mended_and_by_more_is_an_error():
    group = Two()
    check = RunningCheck(group, lambda: [torch.ones(3)])
    group.off = 1e-6
    assert check.compare()
    group.off = 0.1
    with pytest.raises(NotDivided, match="their parameters"):
        check.compare()


@pytest.mark.parametrize(
    "kind", [torch.float32, torch.bfloat16, torch.float64, torch.complex128, torch.int64, torch.bool]
)
def test_one_bit_of_any_tensor_counts(kind):
    whole = [
        torch.ones(4, 3, 5, 5, dtype=kind).contiguous(memory_format=torch.channels_last),
        torch.ones((), dtype=kind),
    ]
    before = equality._bits(whole)
    assert before == equality._bits([one.clone() for one in whole])
    whole[0][2, 1, 0, 3] = 0
    assert before != equality._bits(whole)
