"""How does a number read? Seconds, rates, ratios, shares, bytes, counts and ages as people say them.

In: one number of a record, which may be None or NaN. Out: a few characters; never an exponent, never a false digit.
Nothing is computed here but the unit in which a number is shown.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeGuard

from flatout.frameworks import NAMES, kind

MISSING = "not measured"
"""What stands where a number was not measured; never 0."""

CEILINGS = {
    "memory_copy": "memory",
    "host_to_device": "host to device",
    "device_to_host": "device to host",
    "kernel_launch": "one operation",
}

_SECONDS = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9))
_DECIMAL = (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3), ("", 1.0))
_BINARY = (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))

TOKEN = re.compile(r"""(?:[^\s'"]|'[^']*'|"(?:\\.|[^"\\])*")+""")
"""One argument of a command as a shell reads it."""

_BREAKS = re.compile(r"\s*[\t\n\v\f\r\x1c-\x1e\x85\u2028\u2029]\s*")

_UNBREAKABLE = re.compile(r"(?<=\d) (?=[A-Za-zµ%]{1,9}\b|%)|(?<=\d,) (?=[\d.]+\])| (?=[·|] )|(?<=±) |(?<=more:) ")

_BIDIRECTIONAL = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Controls that let a name read differently from what it is."""


def known(value: float | None) -> TypeGuard[float]:
    """Whether there is a finite number to show."""
    return value is not None and math.isfinite(value)


def three(value: float) -> str:
    """A number with three digits, thousands grouped, without zeros that say nothing.

    >>> [three(x) for x in (4.3291, 231.2, 36.0, 22693.0, 0.0421, 999.7, 0.0, float("nan"), float("-inf"))]
    ['4.33', '231', '36', '22,700', '0.0421', '1,000', '0', 'NaN', '-infinity']
    """
    if not math.isfinite(value):
        return not_finite(value)
    if value == 0:
        return "0"
    digits = 2 - math.floor(math.log10(abs(value)))
    if round(abs(value), digits) >= 10.0 ** (3 - digits):  # 9.997 becomes 10.0, which has one decimal less
        digits -= 1
    text = f"{round(value, digits):,.{max(digits, 0)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def not_finite(value: float) -> str:
    """What no digits can say."""
    return "NaN" if math.isnan(value) else "infinity" if value > 0 else "-infinity"


def _in_unit(value: float, units: Sequence[tuple[str, float]]) -> str:
    """In the largest unit of which it has one, or else in the smallest."""
    unit, size = next((one for one in units if abs(value) >= 0.9995 * one[1]), units[-1])
    return f"{three(value / size)} {unit}"


def seconds(value: float | None) -> str:
    """A duration that was measured, in the unit that leaves one to three digits before the point.

    >>> [seconds(x) for x in (0.004329, 27.0, 3.2e-7, 0.0, None)]
    ['4.33 ms', '27 s', '320 ns', '0 s', 'not measured']
    """
    if not known(value):
        return MISSING
    return _in_unit(value, _SECONDS) if value else "0 s"


def duration(value: float | None) -> str:
    """A duration that somebody waited, in whole units.

    >>> [duration(x) for x in (0.42, 71.3, 200.0, 7500.0, 200000.0, None)]
    ['0.4 s', '71 s', '3 min 20 s', '2 h 5 min', '2 days 8 h', 'not measured']
    """
    if not known(value):
        return MISSING
    if value < 119.5:
        return f"{value:.1f} s" if value < 9.95 else f"{round(value)} s"
    large, small, names = (60, 1, ("min", "s"))
    if value >= 7199.5:
        large, small, names = (3600, 60, ("h", "min")) if value < 172770 else (86400, 3600, ("days", "h"))
    first, rest = divmod(round(value / small), large // small)
    return f"{first} {names[0]}" + (f" {rest} {names[1]}" if rest else "")


def age(value: float | None) -> str:
    """How long ago; empty where that is not known.

    >>> age(300.0), age(None)
    ('5 min ago', '')
    """
    return f"{duration(value)} ago" if known(value) else ""


def rate(value: float | None) -> str:
    """So many steps a second.

    >>> rate(231.4), rate(0.0421)
    ('231 steps/s', '0.0421 steps/s')
    """
    return f"{three(value)} steps/s" if known(value) else MISSING


def scaled(value: float | None, unit: str) -> str:
    """A large quantity with its decimal prefix.

    >>> scaled(159e9, "FLOP/s"), scaled(3.61e10, "B/s"), scaled(12.0, "B"), scaled(4.2e15, "FLOP/s")
    ('159 GFLOP/s', '36.1 GB/s', '12 B', '4.2 PFLOP/s')
    """
    return f"{_in_unit(value, _DECIMAL)}{unit}" if known(value) else MISSING


def joules(value: float | None) -> str:
    """An amount of energy.

    >>> joules(1.214), joules(4210.0), joules(0.0421), joules(None)
    ('1.21 J', '4.21 kJ', '42.1 mJ', 'not measured')
    """
    return f"{three(1e3 * value)} mJ" if known(value) and 0 < abs(value) < 0.9995 else scaled(value, "J")


def memory(value: float | None) -> str:
    """An amount of memory, in powers of two as it is sold.

    >>> memory(16 * 2**30), memory(812 * 2**20), memory(None)
    ('16 GiB', '812 MiB', 'not measured')
    """
    return _in_unit(value, _BINARY) if known(value) else MISSING


def limit(value: float | None, unit: str) -> str:
    """A ceiling in its own unit: `FLOP/s`, `B/s` or `s`."""
    return seconds(value) if unit == "s" else scaled(value, unit)


def percent(value: float | None) -> str:
    """A fraction in hundredths; below 10 % with one decimal where it says something.

    >>> [percent(x) for x in (0.71, 0.02, 0.014, 0.0004, 0.0, -0.003, None)]
    ['71 %', '2 %', '1.4 %', '< 0.1 %', '0 %', '-0.3 %', 'not measured']
    """
    if not known(value):
        return MISSING
    hundredths = 100 * value
    if 0 < hundredths < 0.05:
        return "< 0.1 %"
    text = f"{hundredths:,.{0 if abs(hundredths) >= 9.95 else 1}f}".removesuffix(".0")
    return f"{'0' if text == '-0' else text} %"


def scatter(value_s: float, fraction: float | None) -> str:
    """Half the interquartile range of samples over their median; where it is more than that, the range itself.

    >>> scatter(0.00742, 0.02), scatter(0.00742, 6.19), scatter(0.00742, None)
    (' ± 2 %', ' (IQR 91.9 ms)', '')
    """
    if not known(fraction):
        return ""
    return f" ± {percent(fraction)}" if fraction <= 1 else f" (IQR {seconds(2 * fraction * value_s)})"


def share(value: float | None) -> str:
    """A part of a whole in a column of such: no decimals from 1 % on.

    >>> [share(x) for x in (0.709, 0.039, 0.0031, 0.0004, None)]
    ['71 %', '4 %', '0.3 %', '< 0.1 %', '?']
    """
    if not known(value):
        return "?"
    return f"{100 * value:.0f} %" if abs(value) >= 0.00995 else percent(value)


def ratio(value: float | None) -> str:
    """A ratio in a table: two decimals, fewer where they are no longer digits.

    >>> ratio(3.049), ratio(12.34), ratio(123.4), ratio(None)
    ('3.05', '12.3', '123', '')
    """
    if not known(value):
        return ""
    return f"{value:,.2f}" if abs(value) < 9.995 else f"{value:,.1f}" if abs(value) < 99.95 else f"{value:,.0f}"


def times(value: float | None) -> str:
    """A ratio in a sentence; near 1 with two decimals, because there they are the news.

    >>> times(3.61), times(1.04), times(0.97), times(12.3)
    ('3.6x', '1.04x', '0.97x', '12x')
    """
    if not known(value):
        return MISSING
    return f"{value:.2f}x" if value < 1.095 else f"{value:.1f}x" if value < 9.95 else f"{value:,.0f}x"


def interval(low: float | None, high: float | None) -> str:
    """Both ends of an interval, or nothing where it was not measured.

    >>> interval(2.98, 3.11), interval(None, 1.0)
    ('[2.98, 3.11]', '')
    """
    return f"[{ratio(low)}, {ratio(high)}]" if known(low) and known(high) else ""


def count(value: int | None) -> str:
    """A number of things, grouped."""
    return MISSING if value is None else f"{value:,}"


def plural(value: int, noun: str) -> str:
    """A number with its noun.

    >>> plural(1, "lever"), plural(2814, "step")
    ('1 lever', '2,814 steps')
    """
    return f"{value:,} {noun}{'' if value == 1 else 's'}"


_OF_A_STEP = (
    (re.compile(r"(?<![\w./=-])(?:training )?([Ss])tep(s?)(?![\w.=-])"), lambda m: f"{'Cc'[m[1] == 's']}all{m[2]}"),
    (re.compile(r"(?<![\w./=-])trains (?=[\d.]+ times as fast)"), lambda m: "answers "),
    (re.compile(r"(?<![\w./=-])training waits"), lambda m: "the script waits"),
    (re.compile(r", forward and backward\b"), lambda m: ""),
)
"""What is said of steps, outside of names, options and files, and what is said of calls in its place."""


def in_calls(text: str) -> str:
    """What is said of the steps of a training, said of a script's calls.

    >>> in_calls("a training step takes 3 ms, 12 steps/s; `--steps 3`, `steps.csv`; trains 2 times as fast")
    'a call takes 3 ms, 12 calls/s; `--steps 3`, `steps.csv`; answers 2 times as fast'
    """
    for pattern, said in _OF_A_STEP:
        text = pattern.sub(said, text)
    return text


def framework(name: str, version: str) -> str:
    """A framework with its version, without the part that names a build.

    >>> framework("pytorch", "2.13.0+cpu")
    'PyTorch 2.13.0'
    """
    return f"{label_of(name)} {version.partition('+')[0]}".strip()


def label_of(name: str) -> str:
    """What people call a framework; a record may be of one that is not known here."""
    return kind(name).label if name in NAMES else name


def ceiling(name: str) -> str:
    """What a ceiling limits.

    >>> ceiling("matmul_bfloat16"), ceiling("conv_float32"), ceiling("memory_copy"), ceiling("disk_read")
    ('bfloat16', 'float32 convolution', 'memory', 'disk read')
    """
    what, _, dtype = name.partition("_")
    if what in ("matmul", "conv"):
        return dtype if what == "matmul" else f"{dtype} convolution"
    return CEILINGS.get(name, name.replace("_", " "))


def stamp(created: str) -> str:
    """A time stamp in few characters.

    >>> stamp("2026-11-21T10:46:07+00:00"), stamp("yesterday")
    ('2026-11-21 10:46 UTC', 'yesterday')
    """
    found = moment(created)
    return created if found is None else f"{found:%Y-%m-%d %H:%M} UTC"


def moment(created: str) -> datetime | None:
    """When that was; None where it is no time stamp."""
    try:
        found = datetime.fromisoformat(created)
    except ValueError:
        return None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)


def printable(text: str) -> str:
    r"""Text of a record that cannot move a cursor, break a line, colour a screen or hide what it says.

    >>> printable("a\x1b[31mb\n  c  d")
    'a\\x1b[31mb c  d'
    """
    return "".join(
        (f"\\x{ord(c):02x}" if ord(c) < 0x100 else f"\\u{ord(c):04x}")
        if unicodedata.category(c) in ("Cc", "Cs") or c in _BIDIRECTIONAL or c in "\ufffe\uffff"
        else c
        for c in _BREAKS.sub(" ", text)
    )


def nearby(path: Path) -> Path:
    """A path as it is typed in this folder."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def sentence(text: str) -> str:
    """The beginning of a sentence, which else stays as it is.

    >>> sentence("no lever of PyTorch")
    'No lever of PyTorch'
    """
    return text[:1].upper() + text[1:]


def shortened(text: str, most: int) -> str:
    """Text of at most so many characters: what does not fit ends at a word, with an ellipsis.

    >>> shortened("the interval is too wide to tell", 20), shortened("short", 20), shortened("x" * 30, 20)
    ('the interval is too…', 'short', 'xxxxxxxxxxxxxxxxxxx…')
    """
    if len(text) <= most:
        return text
    cut = text[:most].rpartition(" ")[0].rstrip(" ,;:+")
    return f"{cut if len(cut) > most // 2 else text[: most - 1]}…"


def unbroken(text: str, glue: str) -> str:
    """Text in which the spaces that must stay in one line, as between a number and its unit, are `glue`.

    >>> unbroken("4.33 ms a step [3.49, 3.70] ± 2 %", "_")
    '4.33_ms a step [3.49,_3.70] ±_2_%'
    """
    return _UNBREAKABLE.sub(glue, text)
