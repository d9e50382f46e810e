"""What does code do in a process apart that would be done twice, or where the script does not see it?

Python tells of most of it before it is done, and then it is not done. What was open when the process began is written
to a pipe of our own instead; what was being read, is read by a position of our own. In: nothing. Out: what was tried.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import io
import logging
import os
import resource
import stat
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch.overrides import TorchFunctionMode

from flatout.frameworks.pytorch.seams.trees import tensors_of

_READS = {"os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.getxattr", "os.listxattr", "socket.gethostname"}
_KINDS = (
    "os.", "shutil.", "subprocess.", "socket.", "sqlite3.", "fcntl.", "signal.", "resource.", "syslog.", "pty.",
    "tempfile.", "urllib.", "http.", "ftplib.", "smtplib.", "poplib.", "imaplib.", "telnetlib.", "webbrowser.",
)  # fmt: skip
"""Events of Python's by how they begin: files, processes, connections, signals."""

_ALIKE = {
    "add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod", "neg", "abs",
    "sign", "exp", "expm1", "log", "log1p", "log2", "log10", "sqrt", "rsqrt", "square", "pow", "float_power",
    "clamp", "clip", "where", "to", "type", "float", "double", "half", "bfloat16", "int", "long", "short",
    "bool", "cpu", "detach", "clone", "contiguous", "copy", "view", "view_as", "reshape", "flatten",
    "unflatten", "ravel", "permute", "transpose", "t", "swapaxes", "movedim", "squeeze", "unsqueeze", "expand",
    "expand_as", "repeat", "repeat_interleave", "tile", "flip", "fliplr", "flipud", "rot90", "roll", "pad",
    "cat", "concat", "concatenate", "stack", "hstack", "vstack", "chunk", "split", "tensor_split", "unbind",
    "narrow", "select", "index_select", "gather", "take", "take_along_dim", "masked_select", "masked_fill",
    "fill", "zero", "zeros", "ones", "empty", "full", "zeros_like", "ones_like", "empty_like", "full_like",
    "arange", "linspace", "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "normal",
    "bernoulli", "uniform", "exponential", "random", "dropout", "tensor", "as_tensor", "from_numpy", "asarray",
    "numpy", "tolist", "item", "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride",
    "is_contiguous", "data_ptr", "storage_offset", "untyped_storage", "getitem", "setitem", "get", "set", "len",
    "eq", "ne", "lt", "le", "gt", "ge", "and", "or", "xor", "invert", "logical_and", "logical_or",
    "logical_not", "logical_xor", "isnan", "isinf", "isfinite", "any", "all", "max", "min", "amax", "amin",
    "aminmax", "maximum", "minimum", "argmax", "argmin", "sort", "argsort", "topk", "unique", "nonzero",
    "floor", "ceil", "round", "trunc", "frac", "sin", "cos", "tan", "sinh", "cosh", "tanh", "asin", "acos",
    "atan", "atan2", "sigmoid", "relu", "gelu", "silu", "leaky_relu", "hardtanh", "interpolate", "grid_sample",
    "affine_grid", "unfold", "one_hot", "embedding", "meshgrid", "triu", "tril", "diag", "requires_grad",
    "is_floating_point", "is_complex", "reciprocal", "lerp", "quantile", "searchsorted", "bucketize", "iter",
    "reversed", "deepcopy", "array", "repr", "format", "hash",
}  # fmt: skip
"""Operations of PyTorch's, without underscores around them, each of whose numbers one thread computes alone."""

GRAIN = 32768
"""Elements below which PyTorch leaves an operation to one thread. Source: `at::internal::GRAIN_SIZE`."""

_WRITERS = {"torch._C": ("PyTorchFileWriter",), "cv2": ("imwrite", "imwritemulti", "VideoWriter", "FileStorage")}
"""By module, what writes files without telling Python."""

_IO = "/proc/thread-self/io"

