"""Which C library gives this process its memory, what does the environment tell it, and does a block lie in its heap?

In: the environment, and sizes of blocks. Out: names, reasons, and the library with what is used of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import Any

VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
TUNABLES = tuple(
    f"glibc.malloc.{name}" for name in ("trim_threshold", "mmap_max", "mmap_threshold", "top_pad", "hugetlb")
)

IS_MAPPED = 2
"""The flag in a block's head (the word before it) by which glibc knows that the block is a mapping of its own."""

PROBE_BYTES = 64 * 2**20
"""Larger than any block that glibc takes from the heap by itself (32 MiB)."""


def environment_decides() -> str | None:
    """The variable by which the C library was told already, or another allocator put in its place; None where none."""
    for name in VARIABLES:
        if name in os.environ:
            return name
    if any(name in os.environ.get("GLIBC_TUNABLES", "") for name in TUNABLES):
        return "GLIBC_TUNABLES"
    return "LD_PRELOAD" if any(name in os.environ.get("LD_PRELOAD", "") for name in ("malloc", "hoard")) else None


def why_not_glibc() -> str | None:
    """Why memory does not come from glibc here; None where it does. What is put in its place, the environment names."""
    return None if hasattr(ctypes.CDLL(None), "gnu_get_libc_version") else "the C library is not glibc"


def is_mapping_of_its_own(num_bytes: int) -> bool:
    """Whether the C library asks the kernel for a block of this size alone. Nothing of the block is touched."""
    with block_of(num_bytes) as block:
        if not block:
            return True
        return bool(ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & IS_MAPPED)


@contextlib.contextmanager
def block_of(num_bytes: int) -> Iterator[int | None]:
    """The address of a block from the C library, given back afterwards; None where there is no memory for it."""
    c = c_library()
    block = c.malloc(num_bytes)
    try:
        yield block
    finally:
        c.free(block)


def c_library() -> Any:
    """The C library, with what is used of it."""
    c = ctypes.CDLL("libc.so.6")
    c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    c.malloc_trim.argtypes = [ctypes.c_size_t]
    return c
