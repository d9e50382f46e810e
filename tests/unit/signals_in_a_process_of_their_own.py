"""Signals for the script find it, and leave the program that started it as it was."""

import os
import signal
import subprocess
import sys
import threading
import time

from flatout.run.signals import PASSED_ON, Signals, waiting_in


def started(signals, code):
    return subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, preexec_fn=signals.in_child(), text=True
    )


def test_the_mask_is_as_it_was_before_and_as_it_was_in_the_child():
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGWINCH})
    try:
        with Signals() as signals:
            assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
            child = started(signals, "import signal; print(sorted(map(int, signal.pthread_sigmask(0, []))))")
            assert child.communicate()[0].split() == [f"[{int(signal.SIGWINCH)}]"]
        assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before | {signal.SIGWINCH}
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_the_end_of_the_process_is_noticed_at_once():
    with Signals() as signals:
        child = started(signals, "pass")
        begun_s = time.monotonic()
        while child.poll() is None:
            signals.wait(child, 60.0)
        assert time.monotonic() - begun_s < 30.0
        child.stdout.close()


def test_a_signal_to_us_alone_is_passed_on_and_does_nothing_here():
    with Signals() as signals:
        child = started(signals, "import time; print('ready', flush=True); time.sleep(60)")
        child.stdout.readline()
        os.kill(os.getpid(), signal.SIGTERM)
        while child.poll() is None:
            signals.wait(child, 60.0)
        assert child.returncode == -signal.SIGTERM
        child.stdout.close()


def test_without_a_witness_only_the_terminals_signals_are_kept_back(monkeypatch):
    from flatout.run import signals as subject

    monkeypatch.setattr(subject, "call_witness", lambda: None)
    test_a_signal_to_us_alone_is_passed_on_and_does_nothing_here()


def test_what_came_too_late_is_dropped():
    with Signals():
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)


def test_in_a_thread_signals_are_left_alone():
    found = []

    def work():
        with Signals() as signals:
            child = started(signals, "import sys; sys.exit(4)")
            while child.poll() is None:
                signals.wait(child, 0.1)
            found.extend([child.returncode, signal.pthread_sigmask(signal.SIG_BLOCK, [])])
            child.stdout.close()

    thread = threading.Thread(target=work)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    thread.start()
    thread.join()
    assert found == [4, before]


def test_signals_about_a_fault_of_our_own_are_not_the_scripts():
    assert not PASSED_ON & {signal.SIGSEGV, signal.SIGKILL, signal.SIGCHLD, signal.SIGTSTP}
    assert {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGRTMIN} <= PASSED_ON


def test_a_process_that_is_not_there_has_no_signal_waiting():
    assert signal.SIGTERM not in waiting_in(2**30)


def test_what_comes_to_all_while_the_script_is_started_comes_to_it_once():
    begun = subprocess.run(
        [sys.executable, "-c", _STARTING], capture_output=True, text=True, check=False, start_new_session=True
    )
    assert begun.stdout.split() == ["-10", "0"], begun.stderr


_STARTING = """
import os, signal, subprocess, sys
from flatout.run.signals import Signals
assert signal.SIGUSR1 == 10
for number in (signal.SIGUSR1, signal.SIGURG):  # the latter is nobody's business
    with Signals() as signals:
        os.killpg(0, number)
        child = subprocess.Popen([sys.executable, "-S", "-c", "pass"], preexec_fn=signals.in_child())
        while child.poll() is None:
            signals.wait(child, 60.0)
        print(child.returncode)
"""
