"""What is the training thread doing? Its stack, looked at some hundred times a second by another thread in trials.

In: the thread, and who knows the phase. Out: rows of time by phase, kind of code and place. A sample stands for the
time since the one before; what the thread's own CPU clock did not advance meanwhile, it waited, but for what it spent
in the queue for a core: that a neighbour took, no disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import random
import re
import resource
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection
from types import CodeType, FrameType
from typing import TypeAlias

from flatout.guest.tracebacks import HERE
from flatout.records.stacks import StackRow, Stacks

EVERY_S = 0.002
SWITCH_S = 1e-6
"""How long Python code may keep the sampling thread waiting for its turn, instead of the usual 5 ms.

While it waits, the code goes on: with 1 ms, items of 0.2 ms were taken for what came behind them and lets others run.
"""

SETTLED_EVERY = 10
"""Samples after which the kernel's account is read again."""

PR_SET_TIMERSLACK = 29

MOST_ROWS = 60

DECODERS = re.compile(
    r"[/\\](PIL[/\\]\w*ImagePlugin|PIL[/\\]ImageFile|cv2|imageio|simplejpeg|turbojpeg|soundfile|librosa|audioread|av|decord"
    r"|torchcodec|torchaudio|torchvision[/\\]io|h5py|pydicom|nibabel|rasterio|zarr|numcodecs)[/\\.]"
    r"|[/\\](zipfile|gzip|bz2|lzma|tarfile|zlib)(\.py|[/\\])"
)
DECODING_IN_PIL = ("open", "load", "convert", "draft", "_open", "frombytes", "frombuffer")
TALKERS = re.compile(
    r"[/\\](logging|tensorboard|tensorboardX|wandb|mlflow|comet_ml|neptune|clearml|aim|tqdm|rich|loguru|json|csv)[/\\.]"
    r"|[/\\]torch[/\\](_tensor_str\.py|utils[/\\]tensorboard[/\\])"
)
TALKING_LINE = re.compile(
    r"(?:^|[^\w.])print\(|\.(?:write|writelines|flush|writerow|add_scalar\w*|add_histogram|log|info|debug|set_postfix)\("
    r"|json\.dumps?\("
)
INSIDE = re.compile(
    r"[/\\](site-packages|dist-packages|lib[/\\]python3[^/\\]*)[/\\]|^<frozen|^<__array|^" + re.escape(HERE)
)


Line: TypeAlias = tuple[CodeType, int]
"""Code, and the line of it that is being run."""


