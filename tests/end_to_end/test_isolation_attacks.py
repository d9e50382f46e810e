"""Whatever a script does in an isolated trial, the user's disk is the same afterwards, to the byte and the time stamp.

Every attack is a script that must succeed, since a trial has to behave as a plain run does; it is run as this user and,
by root, as `nobody` too, in a folder under /tmp and in one under the home folder.
"""

import contextlib
import hashlib
import json
import os
import shutil
import socket
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from flatout.run import enter_rank, isolation
from tiers import some

SOURCE = Path(isolation.__file__).parents[1]
REASON = isolation.available()
pytestmark = pytest.mark.skipif(REASON is not None, reason=f"no isolation here: {REASON}")

DRIVER = """
import json, subprocess, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from flatout.records.as_json import to_json
from flatout.run import enter_rank, isolation
ask = json.loads(sys.argv[2])
run = Path(ask["run"])
scratch = run / "scratch"
argv = isolation.isolate(ask["command"], folder=Path(ask["folder"]), run_folder=run, scratch=scratch,
                         script_folder=Path(ask["script_folder"]) if ask.get("script_folder") else None)
done = subprocess.run(argv, cwd=ask["folder"], capture_output=True, text=True, timeout=120)
error = isolation.refusal(scratch)
written = isolation.written(scratch)
answer = {"rc": done.returncode, "out": done.stdout, "err": done.stderr, "refusal": error and error.cause,
          "notes": isolation.notes(scratch), "written": {w.path: [w.change, w.file_bytes] for w in written}}
isolation.discard(scratch)
assert not scratch.exists()
print(json.dumps(answer))
"""


@dataclass
class User:
    """Somebody who tunes: an identity, a home, a Python, a project with a run folder in it."""

    uid: int | None
    python: str
    package: Path
    home: Path
    folder: Path
    run: Path
    groups: tuple = ()

    def call(self, argv, **options):
        identity = {} if self.uid is None else {"user": self.uid, "group": self.uid, "extra_groups": self.groups}
        environment = {"HOME": str(self.home), "PATH": "/usr/local/bin:/usr/bin:/bin", "MARK": "a=b", "LC_ALL": "C"}
        return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=200, **identity, **options)

    def isolated(self, *command, folder=None, **more):
        ask = {"command": command, "folder": str(folder or self.folder), "run": str(self.run), **more}
        argv = [self.python, "-I", "-c", DRIVER, str(self.package), json.dumps(ask)]
        done = self.call(argv, cwd=folder or self.folder)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def script(self, code, *arguments, **more):
        answer = self.isolated(self.python, "-B", "-c", code, *arguments, **more)
        assert answer["refusal"] is None
        assert answer["rc"] == 0, answer["err"]
        return answer


def snapshot(*roots):
    """Everything that can be seen of all files: kind, mode, owner, size, both times, contents, attributes."""
    found = {}
    for root in roots:
        for path in [root, *sorted(root.rglob("*"))]:
            seen = path.lstat()
            contents = None
            if stat.S_ISREG(seen.st_mode):
                contents = hashlib.sha256(path.read_bytes()).hexdigest()
            elif stat.S_ISLNK(seen.st_mode):
                contents = os.readlink(path)
            attributes = [] if stat.S_ISLNK(seen.st_mode) else [(n, os.getxattr(path, n)) for n in os.listxattr(path)]
            own = (seen.st_mode, seen.st_uid, seen.st_gid, seen.st_nlink, seen.st_mtime_ns, seen.st_ctime_ns)
            found[str(path)] = (*own, None if stat.S_ISDIR(seen.st_mode) else seen.st_size, contents, attributes)
    return found


def fill(folder):
    """A project as users have them."""
    (folder / "data.bin").write_bytes(os.urandom(300_000))
    (folder / "last.pt").write_bytes(b"old weights" * 100)
    (folder / "train.log").write_text("epoch 1\n")
    (folder / "frozen.txt").write_text("do not touch")
    (folder / "frozen.txt").chmod(0o444)
    os.link(folder / "last.pt", folder / "best.pt")
    (folder / "link").symlink_to("data.bin")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "out" / "deep" / "er").mkdir(parents=True)
    (folder / "out" / "deep" / "er" / "sample.txt").write_text("x")
    (folder / "shared").mkdir(mode=0o750)
    os.mkfifo(folder / "fifo")
    with contextlib.suppress(OSError):
        os.setxattr(folder / "last.pt", "user.note", b"mine")
    with contextlib.closing(sqlite3.connect(folder / "runs.db")) as base:
        base.execute("create table runs (loss real)")
        base.execute("insert into runs values (0.5)")
        base.commit()


