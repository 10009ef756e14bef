"""Define the interface through which the driver program controls and observes a fit's controller.

The controller, also called the master, numbers the updates and holds the shared parameters.
``MasterControl`` is its interface; ``Progress``, ``Snapshot`` and ``FitOutcome`` are the values
that it returns. ``runtime.master_thread`` implements it in this process,
``spark.controller.remote_controller`` for a controller in a Spark task. ``WorkerLogBuffer`` keeps
lines that workers' code printed, and ``error_from_abort`` returns the error with which ``fit``
ends.
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
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import IgnoreReason
from sparkstrom.protocol.common.fit_spec import PartitionStart
from sparkstrom.protocol.master.members import CheckpointFiles, Departure
from sparkstrom.runtime.message_endpoint import Traffic

# Lines of all workers: initial burst, then one per interval, and in total.
LOG_LINES_BURST, LOG_LINE_INTERVAL_S, LOG_LINES_MAX = 60, 0.5, 500
LABEL_CHARS_MAX = 60


@dataclass(frozen=True, slots=True)
class WorkerLogLine:
    """One line that a worker's code printed, without control characters."""

    partition: int  # the worker's partition
    host: str  # its host
    phase: str  # what the worker was doing
    text: str


class WorkerLogBuffer:
    """Lines that workers' code printed, as they arrived; lines beyond limits are only counted."""

    def __init__(self) -> None:
        self.lines: tuple[WorkerLogLine, ...] = ()
        self.skipped = 0  # lines left out by workers and by this buffer
        self._allowance = RateLimiter(LOG_LINES_BURST, LOG_LINE_INTERVAL_S, LOG_LINES_MAX)

    def add(self, message: WorkerLog, now_s: float) -> None:
        """Add the lines of a message, as far as the limits allow at monotonic time ``now_s``."""
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
    """Return the error that ``fit`` raises if the controller aborts the fit as ``abort`` says."""
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

    phase: Phase  # the protocol's phase, such as gathering workers or training
    workers: int  # number of live workers
    partitions: int  # number of partitions
    joined: int  # partitions whose rows a worker has read
    minibatches: int  # minibatches in committed updates
    minibatches_expected: int  # minibatches of the joined partitions in the whole fit
    commits: int  # number of commits (numbered updates) so far
    staleness: float  # mean number of other workers' minibatches that an update had not seen
    # counters of each worker, by node id, including workers that have left
    stats: dict[int, WorkerCounters] = field(hash=False)
    training: frozenset[int] = frozenset()  # partitions with rows and a live worker
    evaluating: frozenset[int] = frozenset()  # live partitions all of whose rows are held out
    departures: tuple[Departure, ...] = ()  # workers that left, in this order, with reasons
    # bytes sent by the controller, by kind of message
    by_kind: Counter[str] = field(default_factory=Counter, hash=False)
    # bytes that left the controller's network interfaces
    wire: LinkBytes = field(default=NO_LINK_BYTES, hash=False)
    slow_links: tuple[str, ...] = ()  # descriptions of all links that were found too slow
    news: tuple[str, ...] = ()  # messages for the user, other than departures
    copied: int = 0  # number of live workers that have a copy of the parameters
    slow_now: int = 0  # number of links to live workers that are slow now
    # Peers that the controller receives from but that receive nothing.
    unresponsive_peers: tuple[Endpoint, ...] = ()
    heard: tuple[WorkerLogLine, ...] = ()  # lines printed by workers' code
    worker_lines_skipped: int = 0  # lines that are not shown
    started: frozenset[int] = frozenset()  # partitions with rows that have had a worker


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of the controller's parameters as of one commit (numbered update)."""

    commit: int  # number of the newest commit in it
    parameters: Flat  # f32[n_params], on the host
    buffers: bytes  # the model's state other than parameters; b"" if it has none
    partitions: tuple[PartitionStart, ...]  # how much of each partition is in the parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOutcome:
    """The result and counters of a finished fit; training in rounds does not set all fields."""

    hashes: dict[str, str]  # node id or "driver" -> hash of its final parameters, as hex
    minibatches: int  # minibatches in committed updates
    minibatches_expected: int  # minibatches of a complete fit
    rows: list[int]  # number of rows of each partition; -1 if no worker read them
    executors: set[str]  # executors that had a worker
    commits: int  # number of commits (numbered updates)
    # Number of commits that an update had not seen -> number of updates.
    staleness: Counter[int] = field(default_factory=Counter)
    # Mean and largest number of other workers' minibatches that a trained minibatch had not seen.
    staleness_minibatches: float = 0.0
    staleness_minibatches_max: float = 0.0
    stats: dict[int, WorkerCounters]  # counters of each worker, by node id
    traffic: Traffic  # bytes and frames of the controller itself
    wire: LinkBytes = NO_LINK_BYTES  # bytes that left the controller's network interfaces
    # Ignored messages, by kind and reason.
    ignored: Counter[tuple[str, IgnoreReason]] = field(default_factory=Counter)
    hosts: dict[int, str]  # host of every worker that ever joined, by node id
    slow_links: tuple[str, ...] = ()  # descriptions, which are among the notes too
    departures: list[Departure]  # workers that left, with reasons
    notes: list[str] = field(default_factory=list)  # warnings for the summary
    # Files with workers' residuals, for the next fit.
    kept: CheckpointFiles = field(default_factory=dict)
    lost_mass: float = 0.0  # sum of absolute values of residuals that were lost
    grants: int = 0  # number of residual files of an earlier fit that were given to new workers
    phase_began_s: dict[Phase, float]  # phase -> time at which it began, on the monotonic clock
    overflows: int = 0  # number of times that a parameter left the range of exact sums
    first_overflow: int = -1  # index of the first such parameter, or -1
    stop_reason: str | None  # why training was stopped early; None if it was not
    minibatches_resumed: int = 0  # part of ``minibatches`` that an earlier run trained
    summed_workers: int | None = None  # n if updates had the weight n / workers; None: no limit

    @property
    def minibatches_trained(self) -> int:
        """Committed minibatches that this run trained, without those of the run it resumed."""
        return self.minibatches - self.minibatches_resumed


