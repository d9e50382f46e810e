"""What would a trial write, and how does none of it reach the user's disk?

The parent's side. In: the command of a trial and the folders it lives in. Out: the command that runs it isolated
(`isolation_plan.py` decides which folders get an overlay, `enter_isolation.py` does the entering), and afterwards the
list of what the trial would have written, which is then discarded.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flatout.errors import MachineError, UsageError
from flatout.records.as_json import to_json
from flatout.run import enter_isolation
from flatout.run.isolation_plan import Disk, Layer, holds, mount_of, plan_layers, read_mounts

EXIT_REFUSED = enter_isolation.EXIT_REFUSED
_SPEC = "spec.json"

# Caches that a plain run may fill: where the environment moves them out of home, they get an overlay too.
_CACHE_VARIABLES = ("XDG_CACHE_HOME", "HF_HOME", "HF_DATASETS_CACHE", "TORCH_HOME", "TORCHINDUCTOR_CACHE_DIR",
                    "TRITON_CACHE_DIR", "CUDA_CACHE_PATH", "KERAS_HOME", "MPLCONFIGDIR")  # fmt: skip
_GUARDED = ("/proc/sys", "/proc/irq", "/proc/bus", "/proc/fs", "/proc/acpi", "/proc/scsi", "/proc/sysrq-trigger")


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """One thing the trial would have done to the user's disk.

    Attributes:
        path: As the user would have seen it.
        change: What would have happened; `replaced` is a folder deleted and made again.
        file_bytes: The file's size afterwards; 0 for folders, links and deletions.
    """

    path: str
    change: Literal["created", "changed", "deleted", "replaced"]
    file_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spec:
    """What `enter_isolation.py` reads; see its docstring."""

    parent: int
    folder: str
    run_folder: str
    scratch: str
    layers: tuple[Layer, ...]
    kept: tuple[str, ...]
    shm: str | None
    shm_bytes: int | None
    writable: tuple[str, ...]
    guarded: tuple[str, ...]
    memory_bytes: int
    notes: tuple[str, ...]


def isolate(
    command: Sequence[str], *, folder: Path, script_folder: Path | None, run_folder: Path, scratch: Path
) -> list[str]:
    """The command line that runs `command` so that what it writes lands in `scratch`.

    Args:
        command: What to run, as for `exec`.
        folder: The working folder of the trial.
        script_folder: Where the script lies, when it is a file.
        run_folder: Stays really writable: the trial's records go there.
        scratch: A folder of this trial alone inside the run folder, made here.

    Raises:
        UsageError: The run folder holds the working folder or the script.
        ValueError: The scratch folder does not lie inside the run folder.
    """
    cwd, run, room = (os.path.realpath(path) for path in (folder, run_folder, scratch))
    if room == run or not holds(run, room):
        raise ValueError(f"the scratch folder `{room}` is not inside the run folder `{run}`")
    own = [cwd, os.path.realpath(script_folder or cwd)]
    if any(holds(run, path) for path in own):
        raise UsageError(
            f"the run folder `{run}` holds the script or its working folder",
            cause="a run folder stays writable, so that a trial in it would leave its files there",
            hint="name a run folder of its own, e.g. `.flatout`",
        )
    spec = _spec(own, run, room)
    target = Path(room, _SPEC)
    discard(Path(room))  # of an earlier trial that was interrupted
    target.parent.mkdir(parents=True)
    target.write_text(json.dumps(to_json(spec)), encoding="utf-8")
    encoding = f"utf8={int(sys.getfilesystemencoding() == 'utf-8')}"  # paths travel in both directions unharmed
    return [sys.executable, "-I", "-S", "-X", encoding, enter_isolation.__file__, str(target), "--", *command]


def _spec(own: list[str], run: str, room: str) -> _Spec:
    places = [*own, "/tmp", "/var/tmp", tempfile.gettempdir(), os.path.expanduser("~")]
    places += [os.environ[name] for name in _CACHE_VARIABLES if name in os.environ]
    mounts = read_mounts(os.fsdecode(Path("/proc/self/mountinfo").read_bytes()))
    shm = os.path.realpath("/dev/shm")
    wanted = [path for path in map(os.path.realpath, places) if os.path.isdir(path) and path != shm]
    everyone = enter_isolation.maps_all_ids()
    disk = Disk(None if everyone else frozenset((os.geteuid(),)), None if everyone else frozenset((os.getegid(),)))
    wanted = [path for path in wanted if not holds(run, path)]
    layers = plan_layers(mounts, wanted, project=own, disk=disk, run_folder=run)
    shm_size = os.statvfs(shm) if os.path.isdir(shm) and mount_of(mounts, shm).kind == "tmpfs" else None
    covered = any(holds(layer.folder, own[0]) for layer in layers) or holds(shm, own[0])
    return _Spec(
        parent=os.getpid(), folder=own[0], run_folder=run, scratch=room, layers=layers,
        kept=tuple(path for path in _meeting_points() if any(holds(layer.folder, path) for layer in layers)),
        shm=shm if os.path.isdir(shm) else None,
        shm_bytes=shm_size.f_blocks * shm_size.f_frsize if shm_size else None,
        writable=tuple(m.point for m in mounts if m.kind in ("proc", "devpts") and not m.read_only
                       and mount_of(mounts, m.point) == m),
        guarded=tuple(path for path in _GUARDED if os.path.exists(path)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4,
        notes=() if covered else (f"the working folder `{own[0]}` is read-only in trials",),
    )  # fmt: skip


def _meeting_points() -> list[str]:
    """Sockets that somebody listens on, and the pipes of NVIDIA's MPS: through an overlay nobody would answer."""
    listening = "00010000"
    lines = os.fsdecode(Path("/proc/net/unix").read_bytes()).splitlines()[1:]
    found = [line.split(None, 7) for line in lines]
    sockets = {fields[7] for fields in found if len(fields) == 8 and fields[3] == listening and fields[7][:1] == "/"}
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
    return [path for path in (pipes, *sorted(sockets)) if os.path.exists(path) and os.path.realpath(path) == path]