def give(uid, *roots):
    for root in roots if uid is not None else ():
        for path in [root, *root.rglob("*")]:
            os.chown(path, uid, uid, follow_symlinks=False)


def python_of_nobody(uid):
    for python in (sys.executable, "/usr/bin/python3"):
        with contextlib.suppress(OSError):
            if (
                subprocess.run(
                    [python, "-I", "-c", "import sys; sys.exit(sys.version_info < (3, 11))"], user=uid
                ).returncode
                == 0
            ):
                return python
    pytest.skip("no Python >= 3.11 that `nobody` may run")


@pytest.fixture(scope="module", params=["me", "nobody"])
def place(request):
    """A folder outside every overlay, and who works: this user, or `nobody` where root runs the tests."""
    uid = None
    if request.param == "nobody":
        if os.geteuid() != 0:
            pytest.skip("needs root, to become somebody else")
        uid = 65534
    top = Path(tempfile.mkdtemp(prefix="flatout-attacks-", dir="/tmp"))
    top.chmod(0o755)
    shutil.copytree(SOURCE, top / "package" / "flatout", ignore=shutil.ignore_patterns("__pycache__"))
    yield uid, top
    shutil.rmtree(top)


@pytest.fixture(scope="module", params=["tmp", "home"])
def user(request, place):
    uid, top = place
    python = sys.executable if uid is None else python_of_nobody(uid)
    home = top / f"home-{request.param}"
    home.mkdir()
    (home / ".cache").mkdir()
    (home / ".cache" / "kept").write_text("cached")
    if request.param == "home" and uid is None:
        home = Path.home()
    base = Path(tempfile.mkdtemp(prefix="flatout-attacks-", dir=top if request.param == "tmp" else home))
    folder = base / "my work, v1:é\\"
    run = folder / ".flatout" / "run 1"
    run.mkdir(parents=True)
    fill(folder)
    give(uid, top / f"home-{request.param}", base)
    yield User(uid, python, top / "package", home, folder, run)
    shutil.rmtree(base)


def everything_outside(user, token):
    """What an attack may try to leave anywhere, found by its token."""
    places = [
        "/tmp",
        "/var/tmp",
        "/dev/shm",
        user.home,
        user.home / ".cache",
        "/etc",
        "/",
        user.folder,
        user.folder.parent,
    ]
    return [
        f"{place}/{name}"
        for place in places
        if os.access(place, os.R_OK)
        for name in os.listdir(place)
        if token in name
    ]


def untouched(user):
    kept = snapshot(user.folder)
    kept = {path: seen for path, seen in kept.items() if "/run 1" not in path}
    return kept, snapshot(user.home / ".cache" / "kept") if (user.home / ".cache" / "kept").exists() else None


