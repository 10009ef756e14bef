"""Master thread: drives the master's machine, and holds its replica.

In the driver program, or in a Spark task of its own (``spark.controller``).
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
from sparkstrom.base.errors import (
    SetupError,
    SparkstromError,
    TrainingError,
)
from sparkstrom.base.identity import MASTER, Endpoint
from sparkstrom.codec.frames import Seal
from sparkstrom.codec.messages import BUFFERS
from sparkstrom.observe.telemetry import WorkerCounters
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.events import Effect, Send
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.common.performing import perform_all
from sparkstrom.protocol.master.master import Master
from sparkstrom.protocol.master.master_limits import MasterLimits
from sparkstrom.protocol.master.residual_checkpoints import CheckpointFiles
from sparkstrom.runtime.encoded_once import SummedOnce
from sparkstrom.runtime.failures import failure_of
from sparkstrom.runtime.fit_state import Outcome, Progress, Snapshot
from sparkstrom.runtime.heard_lines import HeardLines
from sparkstrom.runtime.message_endpoint import MessageEndpoint
from sparkstrom.runtime.node_thread import OpenTransport
from sparkstrom.runtime.recovery import Recovery
from sparkstrom.runtime.theta import Theta, chunk_count
from sparkstrom.runtime.wire_bytes import WireBytes

log = logging.getLogger(__name__)

PROGRESS_S = 0.2
SNAPSHOT_S = 60  # the thread copies theta between two duty cycles


@dataclass(frozen=True, slots=True)
class Plan:
    """What is trained, as the master must know it."""

    spec: FitSpec
    message_bytes_max: int
    chunk_bytes_max: int  # of a message in one data frame
    kept: CheckpointFiles
    average: Callable[[list[bytes]], bytes] | None = None  # of a model's buffers
    join_stream: int | None = None  # that workers have been told; None: any


def any_join_stream() -> int:
    """A stream id that two fits at one port will hardly share."""
    return 1 + secrets.randbelow(900)


class MasterThread(threading.Thread):
    """The driver's node. Wait on ``finished``; then ``failure`` or ``outcome()``."""

    settles = False  # tasks return after it has finished
    knows_theta = reachable = True

    def __init__(
        self,
        plan: Plan,
        limits: MasterLimits,
        theta: Theta,
        *,
        open_transport: OpenTransport,
        seal: Seal,
        clock: Clock,
    ) -> None:
        super().__init__(name="sparkstrom-master", daemon=True)
        self._clock, self._theta, self._open_transport = clock, theta, open_transport
        self._sums = SummedOnce(theta.merge)
        self._mail = MessageEndpoint(
            open_transport(None),
            seal,
            me=MASTER,
            token=0,
            message_bytes_max=plan.message_bytes_max,
            chunk_bytes_max=plan.chunk_bytes_max,
        )
        self.endpoint: Endpoint = self._mail.transport.endpoint
        self.join_stream = plan.join_stream or any_join_stream()
        self._machine = Master(
            plan.spec,
            chunks=chunk_count(theta.n_params),
            endpoint=self.endpoint,
            limits=limits,
            now_s=clock.monotonic_s(),
            kept=plan.kept,
            average=plan.average,
        )
        self._recovery = Recovery("the driver program", self._replace_transport, clock)
        self._wishes: queue.SimpleQueue[ev.Event] = queue.SimpleQueue()
        self._snapshots: queue.SimpleQueue[Future[Snapshot]] = queue.SimpleQueue()
        self._updaters: queue.SimpleQueue[Future[tuple[bytes, ...]]] = queue.SimpleQueue()
        self._ending = threading.Event()
        self.finished = threading.Event()  # done, or failed
        self._ended = threading.Event()  # the thread answers nobody any more
        self.failure: SparkstromError | None = None
        self._ended_whole = False  # between two cycles, so that theta is that of a commit
        self._stats: dict[int, WorkerCounters] = {}
        self._wire = WireBytes()
        self._notes: list[str] = []
        self._news: tuple[str, ...] = ()  # the notes that are of no departure
        self._heard = HeardLines()
        self._progress_due_s = 0.0
        self.progress = self._look()

    # -- for the driver's main thread ------------------------------------------------------------

    def request_stop(self, reason: str) -> None:
        """Drain, audit, done: keep what is trained."""
        self._wish(ev.StopRequested(reason))

    def give_up(self, reason: str) -> None:
        """The fit has failed outside the mesh: tell the workers to end."""
        self._wish(ev.GivenUp(reason))

    def _wish(self, event: ev.Event) -> None:
        self._wishes.put(event)
        self._mail.wake()

    def snapshot(self, *, updaters: bool = False) -> Snapshot:
        """A copy of theta, with the model's buffers, as of the newest commit in it.

        Once the thread has ended, copy in the calling thread; this includes a fit that was given
        up, whose parameters are those of its last commit. Raise the fit's failure if the thread
        broke or the fit fails meanwhile, or TrainingError if the thread does not answer.
        """
        answer: Future[Snapshot] = Future()
        self._snapshots.put(answer)
        self._mail.wake()
        for _ in range(SNAPSHOT_S):
            if self._ended_whole:
                return self._copied()
            if wait([answer], timeout=1.0).done:
                return answer.result()
            if self.failure is not None and self._ended.is_set() and not self._ended_whole:
                raise self.failure
        raise TrainingError(f"the master did not copy its parameters within {SNAPSHOT_S} s")

    def copy_updaters(self, *, everybody: bool) -> Future[tuple[bytes, ...]]:
        """Some worker's updater and encoder state, or each's, as ``runtime.lent_state`` has it.

        Training goes on. (): nobody could lend one in time, or the fit is over.
        """
        answer: Future[tuple[bytes, ...]] = Future()
        self._updaters.put(answer)
        self._wish(ev.CopyUpdater(everybody))
        if self._ended.is_set():  # nobody will
            self._answer_updaters(())
        return answer

    @property
    def updater_copies(self) -> tuple[bytes, ...]:
        """The newest, as ``copy_updaters`` has them; (): there are none."""
        return self._machine.copies.copied

    def end(self) -> None:
        """Stop the thread and close the transport; only once the job has ended."""
        self._ending.set()
        if self.is_alive():
            self.join(timeout=30.0)

    @property
    def workers(self) -> int:
        """Live members."""
        return len(self._machine.members.live)

    @property
    def is_needed(self) -> bool:
        """Does anybody stand under it who has not taken leave? Those below them went before."""
        return bool(self._machine.children.by_node)

    def outcome(self) -> Outcome:
        """The result of a fit that is done."""
        master = self._machine
        driver = {"driver": master.phases.own_digest or ""}
        nodes = {str(node): digest for node, digest in sorted(master.phases.digests.items())}
        return Outcome(
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
            traffic=self._mail.traffic,
            wire=self._wire.look(self._mail.transport),
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
        )

    # -- the thread ------------------------------------------------------------------------------

    def run(self) -> None:
        """Cycle until ``end``."""
        try:
            self._recovery.guard(partial(self._mail.open_join_stream, self.join_stream))
            while not self._ending.is_set():
                self._cycle()
            self._ended_whole = True
        except SparkstromError as error:
            self._fail(error)
        except Exception as error:
            log.exception("the master's thread ends")
            self._fail(TrainingError(f"the master failed: {error!r}"))
        finally:
            self._mail.close()
            self._ended.set()
            self._answer_updaters(self._machine.copies.copied)

    def _cycle(self) -> None:
        """Do what is due, once."""
        self._recovery.guard(self._exchange)
        now_s = self._clock.monotonic_s()
        if now_s >= self._progress_due_s:
            self._progress_due_s = now_s + PROGRESS_S
            self.progress = self._look()

    def _exchange(self) -> None:
        """With the workers and the main thread; over a media driver, which may die at any point."""
        wait_s = self._mail.patience_s(self._machine.children.is_brief)
        for sender, message in self._mail.receive(wait_s):
            self._step(ev.Received(sender, message))
        for node, size in self._mail.arriving():
            self._step(ev.Arriving(node, size))
        while not self._wishes.empty():
            self._step(self._wishes.get())
        while not self._snapshots.empty():
            self._snapshots.get().set_result(self._copied())
        self._step(ev.Tick())
        self._sums.forget()
        self._mail.flush()

    def _copied(self) -> Snapshot:
        theta, starts = self._theta, self._machine.partitions.as_starts()
        return Snapshot(theta.commit, theta.to_host(), theta.buffers, starts)

    def _answer_updaters(self, copies: tuple[bytes, ...]) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._updaters.get_nowait().set_result(copies)

    def _replace_transport(self) -> None:
        """Another media driver, on the same port: workers know no other place to join at."""
        before = self.endpoint
        self._wire.look(self._mail.transport)
        self._mail.move_to(lambda: self._open_transport(before))
        self.endpoint = self._mail.transport.endpoint
        if self.endpoint != before:
            raise SetupError(
                f"the driver's media driver died and its port {before} is taken now; "
                "set unicast_port to one that only this application uses"
            )
        self._mail.open_join_stream(self.join_stream)
        self._step(ev.Moved(self.endpoint.host, self.endpoint.port))

    def _step(self, event: ev.Event) -> None:
        perform_all(self._machine.step(event, self._clock.monotonic_s()), self._perform)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send(to=to, message=message):
                self._mail.send(to, message)
            case ev.Deliver(update=update):
                if update.payload.form == BUFFERS:
                    self._theta.buffers = update.payload.data
                else:
                    self._theta.add(self._theta.read(update.payload))
                self._theta.commit = update.commit
            case ev.SendChunk(to=to, index=index):
                self._mail.send(to, self._theta.chunk(index))
            case ev.SendMerged(to=to):
                self._mail.send(to, self._sums.of(effect))
            case ev.Answer():
                self._mail.answer(effect)
            case ev.OpenEdge(node=node, edge=edge, local=local, peer=peer):
                self._mail.open_edge(node, edge, local, peer)
            case ev.CloseEdge(node=node):
                self._mail.close_edge(node)
            case ev.UpdaterCopied(payloads=payloads):
                self._answer_updaters(payloads)
            case ev.Hash(commit=commit):
                self._wishes.put(ev.Hashed(commit, self._theta.digest(), None))
            case ev.Observed(node=node, counters=counters):
                self._stats[node] = counters
            case ev.Note(text=text, departure=departure):
                log.warning("%s", text)
                self._notes.append(text)
                self._news += () if departure else (text,)
            case ev.Spoken(says=says):
                self._heard.take(says, self._clock.monotonic_s())
            case ev.Abort():
                self._fail(failure_of(effect))
            case ev.Complete():
                self.progress = self._look()  # the last one shows the end
                self.finished.set()
            case _:
                raise AssertionError(f"a master cannot want {effect}")

    def _fail(self, error: SparkstromError) -> None:
        if not self.finished.is_set():
            self.failure, self.progress = error, self._look()
            self.finished.set()

    def _measures(self, node: int) -> bool:
        """Does it hold rows out? As long as it has not said so, it may."""
        told = self._stats.get(node)
        return told is None or told.training is None or told.training.rows_held_out > 0

    def _look(self) -> Progress:
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
            measuring=frozenset(
                member.join.partition
                for node, member in master.members.live.items()
                if master.partitions[member.join.partition].rows == 0 and self._measures(node)
            ),
            departures=tuple(master.members.departures),
            by_kind=Counter(self._mail.traffic.by_kind),
            wire=self._wire.look(self._mail.transport),
            slow_links=master.statuses.slow_links,
            news=self._news,
            copied=sum(member.whole for member in master.members.live.values()),
            slow_now=len(master.statuses.slow.keys() & master.members.live.keys()),
            deaf=self._mail.deaf(),
            heard=self._heard.lines,
            unheard=self._heard.skipped,
        )
