"""Traffic: what one node has handed over to be sent and has taken, in bytes and frames."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from sparkstrom.codec.frames import Rejection
from sparkstrom.codec.messages import Chunk, Committed, MergedRange, Message, Update, UpdaterChunk

KINDS: dict[type[Message], str] = {
    Update: "updates",  # on their way to the master, at each hop
    Committed: "commits",  # on their way to everybody, at each hop
    MergedRange: "sums",  # of commits, for whoever cannot take each of them
    Chunk: "snapshots",  # parameters, for whoever joins late or cannot catch up
    UpdaterChunk: "optimizer_states",  # for whoever joins late
}
CONTROL = "control"  # all others


@dataclass(slots=True)
class Traffic:
    """Bytes and frames, cumulative."""

    wire_bytes: int = 0  # handed over to be sent, on every stream; runtime/wire_bytes: what left
    update_bytes: int = 0  # sealed updates of our own, the first time they were sent
    received_bytes: int = 0
    rejected: Counter[Rejection] = field(default_factory=Counter)  # frames not taken, and why
    not_queued: int = 0
    by_kind: Counter[str] = field(default_factory=Counter)  # of wire_bytes

    @property
    def strange(self) -> int:
        """Frames of strangers, damaged ones and replays.

        Early frames are not among them: at a healthy start a parent's first frame may arrive before
        the master's order that opens the edge to it. It has this fit's seal and is sent again.
        """
        return self.rejected.total() - self.rejected[Rejection.EARLY]

    def count_sent(self, message: Message, frames: Iterable[bytes]) -> None:
        """These frames of it are handed over."""
        size = sum(map(len, frames))
        self.wire_bytes += size
        self.by_kind[KINDS.get(type(message), CONTROL)] += size
