"""How does a process that has PyTorch loaded become a script that somebody wants to run? The other side of `warm.py`.

`python warm_server.py DESCRIPTOR`: each request on that socket becomes a new process, as a fresh interpreter would be
one: environment, streams, `sys.argv`, `sitecustomize`, exit status. It is a child of who asked, not of this server, so
that `subprocess` waits for it and signals it as for any other. What a fork cannot be given is left to who asks: see
`warm.py`. The server never computes anything: it has one thread, as long as it serves.
"""

import atexit
import builtins
import contextlib
import ctypes
import gc
import importlib
import importlib.machinery
import io
import os
import pickle
import runpy
import signal
import site
import socket
import struct
import sys
import tempfile
import threading
import types
from functools import partial
from pathlib import Path

HERE = Path(__file__).resolve()
LIMIT_BYTES = 1 << 20
LIBC = ctypes.PyDLL(None, use_errno=True)
PR_SET_PDEATHSIG, PR_GET_TID_ADDRESS, SYS_CLONE3 = 1, 40, 435
CLONE_PARENT, CLONE_CHILD_CLEARTID, CLONE_CHILD_SETTID = 0x8000, 0x200000, 0x1000000
"""Source: `prctl(2)`, `clone(2)`, Linux manual pages; `clone3` has this number on x86-64 and on aarch64."""


def load():
    """What scripts import, once; torchvision's compiled part does not load beside every build of PyTorch."""
    for name in ("numpy", "PIL.Image", "torch.utils.data", "torch._dynamo"):  # the last one by the first optimizer
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    sys.modules.pop("sitecustomize", None)
    if importlib.util.find_spec("torchvision") is not None:
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(Exception):
                importlib.import_module("torchvision")
                os._exit(0)
            os._exit(1)
        if os.waitpid(pid, 0)[1] == 0:
            importlib.import_module("torchvision")


def die_with(parent):
    """Have the kernel end this process with its parent."""
    LIBC.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


