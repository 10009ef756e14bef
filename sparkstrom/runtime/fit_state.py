"""What the driver program sees of a running and a finished fit, wherever the controller runs.

``MasterControl`` is the interface of the controller; ``Progress``, ``Snapshot`` and ``Outcome`` are
the values that it returns. ``runtime.master_thread`` implements it in this process,
``spark.controller.remote_master`` for a controller in a Spark task.
"""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from sparkstrom.base.errors import (
    RowsRefused,
    SetupError,
    SparkstromError,
    TrainingError,
    UsageError,
)
from sparkstrom.base.identity import Endpoint
from sparkstrom.codec.messages import Phase, WorkerLog
from sparkstrom.models.base import Flat
from sparkstrom.observe.progress import RateLimiter, to_printable_line
from sparkstrom.observe.telemetry import NO_LINK_BYTES, LinkBytes, WorkerCounters
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.events import IgnoreReason
from sparkstrom.protocol.common.fit_spec import PartitionStart
from sparkstrom.protocol.master.members import CheckpointFiles, Departure
from sparkstrom.runtime.message_endpoint import Traffic

# Lines of all workers: initial burst, then one per interval, and in total.
LOG_LINES_BURST, LOG_LINE_INTERVAL_S, LOG_LINES_MAX = (
    60,
    0.5,
    500,
)
LABEL_CHARS_MAX = 60


@dataclass(frozen=True, slots=True)
class WorkerLogLine:
    """One line that a worker's code printed, without control characters."""

    partition: int  # the worker's partition
    host: str  # its host
    phase: str  # what the worker was doing
    text: str


class WorkerLogBuffer:
    """Log lines of all workers, in order of arrival; lines beyond the limits are only counted."""

    def __init__(self) -> None:
        self.lines: tuple[WorkerLogLine, ...] = ()
        self.skipped = 0  # by workers and by this buffer
        self._allowance = RateLimiter(LOG_LINES_BURST, LOG_LINE_INTERVAL_S, LOG_LINES_MAX)

    def add(self, message: WorkerLog, now_s: float) -> None:
        """Add the lines of a message, as far as the limits allow."""
        self.skipped += message.skipped
        new = []
        for phase, text in message.lines:
            if self._allowance.allows(now_s):
                host = to_printable_line(message.host, LABEL_CHARS_MAX)
                phase = to_printable_line(phase, LABEL_CHARS_MAX)
                new.append(WorkerLogLine(message.partition, host, phase, to_printable_line(text)))
            else:
                self.skipped += 1
        self.lines += tuple(new)


READING_ROWS = "reading rows"  # phase of a worker that rejects a row


