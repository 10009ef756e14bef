"""The tree over which updates travel: the master is its root, workers are the other nodes.

A topology object never changes; a change makes a new version. Its maps are persistent: the new
version shares with the former one what did not change, so a change is cheap in a tree of any size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from sparkstrom.base.errors import UsageError
from sparkstrom.base.identity import MASTER, NodeId

BLOCK = 256  # keys in a block; a full mesh has some 150 blocks, so that both copies are short

Key = TypeVar("Key", bound=int)
Value = TypeVar("Value")
Blocks = dict[int, dict[Key, Value]]  # by key // BLOCK, none of them empty


class PersistentMap(Mapping[Key, Value]):
    """An immutable map with integer keys; a changed copy shares everything that did not change.

    Keys lie in blocks of neighbouring keys. A change copies one block and the list of blocks, so it
    costs about the same in a mesh of 30 and of 30,000 nodes. ``put`` and ``without`` return the
    changed copy.
    """

    __slots__ = ("_blocks", "_count")

    def __init__(self, blocks: Blocks[Key, Value] | None = None, count: int = 0) -> None:
        self._blocks, self._count = blocks or {}, count

    def __getitem__(self, key: Key) -> Value:
        return self._blocks[key // BLOCK][key]

    def __contains__(self, key: object) -> bool:
        return isinstance(key, int) and key in self._blocks.get(key // BLOCK, ())

    def __iter__(self) -> Iterator[Key]:
        for block in self._blocks.values():
            yield from block

    def __len__(self) -> int:
        return self._count

    def put(self, key: Key, value: Value) -> PersistentMap[Key, Value]:
        """Return a copy of the map in which this key has this value."""
        block = self._blocks.get(key // BLOCK, {}) | {key: value}
        return PersistentMap(self._blocks | {key // BLOCK: block}, self._count + (key not in self))

    def without(self, key: Key) -> PersistentMap[Key, Value]:
        """Return a copy of the map without this key, which must be present."""
        blocks, block = self._blocks.copy(), self._blocks[key // BLOCK].copy()
        del block[key]
        if block:
            blocks[key // BLOCK] = block
        else:
            del blocks[key // BLOCK]
        return PersistentMap(blocks, self._count - 1)


FAN_OUT, DEPTH = 8, 5  # of a mesh: 37,448 workers, each at most five hops from the master
FLAT = (1 << 20, 1)  # fan-out and depth of mode PLAIN: every node is a child of the master

NodesByPlace = PersistentMap[int, NodeId]
PlacesByNode = PersistentMap[NodeId, int]


@dataclass(frozen=True, slots=True)
class Topology:
    """The tree of nodes, as two maps: nodes by place and places by node.

    Only the master makes new versions. Places are numbered by level: the root is place 0, and the
    children of place p are places ``fan_out * p + 1`` to ``fan_out * p + fan_out``. When an inner
    node is lost, a deepest leaf below it takes its place. A change therefore moves at most one
    node, depth and fan-out cannot grow, and a cycle is impossible.
    """

    fan_out: int = FAN_OUT  # children of a node, at most
    depth_max: int = DEPTH  # levels below the master, at most
    version: int = 0  # rises by 1 with each change
    # The node at each place, and the place of each node.
    nodes: NodesByPlace = field(default_factory=lambda: NodesByPlace().put(0, MASTER))
    places: PlacesByNode = field(default_factory=lambda: PlacesByNode().put(MASTER, 0))
    open_from: int = 1  # no place with a lower number is free

    @property
    def capacity(self) -> int:
        """Return how many nodes fit into the tree, the master not counted."""
        if self.fan_out == 1:
            return self.depth_max
        beyond: int = self.fan_out ** (self.depth_max + 1)
        return (beyond - self.fan_out) // (self.fan_out - 1)

    def __contains__(self, node: NodeId) -> bool:
        return node in self.places

    def __len__(self) -> int:
        """Return the number of nodes without the master."""
        return len(self.places) - 1

    def parent(self, node: NodeId) -> NodeId:
        """Return the node's parent."""
        return self.nodes[(self.places[node] - 1) // self.fan_out]

    def children(self, node: NodeId) -> Iterator[NodeId]:
        """Return an iterator over the node's children."""
        if self.fan_out > len(self.nodes):  # as in a flat tree: look at the existing nodes instead
            first = self.fan_out * self.places[node] + 1
            places = [p for p in self.nodes if first <= p < first + self.fan_out]
        else:
            places = [p for p in self._child_places(self.places[node]) if p in self.nodes]
        return iter([self.nodes[p] for p in places])

    def depth(self, node: NodeId) -> int:
        """Return the number of hops from the master."""
        place, hops = self.places[node], 0
        while place:
            place, hops = (place - 1) // self.fan_out, hops + 1
        return hops

    def descendants(self, node: NodeId) -> list[NodeId]:
        """Return all nodes below this one, nearest first."""
        out: list[NodeId] = []
        level = [node]
        while level:
            level = [child for above in level for child in self.children(above)]
            out += level
        return out

    def path(self, node: NodeId) -> list[NodeId]:
        """Return the nodes from the master's child down to this node."""
        out: list[NodeId] = []
        while node != MASTER:
            out.append(node)
            node = self.parent(node)
        return out[::-1]

    def _child_places(self, place: int) -> range:
        """Return the numbers of all places directly below a place, taken or free."""
        first = self.fan_out * place + 1
        return range(first, first + self.fan_out)

    def attach(self, node: NodeId, near: NodeId | None = None) -> Topology:
        """Return the tree with one more node, under ``near`` or else as high as possible.

        Raise UsageError if the tree is full.
        """
        assert node not in self.places, "a node has one place"
        place = self._free_under(near) if near is not None else None
        first = self.open_from
        if place is None:
            place = first = self._first_free()
        return self._next_version(self.nodes.put(place, node), self.places.put(node, place), first)

    def detach(self, gone: Iterable[NodeId], suspects: Collection[NodeId] = ()) -> Topology:
        """Return the tree without these nodes; a successor takes each one's place and children.

        The successor is a leaf below the lost node, and not one of the ``suspects`` unless all
        leaves are suspected. The place of a lost leaf becomes free.
        """
        tree = self
        for node in sorted(gone, key=lambda n: -self.places[n]):  # from below: no successor is gone
            tree = tree._remove(node, suspects)
        return tree

    def _remove(self, node: NodeId, suspects: Collection[NodeId]) -> Topology:
        """Return the tree without a node; the last suitable leaf below takes its place."""
        below, freed = self.descendants(node), self.places[node]
        nodes, places = self.nodes.without(freed), self.places.without(node)
        if below:
            sure = (n for n in reversed(below) if n not in suspects and not any(self.children(n)))
            successor, place = next(sure, below[-1]), freed
            freed = places[successor]
            nodes, places = nodes.without(freed), places.put(successor, place)
            nodes = nodes.put(place, successor)
        return self._next_version(nodes, places, min(self.open_from, freed))

    def _next_version(self, nodes: NodesByPlace, places: PlacesByNode, open_from: int) -> Topology:
        """Return the next version of the tree, with these maps and this bound for free places."""
        version = self.version + 1
        return replace(self, version=version, nodes=nodes, places=places, open_from=open_from)

    def _free_under(self, near: NodeId) -> int | None:
        """Return a free place directly below ``near``; None if there is none."""
        if near not in self.places or self.depth(near) >= self.depth_max:
            return None
        return next((p for p in self._child_places(self.places[near]) if p not in self.nodes), None)

    def _first_free(self) -> int:
        """Return the lowest free place below a taken one. Raise UsageError if the tree is full."""
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
