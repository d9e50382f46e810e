"""What has been seen while a dataset is read: values, where they come from, and what was done to them.

In: operations of the list with the values of one item. Out: the `Program` that they make.
"""

from __future__ import annotations

import dataclasses
import types
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils._pytree import tree_leaves

from flatout.frameworks.pytorch.input.items import images
from flatout.frameworks.pytorch.input.items.operations import SUBSCRIPT, Operation
from flatout.frameworks.pytorch.input.items.program import (
    DATASET,
    DRAWN,
    INDEX,
    Instruction,
    Program,
    Slot,
    form_of,
    layout_of,
    require,
    require_truth,
    slots_of,
)
from flatout.frameworks.pytorch.input.items.random_transforms import RandomTransform, kinds_of
from flatout.frameworks.pytorch.input.items.rows import Rows, Unvectorised, kind_of
from flatout.guest.interruptions import let_through

MAX_INSTRUCTIONS = 300

_DECIDED = (bool, int, float, str, type(None), tuple, list, dict, np.bool_)
"""Types whose truth no code of the script's decides."""

_INLINE = (int, float, str, bytes, bool, type(None), type(Ellipsis))


class Unread(Exception):
    """What a dataset does is not known; the message says what and where."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A value of the item that is read.

    Attributes:
        value: The value itself.
        operand: How a program gets it: a `Slot`, a constant, or a tuple, list or dictionary of operands.
        varies: Whether it differs from item to item.
        parts: What a tuple, list or dictionary was made of, where it was made while reading.
    """

    value: Any
    operand: Any
    varies: bool = False
    parts: Any = None


