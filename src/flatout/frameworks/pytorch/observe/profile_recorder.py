"""What does PyTorch's own profiler see of a few steps? Its events, with where Python was in each step, as one record.

In: the training thread's steps and phases from `start` to `stop`. Out: a `Profile`. Loaded in trials only, for a window
of their own. A script that profiles itself is left to do so.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

import torch

from flatout.frameworks.pytorch.observe import devices
from flatout.frameworks.pytorch.seams.patches import Patch
from flatout.records.profile import Profile, Span, profile_of

MARK = "flatout: a step ends here"
"""An event of ours, by which the profiler's clock is held against the host's."""

MOST_SPANS = 50_000
"""Of more the last steps are left out, but for one: some 2 MB in the trace."""

CALLS = {
    "wait": ("Synchronize",),
    "allocation": ("Malloc", "MemAlloc", "cudaFree", "MemFree", "HostAlloc", "MemCreate", "MemMap", "MemUnmap"),
    "launch": ("Launch", "Memcpy", "Memset"),
}
"""Calls of the driver by parts of their names.

Source: NVIDIA, "CUDA Runtime API" and "CUDA Driver API", 2025, whose calls CUPTI reports by name; HIP's differ in their
first letters alone.
"""

BETWEEN_HOSTS = ("HtoD", "DtoH")
"""Copies from the host or to it, as CUPTI calls them; others are a device's own work, as kernels are."""


class Kineto:
    """PyTorch's profiler, told to see operators, and a device's work where there is one."""

    def __init__(self, where: torch.device) -> None:
        self._profile = torch.autograd.profiler.profile(
            use_kineto=True, use_device=where.type if devices.has_queue(where) else None
        )
        self._patch: Patch | None = None

    def start(self) -> None:
        """See from here on.

        Raises:
            RuntimeError: The script profiles itself.
        """
        if torch.autograd.profiler._is_profiler_enabled:
            raise RuntimeError("the script uses the profiler itself")
        self._patch = Patch(torch.autograd.profiler.profile, "_prepare_trace", self._before)
        self._profile.__enter__()

    def _before(self, original: Any, patch: Patch) -> Any:
        """Where the script begins to profile itself, this one ends: there can be one only."""

        @wraps(original)
        def prepare(profile: Any, *args: Any, **kwargs: Any) -> Any:
            if patch.active and profile is not self._profile:
                self._close()
            return original(profile, *args, **kwargs)

        return prepare

    def _close(self) -> None:
        patch, self._patch = self._patch, None
        if patch is not None:
            patch.remove()
            self._profile.__exit__(None, None, None)

    def mark(self) -> None:
        """Put an event of ours among the others."""
        with torch.autograd.profiler.record_function(MARK):
            pass

    def stop(self) -> list[Any]:
        """All events; after this nothing is seen any more."""
        self._close()
        found = self._profile.kineto_results
        return [] if found is None else list(found.events())


