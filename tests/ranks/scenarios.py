"""Small trainings in which everything is printed that a script would print: what one process does is what ranks do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@dataclass
class Trained:
    """What a training leaves: what it said, parameters and buffers, and the next random number."""

    said: list[Any]
    state: list[Tensor]
    drawn: float
    communication: Any = None
    """How gradients were sent, where they were."""


def samples(num: int = 40, num_classes: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num, 8, generator=generator)
    return x, torch.randint(0, num_classes, (num,), generator=generator)


def batches(size: int = 12, num: int = 40) -> Iterator[list[Tensor]]:
    dataset = torch.utils.data.TensorDataset(*samples(num))
    yield from torch.utils.data.DataLoader(dataset, batch_size=size, shuffle=True)


def mlp() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5))


def entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def left(said: list[Any], *models: nn.Module) -> Trained:
    state = [t.detach().clone() for model in models for t in (*model.parameters(), *model.buffers())]
    return Trained(said, state, torch.rand(1).item())


def trained(
    model: nn.Module, loss_of: Loss = entropy, optimizer: torch.optim.Optimizer | None = None, **how: int
) -> Trained:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    said = []
    for _ in range(2):
        for x, y in batches(**how):
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            said.append(round(loss.item(), 4))
    return left(said, model)


def sgd_with_momentum() -> Trained:
    return trained(mlp())


def adam() -> Trained:
    model = mlp()
    return trained(model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01))


def a_last_batch_of_one() -> Trained:
    return trained(mlp(), num=25)


def a_penalty_that_the_script_adds() -> Trained:
    return trained(mlp(), lambda m, x, y: entropy(m, x, y) + 0.01 * sum(p.square().sum() for p in m.parameters()))


class GivesLoss(nn.Module):
    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        self.inner, self.reduction = mlp(), reduction

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        logits = self.inner(x)
        return {"loss": F.cross_entropy(logits, y, reduction=self.reduction), "logits": logits}


def a_model_that_returns_its_loss() -> Trained:
    return trained(GivesLoss(), lambda m, x, y: m(x, y)["loss"])


def a_model_that_returns_a_sum() -> Trained:
    return trained(GivesLoss("sum"), lambda m, x, y: m(x, y)["loss"] * 0.01)


def targets_that_are_ignored() -> Trained:
    """Their share differs from rank to rank, and on some ranks all are."""

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        y = torch.where(y < 3, torch.full_like(y, -100), y)
        found: Tensor = model(x, y)["loss"]
        return found

    return trained(GivesLoss(), loss_of)


def normalised_again() -> Trained:
    """As in MobileNet: what is normalised has no mean, and what is remembered of the next layer's is rounding."""
    torch.manual_seed(9)
    inner = nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 8, bias=False)
    return trained(nn.Sequential(*inner, nn.BatchNorm1d(8, momentum=0.01), nn.ReLU(), nn.Linear(8, 5)))


