"""Round job: what travels to the tasks of a round, and what their workers report of themselves."""

from __future__ import annotations

import gc
import pickle
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from numpy.typing import NDArray

from sparkstrom.models.base import FlatModel, State
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.records import RowFormat
from sparkstrom.spark.averaging.shipment import Shipment
from sparkstrom.spark.driver.averaging_master import ParameterAveragingTrainingMaster
from sparkstrom.spark.driver.pickling import packed

JOBS_MAX = 4  # fits at once whose models one Python worker keeps, compiled as they are
OVER_MAX = 64  # fits that workers are told of, which have few of them
PARAMETERS, UPDATER, BUFFERS = "parameters", "updater/", "buffers"


@dataclass(frozen=True, slots=True)
class PieceSizes:
    """Bytes: how what is large is cut, so that nothing has to be in one piece anywhere."""

    piece: int = 4 << 20  # of an array, on its way to where it is added up
    part: int = 64 << 20  # of a shipment: one broadcast variable
    direct: int = 1 << 20  # results of all workers that go to the driver program as they are
    collected: int = 64 << 20  # by one job of the driver program
    targets: int = 20_000  # of one shuffle of rows
    at_once: int = 1  # pieces of each worker that one task adds up

    @property
    def of_target(self) -> int:
        """What one task has for the driver program; by chance some have several times that."""
        return self.collected // 8


@dataclass(frozen=True, slots=True)
class AveragingJob:
    """One fit. The same for all its rounds."""

    spec: FitSpec
    model: FlatModel  # without its storage
    master: ParameterAveragingTrainingMaster
    rows: tuple[int, ...]  # per partition, where rows stayed and so were counted
    sizes: PieceSizes

    @property
    def piece_bytes(self) -> int:
        """Of an array, at most; the driver program gets the same piece of all workers at once."""
        adds_up = self.master.aggregation_depth == 1
        share = max(1, self.sizes.of_target // self.spec.workers)
        return min(self.sizes.piece, share) if adds_up else self.sizes.piece


@dataclass(frozen=True, slots=True)
class PackedJob:
    """An ``AveragingJob``, pickled once; a Python worker opens it once."""

    number: int  # of the fit, random
    content: bytes = field(repr=False)
    over: tuple[int, ...] = ()  # fits of this driver program that have ended

    @classmethod
    def of(cls, job: AveragingJob) -> PackedJob:
        """By Spark's own pickler, which sends what a user's script defines by value."""
        return cls(job.spec.job, packed(job))

    def now(self) -> PackedJob:
        """The same, with the news of fits that are over."""
        return replace(self, over=tuple(_over))

    def opened(self) -> AveragingJob:
        """The job, from those that this process has at hand, if it is among them.

        What it has of fits that are over goes before.
        """
        _let_go(self.over)
        if self.number not in _opened:
            _opened[self.number] = pickle.loads(self.content)
            _let_go([*_opened][:-JOBS_MAX])
        _opened.move_to_end(self.number)
        return _opened[self.number]


_opened: OrderedDict[int, AveragingJob] = OrderedDict()  # of this Python worker
_over = deque[int](maxlen=OVER_MAX)  # of this driver program


def fit_is_over(number: int) -> None:
    """On the driver: workers hear it with the next fit."""
    _over.append(number)


def _let_go(numbers: Iterable[int]) -> None:
    """With the memory of their models, which may be cycles that no collection looks at."""
    gone = [number for number in numbers if _opened.pop(number, None) is not None]
    if gone:
        gc.unfreeze()
        gc.collect()
        gc.freeze()  # as ``spare_collections`` had it


@dataclass(frozen=True, slots=True)
class RoundInput:
    """What the tasks of a round begin with."""

    number: int  # of the round, over all epochs
    epoch: int
    steps_before: int  # of each worker
    parameters: Shipment  # and the buffers
    updater: Shipment  # for all who have none of their own
    own: Mapping[int, Shipment] = field(default_factory=dict)

    def updater_of(self, worker: int) -> Shipment:
        """What its optimizer begins with."""
        return self.own.get(worker, self.updater)

    def addressed(self, workers: int) -> list[tuple[Shipment, list[int]]]:
        """All shipments, and to whom each goes; parameters come first."""
        everybody = range(workers)
        sent = [(self.parameters, [*everybody])]
        sent.append((self.updater, [worker for worker in everybody if worker not in self.own]))
        return sent + [(self.own[worker], [worker]) for worker in sorted(self.own)]


class RowPiece(NamedTuple):
    """A minibatch on its way to its round; the last has no rows and says how many there were."""

    number: int
    total: int = -1
    form: RowFormat | None = None  # in the first
    arrays: list[NDArray[Any]] | None = None
    place: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class RowFacts:
    """What a worker's rows are."""

    partition: int
    rows: int
    held_out: int
    checksum: int
    batches: int  # of an epoch
    spilled_bytes: int
    host: str = ""


class ModelFailure(NamedTuple):
    """What a user's code raised in a worker."""

    reason: str
    trace: str
    is_usage: bool


@dataclass(slots=True)
class RoundReport:
    """What a worker says at its round's end, beside its arrays."""

    partition: int
    host: str
    executor: str
    attempt: int  # 0: Spark began its task once
    steps: int = 0
    examples: int = 0
    weight: float = 0.0
    loss_sum: float = 0.0
    sent_bytes: int = 0
    buffers: bytes = b""
    rest: State = field(default_factory=dict)  # of the updater's state: what is no array of floats
    shapes: dict[str, tuple[tuple[int, ...], str]] = field(default_factory=dict)  # of arrays sent
    seconds: dict[str, float] = field(default_factory=dict)  # by activity
    doing: str = "reading parameters"
    lines: list[tuple[str, str]] = field(default_factory=list)  # that the model printed
    skipped: int = 0
    error: ModelFailure | None = None


@dataclass(slots=True)
class Measure:
    """What a worker's held-out rows say."""

    partition: int
    total: float = 0.0
    weight: float = 0.0
    seconds: float = 0.0
    host: str = ""
    doing: str = "measuring"
    lines: list[tuple[str, str]] = field(default_factory=list)  # that the model printed
    skipped: int = 0
    error: ModelFailure | None = None
