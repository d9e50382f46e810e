"""How does a test start a script without loading PyTorch again? By forking a process that has it loaded.

`run` and `Popen` are those of `subprocess`. Where a fork of `warm_server.py` is as good as a fresh interpreter, it is
one; everywhere else (flags of the interpreter, variables that libraries read as they are loaded, terminals, programs
that are not Python) a fresh one is started as always. Of `python -m flatout` the scripts that it starts are forks.

A fork has what it cannot be given anew: the hash seed of the server, PyTorch in `sys.modules` from the start, frames of
the server beneath the script's. Where the process itself is what is tested, use `subprocess`. `TESTS_COLD=1` uses it
everywhere.
"""

import atexit
import inspect
import os
import pickle
import re
import resource
import socket
import subprocess
import sys
import threading
from pathlib import Path

START_LIMIT_S = 120.0
ASK_LIMIT_S = 60.0
OBEYED = {
    *("PYTHONPATH", "PYTHONHASHSEED", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONUNBUFFERED"),
    "OMP_NUM_THREADS",
}
"""Of the variables that are read at the start those that a fork obeys, or can do without."""

READ_AT_START = re.compile(
    "PYTHON|TORCH|(OMP|GOMP|KMP|MKL|OPENBLAS|LD|MALLOC|TCMALLOC|GLIBC|PYTORCH|TRITON|CUDA)_|(CC|CXX|CFLAGS)$"
)
PARAMETERS = list(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]


class Server:
    """A process to fork, and the socket to ask it by."""

    def __init__(self, asking: socket.socket, environment: dict[str, str], process=None) -> None:
        self.process, self.pid = process, os.getpid()
        self._asking, self._lock = asking, threading.Lock()
        self.environment = environment
        self.inherited = inherited()

    @classmethod
    def start(cls) -> "Server":
        """A server for this process, which ends with it."""
        asking, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        keep = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "OMP_", "LC_"))}
        environment = {**keep, "LANG": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}
        with asked:
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("warm_server.py")), str(asked.fileno())],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[asked.fileno()], env=environment,
            )  # fmt: skip
        found = cls(asking, keep, process)
        atexit.register(found.end)
        asking.settimeout(START_LIMIT_S)
        if asking.recv(16) != b"ready":
            raise OSError("the server does not start")
        return found

    def ask(self, request: dict[str, object], descriptors: list[int]) -> int:
        """The number of a new child of this process."""
        with self._lock:
            self._asking.settimeout(ASK_LIMIT_S)
            try:
                socket.send_fds(self._asking, [pickle.dumps(request)], descriptors)
                pid = int(self._asking.recv(16) or -1)
            except BaseException:  # an answer that comes too late must not be taken for that of the next question
                self.end()
                raise
        if pid < 0:
            raise OSError("no process can be made")
        return pid

    def end(self) -> None:
        """No process is made any more; those that were go on."""
        self._asking.close()
        if self.process is not None and self.pid == os.getpid():
            self.process.kill()
            self.process.wait()


def inherited():
    """What a process has from its parent, and a fork of the server from the server."""
    limits = [resource.getrlimit(kind) for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)]
    return os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0), limits


_servers: list[Server | None] = []


def server() -> Server | None:
    """That of this process; one that is gone is started anew, one that cannot be started is not tried again."""
    last = _servers[-1] if _servers else None
    if not _servers or (last is not None and last.process is not None and last.process.poll() is not None):
        try:
            _servers.append(Server.start())
        except OSError:
            _servers.append(None)
    return _servers[-1]


class Popen(subprocess.Popen):
    """As in `subprocess`, by a fork where that can be."""

    def _execute_child(self, *given):
        call = dict(zip(PARAMETERS, given, strict=True))
        descriptors = [call["p2cread"], call["c2pwrite"], call["errwrite"]]
        descriptors = [number if fd < 0 else fd for number, fd in enumerate(descriptors)]
        try:
            request = request_for(call, descriptors)
            self.pid = _servers[-1].ask(request, descriptors) if request else 0
        except (OSError, ValueError):
            self.pid = 0
        if not self.pid:
            super()._execute_child(*given)
            return
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(call[name] for name in pipes))


def request_for(call, descriptors):
    """What to ask the server for; None where only a fresh interpreter will do."""
    from flatout.run.script import as_typed

    folder = os.fsdecode(call["cwd"] or os.getcwd())
    words = list(map(os.fsdecode, call["args"])) if isinstance(call["args"], list | tuple) else []
    environment = {os.fsdecode(k): os.fsdecode(v) for k, v in (call["env"] or os.environ).items()}
    is_python = len(words) > 1 and words[0] in (sys.executable, as_typed(sys.executable))
    plain = not (call["pass_fds"] or call["shell"] or call["executable"]) and all(
        call[name] in (None, -1) for name in ("gid", "gids", "uid", "umask")
    )
    if (
        os.environ.get("TESTS_COLD")
        or not (plain and is_python and is_known(words[1:], folder) and os.access(folder, os.X_OK))
        or any(map(os.isatty, descriptors))
        or (here := server()) is None
        or here.pid != os.getpid()
        or here.inherited != inherited()
        or not can_be_given(environment, here)
    ):
        return None
    if here.process is not None and call["preexec_fn"] is not None:
        return None
    if here.process is None and "FLATOUT_SESSION" not in environment:  # flatout starts a launcher of ranks
        return None
    return {
        "words": ["-m", "flatout", *words[2:]] if Path(words[1]).name == "flatout" else words[1:],
        "python": words[0],
        "folder": folder,
        "environment": {os.fsencode(name): os.fsencode(value) for name, value in environment.items()},
        "own_session": call["start_new_session"],
        "group": call["process_group"],
        "dies_with": os.getpid() if call["preexec_fn"] is not None else 0,
    }


def can_be_given(environment, here) -> bool:
    """Whether all variables are read after the fork, or are the server's own."""
    threads = environment.get("OMP_NUM_THREADS", "")
    language = next(filter(None, map(environment.get, ("LC_ALL", "LC_CTYPE", "LANG"))), "")
    read = [
        {name: value for name, value in one.items() if READ_AT_START.match(name) and name not in OBEYED}
        for one in (environment, here.environment)
    ]
    is_utf8 = language.lower().replace("-", "").endswith(".utf8")
    return is_utf8 and (not threads or threads.isdecimal()) and read[0] == read[1]


def is_known(words, folder) -> bool:
    """Whether the server knows what these words after `python` mean."""
    if words[:3] == ["-I", "-S", "-X"]:
        return Path(words[4]).name == "enter_isolation.py" and is_known(words[words.index("--") + 2 :], folder)
    return words[0] in ("-m", "-c") or (words[0][:1] != "-" and Path(folder, words[0]).is_file())


def run(command, *, input=None, capture_output=False, timeout=None, check=False, **settings):
    """`subprocess.run`."""
    if capture_output:
        settings |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        settings["stdin"] = subprocess.PIPE
    with Popen(command, **settings) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    if check and process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, out, err)
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _be_flatout(descriptor: int, words: list[str]) -> None:
    """`python -m flatout WORDS`, whose scripts are forks of the server that is asked by this socket."""
    import runpy

    os.set_inheritable(descriptor, False)
    _servers.append(Server(socket.socket(fileno=descriptor), dict(os.environ)))
    sys.orig_argv = [sys.executable, "-m", "flatout", *words]
    sys.argv = ["flatout", *words]
    sys.path[0] = os.getcwd()
    from flatout.run import child_process

    child_process.start = Popen
    runpy.run_module("flatout", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _be_flatout(int(sys.argv[1]), sys.argv[2:])
