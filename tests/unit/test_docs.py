"""Documentation that cannot be wrong unnoticed: fresh reference, whole links, commands that parse, examples that run.

Examples with `>>>` are run by pytest itself (`--doctest-glob=*.md`); here it is checked that none is left out.
"""

import ast
import copy
import importlib
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import geometric_mean

import click
import pytest

import flatout
from flatout.cli import COMMANDS
from flatout.cli import flatout as group

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
GENERATED = ("commands.md", "errors.md", "json.md", "levers.md", "plan-file.md", "records.md")
SOURCE = ROOT / "src" / "flatout"
ARCHITECTURE = DOCS / "architecture.md"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted(DOCS.rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    *sorted((ROOT / "changelog.d").glob("*.md")),
]
assert len(PAGES) > 30
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```\s*$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(flatout [^`]+)`")


def found_in_pages(problems_of: Callable[[Path], Iterable[str]]) -> list[str]:
    """What is wrong, with the page it is on."""
    return [f"{page.relative_to(ROOT).as_posix()}: {problem}" for page in PAGES for problem in problems_of(page)]


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, *kinds: str) -> list[str]:
    return [body for _, kind, body in FENCE.findall(text_of(page)) if kind in kinds]


# -- reference -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fresh_reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        importlib.import_module("make_reference").write_all(folder)
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    return folder


def test_the_reference_says_what_the_code_says(fresh_reference):
    made = {path.name: text_of(path) for path in fresh_reference.iterdir()}
    assert set(made) == set(GENERATED)
    for name, text in made.items():
        committed = REFERENCE / name
        assert committed.exists(), f"`{name}` is missing: `python scripts/make_reference.py`"
        assert text_of(committed) == text, f"`{name}` is stale: `python scripts/make_reference.py`, and commit it"


# -- links ---------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, by the rule that MkDocs and GitHub share."""
    found: set[str] = set()
    for heading in re.findall(r"^#{1,6} (.+)$", FENCE.sub("", text_of(page)), re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
        found.add(re.sub(r"\s+", "-", words))
    return found


def wrong_links(page: Path) -> Iterator[str]:
    for target in LINK.findall(FENCE.sub("", text_of(page))):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        place = (page.parent / file).resolve() if file else page
        if not place.exists():
            yield f"`{target}` leads nowhere"
            continue
        if page.is_relative_to(DOCS) and not place.is_relative_to(DOCS):
            yield f"`{target}` leaves docs/, which the built pages cannot"
        if anchor and anchor not in anchors(place):
            yield f"`{target}`: no such heading; there are {sorted(anchors(place))}"


def test_links_lead_somewhere():
    assert found_in_pages(wrong_links) == []


def test_every_page_is_in_the_navigation():
    navigation = text_of(ROOT / "mkdocs.yml").partition("\nnav:\n")[2]
    listed = set(re.findall(r"[\w./-]+\.md", navigation))
    there = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert listed <= there, "mkdocs.yml names pages that are not there"
    assert {name for name in there - listed if not name.startswith("decisions/")} == set()


# -- files and names -----------------------------------------------------------------------------------------------

NAMED_FILE = re.compile(r"`((?:benchmarks|docs|examples|scripts|src|tests)/[\w./-]*\w|CONTRIBUTING\.md)(?:::\w+)?/?`")
NAMED_CODE = re.compile(r"`([\w/]+\.py)(?:::(\w+(?:\.\w+)?))?`")


def wrong_files(page: Path) -> Iterator[str]:
    for name in NAMED_FILE.findall(FENCE.sub("", text_of(page))):
        if not (ROOT / name).exists():
            yield f"`{name}` is not there"


def test_files_that_a_page_names_are_there():
    assert found_in_pages(wrong_files) == []


def names_in(path: Path) -> set[str]:
    """What a module defines: functions, classes, constants, and methods as `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(text_of(path)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def wrong_code(page: Path) -> Iterator[str]:
    for file, name in NAMED_CODE.findall(text_of(page)):
        path = next(
            (path for path in (SOURCE / file, SOURCE / "frameworks" / file, ROOT / file) if path.exists()), None
        )
        if path is None:
            yield f"`{file}` is not there"
        elif name and name not in names_in(path):
            yield f"`{file}` has no `{name}`"


def test_code_that_the_page_about_the_house_names_is_there():
    named = [name for _, name in NAMED_CODE.findall(text_of(ARCHITECTURE)) if name]
    assert len(named) > 40
    assert list(wrong_code(ARCHITECTURE)) == []


def test_every_file_that_patches_is_on_the_page_about_the_house():
    inside = SOURCE / "frameworks"
    patching = {p.relative_to(inside).as_posix() for p in inside.rglob("*.py") if re.search(r"\bPatch\(", text_of(p))}
    named = {file for file, _ in NAMED_CODE.findall(text_of(ARCHITECTURE))}
    assert patching and patching <= named


# -- lines ---------------------------------------------------------------------------------------------------------


def long_lines(page: Path) -> Iterator[str]:
    """Lines over 120 characters, but for tables, links, and what programs wrote."""
    text = re.sub(r"<!-- ([\w-]+):begin -->.*?<!-- \1:end -->", "", FENCE.sub("", text_of(page)), flags=re.DOTALL)
    yield from (f"{line[:60]}..." for line in text.splitlines() if len(line) > 120 and not re.match(r"\||.*\]\(", line))


def test_lines_of_a_page_are_no_longer_than_120_characters():
    assert found_in_pages(long_lines) == []


def test_pages_stay_short():
    """Limits of the house: somebody has to read this."""
    lines = {page: len(text_of(page).splitlines()) for page in PAGES}
    generated = {DOCS / "gpu.md", *(REFERENCE / name for name in GENERATED)}
    by_hand = sum(num for page, num in lines.items() if page.is_relative_to(DOCS) and page not in generated)
    assert by_hand + lines[ROOT / "README.md"] <= 2500
    assert lines[ARCHITECTURE] <= 170
    assert lines[DOCS / "what-it-brings.md"] <= 80
    assert {page.name: num for page, num in lines.items() if page.parent == DOCS / "decisions" and num > 25} == {}


def test_what_it_brings_and_the_table_of_scripts_quote_the_raw_samples():
    paths = (ROOT / "benchmarks" / "results").glob("script_*_intel-xeon-slow-bf16_202611.json")
    found = {re.match(r"script_(.*)_intel", path.name)[1]: json.loads(text_of(path)) for path in paths}
    table = text_of(ROOT / "benchmarks" / "public-scripts.md").partition("twelve-scripts-output:end")[0]
    for name, results in found.items():
        plain, expert = (
            f"{one['ratio']:.2f} [{one['low']:.2f}, {one['high']:.2f}]"
            for one in (results["over_plain"], results["over_expert"])
        )
        assert re.search(rf"^\| `{name}` \|.*\| {re.escape(plain)} \| {re.escape(expert)} \|", table, re.M), name
    said = " ".join(text_of(DOCS / "what-it-brings.md").split())
    over_plain, over_expert = ([one[key]["ratio"] for one in found.values()] for key in ("over_plain", "over_expert"))
    assert len(found) == 12 and f"geometric mean {geometric_mean(over_plain):.2f} [" in said
    assert f"from {min(over_plain):.2f} to {max(over_plain):.2f}, and {geometric_mean(over_expert):.2f} [" in said


# -- commands ------------------------------------------------------------------------------------------------------


def commands_in(page: Path) -> list[str]:
    """Every `flatout ...` that a page tells the reader to type."""
    found = []
    for body in blocks(page, "console", "bash", "sh", "shell", "yaml"):
        joined = body.replace("\\\n", " ")
        for line in joined.splitlines():
            command = re.match(r"\s*(?:\$ |- run: |run: )?(?:\S+=\S+ )*(flatout(?: .*)?)$", line)
            if command:
                found.append(command[1])
    return found + INLINE.findall(FENCE.sub("", text_of(page)))


def parse(line: str) -> None:
    """Parse a command as click would, and run nothing."""
    words = shlex.split(line, comments=True)[1:]
    words = words[: next((i for i, word in enumerate(words) if word in ("|", ">", "&&", ";", "||")), len(words))]
    context = click.Context(group, info_name="flatout")
    if words[0] in ("--help", "-h", "--version"):
        return
    command = group.get_command(context, words[0])
    assert command is not None, f"no such command: {words[0]}"
    command = copy.copy(command)
    command.params = [copy.copy(option) for option in command.params]
    for option in command.params:
        option.callback = None
    command.make_context(words[0], list(words[1:]), parent=context, resilient_parsing=False)


def wrong_commands(page: Path) -> Iterator[str]:
    for line in commands_in(page):
        if "..." in line or line.split()[1:2] == ["COMMAND"]:
            continue
        try:
            parse(line)
        except (click.exceptions.Exit, click.exceptions.NoArgsIsHelpError):
            continue  # --help
        except (click.UsageError, AssertionError) as problem:
            yield f"`{line}`: {problem}"


def test_commands_that_a_page_shows_can_be_typed():
    assert found_in_pages(wrong_commands) == []


def test_the_check_of_commands_finds_a_wrong_one():
    parse("flatout tune --budget 2m train.py --anything 3")
    for wrong in ("flatout tune --bugdet 2m train.py", "flatout machine --fresh", "flatout report --older 3"):
        with pytest.raises(click.UsageError):
            parse(wrong)
    for wrong in ("flatout tine train.py", "flatout store ls"):
        with pytest.raises(AssertionError, match="no such command"):
            parse(wrong)


def test_every_command_is_described_in_the_readme_and_the_reference():
    for name in COMMANDS:
        assert f"flatout {name}" in text_of(ROOT / "README.md"), name
        assert f"## flatout {name}" in text_of(REFERENCE / "commands.md"), name


# -- Python --------------------------------------------------------------------------------------------------------


def wrong_python(page: Path) -> Iterator[str]:
    for body in blocks(page, "python"):
        if ">>>" in body:
            if not body.endswith("\n\n"):
                yield "doctest takes the closing fence for output: leave a blank line before it"
            if page.name != "README.md" and not page.is_relative_to(DOCS):
                yield "pytest does not look here"
            continue
        try:
            tree = ast.parse(body)
        except SyntaxError as problem:
            yield f"{problem} in {body!r}"
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "flatout":
                if node.attr not in flatout.__all__:
                    yield f"`flatout.{node.attr}` is not public"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "flatout":
                module = importlib.import_module(node.module)
                if not all(hasattr(module, alias.name) for alias in node.names):
                    yield f"no such name: {ast.unparse(node)}"


def test_python_in_a_page_compiles_and_uses_names_that_exist():
    assert found_in_pages(wrong_python) == []


# -- what is to be filled in ---------------------------------------------------------------------------------------


def wrong_places(page: Path) -> Iterator[str]:
    marks = re.findall(r"<!-- ([\w:-]+-output):(begin|end) -->", text_of(page))
    whole = [(name, which) for name, _ in marks[::2] for which in ("begin", "end")]
    if marks != whole:
        yield f"{marks}, not {whole}"


def test_places_for_real_output_are_whole():
    assert found_in_pages(wrong_places) == []


@pytest.mark.parametrize(
    ("check", "text", "problem"),
    [
        (wrong_links, "[a](nowhere.md)", "`nowhere.md` leads nowhere"),
        (wrong_links, "# A b\n[a](#a-b) [c](#c)", "`#c`: no such heading; there are ['a-b']"),
        (wrong_files, "`benchmarks/nothing.py`", "`benchmarks/nothing.py` is not there"),
        (wrong_code, "`judge/nothing.py`", "`judge/nothing.py` is not there"),
        (wrong_code, "`judge/stats.py::nothing`", "`judge/stats.py` has no `nothing`"),
        (long_lines, "a" * 121, "aaa"),
        (wrong_commands, "`flatout store rm --older 3`", "`flatout store rm --older 3`: "),
        (wrong_python, "```python\n>>> 1\n1\n```\n", "doctest takes the closing fence"),
        (wrong_python, "```python\nflatout.nothing()\n```\n", "`flatout.nothing` is not public"),
        (wrong_python, "```python\nfrom flatout.records.plan import nothing\n```\n", "no such name"),
        (wrong_python, "```python\n1 +\n```\n", "invalid syntax"),
        (wrong_places, "<!-- a-output:begin --><!-- b-output:end -->", "[('a-output', 'begin')"),
        (wrong_places, "<!-- a-output:begin -->", "[('a-output', 'begin')]"),
    ],
)
def test_the_checks_of_pages_find_wrong_ones(check, text, problem, tmp_path):
    page = tmp_path / "README.md"
    page.write_text(text)
    (found,) = check(page)
    assert found.startswith(problem)