ATTACKS = {
    "checkpoints and logs at every step": """
for step in range(150):
    with open("train.log", "a") as log: log.write(f"step {step}\\n")
    with open("last.pt.tmp", "wb") as file: file.write(os.urandom(5000)); file.flush(); os.fsync(file.fileno())
    os.replace("last.pt.tmp", "last.pt")
    os.makedirs(f"ckpt/{step}"); open(f"ckpt/{step}/{T}", "w").write("x")
assert open("train.log").read().startswith("epoch 1\\nstep 0") and os.path.getsize("last.pt") == 5000
assert os.path.getsize("best.pt") == 1100, "the other name of the old checkpoint keeps the old weights"
""",
    "overwriting, truncating, appending": """
open("data.bin", "wb").close(); assert os.path.getsize("data.bin") == 0
os.truncate("last.pt", 10); assert os.path.getsize("last.pt") == 10
with open("train.log", "a") as log: log.write("more")
assert open("train.log").read() == "epoch 1\\nmore"
""",
    "deleting files and folders": """
os.remove("data.bin"); os.remove("dangling"); os.remove("fifo"); shutil.rmtree("out")
assert not os.path.exists("link") and not os.path.exists("out")
os.mkdir("out"); assert os.listdir("out") == []
""",
    "deleting its own folder": """
shutil.rmtree(os.getcwd(), ignore_errors=True); assert not os.path.exists("data.bin")
""",
    "deleting home and /tmp": """
for place in (os.path.expanduser("~"), "/tmp", "/var/tmp"):
    for name in os.listdir(place):
        if name.startswith((".cache", "flatout-attacks-")): shutil.rmtree(f"{place}/{name}", ignore_errors=True)
""",
    "modes, owners and times": """
os.chmod("last.pt", 0o600); os.chmod(".", 0o700); os.chmod("shared", 0)
os.utime("data.bin", (1, 1)); os.utime(".", (5, 5))
os.chown("train.log", os.getuid(), os.getgid()); os.chmod("frozen.txt", 0o644); open("frozen.txt", "w").write("thawed")
assert os.stat("data.bin").st_mtime == 1 and os.stat("last.pt").st_mode & 0o777 == 0o600
""",
    "renaming": """
os.rename("train.log", "moved.log"); assert open("moved.log").read() == "epoch 1\\n"
os.rename("last.pt", "data.bin"); os.replace("best.pt", "out/best.pt")
os.mkdir("fresh"); os.rename("fresh", "renamed"); shutil.move("shared", "out/shared"); shutil.move("out", "results")
assert open("results/deep/er/sample.txt").read() == "x" and not os.path.exists("out")
""",
    "hard and symbolic links": """
os.link("data.bin", "hard"); open("hard", "r+b").write(b"changed")
assert open("data.bin", "rb").read(7) == b"changed" and os.stat("hard").st_nlink == 2
os.symlink("last.pt", "latest.tmp"); os.replace("latest.tmp", "link"); assert os.readlink("link") == "last.pt"
open("link", "wb").write(b"through a link"); assert open("last.pt", "rb").read() == b"through a link"
open("dangling", "w").write("now it exists"); assert os.path.exists("nowhere")
""",
    "memory-mapped files": """
import mmap
with open("data.bin", "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
    view[:5] = b"12345"; view.flush()
    assert open("data.bin", "rb").read(5) == b"12345"
with open("new.bin", "w+b") as file:
    file.truncate(1 << 20)
    with mmap.mmap(file.fileno(), 0) as view: view[-3:] = b"end"
assert open("new.bin", "rb").read()[-3:] == b"end"
""",
    "a database with a write-ahead log": """
import sqlite3
base = sqlite3.connect("runs.db"); assert base.execute("pragma journal_mode=wal").fetchone() == ("wal",)
for loss in range(50): base.execute("insert into runs values (?)", (loss,)); base.commit()
other = sqlite3.connect("runs.db"); assert other.execute("select count(*) from runs").fetchone() == (51,)
assert os.path.exists("runs.db-wal")
""",
    "home, temporary folders and shared memory": """
import tempfile
for place in ("~", "~/.cache", "/tmp", "/var/tmp", "/dev/shm"):
    path = os.path.join(os.path.expanduser(place), T)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    open(path, "w").write("x"); assert open(path).read() == "x"
os.makedirs(os.path.expanduser(f"~/.config/{T}/deep")); os.makedirs(f"/tmp/{T}-dir")
tempfile.mkstemp(prefix=T); tempfile.mkdtemp(prefix=T, dir="/var/tmp"); tempfile.TemporaryFile().write(b"x")
open(os.path.abspath("absolute.txt"), "w").write("x")
from multiprocessing import shared_memory
block = shared_memory.SharedMemory(create=True, size=1 << 20); block.buf[0] = 7
""",
    "sockets and pipes": """
import socket
server = socket.socket(socket.AF_UNIX); server.bind("socket"); server.listen(1)
client = socket.socket(socket.AF_UNIX); client.connect("socket"); client.send(b"hi")
assert server.accept()[0].recv(2) == b"hi"
os.mkfifo("pipe"); fd = os.open("pipe", os.O_RDWR); os.write(fd, b"x"); assert os.read(fd, 1) == b"x"
""",
    "locks, holes, unnamed files and attributes": """
import fcntl
with open("data.bin", "r+b") as file: fcntl.flock(file, fcntl.LOCK_EX); fcntl.lockf(file, fcntl.LOCK_EX)
with open("holes", "wb") as file: file.seek(1 << 30); file.write(b"x"); os.posix_fallocate(file.fileno(), 0, 4096)
fd = os.open(".", os.O_TMPFILE | os.O_RDWR); os.write(fd, b"x")
try: os.setxattr("last.pt", "user.note", b"theirs")
except OSError as error: assert error.errno == 95
""",
    "folders that nobody can read or leave": """
os.makedirs("locked/in/side"); open("locked/in/file", "w").write("x")
os.chmod("locked/in", 0); os.chmod("locked", 0o000)
here = os.getcwd(); name = "d" * 100
for _ in range(60): os.mkdir(name); os.chdir(name)
open("bottom", "w").write("x"); os.chdir(here)
os.mkdir("odd \\n name"); open("odd \\n name/" + "\\udcff\\udcfe", "w").write("not UTF-8")
""",
    "a child that outlives nothing": """
import subprocess
subprocess.run(["sh", "-c", f"echo x > {T}; rm -rf out; mv train.log /tmp/{T}-log; cp data.bin ~/{T}"], check=True)
assert os.path.exists(T) and not os.path.exists("out")
""",
}
HEAD = "import os, shutil, sys\nT = sys.argv[1]\n"


