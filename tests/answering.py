"""The model of tests about scripts that infer: a normalised convolution and five answers. Input: 3 x 8 x 8."""

from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(8 * 64, 5)

    def forward(self, x):
        return self.head(self.body(x))
