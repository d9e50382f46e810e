"""Four small models that answer one batch after the other, as one would write it; says how many a second at its end."""

import argparse
import time

import torch
from torch import nn


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(28, 128, 2, batch_first=True), nn.Linear(128, 10)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
        self.into, self.layers, self.head = nn.Linear(28, 256), nn.TransformerEncoder(layer, 4), nn.Linear(256, 10)

    def forward(self, x):
        return self.head(self.layers(self.into(x)).mean(1))


class Block(nn.Module):
    def __init__(self, into, out, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(into, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU(),
            nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip
        same = stride == 1 and into == out
        around = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))
        self.around = nn.Identity() if same else around

    def forward(self, x):
        return torch.relu(self.body(x) + self.around(x))


def lenet():
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


def resnet18():
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    sizes = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2)]
    blocks = [Block(*size) for size in [*sizes, (512, 512, 1)]]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


MODELS = {"lenet": (lenet, (1, 28, 28)), "resnet18": (resnet18, (3, 64, 64)), "encoder": (Encoder, (28, 28)),
          "lstm": (Recurrent, (28, 28))}  # fmt: skip

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9)
    args = parser.parse_args()
    torch.manual_seed(0)
    make, shape = MODELS[args.model]
    net = make().eval()
    num_inputs = max(64, 512 // args.batch)
    data = torch.randn(num_inputs, args.batch, *shape)
    begun_s, num, found = time.perf_counter(), 0, torch.zeros(10, dtype=torch.long)
    with torch.no_grad():
        while time.perf_counter() - begun_s < args.seconds:
            found += torch.bincount(net(data[num % num_inputs]).argmax(1), minlength=10)
            num += 1
            if num % 100 == 0:
                print(f"{num} calls at {time.perf_counter() - begun_s:.4f} s", flush=True)
    print("found", *found.tolist())
