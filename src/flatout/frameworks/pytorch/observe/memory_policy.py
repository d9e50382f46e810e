"""From which NUMA nodes does a thread take memory, and on which processors do a process's threads run?

Two system calls that the C library does not name (libnuma does), and the affinity of each thread that there is. Threads
and processes that are started afterwards inherit both. In: a policy, processors. Out: what the kernel then says itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Collection
from dataclasses import dataclass

DEFAULT, PREFERRED, LOCAL = 0, 1, 4
"""Source: `set_mempolicy(2)`, Linux manual pages; the numbers are those of `linux/mempolicy.h`."""

CALLS = {
    "x86_64": (238, 239),
    "aarch64": (237, 236),
    "riscv64": (237, 236),
    "ppc64le": (261, 260),
    "s390x": (270, 269),
}
"""By machine the numbers of `set_mempolicy` and `get_mempolicy`. Source: the kernel's tables of system calls."""

MOST_NODES = 1024
"""As many as any kernel counts; one that is built for fewer takes a longer mask."""

BITS = 8 * ctypes.sizeof(ctypes.c_ulong)

TASKS = "/proc/self/task"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a thread's memory is placed.

    Attributes:
        mode: As the kernel numbers it, with its flags.
        nodes: Those that the mode names.
    """

    mode: int = DEFAULT
    nodes: frozenset[int] = frozenset()

    @property
    def is_plain(self) -> bool:
        """Whether it is what a process starts with: memory from where the thread runs."""
        return self.mode in (DEFAULT, LOCAL)


def present() -> Policy:
    """That of the calling thread.

    Raises:
        OSError: The kernel refuses to say, has no such thing, or this is no machine whose calls are known.
    """
    mode, mask = ctypes.c_int(), _mask(())
    _call(1, ctypes.byref(mode), mask, ctypes.c_ulong(MOST_NODES), None, ctypes.c_ulong(0))
    nodes = (number for number in range(MOST_NODES) if mask[number // BITS] >> number % BITS & 1)
    return Policy(mode=mode.value, nodes=frozenset(nodes))


def choose(policy: Policy) -> None:
    """Make it that of the calling thread, and of what it starts from here on.

    Raises:
        OSError: The kernel refuses it.
    """
    _call(0, ctypes.c_int(policy.mode), _mask(policy.nodes), ctypes.c_ulong(MOST_NODES))


def bind_threads(cpus: Collection[int]) -> None:
    """Let all threads of this process run on these processors alone.

    Raises:
        OSError: The kernel refuses it.
    """
    os.sched_setaffinity(0, cpus)
    for task in os.listdir(TASKS):
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(task), cpus)


def _call(which: int, *arguments: object) -> None:
    numbers = CALLS.get(os.uname().machine)
    if numbers is None or ctypes.sizeof(ctypes.c_void_p) != 8:
        raise OSError(f"memory policies of {os.uname().machine} are not known")
    if ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(numbers[which]), *arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _mask(nodes: Collection[int]) -> ctypes.Array[ctypes.c_ulong]:
    mask = (ctypes.c_ulong * (MOST_NODES // BITS))()
    for number in nodes:
        mask[number // BITS] |= 1 << number % BITS
    return mask
