"""Tests that modules and names in docstrings and comments of the package exist."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "sparkstrom"
NAMED = re.compile(r"``(?:sparkstrom\.)?([a-z_]\w*(?:\.\w+)+)(?:\(.*?\))?``")
# Other packages with a name that a module of ours has, too: their names are not checked.
THEIRS = {"torch", "keras", "jax", "lightning", "spark"}
FILES = (".json", ".npz", ".pickle", ".pt", ".py")


@cache
def module_paths() -> dict[str, list[Path]]:
    """Return the paths of modules and packages by their last name."""
    found: dict[str, list[Path]] = {}
    for path in PACKAGE.rglob("*.py"):
        place = path.parent if path.stem == "__init__" else path
        found.setdefault(place.stem, []).append(place)
    return found


@cache
def words_of(module: Path) -> set[str]:
    """Return the identifiers in a module, or in a package's ``__init__``."""
    file = module / "__init__.py" if module.is_dir() else module
    return set(re.findall(r"\w+", file.read_text()))


def name_exists(place: Path, rest: list[str]) -> bool:
    """Return whether the names exist in the module, or as modules in the package."""
    if not rest:
        return True
    if place.is_dir():
        for next_place in (place / rest[0], place / f"{rest[0]}.py"):
            if next_place.exists():
                return name_exists(next_place, rest[1:])
    return set(rest) <= words_of(place)


def find_missing_names(text: str) -> list[str]:
    """Return the dotted names that begin with a module of ours but do not exist."""
    lost = []
    for name in NAMED.findall(text):
        first, *rest = name.split(".")
        is_ours = first not in THEIRS and not name.endswith(FILES)
        candidates = module_paths().get(first, []) if is_ours else []
        if candidates and not any(name_exists(place, rest) for place in candidates):
            lost.append(name)
    return lost


def comments_and_strings(file: Path) -> Iterator[tuple[int, str]]:
    """Yield comments and string literals, docstrings included, with their lines."""
    for token in tokenize.generate_tokens(io.StringIO(file.read_text()).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield token.start[0], token.string


def test_names_in_docstrings_and_comments_exist() -> None:
    lost = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for line, text in comments_and_strings(file)
        for name in find_missing_names(text)
    ]
    assert lost == []


def test_missing_dotted_names_are_detected() -> None:
    assert find_missing_names("See ``transport.contract.Sender`` and ``executor.AGE``.") == [
        "transport.contract.Sender",
        "executor.AGE",
    ]
    assert (
        find_missing_names("``runtime.theta.install``, ``units.mib``, ``np.zeros``, ``torch.nn``")
        == []
    )
