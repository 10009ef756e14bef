"""Staleness: how old learning is when it is committed, in minibatches that others took meanwhile.

A step begins with all that its worker knew, its own learning included. Until what it learns has a
number, the others go on: so many of their minibatches it did not know, and they did not know it.
Where k workers take turns and nobody waits, that is k - 1: one round.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field

from sparkstrom.base.identity import CommitNo, NodeId

REMEMBERED = 1 << 14  # commits; what was made on older ones counts as made on the oldest of these
MARKS = 256  # of a worker's own progress that it may not have seen, likewise


@dataclass(slots=True)
class _Worker:
    minibatches: int = 0  # its own minibatches
    known: int | None = None  # the others', as it knew them at its last publication
    # (commit, own minibatches with that commit), from the last one that it has seen
    marks: deque[tuple[CommitNo, int]] = field(
        default_factory=lambda: deque([(CommitNo(0), 0)], MARKS)
    )


class Staleness:
    """The master's: fed with what is committed, in order."""

    def __init__(self) -> None:
        self.most = 0.0  # of any minibatch
        self._sum, self._count = 0.0, 0
        self._minibatches, self._head = 0, CommitNo(0)
        self._at = array("q", bytes(8 * REMEMBERED))  # commit % size -> minibatches with it
        self._workers: dict[NodeId, _Worker] = {}

    @property
    def mean(self) -> float:
        """Over all minibatches that came with an update."""
        return self._sum / self._count if self._count else 0.0

    def committed(self, node: NodeId, commit: CommitNo, seen: CommitNo, minibatches: int) -> None:
        """An update of so many minibatches, the last of which began with all up to ``seen``.

        Those before it are taken to have begun evenly between the last publication and this one.
        """
        worker = self._workers.setdefault(node, _Worker())
        if minibatches:
            known = self._others(worker, seen)
            before = known if worker.known is None else worker.known
            worker.known = known
            now = self._minibatches - worker.minibatches
            per_minibatch = max(0, known - before) / minibatches
            oldest = max(0.0, now - known + per_minibatch * (minibatches - 1))
            newest = max(0.0, now - known)
            self.most = max(self.most, oldest)
            self._sum += minibatches * (oldest + newest) / 2
            self._count += minibatches
        self._take(node, minibatches, commit)
        self._head = commit
        self._at[commit % REMEMBERED] = self._minibatches

    def sent_nothing(self, node: NodeId, minibatches: int) -> None:
        """So many are trained without an update: they stand with the next commit."""
        if minibatches:
            self._take(node, minibatches, CommitNo(self._head + 1))

    def forget(self, node: NodeId) -> None:
        """Its id is closed."""
        self._workers.pop(node, None)

    def _take(self, node: NodeId, minibatches: int, commit: CommitNo) -> None:
        worker = self._workers.setdefault(node, _Worker())
        self._minibatches += minibatches
        worker.minibatches += minibatches
        if worker.marks[-1][0] == commit:
            worker.marks.pop()
        worker.marks.append((commit, worker.minibatches))

    def _others(self, worker: _Worker, seen: CommitNo) -> int:
        """Minibatches of the others with commit ``seen``, or the nearest that is remembered."""
        at = max(min(seen, self._head), self._head - REMEMBERED + 1)
        marks = worker.marks
        while len(marks) > 1 and marks[1][0] <= at:
            marks.popleft()
        own = marks[0][1] if marks[0][0] <= at else 0
        return self._at[at % REMEMBERED] - own