@pytest.mark.parametrize("attack", some(list(ATTACKS), "checkpoints and logs at every step"))
def test_the_users_disk_is_the_same_after(user, attack):
    token, before = f"flatout-token-{uuid.uuid4().hex}", untouched(user)
    answer = user.script(HEAD + ATTACKS[attack], token)
    assert untouched(user) == before
    assert everything_outside(user, token) == []
    assert answer["notes"] == [] and answer["written"]


def test_a_script_that_is_killed_while_it_writes_leaves_nothing(user):
    before = untouched(user)
    code = "import os; f = open('data.bin', 'wb'); f.write(b'x' * 99999); f.flush(); os.kill(os.getpid(), 9)"
    answer = user.isolated(user.python, "-c", code)
    assert answer["rc"] == -9 and answer["refusal"] is None
    assert untouched(user) == before
    assert answer["written"][f"{user.folder}/data.bin"] == ["changed", 99999]


def test_what_would_have_been_written_is_listed_as_the_user_would_have_found_it(user):
    answer = user.script("""
import os, shutil
open("new.pt", "wb").write(bytes(4096)); open("train.log", "a").write("12"); os.remove("last.pt")
shutil.rmtree("out"); os.mkdir("out"); os.mkdir("empty"); os.makedirs(os.path.expanduser("~/.made"))
open(os.path.expanduser("~/.made/file"), "w").write("abc")
open("gone", "w").close(); os.remove("gone"); os.rename("data.bin", "moved.bin")
""")
    assert answer["written"] == {
        f"{user.folder}/new.pt": ["created", 4096],
        f"{user.folder}/train.log": ["changed", 10],
        f"{user.folder}/last.pt": ["deleted", 0],
        f"{user.folder}/out": ["replaced", 0],
        f"{user.folder}/empty": ["created", 0],
        f"{user.folder}/data.bin": ["deleted", 0],
        f"{user.folder}/moved.bin": ["created", 300_000],
        f"{user.home}/.made/file": ["created", 3],
    }


def test_the_run_folder_is_really_written_and_its_scratch_is_hidden(user):
    record = user.run / "trace.jsonl"
    user.script(
        "import os, sys; open(sys.argv[1], 'w').write('kept'); assert not os.listdir('.flatout/run 1/scratch')",
        str(record),
    )
    assert record.read_text() == "kept"
    record.unlink()


def test_a_trial_is_the_same_process_in_the_same_place_with_the_same_identity(user):
    code = """
import grp, json, os, pwd, signal
print(json.dumps([os.getuid(), os.geteuid(), os.getgid(), os.getcwd(), dict(os.environ), os.umask(0),
                  [str(signal.getsignal(s)) for s in range(1, 32)], pwd.getpwuid(os.getuid()).pw_name,
                  os.stat(".").st_uid, os.stat(".").st_mode, os.stat("data.bin").st_uid,
                  os.stat(os.path.expanduser("~")).st_mode, os.stat("/tmp").st_mode, os.stat(".").st_mtime,
                  sorted(os.listdir("/proc/self/fd"))]))
"""
    plain = user.call([user.python, "-c", code], cwd=user.folder)
    assert json.loads(user.script(code)["out"]) == json.loads(plain.stdout)


def test_signals_of_a_plain_run_are_those_of_a_trial(user):
    ask = ["sh", "-c", "grep -E '^Sig(Blk|Ign|Cgt)' /proc/self/status"]
    assert user.isolated(*ask)["out"] == user.call(ask, cwd=user.folder).stdout


def test_what_lay_in_the_temporary_folders_before_is_visible_but_not_writable(user):
    token = uuid.uuid4().hex
    places = [Path(place) / f"flatout-before-{token}" for place in ("/tmp", "/var/tmp", "/dev/shm")]
    try:
        for path in places:
            path.write_text("staged")
            give(user.uid, path)
        before = snapshot(*places)
        user.script(
            """
import sys
for path in sys.argv[1:]:
    assert open(path).read() == "staged"
    try: open(path, "w").write("changed")
    except OSError: assert path.startswith("/dev/shm")
""",
            *map(str, places),
        )
        assert snapshot(*places) == before
    finally:
        for path in places:
            path.unlink(missing_ok=True)


