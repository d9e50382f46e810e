"""How is a checkpoint written while the training goes on, and nobody sees another file than plain would write?

`torch.save` pickles as always, in the script's own thread; each storage is copied then and there. A thread writes the
same records, and so the same bytes, into a file beside the path and puts it in its place when it is whole. One is
under way at a time. Whoever opens, lists, renames, removes or copies by Python waits for it, and so does a program that
is started; `os.stat` and what is built on it (`os.path.exists`) does not, nor does what other libraries open by
themselves. Where a write fails the former file stays, and the next `torch.save` raises why, or the process fails at
its end. In: calls of `torch.save` with a path. Out: files.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import stat
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from flatout.frameworks.pytorch.seams.patches import Patch

Opener = Callable[[str], Any]

WAITING = frozenset(
    (
        *("os.chmod", "os.chown", "os.exec", "os.link", "os.listdir", "os.posix_spawn", "os.remove", "os.rename"),
        *("os.scandir", "os.symlink", "os.system", "os.truncate", "os.utime", "shutil.copyfile", "shutil.copytree"),
        *("shutil.move", "shutil.rmtree", "subprocess.Popen"),
    )
)
"""What waits for any checkpoint under way, by the names of Python's audit events; `open` waits for its own path."""


class BackgroundSaves:
    """Takes over what `torch.save` writes to paths, from `install` to `remove`."""

    def __init__(self) -> None:
        self.num_written = 0
        """Checkpoints that were written beside the training."""
        self.problem: BaseException | None = None
        """Why the last one could not be, until it is raised."""
        self._writer: threading.Thread | None = None
        self._path = ""
        self._lock = threading.RLock()
        self._patch: Patch | None = None
        self._numbers = itertools.count()
        sys.addaudithook(self._audit)  # for good: Python has no way to take one away
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._forget)

    def install(self) -> None:
        """Take over from the next `torch.save` on.

        Raises:
            AttributeError: This version of PyTorch writes in another way.
        """
        self._patch = Patch(torch.serialization, "_open_zipfile_writer", self._opening)

    def remove(self) -> None:
        """Leave the next one to plain; what is under way is waited for, so that it overtakes nothing."""
        if self._patch is not None:
            self._patch.remove()
            self._patch = None
        self._finish()

    def wait(self) -> None:
        """Until nothing is under way; raises what a write has failed with since this was called last."""
        self._finish()
        problem, self.problem = self.problem, None
        if problem is not None:
            raise problem

    def _finish(self) -> None:
        writer = self._writer
        if writer is not None and writer is not threading.current_thread():
            writer.join()

    def begin(self, write: Callable[[], None], path: str) -> None:
        """Write in a thread; at once where none starts any more."""
        with self._lock:
            self._finish()  # that of another thread
            self._writer, self._path = None, path
            writer = threading.Thread(target=write, name="checkpoint", daemon=True)
            try:
                writer.start()
            except RuntimeError:
                write()
            else:
                self._writer = writer

    def _opening(self, original: Opener, patch: Patch) -> Opener:
        def open_writer(name_or_buffer: Any) -> Any:
            if not patch.active or not isinstance(name_or_buffer, str):
                return original(name_or_buffer)
            self.wait()
            beside = _beside(name_or_buffer, next(self._numbers))
            if beside is None:
                return original(name_or_buffer)
            try:
                return _Archive(self, name_or_buffer, beside, original)
            except (OSError, RuntimeError):  # no such folder, not allowed: plain says it in its own words
                return original(name_or_buffer)

        return open_writer

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        writer = self._writer
        if writer is None or writer.ident == threading.get_ident() or not writer.is_alive():
            return
        path = arguments[0] if event == "open" else None
        if event in WAITING or (isinstance(path, str | bytes) and os.path.realpath(os.fsdecode(path)) == self._path):
            self._finish()

    def _forget(self) -> None:
        """A fork has no such thread; its parent writes."""
        self._writer, self._lock = None, threading.RLock()

    def _at_exit(self) -> None:
        self.remove()  # whatever is saved from here on is plain's
        try:
            self.wait()
        except BaseException as problem:  # noqa: BLE001  plain would have ended by it
            sys.excepthook(type(problem), problem, problem.__traceback__)
            sys.__dict__["flatout_failed_exit"] = _FailedExit()  # what is in `sys` goes last


class _FailedExit:
    """Ends the process as one that failed, when everything else has ended: Python forgets what exit handlers raise."""

    def __del__(self, leave: Callable[[int], None] = os._exit) -> None:
        leave(1)


class _Archive:
    """Stands for PyTorch's archive writer while it pickles: keeps what is to be written, then has it written."""

    def __init__(self, saves: BackgroundSaves, name: str, beside: str, original: Opener) -> None:
        self._saves = saves
        self._name = name
        self._place, self._beside = os.path.realpath(name), beside
        self._original = original
        self._records: list[tuple[str, tuple[Any, ...]]] = []
        self._is_copied = True
        self._opened = original(beside)

    def __enter__(self) -> _Archive:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._is_copied:
            self._saves.begin(self._write, self._place)
            return
        self._discard()
        if kind is None:
            self._write_into(self._original(self._name))

    def write_record(self, name: str, content: Any, num_bytes: int) -> None:
        """Keep a record; without memory for its copy all is written by plain, when the pickling is over."""
        if self._is_copied:
            try:
                content = content if isinstance(content, str | bytes) else content.clone()
            except (MemoryError, RuntimeError):
                self._is_copied = False
        self._records.append(("write_record", (name, content, num_bytes)))

    def write_record_metadata(self, *arguments: Any) -> None:
        """Keep a record without content."""
        self._records.append(("write_record_metadata", arguments))

    def _write(self) -> None:
        try:
            self._write_into(self._opened)
            with open(self._beside, "rb") as file:
                os.fsync(file.fileno())
            with contextlib.suppress(FileNotFoundError):
                os.chmod(self._beside, stat.S_IMODE(os.stat(self._place).st_mode))
            os.replace(self._beside, self._place)
            self._saves.num_written += 1
        except BaseException as problem:  # noqa: BLE001  for the next `torch.save`, or the end
            self._saves.problem = problem
            self._discard()

    def _write_into(self, opened: Any) -> None:
        with opened as archive:
            for method, arguments in self._records:
                getattr(archive, method)(*arguments)
        self._records.clear()

    def _discard(self) -> None:
        with contextlib.suppress(Exception):
            self._opened.__exit__(None, None, None)
        with contextlib.suppress(OSError):
            os.unlink(self._beside)


def _beside(name: str, number: int) -> str | None:
    """Where to write meanwhile, in the path's own folder; None where only plain writes there as plain does.

    PyTorch names the archive by the file's name up to its last dot, and otherwise where a path is not ASCII.
    """
    place, base = os.path.realpath(name), os.path.basename(name)
    stem = base.rpartition(".")[0] or base
    beside = os.path.join(os.path.dirname(place), f"{stem}.flatout-{os.getpid()}-{number}")
    if not (name + beside).isascii() or base.startswith("."):
        return None
    try:
        found = os.lstat(place)
    except FileNotFoundError:
        return beside
    except OSError:
        return None
    own = stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid()
    return beside if own and os.access(place, os.W_OK) else None
