"""How do ranks, or groups of them, share a batch, each of which computes a part of it with the whole model?

Outputs are put together over them, and gradients summed; batch statistics and noise are those of the whole batch. To
the script the call is one node of its graph, which hangs from its inputs and from the parameters. In: a call and how
its batch is cut. Out: what one process gives.

Source: Ioffe and Szegedy, arXiv 1502.03167; statistics of parts: Chan, Golub and LeVeque, 1983, "Algorithms for
computing the sample variance".
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from flatout.frameworks.pytorch.parallel import assembly
from flatout.frameworks.pytorch.parallel.assembly import Rule, Share
from flatout.frameworks.pytorch.parallel.cuts import entering, part_entering
from flatout.frameworks.pytorch.parallel.gradients import summed_in_buckets
from flatout.frameworks.pytorch.parallel.group import Group
from flatout.frameworks.pytorch.parallel.protocol import Check, Dividing, ForwardResult, Found, ParameterHolder, Pattern
from flatout.frameworks.pytorch.parallel.random_numbers import BatchRandom, drawn_apart
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.parallel.sharded_tensor import Sharded, become, part_of
from flatout.frameworks.pytorch.seams.trees import map_tensors, tensors_of
from flatout.records.ranks import SUM_OVER_GROUPS


@contextmanager
def synchronised(group: Group) -> Iterator[None]:
    """Batch statistics are those of all ranks."""
    plain = F.batch_norm

    def batch_norm(  # noqa: PLR0913  as PyTorch's
        input: torch.Tensor, running_mean: torch.Tensor | None, running_var: torch.Tensor | None,
        weight: torch.Tensor | None = None, bias: torch.Tensor | None = None, training: bool = False,
        momentum: float = 0.1, eps: float = 1e-5,
    ) -> torch.Tensor:  # fmt: skip
        if not training:
            return plain(input, running_mean, running_var, weight, bias, training, momentum, eps)
        running = running_mean, running_var, momentum
        out: torch.Tensor = _Normalised.apply(input, weight, bias, group, running, eps, plain)
        return out

    with _batch_norm_by(batch_norm):
        yield


@contextmanager
def with_running_statistics() -> Iterator[None]:
    """Batch normalisation takes what modules remember, in training as well; nothing is brought forward."""
    plain = F.batch_norm

    def batch_norm(
        input: Any, mean: Any, var: Any, weight: Any = None, bias: Any = None, *rest: Any, **named: Any
    ) -> Any:
        if mean is None or var is None:
            raise ValueError("nothing is remembered")
        eps = named.get("eps", rest[2] if len(rest) > 2 else 1e-5)
        return plain(input, mean, var, weight, bias, False, 0.0, eps)

    with _batch_norm_by(batch_norm):
        yield


@contextmanager
def _batch_norm_by(function: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Within, all modules of batch normalisation call this function."""
    plain, F.batch_norm = F.batch_norm, function
    try:
        yield
    finally:
        F.batch_norm = plain


