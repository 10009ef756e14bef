"""Dealt rows: the data once on disk, a file for each worker, which maps its own into memory.

Dealing is what executors do before a shuffle (``spark.data.shuffle_blocks.deal``): random by seed,
the same again for the same data. A worker that takes over reads the same file, so it has the same
rows, and the page cache has them still.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np

from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.runtime.records import RowFormat
from sparkstrom.spark.data.row_blocks import Block
from sparkstrom.spark.data.shuffle_blocks import deal

NUMBER = np.dtype("<i8")
NO_DATA = (
    "the data have no rows to train on: they are empty, or an iterator (a generator, a reader) that"
    " an earlier fit has drawn to its end, as each fit does; make a new one for each"
)


class RowSpan(NamedTuple):
    """Some rows in a file: their records, then their numbers."""

    form: RowFormat
    offset: int
    rows: int
    where: str


class RowFile(NamedTuple):
    """One worker's rows. Travels; the rows do not."""

    path: str
    spans: tuple[RowSpan, ...]

    def blocks(self) -> Iterator[Block]:
        """As they were dealt, out of the page cache."""
        if not self.spans:
            return
        content = np.memmap(self.path, np.uint8, "r")
        for form, offset, rows, where in self.spans:
            end = offset + rows * form.row_bytes
            records = content[offset:end].reshape(rows, form.row_bytes)
            numbers = np.frombuffer(content, NUMBER, rows, end)
            yield Block(form, np.asarray(records), numbers, where)


def dealt(blocks: Iterable[Block], workers: int, seed: int, directory: Path) -> tuple[RowFile, ...]:
    """Each worker's rows as a file in ``directory``.

    Raise UsageError for rows that do not fit together and where there are none, SetupError where
    the disk is full.
    """
    spans: list[list[RowSpan]] = [[] for _ in range(workers)]
    paths = [directory / f"rows-{worker}" for worker in range(workers)]
    with ExitStack() as closing:
        files = [closing.enter_context(path.open("wb", buffering=0)) for path in paths]
        for worker, one in deal(lambda _, given: iter(given), workers, seed, 0, blocks):  # type: ignore[arg-type]
            if one.refusal is not None:
                raise one.refusal
            if one.block is not None and len(one.block.records):
                spans[worker].append(_written(files[worker], one.block, directory))
    if not any(spans):
        raise UsageError(NO_DATA)
    return tuple(RowFile(str(path), tuple(own)) for path, own in zip(paths, spans, strict=True))


def _written(file: IO[bytes], block: Block, directory: Path) -> RowSpan:
    offset = file.tell()
    try:
        np.ascontiguousarray(block.records).tofile(file)
        block.numbers.astype(NUMBER).tofile(file)
    except OSError as error:
        raise SetupError(
            f"{directory} does not take the rows after {offset:,} bytes of one worker's: {error}; "
            "set TMPDIR to a directory on a disk that has room for all of them"
        ) from None
    return RowSpan(block.form, offset, len(block.records), block.where)
