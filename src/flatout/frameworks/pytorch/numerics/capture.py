"""What went into the model in one step, and what gradient came back? Kept, so that the step's calls can be replayed.

Two consecutive steps are kept: the second is compared, the first shows how much gradients differ between batches
anyway. In: the outermost calls of the running script. Out: `CapturedCall`s. Only in throwaway children, within a
part of the memory that is free.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch

from flatout.frameworks.pytorch.numerics.differences import Gradients
from flatout.frameworks.pytorch.numerics.gradient_calls import GradientCalls
from flatout.frameworks.pytorch.numerics.room import num_bytes, room_bytes
from flatout.frameworks.pytorch.observe import devices
from flatout.frameworks.pytorch.seams.calls import Calls
from flatout.frameworks.pytorch.seams.module_state import ModuleState
from flatout.frameworks.pytorch.seams.outer_call import OuterCall
from flatout.frameworks.pytorch.seams.patches import Patch, remove_all
from flatout.frameworks.pytorch.seams.random_states import RandomStates
from flatout.frameworks.pytorch.seams.trees import map_tensors, tensors_of
from flatout.guest.memory_errors import out_of_memory


class CapturedCall:
    """One outermost call: its arguments and all state before it ran, and the gradient that came back."""

    def __init__(
        self, call: OuterCall, args: tuple[Any, ...], kwargs: dict[str, Any], device: str, *, whole: bool = False
    ) -> None:
        self.call = call
        self.whole = whole
        """Whether objects among the arguments are copied too: where nothing is trained they hold no graph, and a call
        may write into them (what a language model keeps of the text so far)."""
        self.device = device
        """Where the models compute, `cuda` or `cpu`."""
        if whole:
            self.args, self.kwargs = copy.deepcopy((args, kwargs))
        else:
            self.args = map_tensors(_copy, args, objects=False)
            self.kwargs = map_tensors(_copy, kwargs, objects=False)
        self.random = RandomStates()
        self.state = ModuleState(call.module)
        self.gradients: list[torch.Tensor | None] = []
        """For each differentiable output, the gradient that came from outside the call."""
        self.cleared: set[int] = set()
        """Parameters whose gradient was set to zero after this call, so that it is no longer part of theirs."""
        self.former_values: dict[torch.Tensor, torch.Tensor] = {}
        """Parameters that were updated within the step after this call, as they were."""
        self.autocast_off = False
        """Whether the call is made without the autocast that the script had around it."""
        self._autocasts = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in devices.kinds()
        ]
        self._cached = torch.is_autocast_cache_enabled()
        self._takes_gradients, self._infers = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._parameters = _kinds(call)

    @property
    def outdated(self) -> bool:
        """Whether the model's parameters have other types or shapes by now, so that the call cannot be made again."""
        return self._parameters != _kinds(self.call)

    @property
    def num_bytes(self) -> int:
        """Memory that keeping it takes."""
        kept = [*tensors_of((self.args, self.kwargs)), *(g for g in self.gradients if g is not None)]
        return self.state.num_bytes + num_bytes(kept)

    @property
    def autocast_dtypes(self) -> set[torch.dtype]:
        """Types that the script's own autocast computes the call in."""
        return {dtype for _, enabled, dtype in self._autocasts if enabled}

    def surroundings(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast that the script had around the call, and whether it took gradients."""
        stack = contextlib.ExitStack()
        stack.enter_context(torch.inference_mode() if self._infers else torch.set_grad_enabled(self._takes_gradients))
        for kind, was_enabled, dtype in self._autocasts:
            enabled = was_enabled and not self.autocast_off
            if enabled or torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, dtype, enabled, self._cached))
        return stack

    def watch(self, out: Any) -> Any:
        """Note the gradients that come back for the tensors of `out`; returns it for the script.

        The script is given copies, because a hook on an output itself also sees what reaches it from another output
        of the same call: a hidden state and the logits made from it.
        """

        def watched(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.grad_fn is None:
                return tensor
            position = len(self.gradients)
            self.gradients.append(None)
            copied = tensor.clone()
            copied.register_hook(lambda gradient: self._note(position, gradient))
            return copied

        return map_tensors(watched, out)

    def _note(self, position: int, gradient: torch.Tensor) -> None:
        former = self.gradients[position]
        gradient = gradient.detach()
        self.gradients[position] = gradient if former is None else former + gradient

    def changed(self, **changes: Any) -> CapturedCall:
        """A copy with other values."""
        other = copy.copy(self)
        other.__dict__.update(changes)
        return other


def _kinds(call: OuterCall) -> list[tuple[Any, ...]]:
    return [(p.dtype, tuple(p.shape), p.device) for p in call.module.parameters()]


def _copies(values: Gradients) -> Gradients:
    """Copies of all of them, or of none where memory runs out: it is the script's own step that goes on."""
    try:
        return {p: value.clone() for p, value in values.items()}
    except RuntimeError as problem:
        if not out_of_memory(problem):
            raise
        return {}


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


class Capture:
    """Keeps the calls of two consecutive steps when asked to."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self.limit_bytes = 0
        """Most memory for what is kept, by what is free as the first step begins."""
        self.active = False
        self.complete = False
        """Whether the second step is under way."""
        self.problem = ""
        """Why calls could not be kept, or empty."""
        self.former: list[CapturedCall] = []
        self.present: list[CapturedCall] = []
        self.own_gradients: Gradients = {}
        """What the script's own latest backward left in the parameters, before it clipped or averaged."""
        self.optimizer: torch.optim.Optimizer | None = None
        """The one that is about to update."""
        self.on_backward: Callable[[], None] | None = None
        """Told after each backward of the second step."""
        self._patches: list[Patch] = []
        self.gradient_calls = GradientCalls(self._note_clearing)

    def want(self) -> None:
        """Keep the next two steps; the first begins now, at a boundary."""
        self.drop()
        self.active = True
        self.limit_bytes = room_bytes(str(self._calls.where))
        self._calls.refresh()
        self._calls.capture = self._record
        self.gradient_calls.install()
        self._patches.append(Patch(torch.autograd, "backward", self._noting_gradients))

    def at_boundary(self) -> None:
        """A step has ended: what was kept becomes the former step."""
        if self.problem and self.complete:
            return
        self.former, self.present = self.present, []
        self.own_gradients = {}
        self.problem = ""  # what was too large once may fit where one step alone is kept
        self.complete = True

    def drop(self) -> None:
        """Forget everything and stop."""
        self.active = self.complete = False
        self.problem = ""
        self.former, self.present = [], []
        self.own_gradients, self.optimizer, self.on_backward = {}, None, None
        self._calls.capture = None
        remove_all(self._patches)
        self.gradient_calls.remove()

    def before_update(self, optimizer: torch.optim.Optimizer, *, last: bool) -> None:
        """An optimizer is about to update; parameters that calls of this step have used are kept as they are."""
        self.optimizer = optimizer
        if last or not self.complete:
            return
        values = {p: p.detach() for g in optimizer.param_groups for p in g["params"] if p.grad is not None}
        if self._num_bytes() + num_bytes(values.values()) > self.limit_bytes:
            return  # the replayed gradient will not be the script's own, which shows
        copies = _copies(values)
        for captured in self.present:
            captured.former_values = {**copies, **captured.former_values}

    def _num_bytes(self) -> int:
        values = {id(v): v for c in self.present for v in c.former_values.values()}
        return sum(c.num_bytes for c in (*self.former, *self.present)) + num_bytes(values.values())

    # -- calls ---------------------------------------------------------------------------------------------------

    def _record(self, call: OuterCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        captured = self._keep(call, args, kwargs) if not self.problem else None
        out = call.with_levers(args, kwargs)
        if captured is None:
            return out
        out_bytes = num_bytes(t for t in tensors_of(out) if t.grad_fn is not None)
        if not self._fits(captured.num_bytes + out_bytes):
            return out
        try:
            watched = captured.watch(out) if torch.is_grad_enabled() else out
        except Exception as problem:  # noqa: BLE001  a container of the user's own may refuse in any way
            self._give_up(f"the model's output cannot be followed ({type(problem).__name__})")
            return out
        self.present.append(captured)
        return watched

    def _keep(self, call: OuterCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CapturedCall | None:
        inside_transform = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)() is not None
        if inside_transform:
            self._give_up("the model is called within a transform of `torch.func`")
            return None
        try:
            return CapturedCall(call, args, kwargs, str(self._calls.where), whole=self._calls.infers)
        except Exception as problem:  # noqa: BLE001
            self._give_up(f"the model's inputs cannot be kept ({type(problem).__name__})")
            return None

    def _fits(self, more_bytes: int) -> bool:
        if self._num_bytes() + more_bytes > self.limit_bytes:
            self.former = []  # one step alone, as far as memory allows
        if self._num_bytes() + more_bytes > self.limit_bytes:
            self._give_up(
                "one step's inputs and outputs are larger than the memory set aside for keeping them "
                f"({self.limit_bytes / 1e9:.1f} GB, by what is free)"
            )
            return False
        return True

    def _give_up(self, problem: str) -> None:
        self.problem = problem
        self.present = []

    # -- gradients -----------------------------------------------------------------------------------------------

    def _note_clearing(self, cleared: set[int]) -> None:
        for captured in self.present:
            if any(g is not None for g in captured.gradients):  # not before its gradient has come at all
                captured.cleared |= cleared

    def _noting_gradients(self, original: Any, patch: Patch) -> Any:
        def backward(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            own = not self._calls.inside  # a checkpoint calls backward within a replay as well
            if patch.active and own:
                self.gradient_calls.clippings.clear()
            if patch.active and self.complete and own and not torch.compiler.is_compiling():
                self._note_gradients()
                if self.on_backward is not None:
                    self.on_backward()
            return result

        return backward

    def _note_gradients(self) -> None:
        """Copy the gradients, unless that takes too much memory: then the ones at the update have to do."""
        parameters = {p for call in self._calls.found for p in call.module.parameters() if p.grad is not None}
        if num_bytes(parameters) > self.limit_bytes:
            return
        self.own_gradients = _copies({p: p.grad.detach() for p in parameters if p.grad is not None})
