"""On a GPU the backward runs in a thread of its own; here a thread that the test starts stands for it."""

import threading
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from flatout.frameworks.pytorch.parallel.sharded_tensor import in_rows  # noqa: E402
from flatout.frameworks.pytorch.seams.blocks import BlockCall  # noqa: E402


def elsewhere(act):
    """Do it in another thread, and raise here what it raises there."""
    raised = []

    def run():
        try:
            act()
        except Exception as problem:
            raised.append(problem)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


class InBackward(torch.autograd.Function):
    """Calls something where gradients come back."""

    @staticmethod
    def forward(ctx, x, act):
        ctx.act = act
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        with torch.enable_grad():
            ctx.act()
        return grad, None


def test_a_block_that_is_recomputed_in_the_backward_is_computed_as_its_forward_was():
    block, seen = nn.Linear(2, 2), []
    owner = SimpleNamespace(inside=False, thread=threading.get_ident())
    seam = BlockCall(block, lambda module, x: seen.append("ours") or module._call_impl(x), owner)
    seam.num_calls = 1
    seam.install()
    x = torch.ones(2, requires_grad=True)
    elsewhere(lambda: block(x))
    assert seen == [], "a thread of the script's own"
    out = InBackward.apply(x, lambda: block(x)).sum()
    elsewhere(out.backward)
    assert seen == ["ours"]
    seam.remove()


def test_a_model_that_is_checkpointed_whole_is_recomputed_under_the_levers_of_its_forward(watch):
    watched = watch()
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train(num):
        for _ in range(num):
            optimizer.zero_grad()
            loss = checkpoint(model, torch.randn(4, 8), use_reentrant=False).float().pow(2).mean()
            elsewhere(loss.backward)
            optimizer.step()

    train(10)
    watched.pytorch.engage({"bf16": {}})
    (call,) = watched.pytorch.calls.found
    num = call.num_calls
    train(2)
    assert call.num_calls == num + 2, "what is recomputed is no call of the script's"
    assert watched.pytorch.evidence()[0]["bf16"]


def test_a_sharded_parameter_is_gathered_in_a_backward_and_refused_to_other_threads():
    group = SimpleNamespace(
        world=1, rank=0, ranks=(0,), gather=lambda tags, name: tags[None], joined=lambda pieces, *_: pieces
    )

    def refuse(problem):
        raise problem

    placement, part, whole = in_rows((4, 2), group, refuse), torch.ones(4, 2), []
    with pytest.raises(Exception, match="a thread of the script's"):
        elsewhere(lambda: placement.gathered(part))
    out = InBackward.apply(torch.ones(1, requires_grad=True), lambda: whole.append(placement.gathered(part)))
    elsewhere(out.backward)
    assert torch.equal(whole[0], part)
