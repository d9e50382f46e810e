"""A conductor in the test's own process: orders that lie ready, an exit that is an exception, records read back."""

import os
import sys

import pytest

from flatout.child import conductor
from flatout.child.orders import encode
from flatout.records import trace_file


class FakePipe:
    """Orders that lie ready, or come when the child waits for them."""

    def __init__(self, orders=()):
        self.waiting = list(orders)
        self.closed = False
        self.num_waits = 0

    def read(self, *, wait):
        if wait:
            self.num_waits += 1
        return encode(self.waiting.pop(0)) if self.waiting else None


class Ended(BaseException):
    """What `os._exit` does here."""


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """Nothing that a conductor does at a process's end, or in its forks, reaches the test's own."""
    monkeypatch.setattr(os, "_exit", lambda code: (_ for _ in ()).throw(Ended(code)))
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    monkeypatch.setattr(conductor.atexit, "register", lambda function: function)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.delenv("RANK", raising=False)


def records(here, kind=object):
    """What was written to the trace."""
    if not here.trace.exists():
        return []
    found = [trace_file.decode(line) for line in here.trace.read_text().splitlines()]
    return [record for record in found if isinstance(record, kind)]
