"""What pixels are in a file? As PIL decodes them, and of a JPEG only the rows that are wanted, where that is safe.

The rows of a JPEG come one after another, so those above a place are the same whatever is below. Below may be an error
that PIL would raise, though; therefore only files of one scan without any marker in it: in such data libjpeg knows no
errors. The first pictures are decoded both ways. In: a file's bytes, and what PIL found at its head. Out: an image.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field
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
        head: Of a JPEG, all that stands before its pixels; of other files nothing.
        arguments: What PIL's decoder of JPEGs is given.
        one_scan: Whether the pixels of a JPEG come row after row.
        truncated: Whether PIL takes files that end too early, at the time.
    """

    kind: type[Any]
    filename: Any
    size: tuple[int, int]
    mode: str
    head: bytes = b""
    arguments: tuple[Any, ...] = ()
    one_scan: bool = False
    truncated: bool = field(default_factory=lambda: ImageFile.LOAD_TRUNCATED_IMAGES)

    def whole(self, content: bytes) -> Any:
        """The image, loaded.

        Raises:
            Exception: Whatever PIL raises, or ours where the file is another one by now.
        """
        self._check_settings()
        if not content.startswith(self.head):
            raise OSError("the file has changed since it was opened")
        if self.head and not ImageFile.LOAD_TRUNCATED_IMAGES:
            core, ended = self._rows(content, self.size[1])
            if ended == _OK:
                return Image.Image()._new(core)
        image = self.kind(io.BytesIO(content), self.filename)
        if image.size != self.size or image.mode != self.mode:
            raise OSError("the file has changed since it was opened")
        image.load()
        self._check_settings()
        return image

    def _check_settings(self) -> None:
        if bool(ImageFile.LOAD_TRUNCATED_IMAGES) is not bool(self.truncated):
            raise OSError("PIL's settings have changed since the file was opened")

    def upper(self, content: bytes, num_rows: int) -> Any | None:
        """The upper rows of a JPEG; None where they cannot be decoded alone."""
        if not self.one_scan or num_rows >= self.size[1] or not content.startswith(self.head):
            return None
        marker = _MARKER.search(content, len(self.head))
        if marker is None or marker.group() != _END or ImageFile.LOAD_TRUNCATED_IMAGES:
            return None
        core, ended = self._rows(content, num_rows)
        # an error further up ends it as well, but then the last row is as empty as it was made
        last = core.crop((0, num_rows - 1, self.size[0], num_rows))
        if ended not in (_OK, _LEFT_OFF) or last.getbbox() is None:
            return None
        return Image.Image()._new(core)

    def _rows(self, content: bytes, num_rows: int) -> tuple[Any, tuple[int, int]]:
        """The memory of PIL's decoder for so many rows, and how it ended."""
        size = self.size[0], num_rows
        core = Image.core.new(self.mode, size)  # type: ignore[attr-defined]  # PIL's own C part
        decoder = Image._getdecoder(self.mode, "jpeg", self.arguments, ())
        try:
            decoder.setimage(core, (0, 0, *size))
            return core, decoder.decode(content)
        finally:
            decoder.cleanup()


class Rows:
    """Decodes the upper rows of JPEG files, until that has once been wrong."""

    def __init__(self) -> None:
        self.num_compared = 0
        self.wrong: str | None = None

    def upper(self, opened: Opened, content: bytes, num_rows: int) -> Any | None:
        """An image of the upper rows; None where they cannot be decoded alone."""
        rows = None if self.wrong is not None else opened.upper(content, num_rows)
        if rows is not None and self.num_compared < NUM_COMPARED:
            self.num_compared += 1
            if opened.whole(content).crop((0, 0, opened.size[0], num_rows)).tobytes() != rows.tobytes():
                self.wrong = f"the upper rows of `{opened.filename}` differ when they are decoded alone"
                return None
        return rows


def opened_jpeg(kind: type[Any], own: dict[str, Any], head: bytes) -> Opened:
    """A JPEG as PIL found it.

    `own`: the attributes of what PIL's `open` gave; `head`: all that stands before its pixels.
    """
    name, extents, offset, arguments = own["tile"][0]
    usual = name == "jpeg" and extents == (0, 0, *own["_size"]) and offset == 0
    one_scan = own["_mode"] in ("L", "RGB") and not own["info"].get("progressive")
    return Opened(
        kind, own["filename"], own["_size"], own["_mode"], head if usual else b"", arguments, one_scan and usual
    )
