"""How is a model's call computed by another runtime, and by the model itself wherever that would not be the same?

The call is exported with `torch.export`, once for each kind of inputs (structure, types, shapes): nothing about a batch
is assumed for another. What is not one of these kinds, or comes after a parameter or buffer has changed, is computed
by the model, and counted. In: an `OuterCall` and a runtime. Out: the same outputs, in memory of their own.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import get_ident
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from flatout.frameworks.pytorch.seams.outer_call import OuterCall
from flatout.frameworks.pytorch.seams.patches import Patch
from flatout.frameworks.pytorch.seams.script_code import is_the_scripts
from flatout.frameworks.pytorch.seams.unseen_warnings import unseen_warnings

Run = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""Tensors that go in, in their order; those that come out, each in memory of its own."""

CALLS_BEFORE = 2
"""Calls of one kind of inputs that a run has the model compute before it exports it for them, which takes seconds,
where no trial has."""

num_made = 0
"""Kinds of inputs for which a model was exported, or loaded, in this process; what waits for that is not measured."""

MOST_KINDS = 4
"""Kinds of inputs that a model is exported for; what grows with each call would be exported for ever."""

MOST_SEEN = 1000
"""Kinds of inputs that are remembered; what comes after so many others is the model's own."""

BATCHES_APART = 1e-3
"""Relative difference up to which a call that was just exported may differ from the model's own; what is closer is
judged in the trial. It tells a wrong export, not rounding."""

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
"""What may stand among inputs beside tensors; another value is another kind."""


class NotExported(Exception):
    """Why a model cannot be computed elsewhere, in a few words."""


class Runtime(Protocol):
    """A runtime, as far as it is used."""

    name: str
    """In a file's name: of it and of its version."""

    def convert(self, program: torch.export.ExportedProgram, path: Path) -> None:
        """Write the program as a file that `load` takes.

        Raises:
            Exception: It has something that the runtime does not know.
        """

    def load(self, path: Path) -> Run:
        """What computes it."""


