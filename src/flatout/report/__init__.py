"""How is a record shown? On a terminal, as one HTML page, or as JSON; nothing is computed here but what is displayed.

In: a `Result`, ceilings or levers. Out: renderables, files, text. Importing this package imports no library: `rich`
comes with `flatout.report.terminal`, `jinja2` and `matplotlib` with the first page.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from flatout.result import Result, summary_of

PAGE = "report.html"
"""The page's name in a run folder."""


def json_text(result: Result) -> str:
    """What `--json` prints: `flatout.result.summary_of` as JSON, with null for what is not a finite number."""
    return json.dumps(_finite(summary_of(result)), allow_nan=False)


def write_html(result: Result, path: Path | str) -> Path:
    """Write the page whole or not at all; returns its path.

    Args:
        result: What to show.
        path: Of the file; its folder must be there.

    Raises:
        OSError: The file cannot be written.
    """
    from flatout.report import html

    return html.write_html(result, path)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    return [_finite(v) for v in value] if isinstance(value, list | tuple) else value
