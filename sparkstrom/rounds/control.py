"""Control a round-based fit: read its progress and results, take snapshots, stop it.

``RoundsControl`` implements ``runtime.master_control.MasterControl``, with rounds in place of
gradient sharing's numbered updates. One thread trains the rounds and records their results; the
main thread reads them and requests snapshots or a stop.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from sparkstrom.base.errors import SparkstromError
from sparkstrom.base.identity import Endpoint, NodeId, Position
from sparkstrom.codec.messages import Phase, WorkerLog
from sparkstrom.observe.epoch_history import EpochLog, PartitionEpoch
from sparkstrom.observe.telemetry import NodeCounters, TrainingCounters, WorkerCounters
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.members import Departure, Partitions
from sparkstrom.rounds.averaging import OptimizerSnapshot, RoundResults, RoundState
from sparkstrom.rounds.backend import PartitionFacts
from sparkstrom.rounds.worker_round import HeldOutReport, RoundReport, WorkerReport
from sparkstrom.runtime.master_control import FitOutcome, Progress, Snapshot, WorkerLogBuffer
from sparkstrom.runtime.message_endpoint import Traffic

OBSERVER_TIMEOUT_S = 30.0  # wait at an epoch's end; longer than early stopping should need


class EpochBarrier:
    """Makes the rounds' thread wait at each epoch's end until early stopping has decided.

    Otherwise the main thread's polling times would decide which round is the last one and which one
    has the best parameters.
    """

    def __init__(self, *, has_observer: bool) -> None:
        self._has_observer = has_observer  # early stopping may end the fit at an epoch's end
        self._observed = 0  # number of epochs whose metrics the main thread has received
        self._handled = 0  # number of epochs for which early stopping has decided
        self._changed = threading.Condition()

    def acknowledge(self, epochs: int) -> None:
        """Record that the main thread received the metrics of the first ``epochs`` epochs.

        The main thread has then handled all metrics that it received before.
        """
        with self._changed:
            self._handled, self._observed = self._observed, epochs
            self._changed.notify_all()

    def open(self) -> None:
        """Make all current and future calls of ``wait`` return at once."""
        with self._changed:
            self._has_observer = False
            self._changed.notify_all()

    def wait(self, epochs: int) -> None:
        """Block until the first ``epochs`` epochs are handled, for at most OBSERVER_TIMEOUT_S."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._handled >= epochs or not self._has_observer, OBSERVER_TIMEOUT_S
            )


@dataclass(frozen=True, slots=True)
class RoundsProgress(Progress):
    """The progress of a round-based fit, with the number of epochs that have ended."""

    epochs: int = 0  # number of this fit's epochs whose metrics are in ``stats``


