"""Node thread: drives a worker's machine over Aeron beside its trainer.

A duty cycle reads what arrived, hands it and the trainer's events to the machine, performs what
it wants, and offers what waits. It alone touches the machine and the transport.
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
from sparkstrom.base.errors import DriverLost
from sparkstrom.base.identity import Endpoint
from sparkstrom.codec.frames import Seal
from sparkstrom.codec.messages import Address, Chunk, MergedRange
from sparkstrom.observe.telemetry import NodeCounters, WorkerCounters
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.events import Effect, Order, Send
from sparkstrom.protocol.common.performing import perform_all
from sparkstrom.protocol.worker.node import Identity, Node, NodeLimits
from sparkstrom.runtime.encoded_once import SummedOnce
from sparkstrom.runtime.message_endpoint import MessageEndpoint
from sparkstrom.runtime.optimizer_lending import OptimizerLender
from sparkstrom.runtime.recovery import Recovery
from sparkstrom.runtime.trainer_channel import TrainerChannel
from sparkstrom.runtime.trainer_inbox import Item
from sparkstrom.runtime.wire_bytes import WireBytes
from sparkstrom.transport.contract import Transport

log = logging.getLogger(__name__)

LAST_WORDS_S = 1.0  # how long a node that ends keeps offering what it still has to say
STATS_S = 0.3
SAID_S = 0.5  # between two messages of what the worker's code says
STATS_S_PER_NODE = 0.005  # in a large mesh the counters of all take a bounded share of its links
FIRST_OWN_STREAM, STREAMS = 1 << 20, 1 << 30  # a node's streams are random in this range

OpenTransport = Callable[[Endpoint | None], Transport]  # given the endpoint it had before


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where joins are taken: the master's endpoint and its join stream."""

    endpoint: Endpoint
    join_stream: int


@dataclass(frozen=True, slots=True)
class NodePlan:
    """Who a node is, where it asks to join, and how much it may say at once."""

    identity: Identity
    limits: NodeLimits
    meeting: Meeting
    message_bytes_max: int
    chunk_bytes_max: int  # of a message in one data frame


@dataclass(frozen=True, slots=True)
class Copying:
    """What a node serves to those below it; called by its thread at any time."""

    chunk: Callable[[int], Chunk]  # of the trainer's replica, as it is now
    merge: Callable[[ev.SendMerged], MergedRange]
    lender: OptimizerLender


