"""How is a model's call computed in numbers that must first be fitted to the script's own inputs?

Once it is engaged in a trial, the first inputs that differ are kept, and the artifact is made from them; hashes of
them lie beside it, so that nobody judges it by what it was fitted to. A run loads it: it fits nothing, for what it made
nobody would have judged. In: an `OuterCall` and a runtime that is given inputs. Out: as `ExportedCall`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils._pytree import TreeSpec, tree_flatten

from flatout.frameworks.pytorch.seams.exported import ExportedCall, ExportedKind, NotExported, Run
from flatout.frameworks.pytorch.seams.outer_call import OuterCall
from flatout.frameworks.pytorch.seams.trees import digest as hash_of

CALIBRATION_INPUTS = 32
"""Different inputs that it is fitted to, each of them one call's."""

CALLS_WITHOUT_NEW = 64
"""After so many calls one after the other with inputs that were seen before, there are no others."""

MOST_BYTES = 2**30
"""Inputs that are kept for it."""

ARTIFACT_APART = 0.5
"""Relative difference of the first outputs beyond which it is a wrong artifact; answers judge what is closer."""

LIST = "calibration.json"


class CalibratedRuntime(Protocol):
    """A runtime that fits numbers to inputs."""

    name: str
    inputs: list[list[torch.Tensor]]
    """The tensors of each call that `convert` fits to."""

    def convert(self, program: torch.export.ExportedProgram, path: Path) -> None:
        """Write the artifact."""

    def load(self, path: Path) -> Run:
        """What computes it."""

    def described(self, path: Path) -> str:
        """How much of the model the artifact computes in other numbers, in a few words."""


class CalibratedCall(ExportedCall):
    """Takes the place of a model's call, once its artifact is there."""

    apart = ARTIFACT_APART

    def __init__(self, call: OuterCall, runtime: CalibratedRuntime, folder: Path, *, at_once: bool) -> None:
        super().__init__(call, runtime, folder, at_once=at_once)
        self._calibrated_runtime = runtime
        self._may_fit = at_once
        self._kept: dict[Any, dict[str, list[torch.Tensor]]] = {}
        """By kind of inputs, those that differ, by their hash."""
        self._num_without_new = 0
        self._whole: set[Path] = set()
        self.calibrated_with: set[str] = set()
        """Hashes of the inputs that the artifacts in use were fitted to."""

    def _exported(
        self, leaves: Sequence[Any], spec: TreeSpec, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> ExportedKind | None:
        kind = self.kind_of(leaves, spec)
        if kind is None:
            return None
        path = self._path(kind)
        if kind not in self._kinds and not self._is_whole(path):
            if not self._may_fit:
                self.why_plain = "its artifact is torn" if path.exists() else "no artifact for these inputs"
                return None
            if not self._has_enough(kind, args, kwargs):
                self.why_plain = "calibrating"
                return None
            self._calibrated_runtime.inputs = list(self._kept[kind].values())
        self.why_plain = "other shapes or types"
        return super()._exported(leaves, spec, args, kwargs)

    def _has_enough(self, kind: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether with this call there are inputs enough.

        Raises:
            NotExported: There will not be.
        """
        kept = self._kept.setdefault(kind, {})
        tensors = [leaf.detach() for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
        digest = hash_of((args, kwargs))
        self._num_without_new += 1
        if digest not in kept and all(bool(torch.isfinite(t).all()) for t in tensors if t.is_floating_point()):
            kept[digest] = [t.clone() for t in tensors]
            self._num_without_new = 0
        if self._num_without_new >= CALLS_WITHOUT_NEW:
            raise NotExported(f"the script calls with {len(kept)} different inputs: too few to calibrate and to judge")
        if sum(t.nbytes for one in kept.values() for t in one) > MOST_BYTES:
            raise NotExported("its inputs are too large to be kept for calibration")
        return len(kept) >= CALIBRATION_INPUTS

    def _convert(self, path: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._calibrated_runtime.inputs:
            raise NotExported("it has no inputs to be calibrated with")
        super()._convert(path, args, kwargs)
        inputs, self._calibrated_runtime.inputs = self._calibrated_runtime.inputs, []
        hashes = next((list(kept) for kept in self._kept.values() if list(kept.values()) == inputs), [])
        self._kept.clear()
        found = {"artifact": _file_digest(path), "inputs": hashes}
        (path / LIST).write_text(json.dumps(found))
        self._whole.add(path)
        self.calibrated_with |= {*hashes}

    def described(self) -> str:
        """What the artifacts are, and their size beside the model's; empty where there is none."""
        tensors = [*self._call.module.parameters(), *self._call.module.buffers()]
        of_model = f"for the model's {sum(t.nbytes for t in tensors) / 1e6:.3g} MB"
        return "; ".join(
            f"{self._calibrated_runtime.described(path)}, "
            f"{sum(one.stat().st_size for one in path.iterdir()) / 1e6:.3g} MB on disk {of_model}"
            for path in sorted(self._whole)
        )

    def _is_whole(self, path: Path) -> bool:
        """Whether what lies there is what was written; in a trial what is torn is thrown away."""
        if path in self._whole:
            return True
        try:
            found = json.loads((path / LIST).read_text())
            whole = found["artifact"] == _file_digest(path)
        except (OSError, ValueError, KeyError, TypeError):
            whole = False
        if whole:
            self._whole.add(path)
            self.calibrated_with |= {*found["inputs"]}
        elif self._may_fit:
            shutil.rmtree(path, ignore_errors=True)
        return whole


def _file_digest(path: Path) -> str:
    found = hashlib.blake2b(digest_size=12)
    for file in sorted(one for one in path.iterdir() if one.name != LIST):
        found.update(file.name.encode())
        found.update(file.read_bytes())
    return found.hexdigest()
