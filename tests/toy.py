"""The smallest framework that fulfils the contract, and the documentation of it: vectors in pure Python.

`Regression` is what a user of such a framework would write: a model with a gradient and an update. `Toy` follows it as
`flatout.frameworks.pytorch` follows PyTorch. It has one lever, `shortcut`, which computes the same product in another
way.
"""

from __future__ import annotations

import math
import random
from time import perf_counter
from typing import Any, ClassVar

from flatout.frameworks.contract import Step
from flatout.frameworks.lever import Lever, verify
from flatout.records.difference import Difference
from flatout.records.facts import Facts, LoaderFacts, ModelFacts, OptimizerFacts
from flatout.records.trace import Agreement, Census, Operation, Scaling, Toggle

# -- the framework that is followed: what a user sees ---------------------------------------------------------------


def dot(left, right):
    """The sum of products, one after the other."""
    total = 0.0
    for a, b in zip(left, right, strict=True):
        total = total + a * b
    return total


class Regression:
    """A line through noisy points, by stochastic gradient descent; followed where `follower` is set."""

    follower: ClassVar[Toy | None] = None

    def __init__(self, width=64, seed=0):
        self.draw = random.Random(seed)
        self.truth = [self.draw.gauss(0, 1) for _ in range(width)]
        self.weights = [0.0] * width
        self.dot = dot

    def rows(self, num):
        """A batch."""
        rows = [[self.draw.gauss(0, 1) for _ in self.weights] for _ in range(num)]
        return [(row, dot(row, self.truth)) for row in rows]

    def gradients(self, batch):
        """Of the mean squared error, and the error."""
        found, loss = [0.0] * len(self.weights), 0.0
        for row, target in batch:
            error = self.dot(row, self.weights) - target
            loss += error**2 / len(batch)
            found = [g + 2 * error * x / len(batch) for g, x in zip(found, row, strict=True)]
        return found, loss

    def train(self, num_steps, size=4, rate=0.01):
        """What the user's loop does."""
        for _ in range(num_steps):
            follow = Regression.follower
            batch = follow.fetched(self, size) if follow is not None else self.rows(size)
            gradients, loss = self.gradients(batch)
            if follow is not None:
                follow.before_update(self, batch, loss)
            self.weights = [w - rate * g for w, g in zip(self.weights, gradients, strict=True)]
            if follow is not None:
                follow.after_update()


# -- its lever ------------------------------------------------------------------------------------------------------


class Shortcut(Lever):
    """The product by `math.fsum`, which rounds once."""

    name = "shortcut"
    summary = "products by a sum of the standard library"
    class_ = "rounding"
    shortens: ClassVar = ("forward",)
    check = "gradients"

    def applies(self, facts, machine):
        """Always."""
        return None

    def engage(self, session, settings):
        """`session` is the `Toy`."""
        session.model.dot = lambda left, right: math.fsum(map(float.__mul__, left, right))

    def release(self, session):
        """Back to the framework's own."""
        session.model.dot = dot

    def evidence(self, session):
        """The model has another product."""
        return "another product is used" if session.model.dot is not dot else None


# -- what follows it ------------------------------------------------------------------------------------------------


