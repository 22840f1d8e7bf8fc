"""docs/security.md: each line names a test that exists, or says that it has none."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_each_line_names_a_test_that_exists_or_says_that_it_has_none():
    _, *tables = (ROOT / "docs/security.md").read_text().split("| | test |\n|---|---|\n")
    lines = [line for table in tables for line in table.split("\n\n")[0].splitlines()]
    assert len(lines) >= 30
    for line in lines:
        told = line.strip("| ").rpartition("|")[2].strip()
        if told == "no test":
            continue
        path, _, name = told.strip("`").partition("::")
        functions = [
            node.name
            for node in ast.walk(ast.parse((ROOT / path).read_text()))
            if isinstance(node, ast.FunctionDef)
        ]
        assert name in functions, line
