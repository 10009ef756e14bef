"""Run the thread of a worker's node, which runs the protocol beside the trainer's thread.

Each duty cycle passes received messages and the trainer's events to the protocol machine, performs
the effects that it returns, and sends queued messages. It also passes the machine's directive, its
current command such as "train", to the trainer. Only this thread uses machine and transport.

The controller's thread also uses ``DriverRecovery`` and ``LinkBytesCounter``.
"""

from __future__ import annotations

import logging
import queue
import secrets
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from sparkstrom.base.clock import Clock
from sparkstrom.base.errors import DriverLost, SetupError, escape_surrogates
from sparkstrom.base.identity import Endpoint
from sparkstrom.codec.messages import Address, Chunk, MergedRange
from sparkstrom.codec.sealed_frames import Seal
from sparkstrom.observe.telemetry import LinkBytes, NodeCounters, WorkerCounters
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import Command, Effect, Send, perform_all
from sparkstrom.protocol.worker.node import Identity, Node, NodeLimits
from sparkstrom.runtime.message_endpoint import MergeCache, MessageEndpoint
from sparkstrom.runtime.optimizer_states import OptimizerStateServer
from sparkstrom.runtime.trainer_thread import TrainerChannel, no_output
from sparkstrom.runtime.training_loop import TrainerInbox, TrainerItem
from sparkstrom.transport.base import Transport

log = logging.getLogger(__name__)

# A media driver that ran this long counts as healthy; overloaded hosts stall for about 10 s.
HEALTHY_DRIVER_S = 60.0
# Deaths in succession, each of a driver that was not healthy; a stalled one takes about 10 s.
SUCCESSIVE_DEATHS_MAX = 10


class DriverRecovery:
    """Replaces the transport when its media driver (Aeron's process) dies.

    If one driver after another dies, the machine is broken. That is reported as an error, because
    endless restarts would hide it.

    Args:
        owner: whose media driver it is, for messages, such as "this executor".
        replace: opens another transport and reports it to the state machine; may raise DriverLost.
        clock: source of time.
    """

    def __init__(self, owner: str, replace: Callable[[], None], clock: Clock) -> None:
        self._owner, self._replace, self._clock = owner, replace, clock
        # when the current media driver came into use; None: it has died
        self._since_s: float | None = clock.monotonic_s()
        self._deaths = 0

    def guard(self, work: Callable[[], None]) -> None:
        """Call ``work``; if it raises DriverLost, replace the transport. ``work`` is not repeated.

        Raise SetupError when too many media drivers have died in succession.
        """
        action = work
        while True:
            try:
                action()
            except DriverLost as lost:
                self._count_death(lost)
                action = self._replace
                continue
            if action is not work:
                self._since_s = self._clock.monotonic_s()
            return

    def _count_death(self, lost: DriverLost) -> None:
        """Count the death of a media driver; raise SetupError after too many in succession."""
        now_s = self._clock.monotonic_s()
        lived = self._since_s is not None and now_s - self._since_s > HEALTHY_DRIVER_S
        self._deaths = 1 if lived else self._deaths + 1
        self._since_s = None
        if self._deaths > SUCCESSIVE_DEATHS_MAX:
            raise SetupError(
                DRIVERS_KEEP_DYING.format(self._owner, self._deaths, HEALTHY_DRIVER_S, lost)
            ) from lost
        log.warning("the media driver of %s is gone (%s); starting another", self._owner, lost)


DRIVERS_KEEP_DYING = (
    "the media driver of {} died {} times in a row, none lived for {:.0f} s; the last one: {}. "
    "Look at the end of its log: is shared memory (/dev/shm) full, does the machine run out of "
    "memory, or is it so busy that a process does not run for seconds?"
)


REPORTED_DRIVERS_MAX = 8  # the newest ones; a message has room for this many names


