"""Scripts on which sound levers are judged: what is hard for a check of numbers, on purpose.

Frozen layers, tied weights, gradients that are zero by construction, losses near zero, batches of one, sums that
cancel, models in bfloat16 and double, sparse gradients, learning rates below the last place of the weights, and what
each script of `numerics_particular` has. In: nothing. Out: scripts by name, each a generator that makes one step at a
time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from numerics_particular import PARTICULAR
from numerics_scripts import FAMILIES, Gpt, LeNet, Pictures, ResNet, forever, text
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

Script = Callable[[], Iterator[None]]


def classify(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    data: Dataset | None = None,
    batch_size: int = 16,
    num_workers: int = 0,
    before: Callable[[torch.Tensor], torch.Tensor] = lambda images: images,
    **loss: Any,
) -> Iterator[None]:
    """The usual loop over pictures and labels."""
    data = data or Pictures(74, 3, 12, 5)
    for images, labels in forever(DataLoader(data, batch_size=batch_size, shuffle=True, num_workers=num_workers)):
        optimizer.zero_grad()
        F.cross_entropy(model(before(images)).float(), labels, **loss).backward()
        optimizer.step()
        yield


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    """Momentum and weight decay on what is trained."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=0.9, weight_decay=1e-4)


def frozen() -> Iterator[None]:
    """A body that is not trained, its statistics fixed, under a head that is."""
    model = ResNet()
    for parameter in [*model.stem.parameters(), *model.blocks.parameters(), *model.norm.parameters()]:
        parameter.requires_grad_(False)
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.eval()
    return classify(model, sgd(model))


def zero_gamma() -> Iterator[None]:
    """Residual branches that are zero at first, and a learning rate that leaves them there."""
    model = ResNet()
    for block in model.blocks:
        nn.init.zeros_(block.norm2.weight)
    return classify(model, sgd(model, 1e-9))


def cumulative_statistics() -> Iterator[None]:
    """BatchNorm with momentum None."""
    model = ResNet()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = None
    return classify(model, sgd(model), label_smoothing=0.2)


def batch_of_one() -> Iterator[None]:
    """One example at a time."""
    model = LeNet()
    return classify(model, torch.optim.Adam(model.parameters()), data=Pictures(74, 1, 12, 5), batch_size=1)


def double() -> Iterator[None]:
    """A model in double precision."""
    model = ResNet().double()
    return classify(model, torch.optim.Adam(model.parameters()), before=lambda images: images.double())


def in_bfloat16() -> Iterator[None]:
    """A model in bfloat16."""
    model = LeNet().bfloat16()
    data = Pictures(74, 1, 12, 5)
    return classify(model, sgd(model), data=data, before=lambda images: images.bfloat16())


def own_autocast() -> Iterator[None]:
    """A script with an autocast of its own."""
    model = ResNet()
    optimizer = sgd(model)
    for images, labels in forever(DataLoader(Pictures(74, 3, 12, 5), batch_size=16, shuffle=True)):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        yield


def fine_tuning() -> Iterator[None]:
    """A learning rate whose updates are hardly larger than the last place of the weights."""
    model = LeNet()
    return classify(model, torch.optim.AdamW(model.parameters(), lr=1e-7), data=Pictures(74, 1, 12, 5))


def offset() -> Iterator[None]:
    """Inputs far from zero, whose differences cancel."""
    model = ResNet()
    return classify(model, sgd(model, 1e-3), before=lambda images: images + 1000)


def fitted() -> Iterator[None]:
    """A loss near zero: gradients are differences of equal numbers."""
    own = torch.Generator().manual_seed(3)
    rows = torch.randn(64, 8, generator=own)
    data = TensorDataset(rows, rows @ torch.randn(8, 3, generator=own))
    model = nn.Linear(8, 3)
    with torch.no_grad():
        solved = torch.linalg.lstsq(rows.double(), data.tensors[1].double()).solution
        model.weight.copy_(solved.T)
        model.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for x, y in forever(DataLoader(data, batch_size=16, shuffle=True)):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        yield


