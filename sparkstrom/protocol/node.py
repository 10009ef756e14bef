"""A worker's machine: join, catch up, publish, apply in commit order, come back, drain.

Its trainer stands beside it: it reads ``command`` at each batch boundary and says what it did
through events. The machine owns no replica; ``Deliver`` and ``Install`` change the one that the
trainer owns, in the order in which they come.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from sparkstrom.base.identity import MASTER, Position
from sparkstrom.codec.messages import (
    Activity,
    Address,
    Again,
    AskAfter,
    AskChunk,
    AuditAnswer,
    Behind,
    Chunk,
    Closed,
    Committed,
    Failed,
    Final,
    Join,
    Kept,
    Leaving,
    Message,
    Phase,
    Refused,
    Release,
    Report,
    State,
    Stats,
    Update,
    Welcome,
)
from sparkstrom.protocol import events as ev
from sparkstrom.protocol.catchup import Catchup
from sparkstrom.protocol.events import Command, Effect, Order, Send
from sparkstrom.protocol.uplink import Uplink

JOIN_RETRY_S = 0.5
REPORT_SPACING_S = 0.01  # news is told at once, but not more often than this
ASK_SPACING_S = 0.05
HUNGRY_S = 0.5  # known to be behind and fed nothing for this long: ask
REPEAT_S = 0.25  # between repeats of what the master has not shown to have heard
FAREWELL_S = 5.0  # how long a failing node waits for the master to have heard why


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """Times in seconds of the node's clock, sizes in bytes; each wait counts from progress."""

    lease_s: float = 10.0
    join_s: float = 60.0
    master_silent_s: float = 30.0
    stuck_s: float = 120.0  # window full or catching up, without any progress
    step_s: float = 600.0  # one step, or reading one batch
    window_bytes: int = 4 << 20
    hold_bytes: int = 64 << 20
    max_lead: int | None = None


@dataclass(frozen=True, slots=True)
class Identity:
    """What a node says of itself when it joins; see ``Join`` for the fields."""

    token: int
    partition: int
    attempt: int
    rows: int
    checksum: int
    batches: int
    host: str
    executor: str
    pid: int
    version: str


