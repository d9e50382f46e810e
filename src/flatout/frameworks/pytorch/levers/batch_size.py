"""batch_size: training loaders give batches of another size, and the learning rate follows.

In a new process, as loaders are made: so `len(loader)`, and a schedule that is told it, follow the size. The items of
a pass and their order stay; they are cut otherwise. The rate is multiplied while an optimizer updates, and is the
script's own again after it: what the script reads, prints, schedules or saves is its own rate, whoever sets it. With
k times the items in a batch the rate of SGD is k times, that of Adam and its kin the square root of k times as large;
momentum, betas, epsilon, weight decay and warm-up stay. A script that counts steps instead of epochs trains on k times
the items, and numbers of steps that it has written down (of a warm-up, say) are not changed.

Source: Goyal et al., "Accurate, Large Minibatch SGD" (2017), for SGD; Malladi et al., "On the SDEs and Scaling Rules
for Adaptive Gradient Algorithms" (2022), for Adam and RMSprop, without what they change in betas and epsilon.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.frameworks.lever import Lever
from flatout.frameworks.pytorch.lever_bases import why_none
from flatout.guest.tracebacks import hide_ours
from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from flatout.frameworks.pytorch.input.loaders import Loaders
    from flatout.frameworks.pytorch.seams.patches import Patch
    from flatout.frameworks.pytorch.seams.update_hooks import UpdateHook
    from flatout.frameworks.pytorch.session import Session


RULES = {
    "SGD": 1.0,
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "RMSprop"), 0.5),
}
"""By an optimizer's class: the power of the ratio of items in an update with which its learning rate goes."""


def without_rule(names: Iterable[str]) -> str | None:
    """That no rule is known for the learning rate of some of these classes of optimizers; None where it is for all."""
    unknown = next((name for name in names if name not in RULES), None)
    return None if unknown is None else f"no rule is known for the learning rate of `{unknown}`"


def why_not_resized(loader: DataLoader[Any]) -> str | None:
    """Why a loader cannot give batches of another size, in a few words; None where it can."""
    from torch.utils.data import BatchSampler, IterableDataset, RandomSampler, SequentialSampler

    if isinstance(loader.dataset, IterableDataset):
        return "the dataset is iterable"
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        return "the script makes its batches itself"
    if loader.drop_last:
        return "the loader drops the last items of a pass (`drop_last`), which would be others"
    if type(loader.sampler) is SequentialSampler:
        return "the loader does not shuffle, as those of evaluations do not"
    if type(loader.sampler) is not RandomSampler:
        return f"the loader has a sampler of the script's own (`{type(loader.sampler).__name__}`)"
    return None


def why_not_here(session: Session, loader: DataLoader[Any]) -> str | None:
    """The same in a run, in which loaders may be made anew around batches of ours."""
    resized = session.kept.get(BatchSize.name)
    return None if resized is not None and resized.has_made(loader) else why_not_resized(loader)


class BatchSize(Lever):
    """`batch_size` of training loaders, and `lr` of optimizers."""

    name = "batch_size"
    parameter = "num"
    summary = (
        "batches of `num` items; with k times the items the rate of SGD is k, of Adam the root of k times as large"
    )
    class_ = "semantics"
    shortens: ClassVar = ("data", "copy", "forward", "loss", "backward", "optimizer")
    toggles = "process"
    check = "batches"
    least = 1
    most = 2**20

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """One process, shuffling loaders with batches of PyTorch's own, and optimizers for which there is a rule."""
        if facts.distributed:
            return "several processes train together"
        if facts.step_rhythm != "optimizer" or not facts.optimizers:
            return "no optimizer updates the parameters, so no learning rate could follow"
        unknown = without_rule(tuple(optimizer.name for optimizer in facts.optimizers))
        return unknown or why_none([loader.refusal(self.name) for loader in facts.loaders])

    def settings(self, facts: Facts, machine: Machine) -> tuple[Mapping[str, Setting], ...]:
        """None: it is not tried, for no step tells what it does to the training."""
        return ()

    def why_not(self, session: Session, loader: DataLoader[Any]) -> str | None:
        """Its batches cannot be of another size."""
        return why_not_here(session, loader)

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Loaders that are made from here on."""
        session.kept[self.name] = resized = Resized(int(settings["num"]), session.loaders)
        resized.begin()

    def release(self, session: Session) -> None:
        """Loaders that are made from here on are the script's, and so are learning rates; made ones stay."""
        resized = session.kept.pop(self.name, None)
        if resized is not None:
            resized.end()

    def evidence(self, session: Session) -> str | None:
        """Batches of that size in training, and updates with the rate that belongs to them."""
        resized = session.kept.get(self.name)
        if resized is None:
            return None
        wrong = resized.wrong()
        if wrong is not None:
            session.unavailable[self.name] = wrong
            return None
        session.unavailable.pop(self.name, None)
        return resized.proof()