class _Normalised(torch.autograd.Function):
    """Batch normalisation with the statistics of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, group: Group, running: Any, eps: float, plain: Any) -> Any:  # noqa: PLR0913
        """Normalise; running statistics are brought forward on every rank alike."""
        if torch.is_autocast_enabled(x.device.type):  # as autocast does for batch normalisation: its own type stays
            weight, bias = (None if t is None else t.float() for t in (weight, bias))
        dims = [dim for dim in range(x.dim()) if dim != 1]
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        variance, mean = torch.var_mean(wide, dims, correction=0)
        count = x.numel() / x.shape[1]
        # filled where it lies: a value that is copied to a device is waited for, in each of a model's normalisations
        rows = group.gather(torch.cat([mean, variance, mean.new_full((1,), count)]), "batch statistics")
        means, variances, counts = rows[:, : len(mean)], rows[:, len(mean) : -1], rows[:, -1:]
        num = counts.sum()
        mean = (means * counts).sum(0) / num
        variance = ((variances + (means - mean) ** 2) * counts).sum(0) / num
        running_mean, running_var, momentum = running
        # .data: as PyTorch's own, this is no change that a graph of an earlier call would trip over
        if running_mean is not None:
            running_mean.data.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
        if running_var is not None:
            unbiased = variance * (num / (num - 1))
            running_var.data.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(variance + eps), num)
        ctx.group = group
        return plain(x, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        """The gradients of input, weight and bias; those of the latter two are this rank's."""
        x, weight, mean, inverse, num = ctx.saved_tensors
        dims = [dim for dim in range(x.dim()) if dim != 1]
        shape = [1, -1, *[1] * (x.dim() - 2)]
        wide = grad.to(mean.dtype)
        centred = x.to(mean.dtype) - mean.view(shape)
        sums = torch.stack([wide.sum(dims), (wide * centred).sum(dims)])
        own = sums.clone()
        ctx.group.sum(sums, "gradients of batch statistics")
        scale = inverse if weight is None else inverse * weight.to(inverse.dtype)
        slope = sums[1] * inverse**2 / num
        found = (wide - (sums[0] / num).view(shape) - centred * slope.view(shape)) * scale.view(shape)
        of_weight = None if weight is None or not ctx.needs_input_grad[1] else (own[1] * inverse).to(weight.dtype)
        of_bias = own[0].to(mean.dtype) if ctx.needs_input_grad[2] else None
        return found.to(x.dtype), of_weight, of_bias, None, None, None, None


def passed(division: Dividing, args: Any, kwargs: Any, pattern: Pattern, *, silent: bool = False) -> ForwardResult:
    """Compute a call, each its part of the batch, or all of one that is too small."""
    held, group = division.held, division.replicas
    inputs = tensors_of((args, kwargs), unique=False)
    num = pattern.cut.num_samples(inputs) or 0
    is_cut = group is not None and pattern.rules is not None and num >= group.world
    if group is None or not (is_cut or held.takes_mean):
        args, kwargs, _ = entering(args, kwargs, itertools.repeat(lambda whole: whole))
        return held.passed(division.compute, args, kwargs, pattern, silent=silent)
    share = Share.of(inputs, pattern.cut.dims if is_cut else (None,) * len(inputs), num if is_cut else 0, group.world)
    args, kwargs, entered = part_entering(args, kwargs, share, group.rank)
    noise = BatchRandom(share, group.rank, held.parameters) if pattern.noise else None
    draws = drawn_apart(group.rank) if pattern.masks and not silent else nullcontext()
    with draws, whole_batch(group, noise):
        mine = held.passed(division.compute, args, kwargs, pattern, silent=silent)
    found = BatchPass(held, group, share, mine, entered, noise)
    rules = pattern.rules or (Rule("same"),) * len(mine.outputs)
    if len(rules) != len(mine.outputs):
        raise division.refused(f"it returns {len(mine.outputs)} tensors, and {len(rules)} before")
    found.put_together(rules, f"outputs of `{division.name}`")
    return found


@contextmanager
def whole_batch(group: Group, noise: BatchRandom | None) -> Iterator[None]:
    """Within, statistics of batches and noise are those of the whole batch."""
    with synchronised(group), noise.on() if noise is not None else nullcontext():
        yield


