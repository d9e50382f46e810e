"""What was a device busy with, and why was it idle? On a CPU the same of the training thread and its operators.

In: a `Profile`, and what is known of its operators' work and of the machine's limits. Out: a `ProfiledTime`, a closed
account: busy and idle by cause sum to the steps. Arithmetic alone, in whole nanoseconds.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from flatout.judge.roofline import least
from flatout.records.ceilings import Ceilings
from flatout.records.profile import Profile, Span
from flatout.records.trace import Census

INPUT, COPIES, PYTHON, SYNC, ALLOCATION = "input", "copies", "Python", "synchronisation", "allocation"
QUEUED, UNKNOWN = "starting", "not known"
"""Why nothing computes: a batch is fetched; bytes go to the device or back; Python has not asked for the next thing
yet, or has not because it had waited for the device before; memory is asked for; what was asked for has not begun."""

UNATTRIBUTED = "unattributed"
"""Where Python is outside of every phase."""

MOST_PARTS = 12
"""Kernels or operators that are kept."""

TENSOR_CORES = (
    "h884", "s884", "h1688", "s1688", "c1688", "16816", "i16832", "i8816", "hmma", "imma", "gmma", "tcgen05",
    "xmma_gemm", "xmma_implicit_gemm", "xmma_sparse", "xmma_warp_specialized", "conv1x1", "conv2d_c1_k1",
    "dgrad_1x1_stride_2x2", "direct_group", "first_layer_wgrad_kernel", "nvjet", "tensorop", "cutlass3x", "flash_fwd",
    "flash_bwd",
)  # fmt: skip
"""Parts of the names of kernels that compute on tensor cores.

Source: NVIDIA PyProf, `pyprof/prof/tc.py`, 2020, whose list PyTorch's and TensorFlow's profilers took over; for Hopper
and later (`gmma`, `tcgen05`, `nvjet`), CUTLASS 3.x and FlashAttention the names those libraries give. A name says what
a kernel was made for; a list of names can miss new ones.
"""

Interval = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Idle:
    """Time in which nothing computes.

    Attributes:
        cause: Why: `input`, `copies`, `Python`, `synchronisation`, `allocation`, `starting`, or `not known`.
        phase: Where Python was meanwhile; empty where that says nothing.
        seconds: Of a mean step.
    """

    cause: str
    phase: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A kernel, or on a CPU an operator without what it calls.

    Attributes:
        name: As the profiler calls it.
        calls: How often in a mean step.
        seconds: Of a mean step, of all calls together.
        share: Of the step.
        operator: Which asked for most of it; of an operator empty.
        tensor_cores: Whether it computes on tensor cores, by its name; None on a CPU.
        fraction: Of the measured ceiling that binds it, at the least; None where its work was not counted.
        limit: That ceiling's name.
    """

    name: str
    calls: float
    seconds: float
    share: float
    operator: str = ""
    tensor_cores: bool | None = None
    fraction: float | None = None
    limit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledTime:
    """Where a few profiled steps went.

    Attributes:
        device: The kind of device: where it is `cpu`, *busy* is the training thread with operators, fetching apart.
        num_steps: Steps that were looked at.
        step_s: Of a mean one, on the device from when all work of the step before is done until all of its own is.
        busy_s: Of it in which something computes.
        idle: The rest, by cause and phase, largest first: with `busy_s` they sum to `step_s`.
        parts: What takes most, largest first.
        tensor_core_share: Of `busy_s`; None on a CPU.
    """

    device: str
    num_steps: int
    step_s: float
    busy_s: float
    idle: tuple[Idle, ...]
    parts: tuple[Part, ...] = ()
    tensor_core_share: float | None = None

    @property
    def on_device(self) -> bool:
        """Whether it is of a device with a queue, whose idle time has causes in the script."""
        return self.device != "cpu"

    @property
    def busy_share(self) -> float:
        """Share of the step in which something computes."""
        return self.busy_s / self.step_s

    def idle_s(self, *causes: str, phases: Iterable[str] | None = None) -> float:
        """Seconds of a step that are idle for these causes, in these phases or in all."""
        wanted = None if phases is None else {*phases}
        return math.fsum(
            one.seconds for one in self.idle if one.cause in causes and (wanted is None or one.phase in wanted)
        )

    @property
    def by_cause(self) -> dict[str, float]:
        """Idle seconds of a step, by cause; on a CPU by phase: what is not input has no other cause there."""
        found: defaultdict[str, float] = defaultdict(float)
        for one in self.idle:
            found[one.cause if self.on_device or one.cause == INPUT else one.phase] += one.seconds
        return dict(sorted(found.items(), key=lambda item: -item[1]))


