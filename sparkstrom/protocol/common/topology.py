"""Topology: who stands under whom, as an immutable value; only the master makes new ones.

Places are numbered by level, the root is place 0, and the children of place p are places
``fan_out * p + 1`` to ``fan_out * p + fan_out``. A node has a place, and its parent is whoever has
the place above. So a change moves one node at most, depth and fan-out cannot grow, and there is
never a cycle: a lost inner node's place is taken by a deepest leaf from below it, and those that
stood under the lost one find the leaf above them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

from sparkstrom.base.errors import UsageError
from sparkstrom.base.identity import MASTER, NodeId
from sparkstrom.protocol.common.persistent_map import PersistentMap

FAN_OUT, DEPTH = 8, 5  # of a mesh: 37,448 workers, each at most five hops from the master
FLAT = (1 << 20, 1)  # PLAIN: everybody under the master

NodesByPlace = PersistentMap[int, NodeId]
PlacesByNode = PersistentMap[NodeId, int]


@dataclass(frozen=True, slots=True)
class Topology:
    """Nodes by place and places by node; ``version`` counts the changes."""

    fan_out: int = FAN_OUT
    depth_max: int = DEPTH
    version: int = 0
    nodes: NodesByPlace = field(default_factory=lambda: NodesByPlace().put(0, MASTER))
    places: PlacesByNode = field(default_factory=lambda: PlacesByNode().put(MASTER, 0))
    open_from: int = 1  # no place below this one is free

    # -- looking ---------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Nodes beside the master."""
        if self.fan_out == 1:
            return self.depth_max
        beyond: int = self.fan_out ** (self.depth_max + 1)
        return (beyond - self.fan_out) // (self.fan_out - 1)

    def __contains__(self, node: NodeId) -> bool:
        return node in self.places

    def __len__(self) -> int:
        """Nodes beside the master."""
        return len(self.places) - 1

    def parent(self, node: NodeId) -> NodeId:
        """Whom the node stands under."""
        return self.nodes[(self.places[node] - 1) // self.fan_out]

    def children(self, node: NodeId) -> Iterator[NodeId]:
        """Those right under the node."""
        if self.fan_out > len(self.nodes):  # as in a flat one: look at who is there instead
            first = self.fan_out * self.places[node] + 1
            places = [p for p in self.nodes if first <= p < first + self.fan_out]
        else:
            places = [p for p in self._below(self.places[node]) if p in self.nodes]
        return iter([self.nodes[p] for p in places])

    def depth(self, node: NodeId) -> int:
        """Hops from the master."""
        place, hops = self.places[node], 0
        while place:
            place, hops = (place - 1) // self.fan_out, hops + 1
        return hops

    def below(self, node: NodeId) -> list[NodeId]:
        """All under the node, the nearest first."""
        out: list[NodeId] = []
        level = [node]
        while level:
            level = [child for above in level for child in self.children(above)]
            out += level
        return out

    def path(self, node: NodeId) -> list[NodeId]:
        """From right under the master down to the node."""
        out: list[NodeId] = []
        while node != MASTER:
            out.append(node)
            node = self.parent(node)
        return out[::-1]

    def _below(self, place: int) -> range:
        first = self.fan_out * place + 1
        return range(first, first + self.fan_out)

    # -- changing --------------------------------------------------------------------------------

    def attach(self, node: NodeId, near: NodeId | None = None) -> Topology:
        """With one more node: right under ``near`` where that has room, else as high as possible.

        Raise UsageError where the tree is full.
        """
        assert node not in self.places, "a node has one place"
        place = self._free_under(near) if near is not None else None
        first = self.open_from
        if place is None:
            place = first = self._first_free()
        return self._with(self.nodes.put(place, node), self.places.put(node, place), first)

    def detach(self, gone: Iterable[NodeId], suspects: Collection[NodeId] = ()) -> Topology:
        """Without these nodes. Whoever stood under one of them stays under its successor.

        That is none of the ``suspects``, unless there is no other leaf below.
        """
        tree = self
        for node in sorted(gone, key=lambda n: -self.places[n]):  # from below: no successor is gone
            tree = tree._without(node, suspects)
        return tree

    def _without(self, node: NodeId, suspects: Collection[NodeId]) -> Topology:
        below, freed = self.below(node), self.places[node]
        nodes, places = self.nodes.without(freed), self.places.without(node)
        if below:
            sure = (n for n in reversed(below) if n not in suspects and not any(self.children(n)))
            successor, place = next(sure, below[-1]), freed
            freed = places[successor]
            nodes, places = nodes.without(freed), places.put(successor, place)
            nodes = nodes.put(place, successor)
        return self._with(nodes, places, min(self.open_from, freed))

    def _with(self, nodes: NodesByPlace, places: PlacesByNode, open_from: int) -> Topology:
        version = self.version + 1
        return replace(self, version=version, nodes=nodes, places=places, open_from=open_from)

    def _free_under(self, near: NodeId) -> int | None:
        if near not in self.places or self.depth(near) >= self.depth_max:
            return None
        return next((p for p in self._below(self.places[near]) if p not in self.nodes), None)

    def _first_free(self) -> int:
        place = self.open_from
        while place in self.nodes or (place - 1) // self.fan_out not in self.nodes:
            place += 1
            if place > self.capacity:
                raise UsageError(FULL.format(self.capacity + 1, self.fan_out, self.depth_max))
        return place


FULL = (
    "there is no place for worker {}: a mesh of fan-out {} and depth {} is full; use fewer "
    "partitions, or more workers in one task"
)