@pytest.fixture
def outside(user):
    """A folder the user may really write to, outside every overlay."""
    for parent in ("/opt", "/srv", "/mnt", "/run", f"/run/user/{os.getuid()}"):
        with contextlib.suppress(OSError):
            made = Path(tempfile.mkdtemp(prefix="flatout-attacks-", dir=parent))
            break
    else:
        pytest.skip("this user may write to no folder outside home and the temporary ones")
    (made / "model.pt").write_text("precious")
    give(user.uid, made)
    yield made
    shutil.rmtree(made)


def test_everything_else_is_read_only_also_through_a_link_in_the_users_folder(user, outside):
    link = user.folder / "elsewhere"
    link.symlink_to(outside)
    try:
        before = snapshot(outside)
        answer = user.script(
            """
import errno, json, os, shutil, sys
def refused(do, *arguments):
    try: do(*arguments)
    except OSError as error: assert error.errno == errno.EROFS, error
    else: raise AssertionError(f"{do} was not refused")
for place in (sys.argv[1], "elsewhere"):
    refused(open, f"{place}/new", "w"); refused(open, f"{place}/model.pt", "w"); refused(open, f"{place}/model.pt", "a")
    refused(os.remove, f"{place}/model.pt"); refused(os.mkdir, f"{place}/d"); refused(os.chmod, f"{place}/model.pt", 0)
    refused(os.rename, f"{place}/model.pt", f"{place}/m"); refused(os.utime, f"{place}/model.pt")
    refused(os.truncate, f"{place}/model.pt", 0)
    assert open(f"{place}/model.pt").read() == "precious"
""",
            str(outside),
        )
        assert snapshot(outside) == before
        assert answer["written"] == {}
    finally:
        link.unlink()


@pytest.mark.smoke
def test_no_way_round_leads_to_the_real_disk(user, outside):
    before, kept = snapshot(outside), untouched(user)
    user.script(
        """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def attempt(nested):
    REMOUNT, BIND = 32, 4096
    here, home = os.getcwd(), os.path.expanduser("~")
    for place in ("/", "/tmp", here, home, "/dev/shm", here + "/.flatout/run 1/scratch"):
        assert libc.mount(b"none", place.encode(), None, ctypes.c_ulong(REMOUNT | BIND), None) != 0 or nested, place
        assert libc.umount2(place.encode(), 2) != 0, place
    for path in (sys.argv[1] + "/new", sys.argv[1] + "/model.pt"):
        try: open(path, "w").write("x")
        except OSError: pass
        else: raise AssertionError("written")
attempt(False)
for pid in (os.getppid(), 1):
    for way in ("root" + sys.argv[1] + "/new", "cwd/new", "root" + os.getcwd() + "/new"):
        try: open(f"/proc/{pid}/{way}", "w").write("x")
        except OSError: pass
        else: raise AssertionError("reached the disk through another process")
try: open("/proc/sys/kernel/hostname", "a").write("x")
except OSError: pass
else: raise AssertionError("changed the kernel's settings")
if os.fork() == 0:
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(0x10020000) == 0:  # root again, in namespaces of its own
        open("/proc/self/setgroups", "w").write("deny") if os.getuid() != uid else None
        try: open("/proc/self/uid_map", "w").write(f"0 {uid} 1")
        except OSError: pass
        attempt(True)
    os._exit(0)
assert os.wait()[1] == 0, "nested namespaces undid it"
""",
        str(outside),
    )
    assert snapshot(outside) == before
    assert untouched(user) == kept


def test_devices_and_process_files_stay_usable(user):
    user.script("""
import os, pty
open("/dev/null", "wb").write(b"x"); assert len(open("/dev/urandom", "rb").read(8)) == 8
parent, child = pty.openpty(); os.write(parent, b"x\\n"); assert os.read(child, 2) == b"x\\n"
open("/proc/self/comm", "w").write("trial"); assert open("/proc/self/comm").read() == "trial\\n"
assert os.statvfs("/dev/shm").f_blocks
""")


def test_shared_memory_is_as_large_as_outside(user):
    code = "import os; s = os.statvfs('/dev/shm'); print(s.f_blocks * s.f_frsize)"
    assert user.script(code)["out"] == user.call([user.python, "-c", code]).stdout


