"""How does a machine's speed vary while a script is measured? Eight models, each made to break another assumption.

In: a random generator and a number of steps. Out: for each step how many times as long as nominal it takes. What others
do to a machine slows both sides of a pair alike, so a model is a stretch of time, not a property of a side.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Slowdowns = NDArray[np.float64]

WINDOW = 62
"""Steps from the start of a window to that of the next: 60 measured ones (0.25 s of 4 ms steps) and 2 that settle."""

TRACES = Path(__file__).parent / "traces"


def white(chance: Generator, num: int) -> Slowdowns:
    """Each step scatters for itself; a window's mean scatters by 3 %."""
    return np.exp(0.03 * np.sqrt(60) * chance.standard_normal(num))


def autocorrelated(chance: Generator, num: int) -> Slowdowns:
    """The speed wanders and returns, with a memory of three windows; a window's mean scatters by 3 %."""
    return np.exp(_wandering(chance, num, memory=3 * WINDOW, deviation=0.035))


def drift(chance: Generator, num: int) -> Slowdowns:
    """Clock and temperature: the machine slows by a third to the end, wanders as it goes, and each window by 1 %."""
    ramp = np.linspace(0.0, chance.uniform(-0.3, 0.3), num)
    walk = np.cumsum(chance.standard_normal(num)) * 0.02 / np.sqrt(WINDOW)
    return np.exp(ramp + walk) * _by_windows(chance, num, 0.01)


def bursts(chance: Generator, num: int) -> Slowdowns:
    """A neighbour takes the core every tenth window, for a window and a half, and makes it 1.2 to 2.5 times as slow."""
    found = _by_windows(chance, num, 0.01)
    start = chance.exponential(10 * WINDOW)
    while start < num:
        end = start + chance.exponential(1.5 * WINDOW)
        found[int(start) : int(end) + 1] *= chance.uniform(1.2, 2.5)
        start = end + chance.exponential(10 * WINDOW)
    return found


def bimodal(chance: Generator, num: int) -> Slowdowns:
    """Two speeds, 42 and 63 steps a second, each kept for about five windows; every tenth step saves."""
    found = _by_windows(chance, num, 0.01)
    position, slow = 0, bool(chance.integers(2))
    while position < num:
        end = position + int(chance.exponential(5 * WINDOW)) + 1
        if slow:
            found[position:end] *= 1.5
        position, slow = end, not slow
    found[int(chance.integers(10)) :: 10] *= 3.0
    return found


def heavy_tail(chance: Generator, num: int) -> Slowdowns:
    """Windows scatter by Student's t of two degrees of freedom, whose variance is infinite; so do steps."""
    windows = 0.02 * chance.standard_t(2, num // WINDOW + 1)
    steps = 0.05 * chance.standard_t(2, num)
    return np.exp(np.clip(np.repeat(windows, WINDOW)[:num] + steps, -3, 3))


def periodic(chance: Generator, num: int) -> Slowdowns:
    """A neighbour's own rhythm, often in step with ours: periods of two and of four windows, or any other."""
    period = chance.choice([2.0, 4.0, chance.uniform(0.3, 20.0)]) * WINDOW
    turn = np.arange(num) / period + chance.uniform()
    wave = np.where(turn % 1 < 0.5, 1.0, 1.08)  # by turns, as a cron job or a garbage collector would
    return wave * _by_windows(chance, num, 0.01)


def replayed(chance: Generator, num: int) -> Slowdowns:
    """Stretches of real step times, recorded on a shared machine, from a random place on."""
    traces = _recorded()
    trace = traces[int(chance.integers(len(traces)))]
    return np.take(trace, np.arange(num) + int(chance.integers(len(trace))), mode="wrap")


MODELS: dict[str, Callable[[Generator, int], Slowdowns]] = {
    model.__name__: model for model in (white, autocorrelated, drift, bursts, bimodal, heavy_tail, periodic, replayed)
}


def _by_windows(chance: Generator, num: int, deviation: float) -> Slowdowns:
    """White noise whose mean over a window scatters by so much."""
    return np.exp(deviation * np.sqrt(60) * chance.standard_normal(num))


def _wandering(chance: Generator, num: int, *, memory: float, deviation: float) -> Slowdowns:
    """A first-order autoregressive process, by its recursion in blocks of one window."""
    from scipy.signal import lfilter

    keeps = np.exp(-1 / memory)
    kicks = chance.standard_normal(num) * np.sqrt(1 - keeps**2)
    kicks[0] = chance.standard_normal()
    return deviation * np.asarray(lfilter([1.0], [1.0, -keeps], kicks))


_CACHE: list[Slowdowns] = []


def _recorded() -> list[Slowdowns]:
    if not _CACHE:
        for path in sorted(TRACES.glob("*.json")):
            steps = np.asarray(json.loads(path.read_text(encoding="utf-8"))["step_s"])
            _CACHE.append(steps / np.median(steps))
    return _CACHE
