"""Decoded images, kept: what a transform chain does before it draws its first random number.

An image is kept under the identity of its file: device, inode, size and both times, as they were before and after it
was read; one that was written to a moment ago may change again within the clock's grain, and is not kept. What is kept
is kept for ever: in a random order, throwing out what was not used for long would help nobody. In: open files and their
images. Out: the images.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any, TypeAlias

from flatout.frameworks.pytorch.input.budget import LEAST_FREE_BYTES, may_take_bytes
from flatout.machine.control_groups import free_memory_bytes

Identity: TypeAlias = tuple[Any, ...]

LOOK_EVERY_BYTES = 2**26
"""How often it is seen while the images grow more whether memory is still free."""

SETTLED_NS = 2 * 10**9
"""A file whose times are older than this is not in the middle of being written."""


class DecodedImages:
    """The decoded images of a process."""

    def __init__(self) -> None:
        self.engaged = False
        self.num_given = 0
        """Images that were not decoded again since it was engaged."""
        self.num_bytes = 0
        self.full = False
        """Whether nothing is added any more."""
        self._images: dict[Identity, Any] = {}
        self._most_bytes: int | None = None
        self._look_at_bytes = LOOK_EVERY_BYTES
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def engage(self, on: bool) -> None:
        """From the next image on, or no longer; those that are there stay."""
        self.engaged, self.num_given = on, 0

    def get(self, identity: Identity | None) -> Any | None:
        """The image of a file, which must not be changed; None where it is not kept."""
        if not self.engaged or identity is None:
            return None
        found = self._images.get(identity)
        self.num_given += found is not None
        return found

    def wants(self, identity: Identity | None) -> bool:
        """Whether a file's whole image is to be kept."""
        return self.engaged and identity is not None and not self.full

    def put(self, identity: Identity, image: Any) -> bool:
        """Keep an image, as far as there is room; whether it is kept, so that nobody may change it."""
        if self._pid != os.getpid():  # forked: nobody holds the lock here
            self._pid, self._lock = os.getpid(), threading.Lock()
        num_bytes = image.width * image.height * (1 if image.mode in ("1", "L", "P") else 4)
        with self._lock:
            if self._most_bytes is None:
                self._most_bytes = may_take_bytes(free_memory_bytes())
            if self.full or self.num_bytes + num_bytes > self._most_bytes:
                self.full = True
                return False
            self._images[identity] = image
            self.num_bytes += num_bytes
            if self.num_bytes >= self._look_at_bytes:
                self._look_at_bytes = self.num_bytes + LOOK_EVERY_BYTES
                self.full = (free_memory_bytes() or 0) < LEAST_FREE_BYTES
        return True


def identity_of(found: os.stat_result) -> Identity | None:
    """What a file is known by; None where it was written to a moment ago."""
    if time.time_ns() - max(found.st_mtime_ns, found.st_ctime_ns) < SETTLED_NS:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
