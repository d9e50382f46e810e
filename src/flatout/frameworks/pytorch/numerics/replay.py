"""How are captured calls run again, forward and backward, without leaving a trace?

Each call begins from its own arguments, random states, buffers, attributes, autocast and parameters, and is given the
gradients that came back for its outputs. Gradients are returned, never written into the parameters, so that no hook of
the script's on accumulated gradients fires. In: captured calls. Out: gradients, outputs, random states, seconds.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import nn

from flatout.frameworks.pytorch.numerics.capture import CapturedCall
from flatout.frameworks.pytorch.numerics.differences import Gradients, reals
from flatout.frameworks.pytorch.numerics.room import num_bytes, place_for
from flatout.frameworks.pytorch.observe import devices
from flatout.frameworks.pytorch.seams.calls import Calls
from flatout.frameworks.pytorch.seams.module_state import ModuleState
from flatout.frameworks.pytorch.seams.random_states import RandomStates
from flatout.frameworks.pytorch.seams.trees import map_tensors, tensors_of

_grad = torch.autograd.grad  # as it was before the observer looked at it
_backward = torch.autograd.backward


class Replayed:
    """What one replay of a step's calls gave."""

    def __init__(self) -> None:
        self.gradients: Gradients = {}
        self.of_inputs: list[torch.Tensor | None] = []
        """Gradients of the calls' inputs, of those that need one: what another model of the same step learns from."""
        self.outputs: list[torch.Tensor] = []
        """Outputs of all calls as they are after the last, which may have written into the memory of earlier ones."""
        self.output_names: list[str] = []
        self.integers: list[tuple[str, torch.Tensor]] = []
        """Outputs that are no floats (classes, masks, counts), with their names."""
        self.buffers: dict[tuple[int, str], tuple[torch.Tensor, torch.Tensor]] = {}
        """Buffers by module and name: before the first call (empty where there was none yet), and after the last."""
        self.kinds: list[tuple[torch.dtype, tuple[int, ...]]] = []
        """Type and shape of each output."""
        self.settings: tuple[Any, ...] = ()
        """Process-wide settings under which whatever follows the calls is computed."""
        self.randoms: list[RandomStates] = []
        """Where the random generators stand after each call: the next one begins where the script's own began."""
        self.took_s = 0.0
        """Forward and backward alone."""
        self._returned: list[tuple[str, torch.Tensor]] = []

    def add(self, found: Gradients, cleared: frozenset[int] = frozenset()) -> None:
        """Add one call's gradients, except those that the script has cleared since."""
        for parameter, gradient in found.items():
            if id(parameter) not in cleared:
                former = self.gradients.get(parameter)
                self.gradients[parameter] = gradient if former is None else former + gradient

    def note(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """One call has returned these; their values are taken when all calls have been made."""
        self.kinds += [(t.dtype, tuple(t.shape)) for t in tensors]
        for number, tensor in enumerate(tensors):
            self._returned.append((name if len(tensors) == 1 else f"{name}[{number}]", tensor.detach()))

    def keep_outputs(self) -> None:
        """Copy what the calls have returned, as it is now: a later call or replay may write into its memory."""
        returned, self._returned = self._returned[::-1], []
        while returned:
            name, tensor = returned.pop()
            if tensor.is_floating_point() or tensor.is_complex():
                self.output_names.append(name)
                self.outputs.append(reals(tensor).clone())
            else:
                self.integers.append((name, reals(tensor).clone()))

    def make_room(self, device: str) -> None:
        """Bring gradients and outputs to the host, where the device has no room for so much.

        Raises:
            NoRoom: The host has none either.
        """
        found = (*self.gradients.values(), *self.outputs)
        place = place_for(num_bytes(found), device, "one step's gradients and outputs")
        for parameter, gradient in self.gradients.items():
            self.gradients[parameter] = place(gradient)
        self.outputs = [place(output) for output in self.outputs]

    def draws_as(self, other: Replayed) -> bool:
        """Whether each call has left all random generators where it left them in another replay."""
        return all(ours.equals(theirs) for ours, theirs in zip(self.randoms, other.randoms, strict=True))

    @property
    def finite(self) -> bool:
        """Whether neither gradients nor outputs hold NaN or infinity."""
        return all(bool(torch.isfinite(t).all()) for t in (*self.gradients.values(), *self.outputs))


class Replayer:
    """Runs captured calls again.

    Args:
        calls: The seams in the script's models.
        at_step_end: What levers do between two steps, which each replay under them is.
    """

    def __init__(self, calls: Calls, at_step_end: Mapping[str, Callable[[], None]] | None = None) -> None:
        self._calls = calls
        self._at_step_end = {} if at_step_end is None else at_step_end

    @property
    def device(self) -> str:
        """Where the models compute, as `cuda:1` or `cpu`."""
        return str(self._calls.where)

    def run(
        self,
        captured: Sequence[CapturedCall],
        *,
        levers: bool = False,
        uncleared: bool = False,
        into_parameters: bool = False,
    ) -> Replayed:
        """Run the calls, plain or under the engaged levers, and put everything back as it was.

        With `uncleared`, gradients that the script has set to zero since are left out. With `into_parameters` they
        are not returned but added up in the parameters, which are the caller's to put back.
        """
        found = Replayed()
        for act in tuple(self._at_step_end.values()) if levers else ():
            act()
        modules = {id(c.call.module): c.call.module for c in captured}
        now = [ModuleState(module) for module in modules.values()]
        random = RandomStates()
        kept_capture, self._calls.capture = self._calls.capture, None
        kept_inside, self._calls.inside = self._calls.inside, True
        try:
            with torch.enable_grad():
                before: dict[tuple[int, str], torch.Tensor] = {}
                for one in captured:
                    one.state.restore()
                    before = {**_buffers(one.call.module), **before}
                    gradients = self._run(one, found, levers=levers, into_parameters=into_parameters)
                    found.randoms.append(RandomStates())
                    found.add(gradients, frozenset(one.cleared) if uncleared else frozenset())
            found.keep_outputs()
            kinds = [kind if torch.is_autocast_enabled(kind) else None for kind in devices.kinds()]
            found.settings = (*(kind and torch.get_autocast_dtype(kind) for kind in kinds), torch.get_default_dtype())
            for module in modules.values():
                found.buffers |= {key: (before.get(key, b.new_empty(0)), b) for key, b in _buffers(module).items()}
        finally:
            self._calls.capture, self._calls.inside = kept_capture, kept_inside
            for state in now:
                state.restore()
            random.restore()
        return found

    def _run(self, captured: CapturedCall, found: Replayed, *, levers: bool, into_parameters: bool) -> Gradients:
        captured.random.restore()
        leaves: list[torch.Tensor] = []

        def fresh(tensor: torch.Tensor) -> torch.Tensor:
            copied = tensor.detach().clone()  # the call may write into its input
            if not tensor.requires_grad:
                return copied
            leaves.append(copied.requires_grad_())
            return copied.clone()  # no leaf: the model may work on it in place

        if captured.whole:
            args, kwargs = copy.deepcopy((captured.args, captured.kwargs))
        else:
            args = map_tensors(fresh, captured.args, objects=False)
            kwargs = map_tensors(fresh, captured.kwargs, objects=False)
        call = captured.call
        parameters = [p for p in call.module.parameters() if p.requires_grad]
        with captured.surroundings(), _values(captured.former_values):
            self._wait()
            begun_s = perf_counter()
            out = call.with_levers(args, kwargs) if levers else call.plain(*args, **kwargs)
            tensors = tensors_of(out)
            wanted = [t for t in tensors if t.grad_fn is not None]
            pairs = [(t, g) for t, g in zip(wanted, captured.gradients, strict=False) if g is not None]
            if into_parameters:
                _backward([t for t, _ in pairs], [g.to(t.dtype) for t, g in pairs])
                gradients, of_inputs = Gradients(), list[torch.Tensor | None]()
            else:
                gradients, of_inputs = _gradients(pairs, parameters, leaves, own=levers)
                found.of_inputs += of_inputs
            self._wait()
            found.took_s += perf_counter() - begun_s
        found.note(call.name, tensors)
        if not call.trained:  # all that the models of the step learn from it
            found.note(f"{call.name}: gradient of an input", [g for g in of_inputs if g is not None])
        return gradients

    def _wait(self) -> None:
        if devices.has_queue(self._calls.where):
            devices.wait(self._calls.where)


def _buffers(module: nn.Module) -> dict[tuple[int, str], torch.Tensor]:
    return {(id(module), name): reals(b.detach()).clone() for name, b in module.named_buffers()}


def _gradients(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    parameters: Sequence[nn.Parameter],
    leaves: list[torch.Tensor],
    *,
    own: bool,
) -> tuple[Gradients, list[torch.Tensor | None]]:
    """Of parameters by parameter, and of inputs in their order.

    With `own` in memory of their own: a lever may compute the next ones where these are.
    """
    if not pairs:
        return {}, []
    outputs = [t for t, _ in pairs]
    given = [g.to(t.dtype) for t, g in pairs]
    try:
        # leaves as well, so that as much is computed as in the script
        found = list(_grad(outputs, [*parameters, *leaves], given, allow_unused=True))
    except RuntimeError as problem:
        if "use_reentrant" not in str(problem):
            raise
        return _accumulated(outputs, given, parameters, own=own), []
    for number, gradient in enumerate(found if own else ()):  # one at a time, so that one alone is there twice
        found[number] = None if gradient is None else gradient.clone()
    of_inputs: list[torch.Tensor | None] = [None if g is None else reals(g) for g in found[len(parameters) :]]
    return {p: reals(g) for p, g in zip(parameters, found, strict=False) if g is not None}, of_inputs


def _accumulated(
    outputs: list[torch.Tensor], given: list[torch.Tensor], parameters: Sequence[nn.Parameter], *, own: bool
) -> Any:
    """The same for reentrant checkpoints, which know no other way than to write into the parameters."""
    kept = [(p, p.grad) for p in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        _backward(outputs, given)
        return {p: reals(p.grad.clone() if own else p.grad) for p in parameters if p.grad is not None}
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


@contextlib.contextmanager
def _values(former: dict[torch.Tensor, torch.Tensor]) -> Iterator[None]:
    """Parameters as they were at the time of the call, for those that another optimizer has updated since."""
    present = [(p, p.data) for p in former]
    try:
        for parameter, value in former.items():
            parameter.data = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        yield
    finally:
        for parameter, value in present:
            parameter.data = value


def half(captured: CapturedCall) -> CapturedCall | None:
    """The same call with the first half of its batch, or None where no batch dimension shows, or it is not safe.

    On a device an index into what was cut away ends the process, not the call. So no whole number that goes in, or that
    the model keeps, may be as large as what is left.
    """
    sizes = {t.shape[0] for t in tensors_of((captured.args, captured.kwargs)) if t.dim()}
    gradient_sizes = {g.shape[0] for g in captured.gradients if g is not None and g.dim()}
    size = max(sizes & gradient_sizes or (set() if gradient_sizes else sizes), default=0)
    if size < 2 or (captured.device != "cpu" and _may_index(captured, size // 2)):
        return None

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[: size // 2] if tensor.dim() and tensor.shape[0] == size else tensor

    return captured.changed(
        args=map_tensors(cut, captured.args, objects=False),
        kwargs=map_tensors(cut, captured.kwargs, objects=False),
        gradients=[cut(g) if g is not None else None for g in captured.gradients],
    )


def _may_index(captured: CapturedCall, num_rows: int) -> bool:
    """Whether a call has whole numbers that are no index into so many rows."""
    tensors = (*tensors_of((captured.args, captured.kwargs)), *captured.state.tensors())
    whole = [t for t in tensors if not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)]
    # what has no dimension counts something
    return any(int(t.min()) < -num_rows or int(t.max()) >= num_rows for t in whole if t.dim() and t.numel())
