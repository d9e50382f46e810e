"""How fast is each of the other loaders beside PyTorch's and `--levers input`, on the same work on the same machine?

    python benchmarks/input_others.py --install                     # a virtual environment for each library
    python benchmarks/input_others.py --page                        # measure all, write the page's table
    python benchmarks/input_others.py --libraries dali grain --workloads mnist --rounds 1 --small

Each library does the work as its documentation advises, in a process and a virtual environment of its own
(`others/with_*.py`). First its batches are compared with plain's; then each of its settings (threads, workers) is tried
on a third of the data; then all are timed in turn, each with the settings that were fastest in the first and in the
second pass. Writes `results/input_others_....json`; `--page` writes its tables into
`benchmarks/other-loaders.md`, also from results that are there already.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flatout.judge import stats
from input_workloads import MNIST, copied, jpegs
from measuring import HERE, PYTHON, ROOT, SHARED, quiet, ratio, timed, write

sys.path.insert(0, str(HERE / "others"))
from contract import MARK, STILL, STRIDE, WINDOW, source_of
from edits import edit_lines

import others_page

WORKLOADS = ("mnist", "photographs", "tokens", "tensors")
LIMIT_S = 300
"""For one process."""

TRIED_PART = 3
"""One in so many items, for trying settings."""

CLEARLY = 1.1
"""How many times as fast another setting has to be in a pass to be timed as well."""

COPIES = 5
NUM_CHECKED = 640
NUM_CHECKED_PHOTOGRAPHS = 64
PAGE = ROOT / "benchmarks" / "other-loaders.md"
TORCH = ("torch==2.13.0", "numpy", "pillow")


@dataclass(frozen=True)
class Library:
    """One side.

    Attributes:
        packages: What its virtual environment needs; empty where the benchmark's own Python runs it.
        settings: Threads or workers to try; the first for the comparison of batches.
        more: Settings of single workloads.
    """

    packages: tuple[str, ...] = ()
    settings: tuple[str, ...] = ("1", "2", "4")
    more: Mapping[str, tuple[str, ...]] | None = None
    vision: bool = True
    """Whether torchvision belongs to it."""

    def tried(self, workload: str) -> tuple[str, ...]:
        return self.settings + (self.more or {}).get(workload, ())


LIBRARIES = {
    "plain": Library(settings=("0", "2")),
    "flatout": Library(settings=("0",)),
    "torchdata": Library((*TORCH, "torchdata==0.11.0"), ("1", "2", "4", "2p")),
    "spdl": Library((*TORCH, "spdl==0.8.0"), ("1", "2", "4", "2p")),
    "grain": Library((*TORCH, "grain==0.2.18"), ("0", "1", "2", "4")),
    "dali": Library((*TORCH, "nvidia-dali-cuda120==2.4.0")),
    "litdata": Library((*TORCH, "litdata==0.2.76"), ("0", "1", "2", "4")),
    "webdataset": Library((*TORCH, "webdataset==1.0.2"), ("0", "1", "2", "4")),
    "tf_data": Library(
        ("tensorflow-cpu==2.21.0", "numpy", "pillow"), ("1", "2", "4", "auto"), {"photographs": ("autoc",)}, False
    ),
}


class Sides:
    """The libraries that are here: how each is run, and what it has said."""

    def __init__(self, names: Iterable[str], venvs: Path, folder: Path) -> None:
        self.names = [name for name in names if self.python(name, venvs).exists()]
        self.absent = [name for name in names if name not in self.names]
        self.venvs = venvs
        self.folder = folder

    @staticmethod
    def python(name: str, venvs: Path) -> Path:
        return venvs / name / "bin" / "python" if LIBRARIES[name].packages else Path(PYTHON)

    def run(self, name: str, place: str, *words: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """What a driver said, a dictionary for each job, and how its process went."""
        program = str(HERE / "others" / f"with_{name}.py")
        command = ["timeout", "-k", "5", str(LIMIT_S), str(self.python(name, self.venvs)), program]
        path = f"{ROOT / 'src'}" if not LIBRARIES[name].packages else ""
        done = timed([*command, str(self.folder / place), *words], self.folder, {"PYTHONPATH": path})
        lines = [json.loads(line) for line in done.output.splitlines() if line.startswith(MARK)]
        went: dict[str, Any] = {"exit_code": done.exit_code, "foreign_fraction": done.foreign_fraction}
        if done.exit_code:
            went["said"] = done.output.strip().splitlines()[-3:]
            print(f"  {name}: exit status {done.exit_code}: {went['said']}", flush=True)
        return lines, went


def lay_out(folder: Path, photographs: Sequence[Path], num_mnist: int, part: int) -> None:
    """All data where the drivers look for them; one in so many items."""
    for workload in WORKLOADS:
        (folder / workload).mkdir(parents=True)
    packed = next(MNIST.rglob("train-images-idx3-ubyte.gz")), next(MNIST.rglob("train-labels-idx1-ubyte.gz"))
    images = np.frombuffer(gzip.decompress(packed[0].read_bytes())[16:], np.uint8).reshape(-1, 28, 28)
    labels = np.frombuffer(gzip.decompress(packed[1].read_bytes())[8:], np.uint8).astype(np.int64)
    _save(folder / "mnist", images[: num_mnist // part], labels[: num_mnist // part])
    numbers = np.random.default_rng(0).standard_normal((32_000 // part, 20)).astype(np.float32)
    _save(folder / "tensors", numbers, np.arange(len(numbers)) % 10)
    text = np.frombuffer((SHARED / "text" / "tinyshakespeare.txt").read_bytes(), np.uint8).astype(np.uint16)
    _save(folder / "tokens", text[: 960_257 // part])
    for path in photographs[::part]:
        for number in range(COPIES):
            copied(path, number, folder / "photographs")


def lay_out_checked(folder: Path, whole: Path) -> None:
    """A few items, each with its number for a label, so that they can be told apart in any order."""
    for workload in WORKLOADS:
        (folder / workload).mkdir(parents=True)
    for workload in ("mnist", "tensors"):
        items = np.load(whole / workload / "0.npy")[:NUM_CHECKED]
        _save(folder / workload, items, np.arange(len(items)))
    _save(folder / "tokens", np.load(whole / "tokens" / "0.npy")[:96_257])
    files = sorted((whole / "photographs").iterdir())[:: COPIES if COPIES > 1 else 1]
    for path in files[:NUM_CHECKED_PHOTOGRAPHS]:
        shutil.copy(path, folder / "photographs")


def num_items(folder: Path, workload: str) -> int:
    """How many samples a pass has to give."""
    source = source_of(folder, workload, "")
    return (
        (len(source.arrays[0]) - WINDOW - 1) // STRIDE
        if workload == "tokens"
        else len(source.files or source.arrays[0])
    )


def _save(folder: Path, *arrays: np.ndarray) -> None:
    for number, array in enumerate(arrays):
        np.save(folder / f"{number}.npy", array)


def compare(sides: Sides, workloads: Sequence[str]) -> dict[str, dict[str, Any]]:
    """How far each side's batches are from plain's: the largest differences, and whether order and randomness agree."""
    out = sides.folder / "compared"
    out.mkdir()
    found: dict[str, dict[str, Any]] = {name: {} for name in sides.names}
    for name in sorted(sides.names, key=lambda name: name != "plain"):
        setting = LIBRARIES[name].settings[0]
        jobs = [f"{workload}:{setting}" for workload in workloads]
        sides.run(name, "checked", "--check", str(out), "--jobs", *jobs)
        for workload in workloads:
            path, plain = out / f"{name}_{workload}.npz", out / f"plain_{workload}.npz"
            if path.exists():
                found[name][workload] = differences(np.load(path), np.load(plain))
                print(f"  {name}, {workload}: {found[name][workload]}", flush=True)
    shutil.rmtree(out)
    return found


def differences(one: Any, plain: Any) -> dict[str, Any]:
    """Of two passes over the same few items."""
    kinds = [kind for kind in (*STILL, "items") if kind in plain.files]
    result: dict[str, Any] = {}
    for kind in kinds:
        same = one[kind].shape == plain[kind].shape and one[kind].dtype == plain[kind].dtype
        apart = np.abs(one[kind].astype(np.float64) - plain[kind]) if same else None
        result[kind] = {
            "bits": bool(same and np.array_equal(one[kind], plain[kind])),
            "max": float(apart.max()) if apart is not None else None,
            "mean": float(apart.mean()) if apart is not None else None,
        }
    agree = [bool(a == b) for a, b in zip(one["digests"], plain["digests"], strict=True)]
    return {**result, "order": agree[0], "batches": agree[1], "random_state": agree[2]}


def fastest(tried: Iterable[Mapping[str, Any]]) -> dict[str, list[str]]:
    """For each workload the setting that is fastest in all, and what is clearly faster in one of the passes."""
    rows = list(tried)
    result: dict[str, list[str]] = {}
    for workload in dict.fromkeys(row["job"] for row in rows):
        own = {row["setting"]: row["passes_s"] for row in rows if row["job"] == workload}
        best = min(own, key=lambda setting: sum(own[setting]))
        result[workload] = [best]
        for number in range(len(own[best])):
            other = min(own, key=lambda setting: own[setting][number])
            if own[other][number] * CLEARLY < own[best][number] and other not in result[workload]:
                result[workload].append(other)
    return result


def choose(sides: Sides, workloads: Sequence[str]) -> tuple[dict[str, Any], dict[str, dict[str, list[str]]]]:
    """Try all settings of each side; plain keeps both of its own."""
    tried, chosen = {}, {}
    for name in sides.names:
        settings = {workload: LIBRARIES[name].tried(workload) for workload in workloads}
        if LIBRARIES[name].packages:
            jobs = [f"{workload}:{setting}" for workload in workloads for setting in settings[workload]]
            tried[name], _ = sides.run(name, "tried", "--jobs", *jobs)
            chosen[name] = fastest(tried[name])
        else:
            chosen[name] = {workload: list(of) for workload, of in settings.items()}
        print(f"  {name}: {chosen[name]}", flush=True)
    return tried, chosen


def rounds(sides: Sides, chosen: Mapping[str, Mapping[str, list[str]]], num: int) -> dict[str, Any]:
    """Seconds of each pass, by workload, side and setting; all sides in turn, in every other round backwards."""
    found: dict[str, Any] = {"passes_s": {}, "samples": {}, "went": []}
    whole = {workload: num_items(sides.folder / "whole", workload) for workload in WORKLOADS}
    for number in range(num):
        for name in sides.names if number % 2 == 0 else sides.names[::-1]:
            jobs = [f"{workload}:{setting}" for workload, of in chosen[name].items() for setting in of]
            lines, went = sides.run(name, "whole", "--jobs", *jobs)
            found["went"].append({"round": number, "side": name, **went})
            for line in lines:
                if set(line["samples"]) != {whole[line["job"]]}:
                    went.setdefault("incomplete", []).append(line)
                    print(f"  {name}: not all samples: {line}", flush=True)
                    continue
                of_workload = found["passes_s"].setdefault(line["job"], {})
                passes = of_workload.setdefault(f"{name} {line['setting']}", [[], []])
                for times, seconds in zip(passes, line["passes_s"], strict=True):
                    times.append(seconds)
                found["samples"].setdefault(line["job"], {})[name] = line["samples"]
                if name == "flatout" and (
                    line["problems"] or not any(line[part] for part in ("computed_batches", "images_not_decoded"))
                ):
                    raise SystemExit(f"flatout did not do its work: {line}")
        print(f"round {number + 1} of {num} done", flush=True)
    return found


def judge(found: Mapping[str, Any], pixels: Mapping[str, Any], num: int) -> dict[str, Any]:
    """Of each workload and pass, flatout against the fastest of the others, and the fastest with equal pixels."""
    result: dict[str, Any] = {}
    for workload, passes in found["passes_s"].items():
        for number, which in enumerate(("first", "second")):
            times = {side: of[number] for side, of in passes.items() if len(of[number]) == num}
            ours = [side for side in times if side.startswith("flatout")]
            others = sorted(
                (side for side in times if side not in ours), key=lambda s: stats.summarize(times[s]).median
            )
            equal = [side for side in others if others_page.equal(pixels[side.split()[0]].get(workload))]
            for kind, sides in (("any", others), ("equal", equal)):
                if ours and sides:
                    compared = ratio(times[sides[0]], times[ours[0]])
                    result[f"{workload}_{which}_{kind}"] = {"other": sides[0], **compared}
                    print(
                        f"  {workload}, {which} pass: {others_page.said(compared)}, to {sides[0]} ({kind})", flush=True
                    )
    return result


def install(names: Iterable[str], venvs: Path) -> None:
    """A virtual environment for each library. torchvision's own needs would bring another PyTorch."""
    for name in names:
        python = Sides.python(name, venvs)
        if LIBRARIES[name].packages and not python.exists():
            subprocess.run([PYTHON, "-m", "venv", str(venvs / name)], check=True)
            pip = [str(python), "-m", "pip", "install", "-q"]
            subprocess.run([*pip, *LIBRARIES[name].packages], check=True)
            if LIBRARIES[name].vision:
                subprocess.run([*pip, "--no-deps", "torchvision==0.28.0"], check=True)


