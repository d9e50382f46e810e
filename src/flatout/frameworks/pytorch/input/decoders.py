"""Images that were decoded once are not decoded again.

PIL's decoders of JPEG and PNG are functions of bytes. Where one is given the same bytes as before, piece by piece, it
is answered the same, and the same pixels are copied into the image. All else is PIL's own: opening, reading, errors,
palettes, attributes. So it does not matter where the bytes come from, and a file that was changed has other bytes. In:
the decoders that PIL asks for. Out: decoders.
"""

from __future__ import annotations

import marshal
import sys
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any
from zlib import crc32

from torch.utils.data import DataLoader

from flatout.frameworks.pytorch.input.decoded import SHARE, Answer, DecodedImages, Kept
from flatout.frameworks.pytorch.input.items.shadow import EVERY
from flatout.frameworks.pytorch.input.worker_settings import start_method
from flatout.frameworks.pytorch.seams.patches import Patch
from flatout.guest.interruptions import let_through

DECODERS = frozenset(("jpeg", "zip"))

RAW_MODES = {
    "RGB": "RGBX", "L": "L", "P": "P", "CMYK": "CMYK", "RGBA": "RGBA", "LA": "LA", "1": "1", "I;16": "I;16", "I": "I"
}  # fmt: skip
"""Under which name PIL hands out the pixels of a mode as they lie in its memory, or with all that is in them."""

NUM_FIRST = 4
"""Images that are decoded all the same, and compared, before kept ones are given; after that one of `EVERY`."""

LEAST_NS = 200_000
"""What takes less is not kept: finding it again would take as long."""

_SOUND = (-1, 0)
"""What a decoder answers to the last piece of an image without errors."""


class Decoding:
    """All images that a process decodes."""

    def __init__(self) -> None:
        self._images: DecodedImages | None = None
        self._num_before = 0
        self._patch: Patch | None = None

    def engage(self, on: bool) -> None:
        """From the next image on, or no longer, in workers that run as well; what is kept stays."""
        if self._images is None and on:
            self._images = DecodedImages()
        if self._images is not None:
            self._images.engage(on)
            self._num_before += self.num_given
            self.before_pass()

    def before_pass(self) -> None:
        """Workers may be forked: they are to know what is kept, and PIL may have been loaded only now."""
        images = self._images
        if images is not None and images.engaged:
            images.look_through()
            if self._patch is None and "PIL.Image" in sys.modules:
                self._patch = Patch(sys.modules["PIL.Image"], "_getdecoder", self._replaced)
        elif self._patch is not None:
            self._patch.remove()
            self._patch = None

    @property
    def num_given(self) -> int:
        """Images that were not decoded again since it was engaged."""
        num = 0 if self._images is None else self._images.num_found
        return num - min(num, NUM_FIRST) - num // EVERY - self._num_before

    def why_not(self, loader: DataLoader[Any], *, for_workers: bool) -> str | None:
        """Why images of a loader cannot be kept, in a few words; None where they may, if it has some."""
        if "PIL.Image" not in sys.modules:
            return "PIL is not used"
        if for_workers and start_method(loader) != "fork":
            return "the workers are not forked, and share no memory"
        return None

    def _replaced(self, original: Callable[..., Any], patch: Patch) -> Callable[..., Any]:
        theirs, images = sys.modules["PIL.Image"].DECODERS, self._images

        def _getdecoder(mode: str, decoder_name: str, args: Any, extra: tuple[Any, ...] = ()) -> Any:
            known = decoder_name in DECODERS and mode in RAW_MODES and decoder_name not in theirs
            if images is None or not (known and patch.active and images.engaged):
                return original(mode, decoder_name, args, extra)
            return Decoder(images, original, (mode, decoder_name, args, extra))

        return _getdecoder


