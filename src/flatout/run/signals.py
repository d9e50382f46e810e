"""How do signals find the script, when flatout is the process that the shell started? Each exactly once.

A signal comes to the whole process group (Ctrl-C in a terminal, a batch system that ends a job) and so to the script as
well, or to flatout alone (`kill PID`), and then it has to be passed on. A signal does not tell which of the two it was.
So a witness sits in the group, a process that lets signals wait: what waits there came to all.

While the script runs, the signals are blocked here and read one by one, together with the news of its end. In: the
process. Out: the signals in it. Where flatout runs in a thread of somebody's program, signals are that program's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from flatout.guest import lifeline

#: Signals that stay what they are: not to be caught, about a fault of the process itself, or about its terminal.
NOT_PASSED_ON = {
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCONT, signal.SIGCHLD),
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS),
    *(signal.SIGPIPE, signal.SIGWINCH, signal.SIGURG),
}
PASSED_ON = signal.valid_signals() - NOT_PASSED_ON

WITNESS_S = 0.05
"""How long to wait for the witness to get a signal too: some senders go through processes one by one."""


class Signals:
    """Signals while a process runs. Use it as a context around the start and the wait."""

    def __init__(self) -> None:
        self._former: set[int] | None = None
        self._witness: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._former = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON | {signal.SIGCHLD})  # type: ignore[assignment]
            self._witness = call_witness()
        return self

    def __exit__(self, *_: object) -> None:
        dismiss(self._witness)
        if self._former is not None:
            while signal.sigtimedwait(PASSED_ON | {signal.SIGCHLD}, 0) is not None:
                continue  # meant for the script, which has ended
            signal.pthread_sigmask(signal.SIG_SETMASK, self._former)

    def in_child(self) -> Callable[[], None]:
        """What the child does before it executes the script.

        It unblocks signals, and if flatout is killed it dies with it, as the script would have under plain Python.
        """
        former, parent, witness = self._former, os.getpid(), self._witness
        handled = [number for number in PASSED_ON if callable(signal.getsignal(number))]
        die_with_parent = lifeline.request()

        def prepare() -> None:
            if former is not None:
                if witness is not None:  # what came to all before this process was there it has not got
                    for number in waiting_in(witness.pid) - signal.sigpending():
                        os.kill(os.getpid(), number)
                for number in handled:  # what comes from here on meets the default, as after the execution
                    signal.signal(number, signal.SIG_DFL)
                signal.pthread_sigmask(signal.SIG_SETMASK, former)
            die_with_parent()
            if os.getppid() != parent:  # it died just now
                os.kill(os.getpid(), signal.SIGKILL)

        return prepare

    def wait(self, process: subprocess.Popen[bytes], limit_s: float) -> None:
        """Return after a while, or at once when the process ends; pass on what came meanwhile."""
        if self._former is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(limit_s)
            return
        try:
            came = signal.sigtimedwait(PASSED_ON | {signal.SIGCHLD}, limit_s)
        except KeyboardInterrupt:  # taken by another thread of this program
            process.send_signal(signal.SIGINT)
            return
        if came is None or came.si_signo == signal.SIGCHLD:
            return
        if not (in_our_group(process.pid) and self._came_to_all(came)):
            process.send_signal(came.si_signo)

    def _came_to_all(self, came: signal.struct_siginfo) -> bool:
        if self._witness is None:
            return came.si_code > 0  # from the kernel, so from the terminal
        deadline = time.monotonic() + WITNESS_S
        while True:
            if came.si_signo in waiting_in(self._witness.pid):
                former = self._witness
                self._witness = call_witness()  # the next one must be able to come again
                dismiss(former)
                return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.002)


def call_witness() -> subprocess.Popen[bytes] | None:
    """A process that does nothing until its input ends, and so ends with this one, however that ends."""
    try:
        return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except OSError:
        return None


def dismiss(witness: subprocess.Popen[bytes] | None) -> None:
    """End a witness."""
    if witness is not None and witness.stdin is not None:
        witness.kill()
        witness.stdin.close()
        witness.wait()


def in_our_group(pid: int) -> bool:
    """Whether a process still is in our process group; started by a shell a script would lead it, and cannot leave."""
    try:
        return os.getpgid(pid) == os.getpgrp()
    except ProcessLookupError:
        return True


def waiting_in(pid: int) -> set[int]:
    """Signals that wait to be taken by a process; none where `/proc` does not tell."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return set()
    pending = 0
    for line in status.splitlines():
        name, _, value = line.partition(":")
        if name in ("SigPnd", "ShdPnd"):
            pending |= int(value, 16)
    return {number + 1 for number in range(pending.bit_length()) if pending >> number & 1}
