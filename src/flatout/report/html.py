"""How does a result become one self-contained HTML page? No script, no network, readable on a phone and on paper.

In: a `Result`. Out: a file. Everything that comes from the record is escaped by the template, and what could hide or
move text is made visible first (`flatout.report.words.printable`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from flatout.judge.result import Result
from flatout.judge.samples import Samples
from flatout.records import output_file
from flatout.records.ceilings import Machine
from flatout.records.plan import label
from flatout.report import answer, evidence, figures, roofline, story, tables, thinned, tried, words

_PACKAGE = "flatout.report"
_EXPONENT = re.compile(r"(\d[\d.]*e-\d+)")
_NBSP = "\u00a0"
_LONG = re.compile(r"[^\s\0]{24}(?=[^\s\0]{4})")


def write_html(result: Result, path: Path | str, samples: Samples | None = None) -> Path:
    """Write the page whole or not at all; returns its path.

    Raises:
        OSError: The file cannot be written.
    """
    return write_whole(html_text(result, samples), path)


def write_whole(text: str, path: Path | str) -> Path:
    """Write a file whole or not at all; returns its path.

    Raises:
        OSError: It cannot be written.
    """
    output_file.write_whole([text], Path(path))
    return Path(path)


def html_text(result: Result, samples: Samples | None = None) -> str:
    """The page as text; `samples` are those of its run folder, where they are at hand."""
    return rendered("page.html.j2", _context(result, samples))


def rendered(template: str, context: dict[str, Any]) -> str:
    """One of our templates, with the style sheet."""
    environment = Environment(
        loader=FunctionLoader(_resource),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_shown,
    )
    environment.filters.update(
        command=_command,
        prose=_prose,
        plural=words.plural,
        sentence=words.sentence,
        percent=words.percent,
        seconds=words.seconds,
        duration=words.duration,
        memory=words.memory,
    )
    return environment.get_template(template).render({"css": Markup(_resource("page.css")), **context})  # our own file


def _shown(value: Any) -> Any:
    return words.printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _prose(text: str) -> Markup:
    """A sentence: what stands between backticks as code, numbers beside their units."""
    pieces = words.printable(text).split("`")
    if len(pieces) % 2 == 0:  # a backtick without its partner is one
        pieces[-2:] = ["`".join(pieces[-2:])]
    shown = (
        Markup("<code>{}</code>").format(_breakable(piece)) if number % 2 else _sentence(piece)
        for number, piece in enumerate(pieces)
    )
    return Markup("").join(shown)


def _sentence(text: str) -> Markup:
    """Escaped text in which numbers stay whole and beside their units."""
    pieces = _EXPONENT.split(words.unbroken(text, _NBSP))
    whole = Markup('<span class="whole">{}</span>')
    return Markup("").join(whole.format(p) if n % 2 else _breakable(p) for n, p in enumerate(pieces))


def _command(text: str) -> Markup:
    """A command whose arguments stay whole where they can."""
    whole = Markup('<span class="whole">{}</span>')
    tokens = words.TOKEN.findall(text) or [text]
    return Markup("<code>{}</code>").format(Markup(" ").join(whole.format(words.printable(token)) for token in tokens))


def _breakable(text: str) -> Markup:
    """Escaped text in which a very long word may be broken."""
    return Markup("<wbr>").join(escape(piece) for piece in _LONG.sub("\\g<0>\0", text).split("\0"))


def _resource(name: str) -> str:
    return resources.files(_PACKAGE).joinpath(name).read_text(encoding="utf-8")


def _context(result: Result, samples: Samples | None) -> dict[str, Any]:
    dots = thinned.dots(result)
    found = evidence.evidence(result, samples, dots)
    anchors = {one.anchor for one in found}
    return {
        "evidence": found,
        "anchors": anchors,
        "story_anchor": evidence.headline(result),
        "leads": [(name, to) for name, to in evidence.leads(result) if to in anchors],
        "source_links": evidence.SOURCES,
        "result": result,
        "script": result.script or "a script",
        "created": words.moment(result.created),
        "story": story.tell(result),
        "baseline": answer.baseline(result, windows=True),
        "binding": answer.binding(result),
        "levers": [label({name: how}) for name, how in result.plan.levers.items()] if result.plan is not None else [],
        "warnings": tried.warnings(result),
        "notes": [note for note in result.diagnosis.notes if not note.startswith("not observed: ")],
        "step": _step(result),
        "timeline": _timeline(dots, len(result.timeline)),
        "tried": _tried(result),
        "nothing_tried": words.sentence(tried.nothing_tried(result)),
        "roofline": _roofline(result),
        "numerics": tables.numerics(result),
        "sources": tables.sources(result),
        "ceilings": tables.ceilings(result),
        "machine": _machine(result),
    }


def _step(result: Result) -> dict[str, Any]:
    shown = result.plan is not None and result.tuned_anatomy is not None
    phases = dict.fromkeys([*result.anatomy.phases_s, *(result.tuned_anatomy.phases_s if shown else ())])  # type: ignore[union-attr]
    return {
        "svg": figures.step(result),
        "both": shown,
        "legend": [(name, figures.phase_colour(name), words.share(result.anatomy.share(name))) for name in phases],
        "outside": [(name, words.seconds(value)) for name, value in result.anatomy.outside_s.items()],
        "device": [(name, words.seconds(value)) for name, value in result.anatomy.device_s.items()],
        "table": tables.steps(result),
        "bounds": tables.bounds(result),
        "energy": tables.used(result),
        "reads": tables.read_sites(result),
    }


def _timeline(found: Sequence[thinned.Dot], number: int) -> dict[str, Any]:
    return {
        "svg": figures.timeline(found),
        "legend": [(kind, name) for kind, name in thinned.KINDS.items() if any(dot.kind == kind for dot in found)],
        "outside": any(dot.outside for dot in found),
        "impossible": number - len(found),
        "table": tables.timeline(found),
    }


def _tried(result: Result) -> dict[str, Any]:
    rows = tried.rows(result)
    return {
        "svg": figures.forest(result),
        "marks": {row.mark for row in rows if words.known(row.trial.ratio)},
        "unmeasured": [(row.trial.label, row.remark) for row in rows if not words.known(row.trial.ratio)],
        "untried": [(", ".join(levers), reason) for reason, levers in tried.reasons(result.untried)],
        "table": tables.trials(result),
    }


def _roofline(result: Result) -> dict[str, Any]:
    used = result.diagnosis.model_flops_utilization
    return {
        "svg": roofline.roofline(result),
        "used": words.percent(used) if used is not None else "",
        "achieved": words.scaled(result.diagnosis.achieved_flops_per_s, "FLOP/s"),
        "table": tables.operations(result),
    }


def machine_rows(here: Machine) -> list[tuple[str, str]]:
    """What the page says of the machine."""
    accelerators = ", ".join(f"{a.name} ({words.memory(a.memory_bytes)})" for a in here.accelerators)
    return [
        ("machine", here.hostname),
        ("processor", here.cpu),
        ("cores", f"{here.num_cores} usable of {here.num_cores_total}"),
        ("features", " ".join(here.cpu_features)),
        ("GPU", accelerators),
        ("memory", words.memory(here.memory_bytes)),
        ("system", here.operating_system),
    ]


def _machine(result: Result) -> list[tuple[str, str]]:
    header = result.header
    rows = [
        *machine_rows(result.machine),
        ("trained on", result.facts.device),
        ("threads", words.count(result.facts.num_threads)),
        ("ranks", words.count(header.world_size) if header.world_size > 1 else ""),
        ("framework", f"{words.label_of(header.framework)} {header.framework_version}".strip()),
        ("Python", header.python),
        ("flatout", result.flatout),
        ("typed", f"{header.script} {' '.join(header.arguments)}".strip()),
        ("isolation of trials", result.isolation),
    ]
    return [(name, value) for name, value in rows if value]
