"""Batches taken apart into columns, kept row by row, and put together again.

In: collated batches, and the place of each of their rows. Out: batches of any kept rows, in memory of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from flatout.frameworks.pytorch.input.items.first_touch import FirstTouch

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.input.transfer.rows import Mirror

Places: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


class Unkept(Exception):
    """A batch that cannot be kept; the message says why."""


class Column:
    """One tensor of a batch, for all items that are kept."""

    def __init__(self, first: torch.Tensor, num_rows: int) -> None:
        self._row_bytes = first[:1].nbytes
        room = np.empty(num_rows * self._row_bytes, np.uint8)  # NumPy asks for large pages
        self._first_touch = FirstTouch(room)
        self.rows = torch.from_numpy(room).view(first.dtype).view(num_rows, *first.shape[1:])
        self.mirror: Mirror | None = None
        """The same rows on a device."""
        self.num_writes, self.num_arrived = 0, 0
        """How often rows were written; how often a batch of them went to a device."""

    def fits(self, batch: Any) -> bool:
        """Whether rows of this batch can stand beside those that are there."""
        return _is_dense(batch) and batch.dtype is self.rows.dtype and batch.shape[1:] == self.rows.shape[1:]

    def put(self, places: Places | slice, batch: torch.Tensor, which: Places) -> None:
        """Keep some of a batch's rows."""
        rows = batch if len(which) == len(batch) else batch.index_select(0, torch.from_numpy(which))
        if isinstance(places, slice):
            self.rows[places] = rows
            self._first_touch.reached(places.stop * self._row_bytes)
        else:
            self.rows.index_copy_(0, torch.from_numpy(places), rows)
        self.num_writes += 1
        if self.mirror is not None:
            self.mirror.lose(places)

    def take(self, places: Places, missing: torch.Tensor | None) -> torch.Tensor:
        """A batch of kept rows, and of `missing` where a place is -1."""
        if missing is None:
            return self.rows.index_select(0, torch.from_numpy(places))
        batch = self.rows.index_select(0, torch.from_numpy(places.clip(0)))
        return batch.index_copy_(0, torch.from_numpy(np.flatnonzero(places < 0)), missing)


class Texts:
    """One list of texts of a batch, for all items that are kept."""

    def __init__(self, first: Sequence[str], num_rows: int) -> None:
        self._kind = type(first)
        self._rows: list[str] = [""] * num_rows

    def fits(self, batch: Any) -> bool:
        """Whether a batch is of texts as well."""
        return type(batch) is self._kind and _are_texts(batch)

    def put(self, places: Places | slice, batch: Sequence[str], which: Places) -> None:
        """Keep some of a batch's texts."""
        numbers = range(places.start, places.stop) if isinstance(places, slice) else places.tolist()
        for place, number in zip(numbers, which.tolist(), strict=True):
            self._rows[place] = batch[number]

    def take(self, places: Places, missing: Sequence[str] | None) -> Sequence[str]:
        """A batch of kept texts, and of `missing` where a place is -1."""
        others = iter(missing or ())
        return self._kind([self._rows[place] if place >= 0 else next(others) for place in places.tolist()])  # type: ignore[call-arg]


class Columns:
    """All parts of a batch.

    Args:
        first: A batch of the form that they have.
        num_rows: How many may be kept.
    """

    def __init__(self, first: Any, num_rows: int) -> None:
        self._columns: list[Any] = [
            (Column if isinstance(one, torch.Tensor) else Texts)(one, num_rows) for one in leaves_of(first)
        ]
        self._form = _form(first)

    def fits(self, batch: Any) -> bool:
        """Whether rows of this batch can stand beside those that are there."""
        if _form(batch) != self._form:
            return False
        return all(column.fits(leaf) for column, leaf in zip(self._columns, leaves_of(batch), strict=True))

    def put(self, places: Places | slice, batch: Any, which: Places) -> None:
        """Keep those rows of a batch whose numbers are in `which`, at `places`; both in order, none twice."""
        for column, leaf in zip(self._columns, leaves_of(batch), strict=True):
            column.put(places, leaf, which)

    def told(self, batch: Any, tell: Callable[[torch.Tensor, Column], None]) -> None:
        """Tell of which column each tensor of a batch consists."""
        for column, leaf in zip(self._columns, leaves_of(batch), strict=True):
            if isinstance(column, Column):
                tell(leaf, column)

    def take(self, places: Places, missing: Any = None) -> Any:
        """A batch of kept rows, in containers of its own; `missing` is a batch of those whose place is -1.

        Raises:
            Unkept: `missing` does not fit.
        """
        if missing is not None and not self.fits(missing):
            raise Unkept("a batch of another form")
        others = [None] * len(self._columns) if missing is None else leaves_of(missing)
        parts = iter(zip(self._columns, others, strict=True))

        def leaf() -> Any:
            column, of_missing = next(parts)
            return column.take(places, of_missing)

        return _built(self._form, leaf)


def leaves_of(batch: Any) -> list[Any]:
    """The tensors and the lists of texts of a batch, in order.

    Raises:
        Unkept: There is something else in it.
    """
    kind = type(batch)
    if _is_dense(batch) or _are_texts(batch):
        return [batch]
    if kind in (list, tuple) and batch:
        return [leaf for part in batch for leaf in leaves_of(part)]
    if kind is dict:
        return [leaf for part in batch.values() for leaf in leaves_of(part)]
    raise Unkept(f"a batch with a `{kind.__name__}` in it")


def num_bytes(batch: Any) -> int:
    """How much a batch takes, texts by a guess."""
    return sum(leaf.nbytes if isinstance(leaf, torch.Tensor) else sum(map(len, leaf)) for leaf in leaves_of(batch))


def _is_dense(value: Any) -> bool:
    if type(value) is not torch.Tensor or value.layout is not torch.strided or value.device.type != "cpu":
        return False
    usual = value.is_contiguous() and not value.requires_grad and not value.is_quantized and value.dim() > 0
    return usual and not value.is_conj() and not value.is_neg()


def _are_texts(value: Any) -> bool:
    return type(value) in (list, tuple) and bool(value) and all(type(one) is str for one in value)


def _form(batch: Any) -> Any:
    """A batch's containers, None in place of each leaf."""
    kind = type(batch)
    if kind is dict:
        return kind, tuple(batch), tuple(_form(part) for part in batch.values())
    if kind in (list, tuple) and not _are_texts(batch):
        return kind, None, tuple(_form(part) for part in batch)
    return None


def _built(form: Any, leaf: Any) -> Any:
    if form is None:
        return leaf()
    kind, keys, parts = form
    found = [_built(part, leaf) for part in parts]
    return dict(zip(keys, found, strict=True)) if kind is dict else kind(found)