@pytest.mark.parametrize("devices", [["0", "1"], []])
def test_ranks_with_gpus_have_one_shared_memory_or_nccl_takes_them_for_containers(tmp_path, devices):
    name = f"flatout-ranks-{uuid.uuid4().hex}"
    code = f"import os; open('/dev/shm/{name}', 'a').write('x'); print(os.stat('/dev/shm').st_dev)"
    run, folder = tmp_path / "run", tmp_path / "work"
    folder.mkdir()
    seen = []
    try:
        for rank in range(2):
            words = isolation.isolate(
                [], folder=folder, script_folder=None, run_folder=run, scratch=run / f"scratch-{rank}"
            )
            command = [*enter_rank._prepared({"devices": devices}, words, [], 0), sys.executable, "-I", "-c", code]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr
            seen.append(int(done.stdout))
        here = os.stat("/dev/shm").st_dev
        assert (seen == [here] * 2) if devices else (here not in seen)
        assert Path("/dev/shm", name).exists() == bool(devices)
    finally:
        Path("/dev/shm", name).unlink(missing_ok=True)


def test_workers_share_memory_and_semaphores(user):
    user.script("""
import multiprocessing as mp
def work(queue, event): queue.put(sum(range(10))); event.set()
if __name__ == "__main__":
    context = mp.get_context("fork")
    queue, event = context.Queue(), context.Event()
    processes = [context.Process(target=work, args=(queue, event)) for _ in range(4)]
    [p.start() for p in processes]; [p.join() for p in processes]
    assert event.is_set() and [queue.get() for _ in processes] == [45] * 4
""")


def test_a_server_of_the_user_can_be_reached_through_its_socket(user):
    address = user.folder.parent / "server"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(address))
        give(user.uid, address)
        server.listen(1)
        answering = threading.Thread(target=lambda: server.accept()[0].send(b"hello"), daemon=True)
        answering.start()
        user.script(
            "import socket; s = socket.socket(socket.AF_UNIX); s.connect('../server'); assert s.recv(5) == b'hello'"
        )
        answering.join(10)
    address.unlink()


def test_a_folder_reached_through_a_link_is_isolated_where_it_really_is(user):
    link = user.folder.parent / "link to work"
    link.symlink_to(user.folder)
    before = untouched(user)
    try:
        answer = user.script("open('new', 'w').write('x'); open('data.bin', 'w')", folder=link, script_folder=str(link))
    finally:
        link.unlink()
    assert untouched(user) == before
    assert set(answer["written"]) == {f"{user.folder}/new", f"{user.folder}/data.bin"}


def test_the_folder_of_the_script_is_overlaid_too(user, outside):
    before = snapshot(outside)
    answer = user.script(
        "import sys; open(sys.argv[1] + '/out.txt', 'w').write('x')", str(outside), script_folder=str(outside)
    )
    assert snapshot(outside) == before
    assert answer["written"] == {f"{outside}/out.txt": ["created", 1]}


def test_a_folder_the_user_may_not_write_to_stays_so(user, place):
    if user.uid is None and os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    folder = place[1] / f"readonly-{uuid.uuid4().hex}"
    folder.mkdir(mode=0o555)
    user.script(
        """
try: open("new", "w")
except PermissionError: pass
else: raise AssertionError("a plain run could not do this")
""",
        folder=folder,
    )
    folder.rmdir()


def test_a_project_of_another_group_can_be_changed_in_a_trial(user):
    if user.uid is None:
        pytest.skip("needs root, to belong to a group")
    project = 4242
    folder = user.folder.parent / "group"
    run = folder / ".flatout" / "r"
    run.mkdir(parents=True)
    fill(folder)
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, user.uid, project, follow_symlinks=False)
        if path.is_dir():
            path.chmod(0o2770)
    there = User(user.uid, user.python, user.package, user.home, folder, run, (project,))
    before = snapshot(folder / "out", *[path for path in folder.iterdir() if path.is_file()])
    answer = there.script("""
import os
open("train.log", "a").write("more"); open("new", "w").write("x"); open("out/deep/er/sample.txt", "w").write("changed")
open("out/deep/new", "w").write("x"); os.makedirs("shared/made"); os.replace("last.pt", "data.bin"); os.remove("link")
assert open("train.log").read() == "epoch 1\\nmore" and os.stat("best.pt").st_size == 1100
""")
    assert snapshot(folder / "out", *[path for path in folder.iterdir() if path.is_file()]) == before
    assert answer["notes"] == []
    made = {os.path.relpath(path, folder): change for path, (change, _) in answer["written"].items()}
    assert made == {
        "train.log": "changed",
        "new": "created",
        "out/deep/er/sample.txt": "changed",
        "out/deep/new": "created",
        "shared/made": "created",
        "last.pt": "deleted",
        "data.bin": "changed",
        "link": "deleted",
    }


