"""What is known while one function of the script's is looked at: its names, and what it may return.

In: what its statements assign. Out: values by name.
"""

from __future__ import annotations

import ast
import dis
import types
from pathlib import Path

from flatout.frameworks.pytorch.input.harmless.resolving import Refused
from flatout.frameworks.pytorch.input.harmless.values import Value, either


class Frame:
    """One function that is looked at."""

    def __init__(self, function: types.FunctionType, names: dict[str, Value], owner: type | None) -> None:
        self.function = function
        self.names = names
        self.owner = owner
        """The class in which it is defined."""
        self.returned: Value | None = None
        self.opened: set[str] = set()
        """Names of files from which an image was opened."""
        self.passed: set[str] = set()
        """Names of what is given to a call."""
        self.read: set[str] = set()
        """Names of files that are read by the script itself."""

    def merge(self, others: dict[str, Value]) -> None:
        """Names may also mean what they mean there."""
        for name, value in others.items():
            self.names[name] = either(self.names[name], value) if name in self.names else value

    def refused(self, problem: Refused, node: ast.AST) -> Refused:
        """The same with the line, unless it has one."""
        if problem.placed:
            return problem
        return Refused(
            f"{Path(self.function.__code__.co_filename).name}:{getattr(node, 'lineno', 0)}: {problem}", placed=True
        )


class LocalFunction:
    """A function or lambda that the item's code defines."""

    def __init__(self, arguments: ast.arguments, body: list[ast.stmt], frame: Frame) -> None:
        self.arguments = arguments
        self.body = body
        self.frame = frame


def num_mentions(code: types.CodeType, name: str) -> int:
    """How often a name stands in a function, whatever is done with it."""
    num = sum(one.argval == name for one in dis.get_instructions(code))
    return num + sum(num_mentions(part, name) for part in code.co_consts if isinstance(part, types.CodeType))
