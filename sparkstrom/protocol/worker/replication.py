"""Replication: a node takes the commits in order, or a snapshot where they are out of reach.

Whatever it takes goes into its log, too, and from there to its children.
"""

from __future__ import annotations

from sparkstrom.codec.messages import (
    BUFFERS,
    AskAfter,
    AskChunk,
    Behind,
    Chunk,
    Committed,
    LastSeqs,
    MergedRange,
    State,
    Update,
)
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.children import Children
from sparkstrom.protocol.common.endings import Vain
from sparkstrom.protocol.common.events import Effect
from sparkstrom.protocol.common.history import History
from sparkstrom.protocol.common.ignored import Ignored, Reason
from sparkstrom.protocol.common.stages import INSTALLS, Cause, ReplicaStage, after
from sparkstrom.protocol.worker.in_flight import InFlight
from sparkstrom.protocol.worker.limits import NodeLimits
from sparkstrom.protocol.worker.membership import Membership
from sparkstrom.protocol.worker.news import News
from sparkstrom.protocol.worker.parent_link import ParentLink
from sparkstrom.protocol.worker.snapshot_fetch import SnapshotFetch
from sparkstrom.protocol.worker.trainer_view import TrainerView
from sparkstrom.protocol.worker.waits import Sleep, Wait

ASK_SPACING_S = 1.0  # what is under way behind a gap shows the same gap


