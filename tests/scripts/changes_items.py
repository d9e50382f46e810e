"""The training loop changes what items follow from; prints what depends on every batch. CHANGE WORKERS [--mid]"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler

SETTINGS = {"gain": 1.0}


class Rows(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(120, 6, generator=generator)
        self.y = list(range(120))
        self.epoch = 0
        self.augments = False

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        x = self.x[i] * SETTINGS["gain"] + 0.01 * self.epoch
        if self.augments:
            x = x + 0.1 * torch.rand(6)
        return x, self.y[i] / 100


class Rotating(Sampler):
    epoch = 0

    def __len__(self):
        return 120

    def __iter__(self):
        return iter((i * 7 + self.epoch * 13) % 120 for i in range(120))


def change(kind, dataset, sampler, step):
    if kind == "settings":
        SETTINGS["gain"] = 1 + step / 10
    elif kind == "labels":
        dataset.y[40 + step % 60 :] = dataset.y[40 + step % 60 :][::-1]
    elif kind == "epoch":
        dataset.set_epoch(step)
        sampler.epoch = step
    elif kind == "augments":
        dataset.augments = step > 0


def main():
    kind, num_workers, mid = sys.argv[1], int(sys.argv[2]), "--mid" in sys.argv
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dataset, sampler = Rows(), Rotating()
    loader = DataLoader(dataset, batch_size=8, sampler=sampler, num_workers=num_workers)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for epoch in range(3):
        if not mid:
            change(kind, dataset, sampler, epoch)
        seen = 0.0
        for step, (x, y) in enumerate(loader):
            if mid and step == 6:
                change(kind, dataset, sampler, epoch + 1)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x)[:, 0], y.float())
            loss.backward()
            optimizer.step()
            seen += x.double().sum().item() * (step + 1) + y.double().mul(torch.arange(1, 9)).sum().item()
        print(f"epoch {epoch} loss {loss.item():.6f} seen {seen:.9f}", flush=True)


if __name__ == "__main__":
    main()
