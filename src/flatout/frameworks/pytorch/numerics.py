"""How far are the numbers under a lever from the numbers without it, on the very same step?

At the moment before an update the captured calls are replayed with the same arguments, random states, buffers and
output gradients, plain and under the levers; updates are made three times from one snapshot; batches are drawn twice
from one random state. In: levers and the names of checks. Out: `Difference`s, measured and not judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch
from torch.utils._pytree import tree_map

from flatout.frameworks.pytorch.batches import compare_batches
from flatout.frameworks.pytorch.capture import Capture, CapturedCall, RandomStates, tensors_of
from flatout.frameworks.pytorch.differences import (
    Gradients,
    cosine,
    output_error,
    relative_error,
    slope,
    square,
    worst,
)
from flatout.frameworks.pytorch.session import Session
from flatout.trace import Agreement, Difference, Levers, Scaling

NUM_UPDATES = 3
"""Updates compared: the first has no moments yet, the third shows a wrong pairing of moments and parameters."""

SCALING_REPEATS = 5
SCALING_LIMIT_S = 4.0


class Replayed:
    """What one replay of a step's calls gave."""

    def __init__(self, gradients: Gradients, outputs: list[torch.Tensor], random: RandomStates) -> None:
        self.gradients = gradients
        self.outputs = outputs
        self.random = random