class Resized:
    """Loaders that give batches of `num`, and optimizers whose rate follows.

    Attributes:
        num: Items in a batch.
        former: What the script had in its place, each size that was met.
        updates: By class of optimizer the updates made at a rate that follows.
        failed: What went wrong here, in words; empty where nothing did.
    """

    def __init__(self, num: int, loaders: Loaders) -> None:
        self.num = num
        self._loaders = loaders
        self._feeds = False
        """Whether a loader of ours was seen to feed the training."""
        self._left = ""
        """Why another one that does is not of ours."""
        self.former: set[int] = set()
        self.updates: dict[str, int] = {}
        self.failed = ""
        self._without_rule: set[str] = set()
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()
        """Batch samplers of ours: a loader that is made anew around one (Accelerate) is one of ours too."""
        self._rates = _Rates()
        self._patch: Patch | None = None
        self._hooks: list[UpdateHook] = []

    def begin(self) -> None:
        """From here on."""
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
        from torch.utils.data import DataLoader

        from flatout.frameworks.pytorch.seams.patches import Patch
        from flatout.frameworks.pytorch.seams.update_hooks import UpdateHook

        self._patch = Patch(DataLoader, "__init__", self._resizing)
        self._hooks = [
            UpdateHook(register_optimizer_step_pre_hook, self._before_update),
            UpdateHook(register_optimizer_step_post_hook, self._after_update),
        ]

    def end(self) -> None:
        """No longer."""
        if self._patch is not None:
            self._patch.remove()
        for hook in self._hooks:
            hook.remove()
        self._rates.restore_all()

    def wrong(self) -> str | None:
        """Why the training is not what was asked for, in words; None where it is."""
        if self.failed:
            return self.failed
        if not self.former:
            return "no loader that it could change was made"
        if len(self.former) > 1:
            sizes = ", ".join(map(str, sorted(self.former)))
            return f"loaders had batches of {sizes}, so it is not known by how much the learning rate is to change"
        self._look()
        if self._left or not self._feeds:
            return self._left or "no loader was seen to feed the training"
        return without_rule(tuple(sorted(self._without_rule)))

    def proof(self) -> str | None:
        """What was changed, once there were updates."""
        rates = [
            f"{num} updates of `{name}` at {self._ratio ** RULES[name]:.3g} times its rate"
            for name, num in self.updates.items()
        ]
        return f"batches of {self.num} instead of {min(self.former)}; {', '.join(rates)}" if rates else None

    @property
    def _ratio(self) -> float:
        """New size over the former; 1 where that is not one number."""
        return self.num / next(iter(self.former)) if len(self.former) == 1 else 1.0

    # -- loaders -------------------------------------------------------------------------------------------------

    def _resizing(self, original: Any, patch: Patch) -> Any:
        @wraps(original)
        def __init__(loader: Any, *args: Any, **kwargs: Any) -> None:
            try:
                original(loader, *args, **kwargs)
            except BaseException as problem:
                hide_ours(problem)
                raise
            if patch.active:
                try:
                    self._resize(loader)
                except Exception as problem:  # noqa: BLE001  a dataset's `__len__` may raise anything
                    self.failed = f"a loader could not be changed: {type(problem).__name__}: {problem}"[:200]

        return __init__

    def _resize(self, loader: DataLoader[Any]) -> None:
        from torch.utils.data import BatchSampler

        if why_not_resized(loader) is not None or len(loader.sampler) < self.num:  # type: ignore[arg-type]
            return
        former = loader.batch_size
        if former == self.num and self.former:  # made anew from the attributes of one that was changed (Lightning)
            self._made.add(loader.batch_sampler)
            return
        batches: BatchSampler = BatchSampler(loader.sampler, self.num, drop_last=False)
        loader.__dict__.update(batch_size=self.num, batch_sampler=batches)  # its class lets nobody set them
        self._made.add(batches)
        self.former.add(int(former or self.num))

    def has_made(self, loader: DataLoader[Any]) -> bool:
        """Whether the loader's batches are ours."""
        return any(loader.batch_sampler is one for one in self._made)  # one of the script's may have no hash

    def _look(self) -> None:
        """Which loaders feed the training now: those of a function that has returned are gone in the end."""
        for loader in self._loaders.training:
            if self.has_made(loader):
                self._feeds = True
            elif not self._left:
                self._left = why_not_resized(loader) or f"a pass has fewer than {self.num} items"

    # -- learning rates ------------------------------------------------------------------------------------------

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        try:
            name = type(optimizer).__name__
            if name not in RULES:
                self._without_rule.add(name)
                self._rates.scale(optimizer, 1.0)
                return
            is_part = self._rates.scale(optimizer, self._ratio ** RULES[name])
            if not is_part and self.former:
                self.updates[name] = self.updates.get(name, 0) + 1
        except Exception as problem:  # noqa: BLE001  training goes on
            self.failed = f"a learning rate could not be changed: {type(problem).__name__}: {problem}"[:200]

    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        try:
            self._rates.restore()
            self._look()
        except Exception as problem:  # noqa: BLE001  training goes on
            self.failed = f"a learning rate could not be put back: {type(problem).__name__}: {problem}"[:200]


class _Rates(threading.local):
    """Rates that are changed for the updates under way in a thread; those within another one's change none again."""

    def __init__(self) -> None:
        self._under_way: list[list[tuple[dict[str, Any], Any, Any]]] = []
        """For each update its groups, with their own rate and the one that stands in its place."""

    def scale(self, optimizer: Optimizer, factor: float) -> bool:
        """An update begins; whether it is part of another one."""
        if self._under_way and not self._is_within():
            self.restore_all()  # the last one raised, and no hook is told of that
        is_part = bool(self._under_way)
        there = {id(group) for update in self._under_way for group, _, _ in update}
        self._under_way.append(changed := [])
        for group in optimizer.param_groups if factor != 1.0 else ():
            if id(group) not in there and "lr" in group:
                rate = group["lr"]
                group["lr"] = rate * factor
                changed.append((group, rate, group["lr"]))
        return is_part

    def restore(self) -> None:
        """The update that began last is over: its rates are the script's, unless somebody has set one meanwhile."""
        for group, rate, in_place in self._under_way.pop() if self._under_way else ():
            if group["lr"] is in_place:
                group["lr"] = rate

    def restore_all(self) -> None:
        """Nothing is under way."""
        while self._under_way:
            self.restore()

    def _is_within(self) -> bool:
        from flatout.frameworks.pytorch.seams.update_hooks import within_update

        return within_update(sys._getframe(3).f_back)
