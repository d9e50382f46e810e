"""Do the FLOPs of known architectures agree with what is published or derived by hand, within 1 %?

The architectures, their formulas and sources are in `tests/architectures.py`; the table is published by
`benchmarks/claims/flops.py`.
"""

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from architectures import ARCHITECTURES, Transformer, block_flops, built, linear, tokens  # noqa: E402
from flatout.frameworks.pytorch.observe.census import OperationCounter  # noqa: E402
from flatout.frameworks.pytorch.observe.flops import FORMULAS, in_recomputation  # noqa: E402
from tiers import some  # noqa: E402

LARGE = ("ViT", "BERT", "ResNeXt", "VGG", "LSTM")
"""Those that take long: others have layers of these kinds, and recurrent ones have a test of their own."""

QUICK = [one for one in ARCHITECTURES if not one.name.startswith(LARGE)]
BY_NAME = pytest.mark.parametrize("architecture", some(ARCHITECTURES, *QUICK), ids=lambda a: a.name.partition(",")[0])
WITHIN = 0.01


def counted(body):
    with OperationCounter() as counter:
        body()
    return counter.census()


def step(model, *inputs):
    model(*inputs).sum().backward()


@BY_NAME
def test_a_forward_is_what_its_layers_sum_to(architecture):
    model, inputs = built(architecture)
    with torch.no_grad():
        assert counted(lambda: model(*inputs)).flops == pytest.approx(architecture.forward, rel=WITHIN)


@BY_NAME
def test_a_step_is_three_forwards_but_for_the_gradient_of_the_inputs(architecture):
    model, inputs = built(architecture)
    assert counted(lambda: step(model, *inputs)).flops == pytest.approx(architecture.training, rel=WITHIN)


@pytest.mark.parametrize(
    "architecture", [a for a in ARCHITECTURES if a.published], ids=lambda a: a.name.partition(",")[0]
)
def test_the_formula_is_what_others_have_published(architecture):
    assert architecture.forward == pytest.approx(architecture.published, rel=WITHIN)


# -- recomputation -------------------------------------------------------------------------------------------------

LAYERS, WIDTH, WORDS, TIME = 3, 64, 500, 48


@pytest.mark.parametrize("how", ["", "reentrant", "not reentrant"])
def test_recomputed_layers_are_no_work_of_the_models(how):
    """72 b s l h^2 (1 + s / 6h) + 6 b s h V a step; with every layer recomputed the hardware does 96 instead of 72.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC21, equation 3.
    """
    model = Transformer(LAYERS, WIDTH, 4, WORDS, causal=True, recompute=how)
    found = counted(lambda: step(model, *tokens(TIME)()))
    layers, logits = LAYERS * block_flops(WIDTH, TIME), linear(WIDTH, WORDS, TIME)
    assert found.flops == 3 * layers + 3 * logits
    scores = LAYERS * 2 * TIME**2 * WIDTH  # attention's backward computes these again in any case
    # not reentrant, it stops when all that was asked for is there: nobody asks for what the last product gives
    again = {"": 0, "reentrant": layers, "not reentrant": layers - LAYERS * linear(4 * WIDTH, WIDTH, TIME)}
    assert found.recomputed_flops == again[how] + scores


def test_a_function_that_recomputes_by_itself_is_seen_as_well():
    class Recomputing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight

        @staticmethod
        def backward(ctx, grad):
            x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
            with torch.enable_grad():
                out = x @ weight
            return torch.autograd.grad(out, (x, weight), grad)

    x, weight = torch.randn(5, 6, requires_grad=True), torch.randn(6, 7, requires_grad=True)
    found = counted(lambda: Recomputing.apply(x, weight).sum().backward())
    assert (found.flops, found.recomputed_flops) == (3 * 2 * 5 * 6 * 7, 2 * 5 * 6 * 7)


