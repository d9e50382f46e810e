"""A training of 200 steps: plainly, by hand on ranks under torchrun, or with each batch in N parts.

    python ranked.py MODEL OPTIMIZER [--steps 200] [--parts N] [--smooth] [--save FILE] [--times] [--memory]
                     [--by-hand MODE]

As a script of one process (for `flatout run --ranks`) it knows nothing of ranks; `--by-hand` is what an expert writes:
DistributedDataParallel (`replicate`), `fully_shard` for each block and the whole (`shard`), or `parallelize_module`
for pairs of linear layers (`tensor`; it has no style for PyTorch's attention).
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.nn.functional as F
from torch import nn


def model_of(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A model, inputs and targets of one batch after the other: (number of batches, batch, ...)."""
    torch.manual_seed(0)
    if name == "mlp":
        model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
        return model, torch.randn(20, 128, 256), torch.randint(0, 10, (20, 128))
    if name == "convolutions":
        model = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, padding=1), nn.ReLU(),
            nn.Conv2d(64, 64, 3, 2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 64, 10),
        )  # fmt: skip
        return model, torch.randn(20, 64, 3, 32, 32), torch.randint(0, 10, (20, 64))
    if name == "large":  # 100 M parameters
        blocks = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(12)]
        return nn.Sequential(*blocks, nn.Linear(1024, 10)), torch.randn(4, 16, 1024), torch.randint(0, 10, (4, 16))
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    model = nn.Sequential(nn.Linear(32, 128), encoder, nn.Linear(128, 10))
    return model, torch.randn(20, 32, 64, 32), torch.randint(0, 10, (20, 32, 64))


def made_smooth(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Inputs from which targets can be learned, and a model without kinks: rounding is not enlarged by a training."""
    for part in model.modules():
        for name, inner in part.named_children():
            if isinstance(inner, nn.ReLU):
                setattr(part, name, nn.GELU())
        if isinstance(part, nn.TransformerEncoderLayer):
            part.activation = F.gelu
    templates = torch.randn(10, *inputs.shape[targets.dim() :], generator=torch.Generator().manual_seed(1))
    return 0.5 * inputs + templates[targets]


def sharded(model: nn.Module) -> None:
    """What the documentation of `fully_shard` shows: each block, then the model."""
    from torch.distributed.fsdp import fully_shard

    encoder = next((part for part in model if isinstance(part, nn.TransformerEncoder)), None)
    blocks = encoder.layers if encoder is not None else model
    for block in blocks:
        if any(True for _ in block.parameters()):
            fully_shard(block)
    fully_shard(model)


def divided(model: nn.Module, world: int) -> None:
    """What the tutorial of `parallelize_module` shows: the first layer of a pair by columns, the last one by rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world,))
    encoder = next((part for part in model if isinstance(part, nn.TransformerEncoder)), None)
    if encoder is not None:
        for layer in encoder.layers:
            parallelize_module(layer, mesh, {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()})
        return
    blocks = [part for part in model if isinstance(part, nn.Sequential)] or [model]
    for block in blocks:
        parallelize_module(block, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def peak_bytes() -> int:
    """The most that was resident."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=("mlp", "convolutions", "transformer", "large"))
    parser.add_argument("optimizer", choices=("sgd", "adamw"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--parts", type=int, default=1, help="sum the gradients of each batch in so many parts")
    parser.add_argument("--smooth", action="store_true", help="a training that does not enlarge rounding")
    parser.add_argument("--by-hand", choices=("replicate", "shard", "tensor"))
    parser.add_argument("--memory", action="store_true", help="print the most memory that was resident, in bytes")
    parser.add_argument("--save")
    parser.add_argument("--times", action="store_true", help="print the seconds of each step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, inputs, targets = model_of(arguments.model)
    if arguments.smooth:
        inputs = made_smooth(model, inputs, targets)
    plain, rank, world = model, 0, 1
    if arguments.by_hand:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
        if arguments.by_hand == "replicate":
            model = nn.parallel.DistributedDataParallel(model)
        elif arguments.by_hand == "shard":
            sharded(model)
        else:
            divided(model, world)
            rank, world = 0, 1  # every rank has the whole batch
    parameters = model.parameters()
    if arguments.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=0.01, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    num = inputs.shape[1]
    low, high = num * rank // world, num * (rank + 1) // world
    seconds = []
    for step in range(arguments.steps):
        begun_s = time.perf_counter()
        x, y = inputs[step % len(inputs), low:high], targets[step % len(inputs), low:high]
        optimizer.zero_grad()
        for part_x, part_y in zip(x.chunk(arguments.parts), y.chunk(arguments.parts), strict=True):
            loss = F.cross_entropy(model(part_x).flatten(0, -2), part_y.flatten()) * (len(part_x) / len(x))
            loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begun_s)
    is_first = int(os.environ.get("RANK", "0")) == 0
    if is_first and arguments.save:
        torch.save(plain.state_dict(), arguments.save)
    if is_first and arguments.memory:
        print("memory", peak_bytes(), flush=True)
    if is_first and arguments.times and not os.environ.get("QUIET"):
        print("times", *(f"{s:.6f}" for s in seconds), flush=True)


if __name__ == "__main__":
    main()
