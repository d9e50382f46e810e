"""Models that are computed in stages: what passes from one to the next, and what is read in several of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

from .scenarios import Trained, left, mlp, samples, trained


def deep() -> nn.Sequential:
    torch.manual_seed(3)
    inner = [part for _ in range(4) for part in (nn.Linear(16, 16), nn.ReLU(inplace=True))]
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), *inner, nn.Linear(16, 5))


class Block(nn.Module):
    """Attention and an MLP, each added to what entered."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.norms[0](x)
        x = x + self.attention(h, h, h, attn_mask=mask, need_weights=False)[0]
        found: Tensor = x + self.mlp(self.norms[1](x))
        return found


class Positions(nn.Module):
    """A mask that a module makes, which every block is given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, length: int) -> Tensor:
        return self.scale * torch.full((length, length), -1e9).triu(1)


@dataclass
class Output:
    """What a language model returns."""

    logits: Tensor
    loss: Tensor | None = None


class Gpt(nn.Module):
    """Tied words, positions that the model itself reads, blocks that may be computed again, a buffer."""

    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(37, 16)
        self.places = nn.Parameter(torch.randn(1, 16, 16) * 0.1)
        self.mask = Positions()
        self.blocks = nn.ModuleList(Block(16) for _ in range(4))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 37, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("temperature", torch.tensor(0.9))
        self.again = again

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Output:
        h = self.words(x) + self.places[:, : x.shape[1]]
        mask = self.mask(x.shape[1])
        for block in self.blocks:
            h = torch.utils.checkpoint.checkpoint(block, h, mask, use_reentrant=False) if self.again else block(h, mask)
        logits = self.head(self.norm(h)) / self.temperature
        if targets is None:
            return Output(logits)
        return Output(logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100))


def _texts(model: nn.Module, loss_of: Callable[[nn.Module, Tensor], Tensor], num: int = 6) -> Trained:
    generator = torch.Generator().manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    said: list[Any] = []
    for number in range(num):
        x = torch.randint(0, 37, (6 if number % 3 else 5, 9 + number % 2), generator=generator)
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.eval()
        with torch.no_grad():
            said.append([round(loss.item(), 4), round(loss_of(model, x).item(), 4)])
        model.train()
    return left(said, model)


def a_chain_of_layers() -> Trained:
    return trained(deep())


def blocks_of_a_language_model() -> Trained:
    torch.manual_seed(5)
    return _texts(Gpt(), lambda m, x: F.cross_entropy(m(x[:, :-1]).logits.flatten(0, 1), x[:, 1:].flatten()))


def a_language_model_that_returns_its_loss() -> Trained:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        targets = x[:, 1:].masked_fill(x[:, 1:] < 9, -100)
        found: Tensor = model(x[:, :-1], targets=targets).loss
        return found

    torch.manual_seed(5)
    return _texts(Gpt(), loss_of)


def blocks_that_are_computed_again() -> Trained:
    torch.manual_seed(5)
    return _texts(Gpt(again=True), lambda m, x: F.cross_entropy(m(x[:, :-1]).logits.flatten(0, 1), x[:, 1:].flatten()))


class Translation(nn.Module):
    """An encoder whose outputs every layer of a decoder is given."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(37, 16)
        self.inner = nn.Transformer(16, 4, 2, 3, 32, dropout=0.0, batch_first=True)
        self.last = nn.Linear(16, 37)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1])
        found: Tensor = self.last(self.inner(self.words(x), self.words(y), tgt_mask=mask, tgt_is_causal=True))
        return found


