"""History: the recent commits, for those who have not had them yet.

The root numbers every update, so "seen" is one integer, not a set that grows for ever. What a
child misses is a range that it can name, in a bounded log. Where single commits would cost more
than their sum, the sum is sent; whoever asks for more than the log still holds takes a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from sparkstrom.base.identity import CommitNo, NodeId, Seq
from sparkstrom.codec.messages import BUFFERS, Committed, LastSeqs, MergedRange
from sparkstrom.protocol.common.send_window import HEADER_BYTES, LAST_SEQ_BYTES

Entry = Committed | MergedRange


def before(entry: Entry) -> CommitNo:
    """The commit that a replica must be at to take this one."""
    return entry.after if isinstance(entry, MergedRange) else CommitNo(entry.commit - 1)


def cost(entry: Entry) -> int:
    """Bytes that an entry takes up in a log."""
    if isinstance(entry, Committed):
        return HEADER_BYTES + len(entry.payload)
    return HEADER_BYTES + len(entry.payload) + LAST_SEQ_BYTES * len(entry.last)


def adds(entry: Entry) -> bool:
    """Does it add to parameters, so that it can be part of a sum?"""
    return isinstance(entry, MergedRange) or entry.payload.form != BUFFERS


def entries_in(entry: Entry) -> int:
    """How many parameters it moves; of a sum, about."""
    return entry.count if isinstance(entry, MergedRange) else entry.payload.count


class Log:
    """The newest commits, without a gap, bounded in bytes: the oldest go first.

    One commit of any size is always admitted. Who was behind got some of them as one sum; nobody
    can be served from inside of that.
    """

    def __init__(self, bytes_max: int, base: CommitNo = CommitNo(0)) -> None:
        self.bytes_max = bytes_max
        self._entries: dict[
            CommitNo, tuple[Entry, int]
        ] = {}  # by ``before``; with the offset in bytes
        self._begin = self._end = 0  # offsets, in bytes ever appended
        self.base = base  # the newest commit that is not in the log any more
        self.head = base

    @property
    def bytes(self) -> int:
        return self._end - self._begin

    @property
    def appended(self) -> int:
        """Bytes ever."""
        return self._end

    def append(self, entry: Entry) -> None:
        assert before(entry) == self.head, "a log has no gaps"
        self._entries[self.head] = entry, self._end
        self._end += cost(entry)
        self.head = entry.commit
        while self._end - self._begin > self.bytes_max and len(self._entries) > 1:
            oldest, _ = self._entries.pop(self.base)
            self._begin += cost(oldest)
            self.base = oldest.commit

    def next(self, commit: CommitNo) -> Entry:
        """What follows ``commit``, which the log reaches and is not its head."""
        return self._entries[commit][0]

    def reaches(self, commit: CommitNo) -> bool:
        """Could somebody who is at ``commit`` go on from here?"""
        return commit >= self.head or commit in self._entries

    def bytes_after(self, commit: CommitNo) -> int:
        """Of all that follows ``commit``, which the log reaches."""
        return self._end - self._entries[commit][1] if commit < self.head else 0

    def after(self, commit: CommitNo) -> Iterator[Entry]:
        """All that follows ``commit``, which the log reaches."""
        while commit < self.head:
            entry = self.next(commit)
            yield entry
            commit = entry.commit


@dataclass(slots=True)
class History:
    """What a node can tell others of the past: its log, and how far every origin's updates got."""

    log: Log
    last: dict[NodeId, Seq] = field(default_factory=dict)  # id -> newest committed seq
    applied: CommitNo = CommitNo(0)  # its replica has this commit at least
    whole: bool = False  # it holds a replica that others may copy
    merged: CommitNo = CommitNo(0)  # newest commit that came inside of a sum

    @property
    def base(self) -> CommitNo:
        """From where a copy of this replica goes on."""
        return max(self.applied, self.log.base, self.merged)

    def append(self, entry: Entry) -> None:
        """The next commits, in order."""
        self.log.append(entry)
        if isinstance(entry, MergedRange):
            self.last.update(entry.last)
            self.merged = entry.commit
        else:
            self.last[entry.origin] = entry.seq

    def begin_at(self, base: CommitNo, last: LastSeqs) -> None:
        """Start again from a snapshot as of ``base``."""
        self.log, self.last = Log(self.log.bytes_max, base), dict(last)
        self.applied, self.whole = base, False

    def last_at(self, base: CommitNo) -> LastSeqs:
        """How far every origin was at ``base``: the newest, less what the log has after it."""
        last = dict(self.last)
        for entry in self.log.after(base):
            assert isinstance(entry, Committed), "a copy never begins before a sum"
            last[entry.origin] = min(last[entry.origin], Seq(entry.seq - 1))
        return list(last.items())


def last_of(entries: Iterable[Entry]) -> LastSeqs:
    """Per id with an update among these: the newest seq."""
    last: dict[NodeId, Seq] = {}
    for entry in entries:
        if isinstance(entry, MergedRange):
            last.update(entry.last)
        else:
            last[entry.origin] = entry.seq
    return list(last.items())