class ExportedCall:
    """Takes the place of a model's call (`OuterCall.compute`).

    Args:
        call: The call.
        runtime: What computes it.
        folder: Where exported models lie.
        at_once: Whether each kind of inputs is exported at its first call, as in trials, whose comparisons begin there.
    """

    apart = BATCHES_APART
    """Relative difference up to which a call that was just exported may differ from the model's own."""

    def __init__(self, call: OuterCall, runtime: Runtime, folder: Path, *, at_once: bool) -> None:
        self._call = call
        self._calls_before = 0 if at_once else CALLS_BEFORE
        self._runtime = runtime
        self._folder = folder
        self._kinds: dict[Any, ExportedKind | None] = {}
        """By kind of inputs; None where it is not to be exported for them."""
        self._seen: dict[Any, int] = {}
        self._state = _State(call.module)
        self._process = os.getpid()
        self._why = ""
        """What among the inputs cannot be told from others."""
        self.num_calls = 0
        self.why_plain = "other shapes or types"
        self.num_plain: dict[str, int] = {}
        """Calls that the model computed, by why."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The call."""
        leaves, spec = tree_flatten((args, kwargs))
        reason = self._reason(leaves)
        exported = None if reason else self._exported(leaves, spec, args, kwargs)
        if exported is None:
            reason = reason or self._why or self.why_plain
            self.num_plain[reason] = self.num_plain.get(reason, 0) + 1
            return self._call.plain(*args, **kwargs)
        self.num_calls += 1
        return exported(leaves)

    def _reason(self, leaves: Sequence[Any]) -> str:
        """Why a call is the model's own, whatever its shapes; empty where it is not."""
        if self._call.module.training:
            return "the model is in training mode"
        if torch.is_autocast_enabled("cpu"):
            return "autocast"
        if os.getpid() != self._process:  # a runtime's threads are not there
            return "a forked process"
        if not self._state.unchanged:
            return "the weights have changed since"
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
            return "gradients of inputs are wanted"
        return ""

    def _exported(
        self, leaves: Sequence[Any], spec: TreeSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ExportedKind | None:
        kind = self.kind_of(leaves, spec)
        if kind is None:
            strange = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, (torch.Tensor, *PLAIN))]
            self._why = f"{(strange or ['a value without a hash'])[0]} among the inputs"
            return None
        if kind in self._kinds:
            return self._kinds[kind]
        if len(self._kinds) >= MOST_KINDS or len(self._seen) >= MOST_SEEN:
            return None
        self._seen[kind] = self._seen.get(kind, 0) + 1
        if self._seen[kind] <= self._calls_before and not self._path(kind).exists():
            return None
        try:
            refuse(self._call.module)
        except NotExported:
            self._kinds[kind] = None
            raise
        out = self._call.plain(*args, **kwargs)  # beside other calls, for the model may wait for one of them
        with self._call.gate.apart():  # while something is exported, PyTorch is not itself in other threads
            if kind not in self._kinds:
                if self._call.compute is not self:  # it was released while this call waited for its turn
                    return None
                self._kinds[kind] = None
                self._kinds[kind] = self._export(kind, args, kwargs, out)
        return self._kinds[kind]

    @staticmethod
    def kind_of(leaves: Sequence[Any], spec: TreeSpec) -> Any:
        """Structure, types and shapes; None where a value cannot be told from others."""
        try:
            kind = (spec, torch.is_grad_enabled(), *map(leaf_kind, leaves))
            hash(kind)
        except TypeError:
            return None
        return kind

    def _path(self, kind: Any) -> Path:
        return self._folder / f"{self._runtime.name}-{self._state.digest(kind)}"

    def _export(self, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> ExportedKind:
        """The call for one kind of inputs, for which the model gives `out`, from a file where there is one.

        Raises:
            NotExported: It cannot be.
        """
        global num_made
        num_made += 1
        path = self._path(kind)
        problem: Exception | None = None
        for fresh in (False, True):
            if fresh or not path.exists():
                shutil.rmtree(path, ignore_errors=True)
                self._convert(path, args, kwargs)
            try:
                exported = ExportedKind(self._runtime.load(path), out)
                exported.check(tree_flatten((args, kwargs))[0], self.apart)
            except Exception as one:  # noqa: BLE001  a file that is torn, or of weights that somebody has changed in it
                problem = one
            else:
                return exported
        raise NotExported(f"{self._runtime.name} does not compute it: {_first_line(problem)}")

    def _convert(self, path: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        unfinished = path.with_suffix(".part")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        try:
            # a copy, for while it is exported a module gives other threads that call it errors, or wrong answers
            module = copy.deepcopy(self._call.module)
            with silent(), torch.no_grad():
                program = torch.export.export(module, args, kwargs, strict=False)
                if written := written_by(program):
                    raise NotExported(f"the model writes into `{written}`")
                self._runtime.convert(program, unfinished)
        except NotExported:
            raise
        except Exception as problem:  # noqa: BLE001  exporters raise anything
            raise NotExported(f"not exported ({type(problem).__name__}: {_first_line(problem)})") from None
        unfinished.rename(path)


class ExportedKind:
    """One kind of inputs: what computes it, and what its outputs are put into."""

    def __init__(self, run: Run, out: Any) -> None:
        self._run = run
        self._leaves, self._spec = tree_flatten(out)
        self._places = [n for n, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)]
        strange = {
            type(leaf).__name__ for leaf in self._leaves if not isinstance(leaf, torch.Tensor | str | bool | None)
        }
        if strange or not self._places:
            raise NotExported(f"the model returns {' and '.join(sorted(strange)) or 'no tensor'}")
        self._wants = [self._leaves[n].requires_grad for n in self._places]
        self._true: list[torch.Tensor] = [self._leaves[n].detach() for n in self._places]
        for place in self._places:
            self._leaves[place] = None

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """The call's outputs."""
        out = list(self._leaves)
        tensors = self._run([leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)])
        for place, tensor, wants in zip(self._places, tensors, self._wants, strict=True):
            out[place] = tensor.requires_grad_() if wants else tensor
        return tree_unflatten(out, self._spec)

    def check(self, leaves: Sequence[Any], apart: float) -> None:
        """Whether it gives what the model gave for the same inputs.

        Raises:
            NotExported: It does not.
        """
        found = tree_flatten(self(leaves))[0]
        expected, self._true = self._true, []
        for place, true in zip(self._places, expected, strict=True):
            tensor = found[place]
            if (tensor.dtype, tensor.shape) != (true.dtype, true.shape):
                raise NotExported(
                    f"it gives {tensor.dtype} of {tuple(tensor.shape)} for {true.dtype} of {tuple(true.shape)}"
                )
            error = relative_difference(tensor, true)
            if not error <= apart:
                raise NotExported(f"its outputs differ by {error:.1e}")


