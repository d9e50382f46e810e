"""Trains on pictures, read in this process and then in a worker, and notes all it sees: `pictures.py END`."""

import os
import random
import sys
import time
import traceback

import noting


def torchvision_transforms():
    """Also beside PyTorch's CPU build, where the compiled operators do not load; none of them is needed."""
    global kept
    try:
        import torchvision.transforms
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        kept = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            kept.define(f"{name}(Tensor a) -> Tensor")
        import torchvision.transforms
    return torchvision.transforms


if __name__ == "__main__":
    import numpy
    import torch
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset, get_worker_info

    transforms = torchvision_transforms()
    END = sys.argv[1]

    class Pictures(Dataset):
        """Files of a folder, with the transforms that everybody has."""

        def __init__(self, folder):
            self.paths = [os.path.join(folder, name) for name in sorted(os.listdir(folder))]
            self.transform = transforms.Compose(
                [
                    transforms.RandomHorizontalFlip(),
                    transforms.Resize(20),
                    transforms.ToTensor(),
                    transforms.Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)),
                ]
            )

        def __len__(self):
            return len(self.paths)

        def __getitem__(self, index):
            with Image.open(self.paths[index]) as picture:
                return self.transform(picture.convert("RGB")), index % 3

    class Columns(Dataset):
        """Rows of an array, for workers."""

        def __init__(self):
            self.x = torch.arange(48 * 3 * 64, dtype=torch.float32).reshape(48, 3, 8, 8).remainder(11) / 11

        def __len__(self):
            return len(self.x)

        def __getitem__(self, index):
            return self.x[index] * 2.0 - 1.0, index % 3

    class Model(torch.nn.Module):
        """Convolutions, for memory formats and compilers."""

        def __init__(self):
            super().__init__()
            self.body = torch.nn.Sequential(
                torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
                torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.ReLU(),
            )  # fmt: skip
            self.head = torch.nn.Linear(8, 3)

        def forward(self, x):
            if END == "raise" and len(losses) >= LAST:
                raise OverflowError("too many")
            return self.head(self.body(x).mean((2, 3)))

    def begin(number):
        time.sleep(number * 0.2)  # so that they speak one after the other
        print("worker", number, get_worker_info().num_workers, os.environ.get("MARK"), flush=True)

    def train(model, optimizer, loader, epochs):
        for epoch in range(epochs):
            for x, y in loader:
                optimizer.zero_grad(set_to_none=False)
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                if len(losses) == LAST // 2:
                    provoke()
            torch.save(model.state_dict(), f"epoch-{epoch}.pt.tmp")
            os.replace(f"epoch-{epoch}.pt.tmp", f"epoch-{epoch}.pt")
            print("epoch", epoch, len(losses), tuple(x.shape), x.dtype, y.dtype, flush=True)

    def provoke():
        """A problem that the script catches and prints itself, while it trains."""
        try:
            model(torch.ones(2, 5, 8, 8))
        except RuntimeError:
            traceback.print_exc()

    LAST = 3 * 12 + 2 * 6
    os.environ["MARK"] = "set by the script"
    random.seed(1)
    numpy.random.seed(2)
    torch.manual_seed(3)
    torch.set_num_threads(1)
    losses = []
    model = Model()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.002, momentum=0.5)
    loader = DataLoader(Pictures("pictures"), batch_size=4, shuffle=True)
    train(model, optimizer, loader, 3)
    noting.surroundings("while")
    noting.framework("while")
    noting.objects("while", model, optimizer, loader)
    noting.bits("while", model, optimizer, losses)
    columns = DataLoader(Columns(), batch_size=8, shuffle=True, num_workers=1)
    train(model, optimizer, columns, 2)
    for x, _ in list(DataLoader(Columns(), batch_size=24, num_workers=2, worker_init_fn=begin)):  # both have spoken
        print("checked", tuple(x.shape), flush=True)
    noting.surroundings("after")
    noting.framework("after")
    noting.objects("after", model, optimizer, columns)
    noting.bits("after", model, optimizer, losses)
    if END == "raise":
        model(next(iter(columns))[0])
    elif END.isdigit():
        sys.exit(int(END))
