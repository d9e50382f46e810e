"""Known architectures with the FLOPs that they take: published, or by a closed formula. For tests and benchmarks.

Each is built by hand and small in code, with random weights. `forward` is derived from the layers' sizes alone and
knows nothing of the modules: two operations per multiply-add; biases, norms, activations, pooling and embeddings none.

Convolutional ones lie on the `meta` device, which computes shapes and nothing else; those with attention or recurrence
are real, so that the kernels of this machine are what is counted.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

TORCHVISION = "torchvision, model table: GFLOPS in multiply-adds"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One of them.

    Attributes:
        name: With the size of its input.
        build: Makes the model.
        inputs: Makes the inputs.
        forward: FLOPs of a forward call, by formula.
        first: Those of its first layer where that has weights and an input without gradient, which backward leaves out.
        published: FLOPs of a forward call as somebody has published them.
        source: Who.
        formula: What `forward` is, in words.
    """

    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    forward: int
    first: int = 0
    published: float | None = None
    source: str = ""
    formula: str = "sum over layers: 2 x places x kernel x channels in / groups x channels out"
    device: str = "meta"

    @property
    def training(self) -> int:
        """A forward and its backward: each product has two in the backward, but for the gradient of the inputs."""
        return 3 * self.forward - self.first


def conv(out: int, kernel: int, c_in: int, c_out: int, groups: int = 1) -> int:
    """A convolution on squares; for a transposed one `out` is the side of its input."""
    return 2 * out * out * kernel * kernel * (c_in // groups) * c_out


def linear(c_in: int, c_out: int, places: int = 1) -> int:
    return 2 * places * c_in * c_out


def image(side: int, channels: int = 3, batch: int = 1) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: (torch.randn(batch, channels, side, side, device="meta"),)


def tokens(length: int, batch: int = 1, words: int = 100) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: (torch.randint(0, words, (batch, length)),)


# -- convolutions --------------------------------------------------------------------------------------------------


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.Tanh(), nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10),
    )  # fmt: skip


LENET = conv(28, 5, 1, 6) + conv(10, 5, 6, 16) + linear(400, 120) + linear(120, 84) + linear(84, 10)


def alexnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(),
        nn.MaxPool2d(3, 2), nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(), nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2), nn.Flatten(),
        nn.Linear(9216, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000),
    )  # fmt: skip


ALEXNET = (
    conv(55, 11, 3, 64) + conv(27, 5, 64, 192) + conv(13, 3, 192, 384) + conv(13, 3, 384, 256) + conv(13, 3, 256, 256)
    + linear(9216, 4096) + linear(4096, 4096) + linear(4096, 1000)
)  # fmt: skip

VGG = ((224, 2, 64), (112, 2, 128), (56, 3, 256), (28, 3, 512), (14, 3, 512))
"""Side, layers and channels of each stage."""


def vgg16() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for _, number, width in VGG:
        for _ in range(number):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(25088, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, *head)


def vgg16_flops() -> int:
    total, channels = linear(25088, 4096) + linear(4096, 4096) + linear(4096, 1000), 3
    for side, number, width in VGG:
        total += conv(side, 3, channels, width) + (number - 1) * conv(side, 3, width, width)
        channels = width
    return total


class Residual(nn.Module):
    def __init__(self, body: nn.Module, skip: nn.Module) -> None:
        super().__init__()
        self.body, self.skip = body, skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.skip(x))


