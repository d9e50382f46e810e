"""How soon does a run release a plan that has become slower than plain, and what does watching over it cost?

    python benchmarks/watched.py [core] [shapes] [elsewhere] [calm] [--repetitions 3]

core: another process takes a core at step 500, from a plan whose two threads share two cores. shapes: from step 500 on
each step's input has another shape, under `compile`. elsewhere: the plan, of more threads than there are cores, comes
from a larger machine that looks like this one; and, once, from one that does not look like it. calm: nothing happens.
What happened when is read off the trace, on its own clock. Everything is kept on two cores, so that it is the same on
a machine with many.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from flatout.machine.read import read_machine
from flatout.records import plan_file, trace_file
from flatout.records.plan import PLAN_FILE, PLAN_FORMAT, Plan
from flatout.records.trace import Header, Levers, Record, Toggle, Window
from measuring import FLATOUT, PYTHON, quiet, write

SCRIPT = Path(__file__).resolve().parent / "scripts" / "watched_steps.py"

SLOWER = 1.10
"""A plan whose step takes so many times plain's has to be released,"""

RELEASED_WITHIN_STEPS, RELEASED_WITHIN_S = 200, 60.0
"""within this, whichever is later."""

LEVERS: dict[str, Levers] = {
    "core": {"threads": {"num": 2}},
    "shapes": {"compile": {}},
    "elsewhere": {"threads": {"num": 16}},
    "calm": {"threads": {"num": 2}},
}

START_LIMIT_S = 120.0
"""Until the change at most: `compile` compiles first."""
PATIENCE_S = 90.0
"""How long a release is waited for, and then an engagement."""
AFTER_S = 8.0
CALM_S = 150.0


@dataclass(frozen=True, kw_only=True)
class Times:
    """Moments on the clock of `time.perf_counter`; None where they did not come."""

    over_s: float | None
    stop_s: float


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("plants", nargs="*", default=list(LEVERS))
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    two = sorted(os.sched_getaffinity(0))[:2]
    if len(two) < 2:
        sys.exit("another process can take a core only where there are two")
    os.sched_setaffinity(0, two)
    for plant in arguments.plants:
        runs = [measure(plant) for _ in range(arguments.repetitions if plant != "calm" else 1)]
        found: dict[str, Any] = {"levers": LEVERS[plant], "cores": 2, "runs": runs}
        if plant == "elsewhere":
            found["of_another_machine"] = refused()
        write(f"watched_{plant}", found)


