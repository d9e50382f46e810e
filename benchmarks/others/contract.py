"""What does a driver of one library have to do, and how is it asked?

    PYTHON with_LIBRARY.py FOLDER --prepare mnist tokens
    PYTHON with_LIBRARY.py FOLDER --jobs mnist:2 photographs:4 [--passes 2]
    PYTHON with_LIBRARY.py FOLDER --check OUT --jobs mnist:1

In: a folder of data as `input_others.py` lays it out, and for each workload a function that makes a loader. Out: a line
of JSON for each job, with the seconds of each pass; the first has the making of the loader in it, not the reading of
data that a workload has in memory. With `--check` the batches themselves, as arrays.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MARK = '{"job":'
BATCH = {"mnist": 64, "photographs": 32, "tokens": 32, "tensors": 64}
MNIST_MEAN, MNIST_STD = 0.1307, 0.3081
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZE = 224
WINDOW, STRIDE = 256, 150
"""Tokens of a window, and from one's beginning to the next one's."""

STILL = ("decoded", "resized")
"""What of a photograph is compared where nothing is random: a square of its middle; a fixed box, resized."""

MIDDLE = 128


@dataclass(frozen=True)
class Source:
    """What a workload reads.

    Attributes:
        arrays: What lies in memory: images and labels, or numbers and labels, or tokens.
        files: Photographs; the label of one is its place in this list.
        made: Where a library's own format lies, if it has one.
        still: Empty; or one of `STILL`, for the photographs without their random part.
    """

    arrays: tuple[np.ndarray, ...] = ()
    files: tuple[str, ...] = ()
    made: Path = Path()
    still: str = ""


Make = Callable[[Source, str], Iterable[Any]]
"""Makes a loader for so many threads or workers, or another setting of the driver's; iterating it is one pass."""

Prepare = Callable[[Source], None]


def source_of(folder: Path, workload: str, library: str, still: str = "") -> Source:
    """Read what is in memory before anything is timed."""
    made = folder / "made" / library / workload
    if workload == "photographs":
        files = tuple(sorted(str(path) for path in (folder / "photographs").iterdir()))
        return Source(files=files, made=made, still=still)
    arrays = tuple(np.load(path) for path in sorted((folder / workload).iterdir()))
    return Source(arrays=arrays, made=made)


def pass_s(loader: Iterable[Any], begun_s: float) -> tuple[float, int]:
    """Seconds since then at the end of a pass, and its samples."""
    num = 0
    for batch in loader:
        num += len(batch[0])
    return time.perf_counter() - begun_s, num


def timed(make: Make, source: Source, setting: str, num_passes: int) -> dict[str, Any]:
    """Seconds of each pass, and how many samples one gave."""
    passes_s, samples = [], []
    begun_s = time.perf_counter()
    loader = make(source, setting)
    for _ in range(num_passes):
        seconds, num = pass_s(loader, begun_s)
        passes_s.append(seconds)
        samples.append(num)
        begun_s = time.perf_counter()
    return {"passes_s": passes_s, "samples": samples}


def given(loader: Iterable[Any]) -> tuple[np.ndarray, np.ndarray]:
    """All that a pass gives, in its order."""
    batches = [(np.array(x), np.array(y)) for x, y, *_ in loader]
    return np.concatenate([x for x, _ in batches]), np.concatenate([y for _, y in batches])


def ordered(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The items in an order that is theirs: by a label that is their number, or by themselves (tokens)."""
    return x[np.argsort(y)] if y.ndim == 1 else x[np.lexsort(x.T[::-1])]


def checked(make: Make, folder: Path, workload: str, library: str, setting: str) -> dict[str, np.ndarray]:
    """One pass as arrays: its items in their own order, what order they came in, and what became of the randomness."""
    found = {}
    for still in STILL if workload == "photographs" else ():
        _seed()
        found[still] = ordered(*given(make(source_of(folder, workload, library, still), setting)))
    _seed()
    x, y = given(make(source_of(folder, workload, library), setting))
    if workload != "photographs":
        found["items"] = ordered(x, y)
    order = y if y.ndim == 1 else x[:, :8]
    digests = [order.astype(np.int64).tobytes(), np.ascontiguousarray(x).tobytes(), _random_state()]
    found["digests"] = np.array([hashlib.sha256(part).hexdigest() for part in digests])
    return found


def _seed() -> None:
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


def _random_state() -> bytes:
    return bytes(sys.modules["torch"].get_rng_state().numpy()) if "torch" in sys.modules else b""


def jobs(words: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Workload and setting of each `workload:setting`."""
    for word in words:
        workload, _, setting = word.partition(":")
        yield workload, setting


def main(
    library: str,
    makers: Mapping[str, Make],
    preparations: Mapping[str, Prepare] | None = None,
    evidence: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prepare", nargs="*", default=())
    parser.add_argument("--jobs", nargs="*", default=())
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--check", type=Path)
    arguments = parser.parse_args()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    for workload in arguments.prepare:
        source = source_of(arguments.folder, workload, library)
        if preparations and workload in preparations and not source.made.exists():
            source.made.mkdir(parents=True)
            begun_s = time.perf_counter()
            preparations[workload](source)
            num_bytes = sum(path.stat().st_size for path in source.made.rglob("*") if path.is_file())
            _tell(workload, "prepare", {"prepare_s": time.perf_counter() - begun_s, "made_bytes": num_bytes})
    for workload, setting in jobs(arguments.jobs):
        if arguments.check is not None:
            found = checked(makers[workload], arguments.folder, workload, library, setting)
            np.savez(arguments.check / f"{library}_{workload}.npz", **found)  # type: ignore[arg-type]
            _tell(workload, setting, {"checked": True, **evidence()})
            continue
        source = source_of(arguments.folder, workload, library)
        _tell(workload, setting, timed(makers[workload], source, setting, arguments.passes) | evidence())
        gc.collect()


def _tell(workload: str, setting: str, found: dict[str, Any]) -> None:
    print(json.dumps({"job": workload, "setting": setting, **found}), flush=True)