class Numerics:
    """Compares levers with plain on captured steps."""

    def __init__(self, session: Session, capture: Capture) -> None:
        self._session = session
        self._capture = capture

    # -- compare -------------------------------------------------------------------------------------------------

    def compare(self, levers: Levers, checks: Sequence[str]) -> Agreement:
        """Differences of each check; `missing` says why one could not be made."""
        differences, missing = [], []
        try:
            for check in checks:
                found = {
                    "gradients": self._gradients,
                    "updates": self._updates,
                    "batches": self._batches,
                }[check](levers)
                if isinstance(found, str):
                    missing.append(found)
                else:
                    differences.append(found)
        finally:
            self._capture.drop()
            self._session.engage_exactly({})
        return Agreement(levers=levers, differences=tuple(differences), missing="; ".join(missing))

    def _gradients(self, levers: Levers) -> Difference | str:
        calls = self._capture.present
        if self._capture.overflow:
            return "one step's inputs are larger than the memory set aside for keeping them"
        if not calls:
            return "no model call was captured"
        if not any(g is not None for c in calls for g in c.gradients):
            return "no gradient came back for the model's outputs"
        first = self._replay(calls)
        noise = self._noise(first)
        explained = self._explained(calls, first)
        again = self._replay(calls)
        baseline_error = relative_error(again.gradients, first.gradients)
        del again
        self._session.engage_exactly(levers)
        changed = self._replay(calls, levers=True)
        furthest, worst_error = worst(changed.gradients, first.gradients)
        return Difference(
            check="gradients",
            error=relative_error(changed.gradients, first.gradients),
            slope=slope(changed.gradients, first.gradients),
            cosine=cosine(changed.gradients, first.gradients),
            noise=noise,
            baseline_error=baseline_error,
            output_error=output_error(changed.outputs, first.outputs),
            worst=self._name(furthest),
            worst_error=worst_error,
            random_states_equal=changed.random.equals(first.random),
            finite=_finite(changed) or not _finite(first),
            explained_cosine=explained,
        )

    def _noise(self, present: Replayed) -> float | None:
        """Relative spread of the gradient between batches: norm of the difference over the root of summed squares."""
        if not self._capture.former:
            return None
        former = self._replay(self._capture.former)
        keys = [p for p in present.gradients if p in former.gradients]
        difference = math.fsum(square(present.gradients[p] - former.gradients[p]) for p in keys)
        total = math.fsum(square(present.gradients[p]) + square(former.gradients[p]) for p in keys)
        return math.sqrt(difference / total) if total > 0 else None

    def _explained(self, calls: Sequence[CapturedCall], present: Replayed) -> float | None:
        """Cosine of the replayed gradient with the one that the script computed, for parameters of the last update.

        Calls whose gradient the script has cleared since are left out. The script may have clipped or averaged, which
        scales the whole gradient; a cosine does not see that.
        """
        counting = [c for c in calls if not c.cleared]
        if len(counting) != len(calls):
            if not counting:
                return None
            present = self._replay(counting)
        last = self._session.optimizers[-1]
        parameters = [p for group in last.param_groups for p in group["params"] if p.grad is not None]
        dot = own = ours = 0.0
        for parameter in parameters:
            gradient = parameter.grad.detach().double()
            own += square(gradient)
            replayed = present.gradients.get(parameter)
            if replayed is not None:
                dot += float((gradient * replayed.double()).sum())
                ours += square(replayed)
        return dot / math.sqrt(own * ours) if own > 0 and ours > 0 else None

    def _replay(self, calls: Sequence[CapturedCall], *, levers: bool = False) -> Replayed:
        """Run the calls again, forward and backward, and put everything back as it was."""
        parameters = {p for c in calls for p in c.call.module.parameters() if p.requires_grad}
        kept_gradients = [(p, p.grad) for p in parameters]
        kept_buffers = [(b, b.detach().clone()) for c in calls for b in c.call.module.buffers()]
        kept_random = RandomStates()
        capture, self._session.calls.capture = self._session.calls.capture, None
        outputs: list[torch.Tensor] = []
        try:
            for parameter in parameters:
                parameter.grad = None
            with torch.enable_grad():
                for captured in calls:
                    outputs += _run(captured, levers=levers)
            random = RandomStates()
            gradients = {p: p.grad for p in parameters if p.grad is not None}
        finally:
            for parameter, gradient in kept_gradients:
                parameter.grad = gradient
            with torch.no_grad():
                for buffer, value in kept_buffers:
                    buffer.copy_(value)
            kept_random.restore()
            self._session.calls.capture = capture
        return Replayed(gradients, outputs, random)

    def _name(self, parameter: torch.nn.Parameter | None) -> str:
        for call in self._session.calls.found:
            for name, candidate in call.module.named_parameters():
                if candidate is parameter:
                    return name
        return ""

    # -- updates -------------------------------------------------------------------------------------------------

    def _updates(self, levers: Levers) -> Difference | str:
        optimizers = [o for o in self._session.optimizers if _has_gradients(o)]
        if any(isinstance(o, torch.optim.LBFGS) for o in optimizers):
            return "an optimizer with a closure cannot be replayed"
        if not optimizers:
            return "no optimizer has gradients at this point"
        self._session.engage_exactly({})
        snapshot = Snapshot(optimizers)
        random = RandomStates()
        plain = self._updated(optimizers, snapshot)
        again = self._updated(optimizers, snapshot)
        self._session.engage_exactly(levers)
        changed = self._updated(optimizers, snapshot)
        self._session.engage_exactly({})
        random.restore()
        furthest, worst_error = worst(changed, plain)
        return Difference(
            check="updates",
            error=relative_error(changed, plain),
            slope=slope(changed, plain),
            cosine=cosine(changed, plain),
            baseline_error=relative_error(again, plain),
            worst=self._name(furthest),
            worst_error=worst_error,
            finite=all(bool(torch.isfinite(t).all()) for t in changed.values()),
        )

    def _updated(self, optimizers: Sequence[torch.optim.Optimizer], snapshot: Snapshot) -> Gradients:
        """How far each parameter moves in three updates; everything is put back after."""
        self._session.silent = True
        try:
            for optimizer in optimizers:
                with _without_hooks(optimizer):
                    for _ in range(NUM_UPDATES):
                        type(optimizer).step(optimizer)
            return snapshot.moved()
        finally:
            snapshot.restore()
            self._session.silent = False

    # -- batches -------------------------------------------------------------------------------------------------

    def _batches(self, levers: Levers) -> Difference | str:
        return compare_batches(self._session, levers)

    # -- scaling -------------------------------------------------------------------------------------------------

    def scale(self) -> Scaling | None:
        """Seconds of the captured calls at full and at half batch, in turn."""
        try:
            calls = self._capture.present
            if not calls or not any(g is not None for c in calls for g in c.gradients):
                return None
            halves = [_half(c) for c in calls]
            if any(h is None for h in halves):
                return None
            return self._time_scaling(calls, [h for h in halves if h is not None])
        finally:
            self._capture.drop()

    def _time_scaling(self, calls: list[CapturedCall], halves: list[CapturedCall]) -> Scaling | None:
        try:
            self._replay(halves)
        except (RuntimeError, ValueError, IndexError):  # the model does not take half a batch
            return None
        full_s: list[float] = []
        half_s: list[float] = []
        begun_s = perf_counter()
        while len(full_s) < SCALING_REPEATS or perf_counter() - begun_s < 0.3:
            full_s.append(self._timed(calls))
            half_s.append(self._timed(halves))
            if perf_counter() - begun_s > SCALING_LIMIT_S and len(full_s) >= 2:
                break
        return Scaling(full_s=tuple(full_s), half_s=tuple(half_s))

    def _timed(self, calls: list[CapturedCall]) -> float:
        if self._session.device == "cuda":
            torch.cuda.synchronize()
        begun_s = perf_counter()
        self._replay(calls)
        if self._session.device == "cuda":
            torch.cuda.synchronize()
        return perf_counter() - begun_s


