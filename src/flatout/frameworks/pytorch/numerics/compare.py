"""How far are the numbers under a lever from the numbers without it, on the very same step?

At the moment before an update the captured calls are replayed with the same arguments, random states, buffers and
output gradients, plain and under the levers; updates are made three times from one snapshot; batches are drawn twice
from one random state. In: levers and the names of checks. Out: `Difference`s, measured and not judged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

import torch

from flatout.frameworks.pytorch.numerics.batches import compare_batches
from flatout.frameworks.pytorch.numerics.capture import Capture, CapturedCall
from flatout.frameworks.pytorch.numerics.differences import (
    BufferKey,
    Gradients,
    apart,
    buffer_error,
    cosine,
    numbered,
    reals,
    relative_error,
    square,
    summary,
)
from flatout.frameworks.pytorch.numerics.gradient_calls import clip, explained
from flatout.frameworks.pytorch.numerics.replay import Replayed, Replayer, half
from flatout.frameworks.pytorch.numerics.room import NoRoom
from flatout.frameworks.pytorch.numerics.updates import (
    Moved,
    Snapshot,
    bears_other_options,
    has_gradients,
    updated,
    worst_update,
)
from flatout.frameworks.pytorch.seams.random_states import RandomStates
from flatout.frameworks.pytorch.session import Session
from flatout.guest.memory_errors import out_of_memory
from flatout.records.difference import Difference
from flatout.records.trace import Agreement, Levers, Scaling

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.numerics.answers import AnswerCount

T = TypeVar("T")

SCALING_REPEATS = 5
SCALING_FEWEST_S = 0.3
SCALING_LIMIT_S = 4.0


class Numerics:
    """Compares levers with plain on captured steps."""

    def __init__(self, session: Session, capture: Capture) -> None:
        self._session = session
        self._capture = capture
        self._replayer = Replayer(session.calls, session.at_step_end)
        self._answers: AnswerCount | None = None

    # -- compare -------------------------------------------------------------------------------------------------

    def compare(self, levers: Levers, checks: Sequence[str]) -> Agreement | None:
        """Differences of each check; `missing` says why one could not be made. None: answers of a further step."""
        if "answers" in checks and not self._has_counted(levers):
            return None
        differences: list[Difference] = []
        missing = []
        try:
            for check in checks:
                found = self._check(check, levers)
                if isinstance(found, str):
                    missing.append(found)
                else:
                    differences += [found] if isinstance(found, Difference) else found
        finally:
            self._capture.drop()
            self._session.engage_exactly({})
            self._answers = None
        return Agreement(levers=levers, differences=tuple(differences), missing="; ".join(missing))

    def _has_counted(self, levers: Levers) -> bool:
        """Whether answers enough have been compared, with those of the captured step."""
        if self._answers is None:
            from flatout.frameworks.pytorch.numerics.answers import AnswerCount  # in trials only

            self._answers = AnswerCount(self._replayer, self._session.engage_exactly, levers)
        if not self._capture.problem:
            self._answers.add(self._capture.present)
        return bool(self._capture.problem) or self._answers.complete

    def _check(self, check: str, levers: Levers) -> list[Difference] | Difference | str:
        """One check; a sentence where it cannot be made, for want of memory as well: that is nobody's fault."""
        try:
            if check == "answers" and self._answers is not None:
                return self._capture.problem or self._answers.found()
            if check == "batches":
                return compare_batches(self._session, levers)
            return self._updates(levers) if check == "updates" else self._gradients(levers)
        except NoRoom as problem:
            return str(problem)
        except Exception as problem:
            if not out_of_memory(problem):
                raise
            return f"memory ran out while they were compared ({type(problem).__name__})"

    def _gradients(self, levers: Levers) -> list[Difference] | str:
        calls = self._capture.present
        if self._capture.problem:
            return self._capture.problem
        if not calls:
            return "no model call was captured"
        infers = self._session.calls.infers
        if not infers and not any(g is not None for c in calls for g in c.gradients):
            return "no gradient came back for the model's outputs"
        from flatout.frameworks.pytorch.numerics.faults import Faults  # in trials only

        run, class_ = self._replayer.run, self._widest(levers)
        self._session.engage_exactly({})
        first = run(calls)
        first.make_room(self._replayer.device)
        noise = self._noise(first)
        explained = self._explained(calls, first)
        again = run(calls)
        outputs_again = apart(numbered(again.outputs), numbered(first.outputs), masks=True)
        baseline_error = self._compared_gradients(again, first).error  # of buffers as well
        faults = Faults(self._replayer, self._capture, first, again)
        del again
        self._session.engage_exactly(levers)
        changed = run(calls, levers=True)
        fault = faults.under_levers(changed)
        self._session.engage_exactly({})
        fault = fault or faults.of_integers(changed, class_)
        outputs = compared_outputs(changed, first)
        on_device = self._replayer.device != "cpu"
        outputs = dataclasses.replace(
            outputs, baseline_error=relative_error(outputs_again.values()), on_device=on_device
        )
        found = dataclasses.replace(
            self._compared_gradients(changed, first),
            noise=noise,
            baseline_error=baseline_error,
            explained_cosine=explained,
            on_device=on_device,
            fault=fault,
        )
        whole = self._beside_rounding(found, outputs, changed, first, levers)
        return whole if isinstance(whole, str) or not infers else [_answers(*whole)]

    def _beside_rounding(
        self, found: Difference, outputs: Difference, changed: Replayed, plain: Replayed, levers: Levers
    ) -> list[Difference] | str:
        """The same with what rounding would do; a sentence where the step cannot be compared."""
        calls, class_ = self._capture.present, self._widest(levers)
        errors = found.error != 0 or outputs.error != 0
        if class_ == "exact" or not errors or changed.gradients.keys() != plain.gradients.keys():
            return [found, outputs]
        from flatout.frameworks.pytorch.numerics.rounding import Rounding  # in trials only

        rounding = Rounding(self._replayer, calls, plain, class_, self._engaging(levers))
        found = rounding.of_gradients(found, changed, self._name)
        outputs = rounding.of_outputs(outputs, changed)
        refused = found.fault or not found.random_states_equal or any(map(rounding.is_beyond, (found, outputs)))
        if class_ == "precision" and refused and self._draws_other_masks(calls, plain, levers):
            return "the two types draw other masks from the same random state"
        return [found, outputs]

    def _draws_other_masks(self, calls: Sequence[CapturedCall], plain: Replayed, levers: Levers) -> bool:
        """Whether levers only seem to be wrong, because in another type other masks are drawn."""
        from flatout.frameworks.pytorch.numerics.masks import Draws, differ_by_type

        engage = self._engaging(levers)
        if engage is None or calls[0].random.equals(plain.randoms[-1]):
            return False
        with Draws() as drawn:
            self._replayer.run(calls)
        engage(True)
        try:
            with Draws() as changed:
                self._replayer.run(calls, levers=True)
        finally:
            engage(False)
        return differ_by_type(changed.found, drawn.found)

    def _engaging(self, levers: Levers) -> Callable[[bool], object] | None:
        """Engages the levers, or releases them; None where that compiles for every type of number."""
        if any(self._session.levers[name].compiles for name in levers):
            return None
        return lambda wanted: self._session.engage_exactly(levers if wanted else {})

    def _widest(self, levers: Levers) -> str:
        """How far numbers may be off: not at all, by rounding, or by that of bfloat16."""
        classes = {self._session.levers[name].class_ for name in levers} - {"exact"}
        return "exact" if not classes else "rounding" if classes == {"rounding"} else "precision"

    def _compared_gradients(self, changed: Replayed, first: Replayed) -> Difference:
        """Gradients, buffers and random states of one replay against another's."""
        found = summary("gradients", apart(changed.gradients, first.gradients), self._name)
        buffer, buffers_error = buffer_error(changed.buffers, first.buffers)
        if buffer is not None and not buffers_error <= found.worst_error:
            found = dataclasses.replace(found, worst=buffer[1], worst_error=buffers_error)
        return dataclasses.replace(
            found,
            error=found.error if buffers_error <= found.error else buffers_error,
            random_states_equal=changed.draws_as(first),
            finite=changed.finite or not first.finite,
            detail=self._told(changed.gradients, first.gradients, buffer if buffers_error > found.error else None),
        )

    def _noise(self, present: Replayed) -> float | None:
        """Relative spread of the gradient between batches: norm of the difference over the root of summed squares."""
        if not self._capture.former or any(c.outdated for c in self._capture.former):
            return None
        former = self._replayer.run(self._capture.former)
        keys = [p for p in present.gradients if p in former.gradients]
        difference = math.fsum(square(present.gradients[p].to(p.device) - former.gradients[p]) for p in keys)
        total = math.fsum(square(present.gradients[p]) + square(former.gradients[p]) for p in keys)
        return math.sqrt(difference / total) if total > 0 else None

    def _explained(self, calls: Sequence[CapturedCall], present: Replayed) -> float | None:
        """Cosine of the replayed gradient with the one that the script computed, for parameters of the last update.

        Gradients that the script has cleared since are left out. The script's is taken as its backward left it;
        where it was kept only after clipping or averaging, that scales the whole, which a cosine does not see. 0 where
        one of both is nothing; None where both are.
        """
        optimizer = self._capture.optimizer
        parameters: list[torch.Tensor]
        if optimizer is None:
            parameters = [p for call in self._session.calls.found for p in call.module.parameters()]
        else:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(c.cleared for c in calls):
            present = self._replayer.run(calls, uncleared=True)
        ids = {id(p) for p in parameters}
        ours = {p: g for p, g in present.gradients.items() if id(p) in ids}
        kept = self._capture.own_gradients
        own: Gradients = {p: reals(g) for p in parameters if (g := kept.get(p, p.grad)) is not None}
        if not any(square(g) for g in own.values()):
            return None if not any(square(g) for g in ours.values()) else 0.0
        for parameter in own:
            ours.setdefault(parameter, torch.zeros_like(own[parameter]))
        for parameter in ours:
            own.setdefault(parameter, torch.zeros_like(ours[parameter]))
        return cosine(apart(ours, own).values()) if any(square(g) for g in ours.values()) else 0.0

    def _name(self, parameter: torch.Tensor | None) -> str:
        for call in self._session.calls.found:
            for name, candidate in call.module.named_parameters():
                if candidate is parameter:
                    return name
        return ""

    def _told(self, changed: Gradients, first: Gradients, buffer: BufferKey | None) -> str:
        lost, new = ([p for p in one if p not in other] for one, other in ((first, changed), (changed, first)))
        words = []
        if buffer:
            words.append(f"the buffer `{buffer[1]}` ends elsewhere")
        if lost:
            words.append(f"no gradient any more for {len(lost)} parameters (`{self._name(lost[0])}`)")
        if new:
            words.append(f"a gradient for {len(new)} parameters that have none in plain (`{self._name(new[0])}`)")
        return "; ".join(words)

    # -- updates -------------------------------------------------------------------------------------------------

    def _updates(self, levers: Levers) -> Difference | str:
        optimizers = [o for o in self._session.optimizers if has_gradients(o)]
        if any(isinstance(o, torch.optim.LBFGS) for o in optimizers):
            return "an optimizer with a closure cannot be replayed"
        if not optimizers:
            return "no optimizer has gradients at this point"
        self._session.engage_exactly({})
        snapshot = Snapshot(optimizers, self._replayer.device)
        random = RandomStates()
        clip = self._clipping(optimizers)
        vary = bears_other_options(self._session, optimizers, snapshot)

        def update(look: Callable[[], T]) -> T:
            random.restore()
            return updated(self._session, optimizers, snapshot, look, clip, vary=vary)

        def compared() -> Difference:
            moved = snapshot.beside(plain)
            parameter, key, multiple = worst_update(moved, optimizers, plain, snapshot)
            found = summary("updates", moved, self._name)
            return dataclasses.replace(
                found,
                random_states_equal=RandomStates().equals(plain.random),
                finite=found.finite or not plain.finite,
                multiple=multiple,
                multiple_of=f"{self._name(parameter)}{f' ({key})' if key else ''}",
            )

        plain = update(lambda: Moved(optimizers, snapshot, self._replayer.device))
        baseline_error = update(lambda: relative_error(snapshot.beside(plain).values()))
        self._session.engage_exactly(levers)
        try:
            found = update(compared)
        finally:
            self._session.engage_exactly({})
            snapshot.restore()
            random.restore()
        return dataclasses.replace(found, baseline_error=baseline_error)

    def _clipping(self, optimizers: Sequence[torch.optim.Optimizer]) -> Callable[[float], None] | None:
        """The script's own clipping, to be made again before each update; None where there is none to be followed."""
        clippings = list(self._capture.gradient_calls.clippings)
        unclipped = dict(self._capture.own_gradients)
        parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
        if not explained(clippings, unclipped, parameters):
            return None
        return lambda factor: clip(clippings, unclipped, factor)

    # -- scaling -------------------------------------------------------------------------------------------------

    def scale(self) -> Scaling | None:
        """Seconds of the captured calls at full and at half batch, in turn."""
        calls, run = self._capture.present, self._replayer.run
        full_s: list[float] = []
        half_s: list[float] = []
        try:
            halves = [one for one in map(half, calls) if one is not None]
            if len(halves) < len(calls) or not any(g is not None for c in calls for g in c.gradients):
                return None
            try:
                run(halves)
            except (RuntimeError, ValueError, IndexError):  # the model does not take half a batch
                return None
            begun_s = perf_counter()
            while len(full_s) < SCALING_REPEATS or perf_counter() - begun_s < SCALING_FEWEST_S:
                full_s.append(run(calls).took_s)
                half_s.append(run(halves).took_s)
                if perf_counter() - begun_s > SCALING_LIMIT_S and len(full_s) >= 2:
                    break
        finally:
            self._capture.drop()
        return Scaling(full_s=tuple(full_s), half_s=tuple(half_s))


def _answers(found: Difference, outputs: Difference) -> Difference:
    """What is wrong with calls of which no gradient is taken, buffers and random states included, as one of outputs."""
    worse = found if found.error > outputs.error else outputs
    return dataclasses.replace(
        worse,
        check="outputs",
        fault=found.fault or outputs.fault,
        finite=found.finite and outputs.finite,
        random_states_equal=found.random_states_equal,
        baseline_error=max(found.baseline_error, outputs.baseline_error),
        explained_cosine=None,
    )


def compared_outputs(changed: Replayed, plain: Replayed) -> Difference:
    """Outputs of one replay against plain's.

    Replays are given the gradients that came back in the script, so what is wrong with an output's value shows in no
    gradient: the loss would be wrong, and all else that the script makes of the output.
    """

    def name(number: int | None) -> str:
        return "" if number is None else plain.output_names[number]

    extra = len(plain.outputs)  # what comes beyond has no name, and its kind is a fault
    return summary("outputs", apart(numbered(changed.outputs[:extra]), numbered(plain.outputs), masks=True), name)