class WorkerTally:
    """One worker's totals over all rounds so far: steps, examples, losses, bytes and seconds."""

    def __init__(self, partition: int) -> None:
        self.log = EpochLog(partition)  # losses and metrics by epoch
        self.facts = PartitionFacts(partition, 0, 0, 0, 0, 0)  # until the worker has reported
        self.host = ""
        self.warnings: dict[str, str] = {}  # sparkstrom's: place in the source -> text
        self._steps = self._examples = self._rounds = self._sent_bytes = 0
        self._loss_sum = self._epoch_loss = self._last_loss = 0.0
        self._loss_weight = self._epoch_weight = self._last_weight = 0.0
        self._epoch_examples = 0
        self._seconds = Counter[str]()  # by activity

    def add(self, report: RoundReport) -> None:
        """Add the results of one round to the totals."""
        self.host = report.host
        self._steps += report.steps
        self._examples += report.examples
        self._loss_sum += report.loss_sum
        self._loss_weight += report.weight
        self._epoch_loss += report.loss_sum
        self._epoch_weight += report.weight
        self._epoch_examples += report.examples
        self._rounds += report.steps > 0
        self._sent_bytes += report.sent_bytes
        self._seconds.update(report.seconds)

    def end_epoch(self, epoch: int, report: HeldOutReport | None) -> None:
        """Record the end of an epoch; ``report`` is its evaluation on held-out rows, or None."""
        self._last_loss, self._epoch_loss = self._epoch_loss, 0.0
        self._last_weight, self._epoch_weight = self._epoch_weight, 0.0
        examples, self._epoch_examples = self._epoch_examples, 0
        held = (report.total, report.weight) if report else (0.0, 0.0)
        figures = epoch, self._last_loss, examples, *held
        self.log.add(PartitionEpoch(*figures, loss_weight=self._last_weight))
        if report is not None:
            self._seconds.update(report.seconds)

    def counters(self, epoch: int, n_params: int) -> WorkerCounters:
        """Return the totals as the counters that a worker sends in a gradient-sharing fit.

        Each round counts as one update ("publication") of all ``n_params`` parameters. ``epoch`` is
        the epoch that the worker is in.
        """
        training = TrainingCounters(
            partition=self.facts.partition,
            epoch=epoch,
            steps=self._steps,
            examples=self._examples,
            loss_sum=self._loss_sum,
            loss_weight=self._loss_weight,
            last_loss_sum=self._last_loss,
            last_loss_weight=self._last_weight,
            rows_held_out=self.facts.held_out,
            spilled_bytes=self.facts.spilled_bytes,
            publications=self._rounds,
            hits=self._rounds * n_params,
            seconds=dict(self._seconds),
            epochs=self.log.recent_figures(),
        )
        return WorkerCounters(training, NodeCounters(update_bytes=self._sent_bytes))


