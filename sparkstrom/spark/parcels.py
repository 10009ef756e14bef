"""Parcels: rows on their way through a shuffle, so that the far end knows when they are whole.

Spark ends a Python worker's input in the same way when it is read to the end and when it breaks
off (lost shuffle files): the task's failure shows only when the Python side is done. A task that
trains for hours on half a partition would be the worst end of all. So every source partition
sends each worker at least one parcel, and each parcel says of how many it is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.spark.rows import Arrays, arrays_of_batches, arrays_of_rows

if TYPE_CHECKING:
    import pyarrow as pa

# source partition, number from 0, count, payload: a list of rows, or an Arrow stream as bytes
Parcel = tuple[int, int, int, Any]

ROWS_PER_PARCEL = 65_536
COLUMNS = "worker int, source int, number int, count int, payload binary"


def shares(workers: int, seed: int, source: int, rows: int) -> list[NDArray[np.int64]]:
    """Which rows of a source partition go to which worker: shuffled, then in turn.

    Shares differ by at most one row per source, and are the same when Spark computes it again.
    """
    chance = np.random.default_rng((seed, source))
    order, first = chance.permutation(rows), int(chance.integers(workers))
    return [order[(worker - first) % workers :: workers] for worker in range(workers)]


def deal_rows(
    workers: int, seed: int, source: int, rows: Iterable[Any]
) -> Iterator[tuple[int, Parcel]]:
    """A source partition of an RDD as (worker, parcel)."""
    held = list(rows)
    for worker, share in enumerate(shares(workers, seed, source, len(held))):
        parts = _cut(share)
        for number, part in enumerate(parts):
            yield worker, (source, number, len(parts), [held[i] for i in part])


def deal_batches(
    workers: int, seed: int, batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """A source partition of a DataFrame, by Arrow, as rows of ``COLUMNS``."""
    import pyarrow as pa
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "runs in a Spark task only"
    source, held = context.partitionId(), list(batches)
    table = pa.Table.from_batches(held) if held else None
    for worker, share in enumerate(shares(workers, seed, source, table.num_rows if table else 0)):
        parts = _cut(share)
        for number, part in enumerate(parts):
            payload = b"" if table is None else _stream(table.take(pa.array(part)))
            row = {"worker": worker, "source": source, "number": number, "count": len(parts)}
            columns = {name: pa.array([value], pa.int32()) for name, value in row.items()}
            yield pa.RecordBatch.from_pydict({**columns, "payload": pa.array([payload])})


def arrays_of_parcels(sources: int, parcels: Iterable[Parcel]) -> Arrays:
    """A worker's features and labels. Raise EOFError where a parcel is missing."""
    payloads = opened(sources, parcels)
    if payloads and isinstance(payloads[0], bytes | bytearray):
        return arrays_of_batches(chain.from_iterable(map(_batches, payloads)))
    return arrays_of_rows(chain.from_iterable(payloads))


def opened(sources: int, parcels: Iterable[Parcel]) -> list[Any]:
    """The payloads in the order of their sources. Raise EOFError where one is missing."""
    found: dict[tuple[int, int], tuple[int, Any]] = {
        (source, number): (count, payload) for source, number, count, payload in parcels
    }
    counts = {source: count for (source, _), (count, _) in found.items()}
    expected = [(s, number) for s in range(sources) for number in range(counts.get(s, 1))]
    if missing := [key for key in expected if key not in found]:
        raise EOFError(
            f"{len(missing)} of {len(expected)} parcels of rows did not arrive (first: number "
            f"{missing[0][1]} of source partition {missing[0][0]}): Spark has lost shuffle files "
            "and makes them again"
        )
    return [found[key][1] for key in expected]


def _cut(share: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """At least one part, also of nothing."""
    return [share[i : i + ROWS_PER_PARCEL] for i in range(0, max(1, len(share)), ROWS_PER_PARCEL)]


def _stream(table: pa.Table) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def _batches(payload: bytes) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    if payload:
        with pa.ipc.open_stream(payload) as reader:
            yield from reader
