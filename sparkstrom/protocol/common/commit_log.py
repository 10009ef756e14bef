"""Keep recent commits, so that a node can send its children in the tree those that they lack.

A commit is an update that the master has numbered, and a child receives the commits in the order of
their numbers. What it lacks is therefore one range of numbers. If its commits would take more bytes
than their sum, the sum is sent. A child that lacks older commits than the log still has fetches a
snapshot (a copy of all parameters).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sparkstrom.base.identity import CommitNo, NodeId, Seq
from sparkstrom.codec.messages import BUFFERS, Commit, LastSeqs, MergedRange
from sparkstrom.protocol.common.flow_control import HEADER_BYTES, LAST_SEQ_BYTES

Entry = Commit | MergedRange  # a MergedRange is the sum of several successive commits


def preceding_commit(entry: Entry) -> CommitNo:
    """Return the commit that a replica must have reached before it can add this entry."""
    return entry.after if isinstance(entry, MergedRange) else CommitNo(entry.commit - 1)


def entry_bytes(entry: Entry) -> int:
    """Return the number of bytes that an entry takes up in a log."""
    if isinstance(entry, Commit):
        return HEADER_BYTES + len(entry.payload)
    return HEADER_BYTES + len(entry.payload) + LAST_SEQ_BYTES * len(entry.last)


def is_summable(entry: Entry) -> bool:
    """Return whether an entry can be part of a sum, because it only adds to parameters."""
    return isinstance(entry, MergedRange) or entry.payload.form != BUFFERS


def count_changed_params(entry: Entry) -> int:
    """Return how many parameters an entry changes; for a sum, return an estimate."""
    return entry.count if isinstance(entry, MergedRange) else entry.payload.count


class Log:
    """The newest commits without a gap, limited in bytes: the oldest are dropped first.

    The newest entry is always kept, whatever its size. An entry is one commit or a sum of several;
    a child can continue only at the boundary of an entry.
    """

    def __init__(self, bytes_max: int, base: CommitNo = CommitNo(0)) -> None:
        self.bytes_max = bytes_max
        # Preceding commit -> entry, and its offset in the bytes ever appended.
        self._entries: dict[CommitNo, tuple[Entry, int]] = {}
        self._begin = self._end = 0  # offsets, in bytes ever appended
        self.base = base  # the newest commit that is no longer in the log
        self.head = base  # the newest commit in the log, or ``base`` if it is empty

    @property
    def bytes(self) -> int:
        """Return the size of all entries in the log, in bytes."""
        return self._end - self._begin

    @property
    def appended(self) -> int:
        """Return the total bytes appended since creation."""
        return self._end

    def append(self, entry: Entry) -> None:
        """Append the next entry, and drop the oldest entries beyond ``bytes_max``."""
        assert preceding_commit(entry) == self.head, "a log has no gaps"
        self._entries[self.head] = entry, self._end
        self._end += entry_bytes(entry)
        self.head = entry.commit
        while self._end - self._begin > self.bytes_max and len(self._entries) > 1:
            oldest, _ = self._entries.pop(self.base)
            self._begin += entry_bytes(oldest)
            self.base = oldest.commit

    def entry_after(self, commit: CommitNo) -> Entry:
        """Return the entry that follows ``commit``, which the log must reach."""
        return self._entries[commit][0]

    def reaches(self, commit: CommitNo) -> bool:
        """Return whether a replica that is at ``commit`` can continue from this log."""
        return commit >= self.head or commit in self._entries

    def bytes_after(self, commit: CommitNo) -> int:
        """Return the bytes of all entries after ``commit``, which the log must reach."""
        return self._end - self._entries[commit][1] if commit < self.head else 0

    def entries_after(self, commit: CommitNo) -> Iterator[Entry]:
        """Yield all entries after ``commit``, which the log must reach."""
        while commit < self.head:
            entry = self.entry_after(commit)
            yield entry
            commit = entry.commit


@dataclass(slots=True)
class History:
    """A node's log, each origin's newest update in it, and how current the node's replica is.

    An origin is a worker, by its id, that made an update; its updates are numbered (seq).
    """

    log: Log
    last: dict[NodeId, Seq] = field(default_factory=dict)  # id -> newest committed seq
    applied: CommitNo = CommitNo(0)  # the replica contains every commit up to this one
    whole: bool = False  # the node holds a replica that children may copy
    merged: CommitNo = CommitNo(0)  # newest commit that came inside a sum

    @property
    def base(self) -> CommitNo:
        """Return the commit that every chunk of a snapshot begun now will contain at least."""
        return max(self.applied, self.log.base, self.merged)

    def append(self, entry: Entry) -> None:
        """Append an entry, which must follow the last one, and update ``last`` and ``merged``."""
        self.log.append(entry)
        if isinstance(entry, MergedRange):
            self.last.update(entry.last)
            self.merged = entry.commit
        else:
            self.last[entry.origin] = entry.seq

    def restart_at(self, base: CommitNo, last: LastSeqs) -> None:
        """Empty the log and continue after a snapshot as of commit ``base``.

        ``last`` has each origin's newest sequence number in the snapshot.
        """
        self.log, self.last = Log(self.log.bytes_max, base), dict(last)
        self.applied, self.whole = base, False

    def last_seqs_at(self, base: CommitNo) -> LastSeqs:
        """Return every origin's newest sequence number as of ``base``, by undoing later entries."""
        last = dict(self.last)
        for entry in self.log.entries_after(base):
            assert isinstance(entry, Commit), "a copy never begins before a sum"
            last[entry.origin] = min(last[entry.origin], Seq(entry.seq - 1))
        return list(last.items())


def last_seqs_of(entries: Iterable[Entry]) -> LastSeqs:
    """Return the newest sequence number of each origin that has an update in these entries."""
    last: dict[NodeId, Seq] = {}
    for entry in entries:
        if isinstance(entry, MergedRange):
            last.update(entry.last)
        else:
            last[entry.origin] = entry.seq
    return list(last.items())
