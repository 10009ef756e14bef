"""Flow: what links must be good for, seen from outside the machines.

What was sent is of use, commits go on at a pace that the links set, queues stay short, and nothing
is dropped where there is no room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from sparkstrom.codec.messages import (
    Chunk,
    Committed,
    MergedRange,
    Message,
    Phase,
    Update,
    UpdaterChunk,
)
from sparkstrom.protocol.common.events import Order
from sparkstrom.simulation.links import Host, Stream, body_bytes
from sparkstrom.simulation.scene import Scene
from sparkstrom.simulation.sim_process import SimProcess

USEFUL_LEAST = 0.7
SENT_LEAST = 2 << 20  # bytes: of less than these no share is taken
QUEUE_S_MAX = 1.0  # of a link, in the queues before it
QUEUE_BYTES = 2 << 20  # beside that, for all neighbours of all processes of a host
MARGIN = 1.5  # see ``pace_s``


@dataclass(frozen=True, slots=True)
class Way:
    """Whose stream it is."""

    stream: Stream
    owner: SimProcess | None
    target: SimProcess | None
    is_broken: Callable[[], bool]

    @property
    def lives(self) -> bool:
        return not self.is_broken() and all(end is None or end.alive for end in self.ends)

    @property
    def is_torn(self) -> bool:
        """Did an end of it crash or fail? What was sent then says nothing."""
        gone = [end for end in self.ends if end is not None and not end.alive]
        return any(end.node.command.order is not Order.END for end in gone)

    @property
    def ends(self) -> set[SimProcess | None]:
        return {self.owner, self.target}


class Flow:
    """Violations of one run go to ``violation``. ``message_bytes``: the longest message."""

    def __init__(self, violation: Callable[[str], None], message_bytes: int) -> None:
        self._violation, self._message_bytes = violation, message_bytes
        self._ways: dict[Stream, Way] = {}
        self._had: set[tuple[object, ...]] = set()  # who has received what
        self._reach: dict[SimProcess, int] = {}  # newest commit that came to it
        self._commit: tuple[int, float] = -1, 0.0  # the newest, and since when
        self.useful = self.sent = 0
        self._flooded: set[Host] = set()  # of which it was said
        self.kinds: Counter[str] = Counter()  # useless bytes by kind of message

    def opened(
        self,
        stream: Stream,
        owner: SimProcess | None,
        target: SimProcess | None,
        is_broken: Callable[[], bool],
    ) -> None:
        self._ways[stream] = Way(stream, owner, target, is_broken)

    def came(self, stream: Stream, target: SimProcess | None, message: Message) -> None:
        """A whole message is at the receiver, which has not looked at it yet."""
        if not stream.data:
            return
        size = body_bytes(message)
        if self._is_new(target, message):
            stream.useful += size
        else:
            self.kinds[type(message).__name__] += size

    def _is_new(self, target: SimProcess | None, message: Message) -> bool:
        """Has it not had this yet? Of a sum: does it bring the newest commit so far?"""
        key: tuple[object, ...]
        match message:
            case Committed(commit=commit) | MergedRange(commit=commit):
                assert target is not None, "nobody sends commits to the master"
                if commit <= max(self._reach.get(target, 0), target.replica.commit):
                    return False
                self._reach[target] = commit
                return True
            case Update():
                key = (target, "update", message.origin, message.seq)
            case Chunk():
                assert target is not None, "nobody sends chunks to the master"
                key = (target, "chunk", target.node.replication.pauses, message.index)
            case UpdaterChunk():
                key = (target, "updater", message.asker, message.copy, message.index)
            case _:
                return True
        new = key not in self._had
        self._had.add(key)
        return new

    # -- while it runs ---------------------------------------------------------------------------

    def queues(self, hosts: Iterable[Host]) -> None:
        """Bytes that wait on a host are a moment's worth of its link, and nothing is dropped.

        One message of any length may be under way to each neighbour beside that: it is not cut.
        """
        waiting: Counter[Host] = Counter()
        allowed: Counter[Host] = Counter()
        for stream, way in self._ways.items():
            if stream.dropped:
                name = "the master" if way.owner is None else way.owner.name
                self._violation(f"F4: {name} dropped messages for want of room")
            if way.lives and stream.data and not stream.is_closed:
                waiting[stream.source] += stream.queued + stream.unsent + stream.under_way
                allowed[stream.source] += stream.longest
        for host in hosts:
            limit = QUEUE_BYTES + QUEUE_S_MAX * host.rate + allowed[host]
            if waiting[host] > limit and host not in self._flooded:
                self._flooded.add(host)
                full = f"{waiting[host]:,} bytes wait on {host.name}, at {host.rate:,.0f} a second"
                self._violation(f"F3: {full}; {limit:,.0f} may")

    def look(self, scene: Scene, hosts: Iterable[Host]) -> None:
        """Queues always; the pace of commits where everybody who lives trains."""
        size, master, now_s = scene.size, scene.master, scene.time.now_s
        self.queues(hosts)
        calm = scene.phase is Phase.RUNNING and now_s > scene.shape.trouble_s + 2 * size.lease_s
        calm = calm and all(process.installed for process in scene.alive)
        calm = calm and any(not p.finished or p.node.own.bytes for p in scene.alive)
        step_s = max((process.slowness_s for process in scene.alive), default=0.0)
        depth = max(map(master.placement.tree.depth, master.members.live), default=1)
        pace_s = self.pace_s(depth, size.lease_s / 4, size.publish_every * step_s)
        scene.shape.pace_s = pace_s
        self.goes_on(master.sequencer.head, now_s, calm=calm, pace_s=pace_s)

    def pace_s(self, depth: int, report_s: float, step_s: float) -> float:
        """How long the next commit may take while all goes well.

        An update goes up ``depth`` hops and its commit comes down as many, so that whoever waits
        for it goes on. At each hop it stands behind a queue of a second at most and one message,
        of any length, to or from each neighbour of that host; and what a worker knows of
        others' steps may be as old as a report at each hop. Half as much again, for luck.
        """
        busiest_s = 0.0
        lengths: Counter[Host] = Counter()
        for stream, way in self._ways.items():
            if way.lives and stream.data and not stream.is_closed:
                for host in {stream.source, stream.target}:
                    lengths[host] += max(stream.longest, self._message_bytes)
        for host, length in lengths.items():
            busiest_s = max(busiest_s, length / host.rate)
        hops = 2 * depth
        return MARGIN * (step_s + hops * (QUEUE_S_MAX + busiest_s + report_s))

    def goes_on(self, head: int, now_s: float, *, calm: bool, pace_s: float) -> None:
        """Commits follow each other within ``pace_s`` while training goes on undisturbed."""
        commit, since_s = self._commit
        if head != commit or not calm:
            self._commit = head, now_s
        elif now_s - since_s > pace_s:
            self._commit = head, now_s
            self._violation(f"F2: no commit after {head} for {pace_s:.1f} s")

    def at_end(self) -> None:
        """Of what was sent on streams that lived, enough was of use."""
        living = [
            way.stream
            for way in self._ways.values()
            if way.stream.data and not way.is_broken() and not way.is_torn
        ]
        self.sent = sum(stream.sent for stream in living)
        self.useful = sum(stream.useful for stream in living)
        if self.sent > SENT_LEAST and self.useful < USEFUL_LEAST * self.sent:
            share = self.useful / self.sent
            waste = ", ".join(f"{size:,} of {kind}" for kind, size in self.kinds.most_common(3))
            self._violation(
                f"F1: {share:.2f} of {self.sent:,} bytes were of use; again came {waste}"
            )
