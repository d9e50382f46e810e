"""Which number says how good a trained model is, and where is it found? Patterns in output, keys in files, losses.

In: what a script printed or wrote. Out: `Reading`s in their order; the last one counts. TensorBoard's own reader is
used for its event files.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.errors import MachineError, RecordError, UsageError

LAST_SHARE = 0.1
"""The recorded loss is that of the last so many of the steps, on average: a single batch's says little."""

SMOOTH_SHARE = 0.02
"""On its way it is the mean over so many of all steps."""

NUM_POINTS = 200

_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?")
"""A comma elsewhere may be a decimal one, which would make a number of `0,93` that is a hundred times as large."""

_REST_OF_NUMBER = re.compile(r"[eE][+-]?\d|\.?\d|,\d{3}\b")
"""What goes on in a number whose beginning a group has taken."""

_NOT_FINITE = r"\s*([+-]?(?i:nan|inf(?:inity)?))\b"


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """Where the number is found.

    Attributes:
        pattern: A regular expression with one group, searched in each line of the output; or None.
        file: A JSON or CSV file that the script writes, or a folder with TensorBoard's event files; or None.
        key: The key, column or tag in that file.
    """

    pattern: str | None = None
    file: str | None = None
    key: str = ""

    @property
    def name(self) -> str:
        """How people call it.

        >>> Metric(pattern=r"accuracy: ([0-9.]+)").name, Metric(file="log.csv", key="val_acc").name, Metric().name
        ('accuracy', 'val_acc', 'loss')
        """
        if self.file is not None:
            return self.key
        if self.pattern is None:
            return "loss"
        word = re.match(r"[\\^\s(?:]*([A-Za-z][\w/@ -]*[\w@])", self.pattern)
        return word[1].strip() if word else self.pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The metric once: its value, and the seconds since the start of the run; None where that cannot be seen."""

    value: float
    at_s: float | None = None


def metric_of(pattern: str | None, file: str | None) -> Metric:
    """What `--metric` and `--metric-file` name.

    Raises:
        UsageError: The pattern is none, or has not one group; a file is named without a key.
    """
    if file is not None:
        if not pattern:
            raise UsageError(
                f"`--metric-file {file}` without what to read in it",
                cause="a file holds more than one number",
                hint="`--metric NAME`: a key of JSON (`test.accuracy`), a column of CSV, a tag of TensorBoard",
            )
        return Metric(file=file, key=pattern)
    if pattern is None:
        return Metric()
    try:
        groups = re.compile(pattern).groups
    except (re.error, OverflowError, RecursionError) as problem:  # the latter two: numbers and nests beyond its own
        raise UsageError(
            f"`--metric {pattern}` is no regular expression",
            cause=str(problem),
            hint=r"e.g. `--metric 'accuracy: ([0-9.]+)'`",
        ) from None
    if groups != 1:
        raise UsageError(
            f"`--metric {pattern}` has {groups} groups, not one",
            cause="the group says which part of a line is the number",
            hint=r"e.g. `--metric 'accuracy: ([0-9.]+)'`; `(?:...)` is a group that does not count",
        )
    return Metric(pattern=pattern)


def in_lines(pattern: str, lines: Iterable[tuple[float, str]]) -> list[Reading]:
    """What a pattern finds in lines with the seconds at which they came.

    >>> [r.value for r in in_lines("acc: ([0-9.]+%?)", [(1.0, "acc: 97.5%"), (2.0, "epoch 2"), (3.0, "acc: 98.1%")])]
    [97.5, 98.1]

    NaN and infinity count where a number was expected, whether or not the group would take them: the value before them
    is not what the training came to.

    >>> [r.value for r in in_lines("acc: ([0-9.]+)", [(1.0, "acc: 0.9"), (2.0, "acc: nan")])]
    [0.9, nan]

    Raises:
        RecordError: It matches something that is no number, or a part of one.
    """
    found = []
    instead = _instead_of_number(pattern)
    for at_s, line in lines:
        where = f"the line `{line.strip()[:120]}`"
        matches = list(re.finditer(pattern, line))
        for match in matches:
            _check_whole(match, where)
            found.append(Reading(value=_number(match[1], where), at_s=at_s))
        said = instead.search(line) if not matches and instead is not None else None
        if said is not None and said[1] is not None:
            found.append(Reading(value=float(said[1]), at_s=at_s))
    return found


def _instead_of_number(pattern: str) -> re.Pattern[str] | None:
    """What stands before the group, followed by NaN or infinity; None where nothing does, or the group is inside."""
    group = re.search(r"(?<!\\)(?:\\\\)*\((?!\?)", pattern)
    before = pattern[: group.end() - 1] if group is not None else ""
    if not re.search(r"\w", before):
        return None
    try:
        return re.compile(before + _NOT_FINITE)
    except re.error:  # the bracket stands in a class
        return None


def _check_whole(match: re.Match[str], where: str) -> None:
    taken, ends = match[1] or "", match.end() == match.end(1)
    rest = _REST_OF_NUMBER.match(match.string, match.end()) if ends and taken[-1:].isdigit() else None
    if rest is not None and not (rest[0][0] == "," and "." in taken):
        whole = re.match(r"[\d.,eE+-]+", match.string[match.start(1) :])
        raise RecordError(
            f"the metric is `{taken}` of `{whole[0] if whole else taken}`: the pattern takes a part of the number",
            cause=f"found in {where}",
            hint=r"a group of digits, point and exponent: `([0-9.e+-]+)`; or of all up to the next space: `(\S+)`",
        )


def _number(text: Any, where: str) -> float:
    digits = str(text).strip().removesuffix("%")
    if _THOUSANDS.fullmatch(digits):
        digits = digits.replace(",", "")
    try:
        return float(digits)
    except ValueError:
        raise RecordError(
            f"the metric is `{str(text)[:60]}`, which is no number",
            cause=f"found in {where}",
            hint="a pattern's group should hold digits only, a key name a number",
        ) from None


def in_file(file: Path, key: str, shown: str) -> list[Reading]:
    """What stands in a file that the script wrote.

    Args:
        file: Where it lies now.
        key: What to read.
        shown: How the user calls the file.

    Raises:
        RecordError: It is not there, half written, or holds no such number.
        MachineError: It is TensorBoard's, and TensorBoard is not installed.
    """
    if file.is_dir() or file.name.startswith("events.out.tfevents"):
        return _in_events(file, key, shown)
    try:
        text = file.read_text(encoding="utf-8-sig", errors="replace")  # `-sig`: as Windows' programs begin
    except OSError as problem:
        raise RecordError(
            f"no metric: `{shown}` was not written",
            cause=str(problem.strerror or problem),
            hint="name a file that the script writes, as it is seen from the working folder",
        ) from None
    return _in_csv(text, key, shown) if file.suffix.lower() in (".csv", ".tsv") else _in_json(text, key, shown)


def _in_json(text: str, key: str, shown: str) -> list[Reading]:
    """One object, or one a line (JSON lines); a list of numbers is their order."""
    try:
        rows = [json.loads(text)]
    except (ValueError, RecursionError) as problem:  # the latter: lists in lists in lists
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            rows = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            raise RecordError(
                f"`{shown}` is not JSON: half written, perhaps",
                cause=str(problem),
                hint="the script should write it whole before it ends",
            ) from None
        if not rows:
            raise _without(key, shown, "the file is empty") from None
    found = [value for row in rows for value in _under(row, key)]
    if not found:
        raise _without(key, shown, f"keys are {', '.join(_keys(rows[-1])) or 'none'}")
    return [Reading(value=_number(value, f"`{shown}`")) for value in found]


def _under(row: Any, key: str) -> list[Any]:
    """The values of a key with dots, of one object or of a list of them."""
    if isinstance(row, list) and not key:
        return row
    if isinstance(row, list):
        return [value for one in row for value in _under(one, key)]
    if isinstance(row, dict) and key in row:
        value = row[key]
        return value if isinstance(value, list) else [value]
    first, _, rest = key.partition(".")
    return _under(row[first], rest) if rest and isinstance(row, dict) and first in row else []


def _keys(row: Any) -> list[str]:
    row = row[-1] if isinstance(row, list) and row else row
    return [f"`{key}`" for key in list(row)[:12]] if isinstance(row, dict) else []


def _in_csv(text: str, column: str, shown: str) -> list[Reading]:
    """The column's values; an empty cell says nothing, nor does a last line that is cut.

    A last line without an end is whole where it has all its cells and does not break off at a sign: many scripts join
    their lines, and a script that came to its own end has written what it wrote.
    """
    sample = text.partition("\n")[0]
    delimiter = max((",", ";", "\t"), key=sample.count)
    if not text.endswith("\n") and not _is_whole(text.rpartition("\n")[2], sample.count(delimiter), delimiter):
        text = text.rpartition("\n")[0] + "\n"
    reader = csv.DictReader(io.StringIO(text), delimiter=delimiter)
    try:
        rows, fields = list(reader), reader.fieldnames or ()
    except csv.Error as problem:
        raise RecordError(
            f"`{shown}` is not CSV", cause=str(problem), hint="name a file of lines with one number a column"
        ) from None
    names = {name.strip(): name for name in fields}
    if column not in names:
        raise _without(column, shown, f"columns are {', '.join(f'`{n}`' for n in names) or 'none'}")
    cells = [(row.get(names[column]) or "").strip() for row in rows]
    found = [Reading(value=_number(cell, f"`{shown}`")) for cell in cells if cell]
    if not found:
        raise _without(column, shown, "the column is empty")
    return found


def _is_whole(line: str, num_delimiters: int, delimiter: str) -> bool:
    return line.count(delimiter) == num_delimiters and re.search(r"[\w\"%]\s*$", line) is not None


def _in_events(place: Path, tag: str, shown: str) -> list[Reading]:
    try:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    except ImportError:
        raise MachineError(
            f"`{shown}` holds TensorBoard's events, which only TensorBoard reads",
            cause="the package `tensorboard` is not installed here",
            hint="`pip install tensorboard`",
        ) from None
    files = sorted(place.rglob("events.out.tfevents.*")) if place.is_dir() else [place]
    if not files:
        raise RecordError(
            f"no metric: `{shown}` has no event files",
            cause="none was written in this run",
            hint="name the folder that the script's `SummaryWriter` writes to",
        )
    events, tags = [], set()
    for file in files:
        reader = EventAccumulator(str(file), size_guidance={"scalars": 0, "tensors": 0})
        reader.Reload()
        tags |= {*reader.Tags()["scalars"]}
        if tag in reader.Tags()["scalars"]:
            events += [(event.wall_time, float(event.value)) for event in reader.Scalars(tag)]
    if not tags:
        raise RecordError(
            f"`{shown}` holds no readable events with numbers",
            cause="its event files are empty or damaged, or hold no scalars",
            hint="the script should close its `SummaryWriter`, or flush it, before it ends",
        )
    if not events:
        raise _without(tag, shown, f"tags are {', '.join(f'`{t}`' for t in sorted(tags)[:12])}")
    return [Reading(value=value, at_s=wall_s) for wall_s, value in sorted(events)]


def _without(key: str, shown: str, cause: str) -> RecordError:
    return RecordError(f"`{shown}` has no `{key}`", cause=cause, hint="`--metric NAME` names one of them")


def in_losses(steps: Sequence[tuple[float, float]]) -> list[Reading]:
    """The recorded losses, smoothed: at most `NUM_POINTS` on the way, and the mean of the last tenth at the end.

    Args:
        steps: Seconds since the start of the run, and the loss, of each step.
    """
    if not steps:
        return []
    width = max(round(SMOOTH_SHARE * len(steps)), 1)
    stride = max(len(steps) // NUM_POINTS, 1)
    found = [
        Reading(value=_mean([loss for _, loss in steps[end - width : end]]), at_s=steps[end - 1][0])
        for end in range(width, len(steps) + 1, stride)
    ]
    last = steps[-max(round(LAST_SHARE * len(steps)), 1) :]
    return [*found, Reading(value=_mean([loss for _, loss in last]), at_s=steps[-1][0])]


def _mean(values: Sequence[float]) -> float:
    """Exact as far as floats go; beyond, infinite or NaN, as floats add."""
    try:
        return math.fsum(values) / len(values)
    except (OverflowError, ValueError):
        return sum(values) / len(values)


FALLING = ("loss", "err", "perplexity", "ppl", "rmse", "mae", "mse", "fid", "nll", "elbo")
RISING = ("acc", "auc", "f1", "score", "bleu", "rouge", "iou", "precision", "recall", "reward", "top1", "top5", "psnr")
"""Words in a metric's name or pattern that say which way it is to go."""


