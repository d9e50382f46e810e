"""Prints what a script can see of its surroundings; trains nothing."""

import argparse
import json
import os
import signal
import sys
import threading
import warnings

print("modules", sorted(sys.modules))
print("file", __file__, "name", __name__, "package", __package__, "spec", __spec__, "loader", type(__loader__).__name__)
print("argv", sys.argv)
print("orig_argv", sys.orig_argv)
print("path", sys.path)
print("flags", sys.flags)
print("warnoptions", sys.warnoptions, "xoptions", sys._xoptions)
print("executable", sys.executable, "prefix", sys.prefix)
print("cwd", os.getcwd())
print("environ", json.dumps(list(os.environ.items())))
print("threads", [thread.name for thread in threading.enumerate()])
print("hooks", sys.excepthook, threading.excepthook, sys.displayhook, sys.gettrace(), sys.getprofile())
print("handlers", [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())])
print("blocked", sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])))
print("filters", warnings.filters)
print("descriptors", sorted(os.listdir("/proc/self/fd")))
print("group", os.getpgrp() == os.getpgid(os.getppid()), os.getsid(0) == os.getsid(os.getppid()))
print("streams", [(s.name, s.encoding, s.errors, s.line_buffering) for s in (sys.stdin, sys.stdout, sys.stderr)])

parser = argparse.ArgumentParser()
parser.add_argument("--plan")
parser.add_argument("--json", action="store_true")
parser.add_argument("-m", dest="m")
parser.add_argument("-q", "--quiet", action="store_true")
parser.add_argument("words", nargs="*")
print("options", parser.parse_args())
print("stdin", repr(sys.stdin.read()))
warnings.warn("a warning of the script's own", stacklevel=1)
print("talk", file=sys.stderr)
