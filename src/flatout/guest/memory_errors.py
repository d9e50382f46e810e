"""Did memory run out? The classes and words in which Python, PyTorch, its libraries and ranks say so.

In: an error. Out: whether it is one of these. Imported in the user's process: standard library only.
"""

from __future__ import annotations

import errno
import re

_SAID = re.compile(r"\bout of memory\b|can't allocate memory|\bCU[A-Z]+_STATUS_ALLOC_FAILED\b", re.IGNORECASE)
"""The allocators of PyTorch for a GPU and for the host; CUDA and NCCL ("Cuda failure 2 'out of memory'"); cuBLAS and
cuDNN. Their classes differ between versions (`OutOfMemoryError`, `AcceleratorError`, `DistBackendError`), and all of
them are `RuntimeError`."""


def out_of_memory(problem: BaseException) -> bool:
    """Whether an error says that memory has run out.

    >>> out_of_memory(MemoryError()), out_of_memory(RuntimeError("CUDA error: out of memory"))
    (True, True)
    >>> out_of_memory(RuntimeError("CUDA error: device-side assert triggered"))
    False
    """
    if isinstance(problem, OSError):
        return problem.errno == errno.ENOMEM
    if isinstance(problem, MemoryError) or type(problem).__name__ == "OutOfMemoryError":
        return True
    return isinstance(problem, RuntimeError) and _SAID.search(str(problem)) is not None