class BatchPass:
    """One call of which each rank or group has computed a part; see `ForwardResult`."""

    def __init__(
        self,
        held: ParameterHolder,
        group: Group,
        share: Share,
        mine: ForwardResult,
        entered: Sequence[torch.Tensor],
        noise: BatchRandom | None,
    ) -> None:
        self._held, self._group, self._share, self._mine, self.entered = held, group, share, mine, entered
        self._noise = noise
        self.value, self.outputs = mine.value, mine.outputs
        self._rules: list[Rule] = []

    def fit(self, rules: Sequence[Rule]) -> None:
        """Say how outputs make up those of the whole batch."""
        pairs = zip(rules, self._mine.outputs, strict=True)
        self._rules = [assembly.fitted(*pair, self._share, self._group.rank) for pair in pairs]

    def put_together(self, rules: Sequence[Rule], name: str) -> None:
        """Have the outputs be those of the whole batch."""
        self.fit(rules)
        mine = self._mine
        whole = assembly.of_all_ranks(mine.outputs, self._rules, self._share, self._group, name)
        self.outputs = [new.requires_grad_(old.requires_grad) for new, old in zip(whole, mine.outputs, strict=True)]
        by_id = {id(old): new for old, new in zip(mine.outputs, self.outputs, strict=True)}
        self.value, mine.value = map_tensors(lambda tensor: by_id[id(tensor)], mine.value), None

    def backward(self, gradients: Sequence[Any], *, keep: bool) -> tuple[Found, Found]:
        """See `ForwardResult`. What takes the mean is given gradients that are `world` times as large."""
        group, share = self._group, self._share
        scale = group.world if self._held.takes_mean else 1
        mine = [
            None if gradient is None else assembly.gradient_of(rule, gradient, share, group.rank, group.world)
            for rule, gradient in zip(self._rules, gradients, strict=True)
        ]
        with whole_batch(group, self._noise):  # what is checkpointed is computed once more
            of_parameters, of_inputs = self._mine.backward([g if g is None else g * scale for g in mine], keep=keep)
        of_inputs = [one if one is None else one / scale for one in of_inputs]
        whole = assembly.gradients_of_inputs(of_inputs, self.entered, share, group)
        return of_parameters if self._held.takes_mean else self._summed(of_parameters), whole

    def _summed(self, mine: Found) -> Found:
        """Over groups: what any of them has used has a gradient in all."""
        group, parameters = self._group, self._held.parameters
        used = group.anywhere([grad is not None for grad in mine], "which parameters were used")
        places = [place for place, was in enumerate(used) if was]
        parts = [part_of(parameters[place]) for place in places]
        grads = [
            torch.zeros_like(part) if grad is None else part_of(grad)
            for part, grad in zip(parts, (mine[place] for place in places), strict=True)
        ]
        found: Found = [None] * len(mine)
        for place, grad in zip(places, summed_in_buckets(grads, group, SUM_OVER_GROUPS), strict=True):
            parameter = parameters[place]
            found[place] = become(grad, parameter.placement) if isinstance(parameter, Sharded) else grad
        return found


class DividedCall:
    """A divided call, between its way forward and its way back; `check` where it was computed both ways."""

    def __init__(self, division: Dividing, pattern: Pattern, args: Any, kwargs: Any, check: Check | None) -> None:
        self.division, self.pattern = division, pattern
        self.given, self.check = (args, kwargs), check
        self.passed: ForwardResult

    def made(self) -> Any:
        """Make the call: what the module returns to the script."""
        differentiable = [t for t in tensors_of(self.given, unique=False) if t.requires_grad]
        outputs = _Node.apply(self, *differentiable, *self.division.held.parameters)
        by_id = {id(mine): whole for mine, whole in zip(self.passed.outputs, outputs, strict=True)}
        value, self.passed.value = self.passed.value, None
        return map_tensors(lambda tensor: by_id[id(tensor)], value)


class _Node(torch.autograd.Function):
    """The node."""

    @staticmethod
    def forward(ctx: Any, call: DividedCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs of the whole batch."""
        del tensors
        (args, kwargs), call.given = call.given, ((), {})
        call.passed = passed(call.division, args, kwargs, call.pattern)
        ctx.call = call
        outputs = [tensor.detach() for tensor in call.passed.outputs]
        fixed = [whole for whole, own in zip(outputs, call.passed.outputs, strict=True) if not own.requires_grad]
        ctx.mark_non_differentiable(*fixed)
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # type: ignore[override]
        """Gradients of the inputs and of the parameters."""
        call: DividedCall = ctx.call
        division = call.division
        try:
            if torch.is_grad_enabled():
                raise division.refused("gradients of its gradients are taken (`create_graph=True`)")
            call.pattern.taken = tuple(one is not None for one in gradients)
            keep = torch._C._autograd._get_current_graph_task_keep_graph()
            check, call.check = call.check, None
            with division.apart():
                if check is not None:
                    division.compare_gradients(check, gradients)
                with division.held.in_place():
                    of_parameters, of_inputs = call.passed.backward(gradients, keep=keep)
            return (None, *of_inputs, *of_parameters)
        except NotDivided as problem:
            division.refuse(problem)