def profiled_time(
    profile: Profile, census: Census | None = None, ceilings: Ceilings | None = None, arithmetic: str = ""
) -> ProfiledTime | None:
    """The account; None where no step was seen whole.

    Args:
        profile: What was seen.
        census: What operators compute and move in a step.
        ceilings: The machine's limits.
        arithmetic: In what the device multiplies where an operator's numbers are `float32`: `tf32` is another limit.
    """
    spans = profile.spans()
    if profile.num_steps < 1:
        return None
    device = profile.device != "cpu"
    (begin, end), busy, idle, times = (_device if device else _thread)(spans, profile.ends_ns)
    if end <= begin:
        return None
    mean = 1e-9 / profile.num_steps
    step_s, busy_s = (end - begin) * mean, busy * mean
    parts = [_part(name, calls, profile.num_steps, step_s, device) for name, calls in times.items()]
    cores_s = math.fsum(part.seconds for part in parts if part.tensor_cores)
    parts = _under_limits(parts, _least_s(census, ceilings, arithmetic))
    return ProfiledTime(
        device=profile.device,
        num_steps=profile.num_steps,
        step_s=step_s,
        busy_s=busy_s,
        idle=tuple(
            Idle(cause=cause, phase=phase, seconds=lasted * mean)
            for (cause, phase), lasted in idle.most_common()
            if lasted
        ),
        parts=tuple(sorted(parts, key=lambda part: -part.seconds)[:MOST_PARTS]),
        tensor_core_share=min(cores_s / busy_s, 1.0) if device and busy else None,
    )


Call = tuple[int, str]
"""How long it took, and the operator that asked for it."""

Told = tuple[Interval, int, Counter[tuple[str, str]], dict[str, list[Call]]]
"""From when to when; busy; idle by cause and phase; the calls of each kernel or operator."""


# -- a device ---------------------------------------------------------------------------------------------------------


def _device(spans: Sequence[Span], ends_ns: Sequence[int]) -> Told:
    """The account of a device with a queue, between the moments at which it was done with the first and last step."""
    asked = {span.link: span for span in reversed(spans) if span.kind == "launch" and span.link}
    work = [span for span in spans if span.kind in ("kernel", "transfer")]
    begin, end = (
        max((s.end_ns for s in work if s.link not in asked or asked[s.link].start_ns < until), default=until)
        for until in (ends_ns[0], ends_ns[-1])
    )
    kernels, host = Union((s.start_ns, s.end_ns) for s in work if s.kind == "kernel"), _Host(spans)
    idle: Counter[tuple[str, str]] = Counter()
    at = begin
    for span in work:
        start, stop, by = max(span.start_ns, at), min(span.end_ns, end), asked.get(span.link)
        if at < span.start_ns:
            _blame(idle, host, at, min(span.start_ns, end), by)
        if span.kind == "transfer" and start < stop:
            phase = host.phase_at(by.start_ns) if by is not None else ""
            idle[_waited_in(phase, otherwise=COPIES), phase] += stop - start - kernels.covered(start, stop)
        at = max(at, span.end_ns)
        if at >= end:
            break
    idle[UNKNOWN, ""] += max(end - at, 0)  # nobody has asked for anything
    times: dict[str, list[Call]] = defaultdict(list)
    for span in work:
        lasted = min(span.end_ns, end) - max(span.start_ns, begin)
        if span.kind == "kernel" and lasted > 0:
            times[span.name].append((lasted, span.operator))
    return (begin, end), kernels.covered(begin, end), idle, times


def _blame(idle: Counter[tuple[str, str]], host: _Host, begin: int, end: int, asked: Span | None) -> None:
    """Say why nothing ran on the device from `begin` to `end`, when it was asked for what ran then."""
    if asked is None:
        idle[UNKNOWN, ""] += end - begin
        return
    late = min(max(asked.end_ns, begin), end)
    for cause, phase, lasted in host.did(begin, late):
        idle[cause, phase] += lasted
    idle[QUEUED, ""] += end - late