class ProfileRecorder:
    """Notes steps and phases beside what the profiler sees.

    Args:
        where: The device that trains.
        on_failure: Told where noting fails; training goes on.
    """

    def __init__(self, where: torch.device, on_failure: Callable[[str, BaseException], None] | None = None) -> None:
        self._where = where
        self._on_failure = on_failure
        self._kineto: Kineto | None = None
        self._marks_s: list[float] = []
        self._phases: list[tuple[float, str]] = []

    def start(self) -> None:
        """Begin; what the profiler's start takes, and the step after it, belong to no step that counts."""
        try:
            self._kineto = Kineto(self._where)
            self._kineto.start()
        except Exception as problem:  # noqa: BLE001  training goes on unprofiled
            self._fail(problem)

    def note(self, phase: str, at_s: float) -> None:
        """From a moment of `time.perf_counter` on Python is in that phase."""
        if self._kineto is not None:
            self._phases.append((at_s, phase.partition(": ")[0]))

    def end_step(self, at_s: float) -> None:
        """A step has ended; what follows is ours, until another phase is noted."""
        if self._kineto is None:
            return
        try:
            self._marks_s.append(at_s)
            self._kineto.mark()
            self.note("recorder", at_s)
        except Exception as problem:  # noqa: BLE001
            self._fail(problem)

    def stop(self) -> Profile | None:
        """End, and leave nothing behind: what was seen; None where nothing was."""
        kineto, self._kineto = self._kineto, None
        if kineto is None:
            return None
        try:
            return self._made(kineto.stop())
        except Exception as problem:  # noqa: BLE001
            self._kineto = kineto
            self._fail(problem)
            return None

    def _fail(self, problem: Exception) -> None:
        kineto, self._kineto = self._kineto, None
        try:
            if kineto is not None:
                kineto.stop()
        except Exception:  # noqa: BLE001  it has failed already, and is told of once
            pass
        if self._on_failure is not None:
            self._on_failure("recorder", problem)

    def _made(self, events: list[Any]) -> Profile:
        seen = [event for event in events if event.name() == MARK and _is_on_host(event)]
        if len(seen) != len(self._marks_s) or len(seen) < 2:
            raise RuntimeError(f"the profiler has seen {len(seen)} of {len(self._marks_s)} ends of steps")
        stood_s, zero_ns = self._marks_s[0], seen[0].start_ns()
        shift_ns = statistics.median(
            event.start_ns() - zero_ns - 1e9 * (at_s - stood_s) for event, at_s in zip(seen, self._marks_s, strict=True)
        )
        ends_ns = tuple(event.start_ns() - zero_ns for event in seen)
        spans = [*spans_of(events, zero_ns, seen[0].start_thread_id(), on_device=devices.has_queue(self._where))]
        stops = [*(round(1e9 * (at_s - stood_s) + shift_ns) for at_s, _ in self._phases[1:]), ends_ns[-1]]
        begins = [round(1e9 * (self._phases[0][0] - stood_s) + shift_ns) if self._phases else 0, *stops]
        spans += [
            Span("phase", name, 0, begin, end)
            for (_, name), begin, end in zip(self._phases, begins, stops, strict=False)
            if end > begin
        ]
        while len(ends_ns) > 2 and len(spans) > MOST_SPANS:
            ends_ns = ends_ns[:-1]
            spans = [span for span in spans if span.start_ns < ends_ns[-1]]
        zero_s = stood_s - shift_ns / 1e9
        return profile_of(spans, device=self._where.type, ends_ns=ends_ns, zero_s=zero_s)


def spans_of(events: Iterable[Any], zero_ns: int, thread: int, *, on_device: bool) -> Iterator[Span]:
    """What is kept of the profiler's events: of a device its work and the calls behind it, else the thread's operators.

    Source: `torch/autograd/profiler.py`, `_parse_kineto_results`, PyTorch 2.13: an event's `linked_correlation_id` is
    the `correlation_id` of the operator around it; a kernel and the call that launched it share their own.
    """
    events = list(events)
    operators = {e.correlation_id(): e.name() for e in events if e.activity_type() == "cpu_op"} if on_device else {}
    for event in events:
        what, name, lane, link, operator = event.activity_type(), event.name(), 0, 0, ""
        if what in ("kernel", "gpu_memcpy", "gpu_memset"):
            kind = "transfer" if any(word in name for word in BETWEEN_HOSTS) else "kernel"
            lane, link = event.device_resource_id(), event.correlation_id()
            operator = operators.get(event.linked_correlation_id(), "")
        elif what in ("cuda_runtime", "cuda_driver"):
            kind = next((one for one, words in CALLS.items() if any(word in name for word in words)), "")
            link = event.correlation_id()
        else:
            of_thread = what == "cpu_op" and event.start_thread_id() == thread
            kind = "operator" if of_thread and not on_device else ""
        if kind:
            start_ns = event.start_ns() - zero_ns
            yield Span(kind, name, lane, start_ns, start_ns + event.duration_ns(), link, operator)


def _is_on_host(event: Any) -> bool:
    return bool(event.activity_type() == "user_annotation")
