"""Send a round's arrays to executors as payloads, and sum the workers' results piece by piece.

In a round, workers start with the same parameters, train some minibatches and average the results.
A payload contains arrays, such as these parameters. It is split into parts that fit into a JVM
array. Workers copy each part into place and then release it. With a SparkContext, parts are
broadcast variables, which executors also fetch from each other. Spark Connect has no broadcast
variables: there, the parts of a large payload are sent to a task as records, before its
minibatches.

The workers' results are split into pieces of a few MiB. A source (a worker, or a group of workers)
sends each piece to a target: the task that sums the corresponding pieces of all sources. Pieces may
arrive in any order, but they are added in the order of workers, so that a repeated round has
bit-identical results. A task cannot distinguish a truncated input from a complete one, so each
source sends each target the number of records that it sent there.
"""

from __future__ import annotations

import pickle
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sparkstrom.rounds.averaging import WeightedSum
from sparkstrom.rounds.worker_round import IncompleteInput

Arrays = Mapping[str, NDArray[Any]]

ALIGNMENT = 64  # size of a cache line in bytes; every array begins at a multiple of it
PICKLE = 5  # pickle protocol; it stores arrays as they are in memory


class ArrayLocation(NamedTuple):
    """The name, type and position of one array in a payload."""

    name: str  # name of the array
    dtype: str  # in the form of ``numpy.dtype.str``
    shape: tuple[int, ...]  # shape of the array
    begin: int  # offset in the payload, in bytes

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


