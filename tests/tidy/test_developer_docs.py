"""Tests that modules, tests and links named in the documents for developers exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sparkstrom"
MAP = ROOT / "ARCHITECTURE.md"
PAGES = [MAP, ROOT / "docs/protocol.md", ROOT / "docs/glossary.md"]
PAGES += sorted((ROOT / "docs/decisions").glob("*.md"))

ROOMS = "|".join(sorted(path.name for path in PACKAGE.iterdir() if path.is_dir()))
NAMED = re.compile(rf"`((?:{ROOMS})/[\w/]+)((?:\.\w+)*)")
TEST = re.compile(r"`((?:tests/)?[\w/]*test_\w+\.py)`")
LINK = re.compile(r"\]\((?!http)([^)#]+)")


def defined_names(module: Path) -> set[str]:
    """Return the names of a module's classes, functions and methods."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    return {
        each.name for each in ast.walk(ast.parse(module.read_text())) if isinstance(each, kinds)
    }


def find_missing_names(text: str) -> list[str]:
    """Return the modules and names in a text that do not exist."""
    lost = []
    for path, names in NAMED.findall(text):
        module = (PACKAGE / path).with_suffix(".py")
        if not (module.exists() or (PACKAGE / path).is_dir()):
            lost.append(path)
        elif names and (module.exists() and not {*names.split(".")[1:]} <= defined_names(module)):
            lost.append(path + names)
    return lost


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_tests_and_links_named_in_page_exist(page: Path) -> None:
    text = page.read_text()
    tests = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert find_missing_names(text) == []
    assert [name for name in TEST.findall(text) if name.split("/")[-1] not in tests] == []
    assert [link for link in LINK.findall(text) if not (page.parent / link).exists()] == []


WALKS = {  # behaviour -> maximum number of files to read for it
    "a fit from start to end": 6,
    "a link that goes silent": 4,
    "the value of tau": 3,
    "a wrong figure in the summary": 4,
}


@pytest.mark.parametrize(("behaviour", "files_max"), WALKS.items())
def test_map_names_few_files_per_behaviour(behaviour: str, files_max: int) -> None:
    """The map's description of a behaviour names few files, all of which exist."""
    (row,) = re.findall(rf"^\| {behaviour} \| (.*) \|$", MAP.read_text(), re.MULTILINE)
    files = [path for path, _ in NAMED.findall(row)]
    assert 1 <= len(files) <= files_max
    assert all((PACKAGE / path).with_suffix(".py").is_file() for path in files)


def test_missing_module_or_name_is_detected() -> None:
    """Missing modules and missing names in modules are both found."""
    text = "`runtime/theta.install`, `runtime/thetas`, `runtime/theta.uninstall`, `protocol/worker`"
    assert find_missing_names(text) == ["runtime/thetas", "runtime/theta.uninstall"]


def test_every_decision_is_listed_in_readme() -> None:
    folder = ROOT / "docs/decisions"
    listed = {*LINK.findall((folder / "README.md").read_text())}
    assert listed == {path.name for path in folder.glob("*.md")} - {"README.md"}
