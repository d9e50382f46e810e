"""Where does flatout keep what serves later runs? In its folder of the user's caches.

In: the environment. Out: a path. Imported in the user's process: standard library only.
"""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path | None:
    """`flatout` under `$XDG_CACHE_HOME`, else under `~/.cache`; None where there is no home.

    Source: XDG Base Directory Specification 0.8 (a relative `$XDG_CACHE_HOME` is to be ignored).
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return None
    return base / "flatout"
