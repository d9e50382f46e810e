"""Which answers of a model are others under levers that may lose something?

Captured calls of several steps are made again, plain, with numbers moved by their last place, and under the levers.
An input is counted once, and never where a calibration has seen it: it is known by a hash of its bytes. In: captured
calls. Out: a `Difference`. Loaded in trials only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import torch

from flatout.frameworks.pytorch.numerics.capture import CapturedCall
from flatout.frameworks.pytorch.numerics.replay import Replayed, Replayer
from flatout.frameworks.pytorch.numerics.rounding import Values, shaken
from flatout.frameworks.pytorch.seams.calibrated import CALLS_WITHOUT_NEW, CalibratedCall
from flatout.frameworks.pytorch.seams.outer_call import OuterCall
from flatout.frameworks.pytorch.seams.trees import digest as hash_of
from flatout.records.difference import LARGE_ERROR, Answers, Difference
from flatout.records.plan import label
from flatout.records.trace import Levers

ENOUGH_ANSWERS = 1000
"""So many are compared where there are so many inputs; the number must not depend on how they turn out."""

LONGEST_S = 30.0
"""After so long there is what there is."""


class AnswerCount:
    """Counts answers, from step to step.

    Args:
        replayer: Makes calls again.
        engage: Engages levers, exactly these.
        levers: Those in question.
    """

    def __init__(self, replayer: Replayer, engage: Callable[[Levers], object], levers: Levers) -> None:
        self._replayer, self._engage, self._levers = replayer, engage, levers
        self._begun_s = perf_counter()
        self._seen: set[str] = set()
        self._num_without_new = 0
        self._num = self._num_changed = self._num_by_rounding = self._num_shared = 0
        self._moved: dict[OuterCall, Values] = {}
        """Parameters that were moved by their last place: once, for it takes longer than a call."""
        self._finite = True

    @property
    def complete(self) -> bool:
        """Whether there are answers enough, or no new inputs, or no time."""
        late = perf_counter() - self._begun_s > LONGEST_S
        return late or self._num >= ENOUGH_ANSWERS or self._num_without_new >= CALLS_WITHOUT_NEW

    def add(self, calls: Sequence[CapturedCall]) -> None:
        """Compare one step's."""
        for one in calls:
            digest = hash_of((one.args, one.kwargs))
            self._num_without_new += 1
            if digest in self._seen:
                continue
            self._seen.add(digest)
            self._num_without_new = 0
            if any(digest in kept.calibrated_with for kept in self._calibrated(one)):
                self._num_shared += 1
            else:
                self._compare(one)

    def _compare(self, one: CapturedCall) -> None:
        self._engage({})
        plain = self._replayer.run([one])
        moved_call = shaken([one], seed=0, values=self._moved.get(one.call))[0]
        self._moved[one.call] = moved_call.former_values
        moved = self._replayer.run([moved_call])
        self._engage(self._levers)
        before = sum(kept.num_calls for kept in self._calibrated(one))
        changed = self._replayer.run([one], levers=True)
        elsewhere = sum(kept.num_calls for kept in self._calibrated(one)) > before
        self._engage({})
        if not elsewhere:  # what the model computed itself says nothing
            return
        self._finite = self._finite and (changed.finite or not plain.finite)
        self._num_by_rounding += num_changed(plain, moved)[0]
        num_others, num = num_changed(plain, changed)
        self._num_changed += num_others
        self._num += num

    def _calibrated(self, captured: CapturedCall) -> Iterator[CalibratedCall]:
        """What takes its place under the levers; others with settings of their own were fitted to other inputs."""
        kept = (captured.call.kept.get(label({name: settings})) for name, settings in self._levers.items())
        return (one for one in kept if isinstance(one, CalibratedCall))

    def found(self) -> Difference:
        """What was counted."""
        answers = Answers(
            num=self._num,
            num_changed=self._num_changed,
            num_changed_by_rounding=self._num_by_rounding,
            num_inputs=len(self._seen),
            num_shared=self._num_shared,
        )
        error = self._num_changed / self._num if self._num else 0.0
        return Difference(check="answers", error=error, finite=self._finite, answers=answers)


def num_changed(plain: Replayed, changed: Replayed) -> tuple[int, int]:
    """Answers that are others, and all of them."""
    found = total = 0
    for before, after in zip(plain.outputs, changed.outputs, strict=True):
        if before.shape != after.shape or before.ndim < 2:
            others = torch.tensor([not _near(before, after)])
        else:
            others = before.argmax(-1) != after.argmax(-1)
        found, total = found + int(others.sum()), total + others.numel()
    return found, total


def _near(before: torch.Tensor, after: torch.Tensor) -> bool:
    if before.shape != after.shape:
        return False
    norm = float(before.double().norm())
    return float((after.double() - before.double()).norm()) <= LARGE_ERROR * norm
