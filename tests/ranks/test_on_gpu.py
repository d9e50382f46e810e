"""On a GPU: a world of one with NCCL, in each mode. What needs a second device has no test here."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from . import scenarios
from .on_ranks import alone, on_ranks
from .test_communication import FURTHEST_OF_BF16
from .test_replicate import FURTHEST, distance

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


def words_on_a_gpu() -> scenarios.Trained:
    torch.manual_seed(3)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.Sequential(
        nn.Linear(8, 16), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), nn.Linear(16, 5)
    ).cuda()  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    said = []
    for x, y in scenarios.batches():
        x, y = x.cuda().unsqueeze(1), y.cuda()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).squeeze(1), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        said.append([round(loss.item(), 3), round(norm.item(), 3)])
    with torch.no_grad():
        said.append(round(model(x).sum().item(), 2))
    left = scenarios.left(said, model)
    left.state = [one.cpu() for one in left.state]
    return left


@pytest.mark.parametrize("mode", ["replicate", "shard"])
def test_bf16_gradients_on_a_gpu_train_the_same_but_for_their_rounding(mode):
    wanted = alone(words_on_a_gpu)
    (found,) = on_ranks(1, words_on_a_gpu, mode, in_bf16=True)
    assert 0 < distance(found.state, wanted.state) <= FURTHEST_OF_BF16


@pytest.mark.parametrize("mode", ["replicate", "shard"])
def test_a_world_of_one_ends_where_one_process_ends(mode):
    wanted = alone(words_on_a_gpu)
    (found,) = on_ranks(1, words_on_a_gpu, mode)
    assert found.said == wanted.said
    assert distance(found.state, wanted.state) <= FURTHEST
