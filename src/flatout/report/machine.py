"""What does a terminal show of a machine? What it has, and what it can do at most.

In: `Ceilings`. Out: a `Report`.
"""

from __future__ import annotations

from collections.abc import Sequence

from flatout.records.ceilings import Ceiling, Ceilings
from flatout.records.energy import Log
from flatout.report import words
from flatout.report.energy import counters
from flatout.report.screen import Report, Screen


def machine(
    ceilings: Ceilings,
    *,
    exchanges: Sequence[Ceiling] = (),
    now_unix_s: float | None = None,
    energy: Log | None = None,
) -> Report:
    """This machine and its measured ceilings.

    Args:
        ceilings: What was measured.
        exchanges: What ranks exchange at most.
        now_unix_s: The present, for the age of the measurement; without it no age is shown.
        energy: The energy counters that can be read, and what is missing for others; not shown without it.
    """

    def compose(screen: Screen) -> None:
        here = ceilings.machine
        screen.row((here.hostname, "bold"), f" · {here.cpu} · {here.operating_system}")
        screen.blank()
        quota = f", a quota of {words.three(here.cores_quota)}" if here.cores_quota else ""
        total = f" of {here.num_cores_total}" if here.num_cores_total != here.num_cores else ""
        screen.say(
            "cores", f"{here.num_cores}{total} usable ({words.plural(here.num_physical_cores, 'physical core')}{quota})"
        )
        screen.say("features", " ".join(here.cpu_features) or "none that decide the speed of matrix products")
        limit = f", limited to {words.memory(here.memory_limit_bytes)}" if here.memory_limit_bytes else ""
        shm = f" · /dev/shm {words.memory(here.shm_bytes)}" if here.shm_bytes is not None else ""
        screen.say("memory", f"{words.memory(here.memory_bytes)}{limit}{shm}")
        for accelerator in here.accelerators:
            screen.say("gpu", f"{accelerator.name}, {words.memory(accelerator.memory_bytes)}")
        screen.say("compiler", here.cxx_compiler or "none: compiling for a CPU needs one")
        if energy is not None:
            _energy(screen, energy)
        screen.blank()
        _ceilings_table(screen, ceilings, now_unix_s)
        if exchanges:
            screen.row(("exchanges", "bold"), ("   bus bandwidth of each rank, measured now", "dim"))
            _limits(screen, exchanges)
        screen.command("next", "flatout why SCRIPT")

    return Report(compose)


def _energy(screen: Screen, energy: Log) -> None:
    said = [counters(energy.counters)] if energy.counters else []
    for number, text in enumerate((*said, *energy.missing)):
        screen.say("energy" if number == 0 else "", text if number < len(said) else f"not readable: {text}")


def _ceilings_table(screen: Screen, ceilings: Ceilings, now_unix_s: float | None) -> None:
    age = words.age(ceilings.age_s(now_unix_s)) if now_unix_s is not None else ""
    framework = words.framework(ceilings.framework, ceilings.framework_version)
    threads = words.plural(ceilings.num_threads, "thread")
    took = words.duration(ceilings.measuring_s)
    screen.row(
        ("ceilings", "bold"),
        (f"   {framework} on {ceilings.device}, {threads}, measured {age + ' ' if age else ''}in {took}", "dim"),
    )
    _limits(screen, ceilings.values)
    for remark in ceilings.remarks:
        screen.say("remark", (remark, "yellow"))
    if ceilings.foreign_cpu_fraction is not None:
        screen.say("others", f"used {words.percent(ceilings.foreign_cpu_fraction)} of the CPU meanwhile")


def _limits(screen: Screen, limits: Sequence[Ceiling]) -> None:
    name = max((len(words.ceiling(c.name)) for c in limits), default=0)
    for c in limits:
        spread = f"± {words.percent(c.spread_fraction)}"
        head = screen.clean(f"  {words.ceiling(c.name):<{name}}  {words.limit(c.value, c.unit):>12} {spread:<8}  ")
        screen.say(head, (c.source, "dim"), indent=len(head), style="")