def rises(name: str, runs: Sequence[Sequence[Reading]]) -> bool:
    """Whether a metric is to rise: by its name, else by where runs ended against where they began.

    Args:
        name: Of the metric, or its pattern.
        runs: Readings of each run, in order.

    >>> rises("val_loss: ([0-9.]+)", []), rises("accuracy", [])
    (False, True)
    """
    lowered = name.lower()
    falling, rising = (any(word in lowered for word in words) for words in (FALLING, RISING))
    if falling != rising:
        return rising
    found = 0
    for run in runs:
        values = [r.value for r in run if math.isfinite(r.value)]
        if len(values) > 1:
            half = len(values) // 2
            begun, ended = sorted(values[:half])[half // 2], sorted(values[-half:])[half // 2]
            found += (ended > begun) - (ended < begun)
    return found >= 0


def reached_s(readings: Sequence[Reading], target: float, *, rising: bool) -> float | None:
    """Seconds after which the metric first was at the target or beyond it.

    >>> some = [Reading(value=v, at_s=t) for t, v in ((1.0, 0.5), (2.0, 0.9), (3.0, 0.97))]
    >>> reached_s(some, 0.9, rising=True), reached_s(some, 0.4, rising=False)
    (2.0, None)
    """
    timed = [r for r in readings if r.at_s is not None and math.isfinite(r.value)]
    return next((r.at_s for r in timed if (r.value >= target if rising else r.value <= target)), None)