class RoundsControl:
    """The controller of one round-based fit, shared by the main thread and the rounds' thread.

    Args:
        spec: The fit.
        state: Parameters and optimizer states from which the next round starts.
        has_observer: Whether early stopping may end the fit at an epoch's end.
        abort: Ends the backend's current call; see ``RoundsBackend.abort``.
    """

    # Constant properties of the interface ``MasterControl``.
    drains_after_tasks = False
    has_final_parameters = is_reachable = True
    endpoint, join_stream = Endpoint("", 0), 0  # no worker joins over a network

    def __init__(
        self, spec: FitSpec, state: RoundState, *, has_observer: bool, abort: Callable[[], None]
    ) -> None:
        self.spec, self.state = spec, state
        self.finished = threading.Event()
        self.failure: SparkstromError | None = None
        self.stop_reason: str | None = None
        self.given_up = False  # whether ``give_up`` was called
        self.partitions = Partitions.from_spec(spec, time.monotonic())
        self.began_s = dict[Phase, float]()
        self._abort, self._barrier = abort, EpochBarrier(has_observer=has_observer)
        self._lock = threading.RLock()  # state, positions, tallies and progress change together
        self._tallies = {index: WorkerTally(index) for index in range(spec.workers)}
        self._executors: set[str] = set()  # ids of the executors that have trained a round
        self._departures: list[Departure] = []
        self._output = WorkerLogBuffer()
        self._traffic, self._hashes = Traffic(), dict[str, str]()
        self._phase, self._epochs = Phase.GATHERING, 0
        self._snapshot: OptimizerSnapshot | None = None  # of the newest ``snapshot(updaters=True)``
        # Positions after the newest epoch's end, by partition, until the main thread received it.
        self._epoch_ends = dict[int, Position]()
        self._initial = state.parameters
        self._progress = self._make_progress()

    # Methods that the main thread calls.

    @property
    def progress(self) -> RoundsProgress:
        """The newest progress. Reading it has no side effects."""
        return self._progress

    def acknowledge(self, progress: Progress) -> None:
        """Record that the caller has received ``progress`` and has handled all earlier progress.

        Once the metrics of the newest epoch are received, snapshots count that epoch as complete.
        A fit that resumes from an earlier snapshot evaluates the end of that epoch again.
        """
        assert isinstance(progress, RoundsProgress), "``progress`` came from this object"
        with self._lock:
            if progress.epochs == self._epochs:
                self._move_to_next_epoch()
        self._barrier.acknowledge(progress.epochs)

    def start(self) -> None:
        """Do nothing, because the rounds begin when the job starts its thread."""

    def request_stop(self, reason: str) -> None:
        """Stop after the current round. Of several requests, the first reason is kept."""
        with self._lock:
            self.stop_reason = self.stop_reason or reason

    def give_up(self, reason: str) -> None:
        """Stop as soon as possible, even in the middle of a round; ``reason`` is not used."""
        self.given_up = True
        self._abort()
        self._barrier.open()

    def snapshot(self, *, updaters: bool = False) -> Snapshot:
        """Return a copy of the parameters after the newest round, with buffers and positions.

        With ``updaters``, also keep that round's optimizer states in this object, for
        ``copy_optimizer_states`` and ``optimizer_copies``.
        """
        with self._lock:
            if updaters:
                self._snapshot = self.state.copy_states()
            starts = tuple(partition.as_start() for partition in self.partitions)
            parameters = self.state.parameters.copy()
            return Snapshot(self.state.rounds, parameters, self.state.buffers, starts)

    def copy_optimizer_states(self, *, everybody: bool) -> Future[tuple[bytes, ...]]:
        """Return a completed future with the encoded optimizer states of the newest snapshot.

        The result has one worker's state, or with ``everybody`` all workers' states. The call
        releases the states, so a second call returns none.
        """
        copies: Future[tuple[bytes, ...]] = Future()
        snapshot, self._snapshot = self._snapshot, None
        copies.set_result(() if snapshot is None else snapshot.encoded(everybody=everybody))
        return copies

    @property
    def optimizer_copies(self) -> tuple[bytes, ...]:
        """The encoded optimizer states of the newest snapshot; () if it has none."""
        return () if self._snapshot is None else self._snapshot.encoded()

    def end(self) -> None:
        """Do nothing, because the job itself ends the thread that trains the rounds."""

    def outcome(self) -> FitOutcome:
        """Return the result of a finished fit; no parameter counts as sent if none has changed."""
        state, partitions = self.state, self.partitions
        is_new = state.parameters is not self._initial
        has_learnt = is_new and bool((state.parameters != self._initial).any())
        stats = self._counters_by_node(self.spec.n_params if has_learnt else 0)
        return FitOutcome(
            hashes=self._hashes | {"driver": state.digest()},
            minibatches=partitions.minibatches,
            minibatches_expected=partitions.minibatches_expected,
            rows=[partition.rows for partition in partitions],
            executors=set(self._executors),
            commits=state.rounds,
            stats=stats,
            traffic=self._traffic,
            hosts={node: self._tallies[node - 1].host for node in stats},
            departures=list(self._departures),
            phase_began_s=dict(self.began_s),
            stop_reason=self.stop_reason,
            minibatches_resumed=partitions.minibatches_resumed,
        )

    # Methods that the thread that trains the rounds calls.

    @property
    def continues(self) -> bool:
        """Whether to train another round, because nobody has requested a stop."""
        return self.stop_reason is None and not self.given_up

    def enter_phase(self, phase: Phase) -> None:
        """Record that a new phase of the fit begins now."""
        with self._lock:
            self._phase, self.began_s[phase] = phase, time.monotonic()
            self._progress = self._make_progress()

    def begin_training(self, partitions: Sequence[PartitionFacts]) -> None:
        """Record the workers' reports about their rows, and enter the phase RUNNING."""
        with self._lock:
            for facts in partitions:
                self._tallies[facts.partition].facts = facts
                self._tallies[facts.partition].host = facts.host
        self.enter_phase(Phase.RUNNING)

    def record_output(self, reports: Iterable[WorkerReport]) -> None:
        """Record what models printed, and lost attempts. Also call this for a failed round."""
        with self._lock:
            now_s = time.monotonic()
            for report in reports:
                index, host = report.partition, report.host
                self._tallies[index].warnings |= report.warnings
                printed = WorkerLog(
                    host=host, partition=index, lines=report.lines, skipped=report.skipped
                )
                self._output.add(printed, now_s)
                node = NodeId(index + 1)
                self._departures += [
                    Departure(node, index, host, reason, now_s) for reason in report.lost_attempts
                ]
            self._progress = self._make_progress()

    def end_round(self, results: RoundResults, positions: Mapping[int, Position]) -> None:
        """Record a round's results, and the partitions' positions after the round.

        Raise TrainingError if the combined parameters are not finite.
        """
        with self._lock:
            self._traffic.by_kind.update(results.traffic)
            if results.parameters is not None:
                self.state.advance(results)
            else:
                self.state.count_steps(results.reports)
            for report in results.reports:
                self._tallies[report.partition].add(report)
                self._executors.add(report.executor)
            for index, position in positions.items():
                self.partitions[index].advance(position)
            self._progress = self._make_progress()

    def end_epoch(self, epoch: int, reports: Mapping[int, HeldOutReport]) -> None:
        """Record the end of an epoch, counted from 0, and wait for early stopping to decide.

        ``reports`` has the evaluations on held-out rows, by partition.
        """
        with self._lock:
            self._epochs = epoch + 1
            for index, tally in self._tallies.items():
                position = self.partitions[index].position
                if tally.facts.rows and position.epoch > epoch:
                    continue  # this epoch was recorded before the fit was resumed
                if tally.facts.rows or tally.facts.held_out:
                    tally.end_epoch(epoch, reports.get(index))
                if tally.facts.rows:
                    self._epoch_ends[index] = Position(epoch + 1, 0)
            self._progress = self._make_progress()
        self._barrier.wait(self._epochs)

    def fail(self, error: SparkstromError) -> None:
        """End the fit with an error, which ``fit`` raises."""
        self.failure = error
        self.finished.set()

    def finish(self, hashes: Mapping[str, str]) -> list[str]:
        """End the fit after all rounds; return each worker's metrics of all epochs, as JSON.

        ``hashes``: SHA-256 of parameters and buffers, by node id.
        """
        with self._lock:
            self._hashes.update(hashes)
            self._move_to_next_epoch()
        self.enter_phase(Phase.DONE)
        self.finished.set()
        return [
            json.dumps(
                {
                    "epochs": tally.log.report(),
                    "mass_dismissed": 0.0,
                    "warnings": [
                        f"partition {tally.facts.partition} on {tally.host}: {text}"
                        for text in tally.warnings.values()
                    ],
                }
            )
            for tally in self._tallies.values()
            if tally.facts.rows or tally.facts.held_out
        ]

    def _move_to_next_epoch(self) -> None:
        """Move each partition that has ended the newest epoch to the start of the next epoch."""
        for index, position in self._epoch_ends.items():
            self.partitions[index].advance(position)
        self._epoch_ends.clear()

    def _counters_by_node(self, n_params: int) -> dict[int, WorkerCounters]:
        """Return the counters of the workers whose host is known, by node id.

        ``n_params``: number of parameters; each round counts as one update of all of them.
        """
        return {
            index + 1: tally.counters(self.partitions[index].position.epoch, n_params)
            for index, tally in self._tallies.items()
            if tally.host
        }

    def _make_progress(self) -> RoundsProgress:
        """Return the fit's current progress as an immutable value."""
        partitions, spec = self.partitions, self.spec
        training = frozenset(i for i, tally in self._tallies.items() if tally.facts.rows)
        joined = 0 if self._phase is Phase.GATHERING else spec.workers
        return RoundsProgress(
            phase=self._phase,
            workers=joined,
            partitions=spec.workers,
            joined=joined,
            minibatches=partitions.minibatches,
            minibatches_expected=partitions.minibatches_expected,
            commits=self.state.rounds,
            staleness=0.0,
            stats=self._counters_by_node(spec.n_params),
            training=training if self._phase is not Phase.DONE else frozenset(),
            departures=tuple(self._departures),
            by_kind=Counter(self._traffic.by_kind),
            copied=joined,
            heard=self._output.lines,
            worker_lines_skipped=self._output.skipped,
            started=training,
            epochs=self._epochs,
        )