def _run(captured: CapturedCall, *, levers: bool) -> list[torch.Tensor]:
    """One captured call, forward and backward; its output tensors, detached."""
    captured.random.restore()
    with torch.no_grad():
        for buffer, value in captured.buffers:
            buffer.copy_(value)
    args = tree_map(_fresh, captured.args)
    kwargs = tree_map(_fresh, captured.kwargs)
    out = captured.call.with_levers(args, kwargs) if levers else captured.call.plain(*args, **kwargs)
    tensors = tensors_of(out)
    wanted = [t for t in tensors if t.requires_grad]
    pairs = [(t, g) for t, g in zip(wanted, captured.gradients, strict=False) if g is not None]
    if pairs:
        torch.autograd.backward([t for t, _ in pairs], [g.to(t.dtype) for t, g in pairs])
    return [t.detach() for t in tensors if t.is_floating_point()]


def _fresh(value: Any) -> Any:
    if isinstance(value, torch.Tensor):  # the call may write into its input
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value


def _half(captured: CapturedCall) -> CapturedCall | None:
    """The same call with the first half of its batch, or None where no batch dimension shows."""
    tensors = [t for t in tensors_of((captured.args, captured.kwargs)) if t.dim()]
    sizes = {t.shape[0] for t in tensors}
    gradient_sizes = {g.shape[0] for g in captured.gradients if g is not None and g.dim()}
    size = max(sizes & gradient_sizes or (sizes if not gradient_sizes else set()), default=0)
    if size < 2:
        return None

    def cut(value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == size:
            return value[: size // 2]
        return value

    half = CapturedCall.__new__(CapturedCall)
    half.call = captured.call
    half.args = tree_map(cut, captured.args)
    half.kwargs = tree_map(cut, captured.kwargs)
    half.random = captured.random
    half.buffers = captured.buffers
    half.gradients = [cut(g) for g in captured.gradients]
    half.cleared = set()
    return half


class Snapshot:
    """Parameters and optimizer state as they are now, in memory of their own."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._parameters = [
            (p, p.detach().clone()) for o in optimizers for group in o.param_groups for p in group["params"]
        ]
        self._states = [
            (o, {p: {k: _kept(v) for k, v in state.items()} for p, state in o.state.items()}) for o in optimizers
        ]

    def moved(self) -> Gradients:
        """How far each parameter is from here."""
        return {p: (p.detach() - value) for p, value in self._parameters}

    def restore(self) -> None:
        """Put everything back, in the memory format that it has now."""
        with torch.no_grad():
            for parameter, value in self._parameters:
                parameter.copy_(value)
        for optimizer, states in self._states:
            for parameter in list(optimizer.state):
                if parameter not in states:
                    del optimizer.state[parameter]
                    continue
                present = optimizer.state[parameter]
                for key in [k for k in present if k not in states[parameter]]:
                    del present[key]
                for key, value in states[parameter].items():
                    _put_back(present, key, value)


def _kept(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _put_back(state: dict[str, Any], key: str, value: Any) -> None:
    present = state.get(key)
    if isinstance(value, torch.Tensor) and isinstance(present, torch.Tensor):
        present.copy_(value)
    else:
        state[key] = value


class _without_hooks:
    """The script's own step hooks (averages of weights, schedules) do not see our updates."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def __enter__(self) -> None:
        self._kept = (self._optimizer._optimizer_step_pre_hooks, self._optimizer._optimizer_step_post_hooks)
        self._optimizer._optimizer_step_pre_hooks = type(self._kept[0])()
        self._optimizer._optimizer_step_post_hooks = type(self._kept[1])()

    def __exit__(self, *_: object) -> None:
        self._optimizer._optimizer_step_pre_hooks, self._optimizer._optimizer_step_post_hooks = self._kept


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])


def _finite(replayed: Replayed) -> bool:
    tensors = [*replayed.gradients.values(), *replayed.outputs]
    return all(bool(torch.isfinite(t).all()) for t in tensors)
