"""Control words: what a controller's task and the driver program say to each other.

Over a sealed stream, where there is one, and through Spark's own result of the task. Both ends are
of the same program and what comes is authenticated, so they are Python's objects as they are.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sparkstrom.base.errors import SparkstromError
from sparkstrom.base.identity import Endpoint
from sparkstrom.transport.aeron.driver import DriverOptions

if TYPE_CHECKING:  # most of it has kernels compiled
    from sparkstrom.protocol.master.residual_checkpoints import CheckpointFiles
    from sparkstrom.runtime.fit_state import Outcome, Progress, Snapshot
    from sparkstrom.spark.executor.job import TrainingJob

PART_BYTES = 16 << 20  # of a result on its way through Spark


@dataclass(frozen=True, slots=True)
class ControllerPlace:
    """An executor that can have the controller."""

    process: str  # names it: host and JVM
    executor: str  # Spark's id
    host: str
    endpoint: Endpoint  # that the controller binds there; free when it was looked at
    scratch: str

    def __str__(self) -> str:
        return f"executor {self.executor} on {self.host}, {self.endpoint}"


@dataclass(frozen=True, slots=True)
class ControllerOrder:
    """To be the controller of a fit, at this place and no other."""

    job: TrainingJob  # its endpoint is the place's
    kept: CheckpointFiles
    place: ControllerPlace


@dataclass(frozen=True, slots=True)
class LineOrder:
    """How the task gets to the driver program; known before the rest of its order is read."""

    door: Endpoint | None  # TCP, where the driver program listens; None: nowhere
    key: bytes = field(repr=False)  # of the fit
    token: bytes = b""  # of a task that will ask, by UDP, whether it has begun; b"": none will


@dataclass(frozen=True, slots=True)
class MediaOrder:
    """The media driver that the task has before it compiles anything, for workers to ask."""

    key: str
    options: DriverOptions


@dataclass(frozen=True, slots=True)
class ControllerState:
    """Told again and again while a fit runs."""

    progress: Progress
    finished: bool
    failure: SparkstromError | None
    now_s: float  # on the controller's clock


@dataclass(frozen=True, slots=True)
class ControllerResult:
    """All that is left of it. Of a fit that has failed there is no outcome."""

    state: ControllerState
    outcome: Outcome | None
    snapshot: Snapshot
    updater_copies: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class NotHere:
    """The task began elsewhere than it was meant to, or again: it has done nothing."""

    place: str
    again: bool


# -- what the driver program asks over a stream, and what it gets ---------------------------------


@dataclass(frozen=True, slots=True)
class StopWanted:
    """``MasterControl.request_stop``."""

    reason: str


@dataclass(frozen=True, slots=True)
class GiveUpWanted:
    """``MasterControl.give_up``."""

    reason: str


@dataclass(frozen=True, slots=True)
class SnapshotWanted:
    """``MasterControl.snapshot``; answered with a Snapshot."""


@dataclass(frozen=True, slots=True)
class UpdatersWanted:
    """``MasterControl.copy_updaters``; answered with its result."""

    everybody: bool


@dataclass(frozen=True, slots=True)
class EndWanted:
    """``MasterControl.end``: the task returns its result."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One of the above, under a number: an answer has the same; asked again it is one question."""

    number: int
    what: Any


@dataclass(frozen=True, slots=True)
class Answered:
    """To ``Asked``; an error is raised by who asked."""

    number: int
    value: Any = field(repr=False)


def packed_word(word: Any) -> bytes:
    """As it travels."""
    return pickle.dumps(word, protocol=5)


def unpacked_word(word: bytes) -> Any:
    """Only of what was sealed, or what Spark itself has brought."""
    return pickle.loads(word)


def in_parts(word: Any) -> Iterator[bytes]:
    """As a task's result: Spark's own limits are for one of its rows."""
    whole = packed_word(word)
    for begin in range(0, len(whole), PART_BYTES):
        yield whole[begin : begin + PART_BYTES]


def of_parts(parts: Iterable[bytes]) -> Any:
    """The whole of it."""
    return unpacked_word(b"".join(parts))


# -- clocks ---------------------------------------------------------------------------------------


def progress_later(progress: Progress, seconds: float) -> Progress:
    """With its times moved on: by how much this process's clock is ahead of the controller's."""
    moved = tuple(replace(each, at_s=each.at_s + seconds) for each in progress.departures)
    return replace(progress, departures=moved)


def outcome_later(outcome: Outcome, seconds: float) -> Outcome:
    """The same of a result."""
    return replace(
        outcome,
        phase_began_s={phase: at_s + seconds for phase, at_s in outcome.phase_began_s.items()},
        departures=[replace(each, at_s=each.at_s + seconds) for each in outcome.departures],
    )