class Node:
    """One worker. ``step(event, now_s)`` returns the effects; ``command`` is for its trainer."""

    def __init__(self, identity: Identity, limits: NodeLimits, now_s: float) -> None:
        self._identity, self._limits = identity, limits
        self._uplink = Uplink(limits.window_bytes)
        self._catchup: Catchup | None = None
        self._installing = False
        self._ids: dict[int, int | None] = {}  # every id of this process: closed at seq, or None
        self.node = -1
        self._address: Address | None = None
        self._joined = False  # the present edge has been welcomed
        self._count, self._edge = 1, 0
        self._has_replica = False
        self._received = 0
        self._state: State | None = None
        self._position = Position(0, 0)
        self._steps = 0
        self._activity, self._activity_s = Activity.CATCHING_UP, now_s
        self._paused, self._pauses = False, 0
        self._final: Final | None = None
        self._audit: AuditAnswer | None = None
        self._left: Leaving | None = None
        self._failed: Failed | None = None
        self._started_s = self._heard_s = self._edge_heard_s = now_s
        self._join_due_s = self._report_due_s = self._ask_due_s = now_s
        self._lease_due_s = now_s
        self._news = False
        self._fed_s = now_s
        self._reports = 0
        self._failed_s = 0.0
        self.command = Command(Order.WAIT, "joining")

    # -- events ----------------------------------------------------------------------------------

    def step(self, event: ev.Event, now_s: float) -> list[Effect]:
        effects = self._react(event, now_s)
        if self.command.order not in (Order.END, Order.FAIL):
            self._decide(now_s)
        return effects

    def _react(self, event: ev.Event, now_s: float) -> list[Effect]:
        match event:
            case ev.Received(message=message):
                self._heard_s = self._edge_heard_s = now_s
                return self._on_message(message, now_s)
            case ev.Tick():
                return self._on_tick(now_s)
            case ev.Published():
                return self._on_published(event, now_s)
            case ev.Progressed():
                self._advance(Position(event.epoch, event.batch), event.steps, now_s)
            case ev.Busy(activity=activity):
                self._activity, self._activity_s = Activity(activity), now_s
                self._news = True
            case ev.Opened(address=address):
                return self._on_opened(address, now_s)
            case ev.Paused(number=number):
                self._paused = number == self._pauses
            case ev.Installed():
                self._installing, self._paused, self._has_replica = False, False, True
            case ev.Drained():
                self._final = Final(self._uplink.last_seq)
                return [Send(MASTER, self._final)]
            case ev.Hashed(commit=commit, digest=digest, kept=kept):
                self._audit = AuditAnswer(commit, digest, kept)
                return [Send(MASTER, self._audit)]
            case ev.Released(kept=kept):
                return self._leave("released", kept)
            case ev.TrainerFailed(reason=reason, trace=trace):
                self._failed, self._failed_s = Failed(reason=reason, trace=trace), now_s
                return [Send(MASTER, self._failed)]
            case _:
                raise AssertionError(f"no rule for {event}")
        return []

    def _on_message(self, message: Message, now_s: float) -> list[Effect]:
        match message:
            case Welcome():
                return self._on_welcome(message, now_s)
            case Refused():
                return self._on_refused(message)
            case Closed():
                return self._on_closed(message)
            case _ if not self._joined:
                return []  # of an older edge, or overtaking the welcome: it will come again
            case Committed():
                return self._on_committed(message, now_s)
            case Chunk():
                if self._catchup is not None:
                    self._catchup.take(message, now_s)
                    return self._catch_up(now_s)
                return []
            case State():
                self._state = message
                done = message.phase is Phase.DONE and self._audit is not None
                return [Send(MASTER, Leaving("done", None))] if done else []
            case Again():
                return self._send_all(now_s)
            case Behind(base=base, chunks=chunks, last=last):
                if base <= self._received:
                    return []  # what was missing has come meanwhile
                return self._begin_catchup(base, chunks, last, now_s)
            case Release(reason=reason):
                self.command = Command(Order.RELEASE, reason)
                return []
            case _:
                return []  # a message that only masters take

    # -- joining, moving, coming back ------------------------------------------------------------

    def _on_opened(self, address: Address, now_s: float) -> list[Effect]:
        self._address, self._joined = address, False
        self._edge += 1
        self._edge_heard_s = now_s
        return self._send_join(now_s)

    def _send_join(self, now_s: float) -> list[Effect]:
        assert self._address is not None
        self._join_due_s = now_s + JOIN_RETRY_S
        who = self._identity
        return [
            Send(
                MASTER,
                Join(
                    token=who.token,
                    count=self._count,
                    edge=self._edge,
                    partition=who.partition,
                    attempt=who.attempt,
                    rows=who.rows,
                    checksum=who.checksum,
                    batches=who.batches,
                    address=self._address,
                    host=who.host,
                    executor=who.executor,
                    pid=who.pid,
                    version=who.version,
                    have=self._received,
                    has_replica=self._has_replica and self._catchup is None,
                ),
            )
        ]

    def _on_welcome(self, welcome: Welcome, now_s: float) -> list[Effect]:
        mine = (self._identity.token, self._count, self._edge)
        if self._joined or (welcome.token, welcome.count, welcome.edge) != mine:
            return []
        self._joined, self._news = True, True
        effects: list[Effect] = [
            ev.OpenEdge(MASTER, self._edge, self._address_here(), welcome.up),
        ]
        if welcome.node != self.node:
            effects += self._take_id(welcome, now_s)
        if welcome.snapshot:
            effects += self._begin_catchup(welcome.base, welcome.chunks, welcome.last, now_s)
        elif welcome.base > self._received:
            raise AssertionError("welcomed beyond what this node holds, without a snapshot")
        return effects + self._send_all(now_s, force=True) + self._report(now_s)

    def _take_id(self, welcome: Welcome, now_s: float) -> list[Effect]:
        returned = self._has_replica
        for node, seq in welcome.closed:
            self._ids[node] = seq
        self._ids[welcome.node] = None
        self.node = welcome.node
        closed = {node: seq for node, seq in self._ids.items() if seq is not None}
        self._uplink.rekey(closed, self.node, now_s)
        if self._final is not None:
            self._final = Final(self._uplink.last_seq)
        if not returned:
            self._position, self._steps = Position(welcome.epoch, welcome.batch), welcome.steps
        return [
            ev.Admitted(
                self.node,
                welcome.epoch,
                welcome.batch,
                welcome.steps,
                tuple(welcome.grants),
                returned,
            )
        ]

    def _on_refused(self, refused: Refused) -> list[Effect]:
        if (refused.token, refused.count) == (self._identity.token, self._count):
            self.command = Command(Order.FAIL if refused.fatal else Order.END, refused.reason)
        return []

    def _on_closed(self, closed: Closed) -> list[Effect]:
        mine = (self._identity.token, self._count)
        if closed.node != self.node and (closed.token, closed.count) != mine:
            return []
        if self._ids.get(closed.node) is not None:
            return []  # heard before; the next join is under way
        if self._failed is not None:
            self.command = Command(Order.FAIL, self._failed.reason)
            return []
        if not closed.free:
            self.command = Command(Order.FAIL, closed.reason)
            return []
        self._ids[closed.node] = closed.seq
        self._count += 1
        self._joined = False
        return [ev.Reopen()]

    def _leave(self, reason: str, kept: Kept | None) -> list[Effect]:
        self._left = Leaving(reason, kept)
        self.command = Command(Order.END, reason)
        return [Send(MASTER, self._left)]

    # -- updates ---------------------------------------------------------------------------------

    def _on_published(self, made: ev.Published, now_s: float) -> list[Effect]:
        self._advance(Position(made.epoch, made.batch), made.steps, now_s)
        update = Update(
            origin=self.node,
            seq=self._uplink.last_seq + 1,
            seen=made.seen,
            epoch=made.epoch,
            batch=made.batch,
            steps=made.steps,
            form=made.form,
            tau_quanta=made.tau_quanta,
            count=made.count,
            payload=made.payload,
        )
        self._uplink.add(update, now_s)
        return [Send(MASTER, update)] if self._joined else []

    def _advance(self, position: Position, steps: int, now_s: float) -> None:
        self._position, self._steps, self._news = position, steps, True
        self._activity_s = now_s

    def _on_committed(self, committed: Committed, now_s: float) -> list[Effect]:
        if committed.commit <= self._received:
            return []
        if committed.commit > self._received + 1:
            return self._ask(now_s)
        self._received, self._news, self._fed_s = committed.commit, True, now_s
        own = committed.origin in self._ids
        if own:
            update = self._uplink.strike(committed.origin, committed.seq, now_s)
            assert update is not None, f"own update {committed.seq} was not kept until committed"
            committed = replace_payload(committed, update)
        if self._catchup is not None:
            self._catchup.hold(committed)
            return self._catch_up(now_s)
        return [] if own else [ev.Deliver(committed)]

    def _ask(self, now_s: float) -> list[Effect]:
        if now_s < self._ask_due_s:
            return []
        self._ask_due_s = now_s + ASK_SPACING_S
        return [Send(MASTER, AskAfter(self._received))]

    def _send_all(self, now_s: float, *, force: bool = False) -> list[Effect]:
        updates = self._uplink.again(self.node, now_s, force=force)
        return [Send(MASTER, update) for update in updates]

    # -- snapshots -------------------------------------------------------------------------------

    def _begin_catchup(
        self, base: int, chunks: int, last: list[tuple[int, int]], now_s: float
    ) -> list[Effect]:
        assert base >= self._received, "a snapshot never takes back what is held"
        self._uplink.strike_up_to(last, now_s)
        self._received, self._news, self._fed_s = base, True, now_s
        self._pauses += 1
        self._paused = False
        self._catchup = Catchup(base, chunks, self._limits.hold_bytes, now_s)
        return self._catch_up(now_s)

    def _catch_up(self, now_s: float) -> list[Effect]:
        """Ask for chunks; once all is there and the trainer stands still, install."""
        catchup = self._catchup
        if catchup is None or self._installing or not self._joined:
            return []
        if not (self._paused and catchup.complete()):
            return [Send(MASTER, AskChunk(index)) for index in catchup.wanted(now_s)]
        self._installing, self._catchup = True, None
        own = self._uplink.uncommitted
        return [ev.Install(catchup.chunks, catchup.held, own, self._received)]

    # -- time ------------------------------------------------------------------------------------

    def _on_tick(self, now_s: float) -> list[Effect]:
        if self._check_deadlines(now_s):
            return []
        if self._address is None:
            return []
        silent_s = now_s - self._edge_heard_s
        if self._joined and silent_s > self._limits.lease_s / 2:
            self._joined, self._edge_heard_s = False, now_s
            return [ev.Reopen()]
        if not self._joined:
            return self._send_join(now_s) if now_s >= self._join_due_s else []
        effects = self._catch_up(now_s)
        behind = self._state is not None and self._state.head > self._received
        if behind and now_s - self._fed_s > HUNGRY_S:
            self._fed_s = now_s
            effects.append(Send(MASTER, AskAfter(self._received)))
        if self._uplink.overdue(now_s):
            self._uplink.back_off(now_s)
            effects += self._send_all(now_s)
        news_due = self._news and now_s >= self._report_due_s
        if news_due or now_s >= self._lease_due_s:
            effects += self._report(now_s)
        return effects

    def _report(self, now_s: float) -> list[Effect]:
        """Renew the lease, with whatever the master may have missed beside it."""
        self._news = False
        self._reports += 1
        self._report_due_s = now_s + REPORT_SPACING_S
        jitter = zlib.crc32(b"%d/%d" % (self.node, self._reports)) / 2**32
        unheard = self._unheard()
        self._lease_due_s = now_s + (
            REPEAT_S if unheard else self._limits.lease_s / 4 * (0.5 + 0.5 * jitter)
        )
        report = Report(
            edge=self._edge,
            received=self._received,
            after_seq=self._uplink.last_seq,
            epoch=self._position.epoch,
            batch=self._position.batch,
            steps=self._steps,
            activity=self._activity,
        )
        return [Send(MASTER, report), *(Send(MASTER, message) for message in unheard)]

    def _unheard(self) -> list[Message]:
        """What the master must know and has not shown to know."""
        phase = self._state.phase if self._state is not None else Phase.GATHERING
        out: list[Message] = []
        if self._final is not None and phase < Phase.AUDIT:
            out.append(self._final)
        if self._audit is not None and phase < Phase.DONE:
            out.append(self._audit)
        if self._failed is not None:
            out.append(self._failed)
        return out

    def _check_deadlines(self, now_s: float) -> bool:
        """Fail with a reason when something was waited for too long."""
        limits = self._limits
        working_s = now_s - self._activity_s
        waits = (
            (self.node < 0, now_s - self._started_s, limits.join_s, JOIN_FAILED),
            (True, now_s - self._heard_s, limits.master_silent_s, MASTER_SILENT),
            (self._catchup is not None, self._since_chunk(now_s), limits.stuck_s, NO_SNAPSHOT),
            (self._window_full(), now_s - self._uplink.progress_s, limits.stuck_s, NO_COMMITS),
            (self._activity is Activity.STEPPING, working_s, limits.step_s, STEP_STUCK),
        )
        for waiting, waited_s, limit_s, what in waits:
            if waiting and waited_s > limit_s:
                self.command = Command(Order.FAIL, what.format(waited_s))
                return True
        if self._failed is not None and now_s - self._failed_s > FAREWELL_S:
            self.command = Command(Order.FAIL, self._failed.reason)
            return True
        return False

    def _since_chunk(self, now_s: float) -> float:
        return now_s - self._catchup.progress_s if self._catchup is not None else 0.0

    def _window_full(self) -> bool:
        return not self._uplink.has_room()

    # -- what the trainer is to do ---------------------------------------------------------------

    def _decide(self, now_s: float) -> None:
        if self.command.order is Order.RELEASE or self._failed is not None:
            return
        self.command = self._command()

    def _command(self) -> Command:
        state = self._state
        if self._catchup is not None or self._installing:
            return Command(Order.PAUSE, "a replica is on its way", number=self._pauses)
        if state is None or not self._has_replica:
            return Command(Order.WAIT, "joining")
        if state.phase is Phase.DONE and self._audit is not None:
            return Command(Order.END, "done")
        if state.phase in (Phase.AUDIT, Phase.DONE):
            at_final = self._received >= state.final
            return Command(Order.AUDIT, commit=state.final) if at_final else Command(Order.WAIT)
        if state.phase is Phase.DRAINING:
            return Command(Order.DRAIN)
        if state.phase is Phase.GATHERING:
            return Command(Order.WAIT, "the others have not joined yet")
        if self._window_full():
            return Command(Order.WAIT, "its updates are not committed yet")
        lead = self._limits.max_lead
        if lead is None:
            return Command(Order.TRAIN)
        limit = state.slowest + lead
        if self._steps >= limit:
            return Command(Order.WAIT, "it is ahead of the slowest")
        return Command(Order.TRAIN, steps_max=limit)

    def _address_here(self) -> Address:
        assert self._address is not None
        return self._address

    def stats(self, values: dict[str, float]) -> list[Effect]:
        """Report counters to the master; best effort, the next ones are cumulative."""
        return [Send(MASTER, Stats(values))] if self._joined else []


JOIN_FAILED = (
    "no answer from the master for {:.0f} s: is UDP open between executors and driver in both "
    "directions (ports, security group), and do network mask and controller address name the "
    "network that both share?"
)
MASTER_SILENT = (
    "nothing heard from the master for {:.0f} s: the driver program has ended, or the network "
    "between this executor and it is down"
)
NO_SNAPSHOT = "no part of the replica arrived for {:.0f} s while catching up"
NO_COMMITS = "the window is full and the master committed nothing for {:.0f} s"
STEP_STUCK = "one training step took longer than {:.0f} s: raise step_timeout if that is normal"


def replace_payload(committed: Committed, update: Update) -> Committed:
    """A number that came without its payload, completed from the origin's own copy."""
    return Committed(
        commit=committed.commit,
        origin=committed.origin,
        seq=committed.seq,
        form=update.form,
        tau_quanta=update.tau_quanta,
        count=update.count,
        payload=update.payload,
    )
