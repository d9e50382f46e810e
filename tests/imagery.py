"""Photographs for tests: small files of every kind that datasets meet, datasets of them, and torchvision where it is.

Datasets and transforms stand here, in a plain module, because their source is looked at: pytest compiles the tests'
own files in its own way.
"""

import copy
import io
import pickle
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from torch.utils.data import Dataset


def import_torchvision():
    """torchvision, also where it is installed without its compiled part, which nothing here needs."""
    try:
        import torchvision
    except RuntimeError:
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        global _library
        _library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            _library.define(f"{name}(Tensor a) -> Tensor")
        import torchvision
    except ImportError:
        pytest.skip("needs torchvision", allow_module_level=True)
    return torchvision


torchvision = import_torchvision()

from torchvision import transforms as T  # noqa: E402
from torchvision.transforms import v2  # noqa: E402


def pattern(width, height, mode="RGB", seed=0):
    """An image that is smooth and has something everywhere."""
    rng = np.random.default_rng([seed, width, height])
    coarse = rng.integers(0, 255, (max(height // 8, 1), max(width // 8, 1), 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR).convert(mode)


def photographs(folder):
    """Write one file of every kind; their paths."""
    paths = []

    def save(image, name, **options):
        paths.append(str(folder / name))
        image.save(paths[-1], **options)

    for number, size in enumerate([(60, 50), (73, 41), (33, 97), (64, 64), (81, 80)]):
        save(pattern(*size, seed=number), f"plain{number}.jpg", quality=90, subsampling=number % 3)
    save(pattern(70, 60), "progressive.jpg", progressive=True)
    for mode, name in [("L", "grey.jpg"), ("CMYK", "cmyk.jpg"), ("L", "grey.png"), ("RGB", "colour.png"),
                       ("RGBA", "alpha.png"), ("P", "palette.png"), ("1", "bits.png"), ("LA", "grey_alpha.png"),
                       ("RGB", "colour.webp"), ("RGB", "colour.bmp"), ("P", "palette.gif")]:  # fmt: skip
        save(pattern(70, 60, mode), name)
    save(Image.fromarray(np.arange(4200, dtype=np.uint16).reshape(60, 70) * 15), "deep.png")
    save(pattern(70, 60, "P"), "transparent.png", transparency=3)
    rotated = Image.Exif()
    rotated[0x0112] = 6
    save(pattern(70, 60), "rotated.jpg", exif=rotated)
    save(Image.new("RGB", (70, 60)), "black.jpg")
    half = pattern(70, 60)
    half.paste((0, 0, 0), (0, 30, 70, 60))
    save(half, "half_black.jpg", quality=100)
    return paths


class Photos(Dataset):
    """Images of files, opened in one way or another, and a number."""

    def __init__(self, paths, transform=None, opener=None):
        self.paths = list(paths)
        self.transform = transform
        self.opener = opener or from_path

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        image = self.opener(self.paths[index])
        if self.transform is not None:
            image = self.transform(image)
        return image, index


# -- ways to open a file -------------------------------------------------------------------------------------------


def from_path(path):
    return Image.open(path).convert("RGB")


def from_file(path):
    with open(path, "rb") as file:
        image = Image.open(file)
        return image.convert("RGB")


def closed_behind(path):
    with Image.open(path) as image:
        return image.convert("RGB")


def from_bytes(path):
    with open(path, "rb") as file:
        content = file.read()
    return Image.open(io.BytesIO(content)).convert("RGB")


def upright(path):
    return ImageOps.exif_transpose(Image.open(path)).convert("RGB")


def in_grey(path):
    return Image.open(path).convert("L")


def loaded_first(path):
    image = Image.open(path)
    image.load()
    return image.convert("RGB")


def closed_at_once(path):
    image = Image.open(path)
    converted = image.convert("RGB")
    image.close()
    return converted


def copied(path):
    return Image.open(path).copy().convert("RGB")


def made_small(path):
    image = Image.open(path).convert("RGB")
    image.thumbnail((48, 48))
    return image


def drafted(path):
    image = Image.open(path)
    image.draft("RGB", (20, 20))
    return image.convert("RGB")


def painted(path):
    image = Image.open(path).convert("RGB")
    pixels = image.load()
    pixels[0, 0] = (1, 2, 3)
    image.putpixel((1, 1), (9, 9, 9))
    return image


def untouched(path):
    return Image.open(path)


def several(path):
    """Images that come from one another, some of them changed afterwards."""
    image = Image.open(path)
    one = image.convert("RGB")
    other = one.copy()
    other.paste((1, 1, 1), (0, 0, 9, 9))
    part = one.crop((1, 1, 30, 30))
    one.paste((5, 5, 5), (3, 3, 20, 20))
    return [one, other, part, image.convert("RGB"), part.resize((9, 9)).getpixel((3, 3))]


def looked_at(path):
    """What other libraries do with an image and a tensor, each with one of its own."""

    def image():
        return Image.open(path).convert("RGB").crop((2, 3, 25, 26))

    def tensor():
        return T.functional.to_tensor(image())

    def opened():
        return Image.open(path)

    same = image()
    return [
        pickle.loads(pickle.dumps(image())), copy.copy(image()), copy.deepcopy(image()), copy.copy(opened()).size,
        image() == image(), same == same, repr(image())[:30], image().__class__, isinstance(image(), Image.Image),
        hasattr(image(), "n_frames"), image().info, image().tobytes(), np.asarray(image()).sum(), image().getbbox(),
        list(image().getdata())[:3], image().histogram()[:9], image().getextrema(), image().getpixel((1, 1)),
        image().split(), image().point(lambda value: value // 2), image().load()[3, 3], ImageOps.autocontrast(image()),
        image().resize((5, 5)).getbands(),
        pickle.loads(pickle.dumps(tensor())), copy.deepcopy(tensor()), tensor().tolist()[0][0][:3],
        tensor().numpy().shape, np.asarray(tensor()).mean(), repr(tensor())[:40], len(tensor()), tensor().sum(),
        tensor() @ tensor().transpose(1, 2), torch.cat([tensor(), tensor()]), tensor()[0, 1:3], 1 - tensor(),
        tensor() > 0.5, tensor().permute(1, 2, 0)[0], tensor().reshape(-1)[:4], tensor().to(torch.float16),
        tensor().unsqueeze(0).shape, tensor().is_contiguous(), tensor().as_subclass(torch.Tensor),
        torch.as_tensor(tensor()), tensor().requires_grad, tensor().clone().fill_(3),
    ]  # fmt: skip


OPENERS = {
    each.__name__: each
    for each in (from_path, from_file, closed_behind, from_bytes, upright, in_grey, loaded_first, closed_at_once,
                 copied, made_small, drafted, painted)
}  # fmt: skip


# -- transforms ----------------------------------------------------------------------------------------------------


class OwnFlip:
    """A transform of a script's own."""

    def __init__(self, p):
        self.p = p

    def __call__(self, image):
        return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < self.p else image


class OwnCrop(T.RandomCrop):
    """A class of torchvision's with a part of the script's own."""

    @staticmethod
    def get_params(img, output_size):
        width, height = img.size
        top = np.random.randint(0, height - output_size[0] + 1)
        return top, (width - output_size[1]) // 2, *output_size


class OwnTensor:
    """What many scripts have in the place of `ToTensor`."""

    def __init__(self):
        self.mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
        self.std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)

    def __call__(self, image):
        x = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div(255)
        return (x - self.mean) / self.std


def own_bytes(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def own_floats(image):
    return torch.from_numpy(np.array(image).astype(np.float32)).permute(2, 0, 1) / 255


def shifted(x):
    return (x - 0.5) / 0.5 * 2 + 1


def several_of_one(x):
    return x.permute(1, 2, 0).contiguous(), x, x * 2, x


def in_place_where_bright(x):
    x = x.mul_(2)
    return x.add_(torch.tensor([1.0])).double() if x.mean() > 1 else x.double()


def channels_last(x):
    return x.permute(1, 2, 0)


def blurred(image):
    return image.filter(ImageFilter.GaussianBlur(2)).filter(ImageFilter.SHARPEN)


def enhanced(image):
    return ImageEnhance.Contrast(image).enhance(1.5)


def five(images):
    return torch.stack([T.ToTensor()(image) for image in images])


SIZE = 32


def transforms():
    """Transforms by name, each ending in tensors of one size; random ones of torch, Python and NumPy among them."""
    crop, tensor = T.RandomResizedCrop(SIZE), T.ToTensor()
    normal, one = T.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]), T.Normalize([0.5], [0.25])
    chains = {
        "the usual": [crop, T.RandomHorizontalFlip(), tensor, normal],
        "crop": [crop, tensor],
        "flips": [T.Resize((SIZE, SIZE)), T.RandomHorizontalFlip(), T.RandomVerticalFlip(), tensor],
        "evaluation": [T.Resize(40), T.CenterCrop(SIZE), tensor, one],
        "padded": [T.Resize((SIZE, SIZE)), T.RandomCrop(SIZE, padding=4), tensor],
        "reflected": [T.Resize((SIZE, SIZE)), T.RandomCrop(SIZE, padding=4, padding_mode="reflect"), tensor],
        "jitter": [crop, T.ColorJitter(0.4, 0.4, 0.4, 0.1), tensor],
        "erased": [crop, tensor, T.RandomErasing(p=0.9)],
        "erased at random": [crop, tensor, T.Normalize([0.5], [0.25], inplace=True),
                             T.RandomErasing(0.9, value="random")],
        "erased in place": [crop, tensor, T.RandomErasing(p=0.9, value=1, inplace=True), one],
        "rotated": [crop, T.RandomRotation(30), tensor],
        "rotated and larger": [T.RandomRotation(30, expand=True), T.Resize((SIZE, SIZE)), tensor],
        "affine": [crop, T.RandomAffine(20, (0.1, 0.1), (0.8, 1.2), 10), tensor],
        "perspective": [crop, T.RandomPerspective(p=0.9), tensor],
        "now and then": [crop, T.RandomApply([T.ColorJitter(0.4, 0.4), OwnFlip(0.5)], p=0.5), tensor],
        "grey": [crop, T.Grayscale(1), tensor],
        "grey in colour": [crop, T.Grayscale(3), tensor],
        "grey at random": [crop, T.RandomGrayscale(0.5), tensor],
        "blur": [crop, T.GaussianBlur(5), tensor],
        "AutoAugment": [crop, T.AutoAugment(), tensor],
        "RandAugment": [crop, T.RandAugment(), tensor],
        "TrivialAugmentWide": [crop, T.TrivialAugmentWide(), tensor],
        "AugMix": [crop, T.AugMix(), tensor],
        "choice": [crop, T.RandomChoice([T.RandomRotation(30), T.RandomHorizontalFlip(1)]), tensor],
        "order": [crop, T.RandomOrder([T.RandomRotation(30), T.RandomHorizontalFlip(1)]), tensor],
        "bytes": [crop, T.PILToTensor()],
        "bytes to floats": [crop, T.PILToTensor(), T.ConvertImageDtype(torch.float32), one],
        "five": [T.Resize((40, 40)), T.FiveCrop(SIZE), five],
        "tones": [crop, T.RandomInvert(), T.RandomPosterize(3), T.RandomSolarize(100), T.RandomAdjustSharpness(2),
                  T.RandomAutocontrast(), T.RandomEqualize(), tensor],
        "to an image again": [crop, tensor, T.ToPILImage(), tensor],
        "own transforms": [T.Resize(40), OwnCrop(SIZE), OwnFlip(0.5), OwnTensor()],
        "own bytes": [crop, own_bytes],
        "own floats": [crop, own_floats],
        "own arithmetic": [crop, tensor, shifted],
        "a lambda": [crop, tensor, T.Lambda(lambda x: x.sub(0.5).div_(0.5))],
        "several tensors": [crop, tensor, several_of_one],
        "in place": [crop, tensor, in_place_where_bright],
        "channels last": [crop, tensor, channels_last],
        "filters": [crop, blurred, tensor],
        "enhanced": [crop, enhanced, tensor],
    }  # fmt: skip
    return {name: T.Compose(chain) for name, chain in chains.items()}


def new_transforms():
    """The same of torchvision's newer transforms."""
    crop = v2.RandomResizedCrop(SIZE)
    ends = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.485, 0.456, 0.406], [0.2, 0.2, 0.2])]
    chains = {
        "the usual": [crop, v2.RandomHorizontalFlip(), *ends],
        "bytes to floats": [crop, v2.PILToTensor(), v2.ConvertImageDtype(torch.float32)],
        "jitter": [crop, v2.ColorJitter(0.4, 0.4, 0.4, 0.1), *ends],
        "erased": [crop, *ends, v2.RandomErasing(p=0.9)],
        "RandAugment": [crop, v2.RandAugment(), *ends],
        "AutoAugment": [crop, v2.AutoAugment(), *ends],
        "padded": [v2.Resize((SIZE, SIZE)), v2.RandomCrop(SIZE, padding=4), *ends],
        "turned": [crop, v2.RandomRotation(20), v2.RandomAffine(10), v2.RandomPerspective(), *ends],
        "grey": [crop, v2.RandomGrayscale(0.5), v2.Grayscale(3), *ends],
        "now and then": [crop, v2.RandomApply([v2.ColorJitter(0.4), v2.Lambda(blurred)], p=0.5), *ends],
        "choice": [crop, v2.RandomChoice([v2.RandomHorizontalFlip(1), v2.RandomVerticalFlip(1)]), *ends],
        "a tensor first": [v2.ToImage(), crop, *ends[1:]],
        "pure": [crop, *ends, v2.ToPureTensor()],
        "distorted": [v2.RandomZoomOut(p=1.0), v2.RandomPhotometricDistort(p=1.0), v2.Resize((SIZE, SIZE)), *ends],
    }
    return {name: v2.Compose(chain) for name, chain in chains.items()}