def error_from_abort(abort: ev.Abort) -> SparkstromError:
    """Return the error that ``fit`` raises for an abort."""
    match abort.kind:
        case ev.Failure.USAGE:
            return UsageError(abort.reason)
        case ev.Failure.SETUP:
            return SetupError(abort.reason)
        case ev.Failure.TRAINING:
            # -1 without one, as documented
            partition = -1 if abort.partition is None else abort.partition
            details = abort.host, partition, abort.trace, abort.phase
            if abort.phase == READING_ROWS:
                return RowsRefused(abort.reason, *details)
            return TrainingError(abort.reason, *details)


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a running fit, as the driver program displays it."""

    phase: Phase  # of the protocol
    workers: int  # live workers
    partitions: int  # number of partitions
    joined: int  # partitions whose rows a worker has read
    minibatches: int  # committed minibatches
    minibatches_expected: int  # of the joined partitions
    commits: int  # number of commits so far
    staleness: float  # mean number of other workers' minibatches that an update had not seen
    stats: dict[int, WorkerCounters] = field(hash=False)  # by node, departed ones included
    training: frozenset[int] = frozenset()  # partitions with rows and a live worker
    evaluating: frozenset[int] = frozenset()  # live partitions all of whose rows are held out
    departures: tuple[Departure, ...] = ()  # in order
    # bytes sent by the driver program, by kind of message
    by_kind: Counter[str] = field(default_factory=Counter, hash=False)
    # bytes that left the driver program's network interfaces
    wire: LinkBytes = field(default=NO_LINK_BYTES, hash=False)
    slow_links: tuple[str, ...] = ()  # descriptions of all links that were found too slow
    news: tuple[str, ...] = ()  # notes other than departures
    copied: int = 0  # live workers that have a replica
    slow_now: int = 0  # links to live workers that are slow now
    # Peers that the driver receives from but that receive nothing.
    unresponsive_peers: tuple[Endpoint, ...] = ()
    heard: tuple[WorkerLogLine, ...] = ()  # lines printed by workers' code
    worker_lines_skipped: int = 0  # lines that are not shown


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of the controller's replica as of one commit."""

    commit: int  # number of the newest commit in it
    parameters: Flat  # a copy
    buffers: bytes  # b"" if the model has none
    partitions: tuple[PartitionStart, ...]  # how much of each partition is in the parameters


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result and the counters of a finished fit."""

    hashes: dict[str, str]  # node id or "driver" -> hex
    minibatches: int  # committed
    minibatches_expected: int  # of the whole fit
    rows: list[int]  # per partition; -1 if no worker came
    executors: set[str]  # executors that had a worker
    commits: int  # number of commits
    staleness: Counter[int]  # in commits
    staleness_minibatches: (
        float  # mean, in other workers' minibatches; see ``protocol.master.staleness``
    )
    staleness_minibatches_max: float  # in the fit's minibatches
    stats: dict[int, WorkerCounters]  # by node
    traffic: Traffic  # the controller's own
    wire: LinkBytes  # bytes that left the driver program's network interfaces
    ignored: Counter[tuple[str, IgnoreReason]]  # ignored messages, by kind and reason
    hosts: dict[int, str]  # of every node that ever joined
    slow_links: tuple[str, ...]  # descriptions, which are among the notes too
    departures: list[Departure]  # workers that left, with reasons
    notes: list[str]  # warnings for the summary
    kept: CheckpointFiles  # residual files for the next fit
    lost_mass: float  # L1 norm of residuals that were lost
    grants: int  # residual files that a new worker has added
    phase_began_s: dict[Phase, float]  # phase -> time at which it began
    overflows: int  # parameters that left the exact range
    first_overflow: int  # index of the first one, or -1
    stop_reason: str | None  # why training was stopped early; None if it was not
    minibatches_resumed: int = 0  # part of ``minibatches`` that an earlier run trained
    summed_workers: int | None = None  # n if updates had the weight n / workers; None: no limit

    @property
    def minibatches_trained(self) -> int:
        """Committed minibatches that this run trained, without those of the run it resumed."""
        return self.minibatches - self.minibatches_resumed


class MasterControl(Protocol):
    """Control of the machine that numbers updates, from the driver's main thread.

    Wait on ``finished``; afterwards read ``failure``, or call ``end`` and then ``outcome``.
    """

    endpoint: Endpoint  # where workers join
    join_stream: int
    finished: threading.Event  # set when the fit is done or has failed
    failure: SparkstromError | None

    @property
    def progress(self) -> Progress:
        """The newest progress. Reading it changes nothing."""
        ...

    def acknowledge(self, progress: Progress) -> None:
        """Note that the caller has received ``progress`` and has handled what it received before.

        The fit's main thread calls this, once for each progress that it passes on to listeners.
        """

    @property
    def optimizer_copies(self) -> tuple[bytes, ...]:
        """Optimizer states for a final checkpoint once the fit has ended; () if none was sent."""
        ...

    @property
    def drains_after_tasks(self) -> bool:
        """True if ``finished`` is set only after all tasks have returned."""
        ...

    @property
    def has_final_parameters(self) -> bool:
        """True if the driver program has the parameters with which the fit ended.

        The value is meaningful only after the end. It is False if a controller in a Spark task was
        lost before its parameters arrived.
        """
        ...

    @property
    def is_reachable(self) -> bool:
        """True if ``snapshot`` and ``copy_optimizer_states`` would be answered now."""
        ...

    def start(self) -> None:
        """Start the fit."""

    def request_stop(self, reason: str) -> None:
        """Stop training early: drain and audit the replicas, and keep what is trained."""

    def give_up(self, reason: str) -> None:
        """Abort the fit for a failure outside the mesh, and make the workers end."""

    def snapshot(self, *, updaters: bool = False) -> Snapshot:
        """Return a copy of the parameters.

        Args:
            updaters: also retain the workers' optimizer states of this commit, for the next
                ``copy_optimizer_states``.

        Raises:
            SparkstromError: no copy is available.
        """
        ...

    def copy_optimizer_states(self, *, everybody: bool) -> Future[tuple[bytes, ...]]:
        """Request the encoded optimizer and encoder state of one worker, or of each.

        States that a snapshot has retained belong to that snapshot and are returned once. The
        result is () if no worker sent its state in time.
        """
        ...

    def end(self) -> None:
        """Stop the controller; call this only after the job has ended."""

    def outcome(self) -> Outcome:
        """Return the result of a fit that is done."""
        ...
