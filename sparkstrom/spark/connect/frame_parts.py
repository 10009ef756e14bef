"""Frame parts: a shipment's parts without broadcasts, in a job's plan or as rows of a round's own.

What is small travels in the plan. What is large becomes local relations of some MiB each, sent one
after the other and known to the server by names of the session (temporary views): a round's job
reads them before its rows. The names are taken back when the round is over, and nothing stays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

VIEW_BYTES = 16 << 20  # of one message to the server, which takes 128 MiB


@dataclass(frozen=True, slots=True)
class PlanParts:
    """All in one, in the plan."""

    content: bytes = field(repr=False)

    def contents(self, records: Iterator[bytes]) -> Iterator[bytes]:
        yield self.content

    def destroy(self) -> None:
        """It goes with the job."""


class ViewParts:
    """So many rows before a task's others; ``drop`` takes a name back."""

    def __init__(
        self, names: tuple[str, ...], count: int, drop: Callable[[str], None] | None = None
    ) -> None:
        self.names, self._count, self._drop = names, count, drop

    def __reduce__(self) -> tuple[Any, ...]:
        return ViewParts, ((), self._count)

    def contents(self, records: Iterator[bytes]) -> Iterator[bytes]:
        return itertools.islice(records, self._count)

    def destroy(self) -> None:
        for name in self.names:
            assert self._drop is not None, "it is not done on executors"
            self._drop(name)


def view_rows(parts: Iterator[bytes]) -> Iterator[list[tuple[int, bytes]]]:
    """Numbered, as many at once as one view has."""
    rows: list[tuple[int, bytes]] = []
    size = 0
    for number, part in enumerate(parts):
        if rows and size + len(part) > VIEW_BYTES:
            yield rows
            rows, size = [], 0
        rows.append((number, part))
        size += len(part)
    if rows:
        yield rows
