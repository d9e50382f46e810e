"""What is the training thread doing? Threads that do one thing, sampled."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flatout.frameworks.pytorch.observe.stack_samples import StackSampler

pytest.importorskip("torch")


def sampled(work, phase="unattributed", seconds=0.4, collates=()):
    """Rows of a thread that does `work` again and again; for longer where others take the cores."""
    stop, ready, found = threading.Event(), threading.Event(), []

    def go_on():
        found.append(threading.get_ident())
        ready.set()
        while not stop.is_set():
            work()

    thread = threading.Thread(target=go_on)
    thread.start()
    ready.wait()
    try:
        for _ in range(5):
            sampler = StackSampler(found[0], lambda: phase, collates)
            sampler.start()
            time.sleep(seconds)
            stacks = sampler.stop()
            if stacks.num_samples >= 20:
                return stacks.rows
            seconds *= 2
    finally:
        stop.set()
        thread.join()
    raise AssertionError(f"{stacks.num_samples} samples")


def spin():
    for _ in range(2000):
        sum(range(20))


def share(rows, kind):
    return sum(r.wall_s for r in rows if r.kind == kind) / sum(r.wall_s for r in rows)


def waiting(rows):
    return sum(r.waiting_s for r in rows) / sum(r.wall_s for r in rows)


def test_code_of_the_script_is_named_by_its_line_and_its_phase():
    rows = sampled(spin, phase="data")
    assert share(rows, "code") > 0.9 and {r.phase for r in rows} == {"data"}
    assert "test_stack_samples.py" in rows[0].place and "spin" in rows[0].place


def test_a_thread_that_sleeps_waits():
    assert waiting(sampled(lambda: time.sleep(0.01))) > 0.8


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel keeps no account of its queues")
def test_a_thread_whose_core_another_process_takes_waits_for_no_disk():
    core = min(os.sched_getaffinity(0))
    busy = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"

    def work():
        os.sched_setaffinity(0, {core})
        spin()

    with subprocess.Popen([sys.executable, "-c", busy]) as neighbour:
        try:
            assert waiting(sampled(work, seconds=1.0)) < 0.2
        finally:
            neighbour.kill()


def test_decoding_is_told_from_other_code():
    image = pytest.importorskip("PIL.Image")
    import io

    file = io.BytesIO()
    image.new("RGB", (600, 600), (1, 2, 3)).save(file, "JPEG")
    assert share(sampled(lambda: image.open(io.BytesIO(file.getvalue())).convert("RGB")), "decode") > 0.8


def test_collating_is_told_by_its_file_or_its_function():
    import torch
    from torch.utils.data import default_collate

    items = [(torch.zeros(8), 1) for _ in range(64)]
    assert share(sampled(lambda: default_collate(items)), "collate") > 0.8
    assert share(sampled(spin, collates=[spin.__code__]), "collate") > 0.8


def test_serialising_and_printing_are_output():
    text = {"loss": list(range(2000))}
    assert share(sampled(lambda: json.dumps(text)), "output") > 0.8


def test_the_usual_switching_is_restored():
    import sys

    before = sys.getswitchinterval()
    sampled(spin, seconds=0.2)
    assert sys.getswitchinterval() == before
