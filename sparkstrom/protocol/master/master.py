"""The master's machine: admits nodes, numbers updates, feeds them down, ends the fit.

It is the root of the tree and the one authority on membership, order and phase. It holds a
replica, which ``Deliver`` changes, and does not train.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from sparkstrom.base.identity import MASTER, Endpoint, NodeId, Position, Seq
from sparkstrom.codec.messages import (
    BUFFERS,
    AskAfter,
    AskChunk,
    AskUpdater,
    Attach,
    Closed,
    Failed,
    Heartbeat,
    Here,
    Join,
    Leaving,
    Message,
    Payload,
    Phase,
    Release,
    Silent,
    Update,
    UpdaterChunk,
)
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.child import Child
from sparkstrom.protocol.common.children import Children
from sparkstrom.protocol.common.endings import Ending, Lack
from sparkstrom.protocol.common.events import Effect
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.common.ignored import Ignored, Reason
from sparkstrom.protocol.common.leases import Leases
from sparkstrom.protocol.common.topology import Topology
from sparkstrom.protocol.master.admission import on_join
from sparkstrom.protocol.master.fit import Fit, MasterLimits
from sparkstrom.protocol.master.members import Member, answer
from sparkstrom.protocol.master.partitions import Partition
from sparkstrom.protocol.master.phases import Phases
from sparkstrom.protocol.master.placement import (
    ask_again,
    close_unattached,
    confirm,
    is_here,
    on_silent,
    order_places,
)
from sparkstrom.protocol.master.residual_checkpoints import CheckpointFiles, ResidualCheckpoints
from sparkstrom.protocol.master.sequencer import Sequencer
from sparkstrom.protocol.master.statuses import count_pending, find_lender, on_status, tell_narrow

BEATS_PER_LEASE = 8
RELEASE_SPACING_S = 0.25
SCAN_S_PER_NODE = 20e-6  # looking at everybody takes its time: not more often than this allows
SCAN_ALWAYS_NODES = 64  # below that, it takes none


class Master:
    """The driver's node. ``step(event, now_s)`` returns the effects; ``fit`` is its state."""

    def __init__(
        self,
        spec: FitSpec,
        *,
        chunks: int,
        endpoint: Endpoint,
        limits: MasterLimits,
        now_s: float,
        kept: CheckpointFiles | None = None,
        average: Callable[[list[bytes]], bytes] | None = None,
    ) -> None:
        ignored, leases = Ignored(), Leases(limits.lease_s, now_s)
        sequencer = Sequencer(limits.log_bytes, ignored)
        children = Children(limits.serving, sequencer.history, leases)
        self.fit = Fit(
            spec=spec,
            chunks=chunks,
            limits=limits,
            endpoint=endpoint,
            sequencer=sequencer,
            ignored=ignored,
            partitions=[Partition(i, spec.epochs, unowned_s=now_s) for i in range(spec.workers)],
            phases=Phases(limits.start_s, limits.workers_min, limits.end_s),
            checkpoints=ResidualCheckpoints(kept or {}),
            leases=leases,
            attaching=Leases(limits.attach_s, now_s),
            children=children,
            tree=Topology(limits.fan_out, limits.depth),
        )
        self._average = average  # of a model's buffers, as each partition has reported them
        self._buffers: dict[int, bytes] = {}  # partition -> the newest
        self.aborted = False
        self._scan_due_s = now_s
        self._release_s = now_s

    def step(self, event: ev.Event, now_s: float) -> list[Effect]:
        """React, then go on to the next phase where it is time."""
        if self.aborted:
            return self._after_abort(event)
        effects = self._react(event, now_s)
        if now_s >= self._scan_due_s:
            nodes = len(self.fit.members.live)
            self._scan_due_s = now_s
            if nodes > SCAN_ALWAYS_NODES:
                self._scan_due_s += nodes * SCAN_S_PER_NODE
            effects += self._move_phase(now_s)
        self.aborted = any(isinstance(effect, ev.Abort) for effect in effects)
        if self.aborted:
            effects += [self._farewell(member) for member in self.fit.members.live.values()]
        return effects

    def _react(self, event: ev.Event, now_s: float) -> list[Effect]:
        fit = self.fit
        match event:
            case ev.Received(sender=sender, message=message):
                child = None if sender is None else fit.children.by_node.get(sender)
                if child is None:
                    return self._on_direct(message, now_s)
                fit.leases.renew(child.node, now_s)
                return self._on_child(child, message, now_s)
            case ev.Arriving(sender=sender, bytes=size):
                if (child := fit.children.by_node.get(sender)) is not None:
                    fit.children.arriving(child, size)
            case ev.Tick():
                return self._on_tick(now_s)
            case ev.GivenUp(reason=reason):
                return [ev.Abort(reason)]
            case ev.StopRequested(reason=reason):
                fit.phases.stop(reason)
            case ev.Moved(host=host, port=port):
                fit.endpoint = Endpoint(host, port)
                return self._forget_edges(now_s)
            case ev.Hashed(digest=digest):
                fit.phases.own_digest = digest
            case _:
                raise AssertionError(f"no rule for {event}")
        return []

    def _forget_edges(self, now_s: float) -> list[Effect]:
        """They went with the media driver; everybody who stood on one gets another."""
        fit = self.fit
        effects: list[Effect] = []
        for node in list(fit.tree.children(MASTER)):
            effects += fit.children.disown(node)
            fit.move(node, now_s)
        return effects

    # -- what nodes say to the master itself -----------------------------------------------------

    def _on_direct(self, message: Message, now_s: float) -> list[Effect]:
        fit = self.fit
        if isinstance(message, Join):
            known = fit.members.of(message)
            if known in fit.members.live and fit.phases.phase is Phase.DONE:
                return [answer(message, self.fit.state())]
            return on_join(fit, message, now_s)
        node: NodeId | None = getattr(message, "node", None)
        member = None if node is None else fit.members.live.get(node)
        match message:
            case Failed(node=None) if fit.phases.phase is not Phase.DONE:
                where = (message.host, message.partition)
                return [ev.Abort(message.reason, message.trace, *where)]
            case _ if member is None:
                fit.ignored.count(message, Reason.STRANGER)
                return []
        match message:
            case Silent(child=child, edge=edge):
                return on_silent(fit, member.node, child, edge, now_s)
            case Here():
                is_here(fit, member, now_s)
            case Failed(reason=reason, trace=trace):
                return self._on_failed(member, reason, trace)
            case Leaving():
                return self._on_leaving(member, message, now_s)
            case _:
                fit.ignored.count(message, Reason.WRONG_WAY)
        return []

    def _on_leaving(self, member: Member, leaving: Leaving, now_s: float) -> list[Effect]:
        """A released one stays until it knows that what it left behind is known."""
        if member.releasing is None:
            self.fit.ignored.count(leaving, Reason.EARLY)
            return []
        self.fit.checkpoints.keep(member.join.executor, member.node, leaving.checkpoint)
        effects = self.fit.close(member.node, leaving.reason, now_s, released=True)
        self.fit.goodbyes.pop(member.node, None)
        return [*effects, answer(member.join, farewell(member, leaving.reason))]

    def _on_failed(self, member: Member, reason: str, trace: str) -> list[Effect]:
        """One failure ends the fit, unless the fit is done already."""
        if self.fit.phases.phase is Phase.DONE:
            return [self._farewell(member)]
        return [ev.Abort(reason, trace, member.join.host, member.join.partition)]

    def _after_abort(self, event: ev.Event) -> list[Effect]:
        """Nothing counts any more; whoever still speaks is told so.

        Spark does not end the tasks of a stage that it is about to repeat.
        """
        live = self.fit.members.live
        match event:
            case ev.Received(sender=sender, message=Heartbeat(news=news)):
                told = {sender, *(status.node for status in news)}
            case ev.Received(sender=sender, message=Join() as join):
                told = {sender, self.fit.members.of(join)}
            case ev.Received(sender=sender, message=message):
                told = {sender, getattr(message, "node", None)}
            case _:
                return []
        return [self._farewell(live[node]) for node in sorted(live.keys() & told)]

    def _farewell(self, member: Member) -> Effect:
        return answer(member.join, farewell(member, Ending.FIT_FAILED.value))

    # -- what comes up from the children ---------------------------------------------------------

    def _on_child(self, child: Child, message: Message, now_s: float) -> list[Effect]:
        fit = self.fit
        match message:
            case Update():
                return self._on_update(child, message, now_s)
            case Heartbeat():
                effects: list[Effect] = []
                for status in message.news:
                    effects += on_status(fit, status, now_s)
                if message.received > child.received:  # slow links carry something, too
                    fit.phases.progress_s = now_s
                return effects + fit.children.on_report(child, message, now_s)
            case Attach():
                child.state_due = True
                effects = fit.children.on_attach(child, message, now_s)
                if child.answer is not None and child.node in fit.members.live:
                    confirm(fit, fit.members.live[child.node], child.edge)
                return effects
            case AskAfter(commit=commit) if commit <= fit.sequencer.head:
                return fit.children.on_ask_after(child, commit, now_s)
            case AskChunk(index=index) if index < fit.chunks:
                return fit.children.on_ask_chunk(child, index, now_s)
            case AskUpdater():
                return find_lender(fit, message)
            case UpdaterChunk(asker=asker) if asker in fit.tree:
                child.arriving = 0
                return [ev.Send(fit.tree.path(asker)[0], message)]
            case Leaving():
                return fit.children.disown(child.node)
            case AskAfter() | AskChunk():
                fit.ignored.count(message, Reason.EARLY)  # there is no such commit, or chunk
            case UpdaterChunk():
                fit.ignored.count(message, Reason.UNSERVED)
            case _:
                fit.ignored.count(message, Reason.WRONG_WAY)
        return []

    def _on_update(self, child: Child, update: Update, now_s: float) -> list[Effect]:
        child.bytes_forwarded += self.fit.children.on_update(child, update)
        fit, member = self.fit, self.fit.members.live.get(update.origin)
        committed = fit.sequencer.number(update, self._payload_of)
        if member is None:
            fit.still_speaks(update.origin, now_s)
            return []
        member.steps = max(member.steps, update.steps)
        if committed is None:
            last = fit.sequencer.last[member.node]
            ahead = update.seq > last + 1 and not fit.sequencer.frozen
            return fit.children.again(child, member.node, last, now_s) if ahead else []
        fit.phases.progress_s = now_s
        taken = fit.partition_of(member).advance(Position(update.epoch, update.batch))
        fit.staleness.committed(member.node, committed.commit, update.seen, taken)
        count_pending(fit, member)
        return [ev.Deliver(committed), *fit.children.feed_all(now_s)]

    def _payload_of(self, update: Update) -> Payload:
        """An update is committed as it is; of buffers, the average of the latest everywhere."""
        if update.payload.form != BUFFERS or self._average is None:
            return update.payload
        partition = self.fit.partition_of(self.fit.members.live[update.origin]).index
        self._buffers[partition] = update.payload.data
        average = self._average([self._buffers[index] for index in sorted(self._buffers)])
        return msgspec.structs.replace(update.payload, data=average)

    # -- time ------------------------------------------------------------------------------------

    def _on_tick(self, now_s: float) -> list[Effect]:
        fit = self.fit
        done = fit.phases.phase is Phase.DONE
        effects = [] if done else self._close_silent(now_s)
        if now_s >= self._scan_due_s:
            if fit.look_around():
                fit.children.tell_all()
            effects += self._check_partitions(now_s)
        beat = int(now_s / fit.limits.lease_s * BEATS_PER_LEASE)
        if beat > fit.beat:
            fit.beat = beat
            fit.children.tell_all()
        if not done:
            effects += order_places(fit, now_s) + ask_again(fit, now_s)
        effects += fit.children.tick(self.fit.state(), now_s) + self._ask_to_release(now_s)
        found, fit.children.narrow = fit.children.narrow, []
        return effects + tell_narrow(fit, found)

    def _close_silent(self, now_s: float) -> list[Effect]:
        fit = self.fit
        silent = {
            node: f"silent for {silent_s:.1f} s (lease {fit.limits.lease_s:g} s)"
            for node, silent_s in fit.leases.expire(now_s)
        }
        effects = fit.close_all(silent, now_s) if silent else []
        return effects + close_unattached(fit, now_s)

    def _ask_to_release(self, now_s: float) -> list[Effect]:
        """Those that are to give up their slots, until they do."""
        if now_s < self._release_s + RELEASE_SPACING_S:
            return []
        self._release_s = now_s
        return [
            member.answer(Release(member.releasing))
            for member in self.fit.members.live.values()
            if member.releasing is not None
        ]

    def _check_partitions(self, now_s: float) -> list[Effect]:
        """Find a slot for a partition without a worker, and give up when none comes."""
        if self.fit.phases.phase is not Phase.RUNNING:
            return []
        waiting = [p for p in self.fit.partitions if p.owner is None and not p.trained]
        if not waiting:
            return []
        longest = min(waiting, key=lambda p: p.unowned_s)
        waited_s = now_s - max(longest.unowned_s, self.fit.phases.running_s)
        if waited_s > self.fit.limits.rejoin_s:
            reason, at = Lack.LATER.value.format(longest.index, waited_s), longest.index
            return [ev.Abort(reason, partition=at, kind=ev.Failure.SETUP, lack=Lack.LATER)]
        if min(waited_s, now_s - self.fit.released_s) > self.fit.limits.release_s:
            self._release_one(longest.index, now_s)
        return []

    def _release_one(self, waiting: int, now_s: float) -> None:
        """Spark may need the slot of a worker that only waits for the end; it gets one at a time.

        Spark takes a while to use it; the next goes only if that did not help.
        """
        for member in self.fit.members.live.values():
            if not member.placed or member.releasing is not None:
                continue  # it may not know its id yet, and what it was granted
            if self.fit.partition_of(member).trained:
                self.fit.released_s = now_s
                member.releasing = f"partition {waiting} needs a task slot"
                return

    # -- phases ----------------------------------------------------------------------------------

    def _move_phase(self, now_s: float) -> list[Effect]:
        before = self.fit.phases.phase
        effects = self.fit.phases.move(
            self.fit.members, self.fit.partitions, self.fit.sequencer, now_s
        )
        if self.fit.phases.phase is Phase.DONE and before is not Phase.DONE:
            self.fit.checkpoints.settle(self.fit.members.live)
        if self.fit.phases.phase is not before:
            self.fit.children.tell_all()
        for node, reason in self.fit.phases.overdue(self.fit.members, self.fit.sequencer, now_s):
            effects += self.fit.close(node, reason, now_s)
        return effects


def farewell(member: Member, reason: str) -> Closed:
    """To a node that failed or leaves, and may not know its id: it was heard, and may end."""
    join, node = member.join, member.node
    return Closed(
        token=join.token, count=join.count, node=node, seq=Seq(0), reason=reason, free=False
    )
