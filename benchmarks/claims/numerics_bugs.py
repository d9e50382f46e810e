"""The planted bugs: what levers of class exact and rounding must not do, each with the check that its lever names.

In: nothing. Out: a list of `Bug`s.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from numerics_output_bugs import (
    buffer_spoilt,
    each_output,
    memory_reused,
    one_other,
    rounded,
    shifted,
    valued,
    wholes_zero,
)
from numerics_particular import PARTICULAR
from numerics_planting import (
    Bug,
    Plant,
    Undo,
    around,
    attribute,
    batches,
    of_parameters,
    options,
    parameters_by_size,
    replaced,
    set_meanwhile,
    stepping,
    within,
)
from numerics_scripts import FAMILIES
from torch import nn
from torch.nn import functional as F

ALL = tuple(FAMILIES)
PLANTED_IN = {**FAMILIES, **PARTICULAR}
"""Every script that a bug is planted in, by name."""
DROPPING = ("lenet", "gpt", "lstm", "vae")
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d)


def all_of(*plants: Plant) -> Plant:
    """Several at once."""

    def plant(session: Any) -> Undo:
        undos = [one(session) for one in plants]
        return lambda: [undo() for undo in undos] and None

    return plant


# -- gradients -----------------------------------------------------------------------------------------------------


def lose(module: nn.Module) -> Undo:
    """The last parameter takes no part in the backward pass."""
    last = [*module.parameters()][-1]
    last.requires_grad_(False)

    def undo() -> None:
        last.requires_grad_(True)

    return undo


def in_type(dtype: torch.dtype) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """A linear layer or convolution in a narrower type."""

    def forward(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        weight, x = layer.weight.to(dtype), x.to(dtype)
        bias = None if layer.bias is None else layer.bias.to(dtype)
        if isinstance(layer, nn.Linear):
            return F.linear(x, weight, bias).float()
        return F.conv2d(x, weight, bias, layer.stride, layer.padding).float()

    return forward


def last_row(value: Any) -> Any:
    """The last example of a batch is the one before it: a tail that is not computed."""
    return torch.cat([value[:-1], value[-2:-1]]) if isinstance(value, torch.Tensor) and value.dim() else value


def half_precision(module: nn.Module, compute: Any, args: tuple, kwargs: dict) -> Any:
    """Outputs stay in bfloat16, and the loss is computed of them."""
    out = compute(*args, **kwargs)
    return tuple(o.bfloat16() for o in out) if isinstance(out, tuple) else out.bfloat16()


def autocast_left_on(session: Any) -> Undo:
    """A precision for the model that is not ended after it."""
    torch.set_autocast_enabled("cpu", True)
    inside = within(lambda _: _no_autocast())(session)

    def undo() -> None:
        inside()
        torch.set_autocast_enabled("cpu", False)

    return undo


def _no_autocast() -> Undo:
    torch.set_autocast_enabled("cpu", False)
    return lambda: torch.set_autocast_enabled("cpu", True)


def nan_at_zeros(module: nn.Module, compute: Any, args: tuple, kwargs: dict) -> Any:
    """A normalisation of the input that forgets that an example may be all alike."""
    x = args[0]
    rows = x.flatten(1).float()
    spread = rows.std(1)
    one = torch.where(spread > 0, torch.ones_like(spread), spread / spread)
    out = compute(*args, **kwargs)

    def times(o: torch.Tensor) -> torch.Tensor:
        return o * one.reshape(-1, *[1] * (o.dim() - 1))

    return tuple(times(o) for o in out) if isinstance(out, tuple) else times(out)


def overflow(module: nn.Module, compute: Any, args: tuple, kwargs: dict) -> Any:
    """exp without the maximum taken away first: infinite for large activations."""
    out = compute(*args, **kwargs)

    def through(o: torch.Tensor) -> torch.Tensor:
        limit = args[0].detach().float().abs().max()
        return o + 0 * torch.where(limit > 100, torch.exp(limit * 1e3), torch.zeros(()))

    return tuple(through(o) for o in out) if isinstance(out, tuple) else through(out)


def tanh_for_gelu(module: nn.Module, compute: Any, args: tuple, kwargs: dict) -> Any:
    """GELU by its approximation."""
    own = F.gelu
    kinds = [m for m in module.modules() if isinstance(m, nn.GELU)]
    undo = set_meanwhile([(m, "approximate", "tanh") for m in kinds])
    F.gelu = lambda x, approximate="none": own(x, approximate="tanh")
    try:
        return compute(*args, **kwargs)
    finally:
        F.gelu = own
        undo()


def no_mask(module: nn.Module, compute: Any, args: tuple, kwargs: dict) -> Any:
    """Attention that sees the future."""
    own = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = lambda *a, is_causal=False, **k: own(*a, **k)
    try:
        return compute(*args, **kwargs)
    finally:
        F.scaled_dot_product_attention = own


def untied(module: nn.Module) -> Undo:
    """A layer that shares its weight has a copy: its part of the gradient is lost."""
    head, own = module.head, module.head.weight
    copied = nn.Parameter(own.detach().clone())
    head.weight = copied

    def undo() -> None:
        head.weight = own

    return undo


def stale_input() -> Plant:
    """A buffer that is filled once: every later call of the same shape computes the first batch again."""
    kept: dict[Any, Any] = {}

    def change(module: nn.Module, compute: Any, args: tuple, kwargs: dict) -> Any:
        first = kept.setdefault((id(module), args[0].shape), args[0].detach().clone().roll(1, 0))
        return compute(first.to(args[0].dtype), *args[1:], **kwargs)

    return around(change)


# -- random numbers ------------------------------------------------------------------------------------------------


def other_numbers(module: nn.Module, compute: Any, args: tuple, kwargs: dict) -> Any:
    """A number is drawn that plain does not draw, and all later ones are others."""
    torch.rand(1)
    return compute(*args, **kwargs)


def drawn_after(module: nn.Module, compute: Any, args: tuple, kwargs: dict) -> Any:
    """A number is drawn after the model: this step is right, the next is not."""
    out = compute(*args, **kwargs)
    torch.rand(1)
    return out


def repeated(module: nn.Module, compute: Any, args: tuple, kwargs: dict) -> Any:
    """Every step draws the same mask (a seed in a captured graph); the stream goes on as plain's."""
    state = torch.get_rng_state()
    compute(*args, **kwargs)
    after = torch.get_rng_state()
    torch.manual_seed(5)
    out = compute(*args, **kwargs)
    torch.set_rng_state(after if not torch.equal(state, after) else state)
    return out


