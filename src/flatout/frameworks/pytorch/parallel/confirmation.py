"""Is a divided call what the whole batch gives, forwards and backwards?

A call is computed both ways from the same state, which is put back: the first of a kind, and ever rarer later ones.
Outputs are compared at once; gradients when the script goes back through the call, with the gradients that it really
takes. In: a division and a call. Out: how calls of the kind are divided; or a refusal.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from flatout.frameworks.pytorch.parallel import assembly, batch, equality, outside_state
from flatout.frameworks.pytorch.parallel.assembly import Rule, Share, are_alike
from flatout.frameworks.pytorch.parallel.batch import BatchPass, whole_batch
from flatout.frameworks.pytorch.parallel.call_signature import (
    forgotten,
    has_numbers_of_floats,
    kept_graphs,
    remembered,
    skeleton,
)
from flatout.frameworks.pytorch.parallel.cuts import Cut, Tensors, entering, guesses, part_entering
from flatout.frameworks.pytorch.parallel.group import Lost
from flatout.frameworks.pytorch.parallel.module_calls import hooked_module
from flatout.frameworks.pytorch.parallel.outside_state import OutsideState
from flatout.frameworks.pytorch.parallel.protocol import Check, Computed, Dividing, Found, ParameterHolder, Pattern
from flatout.frameworks.pytorch.parallel.random_numbers import BatchRandom, NoDropout
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.parallel.sharded_tensor import Sharded, part_of
from flatout.frameworks.pytorch.seams.module_state import ModuleState
from flatout.frameworks.pytorch.seams.random_states import RandomStates
from flatout.frameworks.pytorch.seams.trees import map_tensors, tensors_of

MOST_TIMES_ROUNDING = 5.0
"""Gradients of parts may differ from those of the whole by so many times what rounding changes."""

NUDGES = (1, 4, 16, 5, 17)
"""Parameters are moved by so many times their last bit, until what that changes accounts for a difference: the rounding
of sums of hundreds of terms is some ten times that of one number."""

NEGLIGIBLE = 1e-6
"""What is smaller beside the norm of all gradients is rounding."""


class Confirmation:
    """Calls of one module that are computed both ways."""

    def __init__(self, division: Dividing) -> None:
        self._division, self._group = division, division.group
        self._outside: OutsideState | None = None
        self._decided = True

    @contextmanager
    def trial(self) -> Iterator[NoDropout]:
        """A computation that is not the script's: nothing is printed, no mask is drawn, and nothing stays changed."""
        module, silence = self._division.module(), NoDropout()
        kept = ModuleState(module), RandomStates()
        try:
            with torch.enable_grad(), contextlib.redirect_stdout(io.StringIO()), silence.on(module):
                yield silence
        finally:
            for state in kept:
                state.restore()

    @contextmanager
    def nothing_outside(self) -> Iterator[None]:
        """What changes a variable outside of the module within is refused for that, whatever else it is refused for."""
        self._outside = outside = self._outside or OutsideState(self._division.module())
        before, refused = outside.seen(), None
        try:
            yield
        except NotDivided as problem:
            refused = problem
        if changed := outside.changed(before):
            raise outside_state.refused(self._division, changed[0]) from refused
        if refused is not None:
            raise refused

    def confirmed(self, args: Any, kwargs: Any, inputs: Tensors, known: Pattern | None) -> tuple[Pattern, Check]:
        """Compute the call whole and in parts, from the same state; how it is divided, or `NotDivided`."""
        group, module = self._group, self._division.module()
        first = known is None and self._division.holds_whole
        self.begin(inputs, first=first)
        with self.trial() as silence:
            value, whole = self._whole(args, kwargs, inputs, first=first)
            after = remembered(module)
        form, reasons = skeleton(value), list[str]()
        for cut in [known.cut] if known is not None else guesses(inputs, group.world):
            with self.trial():
                found, mine, why = self._attempt(cut, args, kwargs, inputs, whole.outputs, form, known)
                if found is not None and (name := forgotten(after, module)) is not None:
                    why = f"what it keeps as `{name}` is that of the whole batch, of which a rank has a part"
                    found = None
            if group.everywhere(found is not None, "agreement on a division") and found is not None:
                return replace(found, masks=silence.broken), Check(whole, mine, (args, kwargs))
            reasons.append(why)
        cause = self._division.small(inputs) or next(filter(None, reasons), "")
        raise self._division.refused(cause or "none of its inputs has a dimension that counts samples")

    def together(
        self, args: Any, kwargs: Any, inputs: Tensors, pattern: Pattern, *,
        first: bool,
    ) -> tuple[Pattern, Check]:  # fmt: skip
        """Compute the call as one process does and by all ranks together, from the same state; or `NotDivided`."""
        division, module = self._division, self._division.module()
        self.begin(inputs, first=False)
        with self.trial() as silence:
            value, whole = self._whole(args, kwargs, inputs, first=first)
            after = remembered(module)
        way = "it takes another way through its layers than in its first call"  # for one process has not raised
        with self.trial():
            with self._refusing(way):
                passed = batch.passed(division, args, kwargs, pattern, silent=True)
            found, wanted = passed.outputs, whole.outputs
            same = len(found) == len(wanted) and skeleton(passed.value) == skeleton(value)
            same = same and all(assembly.is_close(*pair) for pair in zip(found, wanted, strict=True))
            name = forgotten(after, module)
        if not self._group.everywhere(same and name is None, "agreement on a division"):
            what = "compute together" if name is None else f"keep as `{name}`"
            raise division.refused(f"what ranks {what} is not what one process {what.split()[0]}s")
        return replace(pattern, masks=silence.broken), Check(whole, passed, (args, kwargs))

    def begin(self, inputs: Tensors, *, first: bool) -> None:
        """Make sure that all ranks call with the same inputs, and, at the first call, from the same state."""
        module = self._division.module()
        if (hooked := hooked_module(module)) is not None:
            raise self._division.refused(
                f"the script has a hook on its inner module `{hooked}`, which would see a rank's part of a call"
            )
        if not equality.same_batch(inputs, self._group):
            raise NotDivided(
                f"ranks call `{self._division.name}` with different batches",
                cause="what the script reads or draws depends on the process: its number, the time, or the system's "
                "random numbers",
                hint="seed what draws (`random`, `numpy.random.default_rng(seed)`), or run it on one rank",
            )
        different = equality.make_equal(module, self._group) if first else []  # later the running check tells
        if different:
            self.remark(f"{' and '.join(different)} of rank 0 were given to all ranks")

    def remark(self, text: str) -> None:
        """Have something told in the end."""
        self._division.remarks.append(f"`{self._division.name}`: {text}")

    def _whole(self, args: Any, kwargs: Any, inputs: Tensors, *, first: bool) -> tuple[Any, Computed]:
        """What the whole batch gives, as the module returns it, and the tensors of that."""
        module = self._division.module()
        versions, kept_before = [t._version for t in inputs], kept_graphs(module)
        new_args, new_kwargs, _ = entering(args, kwargs, [lambda whole: whole] * len(inputs))
        with self.nothing_outside(), self._division.held.in_whole() as leaves:
            value = self._division.compute(*new_args, **new_kwargs)
        stray = kept_graphs(module) - kept_before
        if stray and first:
            raise self._division.refused(f"it keeps a tensor that is to be trained as its attribute `{min(stray)}`")
        if has_numbers_of_floats(value):
            raise self._division.refused("it returns a number that is no tensor, which may be that of a part")
        if versions != [t._version for t in inputs]:
            raise self._division.refused("it writes into its inputs")
        return value, Computed(tensors_of(value), leaves)

    def _attempt(  # noqa: PLR0913  a call, and what it gives as a whole
        self, cut: Cut, args: Any, kwargs: Any, inputs: Tensors, whole: list[torch.Tensor], form: str,
        known: Pattern | None,
    ) -> tuple[Pattern | None, Any, str]:  # fmt: skip
        """How calls are divided that are cut so, with this rank's part of this one; or why they are not."""
        group, division = self._group, self._division
        num = cut.num_samples(inputs)
        if num is None or num < group.world:
            return None, None, ""
        share = Share.of(inputs, cut.dims, num, group.world)
        noise = BatchRandom(share, group.rank, division.held.parameters)
        args, kwargs, entered = part_entering(args, kwargs, share, group.rank)
        mine: Any = None
        told, raised = None, "a part of a batch raises on another rank"
        try:
            with whole_batch(group, noise):
                mine = ParameterHolder.passed(
                    division.held, division.compute, args, kwargs, Pattern(Cut(()), None), silent=True
                )
            told = [tuple(t.shape) for t in mine.outputs], skeleton(mine.value)
        except Lost:
            raise
        except Exception as problem:  # noqa: BLE001  a wrong guess may raise anything
            raised = f"a part of a batch raises {type(problem).__name__}: {problem}"
        every: list[Any] = group.objects(told, "shapes")
        if None in every:
            return None, None, raised
        if any(len(shapes) != len(whole) for shapes, _ in every):
            return None, None, "it returns another number of tensors for a part of a batch"
        if any(other != form for _, other in every):
            return None, None, "what it returns beside tensors is another one for a part of a batch"
        former = known.rules if known is not None and known.decided else None
        rules = self._rules(whole, mine.outputs, [shapes for shapes, _ in every], share, former)
        if rules is None:
            return None, None, "its outputs for parts of a batch do not make up those of the whole one"
        if stray := _stray(mine.outputs, [*division.held.leaves, *entered]):
            return None, None, stray
        found = BatchPass(division.held, group, share, mine, entered, noise if noise.drawn else None)
        mine.value = None
        return Pattern(cut, rules, noise=noise.drawn, decided=self._decided), found, ""

    def _rules(
        self, whole: list[torch.Tensor], mine: list[torch.Tensor], shapes: list[list[tuple[int, ...]]], share: Share,
        known: Sequence[Rule] | None,
    ) -> tuple[Rule, ...] | None:  # fmt: skip
        """One rule for each output, the same on all ranks, those that are known; None where there is none for one."""
        group = self._group
        if not mine:
            return ()
        rows = assembly.exchanged(mine, shapes, group, "outputs, to find how they make up the whole")
        found: list[Rule] = []
        self._decided = True
        for place, wanted in enumerate(whole):
            parts = [row[place] for row in rows]
            possible = assembly.candidates(wanted, mine[place], share, group.rank)
            if known is not None:  # one batch may tell less of them than an earlier one did
                possible = [rule for rule in possible if place < len(known) and are_alike(rule, known[place])]
            fitting = [rule for rule in possible if _fits(rule, parts, wanted.detach(), share)]
            self._decided = self._decided and (known is not None or len(fitting) == 1)
            found += [known[place] if known is not None and rule.blocks == 1 else rule for rule in fitting[:1]]
        every = group.objects(tuple(found) if len(found) == len(whole) else None, "rules")
        return every[0] if all(one == every[0] for one in every) else None

    def check_gradients(self, check: Check, gradients: Sequence[Any]) -> None:
        """Compare the gradients of a call that was computed both ways, before it leads to an update."""
        held, silence = self._division.held, NoDropout()  # what is checkpointed is computed once more
        with (
            self.nothing_outside(), self._refusing("its gradients cannot be compared"),
            silence.on(self._division.module()),
        ):  # fmt: skip
            wanted = self._gradients(check.whole, gradients)
        if any(one is not None and one.is_sparse for one in wanted):
            raise self._division.refused("it has sparse gradients")
        with (
            self._refusing("its way back raises"), silence.on(self._division.module()), held.in_place(),
            self._group.communication.in_full(),
        ):  # fmt: skip
            found, _ = check.mine.backward(gradients, keep=False)
        trained = [grad for p, grad in zip(held.parameters, found, strict=True) if p.requires_grad]
        mine: Found = [
            grad if grad is None or isinstance(one, Sharded) else part_of(grad)
            for grad, one in zip(trained, wanted, strict=True)
        ]
        tolerances = (assembly.tolerance(t.dtype) for t in (*check.whole.outputs, *held.used))
        wrong = far(mine, wanted, 10 * max(tolerances, default=1e-4))
        if not self._group.everywhere(not wrong, "agreement on gradients"):
            self._judge_rounding(check, gradients, wanted, wrong)

    @contextmanager
    def _refusing(self, cause: str) -> Iterator[None]:
        """What is raised within is refused with its cause."""
        try:
            yield
        except (Lost, NotDivided):
            raise
        except Exception as problem:
            text = str(problem).partition("\n")[0]
            raise self._division.refused(f"{cause} ({type(problem).__name__}: {text})") from problem

    def _judge_rounding(
        self, check: Check, gradients: Sequence[Any], wanted: Sequence[Any], wrong: dict[int, float]
    ) -> None:
        """Whether gradients are off by what rounding does. A single try may show little: it flips a ReLU or not."""
        noise = [0.0] * len(wanted)
        for times in NUDGES:
            noise = list(map(max, noise, self._rounding(check, gradients, wanted, times)))
            still = {place for place, off in wrong.items() if not off <= MOST_TIMES_ROUNDING * noise[place]}
            if self._group.everywhere(not still, "rounding of gradients"):
                return
        worst = max(wrong, key=lambda place: wrong[place], default=None)
        off, by = (wrong[worst], noise[worst]) if worst is not None else (0.0, 0.0)
        raise self._division.refused(
            f"gradients of parts of a batch differ from those of the whole one by {off:.2g}, "
            f"and those of parameters that are moved in their last bits by {by:.2g}"
        )

    def _gradients(self, computed: Computed, gradients: Sequence[Any]) -> Found:
        """Of the parameters, from those of the outputs; None where there is none."""
        pairs = [(o, g) for o, g in zip(computed.outputs, gradients, strict=True) if g is not None and o.requires_grad]
        return self._division.held.gradients([out for out, _ in pairs], [grad for _, grad in pairs], computed.leaves)

    def _rounding(self, check: Check, gradients: Sequence[Any], wanted: Sequence[Any], times: int) -> list[float]:
        """How far each gradient of one process moves when its parameters move by `times` their last bit.

        That is what rounding does all along a model; where it flips a ReLU, gradients of a deep one differ by 0.001.
        """
        args, kwargs = map_tensors(torch.Tensor.detach, check.inputs)
        held = self._division.held
        with self.trial(), held.nudged(times), held.in_whole() as leaves:
            outputs = tensors_of(self._division.compute(*args, **kwargs))
            return _distances(self._gradients(Computed(outputs, leaves), gradients), wanted)


