"""A folder as it looks from behind a slow network: each request takes a while, and all share one bandwidth.

    python benchmarks/throttled_mount.py SOURCE TARGET [--latency-ms 10] [--megabytes-per-s 100]

A small FUSE server, read-only, which speaks to the kernel by itself and needs nothing installed: the files of SOURCE
lie under TARGET until its standard input ends. The kernel's page cache works as for any file system, and is empty in
each new mount. It needs `/dev/fuse` and the right to mount. In: a folder. Out: the same, slower.

Source: the kernel's `include/uapi/linux/fuse.h`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import errno
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE = 1, 2, 3, 14, 15, 17, 18
INIT, OPENDIR, READDIR, RELEASEDIR, INTERRUPT, DESTROY, BATCH_FORGET = 26, 27, 28, 29, 36, 38, 42
UNANSWERED = (FORGET, INTERRUPT, BATCH_FORGET)
ASYNC_READ, KEEP_CACHE = 1, 2
VALID_S = 3600
MOST_BACKGROUND = 64
"""Requests of read-ahead that the kernel has under way at a time."""

NUM_THREADS = 32
BUFFER_BYTES = 2**20 + 2**16
RDONLY, NOSUID, NODEV, DETACH = 1, 2, 4, 2

LIBC = ctypes.CDLL(None, use_errno=True)


class Server:
    """Answers the kernel's requests for one mount."""

    def __init__(self, source: Path, device: int, latency_s: float, bytes_per_s: float) -> None:
        self._device = device
        self._latency_s = latency_s
        self._bytes_per_s = bytes_per_s
        self._paths = {1: str(source)}
        self._numbers: dict[str, int] = {str(source): 1}
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def serve(self) -> None:
        """Answer until the mount is gone."""
        while True:
            try:
                request = os.read(self._device, BUFFER_BYTES)
            except OSError as problem:
                if problem.errno in (errno.EINTR, errno.ENOENT):
                    continue
                return
            _, operation, unique, node = struct.unpack_from("<IIQQ", request)
            if operation in UNANSWERED:
                continue
            try:
                answer, code = self._answer(operation, node, request[40:]), 0
            except OSError as problem:
                answer, code = b"", -(problem.errno or errno.EIO)
            with contextlib.suppress(OSError):  # nobody waits for it any more
                os.write(self._device, struct.pack("<IiQ", 16 + len(answer), code, unique) + answer)

    def _answer(self, operation: int, node: int, body: bytes) -> bytes:
        if operation == INIT:
            read_ahead, flags = struct.unpack_from("<II", body, 8)
            head = (7, 31, read_ahead, flags & ASYNC_READ, MOST_BACKGROUND, MOST_BACKGROUND, 2**17)
            return struct.pack("<IIIIHHI", *head) + bytes(40)
        if operation == LOOKUP:
            self._wait(0)
            return self._entry(os.path.join(self._paths[node], os.fsdecode(body.split(b"\0")[0])))
        if operation == GETATTR:
            return struct.pack("<QII", VALID_S, 0, 0) + attributes(os.stat(self._paths[node]))
        if operation in (OPEN, OPENDIR):
            self._wait(0)
            number = os.open(self._paths[node], os.O_RDONLY)
            return struct.pack("<QII", number, KEEP_CACHE, 0)
        if operation == READ:
            number, offset, size = struct.unpack_from("<QQI", body)
            content = os.pread(number, size, offset)
            self._wait(len(content))
            return content
        if operation == READDIR:
            _, offset, size = struct.unpack_from("<QQI", body)
            return self._listing(self._paths[node], offset, size)
        if operation in (RELEASE, RELEASEDIR):
            os.close(struct.unpack_from("<Q", body)[0])
            return b""
        if operation == STATFS:
            return bytes(80)
        if operation == DESTROY:
            return b""
        raise OSError(errno.ENOSYS, "not needed")

    def _wait(self, num_bytes: int) -> None:
        """As long as the request would be under way, and then until its bytes are through."""
        time.sleep(self._latency_s)
        with self._lock:
            now_s = time.monotonic()
            self._free_at_s = max(self._free_at_s, now_s) + num_bytes / self._bytes_per_s
            left_s = self._free_at_s - now_s
        if num_bytes:
            time.sleep(left_s)

    def _entry(self, path: str) -> bytes:
        found = os.stat(path)
        with self._lock:
            node = self._numbers.setdefault(path, len(self._numbers) + 1)
            self._paths[node] = path
        return struct.pack("<QQQQII", node, 0, VALID_S, VALID_S, 0, 0) + attributes(found)

    def _listing(self, folder: str, offset: int, size: int) -> bytes:
        listed = b""
        for number, name in enumerate(sorted(os.listdir(folder))[offset:], offset + 1):
            raw = os.fsencode(name)
            one = struct.pack("<QQII", 1, number, len(raw), 0) + raw
            one += bytes(-len(one) % 8)
            if len(listed) + len(one) > size:
                break
            listed += one
        return listed


def attributes(found: os.stat_result) -> bytes:
    """What `stat` says, as the kernel wants it."""
    times_ns = (found.st_atime_ns, found.st_mtime_ns, found.st_ctime_ns)
    seconds, rest = zip(*(divmod(one, 10**9) for one in times_ns), strict=True)
    owner = (found.st_mode, found.st_nlink, found.st_uid, found.st_gid, 0, 4096, 0)
    return struct.pack("<6Q3I7I", found.st_ino, found.st_size, found.st_blocks, *seconds, *rest, *owner)


def mounted(target: Path) -> int:
    """Mount at `target`; the descriptor of the device.

    Raises:
        OSError: It cannot be done here.
    """
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()}"
    if LIBC.mount(b"throttled", os.fsencode(target), b"fuse", RDONLY | NOSUID | NODEV, options.encode()):
        code = ctypes.get_errno()
        os.close(device)
        raise OSError(code, f"mounting: {os.strerror(code)}")
    return device


def why_not() -> str | None:
    """Why nothing can be mounted here, in a few words; None where it can."""
    with contextlib.ExitStack() as stack:
        import tempfile

        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="flatout-mount-")))
        try:
            device = mounted(folder)
        except OSError as problem:
            return f"no FUSE mount can be made here: {problem}"
        LIBC.umount2(os.fsencode(folder), DETACH)
        os.close(device)
    return None


@contextlib.contextmanager
def throttled(source: Path, target: Path, latency_ms: float, megabytes_per_s: float) -> Iterator[Path]:
    """`target` shows the files of `source` inside the block, slowly and with an empty cache."""
    options = ["--latency-ms", str(latency_ms), "--megabytes-per-s", str(megabytes_per_s)]
    command = [sys.executable, "-E", __file__, str(source), str(target), *options]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None and server.stdout is not None
    try:
        if server.stdout.readline().strip() != "mounted":
            raise SystemExit("the throttled mount was not made")
        yield target
    finally:
        server.stdin.close()
        server.wait(30)
        server.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--latency-ms", type=float, default=10.0)
    parser.add_argument("--megabytes-per-s", type=float, default=100.0)
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever began it ends it, by closing its input
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    device = mounted(arguments.target)
    server = Server(arguments.source.resolve(), device, arguments.latency_ms / 1000, arguments.megabytes_per_s * 1e6)
    options: dict[str, Any] = {"target": server.serve, "daemon": True}
    for _ in range(NUM_THREADS):
        threading.Thread(**options).start()
    try:
        print("mounted", flush=True)
        sys.stdin.read()
    finally:
        LIBC.umount2(os.fsencode(arguments.target), DETACH)
        os._exit(0)  # threads may wait for the kernel


if __name__ == "__main__":
    main()
