"""How does a number read? Seconds, rates, ratios, shares, bytes, counts and ages as people say them.

In: one number of a record, which may be None or NaN. Out: a few characters; never an exponent, never a false digit.
Nothing is computed here but the unit in which a number is shown.
"""

from __future__ import annotations

import math
import re
import unicodedata
from datetime import UTC, datetime
from pathlib import Path

from flatout.frameworks import NAMES, kind

MISSING = "not measured"
"""What stands where a number was not measured; never 0."""

CEILINGS = {
    "memory_copy": "memory",
    "host_to_device": "host to device",
    "device_to_host": "device to host",
    "kernel_launch": "one operation",
}

_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth")

TOKEN = re.compile(r"""(?:[^\s'"]|'[^']*'|"(?:\\.|[^"\\])*")+""")
"""One argument of a command as a shell reads it."""

_BREAKS = re.compile(r"\s*[\t\n\v\f\r\x1c-\x1e\x85\u2028\u2029]\s*")

_UNBREAKABLE = re.compile(r"(?<=\d) (?=[A-Za-zµ%]{1,9}\b|%)|(?<=\d,) (?=[\d.]+\])| (?=[·|] )|(?<=±) |(?<=more:) ")

_BIDIRECTIONAL = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Controls that let a name read differently from what it is."""


def known(value: float | None) -> bool:
    """Whether there is a finite number to show."""
    return value is not None and math.isfinite(value)


def three(value: float) -> str:
    """A number with three digits, thousands grouped, without zeros that say nothing.

    >>> [three(x) for x in (4.3291, 231.2, 36.0, 22693.0, 0.0421, 999.7, 0.0, float("nan"))]
    ['4.33', '231', '36', '22,700', '0.0421', '1,000', '0', 'NaN']
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
    """What no digits can say.

    >>> not_finite(float("nan")), not_finite(float("-inf"))
    ('NaN', '-infinity')
    """
    return "NaN" if math.isnan(value) else "infinity" if value > 0 else "-infinity"


def seconds(value: float | None) -> str:
    """A duration that was measured, in the unit that leaves one to three digits before the point.

    >>> [seconds(x) for x in (0.004329, 27.0, 3.2e-7, 0.0, None)]
    ['4.33 ms', '27 s', '320 ns', '0 s', 'not measured']
    """
    if value is None or not math.isfinite(value):
        return MISSING
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value == 0 or abs(value) >= 0.9995 * size:
            return f"{three(value / size)} {unit}"
    return f"{three(value / 1e-9)} ns"


def duration(value: float | None) -> str:
    """A duration that somebody waited, in whole units.

    >>> [duration(x) for x in (0.42, 71.3, 200.0, 7500.0, 200000.0, None)]
    ['0.4 s', '71 s', '3 min 20 s', '2 h 5 min', '2 days 8 h', 'not measured']
    """
    if value is None or not math.isfinite(value):
        return MISSING
    if value < 9.95:
        return f"{value:.1f} s"
    whole = round(value)
    if whole < 120:
        return f"{whole} s"
    if whole < 7200:
        return _two(whole, (60, "min"), (1, "s"))
    whole = round(value / 60)
    if whole < 48 * 60:
        return _two(whole, (60, "h"), (1, "min"))
    return _two(round(value / 3600), (24, "days"), (1, "h"))


def _two(value: int, large: tuple[int, str], small: tuple[int, str]) -> str:
    first, rest = divmod(value, large[0])
    return f"{first} {large[1]}" + (f" {rest // small[0]} {small[1]}" if rest else "")


def age(value: float | None) -> str:
    """How long ago.

    >>> [age(x) for x in (20.0, 300.0, 7200.0, 86400.0, 172800.0, None)]
    ['just now', '5 minutes ago', '2 hours ago', 'a day ago', '2 days ago', '']
    """
    if value is None or not math.isfinite(value):
        return ""
    if value < 90:
        return "just now"
    for name, size, limit in (("minute", 60, 90 * 60), ("hour", 3600, 23.5 * 3600), ("day", 86400, math.inf)):
        if value < limit:
            number = max(round(value / size), 1)
            return f"{number:,} {name}s ago" if number > 1 else f"a{'n' if name == 'hour' else ''} {name} ago"
    return ""


def rate(value: float | None, what: str = "steps") -> str:
    """So many a second.

    >>> rate(231.4), rate(0.0421)
    ('231 steps/s', '0.0421 steps/s')
    """
    return f"{three(value)} {what}/s" if value is not None and math.isfinite(value) else MISSING


def scaled(value: float | None, unit: str) -> str:
    """A large quantity with its decimal prefix.

    >>> scaled(159e9, "FLOP/s"), scaled(3.61e10, "B/s"), scaled(12.0, "B"), scaled(4.2e15, "FLOP/s")
    ('159 GFLOP/s', '36.1 GB/s', '12 B', '4.2 PFLOP/s')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    for prefix, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * size:
            return f"{three(value / size)} {prefix}{unit}"
    return f"{three(value)} {unit}"


def joules(value: float | None) -> str:
    """An amount of energy.

    >>> joules(1.214), joules(4210.0), joules(0.0421), joules(None)
    ('1.21 J', '4.21 kJ', '42.1 mJ', 'not measured')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{three(1e3 * value)} mJ" if 0 < abs(value) < 0.9995 else scaled(value, "J")