def convolutions() -> Trained:
    torch.manual_seed(3)
    head = nn.Sequential(nn.Flatten(), nn.Linear(16, 5))
    body = nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
    return trained(nn.Sequential(body, head))


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(8, 6), nn.Linear(3, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encode(x).chunk(2, 1)
        code = mean + torch.randn_like(mean) * torch.exp(0.5 * log_variance)
        return self.decode(code), mean, log_variance


def noise_that_the_model_draws() -> Trained:
    torch.manual_seed(3)

    def loss_of(model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
        made, mean, log_variance = model(x)
        return F.mse_loss(made, x) - 0.005 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())

    return trained(Autoencoder(), loss_of)


def accumulated_gradients() -> Trained:
    model, said = mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(batches(7)):
        (entropy(model, x, y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
        said.append(round(sum(p.grad.norm().item() for p in model.parameters() if p.grad is not None), 4))
    return left(said, model)


def two_models_against_each_other() -> Trained:
    torch.manual_seed(3)
    judge = nn.Sequential(nn.Linear(8, 16), nn.LeakyReLU(), nn.Linear(16, 1))
    maker = nn.Sequential(nn.Linear(4, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    of_judge, of_maker = (torch.optim.SGD(m.parameters(), lr=0.05) for m in (judge, maker))
    said = []
    for x, _ in batches():
        of_judge.zero_grad()
        real = F.binary_cross_entropy_with_logits(judge(x), torch.ones(len(x), 1))
        real.backward()
        made = maker(torch.randn(len(x), 4))
        fake = F.binary_cross_entropy_with_logits(judge(made.detach()), torch.zeros(len(x), 1))
        fake.backward()
        of_judge.step()
        of_maker.zero_grad()
        fooled = F.binary_cross_entropy_with_logits(judge(made), torch.ones(len(x), 1))
        fooled.backward()
        of_maker.step()
        said.append([round(loss.item(), 4) for loss in (real, fake, fooled)])
    return left(said, judge, maker)


def a_critic_that_is_kept_from_training() -> Trained:
    torch.manual_seed(3)
    critic, maker = nn.Linear(8, 1), nn.Linear(4, 8)
    of_critic, of_maker = (torch.optim.SGD(m.parameters(), lr=0.02) for m in (critic, maker))
    said = []
    for x, _ in batches():
        gap = critic(maker(torch.randn(len(x), 4)).detach()).mean() - critic(x).mean()
        of_critic.zero_grad()
        gap.backward()
        of_critic.step()
        critic.requires_grad_(False)
        fooled = -critic(maker(torch.randn(len(x), 4))).mean()
        of_maker.zero_grad()
        fooled.backward()
        of_maker.step()
        critic.requires_grad_(True)
        said.append([round(gap.item(), 4), round(fooled.item(), 4)])
    return left(said, critic, maker)


class Words(nn.Module):
    """A language model: the batch is the second dimension, a state goes along, and weights are shared."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.recur, self.out = nn.Embedding(11, 8), nn.LSTM(8, 8, 2), nn.Linear(8, 11)
        self.out.weight = self.embed.weight

    def forward(self, words: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        found, state = self.recur(self.embed(words), state)
        return F.log_softmax(self.out(found).view(-1, 11), 1), state


def words_updated_by_hand() -> Trained:
    torch.manual_seed(3)
    model, said = Words(), []
    state = torch.zeros(2, 6, 8), torch.zeros(2, 6, 8)
    words = torch.randint(0, 11, (36, 6), generator=torch.Generator().manual_seed(1))
    for start in range(0, 35, 7):
        model.zero_grad()
        state = (state[0].detach(), state[1].detach())
        out, state = model(words[start : start + 7], state)
        loss = F.nll_loss(out, words[start + 1 : start + 8].reshape(-1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad, alpha=-0.5)
        said.append(round(loss.item(), 4))
    return left(said, model)


def a_frozen_part() -> Trained:
    model = mlp()
    model[0].weight.requires_grad_(False)
    return trained(model, optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))


class Spare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.spare = mlp(), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.used(x)
        return found


def a_part_that_is_not_used() -> Trained:
    model = Spare()
    found = trained(model)
    found.said.append([p.grad is None for p in model.parameters()])
    return found


class Expert(nn.Module):
    """A part that is computed for some samples: on some ranks for none, and in some batches for none at all."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.expert = mlp(), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x)
        chosen = (x[:, 0] > 1.3).nonzero()[:, 0]
        return found.index_add(0, chosen, self.expert(x[chosen])) if len(chosen) else found


def a_part_that_some_samples_use() -> Trained:
    torch.manual_seed(3)
    model = Expert()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    said: list[Any] = []
    for x, y in batches(4):
        optimizer.zero_grad()
        entropy(model, x, y).backward()
        said.append([p.grad is None for p in model.parameters()])
        optimizer.step()
    assert any(map(any, said)) and not all(map(any, said))
    return left(said, model)


def a_part_that_is_frozen_now_and_then() -> Trained:
    torch.manual_seed(3)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    said: list[Any] = []
    for number, (x, y) in enumerate(batches()):
        model[0].requires_grad_(number % 2 == 1)
        optimizer.zero_grad()
        entropy(model, x, y).backward()
        said.append([p.grad is None for p in model.parameters()])
        optimizer.step()
    return left(said, model)


def hooks_on_parameters() -> Trained:
    model = mlp()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return trained(model)


def an_average_of_parameters() -> Trained:
    model = mlp()
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = []
    for x, y in batches():
        optimizer.zero_grad()
        entropy(model, x, y).backward()
        optimizer.step()
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(new, 0.1)
            said.append(round(entropy(average, x, y).item(), 4))
    return left(said, model, average)


def checkpoints_that_are_resumed() -> Trained:
    model, said = mlp(), []
    for _ in range(3):
        said += trained(model).said
        kept = copy.deepcopy(model.state_dict())
        model = mlp()
        model.load_state_dict(kept)
    return left(said, model)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.embed, self.layers, self.out = nn.Linear(8, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 5)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = self.out(self.layers(self.embed(x).unsqueeze(1).expand(-1, 12, -1), mask)[:, 0])
        return found


def a_mask_of_the_batchs_size() -> Trained:
    torch.manual_seed(3)
    mask = nn.Transformer.generate_square_subsequent_mask(12)
    return trained(Attention(), lambda m, x, y: F.cross_entropy(m(x, mask), y))


class Pieces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.place = nn.Linear(8, 16), nn.Linear(16, 5), nn.Parameter(torch.randn(16))

    def scores(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(torch.tanh(self.first(x) + self.place))
        return found


def a_model_that_is_called_by_a_method() -> Trained:
    torch.manual_seed(3)
    return trained(Pieces(), lambda m, x, y: F.cross_entropy(m.scores(x), y))


def a_closure_of_lbfgs() -> Trained:
    model, said = mlp(), []
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    x, y = samples()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = entropy(model, x, y)
        loss.backward()
        said.append(round(loss.item(), 3))
        return loss

    optimizer.step(closure)
    return left(said, model)


def gradients_of_inputs() -> Trained:
    """As an adversarial example: what enters is trained too."""
    model, said = mlp(), []
    x, y = samples()
    x.requires_grad_()
    for _ in range(3):
        (gradient,) = torch.autograd.grad(entropy(model, x, y), x)
        x = (x + 0.1 * gradient.sign()).detach().requires_grad_()
        said.append(round(gradient.norm().item(), 5))
    entropy(model, x, y).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return left(said, model)


class Returns(nn.Module):
    """Returns what `of` makes of a model, its inputs and targets."""

    def __init__(self, of: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.of = mlp(), of
        self.beside = nn.Linear(8, 4)
        self.centre = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.of(self, x, y)


def a_penalty_that_is_zero_at_first() -> Trained:
    model = Returns(lambda m, x, y: (m.inner(x), F.relu(m.inner(x).abs() - 1.0).sum()))

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        scores, penalty = model(x, y)
        return F.cross_entropy(scores, y) + 0.1 * penalty

    return trained(model, loss_of, torch.optim.SGD(model.parameters(), lr=0.5))


def a_part_that_is_computed_again() -> Trained:
    again = torch.utils.checkpoint.checkpoint
    model = Returns(lambda m, x, y: F.cross_entropy(again(m.inner, x, use_reentrant=False), y))
    return trained(model, lambda m, x, y: m(x, y))


def a_parameter_that_is_returned() -> Trained:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        scores, centre = model(x, y)
        return F.cross_entropy(scores, y) + (scores - centre).square().mean()

    return trained(Returns(lambda m, x, y: (m.inner(x), m.centre)), loss_of)


def outputs_laid_out_otherwise() -> Trained:
    model = Returns(lambda m, x, y: m.inner(x.unsqueeze(0)).transpose(0, 1))
    return trained(model, lambda m, x, y: F.cross_entropy(m(x, y).transpose(0, 1).view(-1, 5), y))


def texts_of_many_lengths() -> Trained:
    """The batch is the second dimension, outputs are flat, and the last text has one word alone."""
    torch.manual_seed(3)
    model = Flat()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = []
    for length in (5, 5, 4, 1, 3, 2, 6, 7, 1):
        x = torch.randint(0, 11, (length, 6))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), x.flatten())
        loss.backward()
        optimizer.step()
        said.append(round(loss.item(), 4))
    return left(said, model)


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.back = nn.Embedding(11, 8), nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.back(self.words(x)).view(-1, 11)
        return found


def a_closure_of_sgd() -> Trained:
    model, said = mlp(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = entropy(model, x, y)
            loss.backward()
            return loss

        said.append(round(float(optimizer.step(closure)), 4))
    return left(said, model)


class Diffusing(nn.Module):
    """Draws a time for each sample, and a weight whose rows are a multiple of a rank's samples."""

    def __init__(self) -> None:
        super().__init__()
        self.times, self.inner, self.out = nn.Embedding(50, 8), nn.Linear(8, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.times(torch.randint(0, 50, (len(x),)))
        weight = self.inner.weight + 0.1 * torch.randn_like(self.inner.weight)
        found: Tensor = self.out(F.linear(x, weight, self.inner.bias).relu() + torch.randint(2, size=(len(x), 1)))
        return found


def times_and_weights_that_the_model_draws() -> Trained:
    torch.manual_seed(4)
    return trained(Diffusing())


class Keeping(nn.Module):
    """Keeps something of its batch as an attribute."""

    def __init__(self, keep: Callable[[Keeping, Tensor], None], kept: Any = 0) -> None:
        super().__init__()
        self.inner, self.keep, self.kept = mlp(), keep, kept

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        self.keep(self, found)
        return found


def counted_samples(model: Keeping, out: Tensor) -> None:
    model.kept += len(out)


def counted_calls(model: Keeping, out: Tensor) -> None:
    model.kept += 1


def a_loss_kept_aside(model: Keeping, out: Tensor) -> None:
    model.kept["loss"] = out.square().mean()


def a_counter_of_samples() -> Trained:
    return trained(Keeping(counted_samples))


def a_counter_of_calls() -> Trained:
    model = Keeping(counted_calls)
    left_of_it = trained(model)
    left_of_it.said.append(model.kept)
    return left_of_it


def a_loss_in_a_dict() -> Trained:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y) + model.kept["loss"]  # type: ignore[index,operator]

    return trained(Keeping(a_loss_kept_aside, {}), loss_of)


SAME = (
    sgd_with_momentum, adam, a_last_batch_of_one, a_penalty_that_the_script_adds,
    a_model_that_returns_its_loss, a_model_that_returns_a_sum, targets_that_are_ignored,
    normalised_again, convolutions, noise_that_the_model_draws, accumulated_gradients, two_models_against_each_other,
    words_updated_by_hand, a_frozen_part, a_part_that_is_not_used, hooks_on_parameters, an_average_of_parameters,
    checkpoints_that_are_resumed, a_mask_of_the_batchs_size, a_model_that_is_called_by_a_method, a_closure_of_lbfgs,
    gradients_of_inputs, a_penalty_that_is_zero_at_first, a_part_that_is_computed_again, a_parameter_that_is_returned,
    outputs_laid_out_otherwise, a_closure_of_sgd, a_part_that_is_frozen_now_and_then,
    texts_of_many_lengths, times_and_weights_that_the_model_draws, a_counter_of_calls,
    a_critic_that_is_kept_from_training,
)  # fmt: skip
"""Each ends on ranks as in one process."""

SAME_WHERE_PARAMETERS_ARE_WHOLE = (a_part_that_some_samples_use,)
"""Parameters that are shared by ranks get zeros, and not None, from a batch that does not use them."""


# -- what is refused ---------------------------------------------------------------------------------------------------


class Contrast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: Tensor) -> Tensor:
        found = F.normalize(self.inner(x))
        return found @ found.T


def samples_that_see_each_other() -> Trained:
    return trained(Contrast(), lambda m, x, _: F.cross_entropy(m(x), torch.arange(len(x))))


class Stray(nn.Module):
    def __init__(self, beside: Tensor) -> None:
        super().__init__()
        self.inner, self.beside = mlp(), [beside]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x) + self.beside[0]
        return found


def a_trained_tensor_that_is_no_parameter() -> Trained:
    return trained(Stray(torch.zeros(5, requires_grad=True)))


def gradients_of_gradients() -> Trained:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        x.requires_grad_()
        out = model(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return F.cross_entropy(out, y) + gradient.square().mean()

    return trained(mlp(), loss_of)


class Remembers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("middle", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.middle = 0.9 * self.middle + 0.1 * x.detach().mean(0)
        found: Tensor = self.inner(x)
        return found


def a_buffer_of_the_whole_batch() -> Trained:
    return trained(Remembers())


def words_that_are_normalised() -> Trained:
    model = nn.Sequential(nn.Embedding(9, 8, max_norm=1.0), nn.Linear(8, 5))
    return trained(model, lambda m, x, y: F.cross_entropy(m(y), y))


def more_ranks_than_samples() -> Trained:
    return trained(mlp(), size=1)


def a_number_that_is_computed_from_the_batch() -> Trained:
    model = Returns(lambda m, x, y: (F.cross_entropy(m.inner(x), y), m.inner(x).mean().item()))
    return trained(model, lambda m, x, y: m(x, y)[0])


def a_count_of_the_batch() -> Trained:
    model = Returns(lambda m, x, y: (F.cross_entropy(m.inner(x), y, reduction="sum"), len(x)))

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        total, num = model(x, y)
        found: Tensor = total / num
        return found

    return trained(model, loss_of)


def a_loss_kept_as_an_attribute() -> Trained:
    def kept(model: Any, x: Tensor, _: Tensor) -> Tensor:
        scores: Tensor = model.inner(x)
        model.aside = scores.square().mean()
        return scores

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = F.cross_entropy(model(x, y), y) + model.aside
        return found

    return trained(Returns(kept), loss_of)


ASIDE: list[Tensor] = []


def a_loss_kept_in_a_global_list() -> Trained:
    ASIDE.clear()

    def kept(model: Any, x: Tensor, _: Tensor) -> Tensor:
        scores: Tensor = model.inner(x)
        ASIDE.append(scores.square().mean())
        return scores

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x, y), y) + ASIDE.pop()

    return trained(Returns(kept), loss_of)


def a_hook_on_a_layer() -> Trained:
    model = mlp()
    model[1].register_full_backward_hook(lambda _, given, __: (0.5 * given[0],))
    return trained(model)


def a_small_part_that_sees_all_samples() -> Trained:
    def balanced(model: Any, x: Tensor, y: Tensor) -> Tensor:
        shares = model.beside(x).softmax(1)
        chosen = F.one_hot(shares.argmax(1), 4).float().mean(0)
        return F.cross_entropy(model.inner(x), y) + 1e-4 * (chosen * shares.mean(0)).sum()

    return trained(Returns(balanced), lambda m, x, y: m(x, y))


REFUSED = {
    a_number_that_is_computed_from_the_batch: "a number that is no tensor",
    a_count_of_the_batch: "what it returns beside tensors",
    a_loss_kept_as_an_attribute: "as its attribute `aside`",
    a_loss_kept_in_a_global_list: "it changes `ASIDE`, a variable outside of it",
    a_hook_on_a_layer: "a hook on its inner module `1`",
    a_small_part_that_sees_all_samples: "gradients of parts of a batch differ",
    samples_that_see_each_other: "outputs for parts of a batch do not make up those of the whole one",
    a_trained_tensor_that_is_no_parameter: "is trained and is no parameter of it",
    gradients_of_gradients: "gradients of its gradients are taken",
    a_buffer_of_the_whole_batch: "what it keeps as `",
    a_counter_of_samples: "what it keeps as `kept`",
    a_loss_in_a_dict: "a tensor that is to be trained as its attribute `kept`",
    words_that_are_normalised: "`max_norm`",
    more_ranks_than_samples: "too few samples for",
}
"""Each ends before its first update, with this as the cause."""


def masks_of_dropout() -> Trained:
    torch.manual_seed(3)
    return trained(nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 5)))


class Anew(nn.Module):
    """A part with dropout is computed once more on the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16))
        self.last = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False))
        return found


def masks_that_are_computed_again() -> Trained:
    torch.manual_seed(3)
    return trained(Anew())


def parameters_that_move_on_one_rank() -> Trained:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = samples()
    for number in range(200):
        optimizer.zero_grad()
        entropy(model, x, y).backward()
        optimizer.step()
        if number == 30 and THIS_RANK[0] == 1:
            with torch.no_grad():
                model[0].weight.add_(0.1)
    return left([], model)


THIS_RANK = [0]
"""Set in each process, for faults that are planted on one rank."""
