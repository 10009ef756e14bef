"""Messages between the driver program and a controller that runs in a Spark task.

The controller coordinates the workers of a fit. The driver program sends it requests, such as one
for a copy of the parameters; the controller's task answers them, and also sends its progress
repeatedly. These messages pass over an encrypted TCP stream. At the end, the task returns its final
state as the result of the Spark task. Without a stream, this result is the only message. Messages
are pickled Python objects, because both ends run the same program and all data is authenticated.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from sparkstrom.base.errors import SparkstromError
from sparkstrom.base.identity import Endpoint

if TYPE_CHECKING:  # importing most of these compiles kernels
    from sparkstrom.protocol.master.members import CheckpointFiles
    from sparkstrom.runtime.master_control import FitOutcome, Progress, Snapshot
    from sparkstrom.spark.jobs import SparkJob
    from sparkstrom.worker.training_job import TrainingJob

RESULT_PART_BYTES = 16 << 20  # size of one row of a task's result: Spark limits the size of rows


@dataclass(frozen=True, slots=True)
class ControllerPlace:
    """An executor that can host the controller."""

    process: str  # host and JVM, which identify the executor's process
    executor: str  # Spark's id
    host: str  # name of the executor's machine
    endpoint: Endpoint  # address and UDP port for the controller; the port was free when proposed
    scratch: str  # directory for temporary files on that machine

    def __str__(self) -> str:
        return f"executor {self.executor} on {self.host}, {self.endpoint}"


@dataclass(frozen=True, slots=True)
class ControllerSetup:
    """The input of the controller's task on one executor; it is sent in pickled form."""

    job: TrainingJob  # what workers receive, with the place's endpoint
    checkpoints: CheckpointFiles  # files that workers of the last fit left on executors


@dataclass(frozen=True, slots=True)
class ControlEndpoint:
    """How the controller's task reaches the driver program; not part of the pickled setup."""

    server: Endpoint | None  # where the driver program listens for TCP; None if it does not
    key: bytes = field(repr=False)  # the fit's secret key, which authenticates both ends
    token: bytes = b""  # token of the UDP probe that asks whether the task started; b"": no probe


@dataclass(frozen=True, slots=True)
class ControllerState:
    """The controller's progress, sent repeatedly during a fit."""

    progress: Progress  # progress of the fit
    finished: bool  # whether training is over
    failure: SparkstromError | None  # the error that ended training early; None if there is none
    now_s: float  # time of sending, by the controller's monotonic clock


@dataclass(frozen=True, slots=True)
class ControllerResult:
    """The result that the controller's task returns at the end of a fit."""

    state: ControllerState  # the last state
    outcome: FitOutcome | None  # None if the fit failed
    snapshot: Snapshot  # contains the final parameters
    optimizer_copies: tuple[bytes, ...]  # encoded optimizer states of workers


@dataclass(frozen=True, slots=True)
class PlacementMismatch:
    """A task's report that it did nothing because it ran on the wrong executor or was a retry."""

    place: str  # the process, or host, on which it started
    is_retry: bool  # whether Spark had started the task before


@dataclass(frozen=True, slots=True)
class RequestStop:
    """Request to end training early and keep its result (``MasterControl.request_stop``)."""

    reason: str  # for the user


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Request to abort the fit after a failure elsewhere (``MasterControl.give_up``)."""

    reason: str  # for the error message


@dataclass(frozen=True, slots=True)
class GetSnapshot:
    """Request for a copy of the parameters; the response is a Snapshot or an error."""


@dataclass(frozen=True, slots=True)
class GetOptimizerStates:
    """Request for workers' encoded optimizer states (``MasterControl.copy_optimizer_states``)."""

    everybody: bool  # True: the states of all workers; False: of one worker


@dataclass(frozen=True, slots=True)
class EndController:
    """Request to end the controller: its task then returns its result."""


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """A numbered request from the driver program to the controller's task.

    A request that is sent again with the same number is not executed again, except that copies of
    parameters and optimizer states may be made again.
    """

    number: int  # unique within a fit
    request: Any  # an instance of one of the request classes above


@dataclass(frozen=True, slots=True)
class ControlResponse:
    """What the controller's task returns for the ControlRequest with the same number."""

    number: int  # the request's number
    value: Any = field(repr=False)  # the result, or an exception to be raised at the requester


def pack_message(message: Any) -> bytes:
    """Serialize a message with pickle.

    Unpickling can run any code, so the receiver must know that the bytes are authentic.
    """
    return pickle.dumps(message, protocol=5)


def unpack_message(content: bytes) -> Any:
    """Unpickle a message. Use only for data that was authenticated or delivered by Spark."""
    return pickle.loads(content)


def split_message(message: Any) -> Iterator[bytes]:
    """Serialize a message; yield the bytes in parts that fit into rows of a task's result."""
    content = pack_message(message)
    for begin in range(0, len(content), RESULT_PART_BYTES):
        yield content[begin : begin + RESULT_PART_BYTES]


def join_message(parts: Iterable[bytes]) -> Any:
    """Deserialize a message from its parts, in order."""
    return unpack_message(b"".join(parts))


def shift_progress(progress: Progress, seconds: float) -> Progress:
    """Return a copy with ``seconds`` added to all times.

    This converts times from the controller's clock to the clock of this process.
    """
    departures = tuple(replace(each, at_s=each.at_s + seconds) for each in progress.departures)
    return replace(progress, departures=departures)


def shift_outcome(outcome: FitOutcome, seconds: float) -> FitOutcome:
    """Return a copy with ``seconds`` added to all times; see ``shift_progress``."""
    return replace(
        outcome,
        phase_began_s={phase: at_s + seconds for phase, at_s in outcome.phase_began_s.items()},
        departures=[replace(each, at_s=each.at_s + seconds) for each in outcome.departures],
    )


@dataclass(frozen=True, slots=True)
class PlacedController:
    """A running controller task."""

    job: SparkJob  # the job that runs the task
    place: ControllerPlace  # where the task runs
