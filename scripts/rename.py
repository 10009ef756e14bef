"""Rename a module, class, function or method of the package in all files.

    python -m scripts.rename sparkstrom.protocol.leases sparkstrom.protocol.expiry   # a module
    python -m scripts.rename sparkstrom.protocol.leases.Leases LeaseTable            # in a module
    python -m scripts.rename sparkstrom.protocol.leases.Leases.renew extend          # a method

Changes code in sparkstrom, tests, benchmarks, examples and scripts (by the syntax tree, so that
layout and equal words with other meanings stay), and paths and dotted names in documents, the map,
strings, comments, and the corpus of planted bugs. A method is renamed in all attributes of this
name, so it must be defined only once in the package. Prints the lines that still contain the old
name, such as prose, which may have to be changed by hand. Check the result with ``git diff``.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = ("sparkstrom", "tests", "benchmarks", "examples", "scripts")
TEXT = {".md", ".toml", ".py", ".ipynb", ".cfg", ".in", ".yml"}
Edit = tuple[int, int]  # line (from 1) and column, in bytes, of one occurrence of the old name


def main() -> int:
    """Rename, and print the lines to check by hand."""
    parser = argparse.ArgumentParser(prog="python -m scripts.rename", description=__doc__)
    parser.add_argument("old", help="sparkstrom.package.module[.name[.method]]")
    parser.add_argument("new", help="of a module: its new dotted name; of others: the new name")
    args = parser.parse_args()
    try:
        remaining = rename(ROOT, args.old, args.new)
    except ValueError as error:
        sys.exit(str(error))
    for line in remaining:
        print(line)
    return 0


def rename(root: Path, old: str, new: str) -> list[str]:
    """Return lines that still have the old name. Raise ValueError for what cannot be renamed."""
    module, names = _split(root, old)
    if not all(part.isidentifier() for part in new.split(".")):
        raise ValueError(f"{new!r} is not a name in Python")
    if not names:
        _rename_module(root, module, new)
        return _lines_with(root, module.rpartition(".")[2])
    if "." in new:
        raise ValueError(f"{new!r}: give the new name alone, without its module")
    *scope, name = names
    path = _path(root, module)
    owner = _find(ast.parse(path.read_text()), scope, old)
    taken = {each.name for each in _definitions(owner)}
    if name not in taken:
        raise ValueError(f"{old}: {path.relative_to(root)} does not define {'.'.join(names)}")
    if new in taken:
        raise ValueError(f"{new!r} is defined there already")
    if scope and (others := _defined_elsewhere(root, path, name)):
        raise ValueError(f"{name!r} is defined in {', '.join(others)}, too: rename it by hand")
    plan = {}  # complete before the first change, as it may raise ValueError
    for file in _files(root, {".py"}):
        at = _dotted(root, file)
        tree = ast.parse(file.read_text())
        edits = _attributes(tree, name) if scope else _names(tree, at, module, name)
        plan[file] = sorted(set(edits))
    for file, places in plan.items():
        _edit(file, places, name, new)
    _replace_text(root, _forms(module, [*scope, name], [*scope, new]))
    return _lines_with(root, name)


# -- modules ---------------------------------------------------------------------------------------


def _rename_module(root: Path, old: str, new: str) -> None:
    source, target = _path(root, old), root / (new.replace(".", "/") + ".py")
    if source.name == "__init__.py":
        raise ValueError(f"{old} is a package: move its modules")
    if target.exists() or target.with_suffix("").is_dir():
        raise ValueError(f"{target.relative_to(root)} exists already")
    (old_parent, _, old_name), (new_parent, _, new_name) = old.rpartition("."), new.rpartition(".")
    for file in _files(root, {".py"}):
        tree = ast.parse(file.read_text())
        if old_name == new_name and old_parent == new_parent:
            continue
        for node in [each for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)]:
            if node.level == 0 and node.module == old_parent:
                _edit_import(file, node, old_parent, old_name, new_parent, new_name)
    target.parent.mkdir(parents=True, exist_ok=True)
    source.rename(target)
    _replace_text(root, _forms(old, [], [], new))


def _edit_import(
    file: Path, node: ast.ImportFrom, old_parent: str, old: str, new_parent: str, new: str
) -> None:
    """Change ``from old_parent import old``; the file's name for the module stays the same."""
    mine = [each for each in node.names if each.name == old]
    if not mine:
        return
    lines = file.read_text().splitlines(keepends=True)
    indent = " " * node.col_offset
    rest = [each for each in node.names if each.name != old]
    made = [f"{indent}from {new_parent} import {_alias(new, each.asname or old)}" for each in mine]
    if rest:
        kept = ", ".join(_alias(each.name, each.asname or each.name) for each in rest)
        made.insert(0, f"{indent}from {old_parent} import {kept}")
    # The number of lines stays the same, so that the positions of other nodes are still right.
    made += [""] * ((node.end_lineno or node.lineno) - node.lineno + 1 - len(made))
    lines[node.lineno - 1 : node.end_lineno] = [line + "\n" for line in made]
    file.write_text("".join(lines))


