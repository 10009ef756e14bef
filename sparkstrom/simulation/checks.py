"""Checkers: the invariants, seen from outside the machines.

They know what each trainer made and what the master numbered, and compare: no checker believes
what a machine says of itself. A violation is a sentence that begins with the invariant's name.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from sparkstrom.base.identity import MASTER, NodeId, Seq
from sparkstrom.codec.messages import BUFFERS, Committed, Phase
from sparkstrom.protocol.common.endings import Ending, Vain
from sparkstrom.protocol.common.events import Abort, Directive
from sparkstrom.protocol.common.send_window import HEADER_BYTES
from sparkstrom.protocol.master.master import Master
from sparkstrom.simulation.run_sizes import Size
from sparkstrom.simulation.sim_process import FAILURE, UPDATER, Made, SimProcess
from sparkstrom.simulation.sim_replica import INITIAL, Theta, add, average

GOOD_ENDS = (Ending.DONE, Ending.RELEASED, Ending.DISMISSED)


@dataclass(slots=True)
class Trained:
    """What of one partition is inside committed updates, or was trained without sending."""

    spans: list[tuple[int, int]]  # minibatches first + 1 to last, per committed update
    processes: list[SimProcess]

    @property
    def last(self) -> int:
        return self.spans[-1][1] if self.spans else 0


class Checks:
    """Collects what was violated in one run."""

    def __init__(self, kept: dict[str, float]) -> None:
        self.violations: list[str] = []
        self.commits: list[Committed] = []
        self._kept = kept  # files of an earlier fit and their mass
        self._sums: list[Theta] = [list(INITIAL)]  # theta at each commit
        self._reports: dict[int, bytes] = {}  # partition -> its newest buffers
        self.buffers = b""  # of all
        self._numbered: dict[NodeId, Seq] = {}
        self._taken: dict[SimProcess, int] = {}  # how many of its updates are committed
        self._below: dict[SimProcess, int] = {}  # how many of them its replica's commit covers
        self._trained: dict[int, Trained] = defaultdict(lambda: Trained([], []))
        self._added: dict[str, SimProcess] = {}
        self._ends: dict[SimProcess, Ending | Vain | None] = {}
        self._reached: dict[int, tuple[int, int]] = {}
        self._counted = 0  # minibatches, as last told
        self._beyond: dict[SimProcess, tuple[int, int]] = {}  # of what is uncommitted, and its own
        self._progress = (Phase.GATHERING, 0)
        self._is_calm = False

    def violation(self, text: str) -> None:
        """Note it, once."""
        if text not in self.violations:
            self.violations.append(text)

    def begin(self, size: Size, *, calm: bool) -> None:
        """Some minibatches of each partition may have been trained before this fit."""
        self._is_calm = calm
        for partition in range(size.nodes):
            if minibatches := size.start_of(partition).minibatches:
                self._trained[partition].spans.append((0, minibatches))
                self._counted += minibatches

    def started(self, process: SimProcess) -> None:
        self._trained[process.identity.partition].processes.append(process)

    # -- what theta is ---------------------------------------------------------------------------

    def _plus(self, theta: Theta, update: Committed) -> Theta:
        """With one more commit."""
        theta = list(theta)
        if update.payload.form != BUFFERS:
            add(theta, update.payload.data)
        return theta

    def _with_own(self, theta: Theta, made: list[Made]) -> Theta:
        """With updates that have no commit yet."""
        theta = list(theta)
        for update in made:
            if not update.buffers:
                add(theta, update.payload)
        return theta

    def _holds(self, replica: Any, theta: Theta) -> bool:
        """Is this what a replica, a worker's or the driver's, holds?"""
        return bool(replica.theta == theta)

    # -- while it runs ---------------------------------------------------------------------------

    def committed(self, process: SimProcess, update: Committed) -> None:
        """I2: per origin in order, each once, as it was made, and no minibatch twice."""
        expected = self._numbered.get(update.origin, 0) + 1
        if update.seq != expected or update.commit != len(self.commits) + 1:
            self.violation(f"I2: commit {update.commit} is ({update.origin}, {update.seq}), "
                           f"expected seq {expected}")  # fmt: skip
        self._numbered[update.origin] = update.seq
        self.commits.append(update)
        self._sums.append(self._plus(self._sums[-1], update))
        taken = self._taken.get(process, 0)
        if taken == len(process.made):
            self.violation(f"I2: commit {update.commit}: {process.name} made only {taken} updates")
            return
        made = process.made[taken]
        self._taken[process] = taken + 1
        made.commit = update.commit
        expected_payload = made.payload
        if made.buffers:
            self._reports[process.identity.partition] = made.payload
            expected_payload = average([self._reports[p] for p in sorted(self._reports)])
            self.buffers = expected_payload
        if expected_payload != update.payload.data:
            self.violation(f"I2: commit {update.commit} is not what {process.name} made")
        trained = self._trained[process.identity.partition]
        if made.first < trained.last:
            self.violation(f"I2: minibatch {made.first + 1} of partition "
                           f"{process.identity.partition} committed twice")  # fmt: skip
        trained.spans.append((made.first, made.last))

    def replica(self, process: SimProcess) -> None:
        """I2, I3: at a boundary theta is all commits up to its own plus what it made since."""
        commit, made = process.replica.commit, process.made
        if not process.installed or commit >= len(self._sums):
            return
        below = self._below.get(process, 0)
        while below < len(made) and (made[below].commit or commit + 1) <= commit:
            below += 1
        self._below[process] = below
        expected = self._with_own(self._sums[commit], made[below:])
        if not self._holds(process.replica, expected):
            self.violation(f"I3: {process.name} is not what its commit {commit} says")

    def released(self, process: SimProcess) -> None:
        """Only whose partition is trained is asked to give up its slot."""
        if self._missing(process.identity.partition, process.goal):
            self.violation(f"I2: {process.name} is asked to leave, and is not through")

    def borrowed(self, process: SimProcess) -> None:
        """An updater's state is one copy, of somebody else, who has trained."""
        for payload in process.borrowed:
            if payload is None:
                continue
            if self._lender(payload, process) == process.identity.attempt:
                self.violation(f"I3: {process.name} borrowed from itself")

    def copied(self, payloads: tuple[bytes, ...], processes: list[SimProcess]) -> None:
        """What the driver has for its checkpoint are whole copies of who has trained."""
        for payload in payloads:
            self._lender(payload, processes[0])
        if len(set(payloads)) < len(payloads):
            self.violation(f"I3: the driver has {len(payloads)} copies, and some twice")

    def _lender(self, payload: bytes, process: SimProcess) -> int:
        """Whose state it is, by its attempt."""
        starts = range(0, len(payload), process.copy_bytes)
        parts = {payload[start : start + UPDATER.size] for start in starts}
        attempt, steps, fresh = UPDATER.unpack(payload[: UPDATER.size])
        if len(parts) > 1 or not steps:
            self.violation(f"I3: {process.name} or the driver borrowed {payload.hex()}")
        if fresh:
            self.violation(f"I3: {process.name} or the driver borrowed a fresh state of {attempt}")
        return int(attempt)

    def bounds(self, master: Master, processes: list[SimProcess]) -> None:
        """What is bounded stays so, and what only grows does."""
        progress = (master.phases.phase, master.sequencer.head)
        if progress < self._progress:
            self.violation(f"I4: from {self._progress} back to {progress}")
        self._progress = progress
        log = master.sequencer.history.log
        if log.bytes > master.limits.log_bytes and len(tuple(log.after(log.base))) > 1:
            self.violation(f"I4: the log holds {log.bytes} bytes")
        for partition in master.partitions:
            if partition.position < self._reached.get(partition.index, (0, 0)):
                self.violation(f"I2: partition {partition.index} goes back")
            self._reached[partition.index] = partition.position
        for process in processes:
            if process.alive:
                self._node_bounds(process)

    def _node_bounds(self, process: SimProcess) -> None:
        me = process.node
        if len(me.own) > 1:
            *_, before, last = me.own.uncommitted  # an epoch's end may add both at once
            at_once = [before, last] if before.payload.form == BUFFERS else [last]
            newest = sum(HEADER_BYTES + len(update.payload) for update in at_once)
            if me.own.bytes - newest >= me.limits.window_bytes:
                self.violation(f"I4: {process.name} has {me.own.bytes} bytes uncommitted")
        self._staleness(process)
        if me.replication.history.whole and me.replication.history.applied > process.replica.commit:
            self.violation(f"I3: {process.name} claims a commit that its replica has not")
        log = me.replication.history.log
        if log.bytes > me.limits.log_bytes and len(tuple(log.after(log.base))) > 1:
            self.violation(f"I4: the log of {process.name} holds {log.bytes} bytes")

    def _staleness(self, process: SimProcess) -> None:
        """Who is too far beyond its oldest uncommitted update ends its step, and begins none.

        It may have come there while it trained alone.
        """
        me = process.node
        oldest, most = me.own.oldest, me.limits.max_staleness
        alone = me.fit.state is None or me.fit.state.training < 2
        if oldest is None or most is None or alone or process.steps <= oldest.steps + most:
            self._beyond.pop(process, None)
            return
        since, steps = self._beyond.get(process, (None, 0))
        if since != oldest.steps:  # between two looks one may be committed, and the next one not
            self._beyond[process] = oldest.steps, process.steps
        elif process.steps > steps + 1:
            self.violation(
                f"I4: {process.name} is at step {process.steps}, and that of step {oldest.steps} "
                f"is not committed, max_staleness is {most}"
            )

    def counted(self, master: Master) -> None:
        """What workers are told of the fit's minibatches never goes back, nor beyond the truth."""
        trained, told = master.partitions.minibatches, master.broadcast.minibatches
        if not self._counted <= told <= trained:
            self.violation(f"I2: {told} of {trained} minibatches are told, "
                           f"{self._counted} were before")  # fmt: skip
        self._counted = told

    def lead(self, processes: list[SimProcess], lead: int) -> None:
        """Nobody is further ahead of the slowest than allowed; only where nobody joins late."""
        steps = [p.steps for p in processes if p.alive and not p.finished]
        if steps and max(steps) > min(steps) + lead:
            self.violation(f"I4: {max(steps)} steps beside {min(steps)}, max_lead is {lead}")

    def added(self, process: SimProcess) -> None:
        """I1: what was kept by an earlier fit is added once in all."""
        for path in process.added:
            if self._added.setdefault(path, process) is not process:
                self.violation(f"I1: {path} added by {self._added[path].name} and {process.name}")
        if len(set(process.added)) < len(process.added):
            self.violation(f"I1: {process.name} added a file twice")

    # -- ends ------------------------------------------------------------------------------------

    def ended(self, process: SimProcess, command: Directive) -> None:
        """A task that ends with success."""
        self._ends[process] = command.why
        if command.why not in GOOD_ENDS:
            self.violation(f"I5: {process.name} ended with success: {command.reason}")

    def failed(self, process: SimProcess, command: Directive, *, expected: bool) -> None:
        """A task that fails: superseded by another attempt, or for a reason that it was given."""
        attempts = [p.identity.attempt for p in self._processes_of(process)]
        superseded = command.why is Ending.SUPERSEDED
        superseded = superseded and process.identity.attempt < max(attempts)
        excused = process.failing and command.reason == FAILURE
        if not (superseded or excused or expected):
            self.violation(f"I5: {process.name} failed: {command.reason}")

    def aborted(self, abort: Abort, *, nobody: bool) -> None:
        """A fit that fails must name a worker whose training raised, or lack workers."""
        if nobody and abort.lack is not None:
            return
        where = (abort.host, abort.partition)
        raised = [
            p
            for trained in self._trained.values()
            for p in trained.processes
            if p.failing and (p.identity.host, p.identity.partition) == where
        ]
        if not raised or abort.reason != FAILURE:
            self.violation(f"I5: aborted: {abort.reason} ({abort.host}, {abort.partition})")

    def _processes_of(self, process: SimProcess) -> list[SimProcess]:
        return self._trained[process.identity.partition].processes

    def at_end(self, master: Master, replica: Any, processes: list[SimProcess]) -> None:
        """I1 to I5, once the fit is over."""
        for process in processes:
            self.borrowed(process)
            if not process.learner.conserves():
                self.violation(f"I1: {process.name} lost mass")
            if process.alive and (master.aborted or master.phases.phase is Phase.DONE):
                self.violation(f"I4: {process.name} did not end: {process.node.command}")
        if master.phases.phase is not Phase.DONE:
            return
        if not self._holds(replica, self._sums[-1]):
            self.violation("I2: the master's replica is not the sum of all commits")
        if replica.buffers != self.buffers:
            self.violation("I3: the master's buffers are not the average of the newest reports")
        if master.phases.own_digest != replica.digest():
            self.violation("I3: the master's hash is not that of its replica")
        for node, digest in master.phases.digests.items():
            if digest != master.phases.own_digest:
                self.violation(f"I3: node {node} differs from the master")
        self._ends_match(master)
        for partition in master.partitions:
            whole = master.phases.stop_reason is None
            goal = partition.epochs * max(0, partition.batches)
            self._covers(partition.index, goal if whole else partition.minibatches)
        self._kept_mass(master)
        self._last_copies(master)

    def _last_copies(self, master: Master) -> None:
        """Where nothing went wrong, the end has whole copies of all it waited for."""
        wanted = master.limits.last_copies
        if wanted is None or not self._is_calm or master.members.departures:
            return
        able = len(master.sources.able(MASTER))
        count = able if wanted.everybody else min(able, 1)
        if len(master.copies.copied) != count:
            self.violation(f"I4: {len(master.copies.copied)} last copies instead of {count}")

    def _ends_match(self, master: Master) -> None:
        """Whoever ended as done was audited, and with the right bytes."""
        final = self._sums[-1]
        for process, ending in self._ends.items():
            if ending is not Ending.DONE:
                continue
            if process.node.node not in master.phases.digests:
                self.violation(f"I3: {process.name} ended as done and was not audited")
            if not self._holds(process.replica, final):
                self.violation(f"I3: {process.name} ended with another replica")

    def _covers(self, index: int, goal: int) -> None:
        """Each minibatch is inside one committed update, or sent nothing when it was trained."""
        trained = self._trained[index]
        if missing := self._missing(index, goal):
            self.violation(f"I2: partition {index}: minibatches {sorted(missing)} of {goal} "
                           "are in no committed update")  # fmt: skip
        if trained.last > goal:
            self.violation(f"I2: partition {index}: {trained.last} of {goal} minibatches committed")

    def trained_since(self, index: int, before: int, upto: int) -> list[int]:
        """Minibatches of a partition in this run's commits; those that sent nothing up to there."""
        trained = self._trained[index]
        sent = [n for a, b in trained.spans if b > before for n in range(a + 1, b + 1)]
        quiet: set[int] = set().union(*(p.quiet for p in trained.processes))
        return sent + sorted({n for n in quiet if before < n <= upto} - set(sent))

    def copy_holds(self, replica: Any) -> None:
        """I2: the driver's copy is the sum of all commits so far."""
        if not self._holds(replica, self._sums[-1]):
            self.violation(f"I2: a copy at commit {len(self.commits)} is not the sum of commits")

    def _missing(self, index: int, goal: int) -> set[int]:
        """Minibatches up to the goal that are neither committed nor trained without sending."""
        trained = self._trained[index]
        quiet: set[int] = set().union(*(p.quiet for p in trained.processes))
        missing = set(range(1, goal + 1)) - quiet
        for first, last in trained.spans:
            missing -= set(range(first + 1, last + 1))
        return missing

    def _kept_mass(self, master: Master) -> None:
        """I1 between fits: what was kept was taken in by somebody who lived, or counts as lost."""
        checkpoints = master.checkpoints
        made = {path for files in checkpoints.files.values() for path in files}
        good = [
            process
            for trained in self._trained.values()
            for process in trained.processes
            if process.node.node in master.phases.digests
            or (process.left is not None and process.left.path in made)
        ]
        used = {path for process in good for path in process.added}
        lost = sum(size for path, size in self._kept.items() if path not in used)
        if checkpoints.lost_mass != lost:
            self.violation(f"I1: {checkpoints.lost_mass} of kept mass counted as lost, not {lost}")
        for process, ending in self._ends.items():
            left = process.left.path if process.left is not None else None
            if ending in (Ending.DONE, Ending.RELEASED) and left not in made:
                self.violation(f"I1: what {process.name} left for the next fit is not known")