class Replication:
    """What a node has received and applied, and the snapshot that it fetches, if it does."""

    def __init__(
        self,
        limits: NodeLimits,
        history: History,
        *,
        membership: Membership,
        link: ParentLink,
        own: InFlight,
        trainer: TrainerView,
        children: Children,
        news: News,
        ignored: Ignored,
        now_s: float,
    ) -> None:
        self._limits, self.history = limits, history
        self._membership, self._link, self._own = membership, link, own
        self._trainer, self._children, self._news, self._ignored = trainer, children, news, ignored
        self.stage = ReplicaStage.EMPTY
        self.has_replica = False  # it had one once, and its trainer began with it
        self.chunks = 0  # of a snapshot
        self.fetch: SnapshotFetch | None = None
        self.paused = False  # the trainer stands still, as the newest order wanted
        self.pauses = 0  # the number of that order
        self._got_s = now_s  # the newest data; or, since then nothing was missing until now
        self._ask_due_s = 0.0
        self._asked: int | None = None  # the commit after which it asked last
        self._seen = 0  # a commit that came after a gap, and was dropped

    @property
    def received(self) -> int:
        """Every commit up to here."""
        return self.history.log.head

    @property
    def is_fetching(self) -> bool:
        """A snapshot is on its way."""
        return self.fetch is not None

    @property
    def is_installing(self) -> bool:
        """The trainer has one, and has not said that it is done."""
        return self.stage in INSTALLS

    @property
    def has_begun(self) -> bool:
        """Its trainer goes on from what it has, under whatever id."""
        return self.has_replica or self.is_installing

    @property
    def claims_whole(self) -> bool:
        """Could it go on from what it has received?"""
        begins_whole = self._membership.identity.whole
        return self.fetch is None and (self.stage is not ReplicaStage.EMPTY or begins_whole)

    def is_behind(self, state: State | None) -> bool:
        """There are commits that it has not received."""
        return state is not None and state.head > self.history.log.head

    def missing_since_s(self, state: State | None) -> float | None:
        """The newest data, where its parent has sent commits, or chunks, that are not here."""
        if self.fetch is not None:
            return self._got_s
        if state is not None and state.sent > self.history.log.head:
            return self._got_s
        return None

    def _step(self, cause: Cause) -> None:
        self.stage = after(self.stage, cause)
        fetching = self.stage in (ReplicaStage.FETCHING, ReplicaStage.REFETCHING)
        assert fetching == (self.fetch is not None), "who fetches has a snapshot under way"

    # -- commits ---------------------------------------------------------------------------------

    def on_committed(self, committed: Committed, now_s: float) -> list[Effect]:
        """The next commit is delivered, or held; after a gap what is missing is asked for."""
        received = self.history.log.head
        if committed.commit <= received:
            self._ignored.count(committed, Reason.LATE)
            self._news.add()  # the parent does not know how far this node is
            return []
        if committed.commit > received + 1:
            self._ignored.count(committed, Reason.EARLY)
            self._seen = committed.commit
            return self.ask(now_s)
        own = committed.origin in self._membership.ids
        if own:
            update = self._own.strike(committed.origin, committed.seq, now_s)
            assert update is not None, f"own update {committed.seq} was not kept until committed"
            if update.form != BUFFERS:  # of those the average came back
                committed = replace_payload(committed, update)
        self._take(committed, now_s)
        if self.fetch is None:
            return _deliver(committed, own=own) + self._children.feed_all(now_s)
        return self._fetch_with(self.fetch, now_s)

    def _fetch_with(self, fetch: SnapshotFetch, now_s: float) -> list[Effect]:
        """The log has one entry more, perhaps some fewer."""
        fetch.forget_useless()
        return self.catch_up(now_s) + self._children.feed_all(now_s)

    def on_merged(self, merged: MergedRange, now_s: float) -> list[Effect]:
        """Many commits at once: only for a replica that is exactly where the sum begins."""
        if merged.after != self.received:
            self._news.add()
            if merged.commit <= self.received:
                self._ignored.count(merged, Reason.LATE)
                return []
            self._ignored.count(merged, Reason.EARLY)
            self._seen = merged.commit
            return self.ask(now_s)
        last = dict(merged.last)
        own = [u for u in self._own.uncommitted if u.seq <= last.get(u.origin, 0)]
        for update in own:
            self._own.strike(update.origin, update.seq, now_s)
        self._take(merged, now_s)
        if self.fetch is not None:
            return self._fetch_with(self.fetch, now_s)
        return [ev.DeliverMerged(merged, tuple(own)), *self._children.feed_all(now_s)]

    def _take(self, entry: Committed | MergedRange, now_s: float) -> None:
        self.history.append(entry)
        self.got_data(now_s)

    def got_data(self, now_s: float) -> None:
        """Something came, whole or in part."""
        self._got_s = now_s
        self._news.add()

    def lacks_nothing(self, state: State, now_s: float) -> None:
        """All that the parent has sent is here, if it is."""
        if state.sent <= self.history.log.head and self.fetch is None:
            self._got_s = now_s

    def ask(self, now_s: float) -> list[Effect]:
        """For all that follows what is here, unless it was asked for a moment ago."""
        if now_s < self._ask_due_s:
            return []
        self._ask_due_s, self._asked = now_s + ASK_SPACING_S, self.received
        return [self._link.send(AskAfter(self.received))]

    def ask_at_once(self, now_s: float) -> list[Effect]:
        """Data, on a stream of its own, has overtaken the word that it follows, and was dropped."""
        self._ask_due_s = now_s
        return self.ask(now_s)

    def applied(self, commit: int) -> None:
        """The trainer's replica has this commit now."""
        self.history.applied = max(self.history.applied, commit)

    # -- snapshots -------------------------------------------------------------------------------

    def follow(self, now_s: float) -> list[Effect]:
        """The parent goes on from what is here."""
        if self.fetch is not None:
            self.fetch.resume()
            return self.catch_up(now_s)
        if self.stage is not ReplicaStage.EMPTY:
            return []
        self._step(Cause.BEGUN)
        self._trainer.busy(now_s)
        return [ev.Begin()]

    def on_behind(self, behind: Behind, now_s: float) -> list[Effect]:
        """The log does not reach back to what this node has: take a snapshot."""
        if behind.base <= self.received:  # what was missing has come meanwhile
            self._news.add()
            if self.fetch is None:
                self._ignored.count(behind, Reason.LATE)
                return []
            self.fetch.resume()  # the parent begins anew, and has forgotten what was asked for
            return self.catch_up(now_s)
        effects = self.begin_fetch(behind.base, behind.last, now_s)
        seen, self._seen = self._seen, 0
        return self.ask_at_once(now_s) + effects if seen > behind.base else effects

    def begin_fetch(self, base: int, last: LastSeqs, now_s: float) -> list[Effect]:
        """Fetch a replica as of ``base`` or later; commits after ``base`` are held meanwhile."""
        self._own.strike_up_to(last, set(self._membership.ids), now_s)
        self.history.begin_at(base, last)
        self.got_data(now_s)
        self.pauses += 1
        self.paused = False
        self.fetch = SnapshotFetch(self.history.log, self.chunks, now_s, self.fetch)
        self._step(Cause.BEHIND)
        return self.catch_up(now_s)

    def on_chunk(self, chunk: Chunk, now_s: float) -> list[Effect]:
        """Part of the snapshot is here; before it on its stream came the commits that are in it."""
        if self.fetch is None:
            self._ignored.count(chunk, Reason.LATE)
            return []
        self.got_data(now_s)
        if not self.fetch.take(chunk, now_s):
            self._ignored.count(chunk, Reason.LATE)
        effects = self.catch_up(now_s)
        if chunk.commit > self.received and self._asked != self.received:
            effects = self.ask(now_s) + effects
        return effects

    def catch_up(self, now_s: float) -> list[Effect]:
        """Ask for chunks; once all is there and the trainer stands still, install."""
        fetch = self.fetch
        if fetch is None or self.stage is ReplicaStage.REFETCHING or not self._link.attached:
            return []
        ready = fetch.ready(now_s)
        if ready:
            self._got_s = now_s
        if not (ready and self.paused):
            return [self._link.send(AskChunk(index)) for index in fetch.wanted()]
        self.fetch = None
        self._step(Cause.COMPLETED)
        self._news.add()
        self._trainer.busy(now_s)
        return [ev.Install(fetch.chunks, fetch.held, self._own.uncommitted, self.received)]

    def on_paused(self, number: int) -> None:
        """The trainer stands still, as this order wanted; an older one does not count."""
        self.paused = number == self.pauses

    def installed(self, now_s: float) -> None:
        """The trainer is done with it."""
        self._step(Cause.INSTALLED)
        self.paused, self.has_replica = False, True
        self.history.whole = self.stage is ReplicaStage.FOLLOWING
        self._trainer.busy(now_s)

    # -- time ------------------------------------------------------------------------------------

    def slept(self, sleep: Sleep) -> None:
        """See ``Sleep``."""
        self._got_s = sleep.later(self._got_s)
        if self.fetch is not None:
            self.fetch.slept(sleep)

    def wait_for_copy(self, now_s: float) -> Wait | None:
        """For a snapshot that makes progress, for long already."""
        fetch, stuck_s = self.fetch, self._limits.stuck_s
        if fetch is not None and fetch.progress_s < now_s - stuck_s:
            return Wait(fetch.progress_s, stuck_s, Vain.SNAPSHOT)
        return None

    def wait_for_commits(self, state: State | None, now_s: float) -> Wait | None:
        """For those that are known to exist, for long already."""
        stuck_s = self._limits.stuck_s
        if self._got_s < now_s - stuck_s and self.is_behind(state):
            return Wait(self._got_s, stuck_s, Vain.UPDATES)
        return None


def _deliver(committed: Committed, *, own: bool) -> list[Effect]:
    if not own:
        return [ev.Deliver(committed)]
    passed = ev.Passed(committed.commit)
    return [ev.Deliver(committed), passed] if committed.form == BUFFERS else [passed]


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
