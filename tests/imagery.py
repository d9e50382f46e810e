"""Photographs for tests: small files of every kind that datasets meet, and the ways in which scripts open them."""

import copy
import io
import pickle

import numpy as np
from PIL import Image, ImageOps
from torch.utils.data import Dataset


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
    """What libraries do with an image, each with one of its own."""

    def image():
        return Image.open(path).convert("RGB").crop((2, 3, 25, 26))

    def opened():
        return Image.open(path)

    same = image()
    return [
        pickle.loads(pickle.dumps(image())), copy.copy(image()), copy.deepcopy(image()), copy.copy(opened()).size,
        image() == image(), same == same, opened() == opened(), repr(image())[:30], isinstance(opened(), Image.Image),
        hasattr(image(), "n_frames"), image().info, image().tobytes(), np.asarray(opened()).sum(), opened().getbbox(),
        image().histogram()[:9], image().getextrema(), opened().getpixel((1, 1)),
        opened().split(), image().point(lambda value: value // 2), image().load()[3, 3], ImageOps.autocontrast(image()),
        image().resize((5, 5)).getbands(), pickle.loads(pickle.dumps(opened())), copy.deepcopy(same),
    ]  # fmt: skip


OPENERS = {
    each.__name__: each
    for each in (from_path, from_file, closed_behind, from_bytes, upright, in_grey, loaded_first, closed_at_once,
                 copied, made_small, drafted, painted)
}  # fmt: skip
