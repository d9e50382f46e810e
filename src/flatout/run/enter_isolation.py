"""How does a process enter a world in which nothing it writes reaches the user's disk?

A standalone program, run as `python -I -S -X utf8 enter_isolation.py SPEC.json -- COMMAND...` before the user's Python
starts; standard library only, nothing of flatout. In: the spec that `isolation.isolate` wrote. Out: the command, exec'd
in the same process (same pid, descriptors, environment) inside a user and a mount namespace where

- the spec's layers are overlays, whose changes lie in the scratch folder (or in memory, where no overlay fits there);
- `/dev/shm` is a tmpfs of its own, with what lay there before visible and read-only; of ranks with GPUs the real one;
- the run folder is the real one, its scratch hidden; everything else is read-only, and no capability can undo it.

Fails closed: a refused step ends with exit code 126 and one line of JSON in `entered.json`; the command never starts.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import stat
import sys
from typing import Any, NoReturn

EXIT_REFUSED = 126
REPORT = "entered.json"
COPIED_BYTES = 256 << 20
"""Files lying directly in a rebuilt folder are copied up to this total, larger ones are read-only."""

_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_PRIVATE = 2, 4, 8, 0x4000, 0x40000
_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442  # the same numbers on x86-64 and aarch64
_AT_FDCWD, _AT_RECURSIVE, _AT_SYMLINK_NOFOLLOW = -100, 0x8000, 0x100
_OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH, _MOUNT_ATTR_RDONLY = 1, 4, 1
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP, _CAP_SETGID, _CAP_SETUID, _CAP_SYS_ADMIN = 1, 24, 6, 7, 21
_SIGKILL, _SIGPIPE, _SIGXFSZ = 9, 13, 25

GONE = -1
"""In place of the descriptor of a folder that is not there any more."""


class Refused(Exception):
    """A step that the kernel refused, with its stage and errno."""

    def __init__(self, stage: str, number: int, detail: str) -> None:
        super().__init__(stage)
        self.stage, self.number, self.detail = stage, number, detail


class Kernel:
    """The few system calls that Python does not offer; each raises `OSError`."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def _checked(self, result: int, what: str) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{os.strerror(number)} ({what})")
        return result

    def _syscall(self, what: str, number: int, *arguments: Any) -> int:
        wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
        return self._checked(self._libc.syscall(ctypes.c_long(number), *wide), what)

    def unshare(self, flags: int) -> None:
        """Leaves the current namespaces of the kinds in `flags`."""
        self._checked(self._libc.unshare(flags), "unshare")

    def mount(self, source: str, target: str, kind: str, flags: int = 0, options: str = "") -> None:
        """Mounts the classic way; `options` may not hold a comma or colon of a path, hence `/proc/self/fd`."""
        encoded = [os.fsencode(text) for text in (source, target, kind)]
        self._checked(self._libc.mount(*encoded, ctypes.c_ulong(flags), os.fsencode(options)), f"mount {target}")

    def clone_mount(self, path: str, *, folder_fd: int = _AT_FDCWD) -> int:
        """A descriptor of a detached copy of what is mounted at `path`, with all beneath it."""
        flags = _OPEN_TREE_CLONE | _AT_RECURSIVE | _AT_SYMLINK_NOFOLLOW | os.O_CLOEXEC
        return self._syscall(f"open_tree {path}", _OPEN_TREE, folder_fd, os.fsencode(path), flags)

    def attach(self, mount_fd: int, path: str) -> None:
        """Mounts a detached copy at `path` and closes its descriptor."""
        target = os.fsencode(path)
        self._syscall(f"move_mount {path}", _MOVE_MOUNT, mount_fd, b"", _AT_FDCWD, target, _MOVE_MOUNT_F_EMPTY_PATH)
        os.close(mount_fd)

    def set_read_only(self, path: str, *, wanted: bool, beneath: bool = False) -> None:
        """Makes the mount at `path` read-only or writable, with all mounts beneath it when asked."""
        bits = (_MOUNT_ATTR_RDONLY, 0, 0, 0) if wanted else (0, _MOUNT_ATTR_RDONLY, 0, 0)
        flags = _AT_RECURSIVE if beneath else 0
        attributes = (ctypes.c_uint64 * 4)(*bits)
        encoded = os.fsencode(path)
        self._syscall(f"mount_setattr {path}", _MOUNT_SETATTR, _AT_FDCWD, encoded, flags, ctypes.byref(attributes), 32)

    def drop_from_bounding_set(self, capability: int) -> None:
        """Makes `capability` unreachable, for root too, after the next exec."""
        self._checked(self._libc.prctl(_PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0), "prctl")

    def end_with_parent(self) -> None:
        """Has this process killed when the one that started it ends; holds from here on, through the next exec."""
        self._checked(self._libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(_SIGKILL), 0, 0, 0), "prctl")

    def default_signals(self) -> None:
        """Undoes what Python's start did: ignored signals would be inherited by the command."""
        for number in (_SIGPIPE, _SIGXFSZ):
            self._libc.signal(number, None)


