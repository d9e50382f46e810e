"""Which blocks of a model are alike, and what becomes of them where they are computed by one compiled code?"""

import copy
import io
import pickle
import shutil

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from flatout.frameworks.pytorch.seams.blocks import BlockCall, repeated_blocks  # noqa: E402

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler: `apt install g++`"
)


class Block(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.norm, self.layer, self.drop = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.layer(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self, num=4, recompute=None):
        super().__init__()
        self.blocks, self.head, self.recompute = nn.ModuleList(Block() for _ in range(num)), nn.Linear(4, 2), recompute

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.recompute is None else checkpoint(block, x, use_reentrant=self.recompute)
        return self.head(x)


def sizes(module):
    return sorted(len(group) for group in repeated_blocks(module))


# -- which are alike -----------------------------------------------------------------------------------------------


def test_blocks_of_one_list_or_sequence_are_alike_from_three_on():
    assert sizes(Net(4)) == [4] and sizes(Net(3)) == [3] and sizes(Net(2)) == []
    assert sizes(nn.Sequential(*(Block() for _ in range(5)))) == [5]


def test_blocks_of_other_sizes_are_groups_of_their_own():
    stages = nn.Sequential(*(Block(4) for _ in range(3)), Block(8), *(Block(6) for _ in range(4)))
    assert sizes(stages) == [3, 4]


def test_single_layers_and_parts_that_are_no_list_are_no_blocks():
    assert sizes(nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))) == []
    assert sizes(nn.Sequential(*(nn.Sequential(nn.ReLU()) for _ in range(6)))) == [], "nothing to learn in it"
    three = nn.Module()
    three.a, three.b, three.c = Block(), Block(), Block()
    assert sizes(three) == []


def test_the_outermost_blocks_are_taken_and_what_is_in_them_is_not():
    deep = nn.Sequential(*(nn.Sequential(Block(), Block(), Block()) for _ in range(3)))
    assert sizes(deep) == [3]
    assert sizes(nn.ModuleList([deep, nn.Sequential(Block(), Block(), Block())])) == [3, 3]


def test_one_block_that_stands_in_a_list_many_times_is_one():
    assert sizes(nn.Sequential(*[Block()] * 6)) == []


# -- the seam ------------------------------------------------------------------------------------------------------


class Owner:
    def __init__(self, thread):
        self.inside, self.thread = True, thread


@pytest.fixture
def seam():
    from threading import get_ident

    block = Block()
    made = BlockCall(block, lambda module, x: module._call_impl(x) * 0 + 7, Owner(get_ident()))
    made.install()
    made.block = block
    yield made
    made.remove()
    assert "_compiled_call_impl" not in vars(block)


def is_ours(out):
    return bool((out == 7).all())


def test_a_block_is_computed_otherwise_only_where_gradients_are_taken(seam):
    assert is_ours(seam.block(torch.ones(2, 4)))
    with torch.no_grad():
        assert not is_ours(seam.block(torch.ones(2, 4)))


def test_a_block_that_no_call_of_the_model_has_proven_is_not_computed_otherwise_outside(seam):
    seam._owner.inside = False
    assert not is_ours(seam.block(torch.ones(2, 4)))
    seam._owner.inside = True
    assert is_ours(seam.block(torch.ones(2, 4)))
    seam._owner.inside = False
    assert is_ours(seam.block(torch.ones(2, 4))), "what checkpoints activations computes it again"


def test_copies_pickles_and_replicas_of_a_block_are_the_scripts_own(seam):
    block = seam.block.eval()
    for one in (copy.deepcopy(block), copy.copy(block), pickle.loads(pickle.dumps(block))):
        assert vars(one).get("_compiled_call_impl") is None and not is_ours(one(torch.ones(2, 4)))
    replica = block._replicate_for_data_parallel()
    replica.layer = nn.Linear(4, 4)
    assert torch.equal(replica(torch.ones(2, 4)), replica.forward(torch.ones(2, 4)))
    assert b"flatout" not in pickle.dumps(block)


def test_a_block_that_the_script_has_compiled_is_left_alone():
    block = Block()
    block.compile(backend="eager")
    own = block._compiled_call_impl
    made = BlockCall(block, lambda module, x: x, Owner(0))
    made.install()
    assert block._compiled_call_impl is own
    made.remove()
    assert block._compiled_call_impl is own


# -- under the lever -----------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler(tmp_path_factory, monkeypatch):
    import torch._dynamo
    from torch._dynamo.utils import counters

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "compiled"))
    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


def train(model, optimizer, num=12):
    for _ in range(num):
        optimizer.zero_grad()
        model(torch.randn(3, 4, requires_grad=True)).pow(2).mean().backward()
        optimizer.step()


@pytest.mark.slow
@needs_compiler
def test_one_code_serves_all_blocks_agrees_toggles_and_leaves_no_trace(fresh_compiler, watch, settings_of_torch):
    watched, model = watch(), Net(10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    before, keys = settings_of_torch(), list(model.state_dict())
    watched.compare(6, {"compile": {"mode": "regional"}}, "gradients")
    train(model, optimizer)
    found = watched.difference()
    assert found.error < 1e-4 and found.random_states_equal, "dropout draws what plain draws"
    assert settings_of_torch() == before
    assert watched.pytorch.facts().models[0].num_repeated_blocks == 10

    watched.pytorch.engage({"compile": {"mode": "regional"}})
    train(model, optimizer, num=3)
    assert watched.pytorch.evidence()[0] == {"compile": "1 graph compiled"}, "one for ten blocks"
    file = io.BytesIO()
    torch.save(model, file)
    assert b"flatout" not in file.getvalue() and list(model.state_dict()) == keys
    model.eval()
    x = torch.randn(3, 4)
    with torch.no_grad():
        assert torch.equal(model(x), model._call_impl(x)), "evaluation is plain"
    model.train()
    for _ in range(3):
        watched.pytorch.engage({})
        assert not any("_compiled_call_impl" in vars(block) for block in model.blocks)
        train(model, optimizer, num=2)
        watched.pytorch.engage({"compile": {"mode": "regional"}})
        train(model, optimizer, num=2)
    assert fresh_compiler["stats"]["unique_graphs"] == 1, "the compiled form is kept"
    watched.pytorch.detach()
    assert settings_of_torch() == before


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_are_computed_again_in_the_backward_agree(reentrant, fresh_compiler, watch):
    torch.manual_seed(0)
    plain = Net(recompute=reentrant)
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    torch.manual_seed(0)
    watched, model = watch(), Net(recompute=reentrant)
    watched.engage(5, {"compile": {"mode": "regional"}})
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q, p)
    proofs, missing = watched.pytorch.evidence()
    assert missing == {"compile": "no effect was seen"} if reentrant else proofs == {"compile": "1 graph compiled"}
