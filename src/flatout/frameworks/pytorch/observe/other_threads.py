"""Which Python threads of the script's compute beside the one that trains, and where?

In: the training thread, and a look now and then. Out: those that computed for a good part of the time.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections import Counter, defaultdict

from flatout.frameworks.pytorch.observe.stack_samples import INSIDE
from flatout.guest.tracebacks import HERE
from flatout.records.facts import BusyThread

BUSY = 0.2
"""From this share of a core on, or of what the process gets where others take the cores, a thread is no bystander."""


class OtherThreads:
    """Looks at those that are there at the first look; of threads that start later nothing is known."""

    def __init__(self) -> None:
        self._begun_s = self._process_s = 0.0
        self._clocks: dict[threading.Thread, tuple[int, float]] = {}
        self._places: defaultdict[int | None, Counter[str]] = defaultdict(Counter)

    def look(self, training: int) -> None:
        """Note the line at which each is but the one that trains; what is ours is left out from then on."""
        # without our own, which would keep itself, and all that the script's frames hold, alive
        frames = {ident: frame for ident, frame in sys._current_frames().items() if ident != threading.get_ident()}
        if not self._begun_s:
            self._begun_s, self._process_s = time.perf_counter(), time.process_time()
            for thread in threading.enumerate():
                if thread.ident is not None and thread.ident != training:
                    clock = time.pthread_getcpuclockid(thread.ident)
                    self._clocks[thread] = clock, time.clock_gettime(clock)
        for thread in list(self._clocks):
            top = frames.get(thread.ident or 0)
            stack = [] if top is None else traceback.walk_stack(top)
            lines = [(frame.f_code.co_filename, line) for frame, line in stack]
            if any(file.startswith(HERE) for file, _ in lines):
                del self._clocks[thread]
            elif lines:
                file, line = next((one for one in lines if not INSIDE.search(one[0])), lines[0])
                self._places[thread.ident][f"{os.path.basename(file)}:{line}"] += 1

    def busy(self) -> tuple[BusyThread, ...]:
        """Those that computed, the busiest first."""
        found: list[BusyThread] = []
        took_s = max(time.perf_counter() - self._begun_s, 1e-9)
        least = BUSY * min((time.process_time() - self._process_s) / took_s, 1.0)
        for thread, (clock, begun_s) in self._clocks.items():
            try:
                share = (time.clock_gettime(clock) - begun_s) / took_s
            except OSError:  # it has ended
                continue
            if share >= max(least, BUSY / 4) and self._places[thread.ident]:
                (place, _), *_ = self._places[thread.ident].most_common(1)
                found.append(BusyThread(name=thread.name, place=place, cpu_fraction=round(share, 3)))
        return tuple(sorted(found, key=lambda one: -one.cpu_fraction))