class _State:
    """Parameters and buffers of a module as they were: the same tensors, and not written to since."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._hash: Any = None
        self._kept = [
            (held, name, tensor, tensor._version)
            for part in module.modules()
            for held in (part._parameters, part._buffers)
            for name, tensor in held.items()
            if tensor is not None
        ]

    @property
    def unchanged(self) -> bool:
        """Whether they still are."""
        return all(held.get(name) is t and t._version == version for held, name, t, version in self._kept)

    def digest(self, kind: Any) -> str:
        """A hash of weights, of the code of the model's classes, of versions, and of the kind of inputs."""
        if self._hash is None:
            self._hash = self._hashed()
        state = self._hash.copy()
        state.update(repr(kind).encode())
        return str(state.hexdigest())

    def _hashed(self) -> Any:
        state = hashlib.blake2b(digest_size=12)
        for _, name, tensor, _ in self._kept:
            state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            state.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        for one in {type(part): None for part in self._module.modules() if is_the_scripts(type(part))}:
            with contextlib.suppress(OSError, TypeError):
                state.update(inspect.getsource(one).encode())
        state.update(f"{torch.__version__} {self._module}".encode())
        return state


def written_by(program: torch.export.ExportedProgram) -> str:
    """An input, a parameter or a buffer that the program writes into, itself or through a view; empty where none."""
    signature = program.graph_signature
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    for node in program.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        for argument, value in zip(schema.arguments if schema is not None else (), node.args, strict=False):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            while isinstance(value, torch.fx.Node) and value.op != "placeholder" and value.args:
                value = value.args[0] if _is_a_view(value) else None
            if isinstance(value, torch.fx.Node) and value.op == "placeholder":
                return names.get(value.name, value.name)
    return ""


def _is_a_view(node: torch.fx.Node) -> bool:
    """Whether what it gives lies in the memory of its first argument."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(argument.alias_info is not None for argument in schema.arguments[:1])


def refuse(module: nn.Module) -> None:
    """Refuse a model of which more is asked than outputs, or that computes otherwise from call to call.

    Raises:
        NotExported: It is one.
    """
    for name, part in module.named_modules():
        hooks = [part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks]
        if any(hooks):
            raise NotExported(f"`{name or type(part).__name__}` has a hook of the script's")
        if part.training:
            raise NotExported(f"`{name or type(part).__name__}` is in training mode")
    if isinstance(module, torch.jit.ScriptModule):
        raise NotExported("the model is TorchScript")


def relative_difference(found: torch.Tensor, true: torch.Tensor) -> float:
    """By their norms."""
    found, true = found.detach().double(), true.detach().double()
    return float((found - true).norm() / true.norm().clamp(min=1e-30))


def leaf_kind(leaf: Any, *, of_a_row: bool = False) -> Any:
    """What tells one leaf of inputs from others, whatever a tensor's values, or, `of_a_row`, also its number of rows.

    Raises:
        TypeError: It is of a type whose values cannot be told apart.
    """
    if isinstance(leaf, torch.Tensor):
        return (leaf.dtype, leaf.shape[1:] if of_a_row else leaf.shape, leaf.device, leaf.layout)
    if isinstance(leaf, PLAIN):
        return type(leaf), leaf
    raise TypeError(f"{type(leaf).__name__} among the inputs")


def _first_line(problem: object) -> str:
    return (str(problem).strip().splitlines() or [""])[0][:160]


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """What exporters log and warn of, in this thread, is not the script's to say."""
    ours = get_ident()

    def quiet(original: Any, patch: Patch) -> Any:
        def handle(logger: logging.Logger, record: logging.LogRecord) -> None:
            if record.thread != ours or not patch.active:
                original(logger, record)

        return handle

    patch = Patch(logging.Logger, "handle", quiet)
    try:
        with unseen_warnings():
            yield
    finally:
        patch.remove()
