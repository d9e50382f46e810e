"""What does flatout itself cost? Its recorder per step, an empty plan, `--help`, the time and memory of `tune`.

python benchmarks/overhead.py [recorder] [empty] [own] [watched] [help] [tune]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path

import psutil

from measuring import FLATOUT, PYTHON, ROOT, SHARED, quiet, ratio, timed, write

SCRIPTS = Path(__file__).resolve().parent / "scripts"
STEPS = ("smallest", "millisecond")
STEADY_AFTER_S = "30"
"""Seconds after which a plan has been checked, for steps of a millisecond."""


def help_time() -> None:
    """Wall time of `flatout --help`, beside that of `python -c pass`."""
    folder = Path(tempfile.mkdtemp())
    sides = {"help": [FLATOUT, "--help"], "python": [PYTHON, "-c", "pass"]}
    samples: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(21):
        for name, command in sides.items():
            samples[name].append(timed(command, folder).wall_s)
    print("help", statistics.median(samples["help"]), "python", statistics.median(samples["python"]))
    write("help", {"unit": "s", "samples": samples, "median_s": statistics.median(samples["help"])})


def empty_plan() -> None:
    """`flatout run` without a plan against plain `python`: seconds at start, and seconds per step.

    A step as small as can be shows what each step costs; one of a millisecond, end to end, whether that is all.
    """
    folder = Path(tempfile.mkdtemp())
    sides = {"plain": [PYTHON], "run": [FLATOUT, "run", "-q"]}
    samples: dict[str, dict[str, list[float]]] = {what: {side: [] for side in sides} for what in ("start", *STEPS)}
    for what in STEPS:
        for number in range(12):
            for side in list(sides) if number % 2 == 0 else list(sides)[::-1]:
                quiet(60)
                command = [*sides[side], str(SCRIPTS / "timed_steps.py"), what]
                samples[what][side].append(float(timed([*command, "8"], folder).output.splitlines()[-1]))
                if what == "smallest":
                    samples["start"][side].append(timed([*command, "0"], folder).wall_s)

    def extra(what: str) -> float:
        pairs = zip(samples[what]["run"], samples[what]["plain"], strict=True)
        return statistics.median(run - plain for run, plain in pairs)

    compared = ratio(samples["millisecond"]["plain"], samples["millisecond"]["run"])
    step_s = statistics.median(samples["millisecond"]["plain"])
    found = {"start_extra_s": extra("start"), "step_extra_s": extra("smallest"), "step_s": step_s}
    print("empty plan:", found, "plain/run", compared["ratio"], [compared["low"], compared["high"]])
    write("empty_plan", {"samples": samples, **found, "step_ratio": compared})


#: how a run may be under way, and seconds until it is in its steady state: a plan is checked first
STEADY = {"plain": ([], 8.0), "watched": (["--levers", "threads=1"], 40.0)}


def own_time() -> None:
    """Seconds of each step inside our code, counted by the profiler, in a run without a plan and in one with it.

    The lever asks for what the script does anyway, so that nothing else differs.
    """
    folder = Path(tempfile.mkdtemp())
    found = {}
    for name, (options, before_s) in STEADY.items():
        quiet(60)
        command = [FLATOUT, "run", "-q", *options, str(SCRIPTS / "own_time.py"), str(before_s)]
        found[name] = json.loads(timed(command, folder).output.splitlines()[-1])
        print("own time", name, {key: value for key, value in found[name].items() if "share" in key})
    write("own_time", {"runs": found})


def watched() -> None:
    """End to end: a step of a millisecond under a plan that is watched, after its check, against plain `python`."""
    folder = Path(tempfile.mkdtemp())
    options = STEADY["watched"][0]
    sides = {"plain": [PYTHON], "run": [FLATOUT, "run", "-q", *options]}
    samples: dict[str, list[float]] = {side: [] for side in sides}
    for number in range(8):
        for side in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            quiet(60)
            command = [*sides[side], str(SCRIPTS / "timed_steps.py"), "millisecond", "12", STEADY_AFTER_S]
            samples[side].append(float(timed(command, folder).output.splitlines()[-1]))
    compared = ratio(samples["plain"], samples["run"])
    print("watched plan: plain/run", compared["ratio"], [compared["low"], compared["high"]])
    write("watched_plan", {"samples": samples, "step_ratio": compared})


def recorder() -> None:
    """How much longer a step of a millisecond takes at each depth of observation."""
    folder = Path(tempfile.mkdtemp())
    found = {}
    for depth in ("counted", "ends", "phases"):
        done = timed([PYTHON, str(SCRIPTS / "recorder_cost.py"), depth], folder)
        found[depth] = json.loads(done.output.splitlines()[-1])
        print("recorder", depth, found[depth]["share"], found[depth]["ratio"])
    write("recorder", {"depths": found})


def tune() -> None:
    """Wall time of `tune` on LeNet, and the memory of the whole process tree beside that of the script alone."""
    folder = Path(tempfile.mkdtemp())
    script = [str(ROOT / "examples" / "lenet.py"), "--data", str(SHARED / "MNIST"), "--epochs", "1"]
    quiet()
    alone = _peak_of([PYTHON, *script], folder)
    tuned = _peak_of([FLATOUT, "tune", "--json", *script], folder)
    extra = tuned["peak_bytes"] - alone["peak_bytes"]
    print("tune", tuned["wall_s"], "s; memory beyond one copy", extra / 1e6, "MB")
    write("tune_lenet", {"alone": alone, "tune": tuned, "extra_bytes": extra})


def _peak_of(command: list[str], folder: Path) -> dict[str, float]:
    """Peak proportional memory (PSS) of everything below us while the command runs."""
    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        own = psutil.Process()
        while not done.wait(0.2):
            total = 0
            for process in own.children(recursive=True):
                try:
                    total += process.memory_full_info().pss
                except (psutil.Error, OSError):
                    continue
            peak = max(peak, total)

    watcher = threading.Thread(target=watch)
    watcher.start()
    begun_s = time.perf_counter()
    result = timed(command, folder)
    done.set()
    watcher.join()
    return {"wall_s": time.perf_counter() - begun_s, "peak_bytes": peak, "exit_code": result.exit_code}


BENCHMARKS = {
    "help": help_time,
    "empty": empty_plan,
    "own": own_time,
    "watched": watched,
    "recorder": recorder,
    "tune": tune,
}

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=list(BENCHMARKS))
    for name in parser.parse_args().names:
        BENCHMARKS[name]()