def _capabilities() -> int:
    with open("/proc/self/status") as status:
        return next((int(line.split()[1], 16) for line in status if line.startswith("CapEff:")), 0)


def maps_all_ids() -> bool:
    """Whether this process may map every user and group id; otherwise only its own."""
    needed = 1 << _CAP_SETUID | 1 << _CAP_SETGID
    return _capabilities() & needed == needed


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _identity_map(path: str) -> str:
    """The lines of an id map that maps every id that is mapped here to itself."""
    with open(path) as lines:
        return "\n".join(f"{inside} {inside} {count}" for inside, _, count in map(str.split, lines))


def _start_mapper() -> tuple[int, int]:
    """Forks a process that stays outside and, told to, maps all ids of this process; returns its pid and its signal."""
    outsider, told = os.getpid(), os.pipe()
    child = os.fork()
    if child:
        os.close(told[0])
        return child, told[1]
    os.close(told[1])
    try:
        if os.read(told[0], 1):
            for name in ("uid_map", "gid_map"):
                _write(f"/proc/{outsider}/{name}", _identity_map(f"/proc/self/{name}"))
            os._exit(0)
    except OSError:
        pass
    os._exit(1)


def enter_user_namespace(kernel: Kernel) -> None:
    """Enters a user namespace in which ids keep their numbers: all of them for root, one's own for everybody else."""
    uid, gid = os.geteuid(), os.getegid()
    mapper = _start_mapper() if maps_all_ids() else None
    kernel.unshare(_CLONE_NEWUSER)
    if mapper:
        child, tell = mapper
        os.write(tell, b"x")
        os.close(tell)
        if os.waitpid(child, 0)[1] == 0:
            return
    try:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/uid_map", f"{uid} {uid} 1")
        _write("/proc/self/gid_map", f"{gid} {gid} 1")
    except OSError as error:
        raise Refused("id map", error.errno or 0, str(error)) from error


def _copy_attributes(source: str, target: str) -> None:
    """Gives a new folder or file the mode, owner, lists and times of `source`, as far as this user may."""
    seen = os.stat(source)
    mode = stat.S_IMODE(seen.st_mode)
    try:
        os.chown(target, seen.st_uid, seen.st_gid)
    except OSError:
        if not os.access(source, os.W_OK):
            mode &= ~0o222  # the copy is ours where the original is not: keep it as unwritable as that was
    os.chmod(target, mode)
    for name in _attributes(source):
        try:
            if not name.startswith("user.overlay."):
                os.setxattr(target, name, os.getxattr(source, name))
        except OSError:
            continue
    os.utime(target, ns=(seen.st_atime_ns, seen.st_mtime_ns))


def _attributes(path: str) -> list[str]:
    """The names of its extended attributes; none where its file system has no such thing, as many FUSE ones."""
    try:
        return os.listxattr(path)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        return []


def _make_file(path: str) -> None:
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))