class Recording:
    """A program under way."""

    def __init__(self, dataset: Any, index: int) -> None:
        self.dataset = Seen(dataset, DATASET)
        self.index = Seen(index, INDEX, varies=True)
        self.line = ""
        """Where the operation at hand stands."""
        self.taken_bytes = 0
        """What was taken out of tensors and arrays for one item."""
        self._instructions: list[Instruction] = []
        self._constants: list[Any] = [None, None, None]
        self._guards: dict[tuple[int, str], Callable[[], bool]] = {}
        self.functions: list[types.FunctionType] = []
        """Those that were run for the item."""
        self._typed: set[tuple[Any, type]] = set()
        self._fresh: set[Slot] = set()
        """What lies in memory of its own."""
        self._used: set[Slot] = set()
        self._overwritten: set[Slot] = set()
        self._spending: dict[int, Callable[..., Any]] = {}
        """For each result that can be put where an operand lies: how."""
        self._takes: dict[Slot, Any] = {}
        """For each result that was taken out of what all items share: out of what."""
        self._varying: set[Slot] = set()
        """What differs from item to item, or is known only once there are items."""
        self._works = False
        self._draws: list[int] = []

    def program(self, item: Seen) -> Program:
        """The program whose result is `item`."""
        if self._overwritten & slots_of(item.operand):
            raise self.unread("something that was changed in place is used again")
        return Program(
            instructions=self._frugal(item),
            constants=tuple(self._constants),
            item=item.operand,
            guards=tuple(self._guards.values()),
            takes=tuple(self._takes.values()),
            parameters=self._parameters(),
            varying=frozenset(self._varying),
            works=self._works,
            draws=tuple(self._draws),
            functions=tuple(self.functions),
        )

    def _frugal(self, item: Seen) -> tuple[Instruction, ...]:
        """The instructions, each with its result where its operand lies if nobody looks at that again."""
        uses = Counter(leaf for leaf in tree_leaves(item.operand) if type(leaf) is Slot)
        for one in self._instructions:
            uses.update(leaf for leaf in tree_leaves((one.operands, one.keywords)) if type(leaf) is Slot)
        found = []
        for one in self._instructions:
            spending = self._spending.get(one.target)
            if spending is not None and one.operands[1] in self._fresh and uses[one.operands[1]] == 1:
                one = dataclasses.replace(one, compute=spending)
            found.append(one)
        return tuple(found)

    def _parameters(self) -> tuple[Any, ...]:
        """What is the same for all items, and goes into what is not, beside that of which they are taken."""
        found: dict[Slot, None] = {}
        for one in self._instructions:
            target = Slot(one.target)
            if target in self._varying:
                used = slots_of((one.operands, one.keywords)) - self._varying - {INDEX, DRAWN, self._takes.get(target)}
                found.update(dict.fromkeys(sorted(used, key=lambda slot: slot.number)))
        return tuple(found)

    def constant(self, value: Any) -> Seen:
        """A value that is the same at all times."""
        if type(value) in _INLINE:
            return Seen(value, value)
        return Seen(value, self._slot(value))

    def structure(self, parts: Any) -> Seen:
        """A tuple, list or dictionary of what has been seen."""
        if type(parts) is dict:
            each = parts.values()
            value: Any = {key: part.value for key, part in parts.items()}
            operand: Any = {key: part.operand for key, part in parts.items()}
        else:
            each, kind = parts, type(parts)
            value, operand = kind(part.value for part in parts), kind(part.operand for part in parts)
        return Seen(value, operand, any(part.varies for part in each), parts)

    def apply(self, operation: Operation, operands: Sequence[Seen], keywords: dict[str, Seen] | None = None) -> Seen:
        """Do an operation of the list."""
        keywords = keywords or {}
        changed = operands[0].operand if operation.in_place else None
        if operation.in_place and (changed not in self._fresh or changed in self._used):
            raise self.unread(f"`{operation.name}` changes what may be used elsewhere")
        try:
            value = operation.plain(*[o.value for o in operands], **{k: o.value for k, o in keywords.items()})
        except Exception as problem:
            let_through(problem)
            raise self.unread(f"`{operation.name}` raises {type(problem).__name__}") from problem
        varies = any(o.varies for o in (*operands, *keywords.values()))
        target = self._add(
            operation.rows if varies else operation.plain,
            tuple(o.operand for o in operands),
            {k: o.operand for k, o in keywords.items()},
        )
        if operation.fresh:
            self._fresh.add(target)
        if operation.in_place:
            self._overwritten.add(operands[0].operand)
        if varies and operation.spending is not None:
            self._spending[target.number] = operation.spending
        if varies and operation.name == SUBSCRIPT.name and not operands[0].varies:
            self._takes[target] = operands[0].operand
        self._works |= varies and operation.fresh
        return Seen(value, target, varies and not operation.same)

    def draw(self, transform: Seen, image: Seen, known: RandomTransform) -> Seen:
        """Do a random transform, whose numbers are drawn for all items before anything is computed."""
        try:
            kinds = kinds_of(known, transform.value, image.value)
        except Unvectorised as problem:
            raise self.unread(str(problem)) from problem
        first = len(self._draws)
        self._draws += kinds

        def rows(now: Any, value: Any, numbers: list[Any]) -> Rows:
            if kinds_of(known, now, value) != kinds:
                raise Unvectorised("a random transform that was changed since it was read")
            own = numbers[first : first + len(kinds)] if kinds else []
            return Rows("image", known.rows(now, images.of(value), own))

        name = f"torchvision.{type(transform.value).__name__}"
        operation = Operation(name, lambda own, value, _: own(value), rows, fresh=True)
        self.of_type(transform, type(transform.value))
        return self.apply(operation, [transform, image, Seen(None, DRAWN, varies=True)])

    def attribute(self, of: Seen, name: str) -> Seen:
        """An attribute that lies in an object's own dictionary."""
        return Seen(getattr(of.value, name), self._add(getattr, (of.operand, name)))

    def absent(self, of: Seen, name: str) -> None:
        """What was found in the class of an object is not hidden by the object itself."""
        if type(of.operand) is Slot:
            self._add(require, (of.operand, lambda one: name in getattr(one, "__dict__", ()), False))

    def of_kind(self, seen: Seen, container: Seen) -> None:
        """What is taken from a container is of the kind that it was when it was read, and lies in memory alike."""
        if seen.varies and type(seen.operand) is Slot:
            kind = kind_of(seen.value)
            form = kind, None if kind == "int" else getattr(seen.value, "dtype", None)
            self._add(require, (seen.operand, form_of, form))
            if not container.varies:
                self.taken_bytes += getattr(seen.value, "nbytes", 0)
                self._add(require, (container.operand, layout_of, layout_of(container.value)))

    def truth(self, condition: Seen) -> bool:
        """Which way a branch goes, which it must go each time."""
        if type(condition.value) not in _DECIDED:
            raise self.unread(f"whether a `{type(condition.value).__name__}` is true")
        expected = bool(condition.value)
        if condition.varies or type(condition.operand) is Slot:
            self._add(require_truth, (condition.operand, expected))
        return expected

    def of_type(self, seen: Seen, kind: type) -> None:
        """What was looked up by the type of a value is right while it has that type."""
        if type(seen.operand) is Slot and not seen.varies and (seen.operand, kind) not in self._typed:
            self._typed.add((seen.operand, kind))
            self._add(require, (seen.operand, type, kind))

    def guard(self, owner: Any, name: str, holds: Callable[[], bool]) -> None:
        """Something about the code that must stay as it is."""
        self._guards[id(owner), name] = holds

    def unread(self, why: str) -> Unread:
        """The error that ends the reading."""
        return Unread(f"{self.line}: {why}" if self.line else why)

    def _slot(self, value: Any) -> Slot:
        self._constants.append(value)
        return Slot(len(self._constants) - 1)

    def _add(
        self, compute: Callable[..., Any], operands: tuple[Any, ...], keywords: dict[str, Any] | None = None
    ) -> Slot:
        if len(self._instructions) >= MAX_INSTRUCTIONS:
            raise self.unread(f"more than {MAX_INSTRUCTIONS} operations")
        keywords = keywords or {}
        used = slots_of((operands, keywords))
        if used & self._overwritten:
            raise self.unread("something that was changed in place is used again")
        self._used |= used
        target = self._slot(None)
        if used & {INDEX, DRAWN, *self._varying}:
            self._varying.add(target)
        self._instructions.append(Instruction(target.number, compute, operands, keywords))
        return target
