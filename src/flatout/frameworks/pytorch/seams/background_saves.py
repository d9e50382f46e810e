"""How is a checkpoint written while the training goes on, and nobody sees another file than plain would write?

`torch.save` pickles as always, in the script's own thread; each storage is copied then and there, and a thread writes
what was to be written into a file beside the path, with the same records and so the same bytes, and puts it in its
place at once. One is under way at a time. Whoever opens, lists, renames, removes or copies by Python waits for it, and
so does a program that is started; `os.stat` and what is built on it (`os.path.exists`) does not, nor does what other
libraries open by themselves. A write that fails is made again where somebody waits for it, in the way of plain; what
plain would have raised then is raised by the next `torch.save`, or ends the process when it ends. In: calls of
`torch.save` with a path. Out: files.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import stat
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from flatout.frameworks.pytorch.seams.patches import Patch

Opener = Callable[[str], Any]
Record = tuple[str, tuple[Any, ...]]
"""A method of PyTorch's archive writer and its arguments."""

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
        self._num_written = 0
        self._under_way: _Write | None = None
        self._problem: Exception | None = None
        """What a write ended with that has not reached the script yet."""
        self._lock = threading.RLock()
        self._patch: Patch | None = None
        self._ending = False
        sys.addaudithook(self._audit)  # for good: Python has no way to take one away
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._forget)

    @property
    def num_written(self) -> int:
        """Checkpoints that were written beside the training."""
        write = self._under_way
        return self._num_written + (write is not None and write.done.is_set() and write.problem is None)

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
        """Until nothing is under way.

        Raises:
            Exception: What plain raised when a write that had failed was made again in its way.
        """
        self._finish()
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def _finish(self) -> None:
        """The same without a word: who waits may be our own recorder, or a script that expects other errors."""
        with self._lock:
            write = self._under_way
            if write is None:
                return
            write.done.wait()
            self._under_way = None
            if write.problem is None:
                self._num_written += 1
                return
            try:
                write.as_plain()
            except Exception as problem:  # noqa: BLE001  for the next `torch.save`, or the end
                self._problem = problem

    def begin(self, write: _Write) -> None:
        """Write it in a thread; at the process's end, where none starts any more, at once."""
        with self._lock:
            try:
                self.wait()  # for that of another thread
            except BaseException:
                write.discard()
                raise
            self._under_way = write
        try:
            threading.Thread(target=write.run, name="checkpoint", daemon=True).start()
        except RuntimeError:
            write.run()

    # -- who waits -----------------------------------------------------------------------------------------------

    def _opening(self, original: Opener, patch: Patch) -> Opener:
        def open_writer(name_or_buffer: Any) -> Any:
            if not patch.active or self._ending or not isinstance(name_or_buffer, str):
                return original(name_or_buffer)
            self.wait()
            with self._lock:
                write = _Write.of(name_or_buffer, original)
            return original(name_or_buffer) if write is None else _Recorder(write, self)

        return open_writer

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        write = self._under_way
        if write is None or write.thread == threading.get_ident():
            return
        if event in WAITING or (event == "open" and write.is_at(arguments[0])):
            self._finish()

    def _forget(self) -> None:
        """A fork has no such thread; its parent writes."""
        self._under_way = None
        self._lock = threading.RLock()

    def _at_exit(self) -> None:
        self._ending = True
        try:
            self.wait()
        except Exception as problem:  # noqa: BLE001  plain would have ended by it
            sys.excepthook(type(problem), problem, problem.__traceback__)
            sys.__dict__["flatout_failed_exit"] = _FailedExit()  # what is in `sys` goes last


class _FailedExit:
    """Ends the process as one that failed, when everything else has ended: Python forgets what exit handlers raise."""

    def __del__(self, leave: Callable[[int], None] = os._exit) -> None:
        leave(1)


class _Recorder:
    """Stands for PyTorch's archive writer while it pickles: keeps what was to be written."""

    def __init__(self, write: _Write, saves: BackgroundSaves) -> None:
        self._write = write
        self._saves = saves
        self._is_whole = True

    def __enter__(self) -> _Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and self._is_whole:
            self._saves.begin(self._write)
            return
        # a pickling that broke leaves half an archive in plain as well; without memory nothing is copied
        self._write.as_plain()

    def write_record(self, name: str, content: Any, num_bytes: int) -> None:
        """Keep a record; without memory for the copy all is written now, from what it is then."""
        if self._is_whole:
            try:
                content = content if isinstance(content, str | bytes) else content.clone()
            except (MemoryError, RuntimeError):
                self._is_whole = False
        self._write.records.append(("write_record", (name, content, num_bytes)))

    def write_record_metadata(self, *arguments: Any) -> None:
        """Keep a record without content."""
        self._write.records.append(("write_record_metadata", arguments))


class _Write:
    """One checkpoint on its way to its place."""

    def __init__(self, name: str, place: str, beside: str, original: Opener) -> None:
        self.records: list[Record] = []
        self.done = threading.Event()
        self.problem: BaseException | None = None
        self.thread: int | None = None
        self._name = os.path.abspath(name)
        self._place = place
        self._beside = beside
        self._original = original
        self._opened = original(beside)

    @classmethod
    def of(cls, name: str, original: Opener) -> _Write | None:
        """A write to this path, opened; None where only plain writes there as plain does.

        PyTorch names the archive by the file's name up to its last dot, and otherwise where a path is not ASCII.
        """
        place = os.path.realpath(name)
        stem = os.path.basename(name).rpartition(".")[0] or os.path.basename(name)
        beside = os.path.join(os.path.dirname(place), f"{stem}.flatout-{os.getpid()}")
        if not (name + beside).isascii() or os.path.basename(name).startswith("."):
            return None
        try:
            if _suits(place) and not os.path.lexists(beside):
                return cls(name, place, beside, original)
        except (OSError, RuntimeError):  # no such folder, not allowed: plain says it in its own words
            pass
        return None

    def is_at(self, path: Any) -> bool:
        """Whether somebody means this file."""
        if isinstance(path, bytes):
            path = os.fsdecode(path)
        return isinstance(path, str) and os.path.realpath(path) == self._place

    def run(self) -> None:
        """Write beside, and put it in its place."""
        self.thread = threading.get_ident()
        try:
            self._write_to(self._opened)
            with open(self._beside, "rb") as file:
                os.fsync(file.fileno())
            with contextlib.suppress(FileNotFoundError):
                os.chmod(self._beside, stat.S_IMODE(os.stat(self._place).st_mode))
            os.replace(self._beside, self._place)
        except BaseException as problem:  # noqa: BLE001  kept for who waits
            self.problem = problem
            self.discard()
        else:
            self.records = []
        finally:
            self.done.set()

    def as_plain(self) -> None:
        """Write as plain does, to the path itself."""
        self.discard()
        self._write_to(self._original(self._name))

    def _write_to(self, opened: Any) -> None:
        self._opened = None
        with opened as archive:
            for method, arguments in self.records:
                getattr(archive, method)(*arguments)

    def discard(self) -> None:
        """Leave no file beside."""
        opened, self._opened = self._opened, None
        if opened is not None:
            with contextlib.suppress(Exception):
                opened.__exit__(None, None, None)
        with contextlib.suppress(OSError):
            os.unlink(self._beside)


def _suits(place: str) -> bool:
    """Whether a new file in that place is what writing to the present one would give."""
    try:
        found = os.lstat(place)
    except FileNotFoundError:
        return True
    own = stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid()
    return own and os.access(place, os.W_OK)
