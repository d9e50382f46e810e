"""Do workers of ours end with the script, and are they given up where they die or hang, and only there?"""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset  # noqa: E402

from flatout.frameworks.pytorch.input import worker_processes  # noqa: E402
from flatout.frameworks.pytorch.input.loaders import Loaders  # noqa: E402
from flatout.frameworks.pytorch.input.worker_processes import OurWorkers  # noqa: E402
from tiers import some  # noqa: E402

WORKERS = {"num_workers": 2, "prefetch_factor": 2}


class Numbers(Dataset):
    """Items that depend on their number alone; in a worker of ours, or in any, something may happen at one of them."""

    def __init__(self, act=lambda: None, num_workers=(2,)):
        self.act, self.num_workers = act, num_workers

    def __len__(self):
        return 24

    def __getitem__(self, k):
        if k == 9 and torch.utils.data.get_worker_info().num_workers in self.num_workers:
            self.act()
        return k


def loader_of(dataset, **options):
    return DataLoader(dataset, **{"batch_size": 4, "shuffle": True, "num_workers": 1, **options})


def order_of(loader):
    torch.manual_seed(3)
    return [number for batch in loader for number in batch.tolist()]


@pytest.fixture
def loaders():
    others = set(multiprocessing.active_children())
    owner = Loaders()
    owner.problems = []
    owner.on_failure = lambda stage, problem: owner.problems.append(str(problem))
    owner.install()
    owner.change(WORKERS)
    yield owner
    owner.remove()
    deadline = time.monotonic() + 10
    while set(multiprocessing.active_children()) - others and time.monotonic() < deadline:
        time.sleep(0.02)
    assert set(multiprocessing.active_children()) <= others


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(worker_processes, "PATIENCE_S", 0.8)


# -- while a batch is waited for -----------------------------------------------------------------------------------


def test_a_worker_that_is_killed_costs_no_wait(loaders):
    plain = order_of(loader_of(Numbers()))
    dataset = Numbers(lambda: os.kill(os.getpid(), signal.SIGKILL))
    begun_s = time.monotonic()
    assert order_of(loader_of(dataset)) == plain
    assert time.monotonic() - begun_s < 4, "it is not looked for every five seconds"
    assert len(loaders.problems) == 1 and "exited unexpectedly" in loaders.problems[0]


@pytest.mark.parametrize("kind", ["sleeps", "waits for what never comes"])
def test_a_worker_that_hangs_is_given_up(kind, loaders, impatient):
    acts = {"sleeps": lambda: time.sleep(1000), "waits for what never comes": lambda: threading.Event().wait()}
    begun_s = time.monotonic()
    found = order_of(loader_of(Numbers(acts[kind])))
    assert sorted(found) == list(range(24)) and found == order_of(loader_of(Numbers()))
    assert time.monotonic() - begun_s < 5, "nor is it waited for at the end"
    assert len(loaders.problems) == 1 and "timed out" in loaders.problems[0]


def test_a_script_that_takes_long_gives_nobody_up(loaders, impatient):
    seen = []
    for batch in loader_of(Numbers()):
        time.sleep(0.9)
        seen += batch.tolist()
    assert sorted(seen) == list(range(24)) and loaders.problems == []


def test_the_scripts_own_time_limit_still_holds(loaders):
    loader = loader_of(Numbers(lambda: time.sleep(1000), num_workers=(1, 2)), timeout=1)
    begun_s = time.monotonic()
    with pytest.raises(RuntimeError, match="timed out after 1 seconds"):
        list(loader)
    assert time.monotonic() - begun_s < 9, "ours, the script's own, and PyTorch's five seconds to end those"


# -- the end -------------------------------------------------------------------------------------------------------

SCRIPT = """
import os, signal, sys, time
import torch
from torch.utils.data import DataLoader
from flatout.frameworks.pytorch.input.loaders import Loaders

class Stuck(torch.utils.data.Dataset):
    def __len__(self):
        return 24
    def __getitem__(self, k):
        if k >= 8:
            time.sleep(1000)
        return k

loaders = Loaders()
loaders.install()
loaders.change({"num_workers": 2, "prefetch_factor": 2})
loader = DataLoader(Stuck(), batch_size=4, num_workers=1)
loaders.note(loader, 1)
batches = iter(loader)
next(batches)
print(*(worker.pid for worker in batches._workers), flush=True)
"""


def test_workers_that_are_stuck_end_with_a_script_that_is_killed():
    script = subprocess.Popen([sys.executable, "-c", SCRIPT + "time.sleep(1000)"], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in script.stdout.readline().split()]
    assert len(pids) == 2 and all(is_there(pid) for pid in pids)
    script.kill()
    script.wait()
    script.stdout.close()
    deadline = time.monotonic() + 2
    while any(map(is_there, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_there, pids))


def is_there(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_workers_outlive_the_thread_that_started_them(loaders):
    passing = []

    def begin():
        passing.append(iter(loader_of(Numbers())))
        next(passing[0])

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    time.sleep(0.2)
    assert len(list(passing[0])) == 5 and loaders.problems == []


def test_a_forked_process_that_drops_a_pass_leaves_its_workers_alone(loaders):
    passing = [iter(loader_of(Numbers()))]
    next(passing[0])
    pid = os.fork()
    if pid == 0:
        passing.clear()
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    time.sleep(0.2)
    assert isinstance(passing[0].inner, OurWorkers)
    assert len(list(passing[0])) == 5 and loaders.problems == []


def test_a_worker_that_died_unseen_does_not_hold_up_the_end_of_a_pass(loaders):
    passing = iter(loader_of(Numbers()))
    next(passing)
    workers = passing._workers
    os.kill(workers[0].pid, signal.SIGKILL)
    os.kill(workers[1].pid, signal.SIGSTOP)
    workers[0].join()
    begun_s = time.monotonic()
    del passing
    assert time.monotonic() - begun_s < 3 and not any(worker.is_alive() for worker in workers)


@pytest.mark.parametrize("room", some([0, 3, 6, 9], 3))
def test_where_there_is_no_room_for_processes_the_script_goes_on(room):
    code = SCRIPT.split("class Stuck")[0] + (
        "import resource\n"
        "loaders = Loaders()\n"
        "loaders.install()\n"
        "problems = []\n"
        "loaders.on_failure = lambda stage, problem: problems.append(stage)\n"
        "loaders.change({'ahead': 2})\n"
        "list(DataLoader(torch.arange(8), batch_size=4))\n"
        f"most = len(os.listdir('/proc/self/fd')) + {room}\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))\n"
        "found = list(DataLoader(torch.arange(80), batch_size=4, shuffle=True))\n"
        "print(len(found), problems, *loaders.remarks())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    said = (
        " batches are left to plain instead of made ahead: no process could be started: [Errno 24] Too many open files"
    )
    assert done.stdout in ("20 []\n", f"20 []{said}\n") and done.stderr == ""


def test_workers_of_ours_leave_it_to_the_script_how_processes_start():
    code = SCRIPT + (
        "import multiprocessing\n"
        "print(multiprocessing.get_start_method(allow_none=True), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"  # its workers are stuck
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.splitlines()[1:] == ["None"], done.stderr
