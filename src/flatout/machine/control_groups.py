"""How much of the machine do control groups leave to this process, and how much memory is free?

Control groups of both versions are read along the whole path from our own group to the root, because every one of
them limits us. In: `/proc` and `/sys`. Out: cores and bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def cgroup_folders(cgroup: str, mountinfo: str, controller: str) -> tuple[PurePosixPath, ...]:
    """The folders of the control groups that hold this process, from its own to the hierarchy's root.

    Args:
        cgroup: The text of `/proc/self/cgroup`.
        mountinfo: The text of `/proc/self/mountinfo`.
        controller: `cpu` or `memory`; looked for in version 1 first, then in the unified hierarchy.

    Source: `cgroups(7)` and `proc_pid_mountinfo(5)`, Linux manual pages.

    >>> cgroup_folders("0::/a/b", "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw", "cpu")[0]
    PurePosixPath('/sys/fs/cgroup/a/b')
    """
    own = {
        name: path
        for _, controllers, path in (line.split(":", 2) for line in cgroup.splitlines())
        for name in controllers.split(",")
    }
    for kind, key in (("cgroup", controller), ("cgroup2", "")):
        for line in mountinfo.splitlines():
            left, _, right = line.partition(" - ")
            fields, filesystem = left.split(), right.split()
            if len(fields) < 5 or filesystem[:1] != [kind] or key not in own:
                continue
            if not key or key in filesystem[-1].split(","):
                return _up_to(fields[4], fields[3], own[key])
    return ()


def _up_to(mount_point: str, mount_root: str, own_path: str) -> tuple[PurePosixPath, ...]:
    """A container may see its group mounted as the root while its path is still the host's."""
    top = PurePosixPath(mount_point)
    path = PurePosixPath(own_path)
    inside = path.relative_to(mount_root) if path.is_relative_to(mount_root) else PurePosixPath()
    if ".." in inside.parts:  # the group is outside our cgroup namespace
        inside = PurePosixPath()
    folder = top / inside
    return (folder, *(parent for parent in folder.parents if parent.is_relative_to(top)))


def _own_cgroup_folders(root: Path, controller: str) -> list[Path]:
    cgroup, mountinfo = text_of(root / "proc/self/cgroup"), text_of(root / "proc/self/mountinfo")
    return [root / folder.relative_to("/") for folder in cgroup_folders(cgroup, mountinfo, controller)]


def cores_quota(root: Path = Path("/")) -> float | None:
    """The tightest CPU quota on this process, in cores (0.5 is half a core); None without one."""
    quotas = []
    for folder in _own_cgroup_folders(root, "cpu"):
        quota, _, period = text_of(folder / "cpu.max").strip().partition(" ")
        if not quota:  # version 1
            quota, period = (text_of(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
        if quota.isdigit() and period.isdigit() and int(quota) and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit_bytes(root: Path = Path("/")) -> int | None:
    """The tightest memory limit on this process; None without one (version 1 writes a huge number instead)."""
    return min((limit for limit, _ in _limited(root)), default=None)


def _limited(root: Path) -> Iterator[tuple[int, Path]]:
    """The control groups that limit our memory, each with its limit."""
    for folder in _own_cgroup_folders(root, "memory"):
        limit = (text_of(folder / "memory.max") or text_of(folder / "memory.limit_in_bytes")).strip()
        if limit.isdigit() and int(limit) < 2**60:
            yield int(limit), folder


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """What this process could still take without making the machine swap; None where nothing tells.

    The least of what the kernel says is available, and of what each control group leaves up to its limit. Files that a
    group has cached count as free: the kernel drops them first.
    """
    available = re.search(r"^MemAvailable:\s+(\d+) kB", text_of(root / "proc/meminfo"), re.MULTILINE)
    free = [int(available[1]) * 1024] if available else []
    for limit, folder in _limited(root):
        used = (text_of(folder / "memory.current") or text_of(folder / "memory.usage_in_bytes")).strip()
        if used.isdigit():
            cached = re.search(r"^(?:total_)?inactive_file (\d+)$", text_of(folder / "memory.stat"), re.MULTILINE)
            free.append(max(0, limit - int(used) + (int(cached[1]) if cached else 0)))
    return min(free, default=None)


def text_of(path: Path) -> str:
    """The file's text; empty where it cannot be read, which here always means that the kernel does not say."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
