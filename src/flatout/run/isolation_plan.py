"""Which folders of a trial get an overlay?

In: the text of `/proc/self/mountinfo`, the folders that the trial may write to, and a look at the disk. Out: layers,
outer ones before inner ones. One overlay on the outermost folder serves all within it, with two exceptions that the
kernel forces on a user namespace:

- a folder with mounts beneath it cannot be overlaid: it is *rebuilt*, as a stand-in with layers for its folders;
- what belongs to a user or group that is not mapped inside (without root: all but one's own) cannot be copied up, so a
  folder below such a one gets a layer of its own, and a project folder that holds some is rebuilt.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_ENTRIES = 1000  # a folder with more is not rebuilt for the sake of foreign files
MAX_REBUILT = 64

# Kernel interfaces, not disks: never overlaid.
_SPECIAL_KINDS = frozenset((
    "autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs",
    "fusectl", "fuse.gvfsd-fuse", "fuse.portal", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore", "rpc_pipefs",
    "securityfs", "selinuxfs", "sysfs", "tracefs",
))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One line of `/proc/self/mountinfo`."""

    number: int
    parent: int
    point: str
    kind: str
    read_only: bool

    @property
    def usable(self) -> bool:
        """Whether a plain run could leave files there."""
        return not self.read_only and self.kind not in _SPECIAL_KINDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A folder that gets an overlay.

    Attributes:
        folder: Its real path.
        rebuilt: Mounts lie beneath it, so the overlay covers a stand-in, with the entries' own layers on top.
        required: It holds the working folder: without it the trial is refused.
    """

    folder: str
    rebuilt: bool = False
    required: bool = False


def read_mounts(text: str) -> tuple[Mount, ...]:
    r"""The mounts that the text of a mountinfo file lists, in its order.

    >>> read_mounts(r"36 35 98:0 /a /mnt\040x rw,noatime shared:1 - ext4 /dev/sda1 rw")[0].point
    '/mnt x'
    """
    mounts = []
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        number, parent, _, _, point, options = before.split(" ")[:6]
        kind, _, super_options = after.split(" ")[:3]
        point = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), point)
        read_only = "ro" in options.split(",") or "ro" in super_options.split(",")
        mounts.append(Mount(number=int(number), parent=int(parent), point=point, kind=kind, read_only=read_only))
    return tuple(mounts)


def holds(folder: str, path: str) -> bool:
    """Whether `path` is `folder` or lies in it; both real paths."""
    return folder in (path, "/") or path.startswith(folder + "/")


def mount_of(mounts: Sequence[Mount], path: str) -> Mount:
    """The mount that a walk from `/` to `path` ends on, where later mounts hide earlier ones."""
    numbers = {m.number for m in mounts}
    roots = (m for m in mounts if m.point == "/" and (m.parent not in numbers or m.parent == m.number))
    current = next(roots, Mount(number=-1, parent=-1, point="/", kind="unlisted", read_only=False))  # in a chroot
    while True:
        met = [m for m in mounts if m.parent == current.number != m.number and holds(m.point, path)]
        if not met:
            return current
        current = min(met, key=lambda m: len(m.point))


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """Something in a folder.

    Attributes:
        name: Its name.
        is_folder: A real folder, no link to one.
        foreign: A plain run may change it, but its owner or group is not mapped inside, so that a trial cannot.
        closed: A folder of somebody else that a plain run could not even enter, so there is nothing to overlay.
    """

    name: str
    is_folder: bool = False
    foreign: bool = False
    closed: bool = False


class Disk:
    """What planning asks of the disk.

    Args:
        uids: The user ids that are mapped inside, or None where all are.
        gids: Likewise for groups.
    """

    def __init__(self, uids: frozenset[int] | None, gids: frozenset[int] | None) -> None:
        self._uids, self._gids = uids, gids

    def _unmapped(self, seen: os.stat_result) -> bool:
        return (self._uids is not None and seen.st_uid not in self._uids) or (
            self._gids is not None and seen.st_gid not in self._gids
        )

    def is_foreign(self, path: str) -> bool:
        """Whether a folder's owner or group is not mapped inside."""
        return self._unmapped(os.stat(path))

    def entries(self, path: str) -> tuple[Entry, ...]:
        """What lies in a folder; nothing when it may not be read."""
        try:
            return tuple(found for entry in os.scandir(path) if (found := self._entry(entry)) is not None)
        except OSError:
            return ()

    def _entry(self, entry: os.DirEntry[str]) -> Entry | None:
        try:
            seen = entry.stat(follow_symlinks=False)
        except FileNotFoundError:  # gone meanwhile: `/tmp` is everybody's
            return None
        is_folder = entry.is_dir(follow_symlinks=False)
        foreign = not entry.is_symlink() and self._unmapped(seen)
        return Entry(
            name=entry.name,
            is_folder=is_folder,
            foreign=foreign and os.access(entry.path, os.W_OK),
            closed=is_folder and seen.st_uid != os.geteuid() and not os.access(entry.path, os.X_OK),
        )


def plan_layers(
    mounts: Sequence[Mount], wanted: Iterable[str], *, project: Sequence[str], disk: Disk, run_folder: str = ""
) -> tuple[Layer, ...]:
    """Which folders get an overlay.

    Args:
        mounts: All mounts.
        wanted: Real paths of folders that the trial may write to.
        project: The working folder, and further folders whose files matter as much, e.g. the script's.
        disk: Asked about entries and owners.
        run_folder: Gets none, wherever it lies.
    """
    found: dict[str, Layer] = {}
    num_rebuilt_for_foreign = 0

    def expand(path: str) -> None:
        nonlocal num_rebuilt_for_foreign
        mount = mount_of(mounts, path)
        if not mount.usable or path == run_folder:
            return
        covers = any(m.parent == mount.number and m.point != path and holds(path, m.point) for m in mounts)
        entries = disk.entries(path) if covers or any(holds(own, path) for own in project) else ()
        foreign = any(entry.foreign for entry in entries) and len(entries) <= MAX_ENTRIES
        if foreign and not covers:
            num_rebuilt_for_foreign += 1
            foreign = num_rebuilt_for_foreign <= MAX_REBUILT
        found[path] = Layer(folder=path, rebuilt=covers or foreign, required=holds(path, project[0]))
        if covers or foreign:
            for entry in entries:
                if entry.is_folder and not entry.closed:
                    expand(f"{path}/{entry.name}")

    usable = sorted({w for w in wanted if w != "/" and mount_of(mounts, w).usable})
    for path in usable:
        outer = max((o for o in found if holds(o, path)), key=len, default=None)
        if path in found:
            continue
        if outer is None or mount_of(mounts, path) != mount_of(mounts, outer) or _needs_own(path, outer, project, disk):
            expand(path)
    return tuple(found[path] for path in sorted(found))


def _needs_own(path: str, outer: str, project: Sequence[str], disk: Disk) -> bool:
    """Whether changes in `path` could not be copied up within the overlay on `outer`, a folder that holds it."""
    below = path[len(outer) :].strip("/").split("/")
    between = [outer + "/" + "/".join(below[: depth + 1]) for depth in range(len(below))]
    return any(map(disk.is_foreign, between)) or (path in project and any(e.foreign for e in disk.entries(path)))