TRANSFORMS = transforms()
NEW_TRANSFORMS = new_transforms()


# -- datasets that do more -----------------------------------------------------------------------------------------


class Forgiving(Photos):
    """Takes another item where a file cannot be read."""

    def __getitem__(self, index):
        try:
            image = Image.open(self.paths[index]).convert("RGB")
        except Exception:
            return self[random.randint(0, len(self) - 1)]
        return self.transform(image), index


class Keeping(Photos):
    """Keeps images at every stage."""

    def __init__(self, paths):
        super().__init__(paths)
        self.kept = []

    def __getitem__(self, index):
        opened = Image.open(self.paths[index])
        image = opened.convert("RGB")
        crop = image.crop((1, 1, 30, 30))
        tensor = T.functional.to_tensor(crop)
        self.kept.append((image, opened, crop, tensor))
        return tensor, index


class Remembering(Photos):
    """An item is made of the one before it as well."""

    last = None

    def __getitem__(self, index):
        image = Image.open(self.paths[index]).convert("RGB").resize((20, 20))
        mixed = image if self.last is None else Image.blend(image, self.last.crop((0, 0, 20, 20)), 0.5)
        self.last = image
        return T.functional.to_tensor(mixed), index


class Counting(Photos):
    """Counts its items."""

    num = 0

    def __getitem__(self, index):
        Counting.num += 1
        return T.functional.to_tensor(Image.open(self.paths[index]).convert("RGB").resize((9, 9))), index


