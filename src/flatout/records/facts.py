"""What did a script turn out to do, as levers need to know it? In and out: records; plain values that anybody can read.

This module is imported in the user's process: it needs the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """One outermost model call that training makes."""

    name: str
    trained: bool = True
    """Whether an optimizer has parameters of it; a teacher or a reference model has none."""
    num_parameters: int
    num_modules: int
    dtypes: tuple[str, ...]
    convolution_dims: tuple[int, ...]
    recurrent: bool = False
    compiled: bool = False
    calls_per_step: float = 1.0
    num_repeated_blocks: int = 0
    """Parts that are the same again and again, such as the layers of a transformer."""
    num_input_shapes: int = 1
    """How many different shapes its inputs had in the steps that were looked at."""
    batch_sizes: tuple[int, ...] = ()
    """First dimensions of its first input in these steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """One optimizer that made an update."""

    name: str
    fused: bool = False
    foreach: bool = False
    can_fuse: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderFacts:
    """One data loader from which training drew batches."""

    dataset: str
    batch_size: int | None = None
    num_batches: int | None = None
    num_workers: int = 0
    prefetch_factor: int | None = None
    pinned: bool = False
    iterable: bool = False
    changeable: bool = True
    """Whether worker settings can be changed from outside."""
    batch_bytes: int | None = None
    """Bytes of the tensors in one batch; None where they cannot be counted."""
    why_not: Mapping[str, str | None] = field(default_factory=dict)
    """By lever: why it cannot do its work with these batches; None where it can, nothing where nobody looked."""

    def refusal(self, lever: str) -> str | None:
        """Why that lever cannot do its work here; None where it can.

        >>> LoaderFacts(dataset="Rows", why_not={"sample_store": None}).refusal("sample_store") is None
        True
        """
        return self.why_not.get(lever, "not looked at")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of the GPU as the framework's allocator counts it, since the process began."""

    allocated_bytes: int
    """In tensors, at the peak."""
    reserved_bytes: int
    """Held by the process, for tensors or between them, at the peak."""
    num_retries: int = 0
    """Times that nothing fitted until all that was free had been given back."""

    @property
    def free_fraction(self) -> float:
        """Share of what is held at the peak that no tensor has: memory in gaps.

        >>> DeviceMemory(allocated_bytes=6, reserved_bytes=8).free_fraction
        0.25
        """
        return 1 - self.allocated_bytes / self.reserved_bytes if self.reserved_bytes else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyThread:
    """A Python thread of the script's that computes beside the one that trains."""

    name: str
    place: str
    """`file:line` where it was seen most often."""
    cpu_fraction: float
    """CPU time that it took, as a share of the time."""


NOT_LOOKED_AT = "looked at in a trial only"
"""Why nothing is known in a run, of a loader's batches for example."""

EndedBy: TypeAlias = Literal["optimizer", "loader", "call", "inference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the script turned out to do, as levers need to know it."""

    device: str
    models: tuple[ModelFacts, ...]
    optimizers: tuple[OptimizerFacts, ...]
    loaders: tuple[LoaderFacts, ...]
    num_threads: int
    autocast: bool = False
    grad_scaler: bool = False
    distributed: bool = False
    matmul_precision: str = "highest"
    gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that parameters lie on, where there is one process; empty where nobody knows all."""
    convolution_tf32: bool = False
    """Whether a GPU computes float32 convolutions in TF32."""
    cudnn_benchmark: bool = False
    step_rhythm: EndedBy = "optimizer"
    """What ends a step: an optimizer's update, a fetch, or, where neither shows, the next call of the model; where
    nothing is trained, the end of its call."""
    attention: tuple[str, ...] | None = None
    """Backends that compute `scaled_dot_product_attention`, none where it is not called; None in a run."""
    softmax: bool = False
    """Whether a model takes a softmax of its own, as attention that is written by hand does; looked at in trials."""
    attention_chosen: bool = False
    """Whether the script has switched backends of it off."""
    warm_up_step_s: float = 0.0
    page_faults_per_step: int | None = None
    """First touches of fresh memory in a step: pages that the kernel had to clear; None where a lever decides them."""
    num_ranks: int = 1
    """Processes among which `flatout run --ranks` divides what the script trains."""
    rank_mode: str = ""
    """How, one of `flatout.records.ranks.MODES`; empty for one process."""
    device_memory: DeviceMemory | None = None
    """What the GPU's memory was asked for; None without a GPU."""
    debug_switches: tuple[str, ...] = ()
    """What checks or slows each step and can be turned off between two, such as anomaly detection."""
    set_from_outside: tuple[str, ...] = ()
    """What may slow each step and is set for the process, such as `CUDA_LAUNCH_BLOCKING=1`, or watches it."""
    busy_threads: tuple[BusyThread, ...] = ()
    """Python threads that compute beside the one that trains; none in a run."""
    several_threads: bool = False
    """Whether more than one thread calls the models, where nothing is trained."""
    not_measured: str = ""
    """Why the time of steps cannot be measured on this device; empty where it can."""

    @property
    def infers(self) -> bool:
        """Whether the script calls models and trains none, so that a step is a call."""
        return self.step_rhythm == "inference"

    @property
    def main_models(self) -> tuple[ModelFacts, ...]:
        """The models that an optimizer trains; where nothing is trained, all that are called."""
        return tuple(model for model in self.models if model.trained or self.infers)
