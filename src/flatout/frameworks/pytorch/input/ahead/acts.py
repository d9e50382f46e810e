"""What does code do in a process apart that would be done twice, or where the script does not see it?

Python tells of most of it before it is done, and then it is not done. What was open when the process began is written
to a pipe of our own instead; what was being read, is read by a position of our own. In: nothing. Out: what was tried.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import io
import os
import re
import resource
import stat
import sys
import threading
from collections.abc import Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

from flatout.frameworks.pytorch.seams.trees import tensors_of

_READS = {"os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.getxattr", "os.listxattr", "socket.gethostname"}
_KINDS = (
    "os.", "shutil.", "subprocess.", "socket.", "sqlite3.", "fcntl.", "signal.", "resource.", "syslog.", "pty.",
    "tempfile.", "urllib.", "http.", "ftplib.", "smtplib.", "poplib.", "imaplib.", "telnetlib.", "webbrowser.",
)  # fmt: skip
"""Events of Python's by how they begin: files, processes, connections, signals."""

_SUMS = re.compile(
    "sum|mean|var|std|norm(?!al)|prod|mm|matmul|mv|dot|conv|linear|fft|hist|trace|dist|linalg|svd|eig|solve|inv|cov|corr"
    "|einsum|loss"
)
"""Names of operations of PyTorch's whose last bit may depend on how many threads share them."""

GRAIN = 32768
"""Elements below which PyTorch leaves an operation to one thread. Source: `at::internal::GRAIN_SIZE`."""

_HANDING_OVER = ("QueueFeederThread", "(_serve)")
"""Threads in which `multiprocessing` sends what was made."""


class ActedError(Exception):
    """What was about to be done, a process apart may not do."""


class Acts:
    """What the code of a batch tried to do.

    Args:
        opened: The file descriptors that were open before the process was made, which are the script's.
        num_threads: How many threads share an operation of PyTorch's in the script's process.
    """

    def __init__(self, opened: Sequence[int], num_threads: int) -> None:
        self.tried = ""
        """The first thing, or empty."""
        self._is_batch = False
        self._sums = _LongSums(self) if num_threads > 1 else None
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        self._positions: dict[int, int] = {}
        self._trap, self._mouth = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        diverted = [fd for fd in opened if self._is_diverted(fd)]
        own = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = ours = [os.fdopen(os.dup(self._mouth), "w") for _ in range(2)]
        written_to = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
        # all objects are gone through where the script writes to more than its terminal
        among = gc.get_objects() if any(fd > 2 for fd in diverted) else (sys.__stdout__, sys.__stderr__, *own)
        self._files: list[Any] = [*ours, *(one for one in among if type(one) in written_to and not one.closed)]
        self._flush()  # what the script has written, and not yet handed on
        sys.addaudithook(self._heard)

    def begin(self) -> None:
        """A batch begins."""
        self._is_batch, self.tried = True, ""
        if self._sums is not None:
            self._sums.__enter__()

    def end(self) -> str:
        """The batch is made: what was tried, or empty."""
        self._is_batch = False
        if self._sums is not None:
            self._sums.__exit__(None, None, None)
        if self._flush():
            self.note("prints, or writes to a file that is open")
        for fd, position in self._positions.items():
            if os.lseek(fd, 0, os.SEEK_CUR) != position:
                self.note("reads on in a file that is open")
        return self.tried

    def note(self, what: str) -> None:
        """Something was tried."""
        self.tried = self.tried or what

    def _is_diverted(self, fd: int) -> bool:
        """Whether what is written there comes to the pipe from now on."""
        try:
            mode, flags = os.fstat(fd).st_mode, fcntl.fcntl(fd, fcntl.F_GETFL)
        except OSError:  # closed meanwhile
            return False
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        if stat.S_ISSOCK(mode) or (writes and (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or os.isatty(fd))):
            os.dup2(self._mouth, fd)
            return True
        if stat.S_ISREG(mode):
            position = os.lseek(fd, 0, os.SEEK_CUR)
            ours = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
            os.lseek(ours, position, os.SEEK_SET)
            os.dup2(ours, fd)
            os.close(ours)
            self._positions[fd] = position
        return False

    def _flush(self) -> bool:
        """Whether anything was written to what was open."""
        for file in self._files:
            with contextlib.suppress(OSError, ValueError):  # the pipe is full; closed
                file.flush()
        found = False
        with contextlib.suppress(BlockingIOError):
            while os.read(self._trap, 1 << 16):
                found = True
        return found

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._is_batch or threading.current_thread().name.endswith(_HANDING_OVER):
            return
        if event == "open":
            if not isinstance(flags := arguments[2], int) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
            self.note("writes to a file")
        elif event.startswith(_KINDS) and event not in _READS:
            self.note(f"does `{event}`")
        else:
            return
        raise ActedError(self.tried)


class _LongSums(TorchFunctionMode):
    """Hears of sums that the script's process would divide among its threads, which are alone here."""

    def __init__(self, acts: Acts) -> None:
        super().__init__()
        self._acts = acts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _SUMS.search(func.__name__) and any(one.numel() >= GRAIN for one in tensors_of(args)):
            self._acts.note(f"has `torch.{func.__name__}` add up what more than one thread would")
        return func(*args, **kwargs or {})
