"""Transit: updates of others that a relay handed up and has not seen come down with a number.

A relay may have nothing of its own to send, so it would not notice that its stream upwards is dead.
"""

from __future__ import annotations

from sparkstrom.codec.messages import LastSeqs


class Transit:
    """Newest seq handed up, by origin; and since when nothing of them has come down."""

    def __init__(self) -> None:
        self._newest: dict[int, int] = {}
        self.progress_s = 0.0

    def __len__(self) -> int:
        return len(self._newest)

    def passed(self, origin: int, seq: int, now_s: float) -> None:
        """Handed up just now."""
        if not self._newest:
            self.progress_s = now_s
        self._newest[origin] = max(seq, self._newest.get(origin, 0))

    def committed(self, last: LastSeqs, now_s: float) -> None:
        """These origins are numbered up to here."""
        for origin, seq in last:
            if origin in self._newest:
                self.progress_s = now_s
                if seq >= self._newest[origin]:
                    del self._newest[origin]

    def forget(self) -> None:
        """The edge is another one, or somebody below has left: who still cares sends again."""
        self._newest.clear()
