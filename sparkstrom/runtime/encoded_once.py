"""Encoded once: what goes to several children is summed, and encoded, for the first of them.

A log hands the same commit to all, and children that stand at the same place get the same sum; only
the seal is each one's own. Both are kept until the next flush: nearly all children are fed in the
duty cycle in which a commit comes, and what is kept waits in their outboxes as well.
"""

from __future__ import annotations

from collections.abc import Callable

from sparkstrom.codec.frames import pieces_of
from sparkstrom.codec.messages import Committed, MergedRange, Message
from sparkstrom.codec.wire import Kind, encode
from sparkstrom.protocol.common.events import SendMerged

FOR_SEVERAL = (Committed, MergedRange)


class EncodedOnce:
    """Bodies in pieces. A message is known by its identity: comparing would cost what it saves."""

    def __init__(self) -> None:
        # With the message, so that no other one gets its id meanwhile.
        self._known: dict[tuple[int, int], tuple[Message, Kind, list[bytes]]] = {}

    def of(self, message: Message, piece_bytes: int) -> tuple[Kind, list[bytes]]:
        """The message's kind, and its body in pieces of so many bytes at most."""
        key = id(message), piece_bytes
        if (known := self._known.get(key)) is not None:
            return known[1], known[2]
        kind, body = encode(message)
        pieces = pieces_of(body, piece_bytes)
        if isinstance(message, FOR_SEVERAL):
            self._known[key] = message, kind, pieces
        return kind, pieces

    def forget(self) -> None:
        """The duty cycle is over."""
        self._known.clear()


class SummedOnce:
    """Sums by their range, and by how many entries sender and receiver reckon with."""

    def __init__(self, merge: Callable[[SendMerged], MergedRange]) -> None:
        self._merge = merge
        self._known: dict[tuple[int, int, int], MergedRange] = {}

    def of(self, wanted: SendMerged) -> MergedRange:
        """The sum of these commits."""
        key = wanted.after, wanted.commit, wanted.count
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._merge(wanted)
        return known

    def forget(self) -> None:
        """The duty cycle is over."""
        self._known.clear()
