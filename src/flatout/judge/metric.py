"""Which number says how good a trained model is, and where is it found? Patterns in output, losses, a target.

In: what a script printed. Out: `Reading`s in their order; the last one counts. Files are read in `metric_file`.
"""

from __future__ import annotations

import contextlib
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
"""A pattern that has searched for so long is ended: with nested repeats it would go on for years."""

_NUMBER = re.compile(r"(?:(?<![\w.)\]])[+-])?(?:\d+(?:,\d{3}\b)*(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?")
"""All of a number; a sign is one where nothing that could be subtracted from stands before it."""

_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+(\.\d*)?")
"""A comma elsewhere may be a decimal one, which would make a number of `0,93` that is a hundred times as large."""

_NOT_FINITE = re.compile(r"[+-]?\b(?:nan|inf(?:inity)?)\b", re.IGNORECASE)

FALLING = ("loss", "err", "perplexity", "ppl", "rmse", "mae", "mse", "fid", "nll", "elbo")
RISING = ("acc", "auc", "f1", "score", "bleu", "rouge", "iou", "precision", "recall", "reward", "top1", "top5", "psnr")
"""Words in a metric's name or pattern that say which way it is to go."""


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
    found = []
    with _patience(pattern):
        for at_s, line in lines:
            where = f"the line `{line.strip()[:120]}`"
            matches = list(re.finditer(pattern, line))
            for match in matches:
                _check_whole(match, where)
                found.append(Reading(value=number_of(match[1], where), at_s=at_s))
            if not matches:
                found += [Reading(value=value, at_s=at_s) for value in _not_finite(pattern, line)]
    return found


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


def _not_finite(pattern: str, line: str) -> Iterator[float]:
    """NaN and infinities that stand where the group would take a number."""
    for word in _NOT_FINITE.finditer(line):
        for number in ("0", "0.0000"):
            match = re.search(pattern, line[: word.start()] + number + line[word.end() :])
            if match is not None and match.start(1) == word.start():
                yield float(word[0])
                break


def _check_whole(match: re.Match[str], where: str) -> None:
    """Make sure that the group has not taken a part of a number, as `.*([0-9.]+)` does."""
    first, last = match.span(1)
    for number in _NUMBER.finditer(match.string):
        if number.start() < last and first < number.end() and _is_left(match, number):
            raise RecordError(
                f"the metric is `{match[1]}` of `{number[0]}`: the pattern takes a part of the number",
                cause=f"found in {where}",
                hint=r"some words before the number, and a group of all that it may have: `loss: ([0-9.e+-]+)`",
            )


def _is_left(match: re.Match[str], number: re.Match[str]) -> bool:
    """Whether something of a number is left behind: a part without which the pattern would match there as well.

    What the pattern names itself, as `nll: -([0-9.]+)` does the sign, is not left behind.
    """
    line, (first, last), (begun, ended) = match.string, match.span(1), number.span()
    without = [(line[:begun] + line[first:], begun)] if begun < first else []
    without += [(line[:last] + line[ended:], first)] if last < ended else []
    left = any(other.start(1) == at for text, at in without for other in match.re.finditer(text))
    return left or begun < match.start()


def number_of(text: Any, where: str) -> float:
    """A number as people and programs write it: `98.1%`, `12,345`.

    Raises:
        RecordError: It is none; `where` it was found is said.
    """
    digits = str(text).strip().removesuffix("%")
    try:
        return float(digits.replace(",", "") if _THOUSANDS.fullmatch(digits) else digits)
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

    def mean(first: int, last: int) -> Reading:
        losses = [loss for _, loss in steps[first:last]]
        return Reading(value=sum(losses) / len(losses), at_s=steps[last - 1][0])

    num = len(steps)
    width = max(round(SMOOTH_SHARE * num), 1)
    on_the_way = [mean(end - width, end) for end in range(width, num + 1, max(num // NUM_POINTS, 1))]
    return [*on_the_way, mean(num - max(round(LAST_SHARE * num), 1), num)] if steps else []


def rises(name: str, runs: Sequence[Sequence[Reading]]) -> bool:
    """Whether a metric is to rise: by its name, else by where runs ended against where they began.

    Args:
        name: Of the metric, or its pattern.
        runs: Readings of each run, in order.

    >>> rises("val_loss: ([0-9.]+)", []), rises("accuracy", [])
    (False, True)
    """
    falling, rising = (any(word in name.lower() for word in words) for words in (FALLING, RISING))
    if falling != rising:
        return rising
    ways = 0
    for run in runs:
        values = [r.value for r in run if math.isfinite(r.value)]
        half = len(values) // 2
        if half:
            begun, ended = (sorted(part)[half // 2] for part in (values[:half], values[-half:]))
            ways += (ended > begun) - (ended < begun)
    return ways >= 0


def reached_s(readings: Sequence[Reading], target: float, *, rising: bool) -> float | None:
    """Seconds after which the metric first was at the target or beyond it.

    >>> some = [Reading(value=v, at_s=t) for t, v in ((1.0, 0.5), (2.0, 0.9), (3.0, 0.97))]
    >>> reached_s(some, 0.9, rising=True), reached_s(some, 0.4, rising=False)
    (2.0, None)
    """
    timed = [r for r in readings if r.at_s is not None and math.isfinite(r.value)]
    return next((r.at_s for r in timed if (r.value >= target if rising else r.value <= target)), None)
