"""Are the numbers those of plain where blocks are computed twice, with less kept in between and no trace left?"""

import copy
import pickle
import random
import weakref
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from flatout.frameworks.pytorch.levers import registry  # noqa: E402
from handmade import FACTS, MACHINE  # noqa: E402

LEVER = registry()["checkpointing"]
ENGAGED = {"checkpointing": {}}


class Block(nn.Module):
    """Draws from every generator, and remembers what it computed without keeping it alive."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer, self.drop = nn.LayerNorm(4), nn.Linear(4, 4), nn.Dropout(0.2)
        self.num_calls, self.inner = 0, None

    def forward(self, x, *, scale=1.0):
        self.num_calls += 1
        inner = self.layer(self.norm(x))
        self.inner = weakref.ref(inner)
        noise = random.random() + float(np.random.rand())
        return x + self.drop(F.gelu(inner)) * noise * scale


class WithStatistics(Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)


class InPlace(Block):
    def forward(self, x, *, scale=1.0):
        return super().forward(x.mul_(0.5), scale=scale)


class Unsaved(Block):
    """Needs its input for no gradient, so that plain does not mind what becomes of it."""

    def forward(self, x, *, scale=1.0):
        return super().forward(x * 2, scale=scale)


class Net(nn.Module):
    def __init__(self, kind=Block):
        super().__init__()
        self.first, self.blocks, self.head = nn.Linear(4, 4), nn.ModuleList(kind() for _ in range(3)), nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            if isinstance(block, Unsaved):
                x += block(x, scale=0.5)
            else:
                x = block(x, scale=0.5)
        return self.head(x)


def script(kind=Block, num=0):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model = Net(kind)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def train(num):
        for _ in range(num):
            optimizer.zero_grad()
            model(torch.randn(6, 4)).pow(2).mean().backward()
            optimizer.step()

    train(num)
    return model, train


def same(ours, theirs):
    first, second = ours.state_dict(), theirs.state_dict()
    return list(first) == list(second) and all(torch.equal(first[name], second[name]) for name in first)


def num_calls(model):
    return [block.num_calls for block in model.blocks]


@pytest.mark.parametrize("kind", [Block, WithStatistics, InPlace, Unsaved])
def test_the_weights_are_those_of_plain_bit_for_bit(kind, watch):
    plain, _ = script(kind, 30)
    watched = watch()
    model, train = script(kind, 10)
    watched.pytorch.engage(ENGAGED)
    train(10)
    proofs, missing = watched.pytorch.evidence()
    watched.pytorch.engage({})
    train(10)
    assert same(model, plain)
    if kind is Block:
        assert proofs == {"checkpointing": "3 of 3 blocks computed again in the backward"} and missing == {}
        assert num_calls(model) == [30 + 9] * 3, "the first step under the lever is looked at"
    else:
        assert missing == {"checkpointing": "no effect was seen"}
        assert num_calls(model) == [30] * 3


def test_gradients_agree_bit_for_bit_in_a_comparison(watch):
    watched = watch()
    _, train = script()
    for step in (10, 12, 14):
        watched.compare(step, ENGAGED, "gradients")
    train(18)
    assert [next(d for d in a.differences if d.check == "gradients").error for a in watched.answers] == [0, 0, 0]


def test_what_is_inside_the_blocks_is_not_kept_for_the_backward(watch):
    watched = watch()
    model, train = script(num=10)

    def is_kept():
        out = model(torch.randn(6, 4))
        found = [block.inner() is not None for block in model.blocks]
        out.sum().backward()
        return found

    assert is_kept() == [True] * 3
    watched.pytorch.engage(ENGAGED)
    train(2)
    assert is_kept() == [False] * 3
    watched.pytorch.engage({})
    assert is_kept() == [True] * 3


def test_keys_copies_and_pickles_show_nothing_of_it(watch):
    watched = watch()
    model, train = script(num=10)
    keys, attributes = list(model.state_dict()), [set(vars(m)) for m in model.blocks]
    watched.pytorch.engage(ENGAGED)
    train(3)
    assert list(model.state_dict()) == keys
    for block in model.blocks:
        block.inner = None  # a weak reference cannot be copied
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other(torch.randn(6, 4)).sum().backward()
        assert num_calls(other) == [n + 1 for n in num_calls(model)]
    watched.pytorch.engage({})
    assert [set(vars(m)) for m in model.blocks] == attributes


def test_hooks_of_the_script_are_called_as_often_as_in_plain(watch):
    watched = watch()
    model, train = script(num=10)
    called = []
    model.blocks[1].norm.register_forward_hook(lambda *_: called.append(1))
    watched.pytorch.engage(ENGAGED)
    train(6)
    assert len(called) == 6
    assert watched.pytorch.evidence()[0] == {"checkpointing": "2 of 3 blocks computed again in the backward"}


def test_an_evaluation_and_a_second_backward_are_as_in_plain(watch):
    watched = watch()
    model, train = script(num=10)
    watched.pytorch.engage(ENGAGED)
    train(3)
    model.eval()
    before = num_calls(model)
    with torch.no_grad():
        model(torch.randn(6, 4))
    assert num_calls(model) == [n + 1 for n in before]
    model.train()
    loss = model(torch.randn(6, 4)).sum()
    first = torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
    second = torch.autograd.grad(loss, [*model.parameters()])
    assert all(map(torch.equal, first, second))


def test_a_graph_made_under_the_lever_goes_backward_after_its_release(watch):
    watched = watch()
    model, train = script(num=10)
    watched.pytorch.engage(ENGAGED)
    train(3)
    state = torch.get_rng_state()
    loss = model(torch.ones(6, 4)).sum()
    watched.pytorch.engage({})
    found = torch.autograd.grad(loss, [*model.parameters()])
    assert all(gradient.isfinite().all() for gradient in found)
    assert not torch.equal(state, torch.get_rng_state())


def test_a_model_without_repeated_blocks_is_said(watch, workload):
    watched = watch()
    workload("mlp").train(8)
    watched.pytorch.engage(ENGAGED)
    missing = watched.pytorch.evidence()[1]
    assert missing == {"checkpointing": "no repeated blocks (three or more alike in one list or sequence)"}


@pytest.mark.parametrize(
    ("facts", "model", "reason"),
    [
        ({}, {}, None),
        ({"device": "cuda"}, {}, None),
        ({}, {"num_repeated_blocks": 0}, "no repeated blocks (three or more alike in one list or sequence)"),
        ({}, {"compiled": True}, "the script compiles its model itself"),
        ({"distributed": True}, {}, "distributed wrappers hook into the backward"),
    ],
)
def test_it_applies_to_models_with_repeated_blocks_that_are_the_scripts_alone(facts, model, reason):
    model = replace(FACTS.models[0], **{"num_repeated_blocks": 12, **model})
    assert LEVER.applies(replace(FACTS, models=(model,), **facts), MACHINE) == reason
    assert LEVER.only_by_name


def test_keywords_of_a_block_named_as_those_of_checkpointing_reach_it(watch):
    class Named(Block):
        def forward(self, x, *, debug, use_reentrant, function):
            return super().forward(x) * debug * use_reentrant * function

    from flatout.frameworks.pytorch.seams.recomputation import Recomputed

    model, way = Named(), Recomputed()
    words = {"debug": 2.0, "use_reentrant": 0.5, "function": 1.0}
    x = torch.randn(2, 4, requires_grad=True)
    plain = model(x, **words)
    way(model, x, **words)
    out = way(model, x, **words)
    out.sum().backward()
    assert way.num_recomputed == 1 and out.shape == plain.shape and x.grad is not None
