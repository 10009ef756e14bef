"""Error texts: what the package says to people when it raises, ends a fit or warns.

Read from the source. ``…`` stands for what is filled in. The site shows the texts that each entry
of troubleshooting.md is about; ``tests/tidy/test_troubleshooting.py`` checks that these exist.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sparkstrom"
PAGE = ROOT / "docs/troubleshooting.md"

GAP = "…"
ENUMS = (
    "TaskEnding",
    "WorkerShortage",
    "Rejection",
    "TimeoutReason",
)  # whose members are words for people
EFFECTS = ("Abort", "AbortRequested", "Note")  # events and effects that begin with such words
WARNS = ("log.warning", "warnings.append", "logger.warning", "warnings.warn")
WARNING_FUNCTIONS = (  # that return one text
    "checkpoint/writer.py:unsaved_reason",
    "protocol/common/flow_control.py:describe_slow_link",
    "planning/memory.py:format_memory_kill",
)
WARNING_MODULES = (  # whose functions return warnings, as lists of texts
    "fit/accuracy_warnings.py",
    "fit/trained_network.py",
    "spark/executor_slots.py",
    "planning/memory.py",
    "fit/summary.py",
)
DEPTH_MAX = 4  # functions that are followed for the text that they return


@dataclass(frozen=True, slots=True)
class Told:
    """One text; a mere … where a site passes on what was made elsewhere."""

    kind: str  # the error's class; "Abort", "warning", or the name of an enum
    text: str
    where: str  # path:line in the package
    code: str  # the expression that makes it


@dataclass(frozen=True)
class Module:
    """A parsed file, with what its names are."""

    path: Path
    tree: ast.Module

    @functools.cached_property
    def name(self) -> str:
        """The module's path in the package."""
        return str(self.path.relative_to(PACKAGE))

    def assigned(self, name: str) -> list[ast.expr]:
        """Return the values that the module assigns to a name."""
        return assigned_in(self.tree.body, name)

    @functools.cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        """All functions of the module, by name."""
        found = (each for each in ast.walk(self.tree) if isinstance(each, ast.FunctionDef))
        return {each.name: each for each in found}

    @functools.cached_property
    def imports(self) -> dict[str, str]:
        """For each name that is imported from a module, that module."""
        found = (each for each in ast.walk(self.tree) if isinstance(each, ast.ImportFrom))
        return {name.name: each.module or "" for each in found for name in each.names}

    def imported_from(self, name: str) -> Module | None:
        """Return the module that a name is imported from, or None."""
        return module_of(self.imports.get(name, ""))


def assigned_in(body: list[ast.stmt], name: str) -> list[ast.expr]:
    """Values of the assignments to a name in these statements, nested ones among them."""
    out = []
    for node in (each for stmt in body for each in ast.walk(stmt)):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            targets = [node.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            out.append(node.value)
    return out


@functools.cache
def modules() -> dict[str, Module]:
    """The package by paths in it, but for what is generated and for the simulator."""
    found = (
        Module(path, ast.parse(path.read_text()))
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "_aeron.py" and path.parts[len(PACKAGE.parts)] != "simulation"
    )
    return {module.name: module for module in found}


def module_of(dotted: str) -> Module | None:
    """A module of the package by its dotted name; None for what is none."""
    path = "/".join(dotted.split(".")[1:])
    return modules().get(f"{path}.py") or modules().get(f"{path}/__init__.py")


@functools.cache
def error_classes() -> frozenset[str]:
    """SparkstromError and all below it, by their bases' names."""
    bases: dict[str, set[str]] = {}
    for module in modules().values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {ast.unparse(base) for base in node.bases}
    found = {"SparkstromError"}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return frozenset(found)


def texts_of(
    value: ast.expr | None, module: Module, inside: ast.FunctionDef | None, depth: int = 0
) -> list[str]:
    """What an expression can say; empty where that is made elsewhere."""
    again = functools.partial(texts_of, module=module, inside=inside, depth=depth)
    match value:
        case ast.Constant(value=str() as text):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(p.value if isinstance(p, ast.Constant) else GAP for p in parts)]
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            ends = again(right) or [GAP]
            return [begin + end for begin in again(left) for end in ends]
        case ast.IfExp(body=one, orelse=other):
            return again(one) + again(other)
        case ast.List(elts=parts) | ast.BoolOp(op=ast.Or(), values=parts):
            return [text for part in parts for text in again(part)]
        case ast.Call(func=ast.Attribute(value=text, attr="format")):
            return [re.sub(r"\{[^}]*\}", GAP, each) for each in again(text)]
        case ast.Call(func=ast.Name(id=name)) if depth < DEPTH_MAX:
            return _returned(name, module, depth)
        case ast.Name(id=name):
            return _named(name, module, inside, depth)
    return []


