"""What users can hold on to: the public names, and every command's options. Both are frozen in a text file.

A change here is a change for everybody's scripts, so it is made on purpose: `python tests/golden/test_surface.py`
writes the files anew; look at the difference, commit it, and say it in `changelog.d/`.
"""

from pathlib import Path

import click
import pytest

import flatout
from flatout.cli import COMMANDS
from flatout.cli import flatout as group

HERE = Path(__file__).parent


def public_names() -> str:
    return "".join(f"flatout.{name}\n" for name in sorted(flatout.__all__))


def command_options() -> str:
    """Every command with its options and arguments: names, what they take, the default, the help."""
    context = click.Context(group, info_name="flatout")
    blocks = []
    for name in COMMANDS:
        command = group.get_command(context, name)
        lines = [f"flatout {name}", *(_line(parameter, command) for parameter in command.params)]
        blocks.append("\n  ".join(lines))
    return "\n\n".join(blocks) + "\n"


def _line(parameter: click.Parameter, command: click.Command) -> str:
    context = click.Context(command)
    if isinstance(parameter, click.Argument):
        return parameter.make_metavar(context)
    parts = [", ".join(parameter.opts)]
    if not parameter.is_flag:
        parts.append(parameter.make_metavar(context))
        if parameter.show_default:
            parts.append(f"[{parameter.default}]")
    return f"{' '.join(parts)}: {parameter.help}"


FILES = {"public_names.txt": public_names, "command_options.txt": command_options}


@pytest.mark.parametrize("name", FILES)
def test_the_surface_is_what_was_agreed(name):
    agreed = (HERE / name).read_text(encoding="utf-8")
    assert FILES[name]() == agreed, (
        f"the surface differs from tests/golden/{name}: where that is meant, `python tests/golden/test_surface.py` "
        "writes it anew; then `python scripts/make_reference.py`, and a fragment in changelog.d/"
    )


def test_every_public_name_is_there():
    assert [name for name in flatout.__all__ if getattr(flatout, name, None) is None] == []


def test_no_public_name_is_hidden_by_a_module_of_that_name():
    there = {path.stem for path in Path(flatout.__file__).parent.iterdir()}
    assert not set(flatout.__all__) & there, "once that module is imported, the name means the module"


if __name__ == "__main__":
    for name, make in FILES.items():
        (HERE / name).write_text(make(), encoding="utf-8")
        print(HERE / name)
