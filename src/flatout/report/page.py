"""How does a `View` become one self-contained HTML page? No script, no network, readable on a phone and on paper.

In: a `View`. Out: text, or a file. Everything that comes from a record is escaped by the template, and what could hide
or move text is made visible first (`flatout.report.words.printable`).
"""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from flatout.records import output_file
from flatout.report import svg, words
from flatout.report.view import View

_PACKAGE = "flatout.report"
_EXPONENT = re.compile(r"(\d[\d.]*e-\d+)")
_NBSP = "\u00a0"


def write(view: View, path: Path | str) -> Path:
    """Write the page whole or not at all; returns its path.

    Raises:
        OSError: The file cannot be written.
    """
    output_file.write_whole([text(view)], Path(path))
    return Path(path)


def text(view: View) -> str:
    """The page as text."""
    environment = Environment(
        loader=FunctionLoader(_resource),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters.update(
        command=_command, prose=_prose, sentence=words.sentence, stamp=words.stamp, svg=svg.drawn
    )
    css = Markup(_resource("page.css"))  # our own file
    return environment.get_template("view.html.j2").render({"css": css, "view": view, "anchors": view.anchors})


def _shown(value: Any) -> Any:
    return words.printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _prose(text: str) -> Markup:
    """A sentence: what stands between backticks as code, numbers beside their units."""
    pieces = words.printable(text).split("`")
    if len(pieces) % 2 == 0:  # a backtick without its partner is one
        pieces[-2:] = ["`".join(pieces[-2:])]
    shown = (
        Markup("<code>{}</code>").format(piece) if number % 2 else _sentence(piece)
        for number, piece in enumerate(pieces)
    )
    return Markup("").join(shown)


def _sentence(text: str) -> Markup:
    """Escaped text in which numbers stay whole and beside their units."""
    pieces = _EXPONENT.split(words.unbroken(text, _NBSP))
    whole = Markup('<span class="whole">{}</span>')
    return Markup("").join(whole.format(p) if n % 2 else escape(p) for n, p in enumerate(pieces))


def _command(text: str) -> Markup:
    """A command whose arguments stay whole where they can."""
    whole = Markup('<span class="whole">{}</span>')
    tokens = words.TOKEN.findall(text) or [text]
    return Markup("<code>{}</code>").format(Markup(" ").join(whole.format(words.printable(token)) for token in tokens))


def _resource(name: str) -> str:
    return resources.files(_PACKAGE).joinpath(name).read_text(encoding="utf-8")