class Toy:
    """The framework in this process, as the conductor sees it. Phases are `data`, `forward` and `optimizer`."""

    name = "toy"
    version = "1.0"

    def __init__(self):
        self.levers = {"shortcut": Shortcut()}
        for lever in self.levers.values():
            verify(lever)
        self.model, self.listener, self.captured = None, None, None
        self.depth, self.num_steps, self._engaged, self._losses = "off", 0, {}, []
        self._phases, self._mark_s, self._wants_capture, self._free_batch = {}, 0.0, False, None
        self._census_from = 0

    # the seams: what the framework calls, or what is patched in it

    def fetched(self, model, size):
        """A batch is asked for; `free_data` gives the same one again."""
        self.model = model
        if self._free_batch is None or not self._free_batch:
            batch = model.rows(size)
            self._free_batch = batch if self._free_batch is not None else None
        else:
            batch = self._free_batch
        self._note("data")
        return batch

    def before_update(self, model, batch, loss):
        """Gradients are complete, and parameters are still old."""
        self._note("forward")
        self._losses.append(loss)
        if self._wants_capture:
            self.captured = (model, list(model.weights), batch)
            self._wants_capture = False
            self.listener.on_update()

    def after_update(self):
        """A step has ended."""
        self._note("optimizer")
        self.num_steps += 1
        phases, self._phases = self._phases, {}
        self.listener.on_step(Step(self._mark_s, phases if self.depth == "phases" else {}))

    def _note(self, phase):
        now_s = perf_counter()
        self._phases[phase] = self._phases.get(phase, 0.0) + now_s - self._mark_s
        self._mark_s = now_s

    # the contract, in the order in which the conductor uses it

    def prepare(self, levers, *, trial, learns=False):
        """Nothing waits for no step here."""

    def attach(self, listener):
        """Be called from now on."""
        self.listener = listener
        Regression.follower = self

    def detach(self):
        """As if we had never been."""
        self.engage({})
        Regression.follower = None

    def settled(self):
        """What a step is shows in the first."""
        return self.num_steps >= 1

    def facts(self):
        """What was seen."""
        width = len(self.model.weights) if self.model is not None else 0
        model = ModelFacts(
            name="Regression", num_parameters=width, num_modules=1, dtypes=("float64",),
            convolution_dims=(),
        )  # fmt: skip
        optimizer = OptimizerFacts(name="descent")
        loaders = (LoaderFacts(dataset="rows"),)
        return Facts(device="cpu", models=(model,), optimizers=(optimizer,), loaders=loaders, num_threads=1)

    def engage(self, levers):
        """Release what is not wanted any more, then engage what is new."""
        begun_s = perf_counter()
        released = tuple(name for name in self._engaged if name not in levers)
        for name in released:
            self.levers[name].release(self)
        new = {name: settings for name, settings in levers.items() if name not in self._engaged}
        for name, settings in new.items():
            self.levers[name].engage(self, settings)
        self._engaged = dict(levers)
        return Toggle(engaged=new, released=released, took_s=perf_counter() - begun_s, step=self.num_steps)

    def engaged(self):
        """The levers that are."""
        return dict(self._engaged)

    def evidence(self):
        """What each shows."""
        shown = {name: self.levers[name].evidence(self) for name in self._engaged}
        missing = {name: "no effect was seen" for name, proof in shown.items() if proof is None}
        return {name: proof for name, proof in shown.items() if proof is not None}, missing

    def observe(self, depth):
        """From here on."""
        self.depth = depth

    def coast(self):
        """Ends of steps alone."""
        self.depth = "off"

    def start_window(self):
        """A window begins here; there is no device to wait for."""
        self._losses, self._phases, self._mark_s = [], {}, perf_counter()
        return self._mark_s

    def end_window(self):
        """What is known of the whole window."""
        return {"losses": self._losses}

    def begin_capture(self):
        """Keep the next step."""
        self._wants_capture = True

    def compare(self, levers, checks):
        """The captured step's gradients again, plain and under the levers."""
        model, _, batch = self.captured
        self.engage({})
        plain, _ = model.gradients(batch)
        self.engage(levers)
        changed, _ = model.gradients(batch)
        self.engage({})
        apart = sum((a - b) ** 2 for a, b in zip(changed, plain, strict=True)) ** 0.5
        norm = sum(a**2 for a in plain) ** 0.5
        found = Difference(check="gradients", error=apart / norm, rounding=1e-16)
        return Agreement(levers=levers, differences=(found,))

    def scale(self):
        """The captured step at its own batch and at half of it."""
        model, _, batch = self.captured

        def took_s(rows):
            begun_s = perf_counter()
            model.gradients(rows)
            return perf_counter() - begun_s

        half = batch[: len(batch) // 2]
        return Scaling(full_s=tuple(took_s(batch) for _ in range(5)), half_s=tuple(took_s(half) for _ in range(5)))

    def export(self, to, folder):
        """Nothing is exported: it trains."""

    def begin_census(self):
        """Count from here."""
        self._census_from = self.num_steps

    def end_census(self):
        """A product a row, of two operations an element."""
        num, width = 4 * (self.num_steps - self._census_from), len(self.model.weights)
        flops = 2 * num * width
        one = Operation(
            name="dot", shape=f"{width} {width}", dtype="float64", num_calls=num, flops=flops, moved_bytes=16 * width,
            self_s=0.0, counted=True,
        )  # fmt: skip
        return Census(
            num_operations=num, num_syncs=0, flops=flops, moved_bytes=16 * width, operations=(one,), uncounted=()
        )

    def counterfactual(self, name, engaged):
        """`free_data` is all that can be made free."""
        self._free_batch = [] if name == "free_data" and engaged else None

    def num_missed_steps(self):
        """None: a step shows when it ends."""
        return 0

    def training_since_s(self):
        """Not known."""
        return None

    def patched(self):
        """Nothing is replaced: a toy calls us."""
        return []

    def remarks(self):
        """Nothing to say."""
        return []

    def join(self, place: Any, terms: Any):
        """It knows no ranks."""
        raise NotImplementedError("toys train alone")

    def vary_seeds(self, run):
        """Its users seed it themselves."""

    def keep_losses(self):
        """They are kept in any case."""

    def trained(self):
        """Nothing to keep."""
        raise NotImplementedError("toys keep nothing")