def stale(module: nn.Module, compute: Any, args: tuple, kwargs: dict) -> Any:
    """The stream stands still: the next step draws what this one drew."""
    state = torch.get_rng_state()
    out = compute(*args, **kwargs)
    torch.set_rng_state(state)
    return out


# -- statistics ----------------------------------------------------------------------------------------------------


def twice(module: nn.Module, compute: Any, args: tuple, kwargs: dict) -> Any:
    """The forward runs twice (a recomputation), and so do updates of batch statistics."""
    state = torch.get_rng_state()
    compute(*args, **kwargs)
    torch.set_rng_state(state)
    return compute(*args, **kwargs)


def norms(module: nn.Module, **values: Any) -> Undo:
    """Attributes of normalising layers are others meanwhile."""
    return set_meanwhile([(m, k, v) for m in module.modules() if isinstance(m, NORMS) for k, v in values.items()])


def biased_variance(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Running variance from the biased estimate."""
    dims = [d for d in range(x.dim()) if d != 1]
    with torch.no_grad():
        layer.num_batches_tracked.add_(1)
        layer.running_mean.lerp_(x.mean(dims), layer.momentum)
        layer.running_var.lerp_(x.var(dims, unbiased=False), layer.momentum)
    return F.batch_norm(x, None, None, layer.weight, layer.bias, True, 0.0, layer.eps)


# -- between backward and update, and the update -------------------------------------------------------------------


def clip_each(own: Any) -> Any:
    """Each parameter clipped by its own norm."""

    def clip(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        return [own([p], *args, **kwargs) for p in parameters][-1]

    return clip


def never_cleared(own: Any) -> Any:
    """Gradients are not cleared, because the next backward pass is taken to write them anew."""
    return lambda target, *args, **kwargs: None


def last_micro_batch(session: Any) -> Undo:
    """Each backward pass overwrites the gradient instead of adding to it."""

    def overwrite(parameter: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        def hook(gradient: torch.Tensor) -> torch.Tensor:
            return gradient if parameter.grad is None else gradient - parameter.grad

        return hook

    handles = [p.register_hook(overwrite(p)) for p in session.parameters() if p.requires_grad]
    return lambda: [handle.remove() for handle in handles] and None


def one_left_out(optimizer: torch.optim.Optimizer, own: Callable[[], Any]) -> Callable[..., Any]:
    """The parameter with the smallest gradient is not updated."""

    class Session:
        @staticmethod
        def parameters() -> Iterator[Any]:
            return (p for g in optimizer.param_groups for p in g["params"])

    def step(*_: Any, **__: Any) -> None:
        left = parameters_by_size(Session)[0]
        gradient, left.grad = left.grad, None
        own()
        left.grad = gradient

    return step


def decayed_twice(optimizer: torch.optim.Optimizer, own: Callable[[], Any]) -> Callable[..., Any]:
    """Weight decay beside the optimizer's own."""

    @torch.no_grad()
    def step(*_: Any, **__: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if group["weight_decay"] and parameter.grad is not None:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
        own()

    return step


def forgetful(optimizer: torch.optim.Optimizer, own: Callable[[], Any]) -> Callable[..., Any]:
    """Moments are lost at each update."""

    def step(*_: Any, **__: Any) -> None:
        optimizer.state.clear()
        own()

    return step


def moments_late(optimizer: torch.optim.Optimizer, own: Callable[[], Any]) -> Callable[..., Any]:
    """Step counters stand still, and with them the correction of the bias."""

    def step(*_: Any, **__: Any) -> None:
        before = {p: s["step"].clone() for p, s in optimizer.state.items() if "step" in s}
        own()
        for parameter, number in before.items():
            optimizer.state[parameter]["step"].copy_(number)

    return step


# -- what was kept when the lever was engaged, and is right only as long as nothing has moved ------------------------


def copied_once(session: Any) -> Undo:
    """Weights are copied when the lever is engaged, and never again."""
    kept = {id(call.module): {p: p.detach().clone() for p in call.module.parameters()} for call in session.calls.found}

    def prepare(module: nn.Module) -> Undo:
        own = [(p, p.data) for p in kept[id(module)]]
        for parameter, value in kept[id(module)].items():
            parameter.data = value.clone()
        return lambda: [setattr(p, "data", value) for p, value in own] and None

    return within(prepare)(session)


def kept_since(*names: str) -> Plant:
    """Options of the optimizer are those of the moment at which the lever was engaged."""

    def plant(session: Any) -> Undo:
        kept = {
            optimizer: [{k: v for k, v in group.items() if k in names} for group in optimizer.param_groups]
            for optimizer in session.optimizers
        }

        def with_kept(optimizer: torch.optim.Optimizer, own: Callable[[], Any]) -> Callable[..., Any]:
            def step(*_: Any, **__: Any) -> None:
                now = [{k: v for k, v in group.items() if k in names} for group in optimizer.param_groups]
                for group, former in zip(optimizer.param_groups, kept[optimizer], strict=True):
                    group.update(former)
                own()
                for group, present in zip(optimizer.param_groups, now, strict=True):
                    group.update(present)

            return step

        return stepping(with_kept)(session)

    return plant


rate_kept = kept_since("lr")


# -- batches -------------------------------------------------------------------------------------------------------


def without_last(loader: Any, iterator: Iterator[Any]) -> Iterator[Any]:
    """The last, smaller batch is dropped."""
    return itertools.islice(iterator, len(loader) - 1)


def swapped(position: int) -> Callable[[Any, Iterator[Any]], Iterator[Any]]:
    """Two batches change places."""

    def change(loader: Any, iterator: Iterator[Any]) -> Iterator[Any]:
        yield from itertools.islice(iterator, position)
        pair = [*itertools.islice(iterator, 2)]
        yield from reversed(pair)
        yield from iterator

    return change


def mutated() -> Plant:
    """Batches are kept by their first visit, and what is given out is written to: later visits see that."""
    kept: dict[Any, Any] = {}

    def change(loader: Any, iterator: Iterator[Any]) -> Iterator[Any]:
        for position, batch in enumerate(iterator):
            first = kept.setdefault((id(loader), position), batch)
            yield first
            for part in first:
                part.add_(1) if part.is_floating_point() else part.sub_(0)

    return batches(change)


def given_out_again() -> Plant:
    """The same memory is given out for every visit, rightly filled; a script may write into it."""
    kept: dict[Any, Any] = {}

    def change(loader: Any, iterator: Iterator[Any]) -> Iterator[Any]:
        for position, batch in enumerate(iterator):
            ours = kept.setdefault((id(loader), position, batch[0].shape), [torch.empty_like(b) for b in batch])
            yield [mine.copy_(b) for mine, b in zip(ours, batch, strict=True)]

    return batches(change)


def stale_item(loader: Any, iterator: Iterator[Any]) -> Iterator[Any]:
    """One item of a batch is its neighbour's."""
    for batch in iterator:
        yield [torch.cat([part[:1], part[:1], part[2:]]) if len(part) > 1 else part for part in batch]


def as_bytes(loader: Any, iterator: Iterator[Any]) -> Iterator[Any]:
    """Floats kept in half precision."""
    for batch in iterator:
        yield [part.half().float() if part.is_floating_point() else part for part in batch]


def other_shuffle(loader: Any, iterator: Iterator[Any]) -> Iterator[Any]:
    """The pass draws once more than plain: this pass is right, all later ones are not."""
    yield from iterator
    torch.rand(1)


def _bug(name: str, check: str, plant: Plant, families: tuple[str, ...] = ALL, class_: str = "rounding") -> Bug:
    return Bug(name=name, class_=class_, check=check, plant=plant, families=families)


def scaled(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """Gradients are scaled."""
    return lambda gradient: gradient * factor


LAYERS = (nn.Linear, nn.Conv2d)
EPSILONS = {"eps": lambda value: value * 1e3}

BUGS: tuple[Bug, ...] = (
    _bug("a gradient lost", "gradients", within(lose)),
    _bug("a small layer's gradient zero", "gradients", of_parameters(torch.zeros_like, "smallest")),
    _bug("gradients scaled by 1.01", "gradients", of_parameters(scaled(1.01))),
    _bug("gradients scaled by 1.001", "gradients", of_parameters(scaled(1.001))),
    _bug("a small layer's gradient scaled by 1.01", "gradients", of_parameters(scaled(1.01), "smallest")),
    _bug("one layer in fp16", "gradients", replaced(LAYERS, in_type(torch.float16), "last")),
    _bug("one layer in bf16", "gradients", replaced(LAYERS, in_type(torch.bfloat16), "last")),
    _bug("first layer in fp16", "gradients", replaced(LAYERS, in_type(torch.float16), "first")),
    _bug("GELU approximated", "gradients", around(tanh_for_gelu), ("gpt", "vae")),
    _bug("attention without its mask", "gradients", around(no_mask), ("gpt",)),
    _bug("a tied weight untied", "gradients", within(untied), ("gpt",)),
    _bug("epsilon of norms changed", "gradients",
         within(lambda m: set_meanwhile([(n, "eps", 1e-4) for n in m.modules() if hasattr(n, "eps")])),
         ("resnet", "gpt", "vae")),
    _bug("the last example computed from another", "gradients",
         around(lambda m, f, a, k: f(*[last_row(x) for x in a], **k))),
    _bug("the input of an earlier step", "gradients", stale_input()),
    _bug("the weights of when it was engaged", "gradients", copied_once),
    _bug("outputs zero", "gradients", valued(torch.zeros_like)),
    _bug("outputs three times as large", "gradients", valued(lambda value: 3 * value)),
    _bug("outputs shifted by up to 0.01", "gradients", valued(shifted)),
    _bug("outputs rounded to bf16", "gradients", valued(rounded)),
    _bug("outputs rounded to fp16", "gradients", valued(lambda value: value.half().to(value.dtype))),
    _bug("outputs rounded to fp16, exact", "gradients", valued(lambda value: value.half().to(value.dtype)),
         class_="exact"),
    _bug("whole numbers returned as zeros", "gradients", each_output(wholes_zero), ("whole numbers",)),
    _bug("one whole number of 64 another", "gradients", each_output(one_other), ("whole numbers",)),
    _bug("memory of outputs used again", "gradients", memory_reused, ("two calls",), "exact"),
    _bug("a growing buffer's last row zero", "gradients", around(buffer_spoilt), ("growing buffer",)),
    _bug("loss in bf16: outputs not cast back", "gradients", around(half_precision)),
    _bug("loss in bf16: autocast left on", "gradients", autocast_left_on),
    _bug("NaN where an example is all zero", "gradients", around(nan_at_zeros)),
    _bug("NaN at large inputs", "gradients", around(overflow), ("lenet", "resnet", "vae")),
    _bug("dropout: numbers drawn before", "gradients", around(other_numbers), DROPPING, "exact"),
    _bug("dropout: numbers drawn after", "gradients", around(drawn_after), DROPPING, "exact"),
    _bug("dropout: the same mask at each step", "gradients", around(repeated), DROPPING, "exact"),
    _bug("dropout: the stream stands still", "gradients", around(stale), DROPPING, "exact"),
    _bug("batch statistics updated twice", "gradients", around(twice), ("resnet", "vae")),
    _bug("batch statistics not updated", "gradients",
         within(lambda m: norms(m, momentum=0.0)), ("resnet", "vae")),
    _bug("batch statistics with another momentum", "gradients",
         within(lambda m: norms(m, momentum=0.11)), ("resnet", "vae")),
    _bug("batch statistics from a biased variance", "gradients", replaced(NORMS, biased_variance), ("resnet", "vae")),
    _bug("running statistics in training", "gradients", within(lambda m: norms(m, training=False)), ("resnet", "vae")),
    _bug("gradients never cleared", "gradients",
         all_of(attribute(torch.optim.Optimizer, "zero_grad", never_cleared),
                attribute(nn.Module, "zero_grad", never_cleared))),
    _bug("accumulation keeps the last micro-batch", "gradients", last_micro_batch, ("lstm",)),
    _bug("clipping skipped", "updates",
         all_of(attribute(nn.utils, "clip_grad_norm_", lambda own: lambda *a, **k: torch.zeros(())),
                attribute(nn.utils, "clip_grad_value_", lambda own: lambda *a, **k: None)), DROPPING),
    _bug("clipping each parameter by itself", "updates", attribute(nn.utils, "clip_grad_norm_", clip_each),
         ("lenet", "gpt", "lstm")),
    _bug("weight decay applied twice", "updates", stepping(decayed_twice)),
    _bug("weight decay left out", "updates", options(weight_decay=lambda value: 0.0)),
    _bug("epsilon changed", "updates", options(**EPSILONS), ("gpt", "lstm", "vae")),
    _bug("learning rate off by 0.1 %", "updates", options(lr=lambda value: value * 1.001)),
    _bug("the learning rate of when it was engaged", "updates", rate_kept),
    _bug("the same, an integer", "updates", rate_kept, ("whole learning rate",)),
    _bug("momentum or betas of when it was engaged", "updates", kept_since("momentum", "betas"),
         (*ALL, "scheduled momentum")),
    _bug("weight decay of when it was engaged", "updates", kept_since("weight_decay")),
    _bug("momentum or beta off", "updates",
         options(momentum=lambda value: value * 0.99, betas=lambda value: (value[0], value[1] * 0.999))),
    _bug("Nesterov left out", "updates", options(nesterov=lambda value: False), ("resnet",)),
    _bug("a parameter not updated", "updates", stepping(one_left_out)),
    _bug("moments lost", "updates", stepping(forgetful)),
    _bug("step counters stand still", "updates", stepping(moments_late), ("gpt", "lstm", "vae")),
    _bug("update made twice", "updates", stepping(lambda o, own: lambda *a, **k: (own(), own())[0])),
    _bug("last batch dropped", "batches", batches(without_last), class_="exact"),
    _bug("two batches swapped", "batches", batches(swapped(1)), class_="exact"),
    _bug("the last two batches swapped", "batches", batches(swapped(3)), class_="exact"),
    _bug("a kept sample mutated in place", "batches", mutated(), ("lenet", "resnet", "vae"), "exact"),
    _bug("memory given out again", "batches", given_out_again(), class_="exact"),
    _bug("one item its neighbour's", "batches", batches(stale_item), class_="exact"),
    _bug("items kept in half precision", "batches", batches(as_bytes), ("lenet", "resnet", "vae"), "exact"),
    _bug("later passes shuffled otherwise", "batches", batches(other_shuffle), class_="exact"),
)  # fmt: skip

assert not any(math.isnan(len(bug.families)) or not bug.families for bug in BUGS)
