"""Trainings that do more with their parameters than train them: what one process says, ranks that shard them say."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import Tensor, nn

from .scenarios import THIS_RANK, Trained, batches, left, mlp, trained


class Words(nn.Module):
    """Repeated blocks between tied weights, a single number and an odd number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(51, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(8, 51, bias=False)
        self.head.weight = self.words.weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.encoder(self.words(x)) * self.scale)
        return found


def _texts() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(0, 51, (12, 9, 7), generator=generator) for _ in range(2))
    return x, y


def a_language_model() -> Trained:
    """Clipping a list made before, two averages, a schedule, evaluation of the whole and of a part."""
    torch.manual_seed(3)
    model = Words()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 12)
    mean, other = copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model)
    said: list[Any] = []
    for x, y in zip(*_texts(), strict=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            for kept, p in zip(mean.parameters(), model.parameters(), strict=True):
                kept.mul_(0.9).add_(p, alpha=0.1)
            part = model.encoder.layers[0](model.words(x)).mean()
            whole = model(x).mean()
        other.update_parameters(model)
        said.append([round(one.item(), 4) for one in (loss, norm, part, whole)])
    said.append([tuple(p.shape) for p in model.parameters()])
    said.append(sum(p.numel() for p in model.parameters()))
    return left(said, model, mean, other.module)


def a_scaler_of_gradients() -> Trained:
    """A step whose gradients are not finite on one rank is left out on all."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    said = []
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        if step == 2:
            model[0].weight.grad[1, 2] = float("inf")  # in the rows of rank 0
        scaler.step(optimizer)
        scaler.update()
        said.append([round(loss.item(), 4), scaler.get_scale()])
    return left(said, model)


def checkpoints_of_everything() -> Trained:
    """Saved by `torch.save` and by pickle, as state and whole; what is loaded goes on as if nothing had been."""
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    said: list[Any] = []

    def step() -> None:
        for x, y in batches():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            said.append(round(loss.item(), 4))

    step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    best, alike = copy.deepcopy(model.state_dict()), model.state_dict()
    other = pickle.loads(pickle.dumps(model))
    twin = copy.deepcopy(model)
    step()
    file.seek(0)
    kept = torch.load(file)
    said.append([type(value).__name__ for value in kept["model"].values()])
    said.append([round(float(value.sum()), 4) for value in kept["model"].values()])
    said.append(all(torch.equal(value, best[name]) for name, value in kept["model"].items()))
    said.append(
        all(torch.equal(value, p.detach()) for value, p in zip(alike.values(), model.parameters(), strict=True))
    )
    with torch.no_grad():
        x = torch.ones(3, 8)
        said.append([round(m(x).sum().item(), 4) for m in (model, other, twin)])
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    step()
    return left(said, model)


QUESTIONS: list[Callable[[Any], Any]] = [
    lambda p: p.norm().item(), lambda p: p.norm(1), lambda p: p.norm(float("inf")), lambda p: p.norm(dim=1).sum(),
    lambda p: torch.linalg.vector_norm(p), lambda p: float(p.detach().numpy().sum()), lambda p: p.tolist()[1][2],
    lambda p: float(p[3, 4]), lambda p: p.data.clone().mul_(2).sum(), lambda p: (p @ p.T).trace(), lambda p: p.shape,
    lambda p: len(p), lambda p: p.numel(), lambda p: p.view(-1)[5], lambda p: p.T.shape, lambda p: repr(p)[:60],
    lambda p: isinstance(p, nn.Parameter), lambda p: p.is_leaf, lambda p: p.requires_grad, lambda p: (p == p).all(),
    lambda p: torch.isfinite(p).all().item(), lambda p: torch.stack([p, p]).shape, lambda p: p.abs().max(),
    lambda p: (p + torch.ones(16, 8)).sum(), lambda p: (torch.ones(16, 8) - p).sum(), lambda p: p.mean(0).sum(),
    lambda p: torch.cat([p.flatten(), p.flatten()]).shape, lambda p: p.grad.norm(), lambda p: p.grad.shape,
    lambda p: torch.nn.utils.parameters_to_vector([p]).sum(), lambda p: torch.zeros_like(p).sum(), lambda p: p.dtype,
    lambda p: p.detach().double().std(), lambda p: (p * 2 - p).requires_grad, lambda p: p.to(torch.bfloat16).dtype,
    lambda p: f"{p.detach().mean():.4f}", lambda p: p.topk(2).values.sum(), lambda p: p.detach().cpu().std(),
    lambda p: torch.nn.init.normal_(p, std=0.1).sum(), lambda p: torch.rand_like(p).sum(), lambda p: p.size(1),
    lambda p: torch.nn.init.uniform_(p).sum(), lambda p: p.data.copy_(torch.full((16, 8), 0.5)).sum(),
    lambda p: f"{p}"[:60], lambda p: torch._foreach_norm([p, torch.ones(3, dtype=torch.complex64)], 2.0)[1].item(),
    lambda p: torch.equal(p, p), lambda p: torch.allclose(p, torch.full((16, 8), 0.5)), lambda p: p.nelement(),
]  # fmt: skip


def questions_about_a_parameter() -> Trained:
    model = mlp()
    found = trained(model)
    for ask in QUESTIONS:
        answer = ask(model[0].weight)
        answer = answer.item() if isinstance(answer, Tensor) else answer
        found.said.append(round(answer, 3) if isinstance(answer, float) else str(answer))
    return left(found.said, model)


def parameters_that_are_set() -> Trained:
    """By hand, in all the ways that are common."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + 0.01 * sum(p.pow(2).sum() for p in model.parameters())
        loss.backward()
        for p in model.parameters():
            p.grad.data.clamp_(-0.1, 0.1)
            p.grad = p.grad + 1e-3 * p.detach().sign()
        optimizer.step()
        for p in model.parameters():
            p.data.clamp_(-0.4, 0.4)
        with torch.no_grad():
            model[0].weight.div_(model[0].weight.norm(dim=1, keepdim=True).clamp_min(1.0))
            model[2].bias -= model[2].bias.mean()
            model[2].weight.data = 0.99 * model[2].weight.data
        said.append(round(loss.item(), 4))
    return left(said, model)


def an_average_put_in_and_taken_out() -> Trained:
    """As is most often done: by binding `.data` anew, and back."""
    model = mlp()
    said = []
    for parts in range(2):
        said += trained(model).said
        kept = [p.data for p in model.parameters()]
        for p, scale in zip(model.parameters(), (0.5, 0.6, 0.7, 0.8), strict=True):
            p.data = p.data * scale
        with torch.no_grad():
            said.append(round(model(torch.ones(3, 8)).sum().item(), 4))
        for p, former in zip(model.parameters(), kept, strict=True):
            p.data = former
        said.append(parts)
    return left(said, model)


class Heads(nn.Module):
    """Of its heads one alone is used in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.heads = nn.Linear(8, 16), nn.ModuleList(nn.Linear(16, 5) for _ in range(3))

    def forward(self, x: Tensor, which: int) -> Tensor:
        found: Tensor = self.heads[which](torch.tanh(self.stem(x)))
        return found


def heads_that_take_turns() -> Trained:
    torch.manual_seed(3)
    model = Heads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    said = []
    for turn in range(4):
        for x, y in batches():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x, turn % 3), y)
            loss.backward()
            optimizer.step()
            said.append((round(loss.item(), 4), [p.grad is None for p in model.parameters()]))
    return left(said, model)


def rows_that_are_written_to() -> Trained:
    model = mlp()
    found = trained(model)
    weight, other = model[0].weight, model[2].weight
    weight.data[2:4] = 0.0
    with torch.no_grad():
        weight[5, 6] = 0.25
    rows = weight.data[3:5]
    kept = copy.deepcopy(rows), pickle.loads(pickle.dumps(rows))
    found.said += [type(one).__name__ for one in kept]
    found.said += [round(one.sum().item(), 4) for one in (weight, other, other.grad, weight.data.t()[1], *kept)]
    array = weight.detach().numpy()
    nn.utils.prune.l1_unstructured(model[0], "weight", 0.3)
    found.said += [round(float(array.sum()), 4), round(torch.cat([weight.flatten(), model[0].bias]).norm().item(), 4)]
    found.said.append(round((other @ model[0].weight_orig).sum().item(), 4))
    return left(found.said, model)


def hooks_and_gradients_of_wholes() -> Trained:
    """A hook on a parameter with two gradients in a step, a penalty summed in place, gradients asked for."""
    model = mlp()
    norms: list[float] = []
    for p in model.parameters():
        p.register_hook(lambda g: norms.append(round(g.norm().item(), 4)) or g / (g.norm() + 1e-6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said: list[Any] = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) + F.cross_entropy(model(x + 0.1), y)
        total = torch.zeros(5)
        total += model[2].bias
        (loss + (total.square().sum() if said else 0.0)).backward()
        optimizer.step()
        found = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        said.append([round(loss.item(), 4), *(round(g.norm().item(), 4) for g in found)])
    for value in optimizer.state.values():
        value["momentum_buffer"] = None
    return left([*said, sorted(norms)], model)


def other_updates_of_pytorchs() -> Trained:
    """Those that see more than one element at a time, and those in one call for many tensors."""
    said: list[Any] = []
    models = []
    for make in (
        torch.optim.Adafactor, lambda p: torch.optim.SGD(p, lr=0.1, foreach=True), torch.optim.RMSprop,
        lambda p: torch.optim.Adam(p, fused=True), torch.optim.NAdam,
    ):  # fmt: skip
        model = mlp()
        said += trained(model, optimizer=make(model.parameters())).said  # type: ignore[operator]
        models.append(model)
    return left(said, *models)


SAME = (
    a_language_model, a_scaler_of_gradients, checkpoints_of_everything, questions_about_a_parameter,
    parameters_that_are_set, other_updates_of_pytorchs, an_average_put_in_and_taken_out, heads_that_take_turns,
    rows_that_are_written_to, hooks_and_gradients_of_wholes,
)  # fmt: skip
"""Each ends on ranks as in one process."""


# -- what is refused ---------------------------------------------------------------------------------------------------


class Own(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(0.1 * p.grad)


def an_optimizer_of_the_scripts_own() -> Trained:
    model = mlp()
    return trained(model, optimizer=Own(model.parameters()))


def two_types_of_parameters() -> Trained:
    model = mlp()
    model[2].double()
    return trained(model, lambda m, x, y: F.cross_entropy(m[2](m[1](m[0](x)).double()), y))


def a_part_that_is_trained_by_itself() -> Trained:
    model = mlp()

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y) + model[0](x).square().mean()

    return trained(model, loss_of)


def parameters_in_the_order_of_a_set() -> Trained:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5))
    found = trained(model)
    weights = [model[0].weight, model[1].weight]
    for p in weights if THIS_RANK[0] == 0 else weights[::-1]:
        p.sum()
    return found


def a_checkpoint_saved_by_a_thread() -> Trained:
    model = mlp()
    found = trained(model)
    thread = threading.Thread(target=torch.save, args=(model.state_dict(), io.BytesIO()))
    thread.start()
    thread.join()
    return found


def a_penalty_before_the_first_call() -> Trained:
    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        penalty = sum(p.square().sum() for p in model.parameters())
        return F.cross_entropy(model(x), y) + penalty

    return trained(mlp(), loss_of)


def memory_that_is_shared() -> Trained:
    """Kept before training, and written to in it."""
    model = mlp()
    handles = [p.data for p in model.parameters()]
    found = trained(model)
    handles[0].zero_()
    return found


def parameters_of_another_type_later() -> Trained:
    model = mlp()
    found = trained(model)
    model.double()
    return found


def a_view_that_is_written_to() -> Trained:
    model = mlp()
    found = trained(model)
    model[0].weight.data[2:4].view(-1).zero_()
    return found


def a_view_that_is_read_after_an_update() -> Trained:
    model = mlp()
    found = trained(model)
    rows = model[0].weight.data[2:4]
    trained(model)
    found.said.append(rows.sum().item())
    return found


def a_view_that_is_read_after_its_data_was_written_to() -> Trained:
    model = mlp()
    found = trained(model)
    data = model[0].weight.data
    rows = data[2:4]
    data.mul_(2)
    found.said.append(rows.sum().item())
    return found


REFUSED = {
    a_view_that_is_read_after_its_data_was_written_to: "a copy of rows that ranks have gathered",
    a_view_that_is_written_to: "a copy of rows that ranks have gathered",
    a_view_that_is_read_after_an_update: "a copy of rows that ranks have gathered",
    an_optimizer_of_the_scripts_own: "its step is not PyTorch's",
    parameters_in_the_order_of_a_set: "a set, the time",
    a_checkpoint_saved_by_a_thread: "threads do not come in the same order",
    a_penalty_before_the_first_call: "before the first call",
    memory_that_is_shared: "is shared with another tensor",
    a_part_that_is_trained_by_itself: "by itself and within another module",
    parameters_of_another_type_later: "torch.float32 to (16, 8), torch.float64",
}
"""Each ends with this as the cause."""
