"""Trainings in whose middle something changes: what makes samples see each other from then on, and what does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.utils.prune
from torch import Tensor, nn

from .scenarios import Trained, entropy, left, mlp, samples

SETTINGS = {"rows": False}


class Rows(nn.Module):
    """Each sample sees the mean of all, while something says so."""

    def __init__(self, is_on: Callable[[Rows], Any], *beyond: nn.Module) -> None:
        super().__init__()
        self.inner, self.is_on = nn.Sequential(mlp(), *beyond), is_on
        self.strength, self.options = 0.0, {"rows": False}
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        out: Tensor = self.inner(x)
        return out - 0.5 * out.mean(0) if self.is_on(self) else out


def trained_on(model: nn.Module, num: int, change: Callable[[int], Any] = lambda step: None) -> Trained:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x, y = samples(24)
    said = []
    for step in range(num):
        change(step)
        optimizer.zero_grad()
        loss = entropy(model, x, y)
        loss.backward()
        optimizer.step()
        said.append(round(loss.item(), 3))
    return left(said, model)


def _at(step: int, act: Callable[[], Any]) -> Callable[[int], Any]:
    return lambda now: act() if now == step else None


def an_attribute_that_is_switched_on() -> Trained:
    """For two steps: no look but one at the attribute comes in between."""
    model = Rows(lambda m: m.strength)

    def change(step: int) -> None:
        model.strength = 0.7 * (20 <= step < 22)

    return trained_on(model, 24, change)


def an_entry_of_a_dict_that_is_switched_on() -> Trained:
    model = Rows(lambda m: m.options["rows"])
    return trained_on(model, 24, lambda step: model.options.update(rows=20 <= step < 22))


def a_global_that_is_switched_on() -> Trained:
    model = Rows(_global)
    return trained_on(model, 24, lambda step: SETTINGS.update(rows=20 <= step < 22))


def _global(_: Rows) -> bool:
    return SETTINGS["rows"]


def a_closure_that_is_switched_on() -> Trained:
    is_on = False

    def change(step: int) -> None:
        nonlocal is_on
        is_on = 20 <= step < 22

    return trained_on(Rows(lambda m: is_on), 24, change)


def a_hook_that_is_put_on() -> Trained:
    model = Rows(lambda m: False)
    hooks: list[Any] = []

    def change(step: int) -> None:
        if step == 20:
            hooks.append(model.inner.register_forward_hook(lambda _, __, out: out - 0.5 * out.mean(0)))
        if step == 22:
            hooks.pop().remove()

    return trained_on(model, 24, change)


def a_layer_that_is_replaced() -> Trained:
    model = Rows(lambda m: False)
    return trained_on(model, 22, _at(20, lambda: setattr(model, "inner", nn.Sequential(model.inner, _Centred()))))


class _Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - 0.5 * x.mean(0)


def a_count_of_calls_that_switches_on() -> Trained:
    """And off again before the end."""
    return trained_on(Rows(lambda m: 20 < m.num_calls <= 28), 44)


def a_count_of_calls_with_batch_normalisation() -> Trained:
    return trained_on(Rows(lambda m: 20 < m.num_calls <= 28, nn.BatchNorm1d(5)), 44)


def a_count_of_calls_with_dropout() -> Trained:
    return trained_on(Rows(lambda m: 20 < m.num_calls <= 28, nn.Dropout(0.2)), 44)


def every_eleventh_call() -> Trained:
    """As regularisation that is not made in each step."""
    return trained_on(Rows(lambda m: m.num_calls > 18 and m.num_calls % 11 == 0), 44)


def an_array_of_the_model_that_the_script_sets() -> Trained:
    """And sets back."""
    model = Rows(lambda m: m.strength[0] > 0)
    model.strength = np.zeros(1)

    def at(step: int) -> None:
        model.strength[0] = float(step == 20)

    return trained_on(model, 44, at)


def a_count_of_calls_just_before_the_end() -> Trained:
    return trained_on(Rows(lambda m: m.num_calls > 40), 44)


def a_model_of_which_nothing_is_left_at_the_end() -> Trained:
    trained_on(Rows(lambda m: m.num_calls > 40), 44)
    return trained_on(mlp(), 8)


def a_model_of_another_type_at_the_end() -> Trained:
    model = Rows(lambda m: m.num_calls > 40)
    trained_on(model, 44)
    return left([], model.double())


def a_model_that_evaluates_at_the_end() -> Trained:
    model = Rows(lambda m: m.training and m.num_calls > 40)
    trained_on(model, 44)
    return left([], model.eval())


AT_ONCE = (
    an_attribute_that_is_switched_on, an_entry_of_a_dict_that_is_switched_on, a_global_that_is_switched_on,
    a_closure_that_is_switched_on, a_layer_that_is_replaced,
)  # fmt: skip
"""Refused at the 21st call."""

SOON = (
    a_count_of_calls_that_switches_on, a_count_of_calls_with_batch_normalisation, a_count_of_calls_with_dropout,
    every_eleventh_call, an_array_of_the_model_that_the_script_sets,
)  # fmt: skip
"""Refused before the 33rd."""

IN_THE_END = (
    a_count_of_calls_just_before_the_end, a_model_of_which_nothing_is_left_at_the_end,
    a_model_of_another_type_at_the_end, a_model_that_evaluates_at_the_end,
)  # fmt: skip


# -- what may change ---------------------------------------------------------------------------------------------------


def layers_that_are_frozen() -> Trained:
    model = mlp()
    return trained_on(model, 44, lambda step: model[0].requires_grad_(step < 20 or step > 30))  # type: ignore[operator]


def evaluation_in_between() -> Trained:
    model = nn.Sequential(mlp(), nn.BatchNorm1d(5))

    def change(step: int) -> None:
        if step % 7 == 3:
            model.eval()
            with torch.no_grad():
                model(samples(24)[0])
            model.train()
        if step == 30:
            model[1].eval()

    left_of_it = trained_on(model, 44, change)
    model.eval()
    return left_of_it


class Warm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.temperature, self.history = mlp(), 2.0, [0]

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x) / self.temperature
        return found


def a_temperature_that_falls() -> Trained:
    model = Warm()

    def change(step: int) -> None:
        model.temperature = 2.0 - step / 44
        model.history.append(step)

    return trained_on(model, 44, change)


def a_model_that_is_trained_in_double_precision_later() -> Trained:
    model = mlp()
    trained_on(model, 20)
    return trained_on(nn.Sequential(_Cast(), model.double()), 24)


class _Cast(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.double()


def another_head_at_the_end() -> Trained:
    model = nn.Sequential(mlp(), nn.Linear(5, 5))
    left_of_it = trained_on(model, 20)
    model[1] = nn.Identity()
    return left_of_it


def weights_that_are_pruned_at_the_end() -> Trained:
    model = mlp()
    left_of_it = trained_on(model, 20)
    nn.utils.prune.l1_unstructured(model[0], "weight", 0.3)
    return left_of_it


LEGAL = (
    layers_that_are_frozen, evaluation_in_between, a_temperature_that_falls,
    a_model_that_is_trained_in_double_precision_later, another_head_at_the_end, weights_that_are_pruned_at_the_end,
)  # fmt: skip


def other_masks_later() -> Trained:
    dropout = nn.Dropout(0.2)
    return trained_on(nn.Sequential(mlp(), dropout), 44, lambda step: setattr(dropout, "p", 0.2 if step < 20 else 0.4))