class Words(nn.Module):
    """Sparse gradients of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(29, 16, sparse=True), nn.Linear(16, 29)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embed(tokens)))


def sparse() -> Iterator[None]:
    """SparseAdam beside Adam."""
    model = Words()
    optimizers = [torch.optim.SparseAdam([model.embed.weight]), torch.optim.Adam(model.head.parameters())]
    for tokens, following in forever(DataLoader(text(75, 8, 29), batch_size=8, shuffle=True)):
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(model(tokens).transpose(1, 2), following).backward()
        for optimizer in optimizers:
            optimizer.step()
        yield


class Recurrent(nn.Module):
    """A deep recurrence that amplifies what goes in."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Linear(24, 24), nn.Linear(24, 5)
        nn.init.normal_(self.cell.weight, std=1.6 / 24**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(25):
            x = torch.tanh(self.cell(x))
        return self.head(x)


def amplifying() -> Iterator[None]:
    """Gradients through 25 applications of one layer, which grow."""
    own = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(74, 24, generator=own), torch.randint(0, 5, (74,), generator=own))
    model = Recurrent()
    return classify(model, torch.optim.SGD(model.parameters(), lr=1e-4), data=data)


def gan() -> Iterator[None]:
    """Two models, two optimizers, transposed convolutions."""
    maker = nn.Sequential(
        nn.ConvTranspose2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.ConvTranspose2d(16, 1, 4, 2), nn.Tanh()
    )
    judge = nn.Sequential(nn.Conv2d(1, 16, 4, 2), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(144, 1))
    optimizers = [torch.optim.Adam(m.parameters(), lr=2e-4, betas=(0.5, 0.999)) for m in (judge, maker)]
    for images, _ in forever(DataLoader(Pictures(74, 1, 8, 5), batch_size=16, shuffle=True)):
        fake = maker(torch.randn(len(images), 8, 1, 1))
        optimizers[0].zero_grad()
        (F.softplus(-judge(images)).mean() + F.softplus(judge(fake.detach())).mean()).backward()
        optimizers[0].step()
        optimizers[1].zero_grad()
        F.softplus(-judge(fake)).mean().backward()
        optimizers[1].step()
        yield


class Volumes(nn.Module):
    """3D and grouped convolutions, group and layer norms, weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(1, 8, 3, padding=1), nn.Conv3d(8, 8, 3, groups=4)
        self.norm = nn.GroupNorm(2, 8)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(8, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.unsqueeze(1).reshape(len(x), 1, 3, 12, 12)
        x = F.silu(self.second(F.pad(self.norm(F.silu(self.first(x))), (0, 0, 0, 0, 1, 1))))
        return self.head(x.mean((2, 3, 4)))


def volumes() -> Iterator[None]:
    """NAdam on convolutions of three dimensions."""
    model = Volumes()
    return classify(model, torch.optim.NAdam(model.parameters(), lr=1e-3))


def checkpointed() -> Iterator[None]:
    """Activations computed again in the backward pass, and four micro-batches to an update."""
    from torch.utils.checkpoint import checkpoint

    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = ResNet()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.relu(self.inner.norm(self.inner.stem(x)))
            x = checkpoint(self.inner.blocks[1], x, use_reentrant=False)
            return self.inner.head(x.mean((2, 3))) if x.shape[1] == 16 else x

    model = Saving()
    optimizer = torch.optim.RMSprop([p for p in model.parameters() if p.requires_grad], lr=1e-4, centered=True)
    loader = forever(DataLoader(Pictures(74, 3, 12, 5), batch_size=8, shuffle=True))
    while True:
        for _ in range(4):
            images, labels = next(loader)
            (F.cross_entropy(model(images), labels) / 4).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


def encoder() -> Iterator[None]:
    """PyTorch's own transformer layers with dropout, bidirectional GRU on top, Adagrad."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(29, 16)
            self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
            self.gru, self.head = nn.GRU(16, 8, batch_first=True, bidirectional=True), nn.Linear(16, 29)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.gru(self.layer(self.embed(tokens)))[0])

    model = Both()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=1e-2)
    for tokens, following in forever(DataLoader(text(75, 8, 29), batch_size=8, shuffle=True)):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).transpose(1, 2), following, label_smoothing=0.1).backward()
        optimizer.step()
        yield


