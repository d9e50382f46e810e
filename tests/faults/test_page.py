"""Does the page about faults name tests that exist, and a test for each fault?"""

import ast
import re
from pathlib import Path

import pytest

FAULTS = Path(__file__).parent
ROOT = FAULTS.parents[1]
PAGE = (ROOT / "docs" / "explanation" / "faults.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)))


def functions_in(path):
    return {one.name for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.FunctionDef)}


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_test_that_the_page_names_is_there(file, name):
    assert name in functions_in(ROOT / file if "/" in file else FAULTS / file)


@pytest.mark.parametrize("file", sorted(path.name for path in FAULTS.glob("test_*.py") if path.name != "test_page.py"))
def test_every_file_of_faults_is_on_the_page(file):
    assert file in {named for named, _ in NAMED}


def test_every_row_of_a_table_names_a_test():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(("| fault", "|---"))]
    assert len(rows) > 25
    for row in rows:
        assert "::test_" in row or row.endswith("| the same |"), row