class NodeThread(threading.Thread):
    """One worker's node. ``channel`` is its trainer's side."""

    def __init__(
        self,
        plan: NodePlan,
        *,
        open_transport: OpenTransport,
        seal: Seal,
        channel: TrainerChannel,
        copying: Copying,
        clock: Clock,
    ) -> None:
        super().__init__(name="sparkstrom-node", daemon=True)
        self._clock, self._channel, self._meeting = clock, channel, plan.meeting
        self._open_transport, self._copying = open_transport, copying
        self._sums = SummedOnce(copying.merge)
        self._machine = Node(plan.identity, plan.limits, clock.monotonic_s())
        self._mail = MessageEndpoint(
            open_transport(None),
            seal,
            me=None,
            token=plan.identity.token,
            message_bytes_max=plan.message_bytes_max,
            chunk_bytes_max=plan.chunk_bytes_max,
        )
        channel.wake = self._mail.wake
        self._recovery = Recovery("this executor", self._replace_transport, clock)
        self._items: list[Item] = []
        self._wire = WireBytes()
        self._stats_due_s = self._said_due_s = 0.0
        self._told = WorkerCounters()  # what the driver hears of it, as it was last
        self._stopping = threading.Event()
        self._stuck_reported = False

    def run(self) -> None:
        """Cycle until ``stop``; whatever goes wrong reaches the trainer."""
        try:
            self._recovery.guard(self._begin)
            while not self._stopping.is_set():
                self._cycle()
            self._say_last_words()
        except BaseException as error:
            log.exception("the node's thread ends")
            self._channel.fail(error)
        finally:
            self._mail.close()

    def _begin(self) -> None:
        """Ask for a place; a trainer that has failed already says so instead."""
        self._mail.meet(self._meeting.endpoint, self._meeting.join_stream)
        self._take_trainer_events()
        self._open_edge()

    def stop(self) -> None:
        """End the thread, with what is queued sent, and wait for it."""
        self._stopping.set()
        self.join(timeout=10 * LAST_WORDS_S)

    def _cycle(self) -> None:
        """Do what is due, once."""
        self._recovery.guard(self._exchange)
        self._channel.publish(self._items, self._machine.command)
        self._items = []

    def _exchange(self) -> None:
        """With the others and the trainer; over a media driver, which may die at any point."""
        for sender, message in self._mail.receive(self._mail.patience_s(self._machine.is_brief)):
            self._step(ev.Received(sender, message))
        for node, size in self._mail.arriving():
            self._step(ev.Arriving(node, size))
        self._take_trainer_events()
        self._step(ev.Tick())
        self._lend()
        self._tell_stats()
        self._tell_said(now=False)
        self._report_stuck_trainer()
        self._sums.forget()
        self._mail.flush()

    def _take_trainer_events(self) -> None:
        while True:
            try:
                event = self._channel.events.get_nowait()
            except queue.Empty:
                return
            if isinstance(event, ev.Hashed | ev.Released):
                self._stats_due_s = 0.0
                self._tell_stats()
            if isinstance(event, ev.Drained | ev.Hashed | ev.Released | ev.TrainerFailed):
                self._tell_said(now=True)  # what was said before comes first
            self._step(event)

    def _step(self, event: ev.Event) -> None:
        perform_all(self._machine.step(event, self._clock.monotonic_s()), self._perform)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Send(to=to, message=message):
                self._mail.send(to, message)
            case ev.Tell(message=message):
                self._mail.tell(message)
            case (
                ev.Deliver()
                | ev.Passed()
                | ev.DeliverMerged()
                | ev.Install()
                | ev.Begin()
                | ev.InstallUpdater()
            ):
                self._items.append(effect)
            case ev.SendChunk(to=to, index=index):
                self._mail.send(to, self._copying.chunk(index))
            case ev.SendMerged(to=to):
                self._mail.send(to, self._sums.of(effect))
            case ev.SendUpdater(to=to, ask=ask):
                self._copying.lender.ask(to, ask)
                self._lend()
            case ev.Admitted(node=node):
                self._mail.me = node
                self._items.append(effect)
            case ev.OpenEdge(node=node, edge=edge, local=local, peer=peer):
                self._mail.open_edge(node, edge, local, peer)
            case ev.CloseEdge(node=node):
                self._mail.close_edge(node)
            case ev.Reopen():
                self._open_edge()
            case _:
                raise AssertionError(f"a node cannot want {effect}")

    def _lend(self) -> None:
        """Answer once the trainer has made a copy, at its next batch boundary."""
        for to, chunk in self._copying.lender.answers():
            self._mail.send(to, chunk)

    # -- edges -----------------------------------------------------------------------------------

    def _open_edge(self, *, alone: bool = False) -> None:
        """Listen on fresh streams, and let the machine ask for an edge there."""
        here = self._mail.transport.endpoint
        stream = FIRST_OWN_STREAM + 4 * secrets.randbelow(STREAMS // 4)
        address = Address(here.host, here.port, stream, stream + 1)
        self._mail.listen(address)
        self._mail.meet(self._meeting.endpoint, self._meeting.join_stream)
        self._step(ev.Opened(address, alone))

    def _replace_transport(self) -> None:
        """The media driver died: its replica and id live on, over another driver."""
        before = self._mail.transport.endpoint
        self._wire.look(self._mail.transport)
        self._mail.move_to(lambda: self._open_transport(before))
        self._open_edge(alone=True)

    # -- telling ---------------------------------------------------------------------------------

    def _tell_stats(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s < self._stats_due_s:
            return
        state = self._machine.fit.state
        nodes = state.nodes if state is not None else 0
        self._stats_due_s = now_s + max(STATS_S, STATS_S_PER_NODE * nodes)
        own = NodeCounters(
            update_bytes=self._mail.traffic.update_bytes,
            wire_bytes=self._mail.traffic.wire_bytes,
            by_kind=dict(self._mail.traffic.by_kind),
            rejected=self._mail.traffic.strange,
            links=self._wire.look(self._mail.transport),
        )
        told = WorkerCounters(self._channel.stats, own)
        if told != self._told:
            self._told = told
            self._machine.stats(told)

    def _tell_said(self, *, now: bool) -> None:
        """What the worker's code said since, every now and then."""
        now_s = self._clock.monotonic_s()
        if now_s < self._said_due_s and not now:
            return
        self._said_due_s = now_s + SAID_S
        said = self._channel.said()
        if said is not None:
            self._step(said)

    def _report_stuck_trainer(self) -> None:
        """A trainer inside a step reads no command: its thread says so, with the stack."""
        command = self._machine.command
        if command.order is not Order.FAIL or self._stuck_reported:
            return
        self._stuck_reported = True
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        self._step(ev.TrainerFailed(command.reason, stack[-8_000:]))

    def _say_last_words(self) -> None:
        """Offer what is queued, for a while; a media driver that dies takes it along."""
        until_s = self._clock.monotonic_s() + LAST_WORDS_S
        try:
            self._take_trainer_events()
            self._tell_said(now=True)
            while self._mail.flush() or self._mail.waiting:
                if self._clock.monotonic_s() > until_s:
                    return
                for _ in self._mail.receive(self._mail.patience_s(brief=False)):
                    pass  # whatever comes now comes too late
        except DriverLost as lost:
            log.warning("the media driver died before all was said at the end (%s)", lost)