class LinkBytesCounter:
    """Counts the bytes that one node has sent over network interfaces, with all its media drivers.

    The workers of an executor share a media driver, and each reports that driver's total. To sum
    over workers, take the largest report per driver, once.
    """

    def __init__(self) -> None:
        self._drivers: dict[str, int] = {}
        self._transport: Transport | None = None  # the newest one; several may use one driver
        self._own = self._earlier_own = 0  # corrections of the newest one, and of all before it

    def update(self, transport: Transport) -> LinkBytes:
        """Read the transport's counters; return the totals over all transports so far.

        Also call this before closing a transport, so that its last bytes are counted.
        """
        sent = transport.sent()
        if transport is not self._transport:
            self._earlier_own += self._own
            self._transport = transport
        self._drivers[sent.driver], self._own = sent.driver_bytes, sent.own_bytes
        newest = list(self._drivers.items())[-REPORTED_DRIVERS_MAX:]
        drivers = {name: float(count) for name, count in newest}
        return LinkBytes(drivers, float(self._earlier_own + self._own))


FINAL_FLUSH_S = 1.0  # limit for sending what is queued when a node exits
UPKEEP_INTERVAL_S = 0.005  # interval of work that need not follow every message
COUNTERS_INTERVAL_S = 0.25  # interval of reporting counters
TRAFFIC_INTERVAL_S = 1.0  # if only the node's own counters have changed
OUTPUT_INTERVAL_S = 0.5  # interval of sending what the worker's code prints
# In a large mesh all workers' counters take a bounded share of the links.
COUNTERS_INTERVAL_S_PER_NODE = 0.005
# range from which a node draws its stream numbers
FIRST_NODE_STREAM, NODE_STREAMS = 1 << 20, 1 << 30

# Opens a transport; the argument is the endpoint that the node had before, or None.
OpenTransport = Callable[[Endpoint | None], Transport]


@dataclass(frozen=True, slots=True)
class JoinAddress:
    """Where workers send join requests: the controller's endpoint and join stream."""

    endpoint: Endpoint  # the controller's address
    join_stream: int  # stream for direct messages


@dataclass(frozen=True, slots=True)
class NodePlan:
    """Identity and limits of a node, and where it joins."""

    identity: Identity  # what the worker reports when it joins
    limits: NodeLimits  # deadlines and sizes
    join_address: JoinAddress  # where to join
    message_bytes_max: int  # longest message to accept, in bytes
    chunk_bytes_max: int  # longest part of a message in one data frame, in bytes


@dataclass(frozen=True, slots=True)
class SnapshotSource:
    """Callbacks that produce what a node sends to its children. Called on the node's thread."""

    chunk: Callable[[int], Chunk]  # copies this chunk of the trainer's current parameters
    merge: Callable[[ev.SendMerged], MergedRange]  # adds up commits (numbered updates)
    optimizer_server: OptimizerStateServer  # serves copies of the optimizer state


