"""Network: edges between the master and its workers, on which anything may happen to a message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sparkstrom.base.identity import MASTER
from sparkstrom.codec.messages import Address, Chunk, Committed, Join, Message, Update
from sparkstrom.protocol import events as ev
from sparkstrom.simulation.faults import Faults
from sparkstrom.simulation.process import SimProcess
from sparkstrom.simulation.timeline import Timeline

DELAY_S_MIN = 0.0005
LATE_S_MAX = 0.5
NOBODY = -1  # who sends before it has an id, or over an edge that the master has closed


@dataclass(frozen=True, slots=True)
class Cut:
    """A worker is out of reach."""

    until_s: float
    up: bool
    down: bool


class Network:
    """``to_master`` takes what arrives there, with its sender."""

    def __init__(
        self, time: Timeline, faults: Faults, to_master: Callable[[int, Message], None]
    ) -> None:
        self._time, self._faults, self._to_master = time, faults, to_master
        self._processes: dict[str, SimProcess] = {}  # by the host part of their addresses
        self._edges: dict[int, tuple[SimProcess, int]] = {}  # node id -> whom it reaches
        self._nodes: dict[tuple[SimProcess, int], int] = {}  # the other way round
        self._cuts: dict[SimProcess, Cut] = {}
        self.messages = 0
        self._broken: set[tuple[SimProcess, int, bool, bool]] = set()  # edge, up, data
        self._quiet = False

    def add(self, process: SimProcess) -> None:
        self._processes[process.name] = process

    # -- the master's edges ----------------------------------------------------------------------

    def open(self, node: int, peer: Address) -> SimProcess:
        """The master reaches ``node`` there from now on, and hears it from there only."""
        self.close(node)
        process = self._processes[peer.host]
        self._edges[node] = (process, peer.port)
        self._nodes[process, peer.port] = node
        return process

    def close(self, node: int) -> None:
        edge = self._edges.pop(node, None)
        if edge is not None:
            self._nodes.pop(edge, None)

    # -- messages --------------------------------------------------------------------------------

    def up(self, process: SimProcess, message: Message) -> None:
        """From a worker over its present edge."""
        self._transmit(self._arrive_up, process, process.edge, message)

    def down(self, node: int, message: Message) -> None:
        """From the master, if it has an edge to that node."""
        edge = self._edges.get(node)
        if edge is not None:
            self._transmit(self._arrive_down, *edge, message)

    def answer(self, address: Address, message: Message) -> None:
        """From the master to somebody who has no edge."""
        process = self._processes[address.host]
        self._transmit(self._arrive_down, process, address.port, message)

    def calm_down(self) -> None:
        """From now on every message arrives, once and in time."""
        self._quiet = True

    def cut(self, process: SimProcess, cut: Cut) -> None:
        self._cuts[process] = cut

    def break_stream(self, process: SimProcess, *, up: bool, data: bool) -> None:
        """Nothing gets through on this stream of its present edge any more."""
        self._broken.add((process, process.edge, up, data))

    def _transmit(
        self,
        arrive: Callable[[SimProcess, int, Message], None],
        process: SimProcess,
        edge: int,
        message: Message,
    ) -> None:
        """Put a message on its way, once, twice, late or not at all."""
        self.messages += 1
        time, faults = self._time, self._faults
        quiet = self._quiet
        luck = time.chance.random()
        if not quiet and luck < faults.loss:
            time.faults["lost"] += 1
            return
        copies = 1
        if not quiet and luck < faults.loss + faults.repeat:
            time.faults["repeated"] += 1
            copies = 2
        for _ in range(copies):
            delay_s = DELAY_S_MIN + time.chance.random() * faults.delay_ms_max / 1000
            if not quiet and time.chance.random() < faults.late:
                time.faults["late"] += 1
                delay_s += time.chance.random() * LATE_S_MAX
            time.at(time.now_s + delay_s, arrive, process, edge, message)

    def _arrive_up(self, process: SimProcess, edge: int, message: Message) -> None:
        if self._swallows(process, up=True):
            return
        if isinstance(message, Join):
            self._to_master(NOBODY, message)
            return
        node = self._nodes.get((process, edge))
        if node is not None and not self._is_broken(process, edge, True, message):
            self._to_master(node, message)

    def _arrive_down(self, process: SimProcess, edge: int, message: Message) -> None:
        """A worker that stands still finds the message when it goes on."""
        if self._swallows(process, up=False) or not process.alive:
            return
        if self._is_broken(process, edge, False, message):
            return
        now_s = self._time.now_s
        if now_s < process.awake_s:
            self._time.at(process.awake_s, self._arrive_down, process, edge, message)
        elif edge == process.edge:
            process.feed(ev.Received(MASTER, message), now_s)

    def is_cut(self, process: SimProcess) -> bool:
        cut = self._cuts.get(process)
        return cut is not None and cut.until_s > self._time.now_s

    def _is_broken(self, process: SimProcess, edge: int, up: bool, message: Message) -> bool:
        data = isinstance(message, Update | Committed | Chunk)
        return bool(self._broken) and (process, edge, up, data) in self._broken

    def _swallows(self, process: SimProcess, *, up: bool) -> bool:
        if not self.is_cut(process):
            return False
        cut = self._cuts[process]
        if cut.up if up else cut.down:
            self._time.faults["cut off"] += 1
            return True
        return False