def normed(c_in: int, c_out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    one = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(one, nn.BatchNorm2d(c_out), nn.ReLU())


def resnet(numbers: tuple[int, ...], *, bottleneck: bool, groups: int = 1, base: int = 64) -> nn.Module:
    """Stride in the 3 x 3 convolution, as in torchvision."""
    layers: list[nn.Module] = [normed(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, number in enumerate(numbers):
        width = 64 * 2**stage
        out = 4 * width if bottleneck else width
        inner = width * base // 64 * groups
        for block in range(number):
            stride = 2 if stage and not block else 1
            if bottleneck:
                body = nn.Sequential(
                    normed(channels, inner, 1), normed(inner, inner, 3, stride, groups), normed(inner, out, 1)
                )
            else:
                body = nn.Sequential(normed(channels, out, 3, stride), normed(out, out, 3))
            skip = nn.Identity() if channels == out and stride == 1 else normed(channels, out, 1, stride)
            layers.append(Residual(body, skip))
            channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def resnet_flops(numbers: tuple[int, ...], *, bottleneck: bool, groups: int = 1, base: int = 64) -> int:
    total, channels, side = conv(112, 7, 3, 64), 64, 56
    for stage, number in enumerate(numbers):
        width = 64 * 2**stage
        before, side = side, 56 // 2**stage
        if bottleneck:
            out, inner = 4 * width, width * base // 64 * groups
            first = conv(before, 1, channels, inner) + conv(side, 3, inner, inner, groups) + conv(side, 1, inner, out)
            other = conv(side, 1, out, inner) + conv(side, 3, inner, inner, groups) + conv(side, 1, inner, out)
        else:
            out = width
            first, other = conv(side, 3, channels, out) + conv(side, 3, out, out), 2 * conv(side, 3, out, out)
        projection = conv(side, 1, channels, out) if channels != out else 0
        total += first + projection + (number - 1) * other
        channels = out
    return total + linear(channels, 1000)


MOBILE = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Expansion, channels, blocks and stride of each stage. Source: Sandler et al., "MobileNetV2", CVPR 2018, table 2."""


def mobilenet_v2() -> nn.Module:
    layers: list[nn.Module] = [normed(3, 32, 3, 2)]
    channels = 32
    for expansion, width, number, stride in MOBILE:
        for block in range(number):
            inner = channels * expansion
            layers += [normed(channels, inner, 1)] if expansion > 1 else []
            layers += [normed(inner, inner, 3, stride if not block else 1, inner), normed(inner, width, 1)]
            channels = width
    head = [normed(320, 1280, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000)]
    return nn.Sequential(*layers, *head)


def mobilenet_v2_flops() -> int:
    total, channels, side = conv(112, 3, 3, 32), 32, 112
    for expansion, width, number, stride in MOBILE:
        for block in range(number):
            inner = channels * expansion
            total += conv(side, 1, channels, inner) if expansion > 1 else 0
            side //= stride if not block else 1
            total += conv(side, 3, inner, inner, inner) + conv(side, 1, inner, width)
            channels = width
    return total + conv(7, 1, 320, 1280) + linear(1280, 1000)


# -- transposed convolutions ---------------------------------------------------------------------------------------

DCGAN = ((100, 512, 1), (512, 256, 4), (256, 128, 8), (128, 64, 16), (64, 3, 32))
"""Channels in and out, and side of the input. Source: Radford et al., "DCGAN", ICLR 2016, as in PyTorch's example."""


def dcgan() -> nn.Module:
    layers: list[nn.Module] = []
    for c_in, c_out, side in DCGAN:
        stride, padding = (1, 0) if side == 1 else (2, 1)
        layers += [nn.ConvTranspose2d(c_in, c_out, 4, stride, padding, bias=False), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Source: Ronneberger et al., "U-Net", MICCAI 2015, figure 1: unpadded, 572 x 572 to 388 x 388."""

    WIDTHS = (64, 128, 256, 512, 1024)

    def __init__(self) -> None:
        super().__init__()
        pairs = list(zip((1, *self.WIDTHS), self.WIDTHS, strict=False))
        self.down = nn.ModuleList(self.twice(a, b) for a, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, 2) for w in self.WIDTHS[-2::-1])
        self.merge = nn.ModuleList(self.twice(2 * w, w) for w in self.WIDTHS[-2::-1])
        self.head = nn.Conv2d(64, 2, 1)

    @staticmethod
    def twice(c_in: int, c_out: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(c_in, c_out, 3), nn.ReLU(), nn.Conv2d(c_out, c_out, 3), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for number, layer in enumerate(self.down):
            x = layer(x if not number else F.max_pool2d(x, 2))
            kept.append(x)
        for up, merge, old in zip(self.up, self.merge, kept[-2::-1], strict=True):
            x = up(x)
            cut = (old.shape[2] - x.shape[2]) // 2
            x = merge(torch.cat((old[:, :, cut : cut + x.shape[2], cut : cut + x.shape[3]], x), 1))
        return self.head(x)


def unet_flops() -> int:
    total, side, channels = 0, 572, 1
    for number, width in enumerate(UNet.WIDTHS):
        side = side // 2 if number else side
        total += conv(side - 2, 3, channels, width) + conv(side - 4, 3, width, width)
        side, channels = side - 4, width
    for width in UNet.WIDTHS[-2::-1]:
        total += conv(side, 2, 2 * width, width)  # transposed: every pixel of the input is spread
        side *= 2
        total += conv(side - 2, 3, 2 * width, width) + conv(side - 4, 3, width, width)
        side -= 4
    return total + conv(side, 1, 64, 2)


# -- attention and recurrence --------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer's layer: four projections, attention, two linear layers four times as wide."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, time, width))
        return x + self.inner(self.norms[1](x))


class Transformer(nn.Module):
    """GPT-2 with `causal` (and logits of every word, with the embedding's weights), BERT without."""

    def __init__(self, layers: int, width: int, heads: int, words: int, *, causal: bool, recompute: str = "") -> None:
        super().__init__()
        self.causal, self.recompute = causal, recompute
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=causal) for _ in range(layers))
        self.pooler = None if causal else nn.Linear(width, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant") if self.recompute else block(x)
        return x @ self.words.weight.T if self.pooler is None else self.pooler(x[:, 0])


def block_flops(width: int, time: int) -> int:
    """Of a whole layer: 24 b s h^2 + 4 b s^2 h.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC21, appendix.
    """
    return 24 * time * width**2 + 4 * time**2 * width


def gpt(layers: int, width: int, words: int, time: int) -> int:
    return layers * block_flops(width, time) + linear(width, words, time)


class ViT(nn.Module):
    """Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021, ViT-B/16."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 768, 16, 16)
        self.class_token = nn.Parameter(torch.zeros(1, 1, 768))
        self.blocks = nn.Sequential(*(Block(768, 12, causal=False) for _ in range(12)))
        self.head = nn.Linear(768, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = self.blocks(torch.cat((self.class_token.expand(x.shape[0], -1, -1), x), 1))
        return self.head(x[:, 0])


class LanguageLSTM(nn.Module):
    """Source: Zaremba et al., "Recurrent Neural Network Regularization", 2014: two layers of 650."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(words, width), nn.LSTM(width, width, 2)
        self.head = nn.Linear(width, words)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(ids).transpose(0, 1))[0])


def lstm_flops(words: int, width: int, time: int, batch: int) -> int:
    return batch * time * (2 * linear(2 * width, 4 * width) + linear(width, words))


DEEP, FIFTY = (2, 2, 2, 2), (3, 4, 6, 3)
RESNEXT = {"bottleneck": True, "groups": 32, "base": 4}
SMALL = 64
"""Tokens: all of GPT-2's widths, and a forward of it takes a fraction of a second."""

ARCHITECTURES = (
    Architecture(name="LeNet-5, 1x32x32", build=lenet, inputs=image(32, 1), forward=LENET, first=conv(28, 5, 1, 6)),
    Architecture(
        name="AlexNet, 3x224x224", build=alexnet, inputs=image(224), forward=ALEXNET, first=conv(55, 11, 3, 64),
        published=2 * 0.714e9, source=TORCHVISION,
    ),
    Architecture(
        name="VGG-16, 3x224x224", build=vgg16, inputs=image(224), forward=vgg16_flops(), first=conv(224, 3, 3, 64),
        published=2 * 15.47e9, source=TORCHVISION,
    ),
    Architecture(
        name="ResNet-18, 3x224x224", build=lambda: resnet(DEEP, bottleneck=False), inputs=image(224),
        forward=resnet_flops(DEEP, bottleneck=False), first=conv(112, 7, 3, 64),
        published=2 * 1.814e9, source=TORCHVISION + "; He et al., CVPR 2016, table 1: 1.8e9",
    ),
    Architecture(
        name="ResNet-50, 3x224x224", build=lambda: resnet(FIFTY, bottleneck=True), inputs=image(224),
        forward=resnet_flops(FIFTY, bottleneck=True), first=conv(112, 7, 3, 64),
        published=2 * 4.089e9, source=TORCHVISION + " (stride in the 3x3; 3.8e9 in the paper, in the 1x1)",
    ),
    Architecture(
        name="ResNeXt-50 32x4d, 3x224x224 (grouped)", build=lambda: resnet(FIFTY, **RESNEXT), inputs=image(224),
        forward=resnet_flops(FIFTY, **RESNEXT), first=conv(112, 7, 3, 64),
        published=2 * 4.23e9, source=TORCHVISION + "; Xie et al., CVPR 2017, table 1: 4.2e9",
    ),
    Architecture(
        name="MobileNetV2, 3x224x224 (depthwise)", build=mobilenet_v2, inputs=image(224), forward=mobilenet_v2_flops(),
        first=conv(112, 3, 3, 32), published=2 * 0.301e9,
        source=TORCHVISION + "; Sandler et al., CVPR 2018, table 4: 300M",
    ),
    Architecture(
        name="DCGAN generator, 100 to 3x64x64 (transposed)", build=dcgan, inputs=image(1, 100),
        forward=sum(conv(side, 4, c_in, c_out) for c_in, c_out, side in DCGAN), first=conv(1, 4, 100, 512),
        formula="sum over layers: 2 x pixels of the input x kernel x channels in x channels out",
    ),
    Architecture(
        name="U-Net, 1x572x572 (transposed)", build=UNet, inputs=image(572, 1), forward=unet_flops(),
        first=conv(570, 3, 1, 64),
    ),
    Architecture(
        name=f"GPT-2 small, {SMALL} tokens (attention, embeddings)", device="cpu", inputs=tokens(SMALL),
        build=lambda: Transformer(12, 768, 12, 50257, causal=True), forward=gpt(12, 768, 50257, SMALL),
        formula="l (24 s h^2 + 4 s^2 h) + 2 s h V", source="Narayanan et al., SC21, appendix",
    ),
    Architecture(
        name="BERT-base, 128 tokens (attention, embeddings)", device="cpu", inputs=tokens(128),
        build=lambda: Transformer(12, 768, 12, 30522, causal=False),
        forward=12 * block_flops(768, 128) + linear(768, 768),
        formula="l (24 s h^2 + 4 s^2 h) + 2 h^2", published=22.5e9, source="Sun et al., MobileBERT, ACL 2020, table 4",
    ),
    Architecture(
        name="ViT-B/16, 3x224x224 (attention)", device="cpu", build=ViT, inputs=lambda: (torch.randn(1, 3, 224, 224),),
        forward=12 * block_flops(768, 197) + conv(14, 16, 3, 768) + linear(768, 1000), first=conv(14, 16, 3, 768),
        formula="l (24 s h^2 + 4 s^2 h) + patches + head", published=2 * 17.564e9, source=TORCHVISION,
    ),
    Architecture(
        name="LSTM 2x650, 20 sequences of 35 words (fused kernels)", device="cpu", inputs=tokens(35, 20),
        build=lambda: LanguageLSTM(10000, 650), forward=lstm_flops(10000, 650, 35, 20),
        formula="2 b t (2 layers x 4 h x 2 h + h V)", source="Zaremba et al., 2014: medium",
    ),
)  # fmt: skip


def built(architecture: Architecture) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model and its inputs, where they belong."""
    with torch.device(architecture.device):
        model = architecture.build()
    return model.train(), architecture.inputs()
