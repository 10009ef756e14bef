"""Tests of the sizes of functions (70 lines without docstring) and modules (900 lines).

The linter checks the length of lines.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 900

GENERATED = ROOT / "sparkstrom/transport/aeron/_aeron.py"
FOLDERS = ("sparkstrom", "native", "tests", "benchmarks", "examples", "scripts")
SOURCES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path != GENERATED
]


def relative_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def lines_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    docstring = function.body[0] if ast.get_docstring(function, clean=False) else None
    documented = (docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0
    return (function.end_lineno or 0) - function.lineno + 1 - documented


def test_modules_and_functions_are_within_line_limits() -> None:
    too_long: list[str] = []
    for path in SOURCES:
        text = path.read_text()
        if (lines := len(text.splitlines())) > MODULE_LINES_MAX:
            too_long.append(f"{relative_name(path)} has {lines} lines")
        too_long += [
            f"{relative_name(path)}: {node.name} has {length} lines"
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and (length := lines_without_docstring(node)) > FUNCTION_LINES_MAX
        ]
    assert too_long == []