def test_a_gradient_of_a_gradient_is_work_and_no_recomputation():
    """A gradient penalty: the backward is recorded for gradients as well, and the engine calls it."""
    layer, x = nn.Linear(6, 7, bias=False), torch.randn(5, 6, requires_grad=True)

    def penalty():
        (grad,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()

    found = counted(penalty)
    assert found.recomputed_flops == 0 and found.flops >= 4 * 2 * 5 * 6 * 7


def test_outside_a_backward_nothing_is_a_recomputation():
    assert not in_recomputation()
    with torch.no_grad():
        layer, x = nn.Linear(3, 3), torch.randn(2, 3)
        assert counted(lambda: checkpoint(layer, x, use_reentrant=False)).recomputed_flops == 0


# -- single operations ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d, nn.Conv1d, nn.Conv3d])
def test_a_convolutions_backward_is_two_forwards_however_it_is_grouped(kind, groups):
    dims = 1 if kind is nn.Conv1d else 3 if kind is nn.Conv3d else 2
    layer, x = kind(6, 12, 3, groups=groups, bias=False), torch.randn(2, 6, *(5,) * dims, requires_grad=True)
    forward = counted(lambda: layer(x)).flops
    places = 5**dims if kind is nn.ConvTranspose2d else 3**dims
    assert forward == 2 * 2 * places * 3**dims * 6 * 12 // groups
    assert counted(lambda: step(layer, x)).flops == 3 * forward


def test_grouped_queries_attend_as_many_times_as_there_are_queries():
    q = torch.randn(1, 8, 16, 4, requires_grad=True)
    k, v = (torch.randn(1, 2, 16, 4, requires_grad=True) for _ in range(2))
    wanted = 2 * 2 * 8 * 16 * 16 * 4
    found = counted(lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True).sum().backward())
    assert found.flops == 3 * wanted


def test_values_of_another_width_than_the_keys_count_with_their_own():
    q, k = (torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(2))
    v = torch.randn(1, 2, 16, 24, requires_grad=True)
    wanted = 2 * 2 * 16 * 16 * (8 + 24)
    assert counted(lambda: F.scaled_dot_product_attention(q, k, v).sum().backward()).flops == 3 * wanted


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (lambda a, b: torch.einsum("bij,bjk->bik", a, b), 2 * 3 * 4 * 5 * 6),
        (lambda a, b: torch.baddbmm(torch.zeros(3, 4, 6), a, b), 2 * 3 * 4 * 5 * 6),
        (lambda a, b: torch.addbmm(torch.zeros(4, 6), a, b), 2 * 3 * 4 * 5 * 6),
        (lambda a, b: torch.zeros(4, 6).addmm_(a[0], b[0]), 2 * 4 * 5 * 6),
        (lambda a, b: a[0] @ b[0, :, 0], 2 * 4 * 5),
        (lambda a, b: torch.addmv(torch.zeros(4), a[0], b[0, :, 0]), 2 * 4 * 5),
        (lambda a, b: a[0, 0] @ b[0, :, 0], 2 * 5),
        (lambda a, b: F.embedding_bag(torch.arange(4), torch.randn(9, 5), torch.tensor([0, 2])), 0),
    ],
    ids=["einsum", "baddbmm", "addbmm", "addmm_", "mv", "addmv", "dot", "embedding_bag"],
)
def test_products_count_in_every_form(body, wanted):
    a, b = torch.randn(3, 4, 5), torch.randn(3, 5, 6)
    assert counted(lambda: body(a, b)).flops == wanted


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_recurrent_layers_count_each_step_of_each_direction(kind, gates, bidirectional):
    batch, time, width, hidden = 3, 20, 6, 7
    layer = kind(width, hidden, bidirectional=bidirectional)
    wanted = (1 + bidirectional) * 2 * batch * time * gates * hidden * (width + hidden)
    x = torch.randn(time, batch, width, requires_grad=True)
    assert counted(lambda: layer(x)).flops == wanted
    # where steps are single products, the first state is zero and has no gradient: less than one step of twenty
    assert counted(lambda: layer(x)[0].sum().backward()).flops == pytest.approx(3 * wanted, rel=0.02)


def test_the_recurrent_kernels_of_a_gpu_have_the_same_formula():
    layer, x = nn.LSTM(6, 7, 2, bidirectional=True), torch.randn(20, 3, 6)
    wanted = counted(lambda: layer(x)).flops
    assert FORMULAS["_cudnn_rnn"](x, list(layer.parameters()), 4, None) == wanted
    assert FORMULAS["_cudnn_rnn_backward"](x, list(layer.parameters()), 4, None) == 2 * wanted
