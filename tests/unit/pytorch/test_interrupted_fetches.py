"""A handler of a signal raises in the middle of a fetch: the script gets that error, and later batches are right."""

import contextlib
import functools
import os
import signal
import sys

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from torch.utils.data import DataLoader  # noqa: E402

import flatout  # noqa: E402
from flatout.frameworks.pytorch.input.items.shadow import difference  # noqa: E402
from flatout.frameworks.pytorch.input.loaders import Loaders  # noqa: E402
from flatout.frameworks.pytorch.input.worker_settings import IN_PROCESS  # noqa: E402
from tiers import some  # noqa: E402
from unit.pytorch.test_fused_fetch import make  # noqa: E402

OURS = os.path.dirname(os.path.abspath(flatout.__file__)) + os.sep

WORKS = """
def __getitem__(self, i):
    return self.images[i].float() / self.n, self.labels[i] * 2
"""

NUM_POINTS = 200
"""Moments in a fetch at which the signal comes."""


class Alarm(TimeoutError):
    """What a script raises that gives an operation so much time; an `OSError` as well."""


def alarmed(*_):
    raise Alarm


class At:
    """The signal comes at one line of ours, counted from where this is entered."""

    def __init__(self, number):
        self.number = number
        self.num = 0
        self.where = ""

    def __enter__(self):
        sys.settrace(self._called)

    def __exit__(self, *_):
        sys.settrace(None)

    def _called(self, frame, event, _):
        return self._line if frame.f_code.co_filename.startswith(OURS) else None

    def _line(self, frame, event, _):
        if event == "line":
            self.num += 1
            if self.num == self.number:
                sys.settrace(None)
                self.where = f"{frame.f_code.co_filename.removeprefix(OURS)}:{frame.f_lineno}"
                signal.raise_signal(signal.SIGUSR1)
        return self._line


@pytest.fixture
def made(tmp_path, monkeypatch):
    former = signal.signal(signal.SIGUSR1, alarmed)
    yield functools.partial(make, tmp_path, monkeypatch, WORKS, images=torch.arange(150.0).view(50, 3),
                            labels=torch.arange(50))  # fmt: skip
    signal.signal(signal.SIGUSR1, former)


PARTS = {
    "fused": ["fused"],
    "stored": ["stored"],
    "in place of workers": [],
}


def passes(dataset, name, stop=None, point=0):
    """Three passes in order; what was fetched, and whether the signal's error came where the fetch was interrupted."""
    owner = Loaders()
    owner.install()
    for part in PARTS[name]:
        getattr(owner.parts, part).engage(True)
    workers = 2 if name == "in place of workers" else 0
    if workers:
        owner.change({IN_PROCESS: True})
    loader = DataLoader(dataset, batch_size=5, num_workers=workers, shuffle=bool(workers))
    torch.manual_seed(0)
    found, num_caught, at = [[], [], []], 0, At(point)
    try:
        for epoch in range(3):
            iterator, number = iter(loader), 0
            while True:
                here = (epoch, number) == stop
                number += 1
                try:
                    with at if here else contextlib.nullcontext():
                        batch = next(iterator)
                except StopIteration:
                    break
                except Alarm:
                    num_caught += 1
                    continue
                found[epoch].append(batch)
    finally:
        owner.remove()
    return found, num_caught, at


def without(wanted, name):
    """What may be left of a pass whose fifth fetch was interrupted: all, or all but that batch.

    Of workers' one more may be missing, whose index was drawn and lost, as plain's loader loses it.
    """
    yield wanted
    rest = wanted[:4] + wanted[5:]
    yield rest
    if name == "in place of workers":
        yield from (rest[:number] + rest[number + 1 :] for number in range(4, len(rest)))


@pytest.mark.parametrize("epoch", some([0, 1], 0))
@pytest.mark.parametrize("name", some(list(PARTS), "fused"))
def test_wherever_it_comes_the_script_gets_it_and_no_wrong_batch(name, epoch, made):
    plain, _, _ = passes(made(), name)
    _, _, counted = passes(made(), name, stop=(epoch, 4), point=-1)
    assert counted.num > 30
    for point in sorted({1 + number * counted.num // NUM_POINTS for number in range(NUM_POINTS)}):
        found, num_caught, at = passes(made(), name, stop=(epoch, 4), point=point)
        assert num_caught == 1, at.where
        for number, (batches, wanted) in enumerate(zip(found, plain, strict=True)):
            allowed = list(without(wanted, name)) if number == epoch else [wanted]
            assert any(difference(batches, one) is None for one in allowed), f"{at.where}, epoch {number}"
    again, _, _ = passes(made(), name)
    assert difference(again, plain) is None, "after all"