def available() -> str | None:
    """Why trials cannot be isolated on this machine, or None where a probe really was."""
    if sys.platform != "linux":
        return "namespaces and overlays exist on Linux only"
    with tempfile.TemporaryDirectory(prefix="flatout-probe-") as top:
        folder, run = Path(top, "work"), Path(top, "run")
        folder.mkdir()
        scratch = run / "scratch"
        write = [sys.executable, "-I", "-S", "-c", "open('probe', 'w').write('written')"]
        command = isolate(write, folder=folder, script_folder=None, run_folder=run, scratch=scratch)
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, timeout=60, check=False)
            refused = refusal(scratch)
            if refused:
                return refused.cause
            if done.returncode or (folder / "probe").exists():
                return f"a probe was not isolated: {done.stderr.decode(errors='replace').strip()[-300:]}"
            return None
        except subprocess.TimeoutExpired:
            return "a probe did not end within a minute"
        finally:
            discard(scratch)


def require() -> None:
    """Makes sure that trials can be isolated here.

    Raises:
        MachineError: They cannot; the cause says why.
    """
    reason = available()
    if reason:
        raise _refused(reason)


def _refused(cause: str) -> MachineError:
    return MachineError(
        "trials cannot be isolated on this machine",
        cause=cause,
        hint="allow what the cause names, or pass `--allow-writes`: trials then run in your real folders, "
        "and what the script writes stays there",
    )


def _report(scratch: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((scratch / enter_isolation.REPORT).read_text("utf-8")))
    except (OSError, ValueError):
        return {"entered": False, "stage": "start", "errno": 0, "detail": "entering did not start"}


def refusal(scratch: Path) -> MachineError | None:
    """The reason why the isolated command never started, or None when it did."""
    report = _report(scratch)
    if report["entered"]:
        return None
    if report["stage"] == "command":
        return MachineError(
            "a trial's command did not start", cause=str(report["detail"]), hint="check that it runs without flatout"
        )
    return _refused(explain(report["stage"], report["errno"], report["detail"], read_settings()))


