"""What does a throwaway process do at a step boundary? It waits for its next order, and is killed there in the end.

In: orders. Out: the trace. What it writes to files is discarded, and what it was refused to write is listed. Whatever
would make its measurements mean nothing ends it.
"""

from __future__ import annotations

import os
import sys
from typing import Any, ClassVar

from flatout.child.conductor import Conductor
from flatout.records.trace import PassEnd, Ready, Refused


class Trial(Conductor):
    """The conductor of a trial."""

    waits: ClassVar[bool] = True

    def begin(self) -> None:
        """Watch what it writes and how it ends: a script that fails before it trains is not measured, and says why."""
        self._watch_writes()
        self._watch_end()
        super().begin()

    def _watch_writes(self) -> None:
        """List writes that the isolation will refuse."""
        writable = tuple(os.path.realpath(folder) + os.sep for folder in (*self.spec.writable, "/dev", "/proc"))
        seen: set[str] = set()

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            if event != "open" or self._sleeping or not isinstance(arguments[0], str):
                return
            flags = arguments[2] if isinstance(arguments[2], int) else 0
            if not flags & (os.O_WRONLY | os.O_RDWR) or len(seen) >= 20:
                return
            try:
                path = os.path.realpath(arguments[0])
                if path not in seen and not (path + os.sep).startswith(writable):
                    seen.add(path)
                    self._write(Refused(path=path))
            except Exception:  # noqa: BLE001  what an audit hook raises would refuse the script's own open()
                return

        if self.spec.writable:
            sys.addaudithook(audit)

    def on_pass_end(self) -> None:
        """Tell who waits for an answer."""
        if self._order is not None:
            self._write(PassEnd(num_steps=self.num_steps))

    def _on_not_released(self) -> None:
        os._exit(1)  # nothing measured here from now on would mean anything

    def _on_many_problems(self) -> None:
        if self._settled_at is None:
            self._write(Ready(order=-1, num_steps=self.num_steps))  # it would be waited for in vain, and why is known

    def _on_full_disk(self, problem: OSError) -> None:
        print(f"flatout: the trace cannot be written: {problem}", file=sys.stderr, flush=True)
        os._exit(1)
