"""workers: build batches in worker processes, beside the model, and keep the workers between epochs.

Exact where items are deterministic: same items, same order, same random streams (the check compares hashes). Where
items are random, workers draw other random numbers: then the check says so and it takes `--accept statistical`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from flatout.ceilings import Machine
from flatout.plan import Lever
from flatout.trace import Facts, Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.session import Session

MIN_SHM_BYTES = 256 * 2**20
"""Workers hand batches over in shared memory; Docker's default of 64 MB has broken many a run."""


class Workers(Lever):
    """`num_workers`, `prefetch_factor` and persistence of training loaders."""

    name = "workers"
    parameter = "num"
    summary = "batches built in worker processes that stay between epochs"
    class_ = "exact"
    shortens: ClassVar = ("data",)
    toggles = "epoch"
    check = "batches"

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """A DataLoader of the usual kind, and room for its batches."""
        if not facts.loaders:
            return "no DataLoader feeds the training"
        if all(loader.iterable for loader in facts.loaders):
            return "an iterable dataset decides itself how workers share it"
        if not any(loader.changeable for loader in facts.loaders):
            return "the loader is of a kind of its own, or names a multiprocessing context"
        if any(loader.picklable is False for loader in facts.loaders):
            return "the dataset cannot be pickled, as this start method needs"
        if machine.shm_bytes is not None and machine.shm_bytes < MIN_SHM_BYTES:
            return "/dev/shm is smaller than 256 MB"
        return None

    def settings(self, facts: Facts, machine: Machine) -> tuple[Mapping[str, Setting], ...]:
        """Up to the cores, and none where the script has some; without the present state."""
        now = max((loader.num_workers for loader in facts.loaders), default=0)
        kept = any(loader.persistent for loader in facts.loaders)
        cores = machine.num_cores
        numbers = [n for n in (1, 2, 4, 8, cores) if n <= cores]
        wanted = [n for n in dict.fromkeys(numbers) if n != now or not kept]
        return tuple([{"num": n} for n in wanted] + [{"num": 0}] * bool(now))

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """From the next pass on (in a trial from the next fetch on)."""
        num = int(settings["num"])
        session.loaders.num_changed = 0
        session.loaders.change(
            {
                **session.loaders.settings,
                "num_workers": num,
                "prefetch_factor": int(settings.get("prefetch", 2)) if num else None,
                "persistent_workers": bool(num),
            }
        )

    def release(self, session: Session) -> None:
        """Back to the script's."""
        ours = ("num_workers", "prefetch_factor", "persistent_workers")
        rest = {name: value for name, value in session.loaders.settings.items() if name not in ours}
        session.loaders.change(rest)

    def evidence(self, session: Session) -> str | None:
        """Passes that were opened so, and the workers they have."""
        num = session.loaders.num_changed
        return f"{session.loaders.settings.get('num_workers')} workers in {num} passes" if num else None
