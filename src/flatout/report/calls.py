"""What is said of a script that trains nothing? The words of a step, said of a call, and how long calls take.

In: a `Result` and its `View`. Out: rows, and the view in these words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flatout.judge.latency import PERCENTILES, Latency, fewest
from flatout.judge.result import Result
from flatout.records.facts import ModelFacts
from flatout.report import evidence, words
from flatout.report.view import Row


def rows(result: Result) -> list[Row]:
    """How long calls take, plain and under what was chosen; nothing of a script that trains."""
    if not result.facts.infers:
        return []
    called = "; ".join(_called(model) for model in result.facts.main_models)
    sides = {"plain": "plain", "plan": "with the plan"}
    times = [
        Row(label="" if number else "latency", value=_said(found), note=f"  {sides[side]}", source=evidence.STEPS)
        for number, (side, found) in enumerate((result.latency or {}).items())
    ]
    return [Row(label="calls", note=f"of {called}: nothing is trained here"), *times]


def _called(model: ModelFacts) -> str:
    sizes = [str(size) for size in model.batch_sizes]
    batch = (
        f", batch {' and '.join([', '.join(sizes[:-1]), sizes[-1]]) if len(sizes) > 1 else sizes[0]}" if sizes else ""
    )
    return f"{model.name} ({words.count(model.num_parameters)} parameters{batch})"


def _said(found: Latency) -> str:
    known = [f"p{p} {words.seconds(found.seconds[p])}" for p in PERCENTILES if p in found.seconds]
    missing = [f"p{p} needs {fewest(p)}" for p in PERCENTILES if p not in found.seconds]
    calls = words.plural(found.num_calls, "call")
    rate = f" at {words.rate(found.steps_per_s)}" if found.steps_per_s is not None else ""
    return f"{', '.join(known) or 'not known'} of {calls}{rate}{'; ' + ', '.join(missing) if missing else ''}"


def in_calls(value: Any) -> Any:
    """The same view with every step called a call, in all that is said."""
    if isinstance(value, str):
        return words.in_calls(value)
    if isinstance(value, tuple | list):
        return type(value)(map(in_calls, value))
    if isinstance(value, Mapping):
        return {in_calls(key): in_calls(one) for key, one in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        changed = {name: in_calls(part) for name, part in parts.items()}
        return value if changed == parts else dataclasses.replace(value, **changed)
    return value