class Decoder:
    """What PIL gives the bytes of one image to, in the place of its own decoder."""

    pulls_fd = False

    def __init__(self, images: DecodedImages, make: Callable[..., Any], wanted: tuple[Any, ...]) -> None:
        self._images = images
        self._make = make
        self._wanted = wanted
        self._own: Any = None
        """PIL's, once there is something to decode."""
        self._pieces: list[bytes] = []
        self._answers: list[Answer] = []
        self._key: bytes | None = None
        self._kept: Kept | None = None
        self._due = False
        self._took_ns = 0

    def __getattr__(self, name: str) -> Any:
        if name in ("_own", "_image"):  # while being copied, or without an image
            raise AttributeError(name)
        return getattr(self._plain(), name)

    def setimage(self, image: Any, extents: Any = None) -> None:
        """Where the pixels are to be; a part of an image is PIL's business."""
        whole = (0, 0, *image.size)
        self._image, self._extents = image, whole if extents is None else extents
        if image.mode != self._wanted[0] or tuple(self._extents) != whole:
            self._plain()

    def decode(self, piece: Any) -> Answer:
        """How much of the piece is done with, or -1 at the end; and an error, or 0."""
        begun_ns = perf_counter_ns()
        answer = self._guarded(self._remembered, piece) if self._own is None else None
        if answer is None:
            answer = self._plain().decode(piece)
            self._answers.append(answer)
        self._pieces.append(piece)
        self._took_ns += perf_counter_ns() - begun_ns
        if answer == _SOUND:
            self._guarded(self._ended)
        return answer

    def cleanup(self) -> None:
        """PIL needs it no more."""
        if self._own is not None:
            self._own.cleanup()

    def _guarded(self, call: Callable[..., Any], *given: Any) -> Any:
        try:
            return call(*given)
        except Exception as problem:  # noqa: BLE001  whatever it is, PIL's decoder is there
            let_through(problem)
            self._images.set_aside()

    def _plain(self) -> Any:
        """PIL's decoder, behind the pieces so far."""
        if self._own is None:
            self._own = self._make(*self._wanted)
            self._own.setimage(self._image, self._extents)
            self._answers = [self._own.decode(piece) for piece in self._pieces]
        return self._own

    def _remembered(self, piece: Any) -> Answer | None:
        """What was answered to this piece behind those before it; None where PIL's decoder is to be asked."""
        number = len(self._pieces)
        if not number and type(piece) is bytes:
            # without marks for parts that are one object, which differ from process to process
            self._key = marshal.dumps((self._wanted, self._image.size, crc32(piece)), 2)
            self._kept = self._images.find(self._key)
        kept = self._kept
        if kept is None or self._images.read(kept.place(number)) != piece:
            return None
        if number + 1 == len(kept.lengths):
            num = self._images.count()
            self._due = num <= NUM_FIRST or num % EVERY == 0
            if self._due:
                return None
            self._fill(self._images.read(kept.place(number + 1)))
        return kept.answers[number]

    def _ended(self) -> None:
        """The image is there."""
        images, kept = self._images, self._kept
        if kept is not None:
            if self._own is None:
                images.saved(kept.took_ns - self._took_ns)
            elif self._due and self._pixels() != images.read(kept.place(len(self._pieces))):
                images.set_aside()
            return
        images.saved(int(SHARE * self._took_ns))
        if self._key is not None and self._took_ns >= LEAST_NS and images.may_keep:
            begun_ns = perf_counter_ns()
            images.put(self._key, self._pieces, self._answers, self._took_ns, self._pixels())
            images.saved(begun_ns - perf_counter_ns())

    def _raw(self) -> tuple[str, str, tuple[Any, ...]]:
        return self._image.mode, "raw", (RAW_MODES[self._image.mode], 0, 1)

    def _fill(self, pixels: bytes) -> None:
        """Copy pixels into the image."""
        raw = self._make(*self._raw())
        raw.setimage(self._image, self._extents)
        raw.decode(pixels)
        raw.cleanup()

    def _pixels(self) -> bytes:
        """The image's pixels, as `_fill` takes them."""
        encoder = sys.modules["PIL.Image"]._getencoder(*self._raw())
        encoder.setimage(self._image, self._extents)
        found, error = [], 0
        while not error:
            _, error, some = encoder.encode(max(2**16, 4 * self._image.size[0] * self._image.size[1]))
            found.append(some)
        return b"".join(found)
