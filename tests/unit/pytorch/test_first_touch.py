"""Pages that are there before they are written to; what is in them stays."""

import itertools
import threading

import pytest

np = pytest.importorskip("numpy")

from flatout.frameworks.pytorch.input.items import first_touch  # noqa: E402
from flatout.frameworks.pytorch.input.items.first_touch import AHEAD_BYTES, LEAST_BYTES, PAGE_BYTES, FirstTouch  # noqa: E402


def wait():
    for thread in threading.enumerate():
        if thread.name == "flatout-pages":
            thread.join(30)


@pytest.fixture
def advised(monkeypatch):
    """Addresses and sizes that the kernel was told of."""
    found, real = [], first_touch._advise

    def advise(address, num_bytes, what):
        found.append((address.value, num_bytes.value))
        return real(address, num_bytes, what)

    monkeypatch.setattr(first_touch, "_advise", advise)
    return found


def test_each_page_is_touched_once_and_never_far_ahead(advised):
    array = np.empty(5 * AHEAD_BYTES // 2 + 4097, np.uint8)
    start, pages = array.ctypes.data, FirstTouch(array)
    for reached in range(0, len(array), 2**20):
        pages.reached(reached)
        wait()
        assert all(start <= address and address + size <= start + len(array) for address, size in advised)
        assert all(address + size <= start + reached + 2 * AHEAD_BYTES for address, size in advised)
    gaps = [later - (address + size) for (address, size), (later, _) in itertools.pairwise(advised)]
    assert gaps and all(0 <= gap <= PAGE_BYTES for gap in gaps), "one after another"


def test_what_was_written_stays():
    array = np.arange(LEAST_BYTES, dtype=np.int64).view(np.uint8)
    expected, pages = array.copy(), FirstTouch(array)
    pages.reached(0)
    wait()
    assert np.array_equal(array, expected)


def test_a_small_array_and_a_kernel_that_does_not_know_how_are_left_alone(advised, monkeypatch):
    FirstTouch(np.empty(LEAST_BYTES - 1, np.uint8)).reached(0)
    assert not advised
    calls = []
    monkeypatch.setattr(first_touch, "_advise", lambda *given: calls.append(given) or -1)
    pages = FirstTouch(np.empty(4 * AHEAD_BYTES, np.uint8))
    for reached in range(0, 4 * AHEAD_BYTES, AHEAD_BYTES):
        pages.reached(reached)
        wait()
    assert len(calls) == 1


def test_without_threads_it_is_not_tried_again(advised, monkeypatch):
    def refused(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    pages = FirstTouch(np.empty(2 * AHEAD_BYTES, np.uint8))
    pages.reached(0)
    pages.reached(AHEAD_BYTES)
    assert not advised
