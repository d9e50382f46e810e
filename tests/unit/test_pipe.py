"""Orders come through a pipe as whole lines, with or without waiting."""

import errno
import os
import threading
import time

import pytest

from flatout.child.pipe import LOOK_EVERY_S, OrderPipe


@pytest.fixture
def both_ends(tmp_path):
    """The child's end, and a descriptor to write to it."""
    path = tmp_path / "orders"
    os.mkfifo(path)
    parent = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    yield OrderPipe(str(path)), parent
    os.close(parent)


def test_lines_come_whole_and_in_order_however_they_were_written(both_ends):
    pipe, parent = both_ends
    os.write(parent, "first\nsecönd\nthi".encode())
    assert pipe.read(wait=True) == "first"
    assert pipe.read(wait=True) == "secönd"
    os.write(parent, b"rd\n")
    assert pipe.read(wait=True) == "third"


def test_waiting_ends_when_a_line_comes(both_ends):
    pipe, parent = both_ends
    threading.Timer(0.05, os.write, (parent, b"late\n")).start()
    assert pipe.read(wait=True) == "late"


def test_without_waiting_a_missing_line_is_none(both_ends):
    pipe, parent = both_ends
    assert pipe.read(wait=False) is None
    os.write(parent, b"half a line")
    time.sleep(LOOK_EVERY_S)
    assert pipe.read(wait=False) is None
    assert not pipe.closed


def test_a_running_child_looks_only_now_and_then(both_ends, monkeypatch):
    pipe, parent = both_ends
    now_s = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])
    assert pipe.read(wait=False) is None
    os.write(parent, b"order\n")
    assert pipe.read(wait=False) is None
    now_s[0] += 2 * LOOK_EVERY_S
    assert pipe.read(wait=False) == "order"


def test_the_end_of_the_parent_closes_the_pipe(tmp_path):
    path = tmp_path / "orders"
    os.mkfifo(path)
    parent = os.open(path, os.O_RDWR)
    pipe = OrderPipe(str(path))
    os.write(parent, b"last\nhalf")
    assert pipe.read(wait=True) == "last"
    threading.Timer(0.05, os.close, (parent,)).start()
    assert pipe.read(wait=True) is None
    assert pipe.closed


def test_no_pipe_and_a_pipe_that_is_gone_are_closed(tmp_path):
    for path in (None, str(tmp_path / "none")):
        pipe = OrderPipe(path)
        assert pipe.read(wait=True) is None
        assert pipe.closed


def test_a_process_that_may_open_nothing_more_for_a_moment_hears_of_orders_later(both_ends, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    pipe, parent = both_ends
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        assert pipe.read(wait=False) is None and not pipe.closed
    os.write(parent, b"window\n")
    assert pipe.read(wait=True) == "window"