class MasterControl(Protocol):
    """Interface of the controller, which numbers updates, for the driver program's main thread.

    Wait on ``finished``; afterwards read ``failure``, or call ``end`` and then ``outcome``.
    """

    endpoint: Endpoint  # host and port at which workers join
    join_stream: int  # number of the stream for workers' requests to join
    finished: threading.Event  # set when the fit is done or has failed
    failure: SparkstromError | None  # the error with which the fit failed; None if it did not

    @property
    def progress(self) -> Progress:
        """The newest progress. Reading it changes nothing."""
        ...

    def acknowledge(self, progress: Progress) -> None:
        """Note that the caller has received ``progress``, and has handled all earlier progress.

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
        """True if the controller could answer ``snapshot`` and ``copy_optimizer_states`` now."""
        ...

    def start(self) -> None:
        """Start the fit."""

    def request_stop(self, reason: str) -> None:
        """Stop training early for ``reason``; the fit ends as usual and keeps what is trained."""

    def give_up(self, reason: str) -> None:
        """Abort the fit for a failure outside the protocol, and make the workers end."""

    def snapshot(self, *, updaters: bool = False) -> Snapshot:
        """Return a copy of the parameters, with its position in the fit.

        Args:
            updaters: also retain the workers' optimizer states of this commit, for the next
                ``copy_optimizer_states``.

        Raises:
            SparkstromError: no copy is available.
        """
        ...

    def copy_optimizer_states(self, *, everybody: bool) -> Future[tuple[bytes, ...]]:
        """Request the encoded optimizer and encoder state of one worker, or of all (``everybody``).

        States that a snapshot has retained belong to that snapshot and are returned once. The
        result is () if no worker sent its state in time.
        """
        ...

    def end(self) -> None:
        """Stop the controller, if it was started, and release its resources. Idempotent.

        Call this only after the job has ended, or without a job.
        """

    def outcome(self) -> FitOutcome:
        """Return the result of a fit that is done."""
        ...
