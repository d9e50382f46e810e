"""Ends in the way that its first argument names."""

import atexit
import ctypes
import os
import signal
import sys
import threading

atexit.register(print, "first registered, last called")
atexit.register(print, "last registered, first called")


def die(number):
    sys.stdout.flush()
    os.kill(os.getpid(), number)


def raise_in_thread(problem):
    def work():
        raise problem

    thread = threading.Thread(target=work, name="worker")
    thread.start()
    thread.join()


def chained():
    try:
        {}["missing"]
    except KeyError as problem:
        raise ValueError("because of it") from problem


def ends():
    yield "return", lambda: None
    yield "exit 3", lambda: sys.exit(3)
    yield "exit 256", lambda: sys.exit(256 + 5)
    yield "exit -1", lambda: sys.exit(-1)
    yield "exit text", lambda: sys.exit("some text")
    yield "exit none", lambda: sys.exit(None)
    yield "exception", lambda: 1 / 0
    yield "chained", chained
    yield "interrupt", lambda: (_ for _ in ()).throw(KeyboardInterrupt)
    yield "_exit 7", lambda: os._exit(7)
    yield "thread exit", lambda: raise_in_thread(SystemExit(4))
    yield "thread exception", lambda: raise_in_thread(ValueError("in a thread"))
    yield "SIGTERM", lambda: die(signal.SIGTERM)
    yield "SIGKILL", lambda: die(signal.SIGKILL)
    yield "SIGINT", lambda: die(signal.SIGINT)
    yield "SIGHUP", lambda: die(signal.SIGHUP)
    yield "SIGPIPE", lambda: (signal.signal(signal.SIGPIPE, signal.SIG_DFL), die(signal.SIGPIPE))
    yield "SIGABRT", os.abort
    yield "SIGRTMIN+3", lambda: die(signal.SIGRTMIN + 3)
    yield "segfault", lambda: ctypes.string_at(0)
    yield "own hook", own_hook
    yield "recursion", recursion


def own_hook():
    sys.excepthook = lambda kind, problem, traceback: print("own hook", kind.__name__, traceback.tb_next is not None)
    raise RuntimeError("for the hook")


def recursion():
    recursion()


print("begins", flush=True)
dict(ends())[sys.argv[1]]()
print("ends")
