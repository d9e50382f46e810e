"""How do models become files that another runtime loads, and how far do these agree with the models?

Calls are kept over some steps; the first of them serve to export, with a free batch where that is right, and the
others, and batches of other sizes put together from their rows, to check. In: captured calls. Out: files, and an
`ExportedModel` of each. Loaded in trials only.
"""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from flatout.frameworks.pytorch.export_formats import FORMATS, Format
from flatout.frameworks.pytorch.numerics.answers import num_changed
from flatout.frameworks.pytorch.numerics.capture import CapturedCall
from flatout.frameworks.pytorch.numerics.compare import compared_outputs
from flatout.frameworks.pytorch.numerics.replay import Replayer
from flatout.frameworks.pytorch.numerics.rounding import Rounding
from flatout.frameworks.pytorch.seams.calls import Calls
from flatout.frameworks.pytorch.seams.exported import (
    BATCHES_APART,
    ExportedCall,
    ExportedKind,
    NotExported,
    refuse,
    silent,
    written_by,
)
from flatout.frameworks.pytorch.seams.outer_call import OuterCall
from flatout.frameworks.pytorch.seams.trees import digest
from flatout.records.exported_models import ExportCheck, ExportedModel, ExportedTensor, ModelExport

ENOUGH_STEPS = 16
"""Steps whose calls are kept, while no model has inputs enough."""

ENOUGH_INPUTS = 6
"""Different inputs of a model: two to export, the others to check."""

_OPERATOR = re.compile(r"(?:\bop='|for operations: )(\w+\.\w+)")
"""As ONNX's exporter and OpenVINO name the one that they do not know."""

Tensors = tuple[torch.Tensor, ...]


class ModelExporter:
    """Keeps calls, then exports.

    Args:
        calls: The seams in the script's models.
        to: The format, a key of `FORMATS`.
        folder: Where files are written, in a folder for each model.
    """

    def __init__(self, calls: Calls, to: str, folder: Path) -> None:
        self._replayer, self._to, self._folder = Replayer(calls), to, folder
        self._num_steps = 0
        self._kept: dict[OuterCall, dict[str, CapturedCall]] = {}

    def add(self, calls: Sequence[CapturedCall]) -> bool:
        """Keep a step's calls, each input once; whether there are enough."""
        self._num_steps += 1
        for one in calls:
            self._kept.setdefault(one.call, {}).setdefault(digest((one.args, one.kwargs)), one)
        enough = bool(self._kept) and all(len(found) >= ENOUGH_INPUTS for found in self._kept.values())
        return enough or self._num_steps >= ENOUGH_STEPS

    def export(self) -> ModelExport:
        """Write the files."""
        models, names = [], set[str]()
        for call, kept in self._kept.items():
            name = base = call.name or type(call.module).__name__
            number = 1
            while name in names:
                number += 1
                name = f"{base}-{number}"
            names.add(name)
            folder = self._folder / name
            try:
                models.append(_Export(self._replayer, list(kept.values()), FORMATS[self._to], folder).made(name))
            except NotExported as problem:
                shutil.rmtree(folder, ignore_errors=True)
                models.append(ExportedModel(name=name, refused=str(problem)))
        return ModelExport(runtime=self._to, models=tuple(models))