def measure(plant: str) -> dict[str, Any]:
    """One run with one change."""
    quiet(60)
    folder = Path(tempfile.mkdtemp(prefix=f"flatout-watched-{plant}-"))
    try:
        write_plan(plant, folder)
        run = subprocess.Popen(
            [FLATOUT, "run", "--json", "summary.json", str(SCRIPT), plant, str(folder)],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        times = conduct(plant, folder, run)
        output = run.communicate()[0]
        found = {**read(plant, folder, times), "exit_code": run.returncode, "said": output.splitlines()}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(
        plant,
        json.dumps(
            {name: found.get(name) for name in ("engaged_before", "slower", "released", "engaged_again", "looks")}
        ),
    )
    return found


def write_plan(plant: str, folder: Path, **machine: Any) -> None:
    """A plan such as `tune` writes, with this machine's name on it unless another is given."""
    plan = Plan(
        format=PLAN_FORMAT,
        flatout=version("flatout"),
        script=str(SCRIPT),
        arguments=(plant, str(folder)),
        levers=LEVERS[plant],
        ratio=1.5,
        ratio_low=1.4,
        ratio_high=1.6,
        num_pairs=9,
        agreement="rounding: made by hand",
        class_="rounding",
        baseline_steps_per_s=100.0,
        tuned_steps_per_s=150.0,
        machine=replace(read_machine(), **machine),
        python=platform.python_version(),
        framework="pytorch",
        framework_version=version("torch"),
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        run="",
    )
    path = folder / PLAN_FILE
    plan_file.write(plan_file.seen_from(path, plan), path)


def conduct(plant: str, folder: Path, run: subprocess.Popen[str]) -> Times:
    """Make the conditions change and return, and end the script when all has been seen."""
    busy: subprocess.Popen[bytes] | None = None
    over_s: float | None = None
    begun_s = last_s = time.perf_counter()
    changed, num_before = False, 0
    """Decisions before the change: where others disturb, the plan may go before we disturb it."""
    follow = Following(folder)
    found: list[Record] = []
    try:
        while run.poll() is None:
            time.sleep(0.1)
            now_s = time.perf_counter()
            found += follow.new()
            kinds = changes_in(found)[num_before:]
            if not changed and (folder / "change").exists():
                changed, last_s, num_before, kinds = True, now_s, len(kinds), []
                if plant == "core":
                    busy = subprocess.Popen([PYTHON, "-S", "-c", "while True: pass"])
            if over_s is None and changed and plant in ("core", "shapes") and "released" in kinds:
                time.sleep(AFTER_S)
                over_s = last_s = time.perf_counter()
                (folder / "over").touch()
                if busy is not None:
                    busy.kill()
            if _has_ended(plant, kinds, (begun_s, last_s, now_s), changed=changed):
                break
    finally:
        time.sleep(AFTER_S)
        if busy is not None:
            busy.kill()
            busy.wait()
        (folder / "stop").touch()
    return Times(over_s=over_s, stop_s=time.perf_counter())


def _has_ended(plant: str, kinds: Sequence[str], at_s: tuple[float, float, float], *, changed: bool) -> bool:
    """Whether all has been seen; `at_s`: when it began, when something was changed last, and now."""
    begun_s, last_s, now_s = at_s
    if plant == "calm":
        return now_s - begun_s > CALM_S
    if plant == "elsewhere":
        return "released" in kinds or now_s - begun_s > PATIENCE_S
    if not changed:
        return now_s - begun_s > START_LIMIT_S
    return kinds[-2:] == ["released", "engaged again"] or now_s - last_s > PATIENCE_S


# -- what the trace says ---------------------------------------------------------------------------------------------


class Following:
    """Reads what the run in a folder writes down, as soon as there is a trace."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._follower: trace_file.Follower | None = None

    def new(self) -> list[Record]:
        """What has come since the last time."""
        if self._follower is None:
            paths = list(self._folder.glob(".flatout/*/trace-run.jsonl"))
            self._follower = trace_file.Follower(paths[0]) if paths else None
        return [] if self._follower is None else self._follower.new()


def changes_in(found: Sequence[Record]) -> list[str]:
    """The decisions in the trace that changed something, in order."""
    return [decision["kind"] for decision in decisions_in(found) if decision["kind"] != "kept"]


def read(plant: str, folder: Path, times: Times) -> dict[str, Any]:
    """What happened when, in steps and seconds of the run."""
    found = Following(folder).new()
    summary = json.loads((folder / "summary.json").read_text())
    header = next(record for record in found if isinstance(record, Header))
    zero_s = header.zero_monotonic_s or 0.0
    decisions = decisions_in(found)
    change = {"step": 0, "at_s": 0.0}
    if plant in ("core", "shapes") and (folder / "change").exists():
        change = json.loads((folder / "change").read_text())
        change["at_s"] -= zero_s
    over_s = None if times.over_s is None else times.over_s - zero_s
    slower = when_slower(found, plant, change["at_s"], over_s)
    released = next((d for d in decisions if d["kind"] == "released" and d["at_s"] > change["at_s"]), None)
    was_engaged = [d["kind"] for d in decisions if d["at_s"] <= change["at_s"] and d["kind"] != "kept"][-1:] != [
        "released"
    ]
    if released is not None:
        released["steps_later"] = released["step"] - change["step"]
        released["s_later"] = released["at_s"] - change["at_s"]
        in_time = released["steps_later"] <= RELEASED_WITHIN_STEPS or released["s_later"] <= RELEASED_WITHIN_S
        released["in_time"] = in_time
    again = next((d for d in decisions if d["kind"] == "engaged again" and over_s and d["at_s"] > over_s), None)
    if again is not None and over_s is not None:
        again["s_later"] = again["at_s"] - over_s
    return {
        "change": change,
        "engaged_before": was_engaged,
        "slower": slower,
        "released": released,
        "over_s": over_s,
        "engaged_again": again,
        "looks": looks(found, plant, summary),
        "decisions": decisions,
        "summary": summary,
        "windows": [_row(record) for record in found if isinstance(record, Window)],
    }


def _row(window: Window) -> dict[str, Any]:
    return {
        "at_s": round(window.start_s, 3),
        "steps": window.num_steps,
        "step_s": round(window.training_step_s, 6),
        "plan": bool(window.levers),
        "asked": window.order >= 0,
        "foreign": window.foreign_fraction,
        "recompilations": window.recompilations,
    }


def decisions_in(found: Sequence[Record]) -> list[dict[str, Any]]:
    """Decisions with the moment at which they were carried out: the end of the window before."""
    at_s, decisions = 0.0, []
    for record in found:
        if isinstance(record, Window):
            at_s = record.start_s + sum(record.step_s)
        if isinstance(record, Toggle):
            kind = next((k for k in ("released", "engaged again", "kept") if record.reason.startswith(k)), "")
            if kind:
                decisions.append({"kind": kind, "step": record.step, "at_s": at_s, "reason": record.reason})
    return decisions


def when_slower(found: Sequence[Record], plant: str, since_s: float, until_s: float | None) -> dict[str, Any] | None:
    """From when on a step under the plan took `SLOWER` times one without, while the conditions were changed."""
    changed = [
        w for w in found if isinstance(w, Window) and w.start_s >= since_s and (until_s is None or w.start_s < until_s)
    ]
    plain = [w.training_step_s for w in changed if dict(w.levers) != LEVERS[plant] and w.order >= 0]
    plan = [w for w in changed if dict(w.levers) == LEVERS[plant]]
    if not plain or not plan:
        return None
    plain_s = statistics.median(plain)
    first = next((w for w in plan if w.training_step_s >= SLOWER * plain_s), None)
    return {
        "at_s": None if first is None else first.start_s,
        "plain_step_s": plain_s,
        "plan_step_s": statistics.median(w.training_step_s for w in plan),
        "times": statistics.median(w.training_step_s for w in plan) / plain_s,
    }


def looks(found: Sequence[Record], plant: str, summary: dict[str, Any]) -> dict[str, Any]:
    """What probing took: steps without the plan in windows that were asked for while the plan was engaged.

    The check at the start and what comes later are told apart by the first second that the plan was left alone.
    """
    windows = [record for record in found if isinstance(record, Window)]
    free = [w for w in windows if w.order < 0 and sum(w.step_s) > 1.0 and dict(w.levers) == LEVERS[plant]]
    checked_s = free[0].start_s if free else 0.0
    end_s = max((w.start_s + sum(w.step_s) for w in windows), default=0.0)
    asked = [w for w in windows if w.purpose == "check"]
    other = [w for w in asked if dict(w.levers) != LEVERS[plant]]
    later = [w for w in other if w.start_s >= checked_s]
    return {
        "check_steps": sum(w.num_steps for w in other if w.start_s < checked_s),
        "later_steps": sum(w.num_steps for w in later),
        "later_steps_share": sum(w.num_steps for w in later) / max(summary["steps"], 1),
        "cost_s": summary["looking_s"],
        "cost_share": summary["looking_s"] / max(end_s - checked_s, 1e-9),
        "watched_s": end_s - checked_s,
    }


def refused() -> dict[str, Any]:
    """What `run` says and does with a plan that has another machine's name on it."""
    folder = Path(tempfile.mkdtemp(prefix="flatout-watched-other-"))
    try:
        write_plan("elsewhere", folder, num_cores=64, num_physical_cores=32)
        (folder / "stop").touch()
        command = [FLATOUT, "run", "--json", "summary.json", str(SCRIPT), "elsewhere", str(folder)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        summary = json.loads((folder / "summary.json").read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"said": done.stderr.splitlines(), "engaged": summary["engaged"], "levers": summary["levers"]}


if __name__ == "__main__":
    main()
