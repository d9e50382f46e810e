"""Which levers are there? The registry: one line a lever, in the order in which they build on each other.

In: nothing. Out: one verified instance of each lever, by name. Importing a lever imports no framework: the parent
reads descriptions, the child engages.
"""

from __future__ import annotations

from flatout.frameworks.pytorch.levers.attention import Attention
from flatout.frameworks.pytorch.levers.batch_size import BatchSize
from flatout.frameworks.pytorch.levers.bf16 import Bf16
from flatout.frameworks.pytorch.levers.bf16_gradients import Bf16Gradients
from flatout.frameworks.pytorch.levers.channels_last import ChannelsLast
from flatout.frameworks.pytorch.levers.checkpointing import Checkpointing
from flatout.frameworks.pytorch.levers.checkpoints import Checkpoints
from flatout.frameworks.pytorch.levers.compile import Compile
from flatout.frameworks.pytorch.levers.cudnn_benchmark import CudnnBenchmark
from flatout.frameworks.pytorch.levers.decoded_store import DecodedStore
from flatout.frameworks.pytorch.levers.device_prefetch import DevicePrefetch
from flatout.frameworks.pytorch.levers.device_store import DeviceStore
from flatout.frameworks.pytorch.levers.expandable_segments import ExpandableSegments
from flatout.frameworks.pytorch.levers.float8 import Float8
from flatout.frameworks.pytorch.levers.foreach_optimizer import ForeachOptimizer
from flatout.frameworks.pytorch.levers.fused_fetch import FusedFetch
from flatout.frameworks.pytorch.levers.fused_optimizer import FusedOptimizer
from flatout.frameworks.pytorch.levers.gradient_buckets import GradientBuckets
from flatout.frameworks.pytorch.levers.heap import Heap
from flatout.frameworks.pytorch.levers.huge_pages import HugePages
from flatout.frameworks.pytorch.levers.numa import Numa
from flatout.frameworks.pytorch.levers.pinned_memory import PinnedMemory
from flatout.frameworks.pytorch.levers.ranks import Ranks
from flatout.frameworks.pytorch.levers.read_ahead import ReadAhead
from flatout.frameworks.pytorch.levers.sample_store import SampleStore
from flatout.frameworks.pytorch.levers.tf32 import Tf32
from flatout.frameworks.pytorch.levers.threads import Threads
from flatout.frameworks.pytorch.levers.virtual_workers import VirtualWorkers
from flatout.frameworks.pytorch.levers.workers import Workers
from flatout.records.plan import Lever, verify

LEVERS: tuple[type[Lever], ...] = (
    Numa,
    Heap,
    HugePages,
    ExpandableSegments,
    Threads,
    Workers,
    FusedFetch,
    SampleStore,
    VirtualWorkers,
    DecodedStore,
    ReadAhead,
    PinnedMemory,
    DevicePrefetch,
    DeviceStore,
    CudnnBenchmark,
    Tf32,
    ChannelsLast,
    FusedOptimizer,
    ForeachOptimizer,
    Attention,
    Checkpointing,
    Compile,
    Bf16,
    Float8,
    Ranks,
    GradientBuckets,
    Bf16Gradients,
    Checkpoints,
    BatchSize,
)


def registry() -> dict[str, Lever]:
    """Every lever by name, each checked against the contract."""
    found: dict[str, Lever] = {}
    for kind in LEVERS:
        lever = kind()
        verify(lever)
        if lever.name in found:
            raise TypeError(f"two levers are named {lever.name!r}")
        found[lever.name] = lever
    return found
