"""Are Python threads that compute beside the training named, with the line at which they do?"""

import gc
import sys
import threading
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("torch")

from flatout.frameworks.pytorch.levers import registry
from flatout.frameworks.pytorch.observe.other_threads import OtherThreads
from flatout.records.facts import BusyThread
from handmade import FACTS, MACHINE

LEVER = registry()["switch_interval"]


def beside(work, name, seconds=0.3):
    """What is said of a thread that does `work` again and again while this one sleeps."""
    stop = threading.Event()

    def go_on():
        while not stop.is_set():
            work()

    thread = threading.Thread(target=go_on, name=name, daemon=True)
    thread.start()
    try:
        threads, until_s = OtherThreads(), time.perf_counter() + seconds
        while time.perf_counter() < until_s:
            threads.look(threading.get_ident())
            time.sleep(0.02)
        return {one.name: one for one in threads.busy()}
    finally:
        stop.set()
        thread.join()


def spin():
    for _ in range(2000):
        sum(range(20))


def test_a_thread_that_computes_is_named_with_its_line():
    found = beside(spin, "dashboard")["dashboard"]
    assert found.cpu_fraction > 0.3 and found.place.startswith("test_other_threads.py:")
    first = spin.__code__.co_firstlineno
    assert int(found.place.split(":")[1]) in range(first, first + 3)


def test_a_thread_that_sleeps_is_none():
    assert "sleeper" not in beside(lambda: time.sleep(0.01), "sleeper")


def test_the_thread_that_trains_is_none_and_neither_is_one_that_has_ended():
    threads = OtherThreads()
    ended = threading.Thread(target=lambda: time.sleep(0.05), name="ended")
    ended.start()
    threads.look(threading.get_ident())
    ended.join()
    spin()
    threads.look(threading.get_ident())
    assert not {"ended", threading.current_thread().name} & {one.name for one in threads.busy()}


def test_looking_keeps_nothing_of_the_script_alive():
    class Kept:
        pass

    def step():
        held = Kept()
        OtherThreads().look(threading.get_ident())
        return weakref.ref(held)

    gc.disable()
    try:
        assert step()() is None
    finally:
        gc.enable()


def test_the_interpreter_is_passed_on_sooner_and_then_as_the_script_has_it():
    session, before = SimpleNamespace(kept={}), sys.getswitchinterval()
    LEVER.engage(session, {})
    assert sys.getswitchinterval() == pytest.approx(1e-5) and LEVER.evidence(session) == "passed on after 10 µs"
    LEVER.release(session)
    assert sys.getswitchinterval() == before and session.kept == {} and LEVER.evidence(session) is None
    LEVER.engage(session, {})
    sys.setswitchinterval(1e-3)
    LEVER.release(session)
    assert sys.getswitchinterval() == pytest.approx(1e-3), "what the script has set meanwhile stays"
    sys.setswitchinterval(before)


def test_it_is_tried_and_measured_only_beside_a_thread_that_computes():
    assert LEVER.applies(FACTS, MACHINE) == "no other Python thread computes" and LEVER.frees(FACTS, MACHINE) == {}
    busy = replace(FACTS, busy_threads=(BusyThread(name="dashboard", place="train.py:21", cpu_fraction=0.9),))
    assert LEVER.applies(busy, MACHINE) is None and LEVER.frees(busy, MACHINE) == {"free_interpreter": {}}
