"""Check a simulated run against the invariants I1 to I5 (ARCHITECTURE.md).

I1: what is learned is sent or kept. I2: each update and each minibatch counts once. I3: all
replicas are equal. I4: memory and waits are bounded. I5: a failure in training ends the fit.

A checker is an object whose methods the simulation calls as the run proceeds. ``InvariantChecker``
records what each trainer published and what the master numbered, and compares these records with
replicas, residuals and the outcomes of tasks. ``TopologyChecker`` checks the tree of nodes, its
edges and its progress. Neither assumes that what the protocol reports about itself is true. A
violation is a sentence that begins with the invariant's name.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparkstrom.base.identity import MASTER, EdgeNo, NodeId, Seq
from sparkstrom.codec.messages import BUFFERS, Commit, Phase
from sparkstrom.protocol.common.events_and_effects import (
    Abort,
    Directive,
    TaskEnding,
    TimeoutReason,
)
from sparkstrom.protocol.common.flow_control import HEADER_BYTES
from sparkstrom.protocol.common.topology import Topology
from sparkstrom.protocol.master.master import Master
from sparkstrom.simulation.process import (
    FAILURE_REASON,
    OPTIMIZER_STRUCT,
    PublishedUpdate,
    SimProcess,
)
from sparkstrom.simulation.replica import INITIAL_THETA, IntTheta, add_update, join_reports
from sparkstrom.simulation.run_options import RunSize

SUCCESSFUL_ENDINGS = (TaskEnding.DONE, TaskEnding.RELEASED, TaskEnding.DISMISSED)


@dataclass(slots=True)
class TrainedPartition:
    """The committed minibatches of one partition, and the processes that trained it."""

    spans: list[tuple[int, int]]  # minibatches first + 1 to last, per committed update
    processes: list[SimProcess]  # all attempts

    @property
    def last(self) -> int:
        """Number of the last committed minibatch, counted from 1; 0 if none is."""
        return self.spans[-1][1] if self.spans else 0


class InvariantChecker:
    """Checks one run's updates, replicas, residuals and task outcomes, and collects violations.

    ``kept``: the sum of absolute values in each residual file of an earlier fit, by path.
    """

    def __init__(self, kept: dict[str, float]) -> None:
        self.violations: list[str] = []
        self.commits: list[Commit] = []
        self._kept = kept
        self._sums: list[IntTheta] = [list(INITIAL_THETA)]  # theta at each commit
        self._reports: dict[int, bytes] = {}  # partition -> its newest buffers
        self.buffers = b""  # the expected combination of all reports
        self._last_seqs: dict[NodeId, Seq] = {}  # id -> number of its newest committed update
        self._taken: dict[SimProcess, int] = {}  # number of its updates that are committed
        self._covered_updates: dict[SimProcess, int] = {}  # number of those in its replica's commit
        self._trained_partitions: dict[int, TrainedPartition] = defaultdict(
            lambda: TrainedPartition([], [])
        )
        self._users_of_files: dict[str, SimProcess] = {}
        self._ends: dict[SimProcess, TaskEnding | TimeoutReason | None] = {}
        self._positions: dict[int, tuple[int, int]] = {}  # partition -> its last position
        self._counted = 0  # committed minibatches of the fit, as last announced to workers
        # Processes that exceed max_staleness -> step of their oldest uncommitted update, own step.
        self._over_staleness: dict[SimProcess, tuple[int, int]] = {}
        self._progress = (Phase.GATHERING, 0)
        self._is_calm = False

    def report_violation(self, text: str) -> None:
        """Record a violation, once."""
        if text not in self.violations:
            self.violations.append(text)

    def begin(self, size: RunSize, *, calm: bool) -> None:
        """Prepare to check a run: record the minibatches that earlier fits trained.

        ``size`` has these minibatches by partition; ``calm``: whether the run has no faults.
        """
        self._is_calm = calm
        for partition in range(size.nodes):
            if minibatches := size.start_of(partition).minibatches:
                self._trained_partitions[partition].spans.append((0, minibatches))
                self._counted += minibatches

    def record_start(self, process: SimProcess) -> None:
        """Record a new attempt at a partition."""
        self._trained_partitions[process.identity.partition].processes.append(process)

    def _with_commit(self, theta: IntTheta, update: Commit) -> IntTheta:
        """Return a copy of the parameters ``theta`` with one more commit added."""
        theta = list(theta)
        if update.payload.form != BUFFERS:
            add_update(theta, update.payload.data)
        return theta

    def _with_uncommitted(self, theta: IntTheta, made: list[PublishedUpdate]) -> IntTheta:
        """Return a copy of the parameters ``theta`` with uncommitted updates added."""
        theta = list(theta)
        for update in made:
            if not update.buffers:
                add_update(theta, update.payload)
        return theta

    def _matches(self, replica: Any, theta: IntTheta) -> bool:
        """Return True if a worker's or the controller's replica equals theta."""
        return bool(replica.theta == theta)

    def check_commit(self, process: SimProcess, update: Commit) -> None:
        """Check I2 for a new commit, which is an update of ``process``.

        The updates of a process are committed in order, once each and unchanged, and no minibatch
        is committed twice.
        """
        expected = self._last_seqs.get(update.origin, 0) + 1
        if update.seq != expected or update.commit != len(self.commits) + 1:
            self.report_violation(f"I2: commit {update.commit} is ({update.origin}, {update.seq}), "
                           f"expected seq {expected}")  # fmt: skip
        self._last_seqs[update.origin] = update.seq
        self.commits.append(update)
        self._sums.append(self._with_commit(self._sums[-1], update))
        taken = self._taken.get(process, 0)
        if taken == len(process.made):
            self.report_violation(
                f"I2: commit {update.commit}: {process.name} made only {taken} updates"
            )
            return
        made = process.made[taken]
        self._taken[process] = taken + 1
        made.commit = update.commit
        expected_payload = made.payload
        if made.buffers:
            self._reports[process.identity.partition] = made.payload
            expected_payload = join_reports([self._reports[p] for p in sorted(self._reports)])
            self.buffers = expected_payload
        if expected_payload != update.payload.data:
            self.report_violation(f"I2: commit {update.commit} is not what {process.name} made")
        trained = self._trained_partitions[process.identity.partition]
        if made.first < trained.last:
            self.report_violation(f"I2: minibatch {made.first + 1} of partition "
                           f"{process.identity.partition} committed twice")  # fmt: skip
        trained.spans.append((made.first, made.last))

    def check_replica(self, process: SimProcess) -> None:
        """Check I2 and I3: at a boundary, a replica is the sum of commits and uncommitted updates.

        The commits are all up to the replica's commit number; the updates are the process's own.
        """
        commit, made = process.replica.commit, process.made
        if not process.has_replica or commit >= len(self._sums):
            return
        below = self._covered_updates.get(process, 0)
        while below < len(made) and (made[below].commit or commit + 1) <= commit:
            below += 1
        self._covered_updates[process] = below
        expected = self._with_uncommitted(self._sums[commit], made[below:])
        if not self._matches(process.replica, expected):
            self.report_violation(f"I3: {process.name} is not what its commit {commit} says")

    def check_release(self, process: SimProcess) -> None:
        """Check I2: only a worker whose partition is fully trained is asked to release its slot."""
        if self._missing_minibatches(process.identity.partition, process.minibatches_total):
            self.report_violation(f"I2: {process.name} is asked to leave before it has finished")

    def check_received_optimizer(self, process: SimProcess) -> None:
        """Check I3: a received optimizer state is a copy of one other worker that has trained."""
        for payload in process.borrowed:
            if payload is None:
                continue
            if self._attempt_of_copy(payload, process) == process.identity.attempt:
                self.report_violation(f"I3: {process.name} borrowed from itself")

    def check_optimizer_copies(
        self, payloads: tuple[bytes, ...], processes: list[SimProcess]
    ) -> None:
        """Check I3: the driver's optimizer states are complete copies, each of another worker.

        ``payloads`` are the encoded states. The workers must have trained.
        """
        for payload in payloads:
            self._attempt_of_copy(payload, processes[0])
        if len(set(payloads)) < len(payloads):
            self.report_violation(f"I3: the driver has {len(payloads)} copies, and some twice")

    def _attempt_of_copy(self, payload: bytes, process: SimProcess) -> int:
        """Return the attempt from which the optimizer state ``payload`` was copied; check I3.

        ``process`` is named in messages, and determines the size of chunks.
        """
        starts = range(0, len(payload), process.copy_bytes)
        parts = {payload[start : start + OPTIMIZER_STRUCT.size] for start in starts}
        attempt, steps, fresh = OPTIMIZER_STRUCT.unpack(payload[: OPTIMIZER_STRUCT.size])
        if len(parts) > 1 or not steps:
            self.report_violation(f"I3: {process.name} or the driver borrowed {payload.hex()}")
        if fresh:
            self.report_violation(
                f"I3: {process.name} or the driver borrowed a fresh state of {attempt}"
            )
        return int(attempt)

    def check_bounds(self, master: Master, processes: list[SimProcess]) -> None:
        """Check I4: memory stays within bounds; phase, commits and positions never go back."""
        progress = (master.phases.phase, master.sequencer.head)
        if progress < self._progress:
            self.report_violation(f"I4: from {self._progress} back to {progress}")
        self._progress = progress
        log = master.sequencer.history.log
        if log.bytes > master.limits.log_bytes and len(tuple(log.entries_after(log.base))) > 1:
            self.report_violation(f"I4: the log holds {log.bytes} bytes")
        for partition in master.partitions:
            if partition.position < self._positions.get(partition.index, (0, 0)):
                self.report_violation(f"I2: partition {partition.index} goes back")
            self._positions[partition.index] = partition.position
        for process in processes:
            if process.alive:
                self._check_node_bounds(process)

    def _check_node_bounds(self, process: SimProcess) -> None:
        """Check I4 for a worker: bytes of its log and uncommitted updates, and its staleness."""
        me = process.node
        if len(me.in_flight) > 1:
            *_, before, last = me.in_flight.uncommitted  # an epoch's end may add both at once
            at_once = [before, last] if before.payload.form == BUFFERS else [last]
            newest = sum(HEADER_BYTES + len(update.payload) for update in at_once)
            if me.in_flight.bytes - newest >= me.limits.window_bytes:
                self.report_violation(
                    f"I4: {process.name} has {me.in_flight.bytes} bytes uncommitted"
                )
        self._check_staleness(process)
        if me.replication.history.whole and me.replication.history.applied > process.replica.commit:
            self.report_violation(f"I3: {process.name} claims a commit that its replica has not")
        log = me.replication.history.log
        if log.bytes > me.limits.log_bytes and len(tuple(log.entries_after(log.base))) > 1:
            self.report_violation(f"I4: the log of {process.name} holds {log.bytes} bytes")

    def _check_staleness(self, process: SimProcess) -> None:
        """Check I4: a worker waits if it is max_staleness steps past an uncommitted update.

        The worker may exceed this limit at first, because it trained alone until then.
        """
        me = process.node
        oldest, most = me.in_flight.oldest, me.limits.max_staleness
        alone = me.fit.state is None or me.fit.state.training < 2
        if oldest is None or most is None or alone or process.steps <= oldest.steps + most:
            self._over_staleness.pop(process, None)
            return
        since, steps = self._over_staleness.get(process, (None, 0))
        if since != oldest.steps:  # since the last check, one was committed and the next was not
            self._over_staleness[process] = oldest.steps, process.steps
        elif process.steps > steps + 1:
            self.report_violation(
                f"I4: {process.name} is at step {process.steps}, and that of step {oldest.steps} "
                f"is not committed, max_staleness is {most}"
            )

    def check_minibatch_count(self, master: Master) -> None:
        """Check I2: the fit's minibatch count sent to workers never falls and is never too high."""
        trained, told = master.partitions.minibatches, master.broadcast.minibatches
        if not self._counted <= told <= trained:
            self.report_violation(f"I2: {told} of {trained} minibatches are announced, "
                           f"{self._counted} were before")  # fmt: skip
        self._counted = told

    def check_lead(self, processes: list[SimProcess], lead: int) -> None:
        """Check I4: no worker is ahead of the slowest by more than ``lead`` steps.

        Call it only if no worker has joined late.
        """
        steps = [p.steps for p in processes if p.alive and not p.finished]
        if steps and max(steps) > min(steps) + lead:
            self.report_violation(f"I4: {max(steps)} steps beside {min(steps)}, max_lead is {lead}")

    def check_added_files(self, process: SimProcess) -> None:
        """Check I1: each residual file of an earlier fit is used only once in total."""
        for path in process.added:
            if self._users_of_files.setdefault(path, process) is not process:
                self.report_violation(
                    f"I1: {path} added by {self._users_of_files[path].name} and {process.name}"
                )
        if len(set(process.added)) < len(process.added):
            self.report_violation(f"I1: {process.name} added a file twice")

    def check_success(self, process: SimProcess, command: Directive) -> None:
        """Check I5: a task that succeeded ended for a valid reason, given by its last directive."""
        self._ends[process] = command.cause
        if command.cause not in SUCCESSFUL_ENDINGS:
            self.report_violation(f"I5: {process.name} ended with success: {command.reason}")

    def check_failure(self, process: SimProcess, command: Directive, *, expected: bool) -> None:
        """Check I5: a failed task was replaced, raised in training, or fails as ``expected``."""
        attempts = [p.identity.attempt for p in self._processes_of(process)]
        superseded = command.cause is TaskEnding.SUPERSEDED
        superseded = superseded and process.identity.attempt < max(attempts)
        excused = process.is_failing and command.reason == FAILURE_REASON
        if not (superseded or excused or expected):
            self.report_violation(f"I5: {process.name} failed: {command.reason}")

    def check_abort(self, abort: Abort, newest: list[int], *, nobody: bool) -> None:
        """Check I5: a failed fit names a worker whose training raised an exception.

        With ``nobody``, a lack of workers is also a valid reason. ``newest`` is each partition's
        newest attempt that has joined; older attempts do not count.
        """
        if nobody and abort.lack is not None:
            return
        where = (abort.host, abort.partition)
        raised = [
            p
            for trained in self._trained_partitions.values()
            for p in trained.processes
            if p.is_failing
            and (p.identity.host, p.identity.partition) == where
            and p.identity.attempt >= newest[p.identity.partition]
        ]
        if not raised or abort.reason != FAILURE_REASON:
            self.report_violation(f"I5: aborted: {abort.reason} ({abort.host}, {abort.partition})")

    def _processes_of(self, process: SimProcess) -> list[SimProcess]:
        """Return all attempts at a process's partition."""
        return self._trained_partitions[process.identity.partition].processes

    def check_at_end(self, master: Master, replica: Any, processes: list[SimProcess]) -> None:
        """Check I1 to I5 at the end of the fit."""
        for process in processes:
            self.check_received_optimizer(process)
            if not process.learner.is_mass_conserved():
                self.report_violation(f"I1: {process.name} lost mass")
            if process.alive and (master.aborted or master.phases.phase is Phase.DONE):
                self.report_violation(f"I4: {process.name} did not end: {process.node.directive}")
        if master.phases.phase is not Phase.DONE:
            return
        if not self._matches(replica, self._sums[-1]):
            self.report_violation("I2: the master's replica is not the sum of all commits")
        if replica.buffers != self.buffers:
            self.report_violation(
                "I3: the master's buffers are not the average of the newest reports"
            )
        if master.phases.own_digest != replica.digest():
            self.report_violation("I3: the master's hash is not that of its replica")
        for node, digest in master.phases.digests.items():
            if digest != master.phases.own_digest:
                self.report_violation(f"I3: node {node} differs from the master")
        self._check_audits(master)
        for partition in master.partitions:
            whole = master.phases.stop_reason is None
            goal = partition.epochs * max(0, partition.batches)
            self._check_coverage(partition.index, goal if whole else partition.minibatches)
        self._check_kept_mass(master)
        self._check_last_copies(master)

    def _check_last_copies(self, master: Master) -> None:
        """Check I4: without faults, the master has the optimizer states requested for the end."""
        wanted = master.limits.last_copies
        if wanted is None or not self._is_calm or master.members.departures:
            return
        able = len(master.sources.candidates(MASTER))
        count = able if wanted.everybody else min(able, 1)
        if len(master.copies.copied) != count:
            self.report_violation(f"I4: {len(master.copies.copied)} last copies instead of {count}")

    def _check_audits(self, master: Master) -> None:
        """Check I3: each task that ended as done sent its hash and has the final parameters."""
        final = self._sums[-1]
        for process, ending in self._ends.items():
            if ending is not TaskEnding.DONE:
                continue
            if process.node.node not in master.phases.digests:
                self.report_violation(f"I3: {process.name} ended as done and was not audited")
            if not self._matches(process.replica, final):
                self.report_violation(f"I3: {process.name} ended with another replica")

    def _check_coverage(self, index: int, goal: int) -> None:
        """Check I2: each minibatch is in one committed update, or produced no update entries.

        ``index`` is the partition, and ``goal`` the number of its last minibatch.
        """
        trained = self._trained_partitions[index]
        if missing := self._missing_minibatches(index, goal):
            self.report_violation(f"I2: partition {index}: minibatches {sorted(missing)} of {goal} "
                           "are in no committed update")  # fmt: skip
        if trained.last > goal:
            self.report_violation(
                f"I2: partition {index}: {trained.last} of {goal} minibatches committed"
            )

    def minibatches_since(self, index: int, before: int, upto: int) -> list[int]:
        """Return a partition's minibatches that this run trained, after ``before``.

        These are the committed ones, and those up to ``upto`` that produced no update entries.
        """
        trained = self._trained_partitions[index]
        sent = [n for a, b in trained.spans if b > before for n in range(a + 1, b + 1)]
        quiet: set[int] = set().union(*(p.quiet for p in trained.processes))
        return sent + sorted({n for n in quiet if before < n <= upto} - set(sent))

    def check_driver_copy(self, replica: Any) -> None:
        """Check I2: the driver's copy is the sum of all commits so far."""
        if not self._matches(replica, self._sums[-1]):
            self.report_violation(
                f"I2: a copy at commit {len(self.commits)} is not the sum of commits"
            )

    def _missing_minibatches(self, index: int, goal: int) -> set[int]:
        """Return uncommitted minibatches up to ``goal``, except those that had nothing to send."""
        trained = self._trained_partitions[index]
        quiet: set[int] = set().union(*(p.quiet for p in trained.processes))
        missing = set(range(1, goal + 1)) - quiet
        for first, last in trained.spans:
            missing -= set(range(first + 1, last + 1))
        return missing

    def _check_kept_mass(self, master: Master) -> None:
        """Check I1 between fits: kept residuals were used by a surviving process or count as lost.

        Residuals that this fit leaves for the next one must be known to the master.
        """
        checkpoints = master.checkpoints
        made = {path for files in checkpoints.files.values() for path in files}
        good = [
            process
            for trained in self._trained_partitions.values()
            for process in trained.processes
            if process.node.node in master.phases.digests
            or (process.left is not None and process.left.path in made)
        ]
        used = {path for process in good for path in process.added}
        lost = sum(size for path, size in self._kept.items() if path not in used)
        if checkpoints.lost_mass != lost:
            self.report_violation(
                f"I1: {checkpoints.lost_mass} of kept mass counted as lost, not {lost}"
            )
        for process, ending in self._ends.items():
            left = process.left.path if process.left is not None else None
            if ending in (TaskEnding.DONE, TaskEnding.RELEASED) and left not in made:
                self.report_violation(f"I1: what {process.name} left for the next fit is not known")


