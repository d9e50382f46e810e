"""What has become of the models that a script calls, as files of another runtime?

Imported in the user's process: the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flatout.records.difference import Difference


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedTensor:
    """A tensor that goes in or comes out.

    Attributes:
        dtype: As NumPy calls it.
        shape: As the script has it.
        has_batch: Whether its dimension 0 is the batch.
    """

    dtype: str
    shape: tuple[int, ...]
    has_batch: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportCheck:
    """The files' answers to some inputs beside the model's own.

    Attributes:
        batch: Size of the batch; None where there is none.
        is_new: Whether none of these inputs was used to export.
        difference: How far the outputs are apart, beside what rounding moves there.
        num_answers: Answers that were compared.
        num_others: Those that are others.
    """

    batch: int | None
    is_new: bool
    difference: Difference
    num_answers: int
    num_others: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModel:
    """One model.

    Attributes:
        name: Of the model, and of its folder where there are several.
        refused: Why it was not exported; empty where it was.
        versions: Of what made the files.
        inputs: Those of a call, in their order.
        outputs: Theirs.
        batch: Size of the batch in the script's calls; None where there is none.
        batch_is_free: Whether the files take any number of rows.
        why_fixed: Why not.
        num_other_kinds: Calls seen with inputs of other types or shapes, for which the files are not made.
        checks: What was compared.
        verdict: Whether the outputs agree: `agrees`, `disagrees` or `inconclusive`.
        detail: Why.
        sha256: By file.
    """

    name: str
    refused: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[ExportedTensor, ...] = ()
    outputs: tuple[ExportedTensor, ...] = ()
    batch: int | None = None
    batch_is_free: bool = False
    why_fixed: str = ""
    num_other_kinds: int = 0
    checks: tuple[ExportCheck, ...] = ()
    verdict: str = ""
    detail: str = ""
    sha256: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelExport:
    """All models of a script.

    Attributes:
        runtime: For what they were exported, as typed after `--to`.
        models: One or more.
        folder: Where they lie; empty until they do.
    """

    runtime: str
    models: tuple[ExportedModel, ...]
    folder: str = ""
    order: int = -1
