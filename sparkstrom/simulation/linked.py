"""Linked network: edges whose streams go over links, with everything as long as it really is."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

from sparkstrom.base.identity import EdgeNo, NodeId
from sparkstrom.codec.messages import Message
from sparkstrom.codec.wire import is_data
from sparkstrom.protocol.common import events as ev
from sparkstrom.runtime.message_endpoint import NEWEST_COUNTS
from sparkstrom.simulation.endpoint_network import EndpointNetwork
from sparkstrom.simulation.faults import Faults
from sparkstrom.simulation.flow import Flow
from sparkstrom.simulation.hearing import Hearing
from sparkstrom.simulation.links import (
    LOOK_BYTES,
    LOOK_S,
    Frame,
    Host,
    Links,
    Stream,
    body_bytes,
    frames_of,
)
from sparkstrom.simulation.run_sizes import Size, Through
from sparkstrom.simulation.scene import Scene
from sparkstrom.simulation.sim_network import Arrive, Network
from sparkstrom.simulation.sim_process import SimProcess
from sparkstrom.simulation.timeline import Timeline

DRIVER = "driver"
SLOW_LOOK_S = (0.02, 0.2)  # a slow poller's pauses between two looks
SLOW_LOOK_BYTES = 128 << 10
NARROWER = (0.1, 0.5)  # what is left of a rate
CUT_LOOK_S = 0.1  # how soon after a cut a stream goes on

Key = tuple[int, SimProcess | None, bool]  # edge, sender, data
Way = tuple[SimProcess | None, Arrive, int]  # who gets it, how, and the edge


class LinkedNetwork(Network):
    """See ``Network``; ``flow`` is told of every stream and of all that arrives."""

    def __init__(
        self,
        time: Timeline,
        faults: Faults,
        to_master: Callable[[NodeId | None, Message], None],
        step_master: Callable[[ev.Event], None],
        flow: Flow,
        *,
        liveness_s: float,
    ) -> None:
        super().__init__(time, faults, to_master, liveness_s=liveness_s)
        self.links = Links(time, faults.rate)
        self.flow, self._step_master = flow, step_master
        self._streams: dict[Key, Stream] = {}
        self._ways: dict[Stream, Way] = {}
        self._arrived: dict[SimProcess | None, dict[Stream, None]] = defaultdict(dict)
        self._looks: set[SimProcess | None] = set()  # whose next look is planned
        self._slow: dict[SimProcess, float] = {}

    def look(self, scene: Scene) -> None:
        """At what must hold now."""
        self.flow.look(scene, self.links.hosts.values())

    def at_end(self) -> None:
        self.flow.at_end()

    # -- hosts -----------------------------------------------------------------------------------

    def host_of(self, process: SimProcess | None) -> Host:
        return self.links.host(DRIVER if process is None else process.identity.executor)

    def add(self, process: SimProcess) -> None:
        """Some hosts are narrower, and some processes look seldom."""
        super().add(process)
        known = process.identity.executor in self.links.hosts
        host, chance = self.host_of(process), self._time.chance
        if not known and len(self.links.hosts) <= self._faults.narrow:
            host.rate *= chance.uniform(*NARROWER)
        if process.identity.partition < self._faults.slow_pollers:
            self._slow[process] = chance.uniform(*SLOW_LOOK_S)

    def narrow(self) -> None:
        """A host's link carries less from now on."""
        hosts = list(self.links.hosts.values())
        if hosts:
            host = self._time.chance.choice(hosts)
            host.rate *= self._time.chance.uniform(*NARROWER)
            self._time.faults["narrower"] += 1
            self._time.say(f"the link of {host.name} carries {host.rate:,.0f} bytes/s from now on")

    # -- edges -----------------------------------------------------------------------------------

    def open(self, owner: SimProcess | None, effect: ev.OpenEdge) -> None:
        self._close_streams(owner, effect.node, but=effect.edge)
        super().open(owner, effect)
        for key in [key for key in self._streams if key[0] == effect.edge]:
            self._streams[key].outbox.flush()  # the other end may have waited for this one

    def close(self, owner: SimProcess | None, node: NodeId) -> None:
        self._close_streams(owner, node)
        super().close(owner, node)

    def _close_streams(
        self, owner: SimProcess | None, node: NodeId, but: EdgeNo | None = None
    ) -> None:
        slot = (self._master_slots if owner is None else owner.slots).get(node)
        if slot is None or slot.edge == but:
            return
        for data in (False, True):
            stream = self._streams.pop((slot.edge, owner, data), None)
            if stream is not None:
                stream.close()

    def _stream(self, key: Key, way: Way) -> Stream:
        """The one of this edge, opened if need be."""
        found = self._streams.get(key)
        if found is not None:
            return found
        (edge, owner, data), target = key, way[0]

        def connected() -> bool:
            if key in self._broken:
                return False
            slots = self._master_slots if target is None else target.slots
            return any(s.edge == edge and s.target is owner for s in slots.values())

        def moves() -> bool:
            until_s = self._cut_s(owner, target)
            if until_s and until_s < math.inf:
                self._time.at(until_s + CUT_LOOK_S, self._go_on, key)
            alive = (owner is None or owner.alive) and (target is None or target.alive)
            return alive and not until_s

        ends = self.host_of(owner), self.host_of(target)
        stream = Stream(
            self.links, ends, data=data, connected=connected, moves=moves, hurry=self._hurry
        )
        self._streams[key] = stream
        self._ways[stream] = way
        self.flow.opened(stream, owner, target, lambda: key in self._broken)
        return stream

    def _cut_s(self, owner: SimProcess | None, target: SimProcess | None) -> float:
        """Until when nothing gets from here to there; 0: it does."""
        until_s, now_s = self._cut_until_s(owner, target), self._time.now_s
        if target is not None and target.cut is not None and target.cut.down:
            until_s = max(until_s, target.cut.until_s if target.cut.until_s > now_s else 0.0)
        return until_s

    def _go_on(self, key: Key) -> None:
        if key in self._streams:
            self.links.kick(self._streams[key])

    # -- messages --------------------------------------------------------------------------------

    def _transmit(
        self,
        owner: SimProcess | None,
        target: SimProcess | None,
        arrive: Arrive,
        sender: NodeId | None,
        edge: int,
        message: Message,
        *,
        direct: bool = False,
    ) -> None:
        """Over edges through their streams; what is said directly is short and seldom."""
        if direct:
            super()._transmit(owner, target, arrive, sender, edge, message, direct=True)
            return
        data = is_data(message)
        size = body_bytes(message)
        stream = self._stream((edge, owner, data), (target, arrive, edge))
        newest_of = type(message) if isinstance(message, NEWEST_COUNTS) else None
        stream.put(frames_of(message, size, sender, data=data), newest_of)

    def _hurry(self, stream: Stream) -> None:
        """Its receiver will look, as soon as it looks again."""
        target = self._ways[stream][0]
        self._arrived[target][stream] = None
        if target not in self._looks:
            self._looks.add(target)
            pause_s = LOOK_S if target is None else self._slow.get(target, LOOK_S)
            self._time.after(pause_s, self._look, target)

    def _look(self, target: SimProcess | None) -> None:
        """Take some of each stream."""
        now_s = self._time.now_s
        if target is not None and now_s < target.awake_s:
            if target.awake_s < math.inf:
                self._time.at(target.awake_s, self._look, target)
            return
        self._looks.discard(target)
        bytes_max = SLOW_LOOK_BYTES if target in self._slow else LOOK_BYTES
        streams, self._arrived[target] = list(self._arrived[target]), {}
        for stream in streams:
            frames = stream.take(bytes_max)
            for frame in frames:
                self._deliver(stream, frame)
            if frames and stream.data and stream.arriving:
                self._tell_arriving(stream, frames[-1].sender)
            if stream.waiting:
                self._hurry(stream)

    def _deliver(self, stream: Stream, frame: Frame) -> None:
        stream.arriving += frame.size
        if not frame.last:
            return
        stream.arriving = 0
        target, arrive, edge = self._ways[stream]
        self.flow.came(stream, target, frame.message)
        arrive(target, frame.sender, edge, frame.message)

    def _tell_arriving(self, stream: Stream, sender: NodeId | None) -> None:
        """Part of a message is here."""
        target, _, edge = self._ways[stream]
        assert sender is not None, "who has an edge has an id"
        slot = (self._master_slots if target is None else target.slots).get(sender)
        if slot is None or slot.edge != edge or (edge, slot.target, True) in self._broken:
            return
        arriving = ev.Arriving(sender, stream.arriving)
        if target is None:
            self._step_master(arriving)
        elif target.alive:
            target.feed(arriving, self._time.now_s)


def new_network(
    time: Timeline,
    size: Size,
    faults: Faults,
    *,
    to_master: Callable[[NodeId | None, Message], None],
    step_master: Callable[[ev.Event], None],
    violation: Callable[[str], None],
) -> Network:
    """With links where they have a rate. A stream lives through half a lease without a sign."""
    liveness_s = size.lease_s / 2
    if size.through is Through.ENDPOINT:
        hearing = Hearing(violation)
        return EndpointNetwork(time, faults, to_master, step_master, hearing, liveness_s=liveness_s)
    if not faults.rate:
        coded = size.through is Through.CODEC
        return Network(time, faults, to_master, coded=coded, liveness_s=liveness_s)
    flow = Flow(violation, size.weights.longest)
    return LinkedNetwork(time, faults, to_master, step_master, flow, liveness_s=liveness_s)