def notes(scratch: Path) -> tuple[str, ...]:
    """What the isolated trial did differently from a plain run, in sentences for the report."""
    return tuple(_report(scratch).get("notes", ()))


def read_settings() -> dict[str, str]:
    """The machine's settings that decide about namespaces, by the names that `sysctl` gives them."""
    names = (
        "user.max_user_namespaces",
        "user.max_mnt_namespaces",
        "kernel.unprivileged_userns_clone",
        "kernel.apparmor_restrict_unprivileged_userns",
    )
    found = {"kernel": os.uname().release}
    for name in names:
        path = Path("/proc/sys", *name.split("."))
        if path.exists():
            found[name] = path.read_text().strip()
    status = Path("/proc/self/status").read_text("utf-8", "replace")
    found["seccomp"] = next((line.split()[1] for line in status.splitlines() if line.startswith("Seccomp:")), "0")
    return found


def explain(stage: str, number: int, detail: str, settings: dict[str, str]) -> str:
    """Why a stage of entering was refused, in words.

    >>> explain("user namespace", 28, "No space left", {"kernel": "6.1.0", "user.max_user_namespaces": "0"})
    'no user namespaces are allowed here: `user.max_user_namespaces=0`'
    """
    release = [int(part) for part in re.findall(r"\d+", settings["kernel"])[:2]]
    refused = number in (1, 13)  # EPERM, EACCES
    known = {
        "no user namespaces are allowed here: `user.max_user_namespaces=0`":
            stage == "user namespace" and settings.get("user.max_user_namespaces") == "0",
        "no mount namespaces are allowed here: `user.max_mnt_namespaces=0`":
            stage == "mount namespace" and settings.get("user.max_mnt_namespaces") == "0",
        "only root may make user namespaces here: `kernel.unprivileged_userns_clone=0`":
            stage == "user namespace" and refused and settings.get("kernel.unprivileged_userns_clone") == "0",
        "a seccomp filter, as in Docker, refuses user namespaces (`--security-opt seccomp=unconfined` lifts it)":
            stage == "user namespace" and refused and settings.get("seccomp", "0") != "0",
        "AppArmor restricts user namespaces: `kernel.apparmor_restrict_unprivileged_userns=1`":
            refused and settings.get("kernel.apparmor_restrict_unprivileged_userns", "0") != "0",
        f"Linux {settings['kernel']} is too old: overlays without root and read-only trees need 5.12":
            stage == "mounts" and release < [5, 12],
        "this kernel has no overlay file system (`modprobe overlay` loads it)":
            stage == "mounts" and number == 19,  # ENODEV
        "a container's seccomp or AppArmor profile refuses mounts":
            stage == "mounts" and refused,
    }  # fmt: skip
    return next((text for text, holds in known.items() if holds), f"the {stage} could not be set up: {detail}")


def writable(scratch: Path) -> tuple[str, ...]:
    """The real paths of the folders that the trial of `scratch` may write to, sorted."""
    spec = json.loads((scratch / _SPEC).read_text("utf-8"))
    folders = {spec["run_folder"], spec["shm"], *(layer["folder"] for layer in spec["layers"])} - {None}
    return tuple(sorted(folders))


def seen(scratch: Path, path: Path) -> Path:
    """Where a file or folder lies that the trial wrote to `path`; where it wrote nothing, nothing lies there."""
    shown = os.path.realpath(path)
    spec = json.loads((scratch / _SPEC).read_text("utf-8"))
    folders = [layer["folder"] for layer in spec["layers"]]
    nearest = max((folder for folder in folders if holds(folder, shown)), key=len, default=None)
    if nearest is None:
        return path
    return scratch / "layers" / str(folders.index(nearest)) / "upper" / os.path.relpath(shown, nearest)