@pytest.mark.smoke
def test_two_trials_at_once_do_not_see_each_other(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "shared.txt").write_text("mine")
    code = """
import os, sys, time
open("shared.txt", "w").write(sys.argv[1]); open("made-" + sys.argv[1], "w").close()
time.sleep(0.5)
assert open("shared.txt").read() == sys.argv[1]
assert [name for name in os.listdir(".") if name.startswith("made")] == ["made-" + sys.argv[1]]
"""
    started = []
    for name in ("a", "b"):
        run = folder / ".flatout" / name
        command = [sys.executable, "-c", code, name]
        folders = {"folder": folder, "script_folder": None, "run_folder": run, "scratch": run / "scratch"}
        run.mkdir(parents=True)
        started.append((run / "scratch", subprocess.Popen(isolation.isolate(command, **folders), cwd=folder)))
    assert [process.wait() for _, process in started] == [0, 0]
    for (scratch, _), name in zip(started, "ab", strict=True):
        assert {write.path for write in isolation.written(scratch)} == {
            f"{folder}/shared.txt",
            f"{folder}/made-{name}",
        }
        isolation.discard(scratch)
    assert (folder / "shared.txt").read_text() == "mine"


def test_pipes_to_the_parent_are_inherited_as_in_a_plain_run(tmp_path):
    folder, run = tmp_path / "work", tmp_path / "run"
    folder.mkdir()
    reading, writing = os.pipe()
    command = [sys.executable, "-c", f"import os; os.write({writing}, b'through a pipe')"]
    argv = isolation.isolate(command, folder=folder, script_folder=None, run_folder=run, scratch=run / "scratch")
    subprocess.run(argv, cwd=folder, pass_fds=(writing,), check=True)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert pipe.read() == "through a pipe"
    isolation.discard(run / "scratch")


def test_a_folder_in_shared_memory_can_be_worked_in(user):
    base = Path(tempfile.mkdtemp(prefix="flatout-attacks-", dir="/dev/shm"))
    base.chmod(0o755)
    try:
        folder, run = base / "work", base / "work" / "run"
        run.mkdir(parents=True)
        (folder / "data").write_text("x")
        give(user.uid, base)
        there = User(user.uid, user.python, user.package, user.home, folder, run)
        before = snapshot(folder / "data")
        answer = there.script(
            "open('data', 'w').write('changed'); open('run/record', 'w').write('kept'); open('new', 'w')"
        )
        assert snapshot(folder / "data") == before
        assert (run / "record").read_text() == "kept" and not (folder / "new").exists()
        assert set(answer["written"]) == {f"{folder}/data", f"{folder}/new"}
    finally:
        shutil.rmtree(base)


def test_a_command_that_does_not_exist_is_reported_and_nothing_starts(user):
    answer = user.isolated("no-such-command-anywhere")
    assert answer["rc"] == isolation.EXIT_REFUSED
    assert "No such file" in answer["refusal"]


def test_the_exit_code_and_the_output_are_those_of_the_command(user):
    answer = user.isolated("sh", "-c", "echo out; echo err >&2; exit 7")
    assert (answer["rc"], answer["out"], answer["err"], answer["refusal"]) == (7, "out\n", "err\n", None)


@pytest.mark.parametrize("spoil", ["layers", "run_folder", "memory"])
def test_a_step_that_fails_starts_nothing(tmp_path, spoil):
    folder, run = tmp_path / "work", tmp_path / "run"
    folder.mkdir()
    scratch = run / "scratch"
    argv = isolation.isolate(["touch", "started"], folder=folder, script_folder=None, run_folder=run, scratch=scratch)
    spec = json.loads((scratch / "spec.json").read_text())
    if spoil == "layers":
        spec["layers"].append({"folder": "/proc/self/fdinfo", "rebuilt": False, "required": True})
    elif spoil == "run_folder":
        spec["run_folder"] = "/nowhere"
    else:
        spec.update(guarded=["/nowhere/at/all"])
    (scratch / "spec.json").write_text(json.dumps(spec))
    done = subprocess.run(argv, cwd=folder, capture_output=True)
    assert done.returncode == isolation.EXIT_REFUSED
    assert "--allow-writes" in isolation.refusal(scratch).hint
    assert list(folder.iterdir()) == []
    isolation.discard(scratch)


