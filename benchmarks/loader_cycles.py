"""Does a loader that is opened, used for a batch and closed, again and again, leave anything behind?

    python benchmarks/loader_cycles.py 10000 [--only "workers 2"]

Each configuration, for each number of workers and kind of item, is a process of its own. In: how often. Out: for each
what it holds more after all cycles than after the first fifth, descriptors, threads, processes, shared and other
mappings, and MB, as JSON, a line each; the exit status is 1 where anything countable is more.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from planted_faults import Photos, Rows, held_now, loader_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
import engaged

WORKERS = {
    "plain": (0, 2),
    "watched": (0, 2),
    "virtual_workers": (0, 2),
    "sample_store": (0, 2),
    "workers 0": (2,),
    "workers 2": (1,),
}
"""How many the script asks for; 0 where not given."""

COUNTED = ("descriptors", "threads", "processes", "shared")
SETTLES_S = 15.0
"""How long threads may take that end for having nothing to do, and workers that were told to."""

NUM_PASSES = 20
"""Over each loader; then it is dropped and another is made."""

NUM_FIRST = 4
"""Batches of its first pass, of which two are compared with plain's; of each other pass one is taken."""

SLACK_MAPS, SLACK_MB = 64, 64


def cycles(num: int, num_workers: int, images: bool) -> dict[str, int]:
    """What is held more in the end than after a fifth."""
    with tempfile.TemporaryDirectory() as folder:
        found = []
        dataset = Photos(Path(folder)) if images else Rows()
        for number in range(num):
            if number % NUM_PASSES == 0:
                loader = loader_of(dataset, num_workers)
            taken = list(itertools.islice(loader, 1 if number % NUM_PASSES else NUM_FIRST))
            if number in (num // 5, num - 1):
                del loader, taken
                found.append(_settled())
                loader = loader_of(dataset, num_workers)
    return {name: found[-1][name] - found[0][name] for name in found[0]}


def _settled() -> dict[str, int]:
    """What is held once everything that is about to end has ended."""
    until_s = time.monotonic() + SETTLES_S
    while True:
        gc.collect()
        held = {**held_now(), "shared": Path("/proc/self/maps").read_text().count(" /dev/shm")}
        if (held["threads"] == 1 and not held["processes"]) or time.monotonic() > until_s:
            return held
        time.sleep(0.1)


def all_of(num: int, names: list[str]) -> bool:
    """Run all; whether nothing is left behind."""
    clean = True
    for name, images in itertools.product(names, (False, True)):
        for num_workers in WORKERS.get(name, (0,)):
            environment = {**os.environ, "FLATOUT_ENGAGED": json.dumps(engaged.CONFIGURATIONS[name])}
            if engaged.CONFIGURATIONS[name] is None:
                del environment["FLATOUT_ENGAGED"]
            command = [sys.executable, __file__, str(num), "--workers", str(num_workers), *["--images"] * images]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            more = json.loads(done.stdout)
            clean &= not any(more[kind] > (kind == "descriptors") for kind in COUNTED)  # one may be opened once for all
            clean &= more["maps"] <= SLACK_MAPS and more["mb"] <= SLACK_MB
            kind = "images" if images else "rows"
            print(json.dumps({"configuration": name, "workers": num_workers, "items": kind, **more}), flush=True)
    return clean


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("num", type=int)
    parser.add_argument("--only", action="append", help=f"of {', '.join(engaged.CONFIGURATIONS)}")
    parser.add_argument("--workers", type=int, help="of one configuration, the environment's, in this process")
    parser.add_argument("--images", action="store_true")
    arguments = parser.parse_args()
    if arguments.workers is None:
        sys.exit(0 if all_of(arguments.num, arguments.only or list(engaged.CONFIGURATIONS)) else 1)
    torch.set_num_threads(1)
    more = cycles(arguments.num, arguments.workers, arguments.images)
    if engaged.ENGAGED is not None:
        more["took_effect"] = sum(v for v in engaged.ENGAGED.evidence().values() if isinstance(v, int))
    print(json.dumps(more))


if __name__ == "__main__":
    main()