def gpt_at_start() -> Iterator[None]:
    """A transformer that is hardly trained yet: what its projections have is zero."""
    model = Gpt()
    for layer in model.layers:
        nn.init.zeros_(layer.out.weight)
        nn.init.zeros_(layer.down.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    for tokens, following in forever(DataLoader(text(75, 12, 29), batch_size=8, shuffle=True)):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).reshape(-1, 29), following.reshape(-1)).backward()
        optimizer.step()
        yield


class Spectral(nn.Module):
    """A layer in the frequencies of its input, with complex weights and a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.2 * torch.randn(8, 12, 12, dtype=torch.cfloat))
        self.register_buffer("turn", torch.polar(torch.ones(8), torch.linspace(0, 1, 8)))
        self.head = nn.Linear(12 * 16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modes = torch.fft.rfft(x.flatten(2).mean(1).reshape(len(x), 9, 16), dim=2)[..., :8]
        mixed = torch.einsum("bim,mio->bom", F.pad(modes, (0, 0, 0, 3)), self.weight) * self.turn
        return self.head(torch.relu(torch.fft.irfft(mixed, n=16, dim=2)).flatten(1))


def spectral() -> Iterator[None]:
    """Weights that are complex numbers."""
    model = Spectral()
    return classify(model, torch.optim.Adam(model.parameters(), lr=1e-3))


def with_worker() -> Iterator[None]:
    """A loader with a worker process."""
    model = LeNet()
    return classify(model, sgd(model), data=Pictures(74, 1, 12, 5), num_workers=1)


SCRIPTS: dict[str, Script] = {
    **FAMILIES,
    "frozen body": frozen,
    "zero gamma, not trained": zero_gamma,
    "cumulative statistics": cumulative_statistics,
    "batch of one": batch_of_one,
    "double": double,
    "model in bfloat16": in_bfloat16,
    "autocast of its own": own_autocast,
    "learning rate 1e-7": fine_tuning,
    "inputs offset by 1000": offset,
    "loss near zero": fitted,
    "sparse embedding": sparse,
    "amplifying recurrence": amplifying,
    "gan": gan,
    "3D, groups, weight norm": volumes,
    "checkpoints, 4 micro-batches": checkpointed,
    "encoder and GRU": encoder,
    "gpt at its start": gpt_at_start,
    "complex weights": spectral,
    "one worker": with_worker,
    **PARTICULAR,
}

SETS: tuple[dict[str, dict[str, Any]], ...] = (
    {"channels_last": {}},
    {"threads": {"num": 2}},
    {"fused_optimizer": {}},
    {"foreach_optimizer": {}},
    {"bf16": {}},
    {"fused_fetch": {}},
    {"sample_store": {}},
    {"virtual_workers": {}},
    {"workers": {"num": 1}},
    {"channels_last": {}, "fused_optimizer": {}},
    {"bf16": {}, "channels_last": {}, "fused_optimizer": {}},
    {"foreach_optimizer": {}, "threads": {"num": 2}, "fused_fetch": {}},
)

UNSOUND = {
    ("inputs offset by 1000", "bf16"): "bfloat16 has 4 or 8 between neighbours there: the pictures are gone",
    ("inputs offset by 1000", "bf16+channels_last+fused_optimizer"): "the same",
}
"""Pairs that are not sound, although the lever is: why not. They must be rejected."""

LATE_STEPS = (100, 300)
LATE_SETS: tuple[dict[str, dict[str, Any]], ...] = ({"bf16": {}}, {"channels_last": {}}, {"threads": {"num": 2}})
"""The five families once more, late: where losses are low, one or two examples make up a gradient."""

COMPILED = ("lenet", "gpt", "vae")
"""Scripts on which compilation is judged too; each takes tens of seconds."""

FORCED = ("bf16", "threads")
"""Levers that are sound on every machine, whether or not they would gain anything on this one."""