def in_namespace(setup, code, folder):
    """Runs `code` after `setup`, in namespaces of its own, where mounts and limits harm nobody."""
    if not shutil.which("unshare"):
        pytest.skip("needs the `unshare` command")
    argv = ["unshare", "-U", "-r", "-m", "sh", "-e", "-c", setup + '\nexec "$@"', "sh", sys.executable, "-c", code]
    done = subprocess.run(
        argv, capture_output=True, text=True, cwd=folder, env={**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


RUN_HERE = """
import json, os, subprocess, sys
from pathlib import Path
from flatout.run import enter_rank, isolation
def trial(script, folder=Path.cwd()):
    run = folder / ".flatout" / "r"
    folders = {"folder": folder, "script_folder": None, "run_folder": run, "scratch": run / "scratch"}
    argv = isolation.isolate(["sh", "-e", "-c", script], **folders)
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, (done.stderr, isolation.refusal(run / "scratch"))
    found = isolation.notes(run / "scratch"), {w.path: w.change for w in isolation.written(run / "scratch")}
    isolation.discard(run / "scratch")
    return found
"""


def test_mounts_beneath_the_users_folder_are_isolated_too(tmp_path):
    (tmp_path / ".flatout").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "code" / "volume").mkdir(parents=True)
    (tmp_path / "code" / "a.py").write_text("pass")
    (tmp_path / "data").mkdir()
    os.mkfifo(tmp_path / "pipe")
    setup = "mount -t tmpfs x data; echo sample > data/s; mount -t tmpfs x code/volume; echo v > code/volume/v"
    code = (
        RUN_HERE
        + """
notes, written = trial('''
test "$(cat data/s)" = sample; test -p pipe
echo changed > notes.txt; echo n > new.txt; rm data/s; echo n > data/n; echo b >> code/a.py; echo 2 > code/volume/v
''')
assert notes == ()
assert {os.path.relpath(path): change for path, change in written.items()} == {
    "notes.txt": "changed", "new.txt": "created", "data/s": "deleted", "data/n": "created", "code/a.py": "changed",
    "code/volume/v": "changed"}
assert Path("notes.txt").read_text() == "mine" and Path("code/a.py").read_text() == "pass"
assert os.listdir("data") == ["s"] and Path("code/volume/v").read_text() == "v\\n" and not Path("new.txt").exists()
"""
    )
    in_namespace(setup, code, tmp_path)


def test_a_run_folder_whose_disk_takes_no_changes_falls_back_to_memory_and_says_so(tmp_path):
    for name in ("lower", "upper", "work", "merged"):
        (tmp_path / name).mkdir()
    (tmp_path / "lower" / "a").write_text("mine")
    setup = "mount -t overlay overlay merged -o lowerdir=lower,upperdir=upper,workdir=work,userxattr"
    code = (
        RUN_HERE
        + """
folder = Path("merged").resolve()
notes, written = trial("echo changed > a; echo b > b; test $(cat a) = changed; echo kept > .flatout/r/record", folder)
assert len(notes) == 1 and "kept in memory" in notes[0] and "GiB" in notes[0], notes
assert (folder / "a").read_text() == "mine" and not (folder / "b").exists()
assert (folder / ".flatout/r/record").read_text() == "kept\\n"
"""
    )
    in_namespace(setup, code, tmp_path)


def test_a_machine_without_user_namespaces_says_which_setting_forbids_them(tmp_path):
    code = "from flatout.run import isolation; print(isolation.available())"
    said = in_namespace("echo 0 > /proc/sys/user/max_user_namespaces", code, tmp_path)
    assert "`user.max_user_namespaces=0`" in said


@pytest.mark.smoke
def test_probing_the_machine_leaves_nothing_behind():
    before = set(os.listdir(tempfile.gettempdir()))
    assert isolation.available() is None
    assert not [name for name in set(os.listdir(tempfile.gettempdir())) - before if name.startswith("flatout-probe")]


@pytest.mark.gpu
def test_a_gpu_starts_inside(tmp_path):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    folder, run = tmp_path / "work", tmp_path / "work" / "run"
    run.mkdir(parents=True)
    code = "import torch; x = torch.ones(1000, device='cuda'); assert x.sum().item() == 1000"
    scratch = run / "scratch"
    argv = isolation.isolate(
        [sys.executable, "-c", code], folder=folder, script_folder=None, run_folder=run, scratch=scratch
    )
    started = time.monotonic()
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, (done.stderr, time.monotonic() - started)
    isolation.discard(scratch)
