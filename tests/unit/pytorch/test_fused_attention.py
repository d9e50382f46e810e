"""Is attention that a script writes by hand computed as one operation, and everything else as it was?"""

import copy
import math
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from threading import get_ident

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from flatout.frameworks.pytorch.levers import registry  # noqa: E402
from flatout.frameworks.pytorch.seams.deferred_attention import Deferred, DeferredProducts, NotDeferred  # noqa: E402
from flatout.frameworks.pytorch.seams.patches import patched  # noqa: E402
from flatout.judge.agreement import judge  # noqa: E402
from flatout.records.facts import NOT_LOOKED_AT  # noqa: E402
from handmade import FACTS, MACHINE, MODEL  # noqa: E402

LEVER = registry()["fused_attention"]
B, H, T, D = 3, 2, 6, 8
CAUSAL = torch.ones(T, T).tril()
PADDED = torch.arange(T) < torch.tensor([6, 3, 0]).view(B, 1, 1, 1)  # the last sequence is all padding

PARTLY_PADDED = torch.arange(T) < torch.tensor([6, 3, 1]).view(B, 1, 1, 1)


@pytest.fixture
def products():
    found = DeferredProducts(get_ident())
    yield found
    found.remove()


def computed(attend, products=None, dtype=torch.float32, flat=False):
    """Output and gradients of an attention; the products are put off where they are given."""
    generator = torch.Generator().manual_seed(1)
    shape = (B * H, T, D) if flat else (B, H, T, D)
    q, k, v = leaves = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for _ in range(3)]
    if products is not None:
        products.on = True
    try:
        out = attend(*(one * 1 for one in leaves))
    finally:
        if products is not None:
            products.on = False
    (out.float() * torch.arange(out.shape[-1])).sum().backward()
    return out, q.grad, k.grad, v.grad


def nanogpt(q, k, v):
    att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    att = att.masked_fill(CAUSAL.view(1, 1, T, T)[:, :, :T, :T] == 0, float("-inf"))
    return F.dropout(F.softmax(att, dim=-1), 0.0, training=True) @ v


def annotated(q, k, v):
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    scores = scores.masked_fill(PADDED == 0, -1e9)
    return torch.matmul(nn.Dropout(0.1).eval()(scores.softmax(dim=-1)), v)


def bert(q, k, v):
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = scores / math.sqrt(D)
    scores = scores + (1.0 - PARTLY_PADDED.float()) * -10000.0
    return torch.matmul(nn.Softmax(dim=-1)(scores), v)


def llama(q, k, v):
    scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(D)
    scores = scores + torch.full((T, T), float("-inf")).triu(1)
    return torch.matmul(F.softmax(scores.float(), dim=-1).type_as(q).type(v.dtype), v)


def by_letters(q, k, v):
    q, k, v = (one.transpose(1, 2) for one in (q, k, v))
    energy = torch.einsum("nqhd, nkhd -> nhqk", q, k)
    energy = energy.masked_fill(CAUSAL == 0, float("-1e20"))
    return torch.einsum("nhql,nlhd->nqhd", torch.softmax(energy, dim=3), v)


def in_place(q, k, v):
    scores = q @ k.mT
    scores *= D**-0.5
    scores += torch.linspace(-1, 0, T)
    return scores.softmax(-1) @ v


def flat(q, k, v):
    scores = torch.bmm(q, k.transpose(1, 2)) / torch.sqrt(torch.tensor(8.0))
    scores.masked_fill_(PADDED.expand(B, H, 1, T).reshape(B * H, 1, T).logical_not(), -1e9)
    return torch.bmm(torch.softmax(scores, -1, torch.float32), v)


def bare(q, k, v):
    return torch.einsum("b h i j, b h j d -> b h i d", torch.einsum("b h i d, b h j d -> b h i j", q, k).softmax(-1), v)


def windowed(q, k, v):
    return (q @ k.mT).masked_fill((CAUSAL.triu(-2) == 0), -torch.inf).softmax(-1) @ v


def alibi(q, k, v):
    bias = -(torch.arange(T)[:, None] - torch.arange(T)).abs().float()
    return ((q @ k.mT) * D**-0.5 + bias.masked_fill(CAUSAL == 0, -torch.inf)).softmax(-1) @ v


def fewer_keys(q, k, v):
    return (q @ k[:, :, :4].mT).masked_fill(CAUSAL[:, :4] == 0, -torch.inf).softmax(-1) @ v[:, :, :4]


WAYS = [nanogpt, annotated, bert, llama, by_letters, in_place, flat, bare, windowed, alibi, fewer_keys]


