"""Tests that no modules import each other in a cycle, and that all imported names exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(  # without models: models.torch imports its own modules, which import the package
    path.parent.name for path in (ROOT / "sparkstrom").glob("[!_]*/__init__.py")
    if path.parent.name != "models"
)  # fmt: skip


def modules_of(package: str) -> dict[str, Path]:
    paths = sorted((ROOT / "sparkstrom" / package).rglob("*.py"))
    named = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    return {name.removesuffix(".__init__"): path for name, path in named.items()}


def imported_modules(text: str) -> set[str]:
    """Return all imported modules, including those in ``if TYPE_CHECKING`` and in functions."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def find_import_cycle(texts: dict[str, str]) -> list[str]:
    """Return modules of which each is imported by the next, if there is a cycle, else []."""
    needs = {name: imported_modules(text) & texts.keys() - {name} for name, text in texts.items()}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


@pytest.mark.parametrize("package", PACKAGES)
def test_package_has_no_import_cycle(package: str) -> None:
    """No package has a cycle of imports."""
    texts = {name: path.read_text() for name, path in modules_of(package).items()}
    assert len(texts) > 1
    assert find_import_cycle(texts) == []


@pytest.mark.parametrize(
    "back",
    ["import a", "if TYPE_CHECKING:\n    from a import A", "def f():\n    from a import A"],
    ids=["plain", "for types", "in a function"],
)
def test_import_cycle_of_any_import_form_is_detected(back: str) -> None:
    """Each kind of import counts in a cycle."""
    assert find_import_cycle({"a": "from b import B", "b": back}) != []
    assert find_import_cycle({"a": "from b import B", "b": "import c"}) == []


FOLDERS = ("benchmarks", "docs", "examples", "scripts", "sparkstrom", "tests")


def module_file(name: str) -> Path | None:
    """Return the path of a module or package of this repository, or None if it does not exist."""
    path = ROOT / name.replace(".", "/")
    candidates = (path.with_suffix(".py"), path / "__init__.py", path)
    return next((each for each in candidates if each.exists()), None)


@cache
def words_of(file: Path) -> set[str]:
    return set(re.findall(r"\w+", file.read_text()))


def missing_imports(text: str) -> list[str]:
    """Return imported modules and names of this repository that do not exist."""
    missing: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            missing += [name for name in names if is_ours(name) and module_file(name) is None]
        elif isinstance(node, ast.ImportFrom) and node.module and is_ours(node.module):
            file = module_file(node.module)
            words = words_of(file) if file and file.is_file() else set()
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                if name.rpartition(".")[2] not in words and module_file(name) is None:
                    missing.append(name)
    return missing


def is_ours(module: str) -> bool:
    return module.partition(".")[0] in FOLDERS


def test_all_imported_names_of_repository_exist() -> None:
    """A wrong import in a function of a benchmark or script fails only when the function runs."""
    found = {
        str(path.relative_to(ROOT)): missing
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        if (missing := missing_imports(path.read_text()))
    }
    assert found == {}


def test_missing_import_is_detected() -> None:
    gone = "def f():\n    from sparkstrom.base.gone import A\n    from sparkstrom.base import gone"
    assert missing_imports(gone) == ["sparkstrom.base.gone.A", "sparkstrom.base.gone"]
    assert missing_imports("import sparkstrom.gone, numpy") == ["sparkstrom.gone"]
    assert missing_imports("from sparkstrom.base.errors import NoSuchError") == [
        "sparkstrom.base.errors.NoSuchError"
    ]
