"""The corpus of planted bugs: what each changes in the sources, and what is to catch it.

``corpus.toml`` has one table per bug:

    [name-of-the-bug]
    why = "what goes wrong with it"
    file = "protocol/worker/replication.py"     # of sparkstrom/
    in = "Class.method"                         # where; without it, anywhere in the file
    find = "code that is there exactly once"    # compared token by token: see below
    replace = "what stands there instead"
    tests = ["tests/unit/protocol/test_x.py"]   # run first; the bug is caught when they fail
    modes = ["plain", "mesh"]                   # else so many seeds of these; the first that fails

``find`` is a statement, an expression, or a part of one. Blanks, line breaks, comments and commas
before a closing bracket do not count, so formatting may change. Neither do equal pieces of code in
other functions.
"""

from __future__ import annotations

import ast
import io
import textwrap
import tokenize
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

CORPUS = Path(__file__).parent / "corpus.toml"
LAYOUT = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}


@dataclass(frozen=True, slots=True)
class Bug:
    """One change of one file that must not pass."""

    name: str
    why: str
    file: str
    find: str
    replace: str
    within: str | None = None  # "in" of the table
    tests: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()

    def plant(self, root: Path) -> None:
        """Change the sources below ``root``. Raise ValueError where the code is not there once."""
        path = root / "sparkstrom" / self.file
        path.write_text(self.planted(path.read_text()))

    def planted(self, source: str) -> str:
        """Return this source with the bug. Raise ValueError where the code is not there once."""
        where = f"{self.within or 'the module'} of {self.file}"
        scopes = lines_of(source, self.within)
        if not scopes:
            raise ValueError(f"{self.name}: there is no {where}")
        wanted = [piece.text for piece in pieces(self.find)]
        there = pieces(source)
        found = [
            there[i : i + len(wanted)]
            for i in range(len(there) - len(wanted) + 1)
            if [piece.text for piece in there[i : i + len(wanted)]] == wanted
            and any(there[i].begin[0] in lines for lines in scopes)
            and any(there[i + len(wanted) - 1].end[0] in lines for lines in scopes)
        ]
        if len(found) != 1:
            raise ValueError(
                f"{self.name}: {self.find!r} is {len(found)} times in {where}, not once"
            )
        return _replaced(source, found[0][0].begin, found[0][-1].end, self.replace)


class Piece(NamedTuple):
    """One token of Python's, and where it stands: line (from 1) and column."""

    text: str
    begin: tuple[int, int]
    end: tuple[int, int]


@lru_cache(16)  # many bugs change one file
def pieces(source: str) -> list[Piece]:
    """Return the tokens that mean something. Takes parts of statements, too."""
    found: list[Piece] = []
    for token in _tokens(source):
        if token.type in LAYOUT or not token.string:
            continue
        if token.string in (")", "]", "}") and found and found[-1].text == ",":
            found.pop()
        found.append(Piece(token.string, token.start, token.end))
    return found


def _tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    # A part of a statement breaks off: at an open bracket, at a colon without a block.
    with suppress(tokenize.TokenError, IndentationError):
        yield from tokenize.generate_tokens(io.StringIO(textwrap.dedent(source)).readline)


def lines_of(source: str, name: str | None) -> list[range]:
    """Return the lines of each definition with that qualified name; of the module for None."""
    if name is None:
        return [range(1, source.count("\n") + 2)]
    found = []
    for qualified, node in _definitions_of(source):
        if qualified == name:
            begin = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            found.append(range(begin, (node.end_lineno or begin) + 1))
    return found


Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@lru_cache(1)
def _definitions_of(source: str) -> list[tuple[str, Definition]]:
    return list(_definitions(ast.parse(source), ""))


def _definitions(node: ast.AST, prefix: str) -> Iterator[tuple[str, Definition]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition):
            yield prefix + child.name, child
            yield from _definitions(child, f"{prefix}{child.name}.")
        else:
            yield from _definitions(child, prefix)


def _replaced(source: str, begin: tuple[int, int], end: tuple[int, int], by: str) -> str:
    lines = source.splitlines(keepends=True)
    before, after = lines[begin[0] - 1][: begin[1]], lines[end[0] - 1][end[1] :]
    if not before.strip() and not by.strip() and not after.partition("#")[0].strip():
        return "".join([*lines[: begin[0] - 1], *lines[end[0] :]])  # whole lines go
    indent = before[: len(before) - len(before.lstrip())]
    first, *rest = textwrap.dedent(by).strip("\n").split("\n")
    new = "\n".join([first, *(indent + line if line.strip() else line for line in rest)])
    return "".join([*lines[: begin[0] - 1], before, new, after, *lines[end[0] :]])


def bugs() -> list[Bug]:
    """All of them, in the file's order. Raises TypeError or KeyError where a table is not whole."""
    tables = tomllib.loads(CORPUS.read_text())
    return [
        Bug(
            name,
            table.pop("why"),
            table.pop("file"),
            table.pop("find"),
            table.pop("replace"),
            table.pop("in", None),
            **{key: tuple(values) for key, values in table.items()},
        )
        for name, table in tables.items()
    ]
