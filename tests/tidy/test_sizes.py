"""Sizes: a function of over 70 lines or a module of over 400 has two responsibilities.

Lines of over 100 characters are the linter's to find.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 400

GENERATED = ROOT / "sparkstrom/transport/aeron/_aeron.py"
FOLDERS = ("sparkstrom", "native", "tests", "benchmarks", "examples", "scripts")
SOURCES = [
    path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if path != GENERATED
]


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=short)
def test_module_and_functions_are_short(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MODULE_LINES_MAX
    assert [
        f"{node.name} has {length} lines"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES_MAX
    ] == []


@pytest.mark.parametrize(
    "path",
    [
        path
        for path in SOURCES
        if short(path).startswith("tests/") and "integration" not in path.parts
    ],
    ids=short,
)
def test_no_sleep_below_integration(path: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    assert [
        f"line {call.lineno}"
        for call in calls
        if getattr(call.func, "attr", getattr(call.func, "id", "")) == "sleep"
    ] == []


@pytest.mark.parametrize(
    "path", [path for path in SOURCES if short(path).startswith("sparkstrom/")], ids=short
)
def test_a_module_opens_with_its_idea_and_owes_nothing(path: Path) -> None:
    text = path.read_text()
    assert ast.get_docstring(ast.parse(text)), "no docstring"
    assert [word for word in ("TODO", "FIXME", "XXX") if word in text] == []
