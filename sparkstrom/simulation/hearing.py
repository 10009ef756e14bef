"""Hearing: what message endpoints must be good for, seen from outside.

On an edge, whatever is heard was said there, in that order and once; what is not repeated anyway
is heard as long as the stream lives. Directly, nobody hears what was not said to it, or twice.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping

from sparkstrom.base.identity import MASTER, NodeId
from sparkstrom.codec.frames import Rejection
from sparkstrom.codec.messages import Message
from sparkstrom.codec.wire import encode, is_data
from sparkstrom.protocol.common.send_window import HEADER_BYTES
from sparkstrom.runtime.message_endpoint import MessageEndpoint
from sparkstrom.runtime.outbox import ANSWER_FRAMES_MAX, ANSWERS_MAX
from sparkstrom.simulation.scene import Scene
from sparkstrom.simulation.sim_process import EdgeEnd, SimProcess

PIECE_BYTES_MIN = 32  # of data in a frame: what the least media driver takes
CONTROL_FRAMES_MAX = 64  # to a neighbour: what is repeated there meanwhile
COMES = frozenset(
    {Rejection.AGAIN, Rejection.EARLY, Rejection.OTHER_EDGE, Rejection.OTHER_RECEIVER}
)
RECORDED = COMES | {Rejection.SEAL, Rejection.NOT_DIRECT, Rejection.OTHER_STREAM}

Key = tuple[int, SimProcess | None, bool]  # edge, sender, data


class Hearing:
    """Violations of one run go to ``violation``."""

    def __init__(self, violation: Callable[[str], None]) -> None:
        self.violation = violation
        self._said: dict[Key, deque[tuple[Message, float]]] = defaultdict(deque)
        self._directly: Counter[tuple[int | None, bytes]] = Counter()  # token (None: the master)

    def said(self, edge: int, owner: SimProcess | None, message: Message, must_s: float) -> None:
        """Over an edge, at ``must_s``; 0: it is said again anyway, and need not be heard."""
        self._said[edge, owner, is_data(message)].append((message, must_s))

    def said_directly(self, token: int | None, message: Message) -> None:
        """To this process, or to the master."""
        self._directly[token, encode(message)[1]] += 1

    def heard(
        self,
        owner: SimProcess | None,
        sender: NodeId | None,
        slot: EdgeEnd | None,
        message: Message,
    ) -> None:
        """``slot``: the edge that ``owner`` has to the sender."""
        said = self._said[slot.edge, slot.target, is_data(message)] if slot else deque()
        index = next((i for i, (earlier, _) in enumerate(said) if earlier == message), None)
        if index is not None:
            skipped = [said.popleft() for _ in range(index + 1)][:-1]
            assert slot is not None, "it has an index there"
            for lost in (type(m).__name__ for m, must_s in skipped if must_s > slot.opened_s):
                self.violation(f"I2: {_name(owner)} did not hear {lost} on a stream that lives")
            return
        key = None if owner is None else owner.identity.token, encode(message)[1]
        if sender not in (None, MASTER) or not self._directly[key]:
            what = f"{type(message).__name__} of {sender}"
            self.violation(f"I7: {_name(owner)} heard {what}, which was not said, or again")
        self._directly[key] -= 1

    def bounds(self, scene: Scene, ends: Mapping[SimProcess | None, MessageEndpoint]) -> None:
        """What waits in an outbox is what the machine's windows let out, cut into least pieces."""
        size = scene.size
        weight = size.serving.window_max + 2 * size.log_bytes + CONTROL_FRAMES_MAX * HEADER_BYTES
        for owner, end in ends.items():
            edges = scene.master.children.by_node if owner is None else owner.slots
            most = len(edges) * weight // PIECE_BYTES_MIN + ANSWERS_MAX * ANSWER_FRAMES_MAX
            if end.waiting > most:
                self.violation(f"I4: {end.waiting} frames wait at {_name(owner)}, {most} may")

    def at_end(
        self, ends: Mapping[SimProcess | None, MessageEndpoint], *, recordings: bool
    ) -> None:
        """Frames that were not taken came again, or too late, or were a stranger's."""
        usual = RECORDED if recordings else COMES  # recordings come to others, too
        for owner, end in ends.items():
            if odd := end.traffic.rejected.keys() - usual:
                self.violation(f"I7: {_name(owner)} did not take frames: {', '.join(sorted(odd))}")


def _name(owner: SimProcess | None) -> str:
    return "the master" if owner is None else owner.name
