"""Which number says how good a trained model is, and where is it found? Patterns in output, losses, a target.

In: what a script printed. Out: `Reading`s in their order; the last one counts. Files are read in `metric_file`.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flatout.errors import RecordError, UsageError

LAST_SHARE = 0.1
"""The recorded loss is that of the last so many of the steps, on average: a single batch's says little."""

SMOOTH_SHARE = 0.02
"""On its way it is the mean over so many of all steps."""

NUM_POINTS = 200

SEARCH_S = 30.0
"""A pattern may search a run's output for so many seconds; nested repeats can take longer than the universe is old."""

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
        RecordError: It matches something that is no number, or a part of one; or it takes too long.
    """
    with _patience(pattern):
        return list(_found(pattern, lines))


def _found(pattern: str, lines: Iterable[tuple[float, str]]) -> Iterator[Reading]:
    instead = _instead_of_number(pattern)
    for at_s, line in lines:
        where = f"the line `{line.strip()[:120]}`"
        matches = list(re.finditer(pattern, line))
        for match in matches:
            _check_whole(match, where)
            yield Reading(value=number_of(match[1], where), at_s=at_s)
        said = instead.search(line) if not matches and instead is not None else None
        if said is not None and said[1] is not None:
            yield Reading(value=float(said[1]), at_s=at_s)


def doubled_in(pattern: str, lines: Iterable[tuple[float, str]]) -> str:
    """The first line that a pattern matches more than once, shortened; or nothing.

    >>> doubled_in("mse ([0-9.]+)", [(1.0, "train mse 0.3, val mse 0.4")])
    'train mse 0.3, val mse 0.4'
    """
    with _patience(pattern):
        return next((line.strip()[:120] for _, line in lines if len(re.findall(pattern, line)) > 1), "")


@contextlib.contextmanager
def _patience(pattern: str) -> Iterator[None]:
    """End a search that does not end; Python's matcher listens to signals, which come in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        raise RecordError(
            f"`--metric {pattern}` searched the output for {SEARCH_S:.0f} s and was not done",
            cause="nested repeats, as in `(a+)+`, try a number of ways that doubles with each letter of a line",
            hint=r"a plainer pattern: some words before the number, and `([0-9.e+-]+)`",
        )

    former = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, SEARCH_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)


def _instead_of_number(pattern: str) -> re.Pattern[str] | None:
    """What stands before the group, followed by NaN or infinity; None where nothing does."""
    before, num_open = _before_group(pattern)
    if not re.search(r"\w", before):
        return None
    try:
        return re.compile(before + _NOT_FINITE + ")" * num_open)
    except re.error:  # it stands in a condition, or looks behind itself
        return None


@functools.lru_cache(maxsize=8)
def _before_group(pattern: str) -> tuple[str, int]:
    """What of a pattern stands before its group, and how many brackets are open there.

    >>> _before_group("acc[(]: (?:is (?P<value>[0-9.]+))")
    ('acc[(]: (?:is ', 1)
    """
    token = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?P<\w+>|(?!\?))|\(|\)|.", re.DOTALL)
    num_open = 0
    for found in token.finditer(pattern):
        if (found[0] == "(" and pattern[found.end() : found.end() + 1] != "?") or found[0].startswith("(?P<"):
            return pattern[: found.start()], num_open
        num_open += (found[0] == "(") - (found[0] == ")")
    return "", 0


def _check_whole(match: re.Match[str], where: str) -> None:
    taken, ends = match[1] or "", match.end() == match.end(1)
    rest = _REST_OF_NUMBER.match(match.string, match.end()) if ends and taken[-1:].isdigit() else None
    cut_behind = rest is not None and not (rest[0][0] == "," and "." in taken)
    if cut_behind or _is_cut_before(match, taken):
        start = re.search(r"[-+\d.,]*$", match.string[: match.start(1)])
        whole = re.match(r"[\d.,eE+-]+", match.string[start.start() if start else match.start(1) :])
        raise RecordError(
            f"the metric is `{taken}` of `{whole[0] if whole else taken}`: the pattern takes a part of the number",
            cause=f"found in {where}",
            hint=r"some words before the number, and a group of all that it may have: `loss: ([0-9.e+-]+)`",
        )


def _is_cut_before(match: re.Match[str], taken: str) -> bool:
    """Whether what stands before the group is of the number as well, and the pattern does not say that by itself."""
    before, _ = _before_group(match.re.pattern)
    if re.search(r"[\d.-]$", before) or not taken[:1].isdigit():
        return False
    return re.search(r"(?:(?:^|[\s=:(,\[])-|\d|\d\.)$", match.string[: match.start(1)]) is not None


def number_of(text: Any, where: str) -> float:
    """A number as people and programs write it: `98.1%`, `12,345`.

    Raises:
        RecordError: It is none; `where` it was found is said.
    """
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
