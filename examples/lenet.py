"""Train LeNet-5 on MNIST (or on scikit-learn's bundled digits when no data is given).

python lenet.py                      # 8x8 digits enlarged to 28x28, needs no download
python lenet.py --data path/to/MNIST # the usual idx files, plain or gzipped
"""

import argparse
import gzip
import random
import struct
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, img):
        for transform in self.transforms:
            img = transform(img)
        return img


class ToTensor:
    """PIL image (H x W, 0..255) to float tensor (C x H x W, 0..1), as torchvision does it."""

    def __call__(self, img):
        tensor = torch.from_numpy(np.array(img, dtype=np.uint8, copy=True))
        tensor = tensor.view(img.size[1], img.size[0], len(img.getbands()))
        tensor = tensor.permute((2, 0, 1)).contiguous()
        return tensor.to(dtype=torch.get_default_dtype()).div(255)


class Normalize:
    def __init__(self, mean, std):
        self.mean = mean
        self.std = std

    def __call__(self, tensor):
        mean = torch.as_tensor(self.mean, dtype=tensor.dtype).view(-1, 1, 1)
        std = torch.as_tensor(self.std, dtype=tensor.dtype).view(-1, 1, 1)
        return tensor.clone().sub_(mean).div_(std)


class ImageDataset(Dataset):
    def __init__(self, images, labels, transform):
        self.images = images
        self.labels = labels
        self.transform = transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        img = Image.fromarray(self.images[index])
        return self.transform(img), int(self.labels[index])


def read_idx(root, name):
    """Read one idx file from root, root/raw or root/MNIST/raw."""
    for folder in (root, root / "raw", root / "MNIST" / "raw"):
        for path, opener in ((folder / name, open), (folder / f"{name}.gz", gzip.open)):
            if path.exists():
                with opener(path, "rb") as f:
                    num_dims = struct.unpack(">I", f.read(4))[0] & 0xFF
                    shape = struct.unpack(f">{num_dims}I", f.read(4 * num_dims))
                    return np.frombuffer(f.read(), dtype=np.uint8).reshape(shape)
    raise FileNotFoundError(f"no {name}[.gz] under {root}")


def load_mnist(root):
    train = read_idx(root, "train-images-idx3-ubyte"), read_idx(root, "train-labels-idx1-ubyte")
    test = read_idx(root, "t10k-images-idx3-ubyte"), read_idx(root, "t10k-labels-idx1-ubyte")
    return train, test


def load_digits_28x28():
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    small = (digits.images / 16 * 255).astype(np.uint8)
    images = np.stack([np.array(Image.fromarray(img).resize((28, 28), Image.Resampling.BILINEAR)) for img in small])
    x_train, x_test, y_train, y_test = train_test_split(images, digits.target, test_size=0.2, random_state=0)
    return (x_train, y_train), (x_test, y_test)


class LeNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 6, 5, padding=2)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def evaluate(model, loader, device):
    model.eval()
    correct = 0
    with torch.no_grad():
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            correct += (model(images).argmax(dim=1) == labels).sum().item()
    return correct / len(loader.dataset)


def main():
    parser = argparse.ArgumentParser(description="LeNet-5 on MNIST")
    parser.add_argument("--data", type=Path, help="folder with the MNIST idx files (default: scikit-learn's digits)")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--log-every", type=int, default=100, help="steps between two printed losses")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device(args.device)

    transform = Compose([ToTensor(), Normalize((0.1307,), (0.3081,))])
    train, test = load_mnist(args.data) if args.data else load_digits_28x28()
    train_loader = DataLoader(ImageDataset(*train, transform), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(ImageDataset(*test, transform), batch_size=1000)

    model = LeNet().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for epoch in range(args.epochs):
        model.train()
        running_loss = 0.0
        for step, (images, labels) in enumerate(train_loader, start=1):
            images, labels = images.to(device), labels.to(device)

            optimizer.zero_grad()
            loss = criterion(model(images), labels)
            loss.backward()
            optimizer.step()

            running_loss += loss.item()
            if step % args.log_every == 0 or step == len(train_loader):
                print(f"epoch {epoch + 1} step {step}/{len(train_loader)} loss {running_loss / step:.4f}")

    acc = evaluate(model, test_loader, device)
    print(f"accuracy: {acc:.4f}")


if __name__ == "__main__":
    main()