class _Host:
    """What the host did while a device had nothing to do.

    Python that comes late after it had waited for the device would not be late without that, as far as it had waited:
    that much of what follows is blamed on the wait. So a device that idles because each launch takes longer than its
    kernel is told from one that idles because somebody waits for it in each step.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self._phases = [span for span in spans if span.kind == "phase"]
        self._phase_begins = [span.start_ns for span in self._phases]
        waits = [span for span in spans if span.kind == "wait"]
        self._waits = sorted((w.end_ns, w.end_ns - w.start_ns, _waited_in(self.phase_at(w.start_ns))) for w in waits)
        self._stretches = self._cut([span for span in spans if span.kind == "allocation"], waits)
        self._begins = [begin for begin, *_ in self._stretches]
        self._owed = {COPIES: 0, SYNC: 0}

    def phase_at(self, at: int) -> str:
        """Where Python was; empty where nobody looked."""
        number = bisect_right(self._phase_begins, at) - 1
        return self._phases[number].name if number >= 0 and at < self._phases[number].end_ns else ""

    def _cut(self, allocations: Sequence[Span], waits: Sequence[Span]) -> list[tuple[int, str, str]]:
        """From when on the host was at what: cause, empty for Python's own work, and phase."""
        steps = [(a.start_ns, ALLOCATION, 1) for a in allocations] + [(a.end_ns, ALLOCATION, -1) for a in allocations]
        for wait in waits:
            cause = _waited_in(self.phase_at(wait.start_ns))
            steps += [(wait.start_ns, cause, 1), (wait.end_ns, cause, -1)]
        steps += [(at, "", 0) for span in self._phases for at in (span.start_ns, span.end_ns)]
        under: Counter[str] = Counter()
        found: list[tuple[int, str, str]] = []
        for at, what, by in sorted(steps):
            under[what] += by
            phase = self.phase_at(at)
            cause = next((one for one in (ALLOCATION, COPIES, SYNC) if under[one] > 0), "")
            found.append((at, cause or (INPUT if phase == "data" else ""), phase))
        return found

    def did(self, begin: int, end: int) -> Iterator[tuple[str, str, int]]:
        """Cause, phase and length of each stretch between two moments; called for one pair after the other."""
        number = bisect_right(self._begins, begin) - 1
        while begin < end:
            following = self._begins[number + 1] if number + 1 < len(self._begins) else end
            cause, phase = self._stretches[number][1:] if number >= 0 else ("", "")
            lasted = min(following, end) - begin
            while self._waits and self._waits[0][0] <= begin:
                _, waited, why = self._waits.pop(0)
                self._owed[why] += waited
            if cause:
                yield cause, phase, lasted
            else:
                yield from self._late(phase, lasted)
            if cause in self._owed:  # its wait, which is owed as a whole
                self._owed[cause] -= lasted
            begin, number = min(following, end), number + 1

    def _late(self, phase: str, lasted: int) -> Iterator[tuple[str, str, int]]:
        for cause, owed in self._owed.items():
            covered = max(min(owed, lasted), 0)
            self._owed[cause] -= covered
            lasted -= covered
            if covered:
                yield cause, phase, covered
        if lasted:
            yield PYTHON, phase, lasted


def _waited_in(phase: str, otherwise: str = SYNC) -> str:
    """What it is for that the host waits in a phase, or that bytes are copied: a batch, or a value that is read."""
    return {"copy": COPIES, "sync": SYNC}.get(phase, otherwise)


# -- a thread ---------------------------------------------------------------------------------------------------------


def _thread(spans: Sequence[Span], ends_ns: Sequence[int]) -> Told:
    """The account of the training thread, which is in some phase at each moment."""
    begin, end = ends_ns[0], ends_ns[-1]
    operators = [span for span in spans if span.kind == "operator"]
    computing, busy, at = Union((span.start_ns, span.end_ns) for span in operators), 0, begin
    idle: Counter[tuple[str, str]] = Counter()
    fetching: list[Interval] = []
    for span in (*(one for one in spans if one.kind == "phase"), Span("phase", UNATTRIBUTED, 0, end, end)):
        for phase, until in ((UNATTRIBUTED, span.start_ns), (span.name, span.end_ns)):
            following = max(min(until, end), at)
            if phase == "data":
                fetching.append((at, following))
                idle[INPUT, phase] += following - at
            else:
                computed = computing.covered(at, following)
                busy += computed
                idle[PYTHON, phase] += following - at - computed
            at = following
    return (begin, end), busy, idle, _selves(operators, (begin, end), Union(fetching))