def _alias(name: str, known_as: str) -> str:
    return name if name == known_as else f"{name} as {known_as}"


# -- names in code ---------------------------------------------------------------------------------


def _names(tree: ast.Module, here: str, module: str, name: str) -> Iterator[Edit]:
    """Yield the uses of a module's class or function, by name or as the module's attribute."""
    parent, _, last = module.rpartition(".")
    known, modules = here == module, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for each in node.names:
                if each.name == name and (node.module == module or _reexports(module, node.module)):
                    yield each.lineno, each.col_offset
                    known |= each.asname is None
                elif node.module == parent and each.name == last:
                    modules.add(each.asname or last)
        elif isinstance(node, ast.Import):
            modules |= {each.asname or each.name for each in node.names if each.name == module}
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=found) | ast.Name(id=found, ctx=ast.Store()) if (
                known and found == name
            ):
                what = "a parameter or a variable"
                raise ValueError(f"{name!r} is {what}, too: {here}, line {node.lineno}")
            case ast.Name(id=found) if known and found == name:
                yield node.lineno, node.col_offset
            case ast.Attribute(attr=found) if found == name and ast.unparse(node.value) in modules:
                yield node.end_lineno or 0, (node.end_col_offset or 0) - len(name)
    if here == module:
        for definition in _definitions(tree):
            if definition.name == name:
                yield definition.lineno, _column_of_name(definition)


def _reexports(module: str, package: str) -> bool:
    return module.startswith(package + ".")


def _attributes(tree: ast.Module, name: str) -> Iterator[Edit]:
    """Yield the uses of a method: all attributes of this name, and its definition."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=found) if found == name:
                yield node.end_lineno or 0, (node.end_col_offset or 0) - len(name)
            case ast.ClassDef():
                for each in _definitions(node):
                    if each.name == name:
                        yield each.lineno, _column_of_name(each)


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _definitions(owner: ast.Module | Definition) -> list[Definition]:
    return [node for node in owner.body if isinstance(node, Definition)]


def _column_of_name(node: Definition) -> int:
    words = {ast.FunctionDef: "def ", ast.AsyncFunctionDef: "async def ", ast.ClassDef: "class "}
    return node.col_offset + len(words[type(node)])


def _edit(file: Path, edits: list[Edit], old: str, new: str) -> None:
    if not edits:
        return
    lines = file.read_bytes().splitlines(keepends=True)
    for line, column in reversed(edits):
        text = lines[line - 1]
        if text[column : column + len(old)] != old.encode():
            raise ValueError(f"{file}:{line}: {old!r} is not where the syntax tree has it")
        lines[line - 1] = text[:column] + new.encode() + text[column + len(old) :]
    file.write_bytes(b"".join(lines))


# -- text ------------------------------------------------------------------------------------------


def _forms(
    module: str, old: list[str], new: list[str], moved: str | None = None
) -> list[tuple[str, str]]:
    """Return (old, new) text forms: dotted and as a path, with and without the package's name."""
    forms = []
    target = moved or module
    for cut in ("", "sparkstrom."):
        before, after = module.removeprefix(cut), target.removeprefix(cut)
        for mark in (".", "/"):
            was, will = before.replace(".", mark), after.replace(".", mark)
            if old:
                forms.append((".".join([was, *old]), ".".join([will, *new])))
                forms.append((".py::".join([was, ".".join(old)]), ".py::".join([will, new[-1]])))
            elif "." in before:
                forms.append((was, will))
    return forms