@pytest.mark.parametrize("attend", WAYS)
def test_every_way_to_write_it_is_one_operation_with_the_same_numbers(attend, products):
    plain, fused = computed(attend, flat=attend is flat), computed(attend, products, flat=attend is flat)
    assert products.num_fused == 1 and not products.reasons
    assert "SoftmaxBackward" not in str(names_behind(fused[0]))
    for one, other in zip(plain, fused, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def names_behind(out):
    found, waiting = set(), [out.grad_fn]
    while waiting:
        node = waiting.pop()
        found.add(node.name())
        waiting += [other for other, _ in node.next_functions if other is not None]
    return found


@pytest.mark.parametrize(("dtype", "cast"), [(torch.float32, True), (torch.bfloat16, False), (torch.float64, False)])
@pytest.mark.parametrize("attend", [nanogpt, annotated, llama, by_letters])
def test_other_types_are_fused_and_give_the_type_that_plain_gives(dtype, cast, attend, products):
    def under(q, k, v):
        with torch.autocast("cpu", torch.bfloat16) if cast else nullcontext():
            return attend(q, k, v)

    if attend is llama and (cast or dtype != torch.float32):
        pytest.skip("its mask has another type than the scores")
    plain, fused = computed(under, dtype=dtype), computed(under, products, dtype=dtype)
    assert products.num_fused == 1, products.reasons
    for one, other in zip(plain, fused, strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * float(one.abs().max()))


BIAS = nn.Parameter(torch.zeros(T, T))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def stacked(q, k, v):
    return torch.stack([(q @ k.mT).softmax(-1), (q @ k.mT).softmax(-1)]).sum(0) @ v


def noting(q, k, v):
    w = (q @ k.mT).softmax(-1)
    w.retain_grad()
    out = w @ v
    return out + w.mean()


def scores_changed(q, k, v):
    scores = q @ k.mT
    weights = scores.softmax(-1)
    scores.zero_()
    return weights @ v


def partly_cast(q, k, v):
    with torch.autocast("cpu", torch.bfloat16):
        scores = q @ k.mT
    return scores.softmax(-1).float() @ v


class Marked(torch.Tensor):
    pass


ODD = {
    "a narrower product": (lambda q, k, v: (q @ k.mT).softmax(-1).bfloat16().float() @ v, "`bfloat16`"),
    "cast on the way": (lambda q, k, v: (q @ k.mT).softmax(-1).to(torch.float64) @ v.double(), ""),
    "a mask of another class": (lambda q, k, v: (q @ k.mT + CAUSAL.as_subclass(Marked)).softmax(-1) @ v, "`add`"),
    "partly under autocast": (partly_cast, "`softmax`"),
    "a wider product": (lambda q, k, v: (q @ k.mT).softmax(-1).double() @ v.double(), "`double`"),
    "a wider bias": (lambda q, k, v: (q @ k.mT + CAUSAL.double()).softmax(-1).float() @ v, "`add`"),
    "a larger mask": (lambda q, k, v: ((q[:1] @ k[:1].mT) + CAUSAL.expand(B, 1, T, T)).softmax(-1) @ v, "`add`"),
    "narrow values": (lambda q, k, v: (q @ k.mT).softmax(-1) @ v[..., :4], "`matmul`"),
    "summed": (lambda q, k, v: (q @ k.mT).sum(-1, keepdim=True) * v, ""),
    "dropped": (lambda q, k, v: F.dropout((q @ k.mT).softmax(-1), 0.5) @ v, "`dropout` draws other random numbers"),
    "over rows": (lambda q, k, v: (q @ k.mT).softmax(-2) @ v, "`softmax`"),
    "a small fill": (lambda q, k, v: (q @ k.mT).masked_fill(CAUSAL == 0, -10.0).softmax(-1) @ v, "`masked_fill`"),
    "a trained bias": (lambda q, k, v: (q @ k.mT + BIAS).softmax(-1) @ v, "`add`"),
    "a bias of scores": (lambda q, k, v: ((q @ k.mT) + (k @ q.mT)).softmax(-1) @ v, "`add`"),
    "no softmax": (lambda q, k, v: (q @ k.mT) @ v, "`matmul`"),
    "indexed": (lambda q, k, v: (q @ k.mT)[:, :, 0].softmax(-1)[:, :, None] @ v, ""),
    "weights transposed": (lambda q, k, v: (q @ k.mT).softmax(-1).mT @ v, "`__get__`"),
    "renormalised": (lambda q, k, v: (w := (q @ k.mT).softmax(-1)) / w.sum(-1, keepdim=True) @ v, "`sum`"),
    "scaled after the mask": (lambda q, k, v: (((q @ k.mT) + CAUSAL) * 2).softmax(-1) @ v, "`mul`"),
    "two masks": (lambda q, k, v: ((q @ k.mT) + CAUSAL + CAUSAL).softmax(-1) @ v, "`add`"),
    "other letters": (lambda q, k, v: torch.einsum("bhqd,bhkd->bhkq", q, k).softmax(-1) @ v, ""),
    "stacked": (stacked, "`stack`"),
    "a gradient kept": (noting, "`retain_grad`"),
    "moved and cast": (lambda q, k, v: (q @ k.mT).softmax(-1).to("cpu", torch.float) @ v, "`to`"),
    "asked for its type": (lambda q, k, v: v * len((q @ k.mT).type()), "`type`"),
    "cast oddly": (lambda q, k, v: (q @ k.mT).to(torch.float, copy=True).softmax(-1) @ v, "`to`"),
    "a list": (lambda q, k, v: torch.cat([(q @ k.mT), v], -1), ""),
    "iterated": (lambda q, k, v: sum((q @ k.mT).unbind(2))[:, :, None, :1] * v, ""),
    "printed": (lambda q, k, v: v * len(str(q @ k.mT)), ""),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_other_uses_give_every_bit_of_plain_and_are_put_off_no_more(odd, products):
    attend, reason = ODD[odd]
    torch.manual_seed(3)
    plain = computed(attend)
    noted = []
    for _ in range(4):
        torch.manual_seed(3)
        for one, other in zip(plain, computed(attend, products), strict=True):
            assert (one is None and other is None) or torch.equal(one, other)
        noted.append(dict(products.reasons))
    assert any(words.startswith(reason) for words in noted[0].values())
    assert noted[3] == noted[2] and products.num_fused == 0


@pytest.mark.parametrize("attend", [
    lambda q, k, v: Doubled.apply((q @ k.mT).softmax(-1)) @ v,  # would lose the gradient
    lambda q, k, v: (c := k.detach().clone(), w := (q.detach() @ c.mT), c.zero_(), w.softmax(-1) @ v)[-1],
    scores_changed,
])  # fmt: skip
def test_what_cannot_be_as_plain_raises_so_that_the_call_is_made_again_or_is_as_plain(attend, products):
    plain = computed(attend)
    try:
        found = computed(attend, products)
    except NotDeferred:
        return
    for one, other in zip(plain, found, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def test_products_of_other_threads_are_computed_at_once(products):
    products.on = True
    with ThreadPoolExecutor(1) as pool:
        assert type(pool.submit(torch.matmul, torch.ones(2, 3, 4), torch.ones(2, 4, 3)).result()) is torch.Tensor


def test_inference_has_plain_tensors(products):
    products.on = True
    with torch.inference_mode():
        q = torch.randn(2, 3, 4)
        assert torch.equal((q @ q.mT).softmax(-1) @ q, torch.softmax(q.matmul(q.mT), -1).matmul(q))


def test_it_passes_for_a_tensor(products):
    q, k = torch.randn(2, 4, 5, requires_grad=True), torch.randn(2, 6, 5)
    plain = torch.matmul(q, k.mT)
    products.on = True
    asked = q @ k.mT
    assert type(asked) is Deferred and isinstance(asked, torch.Tensor)
    assert (asked.shape, asked.size(-1), asked.dtype, asked.dim()) == ((2, 4, 6), 6, torch.float32, 3)
    products.on = False
    with torch.no_grad():
        assert torch.equal(asked * 2, plain * 2) and asked.requires_grad
    assert torch.equal(copy.deepcopy(asked.detach()), plain.detach())


# -- as a lever ----------------------------------------------------------------------------------------------------


class Layer(nn.Module):
    def __init__(self, attend, checkpointed=None):
        super().__init__()
        self.project, self.out, self.attend, self.checkpointed = (
            nn.Linear(16, 48),
            nn.Linear(16, 16),
            attend,
            checkpointed,
        )

    def mix(self, x):
        q, k, v = self.project(x).reshape(B, T, H, 3 * D).transpose(1, 2).chunk(3, -1)
        return self.out(self.attend(q, k, v).reshape(B, H, T, D).transpose(1, 2).reshape(B, T, 16))

    def forward(self, x):
        mixed = self.mix(x) if self.checkpointed is None else checkpoint(self.mix, x, use_reentrant=self.checkpointed)
        return x + mixed


def train(model, num):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(num):
        optimizer.zero_grad()
        model(torch.randn(B, T, 16).requires_grad_()).pow(2).mean().backward()
        optimizer.step()


def gpt(attend=nanogpt, **options):
    return nn.Sequential(*(Layer(attend, **options) for _ in range(3)))


def test_it_is_engaged_in_training_calls_alone_and_released_without_a_trace(watch):
    watched, model = watch(), gpt()
    train(model, 8)
    before = patched(), {**vars(torch.Tensor)}, torch.matmul, torch.bmm, {**vars(torch._VF)}
    assert watched.pytorch.facts().softmax and watched.pytorch.facts().attention == ()
    watched.pytorch.engage({"fused_attention": {}})
    train(model, 2)
    assert watched.pytorch.evidence() == ({"fused_attention": "6 times computed as one operation"}, {})
    model(torch.randn(B, T, 16)).sum().backward()
    with torch.no_grad():
        plain = model(torch.ones(B, T, 16))
    watched.pytorch.engage({})
    assert (patched(), {**vars(torch.Tensor)}, torch.matmul, torch.bmm, {**vars(torch._VF)}) == before
    with torch.no_grad():
        assert torch.equal(model(torch.ones(B, T, 16)), plain)


@pytest.mark.parametrize("checkpointed", [True, False])
def test_a_checkpoint_is_computed_again_as_it_was(checkpointed, watch):
    watched = watch()
    watched.engage(5, {"fused_attention": {}})
    train(gpt(checkpointed=checkpointed), 12)
    assert watched.pytorch.evidence()[1] == {}


@pytest.mark.parametrize("levers", [{"fused_attention": {}}, {"fused_attention": {}, "bf16": {}}])
def test_gradients_agree(levers, watch):
    watched = watch()
    for step in (12, 15, 18):
        watched.compare(step, levers, "gradients")
    train(gpt(), 24)
    judged = judge(watched.answers, "precision" if "bf16" in levers else "rounding", ("gradients",))
    assert judged.verdict == "agrees", judged.detail


def test_dropout_is_refused_by_name(watch):
    def dropped(q, k, v):
        return F.dropout((q @ k.mT).softmax(-1), 0.1) @ v

    watched, model = watch(), gpt(dropped)
    train(model, 8)
    watched.pytorch.engage({"fused_attention": {}})
    train(model, 2)
    missing = "`dropout` draws other random numbers when fused"
    assert watched.pytorch.evidence() == ({}, {"fused_attention": missing})


def test_a_model_that_keeps_its_weights_unread_is_fused_and_may_read_them_later(watch):
    class Keeping(Layer):
        def mix(self, x):
            q, k, v = self.project(x).reshape(B, T, H, 3 * D).transpose(1, 2).chunk(3, -1)
            self.kept = ((q @ k.mT) / D**0.5).softmax(-1)
            return self.out((self.kept @ v).transpose(1, 2).reshape(B, T, 16))

    watched, model = watch(), Keeping(None)
    train(model, 8)
    watched.pytorch.engage({"fused_attention": {}})
    x = torch.randn(B, T, 16)
    model(x)
    assert watched.pytorch.evidence()[0]
    kept = model.kept
    watched.pytorch.engage({})
    model(x)
    assert torch.equal(kept, model.kept) and torch.equal(kept.sum(-1), model.kept.sum(-1))


def test_a_call_that_it_breaks_is_made_again_as_plain(watch):
    watch.may_fail = True
    watched, model = watch(), gpt(lambda q, k, v: Doubled.apply((q @ k.mT).softmax(-1)) @ v)
    train(model, 8)
    x = torch.randn(B, T, 16)
    plain = model(x)
    watched.pytorch.engage({"fused_attention": {}})
    assert torch.equal(model(x), plain)
    assert "NotDeferred" in str(watched.pytorch.evidence()) + str(watched.listener.failures)


@pytest.mark.parametrize(("facts", "reason"), [
    ({"softmax": True}, None),
    ({}, "no softmax was seen in the model"),
    ({"attention": None}, NOT_LOOKED_AT),
    ({"softmax": True, "distributed": True}, "distributed wrappers put functions of their own around the model"),
    ({"softmax": True, "models": (replace(MODEL, compiled=True),)}, "the script compiles its model itself"),
])  # fmt: skip
def test_it_applies_where_a_model_takes_a_softmax_of_its_own(facts, reason):
    assert LEVER.applies(replace(FACTS, **{"attention": (), **facts}), MACHINE) == reason