def serve(asked):
    """In each new process what it is to be; in this one nothing: it ends when nobody can ask any more."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # those to our group are for the others
    while True:
        request, descriptors, _, _ = socket.recv_fds(asked, LIMIT_BYTES, 3)
        if not request:
            os._exit(0)
        pid = fork_beside()
        if pid == 0:
            asked.close()
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            return pickle.loads(request), descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        asked.send(str(pid).encode())


def fork_beside():
    """Fork a sibling instead of a child: as `os.fork`, and as `fork` of the C library where one thread runs."""
    address = ctypes.c_uint64()
    LIBC.prctl(PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0)  # where the C library keeps a thread's number
    flags = CLONE_PARENT | CLONE_CHILD_CLEARTID | CLONE_CHILD_SETTID
    arguments = struct.pack("8Q", flags, 0, address.value, 0, 0, 0, 0, 0)
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = LIBC.syscall(ctypes.c_long(SYS_CLONE3), arguments, ctypes.c_size_t(len(arguments)))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return pid


def become(request, descriptors):
    """Be what was asked for, and end as it ends; what comes back is a server of its own for flatout, with its socket.

    What flatout starts are to be its children, so that server is one.
    """
    if request["own_session"]:
        os.setsid()
    elif request["group"] >= 0:
        os.setpgid(0, request["group"])
    if request["words"][:2] == ["-m", "flatout"]:
        asking, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        if os.fork() == 0:
            asking.close()
            for descriptor in descriptors:
                os.close(descriptor)
            os.chdir("/")
            die_with(parent)
            return asked
        asked.close()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    if request["dies_with"]:
        die_with(request["dies_with"])
    os.chdir(request["folder"])
    words = request["words"]
    if words[:2] == ["-m", "flatout"]:
        _execute(request, asking)
    os.environ.clear()
    os.environb.update(request["environment"])
    if words[:2] == ["-I", "-S"]:
        words = _isolated(words[4:])
    _run_as_main(words)


def _execute(request, asking):
    """Flatout itself is a fresh interpreter."""
    asking.set_inheritable(True)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    python = request["python"]
    words = [python, str(HERE.with_name("warm.py")), str(asking.fileno()), *request["words"][2:]]
    os.execve(python, words, dict(request["environment"]))


class _Becomes(BaseException):
    """In the place of an `exec`."""


def _isolated(words):
    """Enter isolation as `enter_isolation.py` does; the words of the Python that it would execute."""

    def execvpe(file, command, environment):
        raise _Becomes(command)

    plainly, os.execvpe = os.execvpe, execvpe
    sys.argv = words
    try:
        runpy.run_path(words[0], run_name="__main__")
    except _Becomes as end:
        command = end.args[0]
    finally:
        os.execvpe = plainly
    os.closerange(3, 256)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    return command[1:]


def _run_as_main(words):
    import numpy
    import torch

    numpy.random.seed()  # Python's own is seeded anew by the fork
    tempfile.tempdir = None
    if os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    sys.orig_argv = [sys.executable, *words]
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    sys.pycache_prefix = os.environ.get("PYTHONPYCACHEPREFIX") or None
    _open_streams(unbuffered=bool(os.environ.get("PYTHONUNBUFFERED")))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__builtins__ = builtins
    sys.argv = words[:1] + words[2:] if words[0] in ("-m", "-c") else words
    place, run = _program(main, words)

    def run_all():
        if os.environ.get("PYTHONPATH"):
            sys.path[:0] = map(os.path.abspath, os.environ["PYTHONPATH"].split(os.pathsep))
            site.removeduppaths()
        importlib.invalidate_caches()
        site.execsitecustomize()
        sys.path.insert(0, place)
        run()

    end_as(run_all)


def _program(main, words):
    """What comes first in `sys.path`, and what runs the program."""
    if words[0] == "-m":
        return os.getcwd(), partial(runpy._run_module_as_main, words[1])
    if words[0] == "-c":
        main.__loader__ = importlib.machinery.BuiltinImporter
        return "", lambda: exec(compile(words[1], "<string>", "exec", dont_inherit=True), vars(main))
    path = os.path.join(os.getcwd(), words[0])
    main.__file__, main.__cached__, main.__annotations__ = path, None, {}
    main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)

    def run():
        exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(main))

    return os.path.dirname(os.path.realpath(path)), run


def _open_streams(*, unbuffered):
    """As `create_stdio` of Python's own start does."""
    errors = sys.__stdout__.errors
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        raw = unbuffered and number > 0
        binary = open(number, "wb" if number else "rb", 0 if raw else -1, closefd=False)  # noqa: SIM115
        (binary if raw else binary.raw).name = f"<{name}>"
        stream = io.TextIOWrapper(
            binary, "utf-8", "backslashreplace" if name == "stderr" else errors, "\n",
            line_buffering=name == "stderr" and not raw, write_through=raw,
        )  # fmt: skip
        stream.mode = "w" if number else "r"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def end_as(run):
    """Run the program and end this process as an interpreter ends."""
    interrupted, status = False, 0
    before = set(sys.modules) - {"__main__"}
    try:
        run()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException as problem:
        frames = problem.__traceback__
        while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
            frames = frames.tb_next
        problem.__traceback__ = frames
        sys.last_type, sys.last_value, sys.last_traceback = type(problem), problem, frames
        sys.excepthook(type(problem), problem, frames)
        interrupted, status = isinstance(problem, KeyboardInterrupt), 1
    threading._shutdown()
    atexit._run_exitfuncs()
    _clear(before)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, ValueError):  # None, or closed by the script
            continue
        except OSError:
            status = 120
    LIBC.fflush(None)
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 0xFF)


def _clear(before):
    """Let go of what the program has made. `Py_Finalize` would take all of PyTorch apart too, which takes a second."""
    sys.last_type = sys.last_value = sys.last_traceback = None
    made = [module for name, module in sys.modules.items() if name not in before]
    for module in made:
        for name in [name for name in vars(module) if not name.startswith("__")]:
            with contextlib.suppress(Exception):
                vars(module)[name] = None
    gc.collect()


def main(asked):
    """Load, and serve."""
    del sys.path[0]
    os.chdir("/")
    die_with(os.getppid())
    load()
    gc.collect()
    asked.send(b"ready")
    while True:
        request, descriptors = serve(asked)
        try:
            asked = become(request, descriptors)
        except BaseException:
            sys.__excepthook__(*sys.exc_info())
            os._exit(70)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
