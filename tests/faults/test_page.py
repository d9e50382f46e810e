"""Does the page about faults name tests that exist, and a test for each fault?"""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.smoke

FAULTS = Path(__file__).parent
ROOT = FAULTS.parents[1]
PAGE = (ROOT / "benchmarks" / "faults.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE)))


def functions_in(path):
    return {one.name for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.FunctionDef)}


def test_tests_that_the_page_names_are_there():
    missing = [
        f"{file}::{name}"
        for file, name in NAMED
        if name not in functions_in(ROOT / file if "/" in file else FAULTS / file)
    ]
    assert NAMED and not missing


def test_every_file_of_faults_is_on_the_page():
    files = {path.name for path in FAULTS.glob("test_*.py")} - {"test_page.py"}
    assert files and not files - {named for named, _ in NAMED}


def test_every_row_of_a_table_names_a_test():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(("| fault", "|---"))]
    assert len(rows) > 25
    for row in rows:
        assert "::test_" in row or row.endswith("| the same |"), row