def _returned(name: str, module: Module, depth: int) -> list[str]:
    home = module if name in module.functions else module.imported_from(name)
    function = home.functions.get(name) if home else None
    if home is None or function is None:
        return []
    returns = (node for node in ast.walk(function) if isinstance(node, ast.Return))
    return [t for each in returns for t in texts_of(each.value, home, function, depth + 1)]


def _named(name: str, module: Module, inside: ast.FunctionDef | None, depth: int) -> list[str]:
    home, values = module, assigned_in(inside.body, name) if inside else []
    if not values:
        inside, values = None, module.assigned(name)
    if not values and (source := module.imported_from(name)):
        home, values = source, source.assigned(name)
    if depth >= DEPTH_MAX:
        return []
    return [text for value in values for text in texts_of(value, home, inside, depth + 1)]


@functools.cache
def told() -> tuple[Told, ...]:
    """Every text that people may see, in the order of the files."""
    return tuple(each for module in modules().values() for each in told_in(module))


def told_in(module: Module) -> Iterator[Told]:
    """What one module says."""
    for node, inside in _with_functions(module.tree):
        where = f"{module.name}:{getattr(node, 'lineno', 0)}"
        match node:
            case ast.Call(func=func, args=args) if kind := _kind(func, module):
                values = [*args, *(k.value for k in node.keywords if k.arg == "reason")]
                found = (texts_of(each, module, inside) for each in values)
                texts = next((each for each in found if any(each)), [])
                fixed = [re.sub(r"%[sdgr]", GAP, text) for text in texts if text]
                yield from (Told(kind, t, where, ast.unparse(node)) for t in fixed or [GAP])
            case ast.ClassDef(name=name, body=body) if name in ENUMS:
                values = [s.value for s in body if isinstance(s, ast.Assign)]
                texts = [t for value in values for t in texts_of(value, module, None)]
                fixed = [re.sub(r"\{[^}]*\}", GAP, text) for text in texts]
                yield from (Told(name, text, where, name) for text in fixed)
            case ast.Return(value=value) if _warns(node, module, inside):
                texts = texts_of(value, module, inside)
                yield from (Told("warning", t, where, ast.unparse(node)) for t in texts if t)


def _kind(func: ast.expr, module: Module) -> str:
    last = getattr(func, "attr", getattr(func, "id", ""))
    if last in error_classes() or last in EFFECTS:
        return last
    if last == "_warn":
        return "warning"
    if last in ("warn", "warning", "append"):
        name = ast.unparse(func)
        if name.endswith("reporting.warn"):
            return "warning"
        listed = name == "out.append" and module.name in WARNING_MODULES
        if listed or name in WARNS or name.endswith(".warnings.append"):
            return "warning"
    return ""


def _warns(node: ast.Return, module: Module, inside: ast.FunctionDef | None) -> bool:
    """Does this end a function that returns warnings?"""
    if inside and f"{module.name}:{inside.name}" in WARNING_FUNCTIONS:
        return True
    return module.name in WARNING_MODULES and isinstance(node.value, ast.List)


def _with_functions(
    tree: ast.AST, inside: ast.FunctionDef | None = None
) -> Iterator[tuple[ast.AST, ast.FunctionDef | None]]:
    for node in ast.iter_child_nodes(tree):
        yield node, inside
        yield from _with_functions(node, node if isinstance(node, ast.FunctionDef) else inside)


@dataclass(frozen=True, slots=True)
class Entry:
    """A heading of the page, and the texts that it is about."""

    heading: str  # as it is written
    quoted: tuple[str, ...]  # in it, how texts begin, with … for what is filled in
    patterns: tuple[str, ...]  # regular expressions, searched for in texts

    def covers(self, told: Told) -> bool:
        """Return whether the entry explains this text."""
        return any(re.search(pattern, told.text) for pattern in self.patterns)


def entries(page: str) -> list[Entry]:
    """Entries of the page: its headings of level three.

    A heading has the beginning of a text in backticks. Below it more texts are named by
    ``<!-- covers: a regular expression -->``.
    """
    out = []
    for part in re.split(r"^### ", page, flags=re.MULTILINE)[1:]:
        heading, _, body = part.partition("\n")
        body = re.split(r"^## ", body, maxsplit=1, flags=re.MULTILINE)[0]
        quoted = tuple(re.findall(r"`([^`]+)`", heading))
        named = re.findall(r"^<!-- covers: (.*?) -->$", body, flags=re.MULTILINE)
        patterns = (*(pattern_of(text) for text in quoted), *named)
        out.append(Entry(heading.strip(), quoted, patterns))
    return out


def pattern_of(quoted: str) -> str:
    """A heading's text as a regular expression: texts that begin so."""
    return f"^{re.escape(quoted)}"