class StackSampler:
    """Samples one thread from `start` to `stop`.

    Args:
        thread: Its `threading.get_ident`.
        phase: Tells the phase of the moment.
        collates: Code of the script's own collating functions.
    """

    def __init__(self, thread: int, phase: Callable[[], str], collates: Collection[CodeType] = ()) -> None:
        self._thread_id = thread
        self._native_id = next((one.native_id for one in threading.enumerate() if one.ident == thread), None)
        self._phase = phase
        self._collates = frozenset(collates)
        self._walls: defaultdict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._cpu_clock = time.pthread_getcpuclockid(thread)
        self._lines: dict[tuple[str, int], bool] = {}
        self._kinds: dict[CodeType, str] = {}
        self._switch_s = sys.getswitchinterval()
        self._faults = 0
        self._system_s = 0.0

    def start(self) -> None:
        """Begin; to be called, as `stop`, by the thread that is looked at."""
        self._faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        self._system_s = resource.getrusage(resource.RUSAGE_THREAD).ru_stime
        self._switch_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self._thread = threading.Thread(target=self._sample, name="flatout-stacks", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no thread more can be started here: nothing is seen, which is no samples
            self._thread = None

    def stop(self) -> Stacks:
        """End: what was seen; of how many steps, in what time, the caller knows."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        sys.setswitchinterval(self._switch_s)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt - self._faults
        system_s = resource.getrusage(resource.RUSAGE_THREAD).ru_stime - self._system_s
        rows = [
            StackRow(
                phase=phase, kind=kind, place=place, wall_s=round(wall_s, 6), waiting_s=round(waiting_s, 6),
                num_samples=int(num),
            )
            for (phase, kind, place), (wall_s, waiting_s, num) in self._walls.items()
        ]  # fmt: skip
        rows.sort(key=lambda row: -row.wall_s)
        return Stacks(
            rows=tuple(rows[:MOST_ROWS]), num_steps=0, wall_s=0.0, num_samples=sum(row.num_samples for row in rows),
            major_faults=faults, system_s=round(system_s, 6),
        )  # fmt: skip

    def _sample(self) -> None:
        """Look until told to stop; where a look fails, what was seen before counts and nobody hears of a traceback."""
        with contextlib.suppress(Exception):  # what walks somebody else's frames is never worth a word on his terminal
            self._go_on()

    def _go_on(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # its turn is not put off by the usual 50 µs; not on Linux
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0)  # ns
        last_s, last_cpu_s = time.perf_counter(), time.clock_gettime(self._cpu_clock)
        settled_s, waits = self._queued_s(), list[tuple[list[float], float]]()
        lots = random.Random(0)  # a step of a rhythm near the sampler's own would show the same place each time
        while not self._stop.wait(EVERY_S * lots.uniform(0.5, 1.5)):
            frame = sys._current_frames().get(self._thread_id)
            if frame is None:
                break
            stack = _taken(frame)  # at once: the thread goes on as soon as it has its turn again, its frames with it
            phase = self._phase()
            now_s, cpu_s = time.perf_counter(), time.clock_gettime(self._cpu_clock)
            own = next((one for one in stack if not INSIDE.search(one[0].co_filename)), None)
            code, line = own or stack[0]
            place = f"{os.path.basename(code.co_filename)}:{line} in {code.co_name}"
            found = self._walls[phase, self._kind(stack, own), place]
            found[0] += now_s - last_s
            waits.append((found, max(now_s - last_s - (cpu_s - last_cpu_s), 0.0)))
            found[2] += 1
            last_s, last_cpu_s = now_s, cpu_s
            if len(waits) >= SETTLED_EVERY:
                settled_s += self._settle(waits, settled_s)
        self._settle(waits, settled_s)

    def _settle(self, waits: list[tuple[list[float], float]], settled_s: float) -> float:
        """Note what the thread waited at each row, but for its time in the queue for a core; returns that time.

        Reading the kernel's account lets the thread run on, so that fewer samples are had, and a wait is in it only
        when it is over: so it is read now and then, and taken from all that was waited since.
        """
        waited_s = math.fsum(seconds for _, seconds in waits)
        queued_s = max(min(self._queued_s() - settled_s, waited_s), 0.0)
        for row, seconds in waits:
            row[1] += seconds * (1 - queued_s / waited_s) if waited_s else 0.0
        waits.clear()
        return queued_s

    def _queued_s(self) -> float:
        """What the thread has waited for a core, by the kernel's own account; 0 where that cannot be read."""
        try:
            with open(f"/proc/self/task/{self._native_id}/schedstat", encoding="ascii") as file:
                return int(file.read().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return 0.0

    def _kind(self, stack: list[Line], own: Line | None) -> str:
        """What the innermost frame that is known belongs to; else whether the script's innermost line prints."""
        for code, _ in stack:
            if code not in self._kinds:
                self._kinds[code] = self._known(code)
            if self._kinds[code]:
                return self._kinds[code]
        return "output" if own is not None and self._talks(own) else "code"

    def _known(self, code: CodeType) -> str:
        file, name = code.co_filename, code.co_name
        if DECODERS.search(file) or (file.endswith("PIL/Image.py") and name in DECODING_IN_PIL):
            return "decode"
        if file.endswith("_utils/collate.py") or code in self._collates:
            return "collate"
        if "/multiprocessing/popen" in file or (file.endswith("dataloader.py") and name in _OPENING):
            return "workers"
        if file.endswith("dataloader.py") and name in ("_try_get_data", "_get_data"):
            return "queue"
        return "output" if TALKERS.search(file) else ""

    def _talks(self, line: Line) -> bool:
        """Whether the line being run prints or logs: what is built in has no frame of its own."""
        key = (line[0].co_filename, line[1])
        if key not in self._lines:
            import linecache

            self._lines[key] = bool(TALKING_LINE.search(linecache.getline(*key)))
        return self._lines[key]


_OPENING = ("__init__", "_shutdown_workers", "_reset", "_start_thread")
"""Of a loader's iterator: where its workers are started and ended."""


def _taken(frame: FrameType | None) -> list[Line]:
    """Code and line of each frame, from the innermost outwards, without flatout's own."""
    found: list[Line] = []
    while frame is not None:
        if not frame.f_code.co_filename.startswith(HERE) or frame.f_back is None:
            found.append((frame.f_code, frame.f_lineno or 0))
        frame = frame.f_back
    return found
