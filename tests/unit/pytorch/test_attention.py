"""Is attention computed by the backend that was chosen, inside the model's training calls alone?"""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from flatout.frameworks.pytorch.levers import registry  # noqa: E402
from flatout.frameworks.pytorch.observe.attention import allowed, backends_of  # noqa: E402
from flatout.judge.agreement import judge  # noqa: E402
from flatout.records.ceilings import Accelerator  # noqa: E402
from flatout.records.facts import NOT_LOOKED_AT  # noqa: E402
from handmade import FACTS, MACHINE, MODEL  # noqa: E402

LEVER = registry()["attention"]


class Net(nn.Module):
    def __init__(self, dropout=0.0, by_hand=False):
        super().__init__()
        self.project, self.head, self.by_hand, self.seen = nn.Linear(16, 48), nn.Linear(16, 4), by_hand, []
        self.dropout = dropout

    def forward(self, x):
        self.seen.append((torch.is_grad_enabled(), allowed()["flash"]))
        q, k, v = self.project(x).reshape(len(x), 6, 2, 24).transpose(1, 2).chunk(3, -1)
        if self.by_hand:
            out = (q @ k.transpose(-2, -1) / 8**0.5).softmax(-1) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        return self.head(out.transpose(1, 2).reshape(len(x), 6, 16))


def train(model, num):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(num):
        optimizer.zero_grad()
        model(torch.randn(3, 6, 16)).pow(2).mean().backward()
        optimizer.step()


def test_the_chosen_backend_computes_training_calls_and_no_others(watch):
    watched, model, before = watch(), Net(), allowed()
    train(model, 8)
    assert watched.pytorch.facts().attention == ("flash",) and not watched.pytorch.facts().attention_chosen
    watched.pytorch.engage({"attention": {"backend": "math"}})
    assert watched.pytorch.evidence() == ({}, {"attention": "no effect was seen"})
    model.seen.clear()
    train(model, 2)
    assert watched.pytorch.evidence() == ({"attention": "attention computed by math"}, {})
    assert model.seen == [(True, False)] * 2 and allowed() == before
    with torch.no_grad():
        model(torch.randn(3, 6, 16))
    assert model.seen[-1] == (False, True)
    watched.pytorch.engage({})
    assert backends_of(model(torch.randn(3, 6, 16))) == ("flash",)


def test_probabilities_at_the_end_of_a_model_are_no_attention():
    x, by_hand = torch.randn(3, 6, 16), Net(by_hand=True)
    assert backends_of(by_hand(x)) == ("by hand",)
    assert backends_of(by_hand(x).softmax(-1)) == ("by hand",)
    assert backends_of(Net()(x).softmax(-1)) == ("flash",)


def test_a_backend_that_cannot_is_reported_as_no_effect(watch):
    watched, model = watch(), Net(dropout=0.1)
    train(model, 8)
    assert watched.pytorch.facts().attention == ("math",)
    watched.pytorch.engage({"attention": {"backend": "flash"}})
    train(model, 2)
    assert watched.pytorch.evidence() == ({}, {"attention": "no effect was seen"})


def test_a_call_that_raises_leaves_the_settings_of_the_script(watch):
    class Raising(Net):
        def forward(self, x):
            if len(x) == 1:
                raise ValueError("one")
            return super().forward(x)

    watch.may_fail = True
    watched, model, before = watch(), Raising(), allowed()
    watched.engage(5, {"attention": {"backend": "math"}})
    train(model, 8)
    with pytest.raises(ValueError, match="one"):
        model(torch.randn(1, 6, 16))
    assert allowed() == before


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_is_computed_again_by_the_same_backend(reentrant, watch):
    """Where another backend computes it again, PyTorch raises: what was kept has other shapes."""
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Net):
        def forward(self, x):
            return checkpoint(super().forward, x.requires_grad_(), use_reentrant=reentrant)

    watched, model, before = watch(), Checkpointed(), allowed()
    watched.engage(5, {"attention": {"backend": "math"}})
    watched.at(7, model.seen.clear)
    train(model, 12)
    assert {flash for _, flash in model.seen} == {False} and allowed() == before


def test_gradients_agree_within_rounding(watch):
    watched, model = watch(), Net()
    for step in (12, 15, 18):
        watched.compare(step, {"attention": {"backend": "math"}}, "gradients")
    train(model, 24)
    judged = judge(watched.answers, "rounding", ("gradients",))
    assert judged.verdict == "agrees", judged.detail


def test_attention_written_by_hand_is_none_and_a_run_does_not_look(watch):
    watched = watch()
    train(Net(by_hand=True), 8)
    assert watched.pytorch.facts().attention == ()
    watched.pytorch.detach()
    running = watch(trial=False)
    train(Net(), 8)
    assert running.pytorch.facts().attention is None


@pytest.mark.parametrize(
    ("facts", "reason", "backends"),
    [
        ({"device": "cpu"}, "no CUDA device is used", []),
        ({"attention": ("efficient",)}, None, ["flash", "cudnn", "math"]),
        ({"attention": ("flash", "math")}, None, ["flash", "efficient", "cudnn", "math"]),
        ({"attention": ()}, "no call of `scaled_dot_product_attention` was seen", []),
        ({"attention": None}, NOT_LOOKED_AT, []),
        ({"attention": ("math",), "attention_chosen": True}, "the script has switched backends off itself", []),
        ({"attention": ("flash",), "models": (replace(MODEL, compiled=True),)},
         "the script compiles its model itself, and the backends with it", []),
    ],
)  # fmt: skip
def test_it_applies_where_another_backend_may_compute_it(facts, reason, backends):
    facts = replace(FACTS, **{"device": "cuda", **facts})
    assert LEVER.applies(facts, MACHINE) == reason
    if reason is None:
        assert [s["backend"] for s in LEVER.settings(facts, MACHINE)] == backends


@pytest.mark.parametrize(("capability", "backends"), [("7.5", ["math"]), ("9.0", ["flash", "cudnn", "math"])])
def test_backends_for_16_bits_are_tried_beside_bf16_on_gpus_that_they_are_written_for(capability, backends):
    gpu = Accelerator(name="GPU", memory_bytes=2**34, compute_capability=capability)
    machine = replace(MACHINE, accelerators=(gpu,))
    facts = replace(FACTS, device="cuda", attention=("efficient",))
    assert [s["backend"] for s in LEVER.settings(facts, machine)] == backends
    assert LEVER.partners == ("bf16",)
