"""read_ahead: read the files that the next batches open, from slow storage, before the script opens them.

PyTorch's own samplers say a few batches early which items come next, and lists of names in the dataset say which files
they open; nothing of the script's is run. A file that was read in vain costs time and nothing else. Files that are in
memory already are left alone. It helps loaders with workers of their own as well.
"""

from __future__ import annotations

from flatout.frameworks.pytorch.lever_bases import LoaderLever


class ReadAhead(LoaderLever):
    """Files are read before they are opened; those that were stay in the kernel's memory as long as it likes."""

    name = "read_ahead"
    summary = "files of the next batches read into memory before they are opened, from slow storage"
    part = "files"
    counted = ("num_files", "files read ahead")
