"""Does oneDNN round where the model computes, and nowhere else, and is its setting the script's own everywhere else?"""

from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from flatout.frameworks.pytorch.levers import matmul_bf16, registry  # noqa: E402
from handmade import FACTS, MACHINE, MODEL  # noqa: E402

SIZE = 32


def rounds() -> bool:
    """Whether a float32 product on this CPU can be rounded at all."""
    before = matmul_bf16._read()
    matmul_bf16._write_bfloat16()
    try:
        return matmul_bf16._probe_is_rounded()
    finally:
        matmul_bf16._write(before)


needs_rounding = pytest.mark.skipif(not rounds(), reason="oneDNN rounds no float32 product on this CPU")


def product() -> bool:
    """Whether a product is rounded now."""
    return matmul_bf16._probe_is_rounded()


class Looking(nn.Module):
    """Notes in forward and backward whether products are rounded."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(SIZE, SIZE), []

    def forward(self, x):
        self.seen.append(("forward", torch.is_grad_enabled(), product()))
        out = self.layer(x)
        if out.requires_grad:
            out.register_hook(lambda grad: self.seen.append(("backward", True, product())))
        return out * 2


def train(model, num, loss=lambda out: out.pow(2).mean(), size=SIZE):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(num):
        loss(model(torch.randn(size, SIZE))).backward()
        optimizer.step()
        optimizer.zero_grad()


@needs_rounding
def test_products_are_rounded_in_forward_and_backward_and_not_outside(watch):
    watched, model, outside = watch(), Looking(), []
    watched.engage(5, {"matmul_bf16": {}})
    watched.at(8, model.seen.clear)

    def loss(out):
        outside.append(product())
        out.register_hook(lambda grad: outside.append(product()))
        return out.pow(2).mean()

    train(model, 12, loss)
    with torch.no_grad():
        model(torch.randn(SIZE, SIZE))
    assert {entry for entry in model.seen if entry[1]} == {("forward", True, True), ("backward", True, True)}
    assert model.seen[-1] == ("forward", False, False)
    assert not any(outside) and not product()


@needs_rounding
def test_the_proof_names_what_came_out_otherwise_than_in_float32(watch):
    watched, model = watch(), nn.Sequential(nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 32, 3, padding=1), nn.Flatten())
    watched.engage(5, {"matmul_bf16": {}})
    train(nn.Sequential(model, nn.Linear(512, 8)), 12)
    assert watched.pytorch.evidence()[0] == {"matmul_bf16": "convolutions and products rounded to bfloat16"}


def test_products_that_are_too_small_for_onednn_are_reported_as_no_effect(watch):
    watched, model = watch(), nn.Sequential(nn.Linear(SIZE, 2))
    watched.engage(5, {"matmul_bf16": {}})
    train(model, 12, size=4)
    assert watched.pytorch.evidence() == ({}, {"matmul_bf16": "no effect was seen"})


@needs_rounding
def test_a_backward_that_raises_leaves_the_rounding_no_longer_than_to_the_next_forward(watch):
    class Refusing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            if Refusing.refuses:
                raise ValueError("no")
            return grad

    class Net(nn.Linear):
        def forward(self, x):
            return super().forward(Refusing.apply(super().forward(x)))

    Refusing.refuses = False
    watched, model = watch(), Net(SIZE, SIZE)
    watched.engage(5, {"matmul_bf16": {}})
    train(model, 8)
    Refusing.refuses = True
    with pytest.raises(ValueError, match="no"):
        train(model, 1)
    Refusing.refuses = False
    model(torch.randn(SIZE, SIZE))
    assert not product()
    train(model, 2)
    assert not product()
    watched.pytorch.engage({})
    model(torch.randn(SIZE, SIZE)).sum().backward()
    assert not product()


@needs_rounding
def test_a_graph_that_outlives_the_lever_goes_backward_in_plain_precision(watch):
    watched, model = watch(), Looking()
    watched.engage(5, {"matmul_bf16": {}})
    train(model, 8)
    out = model(torch.randn(SIZE, SIZE)).sum()
    watched.pytorch.engage({})
    out.backward()
    assert model.seen[-1] == ("backward", True, False)


@needs_rounding
def test_what_the_script_sets_meanwhile_stays(watch):
    if not hasattr(torch.backends.mkldnn, "matmul"):
        pytest.skip("PyTorch before 2.9 has one setting for all")
    watched, model = watch(), Looking()
    watched.engage(5, {"matmul_bf16": {}})
    train(model, 8)
    torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    try:
        train(model, 2)
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        watched.pytorch.engage({})
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        assert watched.pytorch.facts().cpu_precision == "ieee"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"
    assert watched.pytorch.facts().cpu_precision == "none"


def test_the_older_setting_is_used_where_there_is_no_newer_one(monkeypatch):
    monkeypatch.setattr(matmul_bf16, "_parts", lambda: ())
    before = matmul_bf16._read()
    assert before == "highest"
    try:
        matmul_bf16._write_bfloat16()
        assert matmul_bf16._read() == "medium"
        matmul_bf16._write(before)
        assert matmul_bf16._read() == "highest"
    finally:
        for module in (torch.backends.mkldnn, torch.backends.cuda):
            if hasattr(getattr(module, "matmul", None), "fp32_precision"):
                module.matmul.fp32_precision = "none"


@pytest.mark.parametrize(
    ("facts", "machine", "reason"),
    [
        ({}, {}, None),
        ({}, {"cpu_features": ("avx2",)}, "no bfloat16 instructions"),
        ({}, {"cpu_features": ("avx512_bf16",)}, "no bfloat16 tiles"),
        ({}, {"cpu_features": ("bf16",), "architecture": "aarch64"}, None),
        ({"device": "cuda"}, {}, "GPU"),
        ({"autocast": True}, {}, "autocast"),
        ({"cpu_precision": "ieee"}, {}, "itself (ieee)"),
        ({"models": (replace(MODEL, dtypes=("bfloat16",)),)}, {}, "float32"),
        ({"models": ()}, {}, "no model"),
    ],
)
def test_it_applies_to_float32_models_on_a_cpu_with_bfloat16(facts, machine, reason):
    lever = registry()["matmul_bf16"]
    found = lever.applies(replace(FACTS, **facts), replace(MACHINE, **{"cpu_features": ("amx_bf16",), **machine}))
    assert found is None if reason is None else reason in found
