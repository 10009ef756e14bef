"""Record frames: bytes by partition as rows of DataFrames, and the tasks that read and write them.

A record is cut into pieces, because Arrow batches have a number of rows and no bound of bytes. Who
reads knows by the numbers of pieces, and by what is in the records, whether all of them came.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from sparkstrom.base.errors import SetupError, SparkstromError, UsageError
from sparkstrom.base.import_archives import keep_unchanged_archives
from sparkstrom.spark.averaging.pieces import PICKLE, RowsMissing
from sparkstrom.spark.connect.binary_rows import ROW_BYTES, in_rows
from sparkstrom.spark.connect.connect_spread import PIECE_BYTES
from sparkstrom.spark.connect.connect_tasks import Batches, task_number
from sparkstrom.spark.data.row_blocks import Block
from sparkstrom.spark.data.shuffle_blocks import Blocks

if TYPE_CHECKING:
    import pyarrow as pa

    from sparkstrom.spark.averaging.round_engine import Answering, Cutting, Looking, Writing

Read = Callable[[int, Batches], Iterator[bytes]]  # of a partition

ROWS_AT_ONCE = 32  # of ``ROW_BYTES`` at most, in one Arrow batch

NUMBERS = ("worker", "phase", "number", "piece", "pieces")
RECORD = ", ".join(f"{name} long" for name in NUMBERS) + ", content binary"
ORDER = ("phase", "number", "piece")
PAIR = "key long, content binary"
PART = "number long, content binary"  # of a shipment


def cut_record(
    worker: int, phase: int, number: int, content: bytes, piece_bytes: int
) -> pa.RecordBatch:
    """One record: ``number`` of its phase."""
    import pyarrow as pa

    begins = range(0, max(1, len(content)), piece_bytes)
    count = len(begins)
    same = [[value] * count for value in (worker, phase, number)]
    numbers = [*same, list(range(count)), [count] * count]
    arrays = [pa.array(column, pa.int64()) for column in numbers]
    pieces = pa.array([content[begin : begin + piece_bytes] for begin in begins], pa.binary())
    return pa.RecordBatch.from_arrays([*arrays, pieces], names=[*NUMBERS, "content"])


def records_of(index: int, batches: Batches) -> Iterator[bytes]:
    """A worker's records, as they come. Raise RowsMissing where a piece of one is missing."""
    content: list[bytes] = []
    for batch in batches:
        for row in batch.to_pylist():
            if row["worker"] != index:
                raise SetupError(
                    f"rows of worker {row['worker']} came to partition {index}: this cluster's "
                    "Spark hashes rows otherwise than it says"
                )
            if row["piece"] != len(content):
                raise RowsMissing(f"piece {len(content)} of a record did not come to {index}")
            content.append(row["content"])
            if len(content) == row["pieces"]:
                yield b"".join(content)
                content = []
    if content:
        raise RowsMissing(f"a record broke off on its way to partition {index}")


def contents_of(index: int, batches: Batches) -> Iterator[bytes]:
    """What was sent to a target, in no order."""
    for batch in batches:
        yield from batch.column("content").to_pylist()


# -- tasks -----------------------------------------------------------------------------------------


def run_answers(read: Read, run: Answering, batches: Batches) -> Iterator[pa.RecordBatch]:
    """What it says of its partition, for this program."""
    index = task_number()
    return in_rows(run(index, read(index, batches)), index)


def run_written(
    read: Read, written: Writing, keys: list[int], batches: Batches
) -> Iterator[pa.RecordBatch]:
    """What it sends, each record to a target, by the key that Spark hashes to that."""
    import pyarrow as pa

    keep_unchanged_archives()
    index = task_number()
    for target, content in written(index, read(index, batches)):
        columns = [pa.array([keys[target]], pa.int64()), pa.array([content], pa.binary())]
        yield pa.RecordBatch.from_arrays(columns, names=["key", "content"])


def run_look(look: Looking, blocks: Blocks, batches: Batches) -> Iterator[pa.RecordBatch]:
    """What it says of a worker's rows."""
    index = task_number()
    return in_rows(look(blocks, index, batches), index)


def run_cut(
    cutting: Cutting, workers: int, first_phase: int, blocks: Blocks, batches: Batches
) -> Iterator[pa.RecordBatch]:
    """A worker's minibatches, each in the phase of its round."""
    index, numbers = task_number(), dict[int, int]()
    for target, content in cutting(blocks, index, batches):
        phase = first_phase + target // workers
        number = numbers[phase] = numbers.get(phase, -1) + 1
        yield cut_record(index, phase, number, content, ROW_BYTES)


def run_keep(fit: int, blocks: Blocks, batches: Batches) -> Iterator[pa.RecordBatch]:
    """A worker's rows, to be kept; what is wrong with them is kept, too, and refused later.

    ``fit`` makes the frame another one than those of other fits, which let go of their own.
    """
    keep_unchanged_archives()
    index = task_number()
    for number, value in enumerate(_values(blocks, index, batches)):
        yield cut_record(index, 0, number, pickle.dumps(value, PICKLE), PIECE_BYTES)


def _values(
    blocks: Blocks, index: int, batches: Batches
) -> Iterator[Block | SparkstromError | int]:
    count = 0
    try:
        for block in blocks(index, batches):
            yield block
            count += 1
    except (UsageError, SetupError) as error:
        yield error
        return
    yield count


def stored_blocks(index: int, batches: Iterable[Any]) -> Iterator[Block]:
    """Of what was kept. Raise what is wrong with the rows, EOFError where some are missing."""
    came, total = 0, -1
    for content in records_of(index, batches):
        value: Block | SparkstromError | int = pickle.loads(content)
        if isinstance(value, SparkstromError):
            raise value
        if isinstance(value, int):
            total = value
            continue
        came += 1
        yield value
    if came != total:
        raise EOFError(f"the rows of partition {index} broke off: Spark makes them again")
