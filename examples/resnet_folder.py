"""Train a ResNet-18 from scratch on a folder of photographs.

The class of a photograph is its folder's name, or, where all lie in one folder, its file name up to the first
underscore (n01440764_tench.JPEG). Without --data a few synthetic JPEGs are made, so that the script runs offline.
"""

import argparse
import math
import random
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)


class BasicBlock(nn.Module):
    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.downsample = None
        if stride != 1 or in_planes != planes:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_planes, planes, 1, stride=stride, bias=False), nn.BatchNorm2d(planes)
            )

    def forward(self, x):
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    def __init__(self, num_classes=1000):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(64, 64), BasicBlock(64, 64))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, stride=2), BasicBlock(128, 128))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, stride=2), BasicBlock(256, 256))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, stride=2), BasicBlock(512, 512))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(512, num_classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def random_resized_crop(img, size, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3)):
    """Crop a random part of random area and aspect, then resize it (drawn as torchvision draws it)."""
    width, height = img.size
    log_ratio = torch.log(torch.tensor(ratio))
    for _ in range(10):
        area = width * height * torch.empty(1).uniform_(*scale).item()
        aspect = torch.exp(torch.empty(1).uniform_(log_ratio[0], log_ratio[1])).item()
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            top = torch.randint(0, height - h + 1, size=(1,)).item()
            left = torch.randint(0, width - w + 1, size=(1,)).item()
            break
    else:  # a very wide or very tall image: the largest central crop that is allowed
        w = min(width, round(height * max(ratio)))
        h = min(height, round(width / min(ratio)))
        top, left = (height - h) // 2, (width - w) // 2
    return img.crop((left, top, left + w, top + h)).resize((size, size), Image.Resampling.BILINEAR)


class PhotoFolder(Dataset):
    def __init__(self, root, image_size):
        self.files = sorted(p for p in Path(root).rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))
        if not self.files:
            raise FileNotFoundError(f"no .jpg or .jpeg files under {root}")
        in_folders = any(p.parent != Path(root) for p in self.files)
        names = [p.parent.name if in_folders else p.name.split("_")[0] for p in self.files]
        self.classes = sorted(set(names))
        self.labels = [self.classes.index(name) for name in names]
        self.image_size = image_size
        self.mean = torch.tensor(MEAN).view(3, 1, 1)
        self.std = torch.tensor(STD).view(3, 1, 1)

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        img = Image.open(self.files[index]).convert("RGB")
        img = random_resized_crop(img, self.image_size)
        if torch.rand(1) < 0.5:
            img = img.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        x = torch.from_numpy(np.array(img)).permute(2, 0, 1).contiguous().float().div(255)
        return (x - self.mean) / self.std, self.labels[index]


def make_synthetic_photos(root, num_images=128, num_classes=8):
    """Write smooth random colour patterns, one base pattern per class, as JPEGs."""
    rng = np.random.default_rng(0)
    bases = rng.uniform(0, 255, size=(num_classes, 4, 4, 3))
    for i in range(num_images):
        label = i % num_classes
        pattern = 0.6 * bases[label] + 0.4 * rng.uniform(0, 255, size=(4, 4, 3))
        img = Image.fromarray(pattern.astype(np.uint8)).resize((400, 300), Image.Resampling.BICUBIC)
        img.save(Path(root) / f"class{label}_{i:04d}.jpg", quality=90)


def train(args, root):
    device = torch.device(args.device)
    dataset = PhotoFolder(root, args.image_size)
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, num_workers=args.workers)
    print(f"{len(dataset)} images, {len(dataset.classes)} classes")

    model = ResNet18(num_classes=len(dataset.classes)).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs)

    for epoch in range(args.epochs):
        model.train()
        total_loss, correct, seen = 0.0, 0, 0
        for step, (images, labels) in enumerate(loader, start=1):
            images, labels = images.to(device), labels.to(device)
            outputs = model(images)
            loss = criterion(outputs, labels)

            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

            total_loss += loss.item() * len(labels)
            correct += (outputs.argmax(dim=1) == labels).sum().item()
            seen += len(labels)
            if step % args.log_every == 0:
                print(f"epoch {epoch + 1} step {step}/{len(loader)} loss {total_loss / seen:.4f}")
        scheduler.step()
        print(f"epoch {epoch + 1} loss {total_loss / seen:.4f} top-1 {correct / seen:.4f}")


def main():
    parser = argparse.ArgumentParser(description="ResNet-18 on a folder of photographs")
    parser.add_argument("--data", type=Path, help="folder of JPEGs (default: synthetic ones)")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--log-every", type=int, default=5, help="steps between two printed losses")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)

    if args.data:
        train(args, args.data)
    else:
        with tempfile.TemporaryDirectory() as root:
            make_synthetic_photos(root)
            train(args, root)


if __name__ == "__main__":
    main()
