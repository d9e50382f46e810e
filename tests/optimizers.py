"""Optimizers as scripts write them themselves, for tests of what flatout does with one that it does not know."""

import torch


class Own(torch.optim.Optimizer):
    """The update of plain SGD, under a name for which no rule is known."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=group["lr"])