class PayloadParts(Protocol):
    """A handle of a payload's parts, regardless of how they are sent."""

    def contents(self, records: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the parts in order. Parts that are sent as records are read from ``records``."""
        ...

    def destroy(self) -> None:
        """Release the parts on executors and in the driver program."""


@dataclass(frozen=True, slots=True)
class BroadcastParts:
    """Parts of a payload that are sent as broadcast variables."""

    broadcasts: tuple[Any, ...] = field(repr=False)  # one per part

    def contents(self, records: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the parts, and release this process's copy of a part before yielding the next."""
        for broadcast in self.broadcasts:
            yield broadcast.value
            broadcast.__dict__.pop("_value", None)  # pyspark would keep the value in memory

    def destroy(self) -> None:
        """Remove the broadcast variables from executors and the driver program."""
        for broadcast in self.broadcasts:
            broadcast.destroy(blocking=False)


@dataclass(frozen=True, slots=True)
class Payload:
    """A handle of named arrays that were sent to executors; it also contains other values."""

    locations: tuple[ArrayLocation, ...]  # where each array is in the payload, in order
    parts: PayloadParts = field(repr=False)  # handle of the arrays' bytes
    plain: dict[str, Any] = field(default_factory=dict)  # values that are not arrays

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes."""
        return self.locations[-1].begin + self.locations[-1].nbytes if self.locations else 0

    def unpack(self, records: Iterator[bytes]) -> dict[str, NDArray[Any]]:
        """Return the arrays by name, writable, in one new block of memory.

        Parts that were sent as records are read from ``records``. Raise IncompleteInput if parts
        are missing.
        """
        whole, begin = np.empty(self.nbytes, np.uint8), 0
        for content in self.parts.contents(records):
            end = begin + len(content)
            if end > len(whole):
                break
            whole[begin:end] = np.frombuffer(content, np.uint8)
            begin = end
            del content  # before the next part is fetched
        if begin != len(whole):
            raise IncompleteInput(
                f"{begin} of {len(whole)} bytes of a round's parameters arrived: Spark has lost"
                " shuffle files and recomputes them"
            )
        return {
            one.name: whole[one.begin : one.begin + one.nbytes].view(one.dtype).reshape(one.shape)
            for one in self.locations
        }

    def destroy(self) -> None:
        """Release the arrays on executors and in the driver program."""
        self.parts.destroy()


SendParts = Callable[[int, Iterator[bytes]], PayloadParts]  # (total bytes, parts) -> handle


def send_payload(
    send: SendParts, arrays: Arrays, plain: dict[str, Any], part_bytes: int
) -> Payload:
    """Send arrays in parts of at most ``part_bytes``; return the payload.

    Args:
        send: Sends the parts and returns a handle of them.
        arrays: Arrays by name.
        plain: Other values, which become part of the payload object itself.
        part_bytes: Maximum size of a part.
    """
    locations, begin = [], 0
    for name, array in arrays.items():
        locations.append(ArrayLocation(name, array.dtype.str, array.shape, begin))
        begin += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    size = locations[-1].begin + locations[-1].nbytes if locations else 0
    parts = send(size, _iterate_parts(locations, arrays, size, part_bytes))
    return Payload(tuple(locations), parts, plain)


def _iterate_parts(
    locations: list[ArrayLocation], arrays: Arrays, size: int, part_bytes: int
) -> Iterator[bytes]:
    """Yield the bytes of all arrays, each at its location, in parts of ``part_bytes``.

    ``size`` is the total number of bytes. Gaps between arrays are filled with zeros.
    """
    for first in range(0, size, part_bytes):
        part = bytearray(min(part_bytes, size - first))
        for one in locations:
            begin, end = max(first, one.begin), min(first + len(part), one.begin + one.nbytes)
            if begin < end:
                raw = np.ascontiguousarray(arrays[one.name]).reshape(-1).view(np.uint8)
                part[begin - first : end - first] = raw[begin - one.begin : end - one.begin].data
        yield bytes(part)


class ArrayPiece(NamedTuple):
    """Consecutive values of one array, from one worker, or summed or averaged over several."""

    source: int  # index of the worker or group of workers
    name: str  # name of the array
    begin: int  # index of the first value in the flattened array
    values: NDArray[Any]  # values of the array or their means, or a weighted sum in float64
    weight: float  # the worker's weight, or the sum of the workers' weights
    dtype: str  # dtype of the array, in the form of ``numpy.dtype.str``
    is_sum: bool = False  # whether ``values`` are a weighted sum


class ReportRecord(NamedTuple):
    """A record that contains a worker's report instead of array values."""

    source: int  # index of the worker or group of workers
    value: Any  # the report


class EndOfStream(NamedTuple):
    """The last record that a source sends to a target, with the number of records before it."""

    source: int  # index of the worker or group of workers
    records: int  # number of records that the source sent to this target, without this one


Record = ArrayPiece | ReportRecord | EndOfStream


def split_arrays(
    source: int, arrays: Iterable[tuple[str, NDArray[Any]]], weight: float, piece_bytes: int
) -> Iterator[ArrayPiece]:
    """Split named arrays of ``source``; yield pieces of at most ``piece_bytes`` each.

    ``weight`` is the worker's weight in averages. An empty array becomes one empty piece.
    """
    for name, array in arrays:
        flat, step = array.reshape(-1), max(1, piece_bytes // array.itemsize)
        for begin in range(0, max(1, flat.size), step):
            values = flat[begin : begin + step]
            yield ArrayPiece(source, name, begin, values, weight, array.dtype.str)


def choose_target(piece: ArrayPiece, targets: int, piece_bytes: int) -> int:
    """Return which of ``targets`` targets sums this piece, regardless of the piece's source."""
    step = max(1, piece_bytes // np.dtype(piece.dtype).itemsize)
    return (piece.begin // step + _first_target(piece.name)) % targets


def _first_target(name: str) -> int:
    """Return a number that, modulo the number of targets, is the target of an array's first piece.

    The number is a checksum of the name, so that arrays with one piece are spread over all targets.
    """
    return zlib.crc32(name.encode())


class SplitArray(NamedTuple):
    """The name and size of an array that is sent in pieces."""

    name: str  # name of the array
    size: int  # number of values
    itemsize: int  # bytes of one value


def count_target_bytes(
    arrays: Iterable[SplitArray], targets: int, piece_bytes: int
) -> NDArray[np.int64]:
    """Return how many bytes of values each target receives if each array is sent once."""
    found = np.zeros(targets, np.int64)
    for name, size, itemsize in arrays:
        step = max(1, piece_bytes // itemsize)
        begins = np.arange(0, size, step)
        values = np.minimum(step, size - begins)
        np.add.at(found, (begins // step + _first_target(name)) % targets, values * itemsize)
    return found


def group_by_load(loads: Iterable[int], most: int) -> Iterator[range]:
    """Yield ranges of consecutive indices into ``loads`` whose loads sum to at most ``most``.

    A load greater than ``most`` forms a range by itself.
    """
    first = end = total = 0
    for end, load in enumerate(loads):
        if end > first and total + load > most:
            yield range(first, end)
            first, total = end, 0
        total += load
    yield range(first, end + 1)


def pack_record(record: Record) -> bytes:
    """Return a record serialized as bytes, for ``read_complete``."""
    return pickle.dumps(record, PICKLE)


def read_complete(
    records: Iterable[bytes], sources: Iterable[int]
) -> list[ArrayPiece | ReportRecord]:
    """Deserialize all records; return those other than EndOfStream.

    Raise EOFError if records of any of ``sources`` are missing; Spark then retries the task.
    """
    found: list[ArrayPiece | ReportRecord] = []
    expected: dict[int, int] = {}
    for content in records:
        record: Record = pickle.loads(content)
        if isinstance(record, EndOfStream):
            expected[record.source] = record.records
        else:
            found.append(record)
    arrived = Counter(record.source for record in found)
    missing = [source for source in sources if arrived[source] != expected.get(source, -1)]
    if missing:
        raise EOFError(
            f"{len(missing)} workers' results did not arrive whole (first: worker {missing[0]}):"
            " Spark has lost shuffle files and recomputes them"
        )
    return found


def sum_pieces(records: Iterable[ArrayPiece | ReportRecord], source: int) -> Iterator[ArrayPiece]:
    """Compute weighted sums of the pieces that cover the same range of an array.

    Yield the sums as pieces of ``source``, the group of workers that sent the pieces.
    """
    for (name, begin), parts in _group_pieces(records):
        total, dtype = _sum_parts(parts), parts[0].dtype
        yield ArrayPiece(source, name, begin, total.total, total.weight, dtype, is_sum=True)


def mean_pieces(records: Iterable[ArrayPiece | ReportRecord]) -> Iterator[ArrayPiece]:
    """Compute weighted means of the pieces that cover the same range of an array.

    Yield the means as pieces with the dtype of the array and the source -1.
    """
    for (name, begin), parts in _group_pieces(records):
        total, dtype = _sum_parts(parts), parts[0].dtype
        yield ArrayPiece(-1, name, begin, total.mean(dtype), total.weight, dtype)


def _group_pieces(
    records: Iterable[ArrayPiece | ReportRecord],
) -> Iterator[tuple[tuple[str, int], list[ArrayPiece]]]:
    """Yield ((name, begin), pieces sorted by source) for each range of each array.

    The generator drops each group when it yields the group, so that the memory can be released.
    """
    groups: dict[tuple[str, int], list[ArrayPiece]] = defaultdict(list)
    for record in records:
        if isinstance(record, ArrayPiece):
            groups[record.name, record.begin].append(record)
    for key in sorted(groups):
        yield key, sorted(groups.pop(key), key=lambda piece: piece.source)


def _sum_parts(parts: list[ArrayPiece]) -> WeightedSum:
    """Return the weighted sum of pieces of the same range, added in the given order."""
    total = WeightedSum(parts[0].values.size)
    for part in parts:
        if part.is_sum:
            total.add_sum(part.values, part.weight)
        else:
            total.add(part.values, part.weight)
    return total


def group_of_source(source: int, sources: int, groups: int) -> int:
    """Return the group of source number ``source``. Groups consist of consecutive sources."""
    return source // -(-sources // groups)


def sources_of_group(group: int, sources: int, groups: int) -> range:
    """Return the numbers of the sources of a group; the inverse of ``group_of_source``."""
    size = -(-sources // groups)
    return range(group * size, min(sources, (group + 1) * size))


def route_records(
    records: Iterable[ArrayPiece | ReportRecord],
    source: int,
    base: int,
    targets: int,
    piece_bytes: int,
) -> Iterator[tuple[int, bytes]]:
    """Yield (target, serialized record) for each record, then one EndOfStream for every target.

    EndOfStream contains the number of records that the source has sent to the target, so that the
    target can tell whether all have arrived.

    Args:
        records: The records that the source sends.
        source: The worker or group that sends them.
        base: Number of the first target of the source's group. The targets of all groups are
            numbered consecutively, group by group.
        targets: Number of targets per group that receive pieces. One more target per group, after
            these, receives the reports.
        piece_bytes: Maximum size of a piece.
    """
    counts = [0] * (targets + 1)
    for record in records:
        target = targets
        if isinstance(record, ArrayPiece):
            target = choose_target(record, targets, piece_bytes)
        counts[target] += 1
        yield base + target, pack_record(record)
    for target, count in enumerate(counts):
        yield base + target, pack_record(EndOfStream(source, count))
