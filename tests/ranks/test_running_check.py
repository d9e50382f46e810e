"""Comparing ranks takes a small share of a run, waiting for the slower one is none of it, and nothing goes unseen."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from flatout.frameworks.pytorch.parallel import running_check
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.parallel.running_check import MOST_SHARE, RunningCheck

pytestmark = pytest.mark.smoke  # in this process

STEP_S = 0.005


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


class Two:
    """Two ranks as seen by this one: the other one comes later to each exchange, and may hold something else."""

    def __init__(self, clock, *, local_world=2):
        self.clock, self.late_s, self.exchange_s, self.off, self.checked = clock, 0.004, 0.0003, 0.0, []
        self.me = SimpleNamespace(world=2, local_world=local_world)
        self.page = SimpleNamespace(check=self.checked.append)

    def gather(self, mine, name):
        other = mine.clone()
        if name == "comparison of ranks":
            other[0] += self.off != 0
            other[2] += self.late_s
        else:
            other += self.off
        self.clock.now_s += self.late_s + self.exchange_s
        return torch.stack([mine, other])

    def broadcast(self, tensor, name):
        return tensor


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(running_check, "perf_counter", clock)
    return clock


def summing(clock, took_s=0.0005):
    def parameters():
        clock.now_s += took_s
        return [torch.ones(3)]

    return parameters


def trained(check, clock, num_calls):
    for _ in range(num_calls):
        check.called()
        clock.now_s += STEP_S


def test_comparing_takes_no_more_than_its_share_from_the_first_one_on(clock):
    group = Two(clock)
    check = RunningCheck(group, summing(clock))
    begun_s = clock.now_s
    for _ in range(2000):
        trained(check, clock, 1)
        if len(group.checked) > 1:
            assert sum(group.checked) <= MOST_SHARE * (clock.now_s - begun_s)
    assert len(group.checked) > 20


def test_waiting_for_the_slower_rank_is_no_cost_where_clocks_are_the_same(clock):
    for local_world, wanted_s in ((2, 0.0008), (1, 0.0048)):
        group = Two(clock, local_world=local_world)
        trained(RunningCheck(group, summing(clock)), clock, 21)
        assert group.checked == [pytest.approx(wanted_s)]


def test_what_differs_by_rounding_is_mended_and_by_more_is_an_error(clock):
    group = Two(clock)
    check = RunningCheck(group, summing(clock))
    group.off = 1e-6
    trained(check, clock, 21)
    assert check.num_mended == 1
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
    before = running_check._bits(whole)
    assert before == running_check._bits([one.clone() for one in whole])
    whole[0][2, 1, 0, 3] = 0
    assert before != running_check._bits(whole)