class NodeThread(threading.Thread):
    """Runs the node (protocol) of one worker. ``channel`` connects it to the trainer's thread.

    Args:
        plan: identity, limits and join address.
        open_transport: opens a transport, given the endpoint it had before or None.
        seal: cipher of this fit's frames.
        inbox: queue of commits and other items for the trainer.
        read_output: returns what the worker's code printed since its last call.
        snapshots: callbacks that produce snapshots and merged commits.
        clock: source of time.
    """

    def __init__(
        self,
        plan: NodePlan,
        *,
        open_transport: OpenTransport,
        seal: Seal,
        inbox: TrainerInbox,
        read_output: Callable[[], ev.OutputPrinted | None] = no_output,
        snapshots: SnapshotSource,
        clock: Clock,
    ) -> None:
        super().__init__(name="sparkstrom-node", daemon=True)
        self._clock, self._join_address = clock, plan.join_address
        self._open_transport, self._snapshots = open_transport, snapshots
        self._sums = MergeCache(snapshots.merge)
        self._machine = Node(plan.identity, plan.limits, clock.monotonic_s())
        self._message_endpoint = MessageEndpoint(
            open_transport(None),
            seal,
            me=None,
            token=plan.identity.token,
            message_bytes_max=plan.message_bytes_max,
            chunk_bytes_max=plan.chunk_bytes_max,
        )
        self.channel = self._channel = TrainerChannel(
            inbox, wake=self._message_endpoint.wake, read_output=read_output
        )
        self._recovery = DriverRecovery("this executor", self._replace_transport, clock)
        self._items: list[TrainerItem] = []
        self._link_bytes = LinkBytesCounter()
        self._counters_due_s = self._traffic_due_s = self._output_due_s = self._upkeep_due_s = 0.0
        self._reported = WorkerCounters()  # the counters that were reported last
        self._stopping = threading.Event()
        self._stuck_reported = False

    def run(self) -> None:
        """Run duty cycles until ``stop``; pass any exception to the trainer."""
        try:
            self._recovery.guard(self._request_join)
            while not self._stopping.is_set():
                self._cycle()
            self._flush_before_exit()
        except BaseException as error:
            log.exception("the node's thread ends")
            self._channel.fail(error)
        finally:
            self._message_endpoint.close()

    def _request_join(self) -> None:
        """Handle the trainer's first events (it may have failed already), then request to join."""
        self._message_endpoint.set_master(
            self._join_address.endpoint, self._join_address.join_stream
        )
        self._take_trainer_events()
        self._open_edge()

    def stop(self) -> None:
        """Send what is queued, end the thread, and wait for it.

        If the thread was never started, only close the transport.
        """
        self._stopping.set()
        if self.ident is None:
            self._message_endpoint.close()
        else:
            self.join(timeout=10 * FINAL_FLUSH_S)

    def _cycle(self) -> None:
        """Exchange messages once, then pass received items and the directive to the trainer."""
        self._recovery.guard(self._exchange)
        self._channel.publish(self._items, self._machine.directive)
        self._items = []

    def _exchange(self) -> None:
        """Handle messages and trainer's events, then send. Raise DriverLost if the driver died."""
        due_in_s = self._machine.tick_due_s - self._clock.monotonic_s()
        for sender, message in self._message_endpoint.receive(
            self._message_endpoint.poll_timeout_s(due_in_s)
        ):
            self._step(ev.Received(sender, message))
        for node, size in self._message_endpoint.arriving():
            self._step(ev.DataArriving(node, size))
        self._take_trainer_events()
        now_s = self._clock.monotonic_s()
        if now_s >= min(self._upkeep_due_s, self._machine.tick_due_s):
            self._upkeep_due_s = now_s + UPKEEP_INTERVAL_S
            self._do_upkeep()
        self._sums.clear()
        self._message_endpoint.flush()

    def _do_upkeep(self) -> None:
        """Do the periodic work of the node.

        Pass a tick to the protocol, send the optimizer chunks that are ready, and report counters
        and printed lines. If the directive is FAIL, report where the trainer is stuck.
        """
        self._step(ev.Tick())
        self._send_optimizer_chunks()
        self._report_counters()
        self._report_output(now=False)
        self._report_stuck_trainer()

    def _take_trainer_events(self) -> None:
        """Pass the trainer's events to the protocol machine.

        Before events near the end of the task, also pass the latest counters and printed output.
        """
        while True:
            try:
                event = self._channel.events.get_nowait()
            except queue.Empty:
                return
            if isinstance(event, ev.ReplicaHashed | ev.TrainerReleased):
                self._counters_due_s = self._traffic_due_s = 0.0
                self._report_counters()
            if isinstance(
                event, ev.TrainerDrained | ev.ReplicaHashed | ev.TrainerReleased | ev.TrainerFailed
            ):
                self._report_output(now=True)  # output from before the event comes first
            if isinstance(event, ev.UpdatePublished):
                self._message_endpoint.count_update(event.payload)
            self._step(event)

    def _step(self, event: ev.Event) -> None:
        """Pass an event to the protocol machine and perform the effects that it returns."""
        perform_all(self._machine.step(event, self._clock.monotonic_s()), self._perform)

    def _perform(self, effect: Effect) -> None:
        """Perform one effect of the protocol machine."""
        match effect:
            case Send(to=to, message=message):
                self._message_endpoint.send(to, message)
            case ev.SendDirect(message=message):
                self._message_endpoint.send_direct(message)
            case (
                ev.ApplyCommit()
                | ev.OwnCommitted()
                | ev.ApplyMergedRange()
                | ev.InstallSnapshot()
                | ev.UseInitialReplica()
                | ev.InstallOptimizer()
            ):
                self._items.append(effect)
            case ev.SendChunk(to=to, index=index):
                self._message_endpoint.send(to, self._snapshots.chunk(index))
            case ev.SendMerged(to=to):
                self._message_endpoint.send(to, self._sums.merge(effect))
            case ev.SendOptimizerChunk(to=to, ask=ask):
                self._snapshots.optimizer_server.add_request(to, ask)
                self._send_optimizer_chunks()
            case ev.IdAssigned(node=node):
                self._message_endpoint.me = node
                self._items.append(effect)
            case ev.OpenEdge(node=node, edge=edge, local=local, peer=peer):
                self._message_endpoint.open_edge(node, edge, local, peer)
            case ev.CloseEdge(node=node):
                self._message_endpoint.close_edge(node)
            case ev.ReopenStreams():
                self._open_edge()
            case _:
                raise AssertionError(f"a node cannot want {effect}")

    def _send_optimizer_chunks(self) -> None:
        """Send requested chunks of the optimizer state, once the trainer has made a copy."""
        for to, chunk in self._snapshots.optimizer_server.ready_chunks():
            self._message_endpoint.send(to, chunk)

    def _open_edge(self, *, alone: bool = False) -> None:
        """Listen on new random streams, and have the protocol request an edge that uses them.

        ``alone``: the edges to all children are also closed, because the media driver died.
        """
        here = self._message_endpoint.transport.endpoint
        stream = FIRST_NODE_STREAM + 4 * secrets.randbelow(NODE_STREAMS // 4)
        address = Address(here.host, here.port, stream, stream + 1)
        self._message_endpoint.listen(address)
        self._message_endpoint.set_master(
            self._join_address.endpoint, self._join_address.join_stream
        )
        self._step(ev.StreamsOpened(address, alone))

    def _replace_transport(self) -> None:
        """Continue over a new media driver, with the same replica and id."""
        before = self._message_endpoint.transport.endpoint
        self._link_bytes.update(self._message_endpoint.transport)
        self._message_endpoint.replace_transport(lambda: self._open_transport(before))
        self._open_edge(alone=True)

    def _report_counters(self) -> None:
        """Pass the worker's counters to the protocol machine if they are due and have changed."""
        now_s = self._clock.monotonic_s()
        is_traffic_only = self._channel.stats is self._reported.training
        if now_s < (self._traffic_due_s if is_traffic_only else self._counters_due_s):
            return
        state = self._machine.fit.state
        nodes = state.nodes if state is not None else 0
        least_s = COUNTERS_INTERVAL_S_PER_NODE * nodes
        self._counters_due_s = now_s + max(COUNTERS_INTERVAL_S, least_s)
        self._traffic_due_s = now_s + max(TRAFFIC_INTERVAL_S, least_s)
        own = NodeCounters(
            update_bytes=self._message_endpoint.traffic.update_bytes,
            wire_bytes=self._message_endpoint.traffic.wire_bytes,
            by_kind=dict(self._message_endpoint.traffic.by_kind),
            rejected=self._message_endpoint.traffic.foreign_frames,
            links=self._link_bytes.update(self._message_endpoint.transport),
        )
        counters = WorkerCounters(self._channel.stats, own)
        if counters != self._reported:
            self._reported = counters
            self._machine.set_counters(counters)

    def _report_output(self, *, now: bool) -> None:
        """Pass the output of the worker's code to the protocol, if it is due or ``now`` is True."""
        now_s = self._clock.monotonic_s()
        if now_s < self._output_due_s and not now:
            return
        self._output_due_s = now_s + OUTPUT_INTERVAL_S
        output = self._channel.read_output()
        if output is not None:
            self._step(output)

    def _report_stuck_trainer(self) -> None:
        """If the directive is FAIL, report the trainer's stack, once: it may be stuck in a step."""
        command = self._machine.directive
        if command.order is not Command.FAIL or self._stuck_reported:
            return
        self._stuck_reported = True
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        self._step(ev.TrainerFailed(command.reason, escape_surrogates(stack)[-8_000:]))

    def _flush_before_exit(self) -> None:
        """Send what is queued, for up to ``FINAL_FLUSH_S``; stop early if the media driver dies."""
        until_s = self._clock.monotonic_s() + FINAL_FLUSH_S
        try:
            self._take_trainer_events()
            self._report_output(now=True)
            while self._message_endpoint.flush() or self._message_endpoint.waiting:
                if self._clock.monotonic_s() > until_s:
                    return
                for _ in self._message_endpoint.receive(self._message_endpoint.poll_timeout_s()):
                    pass  # discarded; polling only lets frames go out
        except DriverLost as lost:
            log.warning("the media driver died before the last messages were sent (%s)", lost)