class Printing(Photos):
    """Tells of its items."""

    def __getitem__(self, index):
        print("item", index)
        return T.functional.to_tensor(Image.open(self.paths[index]).convert("RGB").resize((9, 9))), index


class Own(Photos):
    """Draws from a generator of its own."""

    def __init__(self, paths):
        super().__init__(paths)
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index):
        side = 8 + int(self.rng.integers(1))
        return T.functional.to_tensor(Image.open(self.paths[index]).convert("RGB").resize((side, side))), index


LINES = {
    name: next(number for number, line in enumerate(Path(__file__).read_text().splitlines(), 1) if text in line)
    for name, text in {
        "Keeping": "self.kept.append((", "Remembering": "self.last = image", "Counting": "Counting.num += 1",
        "Printing": 'print("item", index)', "Own": "self.rng.integers(1)",
    }.items()
}  # fmt: skip
"""Where each of them does what it should not."""


class Nested(Photos):
    """An item is a batch of another loader."""

    def __getitem__(self, index):
        loader = torch.utils.data.DataLoader(Photos(self.paths[index : index + 2], self.transform), batch_size=2)
        return next(iter(loader))[0][:1], index


class Numbers(Dataset):
    """No images at all."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.rand(3), index


class Count:
    """A transform that counts."""

    def __init__(self):
        self.num = 0

    def __call__(self, x):
        self.num += 1
        return x


class DrawingEverywhere(Photos):
    """Items draw from Python's, NumPy's and PyTorch's random numbers."""

    def __getitem__(self, index):
        image = Image.open(self.paths[index]).convert("RGB")
        left, top = random.randint(0, 9), int(np.random.randint(0, 9))
        image = image.crop((left, top, left + 24, top + 24))
        if torch.rand(1).item() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return T.functional.to_tensor(image), index


class AskingWhoIt(Photos):
    """Items tell in which worker they are built."""

    def __getitem__(self, index):
        info = torch.utils.data.get_worker_info()
        image = Image.open(self.paths[index]).convert("RGB").resize((20, 20))
        return T.functional.to_tensor(image), -1 if info is None else info.id
