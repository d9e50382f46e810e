"""What did a device, and the training thread, do in a few profiled steps? One record of a window of its own.

In and out: records. Imported in the user's process: the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

KINDS = ("kernel", "transfer", "launch", "wait", "allocation", "operator", "phase")
"""What a span can be.

On a device: `kernel`; `transfer`, a copy from the host or to it. On the host: `launch`, the call that starts one of
these; `wait`, a call that waits for the device; `allocation` of memory; `operator`, of the training thread where that
computes itself; `phase`, where Python was in its step.
"""


class Span(NamedTuple):
    """Something that lasted.

    Attributes:
        kind: One of `KINDS`.
        name: As the profiler calls it; of a phase its name.
        lane: Of a device its stream, else 0.
        start_ns: On the clock of the record, nanoseconds.
        end_ns: The same.
        link: What a launch and what it has started have in common; 0 for nothing.
        operator: Of a kernel or a transfer, the operator that asked for it; empty where that is not known.
    """

    kind: str
    name: str
    lane: int
    start_ns: int
    end_ns: int
    link: int = 0
    operator: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a profiler has seen of some steps.

    Attributes:
        device: The kind of device that computes: `cpu`, `cuda`.
        names: All names, each once; the first is empty.
        rows: One each span: its kind, name, lane, start, length, link and operator, names by where they stand.
        ends_ns: When Python was through with each step; the first belongs to the step before those that count.
        zero_s: The zero of this clock on that of `time.perf_counter`.
    """

    device: str
    names: tuple[str, ...]
    rows: tuple[tuple[int, ...], ...]
    ends_ns: tuple[int, ...]
    zero_s: float
    order: int = -1

    @property
    def num_steps(self) -> int:
        """Those that count."""
        return max(len(self.ends_ns) - 1, 0)

    def spans(self) -> list[Span]:
        """All of them, the earliest first."""
        found = [
            Span(KINDS[kind], self.names[name], lane, start_ns, start_ns + lasted_ns, link, self.names[operator])
            for kind, name, lane, start_ns, lasted_ns, link, operator in self.rows
        ]
        return sorted(found, key=lambda span: (span.start_ns, -span.end_ns))


def profile_of(spans: list[Span], *, device: str, ends_ns: tuple[int, ...], zero_s: float) -> Profile:
    """The record of these spans.

    >>> spans = [Span("kernel", "gemm", 7, 10, 25, 3, "mm"), Span("launch", "cudaLaunchKernel", 0, 2, 4, 3)]
    >>> made = profile_of(spans, device="cuda", ends_ns=(0, 30), zero_s=0.0)
    >>> made.spans() == spans[::-1], made.names
    (True, ('', 'gemm', 'mm', 'cudaLaunchKernel'))
    """
    names = {"": 0}
    rows = tuple(
        (
            KINDS.index(span.kind), names.setdefault(span.name, len(names)), span.lane, span.start_ns,
            span.end_ns - span.start_ns, span.link, names.setdefault(span.operator, len(names)),
        )
        for span in spans
    )  # fmt: skip
    return Profile(device=device, names=tuple(names), rows=rows, ends_ns=ends_ns, zero_s=zero_s)
