"""Each line of a table in docs/security.md names tests that exist, or says that it has no test."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_each_line_names_tests_that_exist_or_says_that_it_has_none():
    text = (ROOT / "docs/security.md").read_text()
    assert "<!--" not in text
    _, *tables = text.split("| | test |\n|---|---|\n")
    lines = [line for table in tables for line in table.split("\n\n")[0].splitlines()]
    assert len(lines) >= 30
    for line in lines:
        told = line.strip("| ").rpartition("|")[2].strip()
        if told == "no test":
            continue
        for test in told.split(", "):
            path, _, name = test.strip("`").partition("::")
            functions = [
                node.name
                for node in ast.walk(ast.parse((ROOT / path).read_text()))
                if isinstance(node, ast.FunctionDef)
            ]
            assert name in functions, line