# All workers must make progress this long after the last fault: one lease until a parent reports
# its child, one until the master evicts it, and a margin for new placements, level by level.
CALM_LEASES = 2
CALM_MARGIN_S = 1.5


@dataclass(slots=True)
class ProcessProgress:
    """The latest progress of one process, and when it was observed."""

    last_progress: tuple[bool, int]  # whether it has a replica; its commit
    since_s: float  # when this progress was first observed


class TopologyChecker:
    """Checks the tree, edges and progress of one run (I4); reports go to ``violation``.

    The tree is read from the master, edges from the nodes, even if the master's tree differs.
    """

    def __init__(self, violation: Callable[[str], None], lease_s: float) -> None:
        self._violation = violation
        self._patience_s = CALM_LEASES * lease_s + CALM_MARGIN_S
        self._progress_by_process: dict[SimProcess, ProcessProgress] = {}
        self._closed_since_s: dict[SimProcess, float] = {}  # use of a closed id, since when
        self._placed: set[NodeId] = set()  # nodes that have confirmed their place
        self._last_placement_s = 0.0  # when a node was last added to them
        self._unplaced_tokens: set[int] = set()  # of unplaced nodes and of those below them
        self._ids: dict[int, NodeId] = {}  # token -> the live id that the master has for it
        self._tree: Topology | None = None  # as last checked
        self.pace_s = 0.0  # more time, for slow links; see ``TrafficChecker.max_commit_interval_s``
        self.trouble_until_s = 0.0  # faults and recovery from them may last until then

    def check_tree(self, master: Master) -> None:
        """Check that the master has one tree of exactly the live nodes, within its limits."""
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

    def check_edges(self, processes: list[SimProcess]) -> None:
        """Check that the nodes' edges form no cycle and that no send window is exceeded."""
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
                # A chunk is sent together with all commits that it contains and the child lacks.
                if size > me.limits.flow_limits.window_max + 2 * me.limits.log_bytes + 64 * 40:
                    self._violation(f"I4: node {node} has {size} bytes under way to {child.node}")

    def check_transports(
        self, processes: list[SimProcess], master: Master, masters_edges: dict[NodeId, EdgeNo]
    ) -> None:
        """Check that the ids and edges in the protocol equal those of the transports.

        ``masters_edges``: open edges of the master's transport, by node.
        """
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

    def record_places(self, master: Master, now_s: float) -> None:
        """Record the nodes without a confirmed place in the tree, and those below them.

        Places are assigned level by level, so these nodes may wait while others get theirs.
        """
        live = master.members.live
        placed = {node for node, member in live.items() if member.placed}
        self._last_placement_s = now_s if placed - self._placed else self._last_placement_s
        self._placed = placed
        unplaced = live.keys() - placed
        below = (child for node in unplaced for child in master.placement.tree.descendants(node))
        self._unplaced_tokens = {live[node].join.token for node in unplaced.union(below)}
        self._ids = {member.join.token: node for node, member in live.items()}

    def _excused_until_s(self, process: SimProcess) -> float:
        """Return the virtual time until which a process had a reason to make no progress."""
        waits = process.identity.token in self._unplaced_tokens
        return max(self.trouble_until_s, self._last_placement_s) if waits else self.trouble_until_s

    def check_progress(self, processes: list[SimProcess], head: int, now_s: float) -> None:
        """Check that every process makes progress two leases after the last fault.

        ``head`` is the number of the newest commit. A process below a node that fetches a snapshot
        may wait while that fetch makes progress.
        """
        alive = [process for process in processes if process.alive]
        by_id = self._by_id(alive)
        for process in alive:
            me = process.node
            reached = process.has_replica, me.replication.received
            course = self._progress_by_process.get(process)
            fine = me.link.attached and me.replication.received >= head
            if course is None or reached > course.last_progress or fine:
                self._progress_by_process[process] = ProcessProgress(reached, now_s)
        for process in alive:
            course = self._progress_by_process[process]
            if self._is_ancestor_copying(self._parent(process), by_id, now_s):
                course.since_s = now_s
            quiet_s = now_s - max(course.since_s, self._excused_until_s(process))
            if process.has_replica and quiet_s > self._patience_s + self.pace_s:
                course.since_s = now_s
                where = (
                    f"{course.last_progress[1]} of {head}, {quiet_s:.1f} s after the last trouble"
                )
                self._violation(f"I4: {process.name} is cut off at commit {where}")

    def check_closed_ids(self, processes: list[SimProcess], master: Master, now_s: float) -> None:
        """Check that a process learns in time that the master has closed its id."""
        by_id = self._by_id([process for process in processes if process.alive])
        for process in processes:
            node = process.node.node
            if not process.alive or node is None or node in master.members.live:
                self._closed_since_s.pop(process, None)
                continue
            if self._is_ancestor_copying(self._assigned_parent(process), by_id, now_s):
                self._closed_since_s[process] = now_s  # it has a new id, but no place yet
            since_s = self._closed_since_s.setdefault(process, now_s)
            quiet_s = now_s - max(since_s, self._excused_until_s(process))
            if quiet_s > self._patience_s:
                self._closed_since_s[process] = now_s
                when = f"{quiet_s:.1f} s after the last trouble"
                self._violation(f"I4: the closed id {node} is still {process.name}'s, {when}")

    def _by_id(self, alive: list[SimProcess]) -> dict[NodeId | None, SimProcess]:
        """Return the processes by their own ids, and by those that the master has for them."""
        ids: dict[NodeId | None, SimProcess] = {process.node.node: process for process in alive}
        tokens = {process.identity.token: process for process in alive}
        return ids | {self._ids[token]: tokens[token] for token in tokens.keys() & self._ids.keys()}

    def _is_ancestor_copying(
        self, parent: NodeId | None, by_id: dict[NodeId | None, SimProcess], now_s: float
    ) -> bool:
        """Return True if ``parent`` or a node above it is fetching a snapshot and progresses."""
        above = by_id.get(parent)
        for _ in by_id:
            if above is None:
                return False
            me = above.node
            if not me.replication.history.whole:
                goes_on = now_s - self._progress_by_process[above].since_s <= self._patience_s
                if goes_on or me.link.attached:
                    return goes_on  # without an edge, the node itself waits for nodes above it
            above = by_id.get(self._parent(above))
        return False

    def _parent(self, process: SimProcess) -> NodeId | None:
        """Return a process's parent, or else the one that the master's tree has for it, or None."""
        parent = process.node.link.parent
        return self._assigned_parent(process) if parent is None else parent

    def _assigned_parent(self, process: SimProcess) -> NodeId | None:
        """Return the parent that the master's tree has for a process; None if there is none."""
        node = self._ids.get(process.identity.token)
        tree = self._tree
        if tree is None or node is None or node not in tree:
            return None
        return tree.parent(node)
