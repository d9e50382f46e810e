"""What was the GPU's memory asked for? The record of it, which facts carry.

In: what the framework's allocator counted. Out: `DeviceMemory`.

This module is imported in the user's process: it needs the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of the GPU as the framework's allocator counts it, since the process began."""

    allocated_bytes: int
    """In tensors, at the peak."""
    reserved_bytes: int
    """Held by the process, for tensors or between them, at the peak."""
    total_bytes: int
    """What the GPU has."""
    num_retries: int = 0
    """Times that nothing fitted until all that was free had been given back."""
    num_failures: int = 0
    """Times that nothing fitted even then."""

    @property
    def free_fraction(self) -> float:
        """Share of what is held at the peak that no tensor has: memory in gaps.

        >>> DeviceMemory(allocated_bytes=6, reserved_bytes=8, total_bytes=16).free_fraction
        0.25
        """
        return 1 - self.allocated_bytes / self.reserved_bytes if self.reserved_bytes else 0.0
