"""What is shown of a machine? What it has, and what it can do at most. In: `Ceilings`. Out: a `View`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from flatout.machine.energy_counters import Found
from flatout.records.ceilings import Ceiling, Ceilings
from flatout.report import words
from flatout.report.table import Table, shown, table
from flatout.report.view import Item, Row, Section, View


def view(
    ceilings: Ceilings,
    *,
    exchanges: Sequence[Ceiling] = (),
    now_unix_s: float | None = None,
    energy: Found | None = None,
) -> View:
    """This machine and its measured ceilings.

    Args:
        ceilings: What was measured.
        exchanges: What ranks exchange at most.
        now_unix_s: The present, for the age of the measurement.
        energy: The energy counters that can be read, and what is missing for others; not shown without it.
    """
    here = ceilings.machine
    heads = "bus bandwidth of each rank, measured now"
    return View(
        command="flatout machine",
        title=here.hostname,
        context=(here.cpu, here.operating_system),
        sections=(
            Section(name="parts", items=tuple(_parts(ceilings, energy))),
            Section(name="ceilings", items=tuple(_ceilings(ceilings, now_unix_s))),
            Section(name="exchanges", items=(_limits("exchanges", heads, exchanges),) if exchanges else ()),
        ),
        next=("flatout why SCRIPT",),
    )


def _parts(ceilings: Ceilings, energy: Found | None) -> list[Item]:
    here = ceilings.machine
    quota = f", a quota of {words.three(here.cores_quota)}" if here.cores_quota else ""
    total = f" of {here.num_cores_total}" if here.num_cores_total != here.num_cores else ""
    cores = f"{here.num_cores}{total} usable ({words.plural(here.num_physical_cores, 'physical core')}{quota})"
    limit = f", limited to {words.memory(here.memory_limit_bytes)}" if here.memory_limit_bytes else ""
    shm = f" · /dev/shm {words.memory(here.shm_bytes)}" if here.shm_bytes is not None else ""
    features = " ".join(here.cpu_features) or "none that decide the speed of matrix products"
    rows = [
        ("cores", cores),
        ("features", features),
        ("memory", f"{words.memory(here.memory_bytes)}{limit}{shm}"),
        *(("gpu", f"{one.name}, {words.memory(one.memory_bytes)}") for one in here.accelerators),
        ("compiler", here.cxx_compiler or "none: compiling for a CPU needs one"),
    ]
    if energy is not None:
        rows += [("energy", f"{one.name}: {one.source}") for one in energy.counters]
        rows += [("energy", f"not readable: {text}") for text in energy.missing]
    return [Row(label=name, note=text) for name, text in rows]


def _ceilings(ceilings: Ceilings, now_unix_s: float | None) -> list[Item]:
    age = words.age(ceilings.age_s(time.time() if now_unix_s is None else now_unix_s))
    framework = words.framework(ceilings.framework, ceilings.framework_version)
    threads = words.plural(ceilings.num_threads, "thread")
    took = words.duration(ceilings.measuring_s)
    head = f"{framework} on {ceilings.device}, {threads}, measured {age + ' ' if age else ''}in {took}"
    rows = [Row(label="remark", value=remark, tone="caution") for remark in ceilings.remarks]
    if ceilings.foreign_cpu_fraction is not None:
        rows.append(
            Row(label="others", note=f"used {words.percent(ceilings.foreign_cpu_fraction)} of the CPU meanwhile")
        )
    return [Row(label="ceilings", note=head), _limits("limit", "measured on", ceilings.values), *rows]


def _limits(title: str, how: str, limits: Sequence[Ceiling]) -> Table:
    rows = [
        (words.ceiling(c.name), words.limit(c.value, c.unit), f"± {words.percent(c.spread_fraction)}", c.source)
        for c in limits
    ]
    return shown(table(title, (title, "value", "spread", how), rows), range(4))