def _replace_text(root: Path, forms: list[tuple[str, str]]) -> None:
    patterns = [(re.compile(rf"(?<![\w]){re.escape(was)}(?!\w)"), will) for was, will in forms]
    for file in _files(root, TEXT):
        text = changed = file.read_text()
        for pattern, will in patterns:
            changed = pattern.sub(will.replace("\\", r"\\"), changed)
        if file.name == "corpus.toml":
            changed = _in_corpus(changed, forms)
        if changed != text:
            file.write_text(changed)


def _in_corpus(text: str, forms: list[tuple[str, str]]) -> str:
    """Rename in the keys ``in``, ``find`` and ``replace`` of all tables, which have short names."""
    was, will = forms[0][0].split("."), forms[0][1].split(".")
    old, new = was[-1], will[-1]
    if old == new or len(was) != len(will):
        return text
    word = re.compile(rf"\b{re.escape(old)}\b")
    change: Callable[[re.Match[str]], str] = lambda line: word.sub(new, line[0])  # noqa: E731
    return re.sub(r"^(?:in|find|replace) = .*$", change, text, flags=re.MULTILINE)


def _lines_with(root: Path, name: str) -> list[str]:
    word = re.compile(rf"\b{re.escape(name)}\b")
    return [
        f"{file.relative_to(root)}:{number}: {line.strip()}"
        for file in _files(root, TEXT)
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if word.search(line)
    ]


# -- files -----------------------------------------------------------------------------------------


def _files(root: Path, suffixes: set[str]) -> list[Path]:
    found = [path for folder in CODE for path in (root / folder).rglob("*")]
    if suffixes != {".py"}:
        found += [*root.glob("*"), *(root / "docs").rglob("*")]
    return sorted(path for path in found if path.suffix in suffixes and path.is_file())


def _split(root: Path, dotted: str) -> tuple[str, list[str]]:
    """Split a dotted name into a module and the names in it."""
    parts = dotted.split(".")
    for count in range(len(parts), 1, -1):
        if _path(root, ".".join(parts[:count])).is_file():
            return ".".join(parts[:count]), parts[count:]
    raise ValueError(f"{dotted}: no such module below {root}")


def _path(root: Path, module: str) -> Path:
    base = root / module.replace(".", "/")
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def _dotted(root: Path, file: Path) -> str:
    return ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def _find(tree: ast.Module, scope: list[str], dotted: str) -> ast.Module | Definition:
    owner: ast.Module | Definition = tree
    for name in scope:
        inner = [each for each in _definitions(owner) if each.name == name]
        if not inner:
            raise ValueError(f"{dotted}: there is no {name}")
        owner = inner[0]
    return owner


def _defined_elsewhere(root: Path, path: Path, name: str) -> list[str]:
    """Return the modules with other classes that define this name, also those in ``path``."""
    found = []
    for file in sorted((root / "sparkstrom").rglob("*.py")):
        owners = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.ClassDef)]
        count = sum(each.name == name for owner in owners for each in _definitions(owner))
        found += [str(file.relative_to(root))] * (count - (file == path))
    return found


if __name__ == "__main__":
    sys.exit(main())
