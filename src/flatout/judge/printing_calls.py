"""Does a call print, or does it hand a value on? As far as its name tells, and nothing beyond what is listed here.

In: a call as Python's syntax tree has it. Out: a word. A name that is not listed says nothing.
"""

from __future__ import annotations

import ast
from typing import Literal

Kind = Literal["prints", "passes", "steers", "keeps", "unknown"]

PRINTS = frozenset((
    "print", "pprint", "pprint.pprint", "sys.stdout.write", "sys.stderr.write", "tqdm.write", "tqdm.tqdm.write",
    "wandb.log", "mlflow.log_metric", "mlflow.log_metrics",
))  # fmt: skip

PRINTING_METHODS = frozenset((
    "print", "set_postfix", "set_postfix_str", "set_description", "set_description_str", "add_scalar", "add_scalars",
    "add_histogram", "add_text", "writerow", "writerows",
))  # fmt: skip
"""Of progress bars, of TensorBoard's writers, of tables in files; `print` of consoles and of launchers."""

LEVELS = frozenset(("debug", "info", "warning", "error", "critical", "exception", "log"))
"""Methods that print where they are those of something that is named as a logger."""

LOGGERS = frozenset(("logging", "logger", "log", "_logger", "_log"))

PASSES = frozenset((
    "float", "int", "str", "repr", "format", "round", "abs", "min", "max", "sum", "len", "bool", "sorted", "list",
    "tuple", "reversed", "zip", "enumerate", "math.exp", "math.log", "math.log2", "math.log10", "math.sqrt",
    "math.isnan", "math.isinf", "math.isfinite", "np.mean", "numpy.mean", "np.sum", "numpy.sum", "np.exp", "numpy.exp",
    "np.log", "numpy.log", "statistics.mean", "statistics.fmean",
))  # fmt: skip
"""What they are given enters what they return, and nothing else."""

PASSING_METHODS = frozenset((
    "item", "tolist", "numpy", "cpu", "detach", "float", "double", "long", "int", "mean", "sum", "max", "min",
    "argmax", "abs", "round", "sqrt", "exp", "log", "flatten", "squeeze", "is_integer", "format", "join", "strip",
    "ljust", "rjust", "items", "values", "keys", "copy", "clone", "clear", "pop", "popleft",
))  # fmt: skip
"""Methods of numbers, texts, arrays and tensors that return what they were called on, or a part of it, or nothing."""

KEEPING_METHODS = frozenset(("append", "appendleft", "extend", "add", "insert"))
"""Their argument is in the container from then on."""

MAKES_NEW = frozenset((
    "list", "dict", "set", "tuple", "float", "int", "str", "deque", "defaultdict", "Counter", "OrderedDict", "sum",
    "len", "collections.deque", "collections.defaultdict", "collections.Counter", "collections.OrderedDict",
    "torch.zeros", "torch.tensor", "np.zeros", "numpy.zeros", "time.time", "time.perf_counter",
))  # fmt: skip
"""What they return is nobody else's."""


def dotted(node: ast.expr) -> str:
    """A name with its dots, or empty where it is none.

    >>> dotted(ast.parse("sys.stdout.write", mode="eval").body)
    'sys.stdout.write'
    """
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


def kind_of(call: ast.Call) -> Kind:
    """What a call does with an argument, as far as its name tells.

    >>> kind_of(ast.parse("logger.info(x)", mode="eval").body), kind_of(ast.parse("model.log(x)", mode="eval").body)
    ('prints', 'unknown')
    """
    name = dotted(call.func)
    if name in PRINTS:
        return "prints"
    if name in PASSES:
        return "passes"
    if name == "range":
        return "steers"
    if isinstance(call.func, ast.Attribute):
        return _of_method(call.func)
    return "unknown"


def _of_method(function: ast.Attribute) -> Kind:
    if function.attr in PRINTING_METHODS:
        return "prints"
    owner = dotted(function.value).rpartition(".")[2].lower()
    if function.attr in LEVELS and owner in LOGGERS:
        return "prints"
    text = isinstance(function.value, ast.Constant) and isinstance(function.value.value, str)
    if text and function.attr in ("format", "join"):
        return "passes"
    return "keeps" if function.attr in KEEPING_METHODS else "unknown"