def memory(value: float | None) -> str:
    """An amount of memory, in powers of two as it is sold.

    >>> memory(16 * 2**30), memory(812 * 2**20), memory(None)
    ('16 GiB', '812 MiB', 'not measured')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    for unit, size in (("TiB", 2.0**40), ("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10)):
        if abs(value) >= size:
            return f"{three(value / size)} {unit}"
    return f"{three(value)} B"


def limit(value: float | None, unit: str) -> str:
    """A ceiling in its own unit: `FLOP/s`, `B/s` or `s`.

    >>> limit(159e9, "FLOP/s"), limit(2.1e-6, "s")
    ('159 GFLOP/s', '2.1 µs')
    """
    return seconds(value) if unit == "s" else scaled(value, unit)


def percent(value: float | None) -> str:
    """A fraction in hundredths; below 10 % with one decimal where it says something.

    >>> [percent(x) for x in (0.71, 0.02, 0.014, 0.0004, 0.0, -0.003, None)]
    ['71 %', '2 %', '1.4 %', '< 0.1 %', '0 %', '-0.3 %', 'not measured']
    """
    if value is None or not math.isfinite(value):
        return MISSING
    hundredths = 100 * value
    if 0 < hundredths < 0.05:
        return "< 0.1 %"
    decimals = 0 if abs(hundredths) >= 9.95 else 1
    text = f"{hundredths:,.{decimals}f}".removesuffix(".0")
    return f"{'0' if text == '-0' else text} %"


def scatter(value_s: float, fraction: float | None) -> str:
    """Half the interquartile range of samples over their median; where it is more than that, the range itself.

    >>> scatter(0.00742, 0.02), scatter(0.00742, 6.19), scatter(0.00742, None)
    (' ± 2 %', ' (IQR 91.9 ms)', '')
    """
    if fraction is None or not math.isfinite(fraction):
        return ""
    return f" ± {percent(fraction)}" if fraction <= 1 else f" (IQR {seconds(2 * fraction * value_s)})"


def share(value: float | None) -> str:
    """A part of a whole in a column of such: no decimals from 1 % on.

    >>> [share(x) for x in (0.709, 0.039, 0.0031, 0.0004, None)]
    ['71 %', '4 %', '0.3 %', '< 0.1 %', '?']
    """
    if value is None or not math.isfinite(value):
        return "?"
    return f"{100 * value:.0f} %" if abs(value) >= 0.00995 else percent(value)


def ratio(value: float | None) -> str:
    """A ratio in a table: two decimals, fewer where they are no longer digits.

    >>> ratio(3.049), ratio(12.34), ratio(123.4), ratio(None)
    ('3.05', '12.3', '123', '')
    """
    if value is None or not math.isfinite(value):
        return ""
    return f"{value:,.2f}" if abs(value) < 9.995 else f"{value:,.1f}" if abs(value) < 99.95 else f"{value:,.0f}"


def times(value: float | None) -> str:
    """A ratio in a sentence; near 1 with two decimals, because there they are the news.

    >>> times(3.61), times(1.04), times(0.97), times(12.3)
    ('3.6x', '1.04x', '0.97x', '12x')
    """
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:.2f}x" if value < 1.095 else f"{value:.1f}x" if value < 9.95 else f"{value:,.0f}x"


def interval(low: float | None, high: float | None) -> str:
    """Both ends of an interval, or nothing where it was not measured.

    >>> interval(2.98, 3.11), interval(None, 1.0)
    ('[2.98, 3.11]', '')
    """
    return f"[{ratio(low)}, {ratio(high)}]" if known(low) and known(high) else ""


def count(value: int | None) -> str:
    """A number of things, grouped.

    >>> count(22693), count(None)
    ('22,693', 'not measured')
    """
    return MISSING if value is None else f"{value:,}"


def plural(value: int, noun: str) -> str:
    """A number with its noun.

    >>> plural(1, "lever"), plural(2814, "step"), plural(2, "core")
    ('1 lever', '2,814 steps', '2 cores')
    """
    return f"{value:,} {noun}{'' if value == 1 else 's'}"


def ordinal(value: int) -> str:
    """A place in a row.

    >>> ordinal(9), ordinal(12), ordinal(21), ordinal(103)
    ('ninth', '12th', '21st', '103rd')
    """
    if 1 <= value <= len(_ORDINALS):
        return _ORDINALS[value - 1]
    last = "th" if value % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(value % 10, "th")
    return f"{value:,}{last}"


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
    if name.startswith("matmul_"):
        return name.removeprefix("matmul_")
    if name.startswith("conv_"):
        return f"{name.removeprefix('conv_')} convolution"
    return CEILINGS.get(name, name.replace("_", " "))


def moment(created: str) -> str:
    """A time stamp as a date.

    >>> moment("2026-11-21T10:46:07+00:00"), moment("yesterday")
    ('21 November 2026, 10:46 UTC', 'yesterday')
    """
    found = _parsed(created)
    return created if found is None else f"{found.day} {found:%B %Y, %H:%M} UTC"


def stamp(created: str) -> str:
    """A time stamp in few characters.

    >>> stamp("2026-11-21T10:46:07+00:00"), stamp("yesterday")
    ('2026-11-21 10:46 UTC', 'yesterday')
    """
    found = _parsed(created)
    return created if found is None else f"{found:%Y-%m-%d %H:%M} UTC"


def unix_s(created: str) -> float | None:
    """A time stamp as seconds since 1970, None where it is none.

    >>> unix_s("1970-01-01T00:01:00+00:00")
    60.0
    """
    found = _parsed(created)
    return None if found is None else found.timestamp()


def _parsed(created: str) -> datetime | None:
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
    flat = _BREAKS.sub(" ", text)
    return "".join(_escaped(c) if _is_control(c) else c for c in flat)


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


def _is_control(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs") or character in _BIDIRECTIONAL or character in "\ufffe\uffff"


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