def _distances(found: Sequence[Any], wanted: Sequence[Any]) -> list[float]:
    """Of each gradient, relative to the norm of the one that is wanted; None is zero."""
    distances = []
    for one, other in zip(found, wanted, strict=True):
        if one is None and other is None:
            distances.append(0.0)
            continue
        a = torch.zeros_like(other) if one is None else one
        b = torch.zeros_like(a) if other is None else other
        off, norm = float((a - b).double().norm()), float(b.double().norm())
        distances.append(off / norm if norm else off)
    return distances


def far(found: Sequence[Any], wanted: Sequence[Any], tolerance: float) -> dict[int, float]:
    """The gradients that are off by more than the tolerance, and how far; those that are rounding alone are left out.

    A bias before batch normalisation has a gradient of rounding only: what is tiny beside all others is not judged.
    """
    norms = [0.0 if one is None else float(one.double().norm()) for one in wanted]
    whole = sum(norm**2 for norm in norms) ** 0.5
    return {
        place: off
        for place, (off, norm) in enumerate(zip(_distances(found, wanted), norms, strict=True))
        if not off <= tolerance and not off * (norm or 1.0) <= NEGLIGIBLE * whole
    }


def _fits(rule: Rule, parts: list[torch.Tensor], wanted: torch.Tensor, share: Share) -> bool:
    if rule.kind == "same":
        return all(assembly.is_close(one, wanted) for one in parts)
    if rule.kind in ("mean", "sum") and not wanted.is_floating_point():
        return rule.kind == "sum" and assembly.is_close(sum(parts[1:], parts[0]), wanted)
    return assembly.is_close(assembly.put_together(rule, parts, share), wanted)


def nodes_behind(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """The nodes of the graph that tensors were computed by, each once."""
    waiting, seen = [tensor.grad_fn for tensor in tensors], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


def _stray(outputs: Tensors, known: Tensors) -> str:
    """What of a graph is neither a parameter of the module nor an input; empty where there is nothing."""
    ids = {id(t) for t in known}
    for node in nodes_behind(outputs):
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) not in ids:
            return f"it computes with a tensor {tuple(variable.shape)} that is trained and is no parameter of it"
    return ""