class _Export:
    """One model."""

    def __init__(self, replayer: Replayer, calls: Sequence[CapturedCall], to: Format, folder: Path) -> None:
        self._replayer, self._to, self._folder = replayer, to, folder
        self._first, self._call = calls[0], calls[0].call
        _refuse(self._first)
        self._leaves, self._spec = tree_flatten((self._first.args, self._first.kwargs))
        kind = ExportedCall.kind_of(self._leaves, self._spec)
        if kind is None:
            raise NotExported("what the model is given holds objects that are neither tensors nor plain values")
        alike = [one for one in calls if ExportedCall.kind_of(*tree_flatten((one.args, one.kwargs))) == kind]
        self._num_other_kinds = len(calls) - len(alike)
        self._inputs = [_tensors(one) for one in alike]
        self._batch = next((int(t.shape[0]) for t in self._inputs[0] if t.ndim), None) or None
        self._has_batch = [t.ndim > 0 and t.shape[0] == self._batch for t in self._inputs[0]]
        self._module = _OfTensors(copy.deepcopy(self._call.module), self._leaves, self._spec)

    def made(self, name: str) -> ExportedModel:
        """Files, sample inputs and outputs, and what was checked.

        Raises:
            NotExported: It cannot be.
        """
        why = "" if self._batch else "no input has rows"
        try:
            checks = self._attempt(free=not why)
        except NotExported as problem:
            if why:
                raise
            why = str(problem)
            checks = self._attempt(free=False)
        samples = self._inputs[-1]
        outputs = self._computed(samples)
        self._save("inputs", samples)
        self._save("outputs", outputs)
        (self._folder / "load.py").write_text(self._to.loader, encoding="utf-8")
        return ExportedModel(
            name=name,
            versions={one: version(one) for one in dict.fromkeys((*self._to.packages, "torch", "numpy"))},
            inputs=_told(samples, self._has_batch),
            outputs=_told(outputs, [self._batch is not None and t.shape[:1] == (self._batch,) for t in outputs]),
            batch=self._batch,
            batch_is_free=not why,
            why_fixed=why,
            num_other_kinds=self._num_other_kinds,
            checks=checks,
        )

    def _attempt(self, *, free: bool) -> tuple[ExportCheck, ...]:
        """Export, and check; with a batch that is `free`, at two sizes more.

        Raises:
            NotExported: It cannot be, or gives something else.
        """
        num = max(self._batch or 0, 2) if free else self._batch  # of one row alone it would be taken for a constant
        num_used = 2 if free and self._batch == 1 else 1
        example = self._of_rows(self._inputs[:num_used], num) if free and num is not None else self._inputs[0]
        others = self._inputs[num_used:]
        run = self._converted(example, free)
        sizes: list[int | None] = [self._batch]
        if free and num is not None:
            sizes += [3, 5] if self._batch == 1 else [max(num // 2, 1), num + 1]
        source = others or self._inputs
        return tuple(
            self._check(run, source[-1] if size == self._batch else self._of_rows(source, size), size, bool(others))
            for size in sizes
        )

    def _converted(self, example: Tensors, free: bool) -> Any:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        program: Any = None
        dimension = torch.export.Dim("batch", min=1)
        shapes = (tuple({0: dimension} if free and has else None for has in self._has_batch),)
        try:
            with silent(), torch.no_grad():
                program = torch.export.export(self._module, example, dynamic_shapes=shapes, strict=False)
                if written := written_by(program):
                    raise NotExported(f"the model writes into `{written.removeprefix('module.')}`")
                runtime = self._to.runtime(self._module, example)
                runtime.convert(program, self._folder)
                return runtime.load(self._folder)
        except NotExported:
            raise
        except Exception as problem:  # noqa: BLE001  exporters raise anything
            raise NotExported(_why(problem, program)) from None

    def _check(self, run: Any, inputs: Tensors, size: int | None, is_new: bool) -> ExportCheck:
        """The answers of files to some inputs.

        Raises:
            NotExported: They are others than the model's by far, or have other shapes.
        """
        where = "" if size is None else f" for a batch of {size}"
        leaves = list(self._leaves)
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for place, tensor in zip(places, inputs, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self._spec)
        captured = self._first.changed(args=args, kwargs=kwargs)
        try:
            plain = self._replayer.run([captured])
        except Exception as problem:  # noqa: BLE001  the model itself may not take so many rows
            raise NotExported(f"the model raises {type(problem).__name__}{where}") from None
        self._call.compute = lambda *a, **k: ExportedKind(run, self._module.whole(*a, **k))(tree_flatten((a, k))[0])
        try:
            changed = self._replayer.run([captured], levers=True)
        except Exception as problem:  # noqa: BLE001  a runtime raises anything
            raise NotExported(f"{_why(problem)}{where}") from None
        finally:
            self._call.compute = None
        if changed.kinds != plain.kinds:
            raise NotExported(f"its outputs have other types or shapes{where}")
        found = compared_outputs(changed, plain)
        if not found.error <= BATCHES_APART:
            raise NotExported(f"its outputs differ by {found.error:.1e}{where}")
        num_others, num = num_changed(plain, changed)
        for (_, before), (_, after) in zip(plain.integers, changed.integers, strict=True):
            num_others, num = num_others + int((before != after).sum()), num + before.numel()
        found = Rounding(self._replayer, [captured], plain, "rounding").of_outputs(found, changed)
        found = replace(found, finite=changed.finite or not plain.finite)
        return ExportCheck(batch=size, is_new=is_new, difference=found, num_answers=num, num_others=num_others)

    def _of_rows(self, inputs: Sequence[Tensors], size: int | None) -> Tensors:
        """So many rows, from the first of these inputs on and again from it."""
        assert size is not None
        rows = [torch.cat(each) for each in zip(*inputs, strict=True)] if self._batch else []
        found = []
        for tensor, whole, has in zip(inputs[0], rows, self._has_batch, strict=True):
            times = -(-size // len(whole)) if has else 1
            found.append(torch.cat([whole] * times)[:size].contiguous() if has else tensor)
        return tuple(found)

    def _computed(self, inputs: Tensors) -> Tensors:
        with torch.no_grad():
            return tuple(self._module(*(t.clone() for t in inputs)))

    def _save(self, name: str, tensors: Tensors) -> None:
        import numpy

        arrays: Mapping[str, Any] = {f"{name[:-1]}_{n}": t.detach().numpy() for n, t in enumerate(tensors)}
        numpy.savez(self._folder / f"{name}.npz", **arrays)


class _OfTensors(nn.Module):
    """A module as a function of tensors alone, whatever they come in; all else is as it was in one call."""

    def __init__(self, module: nn.Module, leaves: Sequence[Any], spec: TreeSpec) -> None:
        super().__init__()
        self.module = module
        self._kept = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self._spec = spec

    def forward(self, *tensors: torch.Tensor) -> Tensors:
        """The module's tensors."""
        leaves = list(self._kept)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = tree_unflatten(leaves, self._spec)
        return tuple(leaf for leaf in tree_flatten(self.whole(*args, **kwargs))[0] if isinstance(leaf, torch.Tensor))

    def whole(self, *args: Any, **kwargs: Any) -> Any:
        """All that the module returns."""
        return self.module(*args, **kwargs)


def _tensors(captured: CapturedCall) -> Tensors:
    leaves = tree_flatten((captured.args, captured.kwargs))[0]
    return tuple(leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor))


def _refuse(captured: CapturedCall) -> None:
    """Refuse what a file could not be.

    Raises:
        NotExported: It is such a call.
    """
    refuse(captured.call.module)
    tensors = (*captured.call.module.parameters(), *_tensors(captured))
    if captured.call.compiled_by_script:
        raise NotExported("the script compiles the model itself")
    if captured.autocast_dtypes:
        raise NotExported("the script calls the model under autocast")
    if elsewhere := next((t.device for t in tensors if t.device.type != "cpu"), None):
        raise NotExported(f"the model computes on `{elsewhere}`; on a CPU it can be exported")
    if any(t.dtype is torch.bfloat16 for t in tensors):
        raise NotExported("the model computes in bfloat16, which NumPy does not have")


def _why(problem: BaseException, program: Any = None) -> str:
    """What an exporter or a runtime says, and, of an operator, in which module it stands."""
    while problem.__cause__ is not None:
        problem = problem.__cause__
    text = str(problem)
    if operator := _OPERATOR.search(text):
        return f"the operator `{operator[1]}`{_place(operator[1], program)} cannot be exported"
    if "Constraints violated" in text:
        return "`torch.export` finds the number of rows built in"
    if "data-dependent" in text:
        return "which way the model goes depends on values"
    line = next((one.strip() for one in text.splitlines() if one.strip()), "")
    return f"{type(problem).__name__}: {line[:200]}"


def _place(operator: str, program: torch.export.ExportedProgram | None) -> str:
    """In which module an operator stands, perhaps only once others are taken apart into it."""
    if program is None:
        return ""
    with silent():
        graphs = program.graph, program.run_decompositions().graph
    for node in (node for graph in graphs for node in graph.nodes):
        if str(node.target).startswith(operator):
            paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
            if place := (paths or [""])[-1].removeprefix("module").removeprefix("."):
                return f" of `{place}`"
    return ""


def _told(tensors: Tensors, has_batch: Sequence[bool]) -> tuple[ExportedTensor, ...]:
    return tuple(
        ExportedTensor(dtype=str(t.dtype).removeprefix("torch."), shape=tuple(t.shape), has_batch=has)
        for t, has in zip(tensors, has_batch, strict=True)
    )