def written(scratch: Path) -> list[Write]:
    """What the trial would have left on the user's disk, sorted by path; of folders, only empty and replaced ones.

    Changes that were kept in memory are not listed; `notes` says so.
    """
    try:
        spec = json.loads((scratch / _SPEC).read_text("utf-8"))
    except (OSError, ValueError):  # none, or cut off by a full disk: then no trial was started in it
        return []
    found: list[Write] = []
    for number, layer in enumerate(spec["layers"]):
        upper = scratch / "layers" / str(number) / "upper"
        if upper.is_dir():
            found.extend(_changes(str(upper), layer["folder"]))
    return sorted(found, key=lambda write: write.path)


def _changes(upper: str, folder: str) -> Iterator[Write]:
    waiting = [(upper, folder)]
    while waiting:
        above, shown_above = waiting.pop()
        for entry in _scan(above):
            shown = f"{shown_above}/{entry.name}"
            try:
                seen, existed = entry.stat(follow_symlinks=False), os.path.lexists(shown)
            except OSError:  # a path longer than the kernel takes
                continue
            if stat.S_ISDIR(seen.st_mode):
                waiting.append((entry.path, shown))
                if not existed and not _scan(entry.path):
                    yield Write(path=shown, change="created")
                elif existed and _opaque(entry.path):
                    yield Write(path=shown, change="replaced")
            elif stat.S_ISCHR(seen.st_mode) and seen.st_rdev == 0:
                if existed:
                    yield Write(path=shown, change="deleted")
            else:
                size = seen.st_size if stat.S_ISREG(seen.st_mode) else 0
                yield Write(path=shown, change="changed" if existed else "created", file_bytes=size)


def _scan(path: str) -> list[os.DirEntry[str]]:
    try:
        _permit(path)
        return list(os.scandir(path))
    except OSError:
        return []


def _opaque(path: str) -> bool:
    try:
        return os.getxattr(path, "user.overlay.opaque", follow_symlinks=False) == b"y"
    except OSError:
        return False


def _permit(name: str, *, folder_fd: int | None = None) -> int:
    """A descriptor of a real folder of ours, made readable and writable; never follows a link."""
    flags = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW
    path_fd = os.open(name, flags, dir_fd=folder_fd)
    try:
        inside = f"/proc/self/fd/{path_fd}"
        if os.fstat(path_fd).st_mode & 0o700 != 0o700:
            os.chmod(inside, 0o700)
        return os.open(inside, os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(path_fd)


def discard(scratch: Path) -> None:
    """Removes `scratch` and all in it, whatever modes, links and depths a trial left; nothing outside it.

    Raises:
        MachineError: It is not a scratch folder made by `isolate`, or something in it cannot be removed.
    """
    if not os.path.lexists(scratch):
        return
    try:
        top = _permit(str(scratch))
        try:
            names = set(os.listdir(top))
            if names and _SPEC not in names:
                raise OSError("it holds files, but no spec of a trial")
            _empty(top)
            if names:
                os.unlink(_SPEC, dir_fd=top)
        finally:
            os.close(top)
        os.rmdir(scratch)
    except OSError as error:
        raise MachineError(
            f"the scratch folder `{scratch}` cannot be removed",
            cause=str(error),
            hint="end the programs that still run from the trial, then delete the folder",
        ) from error


def _empty(top: int) -> None:
    """Empties a folder by lifting the folders of each of its folders up into it, so that no depth is too deep."""
    while names := [name for name in os.listdir(top) if name != _SPEC]:
        for name in names:
            if not stat.S_ISDIR(os.stat(name, dir_fd=top, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=top)
                continue
            inner = _permit(name, folder_fd=top)
            try:
                for below in os.listdir(inner):
                    if stat.S_ISDIR(os.stat(below, dir_fd=inner, follow_symlinks=False).st_mode):
                        os.close(_permit(below, folder_fd=inner))  # moving a folder needs the right to write to it
                        os.rename(below, uuid.uuid4().hex, src_dir_fd=inner, dst_dir_fd=top)
                    else:
                        os.unlink(below, dir_fd=inner)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=top)
