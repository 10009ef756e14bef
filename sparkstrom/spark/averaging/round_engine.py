"""Round engine: what rounds ask of Spark: by RDDs (``rdd_engine``), or frames (``spark.connect``).

Rows are at hand for all epochs, each epoch's minibatches for its rounds. A round's job reads the
rows of that round alone, and what it begins with comes as a shipment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from sparkstrom.spark.averaging.round_job import RoundInput, RowFacts
from sparkstrom.spark.averaging.round_tasks import EpochCut
from sparkstrom.spark.averaging.shipment import ShippedParts
from sparkstrom.spark.data.shuffle_blocks import Blocks
from sparkstrom.spark.driver.fitting import IS_CANCELLED, FitCancelled

Records = Iterable[bytes]
Answering = Callable[[int, Records], Iterator[Any]]  # of a partition
Writing = Callable[[int, Any], Iterator[tuple[int, bytes]]]  # each record to a target
Looking = Callable[[Blocks, int, Iterable[Any]], Iterator[Any]]
Cutting = Callable[[Blocks, int, Iterable[Any]], Iterator[tuple[int, bytes]]]
Fetch = Callable[[Sequence[int]], list[bytes]]  # of neighbouring partitions


Gone = Callable[[], bool]  # does nobody wait for the fit any more?


def need_waiting(gone: Gone) -> None:
    """Before Spark is asked for what takes it a while. Raise FitCancelled where nobody waits."""
    if gone():
        raise FitCancelled(IS_CANCELLED.format("nobody waits for its rounds"))


class RoundRecords(Protocol):
    """Records by partition, on executors. Nothing runs until somebody wants answers."""

    def answers(self, run: Answering) -> list[Any]:
        """All that it yields, of all partitions."""
        ...

    def shuffled(self, written: Writing, targets: int) -> RoundRecords:
        """So many partitions of what ``written`` sends to each, in no order."""
        ...

    def results(self, run: Answering) -> AbstractContextManager[Fetch]:
        """What it yields (bytes), computed once, some partitions at a time, in the block."""
        ...


class CutRows(Protocol):
    """Some rounds' minibatches."""

    def of_round(self, number: int, given: RoundInput, *, measures: bool = False) -> RoundRecords:
        """One partition for each worker: its rows, and before them what does not travel otherwise.

        ``measures``: held-out rows, for which parameters are all that is wanted.
        """
        ...


class RoundEngine(Protocol):
    """Of one fit."""

    def opened(self) -> AbstractContextManager[None]:
        """In the block the fit runs."""
        ...

    def look(self, look: Looking) -> list[Any]:
        """What it says of each partition's rows."""
        ...

    def rounds_at_once(self, facts: Sequence[RowFacts]) -> int:
        """How many rounds one ``cut`` is for, at most."""
        ...

    def cut(self, cut: EpochCut, cutting: Cutting) -> AbstractContextManager[CutRows]:
        """These rounds' minibatches, in the block."""
        ...

    def sent(self, nbytes: int, parts: Iterator[bytes]) -> ShippedParts:
        """ShippedParts of a shipment, on their way."""
        ...
