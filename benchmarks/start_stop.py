"""Start `flatout run` and stop it within its first seconds, again and again: is anything left?

    python benchmarks/start_stop.py --cycles 1000 --at-once 4

Each cycle starts a script that trains for ever under a lever, waits for a random moment within the first two seconds
(imports, the claim, the first steps, the check of the levers), and sends SIGINT or SIGTERM, to flatout alone or to its
whole process group as a terminal does. Afterwards there must be no process, no pipe, no claim, no session and no
temporary file. Prints one JSON object; exit code 1 where anything is left, or a run ended otherwise than by its signal.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = """\
import torch

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
"""

LONGEST_S = 2.0
PATIENCE_S = 60.0

SWALLOWED_S = 5.0
"""After so long Ctrl-C is pressed once more: for some 30 ms of its import, PyTorch 2.13 swallows the first, in plain
Python as well (27 of 100 between 0.18 and 0.34 s after the start)."""


def ends_in_its_way(code: int, number: int, said: str) -> bool:
    """Whether a run ended as one that is stopped does: by the signal, or as a shell shows it; a Python that is
    interrupted in its very start calls that a fatal error."""
    return code in (-number, 128 + number) or (code == 1 and "Fatal Python error" in said)


def cycle(folder: Path, number: int, longest_s: float) -> tuple[str, float, int, str]:
    """Start and stop once: the signal, the moment, the exit code, what stood on stderr."""
    lots = random.Random(number)
    place = folder / f"run-{number % 50}"
    place.mkdir(exist_ok=True)
    (place / f"forever{number}.py").write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, "-m", "flatout", "run", "--levers", "threads=1", f"forever{number}.py"],
        cwd=place, env={**os.environ, "TMPDIR": str(folder / "temporary"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    after_s = lots.uniform(0.0, longest_s)
    time.sleep(after_s)
    stop, to_group = lots.choice([signal.SIGINT, signal.SIGTERM]), lots.random() < 0.5
    send = os.killpg if to_group else os.kill
    send(process.pid, stop)
    if stop is signal.SIGINT:
        try:
            process.wait(SWALLOWED_S)
        except subprocess.TimeoutExpired:
            send(process.pid, stop)
    try:
        said = process.communicate(timeout=PATIENCE_S)[1]
    except subprocess.TimeoutExpired:
        process.kill()
        return stop.name, after_s, 999, "did not end: " + process.communicate()[1]
    return stop.name, after_s, process.returncode, said


def left(folder: Path) -> list[str]:
    """Processes of these scripts, and files that only a living run needs."""
    deadline = time.monotonic() + 10
    while (found := _processes("forever")) and time.monotonic() < deadline:
        time.sleep(0.1)
    files = [str(p) for p in folder.rglob("*") if p.is_fifo() or p.name.startswith(("claim-", "orders-"))]
    return found + files + [str(p) for p in (folder / "temporary").iterdir()]


def _processes(text: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in words and "start_stop" not in words:
            found.append(words)
    return found


def run(cycles: int, at_once: int, longest_s: float = LONGEST_S) -> dict[str, object]:
    """So many cycles; how they ended, and what is left."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "temporary").mkdir()
        with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
            ends = list(pool.map(lambda number: cycle(folder, number, longest_s), range(cycles)))
        odd = [
            f"{name} after {after_s:.2f} s: {code}: {said[-300:]}"
            for name, after_s, code, said in ends
            if not ends_in_its_way(code, getattr(signal, name), said)
        ]
        counts = collections.Counter(f"{name} {code}" for name, _, code, _ in ends)
        began = sum("step" in said.splitlines()[-1] for *_, said in ends if said.splitlines())
        return {"cycles": cycles, "ends": dict(counts), "told of steps": began, "odd": odd, "left": left(folder)}


def main() -> int:
    """Run the cycles that were asked for, and print what came of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--longest", type=float, default=LONGEST_S, help="seconds until the latest signal")
    arguments = parser.parse_args()
    found = run(arguments.cycles, arguments.at_once, arguments.longest)
    print(json.dumps(found, indent=1))
    return bool(found["odd"] or found["left"])


if __name__ == "__main__":
    sys.exit(main())
