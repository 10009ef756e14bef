"""Pieces: what workers send at a round's end, some MiB at a time, and how pieces are added up.

Every sum is made in the order of the workers, whatever the order in which pieces come, so that a
round gives the same bits however often Spark makes a part of it again. Each source tells each
target how many pieces it has sent it: Spark ends an input that breaks off like one that is whole.
"""

from __future__ import annotations

import pickle
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkstrom.runtime.averaging import WeightedSum

PICKLE = 5  # arrays as they lie


class RowsMissing(EOFError):
    """What a round needs did not arrive whole: Spark makes it again."""


class ArrayPiece(NamedTuple):
    """Some values of one array of one worker, or of a sum of several workers."""

    source: int  # worker, or group of workers
    name: str
    begin: int  # of these values in the array
    values: NDArray[Any]  # a sum: f64, weight x values
    weight: float
    dtype: str  # of the array
    is_sum: bool = False


class Told(NamedTuple):
    """Whatever else a source has to say."""

    source: int
    what: Any


class SentAll(NamedTuple):
    """The last of a source: so many came before it."""

    source: int
    pieces: int


Record = ArrayPiece | Told | SentAll


def pieces_of(
    source: int, arrays: Iterable[tuple[str, NDArray[Any]]], weight: float, piece_bytes: int
) -> Iterator[ArrayPiece]:
    """Arrays, cut."""
    for name, array in arrays:
        flat, step = array.reshape(-1), max(1, piece_bytes // array.itemsize)
        for begin in range(0, max(1, flat.size), step):  # one of no values, too: it has the name
            values = flat[begin : begin + step]
            yield ArrayPiece(source, name, begin, values, weight, array.dtype.str)


def target_of(piece: ArrayPiece, targets: int, piece_bytes: int) -> int:
    """Where all sources send this piece."""
    step = max(1, piece_bytes // np.dtype(piece.dtype).itemsize)
    return (piece.begin // step + _shift(piece.name)) % targets


def _shift(name: str) -> int:
    """Arrays do not all begin at the same target."""
    return zlib.crc32(name.encode())


class CutArray(NamedTuple):
    """Of an array that is cut."""

    name: str
    size: int  # values
    itemsize: int  # bytes of one


def bytes_by_target(
    arrays: Iterable[CutArray], targets: int, piece_bytes: int
) -> NDArray[np.int64]:
    """What comes to each target of the arrays' values, once of each of them."""
    found = np.zeros(targets, np.int64)
    for name, size, itemsize in arrays:
        step = max(1, piece_bytes // itemsize)
        begins = np.arange(0, size, step)
        values = np.minimum(step, size - begins)
        np.add.at(found, (begins // step + _shift(name)) % targets, values * itemsize)
    return found


def packed_record(record: Record) -> bytes:
    """As Spark carries it."""
    return pickle.dumps(record, PICKLE)


def whole_records(records: Iterable[bytes], sources: Iterable[int]) -> list[ArrayPiece | Told]:
    """All that these sources have sent. Raise EOFError where something is missing."""
    found: list[ArrayPiece | Told] = []
    counts: dict[int, int] = {}
    for content in records:
        record: Record = pickle.loads(content)
        if isinstance(record, SentAll):
            counts[record.source] = record.pieces
        else:
            found.append(record)
    here: dict[int, int] = defaultdict(int)
    for record in found:
        here[record.source] += 1
    missing = [source for source in sources if here[source] != counts.get(source, -1)]
    if missing:
        raise EOFError(
            f"{len(missing)} workers' results did not arrive whole (first: worker {missing[0]}):"
            " Spark has lost shuffle files and makes them again"
        )
    return found


def added(records: Iterable[ArrayPiece | Told], source: int) -> Iterator[ArrayPiece]:
    """For each piece the sum over its sources, in their order, as of one source."""
    for (name, begin), parts in _alike(records):
        total = _sum_of(parts)
        dtype = parts[0].dtype
        yield ArrayPiece(source, name, begin, total.total, total.weight, dtype, is_sum=True)


def means(records: Iterable[ArrayPiece | Told]) -> Iterator[ArrayPiece]:
    """For each piece the mean over its sources, in the array's own dtype."""
    for (name, begin), parts in _alike(records):
        total, dtype = _sum_of(parts), parts[0].dtype
        yield ArrayPiece(-1, name, begin, total.mean(dtype), total.weight, dtype)


def _alike(
    records: Iterable[ArrayPiece | Told],
) -> Iterator[tuple[tuple[str, int], list[ArrayPiece]]]:
    """Pieces of the same values, in the order of their sources; each is let go after its turn."""
    groups: dict[tuple[str, int], list[ArrayPiece]] = defaultdict(list)
    for record in records:
        if isinstance(record, ArrayPiece):
            groups[record.name, record.begin].append(record)
    for key in sorted(groups):
        yield key, sorted(groups.pop(key), key=lambda piece: piece.source)


def _sum_of(parts: list[ArrayPiece]) -> WeightedSum:
    total = WeightedSum(parts[0].values.size)
    for part in parts:
        if part.is_sum:
            total.add_sum(part.values, part.weight)
        else:
            total.add(part.values, part.weight)
    return total


def groups_in_tree(workers: int, depth: int) -> list[int]:
    """How many groups of workers each level of sums has before the last: none up to depth 2.

    As ``RDD.treeAggregate`` chooses them, whose last level is here the sum by parts.
    """
    if depth < 3:
        return []
    scale = max(2, int(np.ceil(workers ** (1 / (depth - 1)))))
    levels, groups = [], workers
    for _ in range(depth - 2):
        groups = -(-groups // scale)
        if groups <= 1:
            break
        levels.append(groups)
    return levels
