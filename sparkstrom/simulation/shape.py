"""Shape: what must hold of the tree and of all edges, seen from outside the machines.

The tree is read from the master, the edges from the nodes: a node that believes in a parent is an
edge, whatever the master thinks of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from sparkstrom.base.identity import MASTER, EdgeNo, NodeId
from sparkstrom.protocol.common.topology import Topology
from sparkstrom.protocol.master.master import Master
from sparkstrom.simulation.sim_process import SimProcess

CALM_LEASES = 2  # so long after the last trouble everybody goes on: one until the parent complains,
CALM_MARGIN_S = 1.5  # one until the master is sure; then some orders and attaches, level by level


@dataclass(slots=True)
class Course:
    """How far one process was when it was last seen to go on."""

    reached: tuple[bool, int]  # has it a replica; its commit
    since_s: float


class Shape:
    """Violations of one run go to ``violation``."""

    def __init__(self, violation: Callable[[str], None], lease_s: float) -> None:
        self._violation = violation
        self._patience_s = CALM_LEASES * lease_s + CALM_MARGIN_S
        self._courses: dict[SimProcess, Course] = {}
        self._closed_s: dict[SimProcess, float] = {}  # since when it goes by an id that is closed
        self._placed: set[NodeId] = set()  # who has confirmed its place
        self._placed_s = 0.0  # when somebody was last added to them
        self._moving: set[int] = set()  # tokens of those whose place is not confirmed, or above
        self._ids: dict[int, NodeId] = {}  # token -> the live id that the master has for it
        self._tree: Topology | None = None
        self.pace_s = 0.0  # beside that: what narrow links may take, see ``Flow.pace_s``
        self.trouble_s = 0.0  # until then something went wrong, or was on its way back

    def tree(self, master: Master) -> None:
        """One tree over exactly the live nodes, within fan-out and depth."""
        tree = master.placement.tree
        if tree is self._tree:
            return
        self._tree = tree
        if tree.places.keys() != {MASTER, *master.members.live}:
            odd = sorted(tree.places.keys() ^ {MASTER, *master.members.live})
            self._violation(f"I4: the tree and the live nodes differ in {odd}")
            return
        parents = {node: tree.parent(node) for node in master.members.live}
        for parent, count in Counter(parents.values()).items():
            if count > master.limits.fan_out:
                self._violation(f"I4: node {parent} has {count} children")
        for node in parents:
            hops, above = 0, node
            while above != MASTER and hops <= master.limits.depth:
                above, hops = parents[above], hops + 1
            if hops > master.limits.depth:
                self._violation(f"I4: node {node} is {hops} hops below the master")

    def edges(self, processes: list[SimProcess]) -> None:
        """Nobody stands under itself, whatever the master believes; windows hold."""
        alive = {p.node.node: p.node for p in processes if p.alive and p.node.node is not None}
        parents = {node: me.link.parent for node, me in alive.items() if me.link.attached}
        good: set[NodeId] = set()
        for node in parents:
            seen: set[NodeId] = set()
            at: NodeId | None = node
            while at is not None and at in parents and at not in good:
                if at in seen:
                    self._violation(f"I4: a circle of edges through {sorted(seen)}")
                    return
                seen.add(at)
                at = parents[at]
            good |= seen
        for node, me in alive.items():
            for child in me.children.by_node.values():
                size = child.link.under_way
                # A chunk goes at once with all that it has and its child lacks.
                if size > me.limits.serving.window_max + 2 * me.limits.log_bytes + 64 * 40:
                    self._violation(f"I4: node {node} has {size} bytes under way to {child.node}")

    def transports(
        self, processes: list[SimProcess], master: Master, masters_edges: dict[NodeId, EdgeNo]
    ) -> None:
        """Each machine goes by the id and the edges that its transport has; ``masters_edges``."""
        believed = {node: child.edge for node, child in master.children.by_node.items()}
        if believed != masters_edges and not master.aborted:
            self._violation(f"I4: the master has edges {masters_edges}, its machine {believed}")
        for process in processes:
            me = process.node
            if not process.alive:
                continue
            if process.me != me.node:
                self._violation(f"I4: {process.name} sends as {process.me}, and is {me.node}")
            children, parent = me.children.by_node, me.link.parent
            if not children and parent is None and not process.slots:
                continue
            believed = {node: child.edge for node, child in children.items()} if children else {}
            if parent is not None:
                believed[parent] = me.link.edge
            edges = {node: slot.edge for node, slot in process.slots.items()}
            if believed != edges:
                self._violation(f"I4: {process.name} has edges {edges}, its machine {believed}")

    def places(self, master: Master, now_s: float) -> None:
        """Note who has no place yet: orders go level by level, each once the one above has one.

        As long as one after the other gets its place, the others may wait for theirs.
        """
        live = master.members.live
        placed = {node for node, member in live.items() if member.placed}
        self._placed_s = now_s if placed - self._placed else self._placed_s
        self._placed = placed
        unplaced = live.keys() - placed
        below = (child for node in unplaced for child in master.placement.tree.below(node))
        self._moving = {live[node].join.token for node in unplaced.union(below)}
        self._ids = {member.join.token: node for node, member in live.items()}

    def _excused_s(self, process: SimProcess) -> float:
        """Until then it had a reason to wait."""
        waits = process.identity.token in self._moving
        return max(self.trouble_s, self._placed_s) if waits else self.trouble_s

    def goes_on(self, processes: list[SimProcess], head: int, now_s: float) -> None:
        """In quiet times everybody takes part again, two leases after the last trouble.

        Who stands under a node that takes a snapshot waits for that, as long as it goes on.
        """
        alive = [process for process in processes if process.alive]
        by_id = self._by_id(alive)
        for process in alive:
            me = process.node
            reached = process.installed, me.replication.received
            course = self._courses.get(process)
            fine = me.link.attached and me.replication.received >= head
            if course is None or reached > course.reached or fine:
                self._courses[process] = Course(reached, now_s)
        for process in alive:
            course = self._courses[process]
            if self._copies_above(self._parent(process), by_id, now_s):
                course.since_s = now_s
            quiet_s = now_s - max(course.since_s, self._excused_s(process))
            if process.installed and quiet_s > self._patience_s + self.pace_s:
                course.since_s = now_s
                where = f"{course.reached[1]} of {head}, {quiet_s:.1f} s after the last trouble"
                self._violation(f"I4: {process.name} is cut off at commit {where}")

    def closed_ids(self, processes: list[SimProcess], master: Master, now_s: float) -> None:
        """Whoever goes by an id that is closed learns so, as soon as all others go on."""
        by_id = self._by_id([process for process in processes if process.alive])
        for process in processes:
            node = process.node.node
            if not process.alive or node is None or node in master.members.live:
                self._closed_s.pop(process, None)
                continue
            if self._copies_above(self._place_above(process), by_id, now_s):
                self._closed_s[process] = now_s  # its next id is there, and has no place yet
            since_s = self._closed_s.setdefault(process, now_s)
            quiet_s = now_s - max(since_s, self._excused_s(process))
            if quiet_s > self._patience_s:
                self._closed_s[process] = now_s
                when = f"{quiet_s:.1f} s after the last trouble"
                self._violation(f"I4: the closed id {node} is still {process.name}'s, {when}")

    def _by_id(self, alive: list[SimProcess]) -> dict[NodeId | None, SimProcess]:
        """By the ids that they go by, and by those that the master has for them."""
        ids: dict[NodeId | None, SimProcess] = {process.node.node: process for process in alive}
        tokens = {process.identity.token: process for process in alive}
        return ids | {self._ids[token]: tokens[token] for token in tokens.keys() & self._ids.keys()}

    def _copies_above(
        self, parent: NodeId | None, by_id: dict[NodeId | None, SimProcess], now_s: float
    ) -> bool:
        """Is this one, or one of those above it, on its way to a whole replica?"""
        above = by_id.get(parent)
        for _ in by_id:
            if above is None:
                return False
            me = above.node
            if not me.replication.history.whole:
                goes_on = now_s - self._courses[above].since_s <= self._patience_s
                if goes_on or me.link.attached:
                    return goes_on  # without an edge it waits itself, for those above it
            above = by_id.get(self._parent(above))
        return False

    def _parent(self, process: SimProcess) -> NodeId | None:
        """Its own word, or, while it has no edge, the place that the master has for it."""
        parent = process.node.link.parent
        return self._place_above(process) if parent is None else parent

    def _place_above(self, process: SimProcess) -> NodeId | None:
        """Who has the place above the one that the master has for this process."""
        node = self._ids.get(process.identity.token)
        tree = self._tree
        if tree is None or node is None or node not in tree:
            return None
        return tree.parent(node)