def measured(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All that is known in the end."""
    sides = Sides(arguments.libraries, arguments.venvs, folder)
    workloads = arguments.workloads
    photographs = jpegs(arguments.photographs)[:: 5 if arguments.small else 1]
    lay_out(folder / "whole", photographs, arguments.mnist, 1)
    lay_out(folder / "tried", photographs, arguments.mnist, TRIED_PART)
    lay_out_checked(folder / "checked", folder / "whole")
    made = {}
    for name in sides.names:
        for place in ("checked", "tried", "whole"):
            if name in ("litdata", "webdataset"):
                made[name], _ = sides.run(name, place, "--prepare", *workloads)
    print("batches", flush=True)
    pixels = compare(sides, workloads)
    print("settings", flush=True)
    tried, chosen = choose(sides, workloads)
    quiet()
    found = rounds(sides, chosen, arguments.rounds)
    return {
        "absent": sides.absent, "packages": {name: LIBRARIES[name].packages for name in sides.names},
        "rounds": arguments.rounds, "samples": found["samples"], "made": made, "pixels": pixels, "tried": tried,
        "chosen": chosen, "passes_s": found["passes_s"], "went": found["went"],
        "edits": {name: {of: edit_lines(name, of) for of in workloads} for name in sides.names},
        "judged": judge(found, pixels, arguments.rounds),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--libraries", nargs="*", default=list(LIBRARIES), choices=LIBRARIES)
    parser.add_argument("--workloads", nargs="*", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--rounds", type=int, default=4, help="four at least, for an interval")
    parser.add_argument("--mnist", type=int, default=19_200, help="how many of MNIST's images")
    parser.add_argument("--small", action="store_true", help="a fifth of the photographs; nothing is written")
    parser.add_argument("--photographs", type=Path, default=SHARED / "imagenet-sample", help="a folder of JPEGs")
    parser.add_argument("--venvs", type=Path, default=ROOT / ".others", help="where the virtual environments lie")
    parser.add_argument("--install", action="store_true", help="make the virtual environments, measure nothing")
    parser.add_argument("--page", action="store_true", help="write the tables into the page")
    parser.add_argument("--from-results", type=Path, help="run nothing, take these results")
    arguments = parser.parse_args()
    if arguments.install:
        install(arguments.libraries, arguments.venvs.resolve())
        return
    arguments.venvs = arguments.venvs.resolve()
    arguments.libraries = list(dict.fromkeys(["plain", "flatout", *arguments.libraries]))
    if arguments.from_results is not None:
        found = json.loads(arguments.from_results.read_text(encoding="utf-8"))
    else:
        with tempfile.TemporaryDirectory(prefix="flatout-benchmark-") as folder:
            found = measured(arguments, Path(folder))
        if not arguments.small:
            path = write("input_others", found)
            found = json.loads(path.read_text(encoding="utf-8"))
    if arguments.page:
        others_page.into(PAGE, found)


if __name__ == "__main__":
    main()
