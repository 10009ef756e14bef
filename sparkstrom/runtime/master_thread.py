"""Run the controller's thread: the protocol's master with its transport and parameters.

The master is the state machine that numbers workers' updates; a numbered update is a commit. The
thread runs in the driver program, or in a Spark task of its own (``spark.controller``).
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

from sparkstrom.base.clock import Clock
from sparkstrom.base.errors import SetupError, SparkstromError, TrainingError
from sparkstrom.base.identity import MASTER, Endpoint
from sparkstrom.codec.messages import BUFFERS
from sparkstrom.codec.sealed_frames import Seal
from sparkstrom.observe.telemetry import WorkerCounters
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import Effect, Send, perform_all
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.master import Master
from sparkstrom.protocol.master.members import CheckpointFiles, MasterLimits
from sparkstrom.runtime.master_control import (
    FitOutcome,
    Progress,
    Snapshot,
    WorkerLogBuffer,
    error_from_abort,
)
from sparkstrom.runtime.message_endpoint import MergeCache, MessageEndpoint
from sparkstrom.runtime.node_thread import (
    UPKEEP_INTERVAL_S,
    DriverRecovery,
    LinkBytesCounter,
    OpenTransport,
)
from sparkstrom.runtime.overshoot import OvershootControl
from sparkstrom.runtime.theta import Theta, snapshot_chunk_count

log = logging.getLogger(__name__)

OVERSHOOTS = (
    "the summed updates of {} workers overshot at minibatch {}: from now on, updates have a lower"
    " weight (summed_workers in the summary). If the loss is too high, lower the learning rate, use"
    " fewer workers, or set scaling='ddp' with a recipe for as many ranks"
)
PROGRESS_INTERVAL_S = 0.2
SNAPSHOT_TIMEOUT_S = 60  # the thread copies the parameters between duty cycles, which may be slow


@dataclass(frozen=True, slots=True)
class MasterPlan:
    """The parts of a fit that the controller must know."""

    spec: FitSpec  # partitions and length of the fit
    message_bytes_max: int  # length of the longest message
    chunk_bytes_max: int  # longest part of a message in one data frame, in bytes
    kept: CheckpointFiles  # residual files of earlier fits
    average: Callable[[list[bytes]], bytes] | None = None  # averages models' encoded buffers
    # Number of the stream for requests to join, if workers know it already; None: a random one.
    join_stream: int | None = None
    # All updates together count as those of at most this many workers; None: no limit.
    summed_workers_max: int | None = None
    limits_overshoot: bool = False  # whether ``OvershootControl`` adapts that number


def random_join_stream() -> int:
    """Return a random number for the stream to which workers send requests to join.

    Two fits on one port are unlikely to share it.
    """
    return 1 + secrets.randbelow(900)


class MasterThread(threading.Thread):
    """The controller's thread, for a controller in this process; implements ``MasterControl``.

    Args:
        plan: what is trained.
        limits: the protocol's deadlines and sizes.
        theta: the initial parameters; this thread updates them in place.
        open_transport: opens a transport, given the endpoint it had before or None.
        seal: cipher of this fit's frames.
        clock: source of time.
    """

    drains_after_tasks = False  # tasks return after ``finished`` is set
    has_final_parameters = is_reachable = True

    def __init__(
        self,
        plan: MasterPlan,
        limits: MasterLimits,
        theta: Theta,
        *,
        open_transport: OpenTransport,
        seal: Seal,
        clock: Clock,
    ) -> None:
        super().__init__(name="sparkstrom-master", daemon=True)
        self._clock, self._theta, self._open_transport = clock, theta, open_transport
        self._sums = MergeCache(theta.merge)
        self._message_endpoint = MessageEndpoint(
            open_transport(None),
            seal,
            me=MASTER,
            token=0,
            message_bytes_max=plan.message_bytes_max,
            chunk_bytes_max=plan.chunk_bytes_max,
        )
        self.endpoint: Endpoint = self._message_endpoint.transport.endpoint
        self.join_stream = plan.join_stream or random_join_stream()
        self._machine = Master(
            plan.spec,
            chunks=snapshot_chunk_count(theta.n_params),
            endpoint=self.endpoint,
            limits=limits,
            now_s=clock.monotonic_s(),
            kept=plan.kept,
            average=plan.average,
        )
        self._overshoot = OvershootControl(
            theta, plan.spec.workers, plan.summed_workers_max, is_enabled=plan.limits_overshoot
        )
        self._recovery = DriverRecovery("the driver program", self._replace_transport, clock)
        self._requests: queue.SimpleQueue[ev.Event] = queue.SimpleQueue()
        if self._overshoot.limit is not None:
            self._requests.put(ev.SummedWorkersLimited(self._overshoot.limit))
        self._snapshot_requests: queue.SimpleQueue[Future[Snapshot]] = queue.SimpleQueue()
        self._copy_requests: queue.SimpleQueue[Future[tuple[bytes, ...]]] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self.finished = threading.Event()  # the fit is done or has failed
        self._ended = threading.Event()  # the thread has exited
        self.failure: SparkstromError | None = None
        self._ended_cleanly = False  # the thread has exited between cycles: theta is consistent
        self._stats: dict[int, WorkerCounters] = {}
        self._link_bytes = LinkBytesCounter()
        self._notes: list[str] = []
        self._other_notes: tuple[str, ...] = ()  # notes other than departures
        self._worker_log = WorkerLogBuffer()
        self._progress_due_s = self._upkeep_due_s = 0.0
        self.progress = self._read_progress()

    def request_stop(self, reason: str) -> None:
        """Stop training early for ``reason``; the fit ends as usual and keeps what is trained."""
        self._request(ev.StopRequested(reason))

    def give_up(self, reason: str) -> None:
        """Abort the fit for a failure outside the protocol, and make the workers end."""
        self._request(ev.AbortRequested(reason))

    def _request(self, event: ev.Event) -> None:
        """Queue an event from another thread for the protocol's master, and wake this thread."""
        self._requests.put(event)
        self._message_endpoint.wake()

    def acknowledge(self, progress: Progress) -> None:
        """Do nothing: asynchronous training never waits for listeners."""

    def snapshot(self, *, updaters: bool = False) -> Snapshot:
        """Return a copy of the parameters and the model's buffers as of the newest commit.

        ``updaters`` is ignored: only training in rounds uses it. Raise TrainingError if the thread
        does not answer in time, or the fit's failure as described for ``request_snapshot``.
        """
        answer = self.request_snapshot()
        if not wait([answer], SNAPSHOT_TIMEOUT_S).done:
            raise TrainingError(
                f"the master did not copy its parameters within {SNAPSHOT_TIMEOUT_S} s"
            )
        return answer.result()

    def request_snapshot(self) -> Future[Snapshot]:
        """Request a copy as ``snapshot`` returns it, without waiting for it.

        If the thread has ended, even by an abort or by an error after the end of the fit, the copy
        is made in the calling thread, as of the last commit. The result is the fit's failure if the
        thread broke or breaks before the end of the fit.
        """
        answer: Future[Snapshot] = Future()
        self._snapshot_requests.put(answer)
        self._message_endpoint.wake()
        if self._ended.is_set():  # the thread will not answer
            self._resolve_snapshot_requests()
        return answer

    def copy_optimizer_states(self, *, everybody: bool) -> Future[tuple[bytes, ...]]:
        """Request the encoded optimizer and encoder state of one worker, or of all (``everybody``).

        Training continues. The result is () if no worker sent its state in time or the fit is over.
        """
        answer: Future[tuple[bytes, ...]] = Future()
        self._copy_requests.put(answer)
        self._request(ev.OptimizerCopyRequest(everybody))
        if self._ended.is_set():  # the thread will not answer
            self._resolve_copy_requests(())
        return answer

    @property
    def optimizer_copies(self) -> tuple[bytes, ...]:
        """The newest optimizer states that workers have sent, encoded; () if there are none."""
        return self._machine.copies.copied

    def end(self) -> None:
        """Stop the thread and close the transport; call this only after the job has ended.

        If the thread was never started, only close the transport. Idempotent.
        """
        self._stopping.set()
        if self.is_alive():
            self.join(timeout=30.0)
        elif self.ident is None:
            self._message_endpoint.close()

    @property
    def is_needed(self) -> bool:
        """True while the controller has children in the tree; workers below them leave earlier."""
        return bool(self._machine.children.by_node)

    def outcome(self) -> FitOutcome:
        """Return the result of a fit that is done."""
        master = self._machine
        driver = {"driver": master.phases.own_digest or ""}
        nodes = {str(node): digest for node, digest in sorted(master.phases.digests.items())}
        return FitOutcome(
            hashes=nodes | driver,
            minibatches=master.partitions.minibatches,
            minibatches_expected=master.partitions.minibatches_expected,
            rows=[p.rows for p in master.partitions],
            executors=set(master.members.executors.values()),
            commits=master.sequencer.head,
            staleness=master.sequencer.staleness,
            staleness_minibatches=master.order.staleness.mean,
            staleness_minibatches_max=master.order.staleness.most,
            stats=dict(self._stats),
            traffic=self._message_endpoint.traffic,
            wire=self._link_bytes.update(self._message_endpoint.transport),
            ignored=master.ignored.counts,
            hosts=master.members.hosts(),
            slow_links=master.statuses.slow_links,
            departures=master.members.departures,
            notes=list(self._notes),
            kept=master.checkpoints.files,
            lost_mass=master.checkpoints.lost_mass,
            grants=master.checkpoints.granted_files,
            phase_began_s=master.phases.began_s,
            overflows=self._theta.overflows,
            first_overflow=self._theta.first_overflow,
            stop_reason=master.phases.stop_reason,
            minibatches_resumed=master.partitions.minibatches_resumed,
            summed_workers=self._overshoot.summed_workers,
        )

    def run(self) -> None:
        """Run duty cycles until ``end`` is called or the thread fails."""
        try:
            self._recovery.guard(partial(self._message_endpoint.listen_for_joins, self.join_stream))
            while not self._stopping.is_set():
                self._cycle()
            self._ended_cleanly = True
        except SparkstromError as error:
            self._fail(error)
        except BaseException as error:  # a user's model may even raise SystemExit
            log.exception("the master's thread ends")
            self._fail(TrainingError(f"the master failed: {error!r}"))
        finally:
            try:
                self._message_endpoint.close()
            finally:  # also if the transport is broken
                self._ended.set()
                self._resolve_snapshot_requests()
                self._resolve_copy_requests(self._machine.copies.copied)

    def _cycle(self) -> None:
        """Run one duty cycle; update the progress at intervals."""
        self._recovery.guard(self._exchange)
        now_s = self._clock.monotonic_s()
        if now_s >= self._progress_due_s:
            self._progress_due_s = now_s + PROGRESS_INTERVAL_S
            self.progress = self._read_progress()

    def _exchange(self) -> None:
        """Handle messages and requests, then send. Raise DriverLost if the media driver died."""
        due_in_s = self._machine.children.state_due_s - self._clock.monotonic_s()
        wait_s = self._message_endpoint.poll_timeout_s(due_in_s)
        for sender, message in self._message_endpoint.receive(wait_s):
            self._step(ev.Received(sender, message))
        for node, size in self._message_endpoint.arriving():
            self._step(ev.DataArriving(node, size))
        while not self._requests.empty():
            self._step(self._requests.get())
        while not self._snapshot_requests.empty():
            copy = self._make_snapshot()  # the request still waits for an answer if this fails
            self._snapshot_requests.get().set_result(copy)
        now_s = self._clock.monotonic_s()
        if now_s >= min(self._upkeep_due_s, self._machine.children.state_due_s):
            self._upkeep_due_s = now_s + UPKEEP_INTERVAL_S
            self._step(ev.Tick())
        self._sums.clear()
        self._message_endpoint.flush()

    def _make_snapshot(self) -> Snapshot:
        """Return a copy of parameters, buffers and each partition's position."""
        theta, starts = self._theta, self._machine.partitions.as_starts()
        return Snapshot(theta.commit, theta.to_host(), theta.buffers, starts)

    def _resolve_snapshot_requests(self) -> None:
        """Resolve all pending requests for a snapshot after the thread has ended."""
        with contextlib.suppress(queue.Empty):
            while True:
                answer = self._snapshot_requests.get_nowait()
                # The thread did not fail in the middle of a cycle.
                if self.failure is None or self._ended_cleanly:
                    answer.set_result(self._make_snapshot())
                else:
                    answer.set_exception(self.failure)

    def _resolve_copy_requests(self, copies: tuple[bytes, ...]) -> None:
        """Resolve all pending requests for optimizer states with ``copies``."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._copy_requests.get_nowait().set_result(copies)

    def _replace_transport(self) -> None:
        """Continue over a new media driver, on the same port because workers know no other.

        Raise SetupError if the port is taken.
        """
        before = self.endpoint
        self._link_bytes.update(self._message_endpoint.transport)
        self._message_endpoint.replace_transport(lambda: self._open_transport(before))
        self.endpoint = self._message_endpoint.transport.endpoint
        if self.endpoint != before:
            raise SetupError(
                f"the driver's media driver died and its port {before} is taken now; "
                "set unicast_port to one that only this application uses"
            )
        self._message_endpoint.listen_for_joins(self.join_stream)
        self._step(ev.EndpointChanged(self.endpoint.host, self.endpoint.port))

    def _step(self, event: ev.Event) -> None:
        """Pass an event to the protocol's master and perform the effects that it returns."""
        perform_all(self._machine.step(event, self._clock.monotonic_s()), self._perform)

    def _perform(self, effect: Effect) -> None:
        """Perform one effect of the protocol's master."""
        match effect:
            case Send(to=to, message=message):
                self._message_endpoint.send(to, message)
            case ev.ApplyCommit(update=update):
                if update.payload.form == BUFFERS:
                    self._theta.buffers = update.payload.data
                else:
                    self._theta.add(self._theta.read(update.payload))
                    self._check_overshoot()
                self._theta.commit = update.commit
            case ev.SendChunk(to=to, index=index):
                self._message_endpoint.send(to, self._theta.chunk(index))
            case ev.SendMerged(to=to):
                self._message_endpoint.send(to, self._sums.merge(effect))
            case ev.SendToProcess():
                self._message_endpoint.send_to_process(effect)
            case ev.OpenEdge(node=node, edge=edge, local=local, peer=peer):
                self._message_endpoint.open_edge(node, edge, local, peer)
            case ev.CloseEdge(node=node):
                self._message_endpoint.close_edge(node)
            case ev.OptimizerCopied(payloads=payloads):
                self._resolve_copy_requests(payloads)
            case ev.HashReplica(commit=commit):
                self._requests.put(ev.ReplicaHashed(commit, self._theta.digest(), None))
            case ev.ReportCounters(node=node, counters=counters, former=former):
                for id_before in former:
                    self._stats.pop(id_before, None)
                self._stats[node] = counters
            case ev.Note(text=text, departure=departure):
                log.warning("%s", text)
                self._notes.append(text)
                self._other_notes += () if departure else (text,)
            case ev.ShowWorkerLog(says=says):
                self._worker_log.add(says, self._clock.monotonic_s())
            case ev.Abort():
                self._fail(error_from_abort(effect))
            case ev.Complete():
                self.progress = self._read_progress()  # so that the last progress shows the end
                self.finished.set()
            case _:
                raise AssertionError(f"a master cannot want {effect}")

    def _check_overshoot(self) -> None:
        """Adapt how many workers' updates are summed; warn when their sum first overshoots."""
        control, workers = self._overshoot, self._machine.broadcast.training
        was_reduced, limited = control.is_reduced, control.after_commit(workers)
        if limited is not None:
            self._requests.put(limited)
        if control.is_reduced and not was_reduced:
            minibatches = self._machine.partitions.minibatches
            self._perform(ev.Note(OVERSHOOTS.format(workers, minibatches)))

    def _fail(self, error: SparkstromError) -> None:
        """Record the error that ended the fit, unless the fit has finished already."""
        if not self.finished.is_set():
            self.failure, self.progress = error, self._read_progress()
            self.finished.set()

    def _may_evaluate(self, node: int) -> bool:
        """Return whether worker ``node`` has held-out rows, or has not reported counters yet."""
        told = self._stats.get(node)
        return told is None or told.training is None or told.training.rows_held_out > 0

    def _read_progress(self) -> Progress:
        """Return the current progress of the fit, from the state of the protocol's master."""
        master = self._machine
        return Progress(
            phase=master.phases.phase,
            workers=len(master.members.live),
            partitions=len(master.partitions),
            joined=sum(p.rows >= 0 for p in master.partitions),
            minibatches=master.partitions.minibatches,
            minibatches_expected=master.partitions.minibatches_expected,
            commits=master.sequencer.head,
            staleness=master.order.staleness.mean,
            stats=dict(self._stats),
            training=frozenset(
                member.join.partition
                for member in master.members.live.values()
                if master.partitions[member.join.partition].rows > 0
            ),
            evaluating=frozenset(
                member.join.partition
                for node, member in master.members.live.items()
                if master.partitions[member.join.partition].rows == 0 and self._may_evaluate(node)
            ),
            departures=tuple(master.members.departures),
            by_kind=Counter(self._message_endpoint.traffic.by_kind),
            wire=self._link_bytes.update(self._message_endpoint.transport),
            slow_links=master.statuses.slow_links,
            news=self._other_notes,
            copied=sum(member.whole for member in master.members.live.values()),
            slow_now=len(master.statuses.slow.keys() & master.members.live.keys()),
            unresponsive_peers=self._message_endpoint.unresponsive_peers(),
            heard=self._worker_log.lines,
            worker_lines_skipped=self._worker_log.skipped,
            started=frozenset(i for i, p in enumerate(master.partitions) if p.rows > 0),
        )
