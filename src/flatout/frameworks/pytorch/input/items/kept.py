"""One dataset's store on the disk, as this process has it.

Rows go to the disk as long as this process may write them there; nothing that goes wrong here stops a run: from then on
what comes stays in memory, and a line says why. In: an `Identity`, batches. Out: rooms for rows, and the line.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.frameworks.pytorch.input.items.columns import Places, Unkept, described, parts_of
from flatout.frameworks.pytorch.input.items.file_map import Bytes
from flatout.frameworks.pytorch.input.items.identity import Identity
from flatout.frameworks.pytorch.input.items.row_files import ITEMS, RowFiles, grown
from flatout.guest.interruptions import let_through
from flatout.records.store_state import Part, State, free_bytes

if TYPE_CHECKING:
    from flatout.frameworks.pytorch.input.items.shelf import About, Shelf


class Kept:
    """One dataset's store on the disk.

    Args:
        shelf: Where stores are found and made.
        identity: What the items follow from.
        about: What the dataset is called.
        right: Whether what was computed is still taken for what the script gives.
        rows_for: For so many bytes an item, how many items memory has room for.
    """

    def __init__(
        self,
        shelf: Shelf,
        identity: Identity,
        about: About,
        right: Callable[[], bool],
        rows_for: Callable[[int], int],
    ) -> None:
        self.identity = identity
        self.about = about
        self.number = 0
        """Its place among those of this process."""
        self.torn = ""
        """Why a store that was found is to be made anew."""
        self.in_memory = False
        """Whether rows that come are written into the rooms."""
        self.full = False
        """Whether the disk has no room for more."""
        self._shelf = shelf
        self._right = right
        self._rows_for = rows_for
        self._files: RowFiles | None = None
        self._notes: list[str] = []
        self._told = False

    # -- open ----------------------------------------------------------------------------------------------------

    def resume(self) -> State | None:
        """Open the store with these items, where there is one; what is known about it."""
        self._files = self._shelf.opened(self)
        return self._files.state if self._files is not None else None

    def begin(self, batch: Any, made_of: Sequence[Part], capacity: int, num_items: int) -> int:
        """Make a new one for items like those of a batch; for how many there is room, 0 where there is no store."""
        try:
            parts = (ITEMS, *made_of, *parts_of(batch))
            form = described(batch)
            on_disk = self._disk_rows(sum(part.row_bytes for part in parts))
        except (Unkept, OSError) as problem:
            let_through(problem)
            self.note(str(problem))
            return 0
        capacity = min(capacity, on_disk)
        if capacity <= 0:
            self.note("the disk has no room")
            return 0
        self._files = self._shelf.made(self, form, parts, capacity, num_items)
        return capacity if self._files is not None else 0

    def with_room(self, folder: Path, state: State) -> State:
        """The state of a store that is to be written, with room for what may come.

        Raises:
            OSError: There cannot be more.
        """
        item_bytes = sum(part.row_bytes for part in state.parts)
        wanted = min(state.num_items, self._rows_for(item_bytes), state.num_rows + self._disk_rows(item_bytes, folder))
        return grown(folder, state, wanted) if wanted > state.capacity else state

    def _disk_rows(self, item_bytes: int, folder: Path | None = None) -> int:
        """Rows for which the disk has room."""
        return max(0, free_bytes(folder or self._shelf.folders[0])) // item_bytes

    # -- rows ----------------------------------------------------------------------------------------------------

    @property
    def there(self) -> bool:
        """Whether rows lie on the disk."""
        return self._files is not None

    @property
    def writes(self) -> bool:
        """Whether rows are appended to those on the disk."""
        return self._files is not None and self._files.writes

    @property
    def rooms(self) -> list[Bytes]:
        """The bytes of all parts but the first, which says which items these are."""
        assert self._files is not None
        return self._files.rows[1:]

    def items(self) -> Places:
        """Which item each row on the disk is of."""
        assert self._files is not None
        return self._files.items()

    def sound(self, places: Places) -> bool:
        """Whether the rows at these places are those that were written."""
        return self._files is None or self._files.sound(places)

    def append(self, items: Places, parts: Sequence[np.ndarray]) -> bool:
        """Write rows to the disk; False, and never again, where that is not possible."""
        assert self._files is not None
        try:
            self._files.append([items, *parts])
            if self._files.due:
                self.count()
        except OSError as problem:
            let_through(problem)
            self.leave(f"from there on in memory: {problem.strerror or problem}")
            return False
        return True

    def count(self) -> None:
        """Have what was appended count, if it still follows from the same.

        Raises:
            OSError: The disk refuses it.
        """
        if not self._right():
            self.disown()
        if self._files is None or not self._files.writes or self._files.num_rows == self._files.state.num_rows:
            return
        begun_s = time.monotonic()
        if self.identity.still_holds():
            self._files.commit()
            self._files.wait_for(time.monotonic() - begun_s)
            self.full = free_bytes(self._files.folder) <= 0
        else:
            self.leave("its data were changed in a way that PyTorch does not count")

    def leave(self, why: str) -> None:
        """Write no more; what counts by now stays."""
        if self.writes:
            self.note(why)
        if self._files is not None:
            self._files.stop_writing()

    def go_on_in_memory(self) -> bool:
        """From here on rows are written into the rooms; False where that is not possible."""
        if self._files is None:
            return False
        self._files.stop_writing()
        try:
            self._files.go_on_in_memory()
        except OSError as problem:
            let_through(problem)
            return False
        self.in_memory = True
        return True

    def hand_over(self) -> None:
        """Let another loader of this process go on writing."""
        with contextlib.suppress(OSError):
            self.count()
        if self._files is not None:
            self._files.stop_writing()
        self._told = True  # the other one will

    def lose(self, why: str) -> None:
        """The rows are not what was written: forget them, and make the store anew where this process may."""
        self.found_torn(why)
        if self._files is not None:
            self._files.close()
        self._files = None

    def disown(self) -> None:
        """The items are not what the script gives: nobody may use them."""
        files, self._files = self._files, None
        if files is not None:
            self.note(
                f"store `{files.folder.name}` is gone: its items differ from the script's"
                if files.remove()
                else f"`flatout store rm {files.folder.name}`: its items differ from the script's"
            )
            files.close()

    # -- the line ------------------------------------------------------------------------------------------------

    def note(self, why: str) -> None:
        """Something that is to be said about it."""
        if why not in self._notes:
            self._notes.append(why)

    def found_torn(self, why: str) -> None:
        """A store with these items cannot be used."""
        self.torn = why

    def finish(self) -> None:
        """Count what is there, and say what it came to; once."""
        if self._told:
            return
        self._told = True
        try:
            self.count()
        except OSError as problem:
            self.note(f"what came last is not kept: {problem.strerror or problem}")
        if self._files is None:
            self._shelf.say(f"the items of `{self.about.dataset}` are kept in memory only", self._notes)
            return
        state, name = self._files.state, self._files.folder.name
        size = state.num_rows * sum(part.row_bytes for part in state.parts) / 2**20
        line = f"store `{name}`: {state.num_rows:,} of {state.num_items:,} items on the disk, {size:,.0f} MiB"
        self._shelf.say(line, self._notes, about=name)
        self._files.close()
