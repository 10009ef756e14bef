"""The corpus of planted bugs: what each changes in the sources, and what is to catch it.

``corpus.toml`` has one table per bug:

    [name-of-the-bug]
    why = "what goes wrong with it"
    file = "protocol/worker/replication.py"     # of sparkstrom/
    find = "text that is there exactly once"
    replace = "what stands there instead"
    tests = ["tests/unit/protocol/test_x.py"]   # run first; the bug is caught when they fail
    modes = ["plain", "mesh"]                   # else so many seeds of these; the first that fails
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus.toml"


@dataclass(frozen=True, slots=True)
class Bug:
    """One change of one file that must not pass."""

    name: str
    why: str
    file: str
    find: str
    replace: str
    tests: tuple[str, ...] = ()
    modes: tuple[str, ...] = ()

    def plant(self, root: Path) -> None:
        """Change the sources below ``root``. Raise ValueError where the text is not there once."""
        path = root / "sparkstrom" / self.file
        text = path.read_text()
        if (count := text.count(self.find)) != 1:
            raise ValueError(
                f"{self.name}: {self.find!r} is {count} times in {self.file}, not once"
            )
        path.write_text(text.replace(self.find, self.replace))


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
            **{key: tuple(values) for key, values in table.items()},
        )
        for name, table in tables.items()
    ]
