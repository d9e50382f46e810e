"""Trains a scripted model that forks two branches, under `interop_threads` with a number; prints what is seen."""

import sys
import warnings

import torch

from flatout.frameworks.pytorch.adapter import PyTorch

warnings.simplefilter("ignore", DeprecationWarning)
NUM, ASKED = int(sys.argv[1]), [int(word) for word in sys.argv[2:]]


class Listener:
    def on_step(self, step):
        pass

    def on_update(self):
        pass

    def on_failure(self, stage, problem):
        raise problem


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x):
        first = torch.jit.fork(self.first, x)
        second = torch.jit.fork(self.second, x)
        return torch.jit.wait(first) + torch.jit.wait(second)


framework = PyTorch()
framework.prepare({"interop_threads": {"num": NUM}} if NUM else {}, endless=False, trial=False)
framework.attach(Listener())
for asked in ASKED:
    try:
        torch.set_num_interop_threads(asked)
        print(f"asked for {asked}")
    except RuntimeError:
        print(f"refused {asked}")
torch.manual_seed(0)
model = Branches()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def train(num):
    for _ in range(num):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).pow(2).mean().backward()
        optimizer.step()


train(10)
print(f"without forks {framework.facts().forks_work} {framework.evidence()[1]}")
model = torch.jit.script(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
train(40)
facts = framework.facts()
print(f"with forks {facts.forks_work}, {facts.num_interop_threads == torch.get_num_interop_threads()}")
print(f"in plain {facts.num_interop_threads}, now {torch.get_num_interop_threads()}")
print(f"evidence {framework.evidence()[0]}")
if NUM:
    framework.session.release("interop_threads")
print(f"own again {type(torch.set_num_interop_threads).__name__}")
print(f"sum {sum(float(p.sum()) for p in model.parameters())!r}")
