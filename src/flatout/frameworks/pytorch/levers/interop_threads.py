"""interop_threads: how many threads work that the script forks may use at once (inter-op).

That is what `torch.jit.fork` gives away within TorchScript, and nothing else in training: backward, loaders and single
operations have threads of their own. On which of these threads a fork runs, and so in which order the gradients of what
several forks share are added, is open in plain as well; where plain has one thread it is not, and the lever does not
apply. PyTorch takes the number once, before the first fork, so this needs a new process; a script that sets it itself
finds ours in its place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar

from flatout.records.ceilings import Machine
from flatout.records.facts import Facts
from flatout.records.plan import Lever
from flatout.records.trace import Setting

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.seams.patches import Patch
    from flatout.frameworks.pytorch.session import Session

POOL = "PTThreadPool"
"""What the system calls the threads of the pool, which is begun with the first fork. Source: `ATen/PTThreadPool.h`."""

TASKS = "/proc/self/task"


class InteropThreads(Lever):
    """`torch.set_num_interop_threads`."""

    name = "interop_threads"
    parameter = "num"
    least = 1
    summary = "threads for work that TorchScript forks, on the CPU"
    class_ = "exact"
    shortens: ClassVar = ("forward", "backward")
    toggles = "process"
    check = "none"

    def applies(self, facts: Facts, machine: Machine) -> str | None:
        """Where something in the script has forked work in its first steps, with more than one thread for it."""
        if not facts.forks_work:
            return "nothing in the script forks work"
        if facts.num_interop_threads == 1:
            return "forked work has one thread, on which it runs in order"
        if not self.settings(facts, machine):
            return "no other number than the present one"
        return None

    def settings(self, facts: Facts, machine: Machine) -> tuple[Mapping[str, Setting], ...]:
        """As many as cores, half of them, and one; without the present number."""
        choices = {machine.num_cores, max(machine.num_cores // 2, 1), 1}
        return tuple({"num": n} for n in sorted(choices - {facts.num_interop_threads}))

    def engage(self, session: Session, settings: Mapping[str, Setting]) -> None:
        """Set the number before the script can; PyTorch takes no other after it."""
        session.kept[self.name] = number = Number(int(settings["num"]))
        number.set()

    def release(self, session: Session) -> None:
        """What can be: the script's calls reach PyTorch again; the number stays until the process ends."""
        number = session.kept.pop(self.name, None)
        if number is not None:
            number.give_up()

    def evidence(self, session: Session) -> str | None:
        """Threads of the pool, which there are once something was forked."""
        number = session.kept.get(self.name)
        if number is None or num_pooled() != number.num:
            return None
        return f"forked work has {number.num} {'thread' if number.num == 1 else 'threads'}"


class Number:
    """A number of threads in place of the script's.

    Attributes:
        num: How many.
        in_plain: How many plain has: what PyTorch takes by itself, or the script sets.
    """

    def __init__(self, num: int) -> None:
        self.num = num
        self.in_plain = num
        self._was_asked = False
        self._patch: Patch | None = None

    def set(self) -> None:
        """Have PyTorch take the number."""
        import torch

        from flatout.frameworks.pytorch.seams.patches import Patch

        self.in_plain = torch.get_num_interop_threads()
        try:
            torch.set_num_interop_threads(self.num)
        except RuntimeError:  # it has been set already, before the script began
            return
        self._patch = Patch(torch, "set_num_interop_threads", self._passing_over_one)

    def give_up(self) -> None:
        """Have the script's calls reach PyTorch again."""
        if self._patch is not None:
            self._patch.remove()

    def _passing_over_one(self, original: Any, patch: Patch) -> Any:
        """The script's first call is noted alone: after ours PyTorch would refuse it, as it does any second one."""

        @wraps(original)
        def set_num_interop_threads(*args: Any, **kwargs: Any) -> None:
            is_number = len(args) == 1 and type(args[0]) is int and args[0] > 0 and not kwargs
            if patch.active and is_number and not self._was_asked and not num_pooled():
                self._was_asked, self.in_plain = True, args[0]
                return
            original(*args, **kwargs)

        return set_num_interop_threads


def number_in_plain(session: Session) -> int:
    """Threads that forked work has without the lever."""
    import torch

    number = session.kept.get(InteropThreads.name)
    return number.in_plain if number is not None else torch.get_num_interop_threads()


def num_pooled() -> int:
    """Threads that forked work has in this process; 0 where nothing was forked yet, or the system does not tell."""
    num = 0
    try:
        for task in os.listdir(TASKS):
            with open(f"{TASKS}/{task}/comm", encoding="utf-8") as file:
                num += file.read().strip() == POOL
    except OSError:  # a thread has ended meanwhile, or there is no such folder
        return num
    return num
