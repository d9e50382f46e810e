"""What pixels are in a file? As PIL decodes them, and of a JPEG only the rows that are wanted, where that is safe.

The rows of a JPEG come one after another, so those above a place are the same whatever is below. Below may be an error
that PIL would raise, though; therefore only files of one scan without any marker in it: in such data libjpeg knows no
errors. The first pictures are decoded both ways. In: a file's bytes and the class of PIL that reads it. Out: an image.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Any

from PIL import Image, ImageFile

NUM_COMPARED = 8
"""Pictures of a process that are decoded both ways."""

_MARKER = re.compile(rb"\xff[^\x00]")
_END = b"\xff\xd9"
_OK, _LEFT_OFF = (-1, 0), (-1, -2)
"""What PIL's decoder gives at the end of a file, and where it leaves off before that."""


@dataclass(frozen=True, slots=True)
class Opened:
    """An image file as PIL found it.

    Attributes:
        kind: The class of PIL that reads it.
        filename: As PIL has it.
        size: Width and height.
        mode: As in the file.
        scan: Where the pixels of a JPEG begin, right behind the marker that says so; else 0.
    """

    kind: type[Any]
    filename: Any
    size: tuple[int, int]
    mode: str
    scan: int = 0

    def whole(self, content: bytes) -> Any:
        """The image, loaded.

        Raises:
            Exception: Whatever PIL raises, or ours where the file is another one by now.
        """
        image = self.kind(io.BytesIO(content), self.filename)
        if image.size != self.size or image.mode != self.mode:
            raise OSError("the file has changed since it was opened")
        image.load()
        return image


class Rows:
    """Decodes the upper rows of JPEG files, until that has once been wrong."""

    def __init__(self) -> None:
        self.num_compared = 0
        self.wrong: str | None = None

    def upper(self, opened: Opened, content: bytes, num_rows: int) -> Any | None:
        """An image of the upper rows; None where they cannot be decoded alone."""
        width, height = opened.size
        if self.wrong is not None or not opened.scan or num_rows >= height or ImageFile.LOAD_TRUNCATED_IMAGES:
            return None
        marker = _MARKER.search(content, opened.scan)
        if marker is None or marker.group() != _END:
            return None
        core = _decoded(content, opened.mode, width, num_rows)
        if core is None:
            return None
        rows = Image.Image()._new(core)
        if self.num_compared < NUM_COMPARED:
            self.num_compared += 1
            if opened.whole(content).crop((0, 0, width, num_rows)).tobytes() != rows.tobytes():
                self.wrong = f"the upper rows of `{opened.filename}` differ when they are decoded alone"
                return None
        return rows


def _decoded(content: bytes, mode: str, width: int, num_rows: int) -> Any | None:
    """The upper rows; None where the last of them is not there for certain."""
    core = Image.core.new(mode, (width, num_rows))  # type: ignore[attr-defined]  # PIL's own C part
    decoder = Image._getdecoder(mode, "jpeg", (mode, ""), ())
    try:
        decoder.setimage(core, (0, 0, width, num_rows))
        ended = decoder.decode(content)
    finally:
        decoder.cleanup()
    if ended not in (_OK, _LEFT_OFF):
        return None
    # an error further up ends it alike, but then the last row is as empty as it was made
    last = core.crop((0, num_rows - 1, width, num_rows))
    return core if last.getbbox() is not None else None


def scan_of(own: dict[str, Any]) -> int:
    """Where the pixels of a JPEG begin whose rows can be decoded alone; 0 where they cannot.

    `own`: the attributes of what PIL's `open` gave.
    """
    size, mode = own["_size"], own["_mode"]
    if mode not in ("L", "RGB") or own["info"].get("progressive"):
        return 0
    if tuple(own["tile"][0]) != ("jpeg", (0, 0, *size), 0, (mode, "")):
        return 0
    return int(own["fp"].tell())