_HANDING_OVER = ("QueueFeederThread", "(_serve)")
"""Threads in which `multiprocessing` sends what was made."""


class ActedError(Exception):
    """What was about to be done, a process apart may not do."""


class Acts:
    """What the code of a batch tried to do.

    Args:
        opened: What was open before the process was made, which is the script's, by file descriptor (`opened_now`).
        num_threads: How many threads share an operation of PyTorch's in the script's process.
    """

    def __init__(self, opened: Mapping[int, tuple[int, int]], num_threads: int) -> None:
        self.tried = ""
        """The first thing, or empty."""
        self._is_batch = False
        self._sums = _LongSums(self) if num_threads > 1 else None
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        self._positions: dict[int, int] = {}
        self._trap, self._mouth = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        now = opened_now()  # some of the script's may be closed since, and their numbers those of others
        diverted = [fd for fd, what in opened.items() if now.get(fd) == what and self._is_diverted(fd)]
        own = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = ours = [os.fdopen(os.dup(self._mouth), "w") for _ in range(2)]
        written_to = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
        # all objects are gone through where the script writes to more than its terminal
        among: Any = gc.get_objects() if any(fd > 2 for fd in diverted) else (sys.__stdout__, sys.__stderr__, *own)
        self._files: list[Any] = [*ours, *(one for one in among if type(one) in written_to and not one.closed)]
        self._flush()  # what the script has written, and not yet handed on
        self._num_written = 0
        self._listen()

    def _listen(self) -> None:
        """Hear of what is about to be done, logged, warned of, and written by those who do not tell Python."""
        sys.addaudithook(self._heard)
        for module, names in _WRITERS.items():
            for name in names if module in sys.modules else ():
                if hasattr(sys.modules[module], name):
                    setattr(sys.modules[module], name, self._not_here("writes to a file"))
        logging.Logger.callHandlers = self._not_here("logs")  # type: ignore[method-assign]
        warnings._showwarnmsg = self._not_here("warns")  # type: ignore[attr-defined]

    def _not_here(self, what: str) -> Callable[..., Any]:
        def stopped(*_: Any, **__: Any) -> Any:
            self.note(what)
            raise ActedError(what)

        return stopped

    def begin(self) -> None:
        """A batch begins."""
        self._is_batch, self.tried, self._num_written = True, "", _num_written()
        if self._sums is not None:
            self._sums.__enter__()

    def end(self) -> str:
        """The batch is made: what was tried, or empty."""
        self._is_batch = False
        if self._sums is not None:
            self._sums.__exit__(None, None, None)
        if self._flush() or _num_written() != self._num_written:
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
        mode, flags = os.fstat(fd).st_mode, fcntl.fcntl(fd, fcntl.F_GETFL)
        writes = flags & os.O_ACCMODE != os.O_RDONLY
        if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode) or (writes and (stat.S_ISREG(mode) or os.isatty(fd))):
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


def opened_now() -> dict[int, tuple[int, int]]:
    """What is open in this process: device and inode by file descriptor."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one by which that was listed
            status = os.fstat(int(name))
            found[int(name)] = (status.st_dev, status.st_ino)
    return found


def _num_written() -> int:
    """How many bytes this thread has written to whatever; 0 where the kernel does not count them."""
    try:
        with open(_IO, "rb") as file:
            return int(file.read().split(b"wchar: ")[1].split()[0])
    except (OSError, IndexError):
        return 0


class _LongSums(TorchFunctionMode):
    """Hears of sums that the script's process would divide among its threads, which are alone here."""

    def __init__(self, acts: Acts) -> None:
        super().__init__()
        self._acts = acts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0].strip("_")
        if name not in _ALIKE and any(one.numel() >= GRAIN for one in tensors_of((args, kwargs))):
            self._acts.note(f"calls `torch.{name}` on so much that threads of the script may round otherwise")
        return func(*args, **kwargs or {})
