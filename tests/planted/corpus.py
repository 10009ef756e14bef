"""The corpus of planted bugs: how each changes the sources, and what must catch it.

``corpus.toml`` has one table per bug:

    [name-of-the-bug]
    why = "what the bug breaks"
    file = "protocol/worker/replication.py"     # in sparkstrom/
    in = "Class.method"                         # optional: only in this definition
    find = "code that occurs exactly once"      # compared token by token: see below
    replace = "its replacement"
    tests = ["tests/unit/protocol/test_x.py"]   # run first; they catch the bug if they fail
    modes = ["plain", "mesh"]                   # else seeds of these simulations, until one fails

``find`` is a statement, an expression, or a part of one. Blanks, line breaks, comments and commas
before a closing bracket are ignored, so formatting may change. Equal code in other functions is
ignored with ``in``.
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
    """A change of one file that tests must detect."""

    name: str
    why: str
    file: str
    find: str
    replace: str
    within: str | None = None  # key "in"
    tests: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()

    def plant(self, root: Path) -> None:
        """Change the file below ``root``. Raise ValueError unless the code occurs exactly once."""
        path = root / "sparkstrom" / self.file
        path.write_text(self.planted(path.read_text()))

    def planted(self, source: str) -> str:
        """Return this source with the bug. Raise ValueError unless the code occurs once."""
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
    """A token of Python, with its begin and end as line (from 1) and column."""

    text: str
    begin: tuple[int, int]
    end: tuple[int, int]


@lru_cache(16)  # many bugs change one file
def pieces(source: str) -> list[Piece]:
    """Return the significant tokens of a source, which may be a part of a statement."""
    found: list[Piece] = []
    for token in _tokens(source):
        if token.type in LAYOUT or not token.string:
            continue
        if token.string in (")", "]", "}") and found and found[-1].text == ",":
            found.pop()
        found.append(Piece(token.string, token.start, token.end))
    return found


def _tokens(source: str) -> Iterator[tokenize.TokenInfo]:
    # The tokenizer fails at the end of a part: at an open bracket, or a colon without a block.
    with suppress(tokenize.TokenError, IndentationError):
        yield from tokenize.generate_tokens(io.StringIO(textwrap.dedent(source)).readline)


def lines_of(source: str, name: str | None) -> list[range]:
    """Return the lines of each definition with this qualified name, or of the module for None."""
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
        return "".join([*lines[: begin[0] - 1], *lines[end[0] :]])  # remove whole lines
    indent = before[: len(before) - len(before.lstrip())]
    first, *rest = textwrap.dedent(by).strip("\n").split("\n")
    new = "\n".join([first, *(indent + line if line.strip() else line for line in rest)])
    return "".join([*lines[: begin[0] - 1], before, new, after, *lines[end[0] :]])


def bugs() -> list[Bug]:
    """Return all bugs in the file's order. Raise TypeError or KeyError if a table is incomplete."""
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
