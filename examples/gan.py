"""Train a small DCGAN on 28x28 digits: two models, two optimizers.

python gan.py                       # scikit-learn's bundled digits
python gan.py --data path/to/MNIST  # the usual idx files, plain or gzipped
python gan.py --save out            # a checkpoint and a grid of samples per epoch
"""

import argparse
import gzip
import random
import struct
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset


class DigitImages(Dataset):
    """Single-channel images as tensors in -1..1."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        img = Image.fromarray(self.images[index])
        x = torch.from_numpy(np.array(img)).unsqueeze(0).float().div(255)
        return (x - 0.5) / 0.5


def load_mnist(root):
    name = "train-images-idx3-ubyte"
    for folder in (root, root / "raw", root / "MNIST" / "raw"):
        for path, opener in ((folder / name, open), (folder / f"{name}.gz", gzip.open)):
            if path.exists():
                with opener(path, "rb") as f:
                    _, num_images, height, width = struct.unpack(">4I", f.read(16))
                    return np.frombuffer(f.read(), dtype=np.uint8).reshape(num_images, height, width)
    raise FileNotFoundError(f"no {name}[.gz] under {root}")


def load_digits_28x28():
    from sklearn.datasets import load_digits

    small = (load_digits().images / 16 * 255).astype(np.uint8)
    return np.stack([np.array(Image.fromarray(img).resize((28, 28), Image.Resampling.BILINEAR)) for img in small])


class Generator(nn.Module):
    def __init__(self, nz, ngf):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 2, 7, 1, 0, bias=False),  # 7x7
            nn.BatchNorm2d(ngf * 2),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),  # 14x14
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf, 1, 4, 2, 1, bias=False),  # 28x28
            nn.Tanh(),
        )

    def forward(self, z):
        return self.main(z)


class Discriminator(nn.Module):
    def __init__(self, ndf):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(1, ndf, 4, 2, 1, bias=False),  # 14x14
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),  # 7x7
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 7, 1, 0, bias=False),  # 1x1
        )

    def forward(self, x):
        return self.main(x).view(-1)


def weights_init(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


def save_grid(images, path, columns=8):
    """Write 28x28 images in -1..1 side by side as one PNG."""
    pixels = ((images.squeeze(1).cpu().numpy() + 1) * 127.5).astype(np.uint8)
    rows = [np.concatenate(list(pixels[i : i + columns]), axis=1) for i in range(0, len(pixels), columns)]
    Image.fromarray(np.concatenate(rows, axis=0)).save(path)


def main():
    parser = argparse.ArgumentParser(description="DCGAN on 28x28 digits")
    parser.add_argument("--data", type=Path, help="folder with the MNIST idx files (default: scikit-learn's digits)")
    parser.add_argument("--save", type=Path, help="folder for checkpoints and samples (default: save nothing)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--nz", type=int, default=64, help="size of the latent vector")
    parser.add_argument("--nf", type=int, default=32, help="width of both networks")
    parser.add_argument("--log-every", type=int, default=20, help="steps between two printed losses")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device(args.device)

    images = load_mnist(args.data) if args.data else load_digits_28x28()
    loader = DataLoader(DigitImages(images), batch_size=args.batch_size, shuffle=True)

    netG = Generator(args.nz, args.nf).to(device)
    netD = Discriminator(args.nf).to(device)
    netG.apply(weights_init)
    netD.apply(weights_init)
    criterion = nn.BCEWithLogitsLoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=args.lr, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=args.lr, betas=(0.5, 0.999))
    fixed_noise = torch.randn(64, args.nz, 1, 1, device=device)

    for epoch in range(args.epochs):
        sum_d, sum_g = 0.0, 0.0
        for step, real in enumerate(loader, start=1):
            real = real.to(device)
            real_label = torch.ones(len(real), device=device)
            fake_label = torch.zeros(len(real), device=device)

            # update D: real images should score high, fakes low
            fake = netG(torch.randn(len(real), args.nz, 1, 1, device=device))
            optimizerD.zero_grad()
            loss_d = criterion(netD(real), real_label) + criterion(netD(fake.detach()), fake_label)
            loss_d.backward()
            optimizerD.step()

            # update G: fakes should score high
            optimizerG.zero_grad()
            loss_g = criterion(netD(fake), real_label)
            loss_g.backward()
            optimizerG.step()

            sum_d += loss_d.item()
            sum_g += loss_g.item()
            if step % args.log_every == 0:
                print(f"epoch {epoch + 1} step {step}/{len(loader)} D {sum_d / step:.4f} G {sum_g / step:.4f}")
        print(f"epoch {epoch + 1} loss_d {sum_d / len(loader):.4f} loss_g {sum_g / len(loader):.4f}")

        if args.save:
            args.save.mkdir(parents=True, exist_ok=True)
            with torch.no_grad():
                save_grid(netG(fixed_noise), args.save / f"samples_{epoch + 1:03d}.png")
            torch.save({"netG": netG.state_dict(), "netD": netD.state_dict()}, args.save / f"gan_{epoch + 1:03d}.pt")


if __name__ == "__main__":
    main()
