"""What was the highest memory use? Of the device where there is one, else of the process.

In: a reset. Out: bytes. On Linux the kernel's high-water mark is reset through `clear_refs`; where that is refused the
present size stands in for the peak.
"""

from __future__ import annotations

from pathlib import Path

import torch


class PeakMemory:
    """The peak since the last `reset`, or, where it may not be reset, since the process began.

    Args:
        ours: Whether the process is a trial's. In the user's own run the peak is the script's to read and to reset.
    """

    def __init__(self, *, ours: bool) -> None:
        self._ours = ours

    def reset(self, device: str) -> None:
        """Forget the peak so far."""
        if not self._ours:
            return
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return

    def peak_bytes(self, device: str) -> int | None:
        """Bytes, or None where nothing tells."""
        if device == "cuda":
            return int(torch.cuda.max_memory_allocated())
        try:
            status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        except OSError:
            return None
        for line in status.splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return None