def an_encoder_and_a_decoder() -> Trained:
    torch.manual_seed(6)
    return _texts(
        Translation(), lambda m, x: F.cross_entropy(m(x, x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    )  # fmt: skip


class Skipping(nn.Module):
    """What is computed early is added late: stages may begin only where that has happened, or has not begun."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.middle, self.last = nn.Linear(8, 16), deep(), mlp()
        self.middle[0], self.middle[-1] = nn.Linear(16, 16), nn.Linear(16, 16)
        self.then = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(x)
        found: Tensor = self.last(self.then(self.middle(h.clone()) + h))
        return found


def something_added_late() -> Trained:
    torch.manual_seed(7)
    return trained(Skipping())


class Recurrent(nn.Module):
    """Its state goes in and comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn, self.last = nn.Embedding(37, 16), nn.LSTM(16, 16, 2), nn.Linear(16, 37)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        found, state = self.rnn(self.words(x), state)
        return self.last(found), state


def a_state_that_is_carried_on() -> Trained:
    torch.manual_seed(8)
    model, generator = Recurrent(), torch.Generator().manual_seed(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    state, said = (torch.zeros(2, 6, 16), torch.zeros(2, 6, 16)), []
    for _ in range(6):
        x = torch.randint(0, 37, (9, 6), generator=generator)
        state = tuple(one.detach() for one in state)
        out, state = model(x[:-1], state)
        loss = F.cross_entropy(out.flatten(0, 1), x[1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        said.append([round(loss.item(), 4), round(state[0].mean().item(), 4)])
    return left(said, model)


class Turning(nn.Module):
    """After a while it takes its layers in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.last, self.turned = nn.Linear(8, 5), False

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[::-1] if self.turned else self.layers:
            x = torch.tanh(layer(x))
        found: Tensor = self.last(x)
        return found


def layers_in_another_order_for_evaluation() -> Trained:
    torch.manual_seed(9)
    model = Turning()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x, y = samples()
    said = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        model.turned = True
        with torch.no_grad():
            said.append([round(loss.item(), 4), round(F.cross_entropy(model(x), y).item(), 4)])
        model.turned = False
    return left(said, model)


class Hopping(nn.Module):
    """Which layers it takes depends on the numbers of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.last = nn.ModuleList(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:3] if x.abs().max() > 100 else self.layers:
            x = torch.tanh(layer(x))
        found: Tensor = self.last(x)
        return found


def a_call_that_leaves_layers_out() -> Trained:
    torch.manual_seed(10)
    model = Hopping()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = samples()
    said = []
    for number in range(7):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x * (200 if number == 5 else 1)), y)
        loss.backward()
        optimizer.step()
        said.append(round(loss.item(), 4))
    return left(said, model)


class Cell(nn.Module):
    """One cell again and again; what is computed early is added late, times a share that may be nought."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.last, self.skip = nn.Linear(8, 16), nn.Linear(16, 5), nn.Linear(16, 5)
        self.cell, self.share = nn.Sequential(nn.Linear(16, 16), nn.Tanh()), 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = first = self.enter(x)
        for _ in range(5):
            h = self.cell(h)
        return self.last(h) + self.share * self.skip(first)


def something_early_that_is_seen_late_after_a_while() -> Trained:
    torch.manual_seed(11)
    model, said = Cell(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = samples()
    for number in range(6):
        model.share = max(0.0, (number - 2) / 3)
        some = torch.randperm(len(x))[:12]
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x[some]), y[some])
        loss.backward()
        optimizer.step()
        said.append(round(loss.item(), 4))
    return left(said, model)


IN_TWO_STAGES = (a_state_that_is_carried_on, something_early_that_is_seen_late_after_a_while)
"""More there cannot be: what is computed early is seen late."""

SAME = (
    a_chain_of_layers, blocks_of_a_language_model,
    a_language_model_that_returns_its_loss, blocks_that_are_computed_again, an_encoder_and_a_decoder,
    something_added_late, layers_in_another_order_for_evaluation,
)  # fmt: skip
"""Each ends in stages as in one process."""


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(5, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def one_layer() -> Trained:
    return trained(OneLayer())


class Counting(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = deep()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.inner(x)
        return found


def calls_that_are_counted() -> Trained:
    return trained(Counting())


class Talking(Counting):
    def forward(self, x: Tensor) -> Tensor:
        print("forward")
        found: Tensor = self.inner(x)
        return found


def calls_that_print() -> Trained:
    return trained(Talking())


def checkpoints_that_enter_again() -> Trained:
    again, model = torch.utils.checkpoint.checkpoint, Counting()
    model.forward = lambda x: again(model.inner, x, use_reentrant=True)  # type: ignore[method-assign]

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x.requires_grad_()), y)

    return trained(model, loss_of)


REFUSED = {
    one_layer: "do not make", calls_that_are_counted: "what ranks keep as `calls`",
    calls_that_print: "prints", checkpoints_that_enter_again: "use_reentrant",
    a_call_that_leaves_layers_out: "stage",
}  # fmt: skip
"""And what is said of each."""
