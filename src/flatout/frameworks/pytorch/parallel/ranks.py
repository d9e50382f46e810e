"""How does this process become one rank of many? It joins the others, finds the models that are called, divides calls.

In: which rank this is, and the calls of the process. Out: divided calls from the first training call on, or the end of
the run where they cannot be divided, before anything was trained.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from flatout import __version__
from flatout.frameworks.pytorch.observe.memory import held_bytes
from flatout.frameworks.pytorch.parallel import equality
from flatout.frameworks.pytorch.parallel.division import Division, ModelDivision
from flatout.frameworks.pytorch.parallel.equality import RunningCheck
from flatout.frameworks.pytorch.parallel.group import Group, Lost
from flatout.frameworks.pytorch.parallel.refusal import NotDivided
from flatout.frameworks.pytorch.parallel.sharded_tensor import Sharded
from flatout.frameworks.pytorch.seams.calls import Calls
from flatout.frameworks.pytorch.seams.outer_call import OuterCall
from flatout.frameworks.pytorch.seams.patches import Patch
from flatout.frameworks.pytorch.seams.random_states import RandomStates
from flatout.guest.rank_status import StatusPage, page_file, read
from flatout.records.ranks import (
    EXIT_LOST,
    MODEL_MODES,
    SHARDED_MODES,
    STACKS_SIGNAL,
    RankConfig,
    RankPlace,
    ended_file,
    ends_of,
    leave,
    leaves_file,
    refuse,
    stacks_file,
    trains_file,
)

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.parallel.sharded_models import Sharding

BEYOND_S = 60.0
"""So much longer than the parent an exchange waits: who looks at all ranks has more to say than one of them."""

WAITS_S = 5.0
"""So long another rank may be in an exchange, while this one has come to its end, before it is taken to stay there."""

CULPRIT_S, LEAVING_S = 5.0, 60.0
"""So long a rank whose exchange broke waits to hear that another one has ended, before it says so itself; and for one
that is ending: on a busy machine an interpreter may take long to."""


class Ranks:
    """This process as one of the ranks."""

    def __init__(self, me: RankPlace, terms: RankConfig, calls: Calls) -> None:
        self._terms, self._calls, self.mode = terms, calls, terms.mode
        if "OMP_NUM_THREADS" not in os.environ:  # each rank of this machine has its share of the cores
            cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
            torch.set_num_threads(max(min(torch.get_num_threads(), cores // me.local_world), 1))
        place = Path(terms.folder)
        self._stacks = open(stacks_file(place, me.rank), "w")  # noqa: SIM115  written to when the process hangs
        faulthandler.register(STACKS_SIGNAL, self._stacks)
        self.group = Group(
            me, StatusPage(page_file(place, me.rank), held_bytes), limit_s=terms.hang_timeout_s + BEYOND_S
        )
        self.group.on_lost, self.group.on_child = self._lost, self._refuse_child
        self._check = RunningCheck(self.group, self._trained)
        self._patch: Patch | None = None
        self._trains = self._has_divided = False
        self._sharding: Sharding | None = None
        if terms.mode in SHARDED_MODES:
            from flatout.frameworks.pytorch.parallel.sharded_models import Sharding

            self._sharding = Sharding(self.group, terms, self._refuse)
        self._pid = os.getpid()
        self._same_code()
        # numbers that nobody has seeded are drawn from the system: let them be those of rank 0
        states: RandomStates = self.group.of_first(RandomStates, "random numbers")
        if self.group.rank:
            states.restore()
        atexit.register(self._close)

    # -- start ---------------------------------------------------------------------------------------------------

    def _same_code(self) -> None:
        """Machines may have other versions, or another copy of the script."""
        mine = _code()
        first = self.group.of_first(_code, "code")
        other = next((name for name in mine if mine[name] != first.get(name)), None)
        if other is not None:
            refuse(
                self._terms, self.group.rank, f"rank {self.group.rank} has another {other} than rank 0",
                cause=f"{other} there: {first.get(other)}, here: {mine[other]}",
                hint="the same script and the same versions are needed on all machines",
            )  # fmt: skip

    def begin(self) -> None:
        """Divide calls from here on."""
        self._calls.divide = self._divide
        if self._sharding is not None:
            self._calls.evaluate = self._sharding.evaluated
        self.watch()
        Patch(nn.Module, "_apply", self._changing)
        for holder in (torch.distributed, torch.distributed.distributed_c10d):
            Patch(holder, "init_process_group", self._own_ranks)
        for name in ("spawn", "start_processes"):
            Patch(torch.multiprocessing, name, self._own_ranks)

    def _own_ranks(self, original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
        """In the place of a function with which a script makes ranks of its own: it may be made distributed once."""
        what = "makes itself distributed" if "init" in original.__name__ else "starts processes of its own"

        @functools.wraps(original)
        def refused(*_: Any, **__: Any) -> NoReturn:
            problem = NotDivided(
                f"the script {what} (`{original.__name__}`)",
                cause="`--ranks` is for scripts that know of one process",
                hint="`flatout exec -- torchrun ...` for one that a launcher starts; else without `--ranks`",
            )
            self._refuse(problem)

        return refused

    def _changing(self, original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
        """A model is moved, or its type is changed (`model.half()`): its last calls are confirmed as it is."""

        @functools.wraps(original)
        def _apply(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if patch.active and not self._calls.inside and os.getpid() == self._pid:
                self._confirm(lambda division: division.module() in module.modules())
            return original(module, *args, **kwargs)

        return _apply

    def watch(self) -> None:
        """Look for modules that are called; `rest` ends it."""
        if self._patch is None:
            self._patch = Patch(nn.Module, "__call__", self._seen)

    def rest(self) -> None:
        """All that training calls has been found."""
        patch, self._patch = self._patch, None
        if patch is not None:
            patch.remove()

    def _seen(self, original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
        calls = self._calls

        def __call__(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if (
                patch.active
                and not calls.inside
                and torch.is_grad_enabled()
                and not torch.compiler.is_compiling()
                and any(p.requires_grad for p in module.parameters())
            ):
                calls.meet(module)
            return original(module, *args, **kwargs)

        return __call__

    # -- calls ---------------------------------------------------------------------------------------------------

    def _divide(self, call: OuterCall, args: Any, kwargs: Any) -> Any:
        if os.getpid() != self._pid:
            return self._in_child(call, args, kwargs)
        division = call.kept.get("division")
        if not self._trains:
            self._trains = True
            trains_file(Path(self._terms.folder), self.group.rank).touch()
        if division is None:
            division = self._division(call)
            division.compare = self._check.compare
            call.kept["division"] = division
        with self._refusing():
            self._check.called()
        found = division(args, kwargs)
        if not self._has_divided:
            self._has_divided = True
            self.group.page.trains()
        return found

    def _in_child(self, call: OuterCall, args: Any, kwargs: Any) -> Any:
        """A call in a process that this rank has forked: as the script says, with models that are whole there."""
        if not self._trains:
            problem = NotDivided(
                "a process that the script has started trains", cause="it is no rank, and cannot be one"
            )
            self._refuse(problem)
        division = call.kept.get("division")
        if division is not None and not division.holds_whole:
            self._refuse_child()
        return call.with_levers(args, kwargs)

    def _refuse_child(self) -> NoReturn:
        problem = NotDivided(
            "a process that the script has started computes with a divided model",
            cause="it is no rank, and would need what other ranks hold",
            hint="`--mode replicate`, where each rank holds whole models",
        )
        self._refuse(problem)

    def _division(self, call: OuterCall) -> Division:
        """What divides the calls of a module that is called for the first time."""
        if any(getattr(part, "max_norm", None) is not None for part in call.module.modules()):
            problem = NotDivided(
                f"the calls of `{call.name}` cannot be divided over ranks",
                cause="an embedding normalises the words of a batch (`max_norm`): a rank sees those of its part",
            )
            self._refuse(problem)
        self._confirm()  # of models that the script may not train any more
        kind = ModelDivision if self._terms.mode in MODEL_MODES else Division

        def compute(*args: Any, **kwargs: Any) -> Any:
            return call.with_levers(args, kwargs)

        found = kind(call.name, lambda: call.module, compute, self.group, self._refuse, self._apart)
        if self._sharding is not None:
            with self._refusing():
                if isinstance(found, ModelDivision):
                    self._sharding.plan(found, call)
                else:
                    found.hold = self._sharding.holding(call)
        return found

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """What is called within is not the script's doing."""
        former, self._calls.inside = self._calls.inside, True
        try:
            yield
        finally:
            self._calls.inside = former

    def _divisions(self) -> list[Division]:
        return [call.kept["division"] for call in self._calls.found if "division" in call.kept]

    def _trained(self) -> list[torch.Tensor]:
        """Parameters and buffers of all models that are divided, each once."""
        models = [call.module for call in self._calls.found if "division" in call.kept]
        state = {id(t): t for model in models for t in equality.state_of(model)}
        return [t for t in state.values() if not isinstance(t, Sharded)]  # of which each rank has its own rows

    def after_first_step(self) -> None:
        """The first update has been made: something must have been divided by now."""
        if os.getpid() != self._pid:
            return
        divisions = self._divisions()
        if any(division.num_divided for division in divisions) or torch.distributed.is_initialized():
            return
        problem = NotDivided(
            "nothing of what the script trains could be divided over ranks",
            cause=next((d.why_whole for d in divisions if d.why_whole), "no module was called that is trained"),
        )
        self._refuse(problem)

    def remarks(self) -> list[str]:
        """What is to be said in the end."""
        return [text for division in self._divisions() for text in division.remarks]

    # -- ends ----------------------------------------------------------------------------------------------------

    def confirm(self) -> None:
        """The script is over: it has not ended well before its last calls are confirmed."""
        has_raised = getattr(sys, "last_type", None) is not None
        if has_raised or not any(division.last.kept for division in self._divisions()):
            return
        try:
            with self._refusing():
                if self._all_end():
                    self._confirm()
                    self._check.compare()
        except RuntimeError:  # others, or where they meet, are gone
            leave(EXIT_LOST)

    def _confirm(self, which: Callable[[Division], bool] = lambda division: True) -> None:
        with self._refusing():
            for division in self._divisions():
                if division.last.kept and which(division):
                    division.last.confirm()

    def _all_end(self) -> bool:
        """Whether all ranks come to the end; not where one waits for this one in an exchange, and will tell of it.

        Others wait for rank 0 as long as it takes: it alone may have much to send somewhere.
        """
        store, place, num_calls = self.group.store, Path(self._terms.folder), self._check.num_calls
        store.set(f"end-{self.group.rank}", str(num_calls))
        others = [rank for rank in range(self.group.world) if rank != self.group.rank]
        names, begun_s = [f"end-{rank}" for rank in others], time.perf_counter()
        while not store.check(names):
            now_s = time.perf_counter()
            if any(leaves_file(place, rank).exists() or ended_file(place, rank).exists() for rank in others):
                leave(EXIT_LOST)
            if self.group.rank == 0 and now_s - begun_s > self.group.limit.total_seconds():
                raise NotDivided("rank 0 has come to its end, and others do not", cause="they wait for something")
            stands = (read(page_file(place, rank)) for rank in others)
            if any(one is not None and one.waits and now_s - max(one.since_s, begun_s) > WAITS_S for one in stands):
                return False
            time.sleep(0.01)
        if any(int(store.get(name)) != num_calls for name in names):
            cause = f"this one has made {num_calls:,}: the script was interrupted, or looks at the time"
            raise NotDivided("ranks have ended after different numbers of calls", cause=cause)
        return True

    def _close(self) -> None:
        """The process ends: what holds threads goes before the interpreter does; others are told before."""
        if os.getpid() != self._pid:
            return
        self.confirm()
        self.group.page.tell()
        with contextlib.suppress(OSError):
            leaves_file(Path(self._terms.folder), self.group.rank).touch()
        for call in self._calls.found:
            division = call.kept.pop("division", None)
            if division is not None:  # the script's last loss may still hold it
                division.held.close()
        if self._sharding is not None:
            self._sharding.close()
        self.group.close()

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except NotDivided as problem:
            self._refuse(problem)

    def _refuse(self, problem: NotDivided) -> NoReturn:
        """End the run: nothing has been trained yet, and it could only be trained wrongly."""
        refuse(self._terms, self.group.rank, problem.error, cause=problem.cause, hint=problem.hint)

    def _lost(self, problem: Lost) -> None:
        """An exchange broke, most often because another rank has ended: then that one tells why."""
        place, begun_s = Path(self._terms.folder), time.monotonic()
        others = [rank for rank in range(self.group.world) if rank != self.group.rank]
        limit_s = CULPRIT_S
        while time.monotonic() - begun_s < limit_s:
            if any(end["code"] != EXIT_LOST for end in ends_of(place, others).values()):
                leave(EXIT_LOST)
            if any(leaves_file(place, rank).exists() for rank in others):
                limit_s = LEAVING_S
            time.sleep(0.05)
        if self._terms.num_nodes > 1:
            leave(EXIT_LOST)


def _code() -> dict[str, str]:
    """What must be the same on all machines."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    found = {"Python": sys.version.split()[0], "PyTorch": str(torch.__version__), "flatout": __version__}
    with contextlib.suppress(OSError, TypeError):
        found["script"] = hashlib.blake2b(Path(path).read_bytes(), digest_size=8).hexdigest()  # type: ignore[arg-type]
    return found
