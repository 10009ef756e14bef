"""Shipment: named arrays on their way to executors, in parts.

No part is so large that a JVM could not hold it in one array; workers copy each into place and let
it go. Parts are broadcast variables, which an executor takes once, its blocks from other executors
where these have them; over Spark Connect they are rows of a round's own (``spark.connect``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sparkstrom.spark.averaging.pieces import RowsMissing

Arrays = Mapping[str, NDArray[Any]]

ALIGNED = 64  # bytes: where each array begins


class Cargo(NamedTuple):
    """Where one array lies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int  # byte

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


class ShippedParts(Protocol):
    """Of a shipment, however they travel."""

    def contents(self, records: Iterator[bytes]) -> Iterator[bytes]:
        """In order; ``records`` are those that come to the worker's task."""
        ...

    def destroy(self) -> None:
        """Nobody wants them any more."""


@dataclass(frozen=True, slots=True)
class Broadcasts:
    """One broadcast variable for each."""

    handles: tuple[Any, ...] = field(repr=False)

    def contents(self, records: Iterator[bytes]) -> Iterator[bytes]:
        for handle in self.handles:
            yield handle.value
            handle.__dict__.pop("_value", None)  # it is read again from its file where it is wanted

    def destroy(self) -> None:
        for handle in self.handles:
            handle.destroy(blocking=False)


@dataclass(frozen=True, slots=True)
class Shipment:
    """What travels in place of the arrays; ``plain`` are values that are no arrays."""

    cargo: tuple[Cargo, ...]
    parts: ShippedParts = field(repr=False)
    plain: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return self.cargo[-1].begin + self.cargo[-1].nbytes if self.cargo else 0

    def unpacked(self, records: Iterator[bytes]) -> dict[str, NDArray[Any]]:
        """The arrays, in one piece of memory that is the caller's; what Spark held is let go.

        Raise RowsMissing where parts come with the task's ``records``, and some have not.
        """
        whole, begin = np.empty(self.nbytes, np.uint8), 0
        for content in self.parts.contents(records):
            end = begin + len(content)
            if end > len(whole):
                break
            whole[begin:end] = np.frombuffer(content, np.uint8)
            begin = end
            del content
        if begin != len(whole):
            raise RowsMissing(
                f"{begin} of {len(whole)} bytes of a round's parameters arrived: Spark has lost"
                " shuffle files and makes them again"
            )
        return {
            one.name: whole[one.begin : one.begin + one.nbytes].view(one.dtype).reshape(one.shape)
            for one in self.cargo
        }

    def destroy(self) -> None:
        """Nobody wants it any more."""
        self.parts.destroy()


Sent = Callable[[int, Iterator[bytes]], ShippedParts]


def shipped(sent: Sent, arrays: Arrays, plain: dict[str, Any], part_bytes: int) -> Shipment:
    """Send them; ``part_bytes`` at most in each part."""
    cargo, at = [], 0
    for name, array in arrays.items():
        cargo.append(Cargo(name, array.dtype.str, array.shape, at))
        at += -(-array.nbytes // ALIGNED) * ALIGNED
    size = cargo[-1].begin + cargo[-1].nbytes if cargo else 0
    parts = sent(size, _parts(cargo, arrays, size, part_bytes))
    return Shipment(tuple(cargo), parts, plain)


def _parts(cargo: list[Cargo], arrays: Arrays, size: int, part_bytes: int) -> Iterator[bytes]:
    """The arrays one behind the other, cut."""
    for first in range(0, size, part_bytes):
        part = bytearray(min(part_bytes, size - first))
        for one in cargo:
            begin, end = max(first, one.begin), min(first + len(part), one.begin + one.nbytes)
            if begin < end:
                raw = np.ascontiguousarray(arrays[one.name]).reshape(-1).view(np.uint8)
                part[begin - first : end - first] = raw[begin - one.begin : end - one.begin].data
        yield bytes(part)