def _copy_file(source: str, target: str) -> None:
    with open(source, "rb") as read, open(target, "xb") as write:
        while chunk := read.read(1 << 20):
            write.write(chunk)
    _copy_attributes(source, target)


class World:
    """What the process will see, built mount by mount."""

    def __init__(self, kernel: Kernel, spec: dict[str, Any]) -> None:
        self.kernel, self.spec = kernel, spec
        self.notes: list[str] = list(spec["notes"])
        self._writable: list[str] = []
        self._rebuilt: dict[str, int] = {}
        self._layers = {layer["folder"] for layer in spec["layers"]}
        self._run = kernel.clone_mount(spec["run_folder"])
        rebuilt = {layer["folder"] for layer in spec["layers"] if layer["rebuilt"]}
        self._lowers = {
            layer["folder"]: self._open(layer)
            for layer in spec["layers"]
            if os.path.dirname(layer["folder"]) not in rebuilt
        }
        self._kept = {path: mount for path in spec["kept"] if (mount := self._clone(path))}
        self._scratch = f"/proc/self/fd/{os.open(spec['scratch'], os.O_PATH | os.O_DIRECTORY)}"
        self._rooms = [f"{self._scratch}/layers", f"{self._scratch}/memory"]
        os.mkdir(self._rooms[0])
        os.chown(self._rooms[0], -1, os.getegid())  # a folder that hands its own group down would be unusable inside
        os.chmod(self._rooms[0], 0o700)

    def build(self) -> None:
        """Mounts everything, then takes away the right to write to the rest."""
        self._shm()
        for number, layer in enumerate(self.spec["layers"]):
            self._add(number, layer)
        for path, mount in self._kept.items():
            if os.path.lexists(path):
                self.kernel.attach(mount, path)
        self.kernel.attach(self._run, self.spec["run_folder"])
        self.kernel.mount("tmpfs", self.spec["scratch"], "tmpfs", 0, "size=4k,mode=755")
        for path in self.spec["guarded"]:
            self.kernel.attach(self.kernel.clone_mount(path), path)
        writable = [*self._writable, self.spec["run_folder"], *self.spec["writable"]]
        self.kernel.set_read_only("/", wanted=True, beneath=True)
        for path in writable:
            self.kernel.set_read_only(path, wanted=False)
        if not os.statvfs("/").f_flag & os.ST_RDONLY:
            raise OSError(0, "`/` is still writable")

    def hide(self, path: str) -> None:
        """Takes a path out of an overlay of ours, and of no other place: what lies beneath stays as it is."""
        covers = [folder for folder in self._writable if path.startswith(folder + "/") and folder != self.spec["shm"]]
        place = max(covers, key=len, default=None)
        if place is None or not os.path.lexists(path):
            return
        if os.stat(os.path.dirname(path)).st_dev != os.stat(place).st_dev or place not in self._layers:
            return
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)

    def _open(self, layer: dict[str, Any], parent: int | None = None) -> int:
        """A layer's folder, from the one above it where that is covered; `GONE` where it is not there any more."""
        if parent == GONE:
            return GONE
        name = layer["folder"] if parent is None else os.path.basename(layer["folder"])
        try:
            return os.open(name, os.O_PATH | os.O_DIRECTORY, dir_fd=parent)
        except FileNotFoundError:  # others may remove theirs from `/tmp` at any moment
            if layer["required"]:
                raise
            return GONE

    def _clone(self, path: str) -> int | None:
        try:
            return self.kernel.clone_mount(path)
        except OSError:  # a socket that has gone meanwhile
            return None

    def _shm(self) -> None:
        shm, size = self.spec["shm"], self.spec["shm_bytes"]
        if shm is None:
            return
        self._writable.append(shm)
        if self.spec.get("shares_shm"):
            self.kernel.attach(self.kernel.clone_mount(shm), shm)
            return
        before = os.open(shm, os.O_PATH | os.O_DIRECTORY)
        options = "mode=1777" + (f",size={size}" if size else "")
        self.kernel.mount("tmpfs", shm, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
        for entry in os.scandir(f"/proc/self/fd/{before}"):
            if entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False):
                self._keep(before, entry.name, shm)
        os.close(before)

    def _keep(self, folder_fd: int, name: str, folder: str) -> None:
        """Shows an entry of a covered folder, as it is, at its old place."""
        path = f"{folder}/{name}"
        try:
            mount = self.kernel.clone_mount(name, folder_fd=folder_fd)
            if not os.path.lexists(path):
                is_folder = stat.S_ISDIR(os.stat(name, dir_fd=folder_fd).st_mode)
                os.mkdir(path) if is_folder else _make_file(path)
            self.kernel.attach(mount, path)
        except OSError as error:
            if os.access(name, os.F_OK, dir_fd=folder_fd, follow_symlinks=False):  # else its owner has removed it since
                self.notes.append(f"`{path}` is not visible in trials: {error}")

    def _add(self, number: int, layer: dict[str, Any]) -> None:
        """Covers one folder with an overlay, in the first room that can hold its changes."""
        folder: str = layer["folder"]
        if folder in self._lowers:
            lower = self._lowers.pop(folder)
        else:
            lower = self._open(layer, self._rebuilt.get(os.path.dirname(folder), GONE))
        if lower == GONE:
            return
        failed: OSError | None = None
        for room in list(self._rooms):
            try:
                rest = self._overlay(room, number, folder, lower, layer["rebuilt"])
            except OSError as error:
                failed = failed or error
                continue
            if failed:
                self._prefer_memory(folder, failed)
            for entry in rest:
                self._keep(lower, entry, folder)
            if layer["rebuilt"]:
                self._rebuilt[folder] = lower
            else:
                os.close(lower)
            self._writable.append(folder)
            return
        if layer["required"] and failed:
            raise failed
        self.notes.append(f"`{folder}` is read-only in trials, it takes no overlay: {failed}")

    def _prefer_memory(self, folder: str, failed: OSError) -> None:
        if self._rooms[0].endswith("layers"):
            self._rooms.reverse()
            at_most = f"at most {self.spec['memory_bytes'] / 2**30:.1f} GiB in all"
            self.notes.append(
                f"changes are kept in memory, {at_most}, and cannot be listed: "
                f"the run folder's disk takes no changes of an overlay on `{folder}`: {failed}"
            )

    def _overlay(self, room: str, number: int, folder: str, lower_fd: int, rebuilt: bool) -> list[str]:
        """Mounts one overlay; returns the entries that are still to be shown on top of it."""
        if room.endswith("memory") and not os.path.isdir(room):
            os.mkdir(room)
            options = f"size={self.spec['memory_bytes']},mode=700"
            self.kernel.mount("tmpfs", room, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
        place, lower = f"{room}/{number}", f"/proc/self/fd/{lower_fd}"
        for part in ("upper", "work"):
            os.makedirs(f"{place}/{part}", mode=0o700)
        _copy_attributes(lower, f"{place}/upper")
        visible, rest = (
            (f"{place}/skeleton", self._fill(f"{place}/skeleton", folder, lower)) if rebuilt else (lower, [])
        )
        options = f"lowerdir={visible},upperdir={place}/upper,workdir={place}/work,userxattr"
        flags = os.statvfs(lower).f_flag & (_MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
        self.kernel.mount("overlay", folder, "overlay", flags, options)
        return rest

    def _fill(self, skeleton: str, folder: str, lower: str) -> list[str]:
        """Makes a stand-in for a folder with mounts beneath it, which the kernel lets no user namespace overlay.

        Returns the entries that are only placeholders in it and get no layer of their own: large or special files.
        """
        os.mkdir(skeleton, 0o700)
        left, rest = COPIED_BYTES, []
        for entry, size in _by_size(lower):
            target = f"{skeleton}/{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                os.mkdir(target)
                if f"{folder}/{entry.name}" not in self._layers:
                    rest.append(entry.name)
            elif not entry.is_symlink() and not (entry.is_file() and os.access(entry.path, os.R_OK) and size <= left):
                _make_file(target)
                rest.append(entry.name)
            elif _copy(entry, target):
                left -= size
        return rest


def _by_size(folder: str) -> list[tuple[os.DirEntry[str], int]]:
    """The entries of a folder with their bytes, smallest first; without those that went while they were looked at."""
    found = []
    for entry in os.scandir(folder):
        try:
            found.append((entry, entry.stat(follow_symlinks=False).st_size))
        except FileNotFoundError:
            continue
    return sorted(found, key=lambda row: row[1])


def _copy(entry: os.DirEntry[str], target: str) -> bool:
    """Copies a link or a file; False where it has gone meanwhile."""
    try:
        if entry.is_symlink():
            os.symlink(os.readlink(entry.path), target)
        else:
            _copy_file(entry.path, target)
    except FileNotFoundError:
        return False
    return True


def _staged(stage: str, step: Any, *arguments: Any) -> Any:
    try:
        return step(*arguments)
    except OSError as error:
        raise Refused(stage, error.errno or 0, str(error)) from error


def _live_with(kernel: Kernel, parent: int) -> None:
    """Ends the command with the flatout that waits for it: killed without notice that cannot end anything itself.

    Asked for here, at the last moment (namespaces and lost capabilities make the kernel forget it), so that it holds
    for what the script does before it imports a framework as well, and where it never does.
    """
    is_ours = os.getppid() == parent
    if is_ours:
        kernel.end_with_parent()
    if os.getppid() != parent if is_ours else not _lives(parent):
        raise OSError(0, "flatout has ended meanwhile")


def _lives(pid: int) -> bool:
    """Whether a process runs; one that was killed just now is there for a moment after its children have lost it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as read:
            return read.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False


def enter(spec: dict[str, Any]) -> list[str]:
    """Enters the namespaces that `spec` describes, and returns notes for people.

    Raises:
        Refused: The kernel refuses a step; this process must end.
    """
    kernel = Kernel()
    _staged("user namespace", enter_user_namespace, kernel)
    _staged("mount namespace", kernel.unshare, _CLONE_NEWNS)
    _staged("mounts", kernel.mount, "none", "/", "none", _MS_REC | _MS_PRIVATE)
    world: World = _staged("mounts", World, kernel, spec)
    _staged("mounts", world.build)
    for path in spec.get("hidden", ()):
        _staged("mounts", world.hide, path)
    _staged("working folder", os.chdir, spec["folder"])
    _staged("capabilities", kernel.drop_from_bounding_set, _CAP_SYS_ADMIN)
    _staged("parent", _live_with, kernel, spec["parent"])
    kernel.default_signals()
    return world.notes


def _original_environment() -> dict[bytes, bytes]:
    """The environment as it came, without the locale that Python's start may have added."""
    with open("/proc/self/environ", "rb") as block:
        pairs = (entry.partition(b"=") for entry in block.read().split(b"\0"))
    return {name: value for name, separator, value in pairs if separator and name}


def main(arguments: list[str]) -> NoReturn:
    """Enters and becomes the command, or reports why not and exits with `EXIT_REFUSED`."""
    spec_path, separator, *command = arguments
    if separator != "--" or not command:
        sys.exit("usage: enter_isolation.py SPEC.json -- COMMAND...")
    with open(spec_path, encoding="utf-8") as read:
        spec = json.load(read)
    report = os.open(f"{spec['scratch']}/{REPORT}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def say(**fields: Any) -> None:
        os.ftruncate(report, 0)
        os.pwrite(report, (json.dumps(fields) + "\n").encode(), 0)

    say(entered=False, stage="start", errno=0, detail="entering did not finish")
    environment = _original_environment()
    try:
        say(entered=True, notes=enter(spec))
        _staged("command", os.execvpe, command[0], command, environment)
    except Refused as refused:
        say(entered=False, stage=refused.stage, errno=refused.number, detail=refused.detail)
    os._exit(EXIT_REFUSED)


if __name__ == "__main__":
    main(sys.argv[1:])