def _selves(operators: Sequence[Span], within: Interval, fetching: Union) -> dict[str, list[Call]]:
    """Each operator's calls without what they call, and without what serves to make a batch."""
    own = [span.end_ns - span.start_ns for span in operators]
    open_: list[int] = []
    for number, span in enumerate(operators):
        while open_ and operators[open_[-1]].end_ns <= span.start_ns:
            open_.pop()
        if open_:
            own[open_[-1]] -= span.end_ns - span.start_ns
        open_.append(number)
    times: dict[str, list[Call]] = defaultdict(list)
    for span, lasted in zip(operators, own, strict=True):
        if within[0] <= span.start_ns < within[1] and not fetching.covered(span.start_ns, span.start_ns + 1):
            times[span.name].append((max(lasted, 0), ""))
    return times


class Union:
    """Intervals that may overlap, as one set.

    >>> Union([(5, 7), (0, 2), (1, 3)]).covered(2, 6)
    2
    """

    def __init__(self, intervals: Iterable[Interval]) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        for begin, end in sorted(intervals):
            if self._ends and begin <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            elif begin < end:
                self._begins.append(begin)
                self._ends.append(end)
        self._before = [0, *accumulate(b - a for a, b in zip(self._begins, self._ends, strict=True))]

    def covered(self, begin: int, end: int) -> int:
        """How much of what lies between two moments belongs to it."""
        return max(self._until(end) - self._until(begin), 0)

    def _until(self, at: int) -> int:
        number = bisect_right(self._begins, at)
        return self._before[number] - (max(self._ends[number - 1] - at, 0) if number else 0)


# -- what takes most, and how far it is from the machine's limits -----------------------------------------------------


def on_tensor_cores(kernel: str) -> bool:
    """Whether a kernel computes on tensor cores, by its name.

    >>> on_tensor_cores("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1")
    True
    >>> on_tensor_cores("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>")
    False
    """
    return any(part in kernel.lower() for part in TENSOR_CORES)


def counted_as(operator: str) -> str:
    """How a census calls what a profiler calls an operator: it counts above the library that computes.

    >>> counted_as("aten::mm"), counted_as("aten::mkldnn_convolution"), counted_as("aten::cudnn_convolution_backward")
    ('mm', 'convolution', 'convolution_backward')
    """
    name = operator.removeprefix("aten::")
    if "convolution" in name:
        return "convolution_backward" if "backward" in name else "convolution"
    return name


def _part(name: str, calls: Sequence[Call], num_steps: int, step_s: float, device: bool) -> Part:
    seconds = sum(lasted for lasted, _ in calls) * 1e-9 / num_steps
    by: Counter[str] = Counter()
    for lasted, operator in calls:
        by[operator] += lasted
    return Part(
        name=name, calls=len(calls) / num_steps, seconds=seconds, share=seconds / step_s,
        operator=by.most_common(1)[0][0], tensor_cores=on_tensor_cores(name) if device else None,
    )  # fmt: skip


def _least_s(census: Census | None, ceilings: Ceilings | None, arithmetic: str) -> dict[str, tuple[float, str]]:
    """By operator as a census calls it: the least time for its work in a step, and the ceiling that asks for most."""
    found: dict[str, tuple[float, str]] = {}
    for operation in census.operations if census is not None and ceilings is not None else ():
        assert ceilings is not None
        dtype = arithmetic if operation.dtype == "float32" and arithmetic else operation.dtype
        limited = least(operation, ceilings, dtype)
        if limited is not None:
            least_s, name = found.get(operation.name, (0.0, ""))
            found[operation.name] = (
                least_s + limited[0],
                limited[1].name if not name or limited[0] > least_s else name,
            )
    return found


def _under_limits(parts: Sequence[Part], least_s: Mapping[str, tuple[float, str]]) -> list[Part]:
    """The same with how far each is from its limit; kernels of one operator share its work by their time."""
    took_s: Counter[str] = Counter()
    for part in parts:
        took_s[counted_as(part.operator or part.name)] += part.seconds  # type: ignore[assignment]
    found = []
    for part in parts:
        name = counted_as(part.operator or part.name)
        wanted_s, limit = least_s.get(name, (0.0, ""))
        if wanted_s > 0 and took_s[name] > 0:
            part = replace(part, fraction=wanted_s / took_s[name], limit=limit)
        found.append(part)
    return found
