"""A replica in whole numbers: enough to see a lost, a repeated or a misplaced update.

An update's payload is a run of (index u8, amount i8) pairs; adding it is exact, as the real
grid's arithmetic is.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections import deque
from collections.abc import Iterable

from sparkstrom.codec.messages import BUFFERS, Chunk, Committed, MergedRange
from sparkstrom.protocol.common.events import DeliverMerged, Install, SendMerged
from sparkstrom.runtime.trainer_inbox import Merged
from sparkstrom.simulation.weights import padded

SIZE = 12
CHUNK = 4
CHUNKS = SIZE // CHUNK + 1  # the last has the buffers
PAIR = struct.Struct("<Bb")
CELL = struct.Struct(f"<{CHUNK}q")
SUM = struct.Struct(f"<{SIZE}q")

TAU = 3
SUM_UPDATES_MAX = 5  # few, so that some sums are followed by another

Theta = list[int]
INITIAL = tuple(range(1, SIZE + 1))  # the parameters that a fit begins with


def add(theta: Theta, payload: bytes) -> None:
    """Add one update."""
    for index, amount in PAIR.iter_unpack(payload):
        if not amount:
            break  # zeros up to a real update's length
        theta[index] += amount


def total(payloads: Iterable[bytes]) -> Theta:
    """The sum of some updates."""
    theta = [0] * SIZE
    for payload in payloads:
        add(theta, payload)
    return theta


def merge(entries: Iterable[Committed | MergedRange]) -> bytes:
    """The sum of some entries of a log, as it travels."""
    theta = [0] * SIZE
    for entry in entries:
        if isinstance(entry, MergedRange):
            theta = [a + b for a, b in zip(theta, SUM.unpack_from(entry.payload), strict=True)]
        else:
            add(theta, entry.payload)
    return SUM.pack(*theta)


def merged_range(effect: SendMerged, size: int = 0) -> MergedRange:
    """The message that the effect asks for, with a payload of at least ``size`` bytes."""
    return MergedRange(
        after=effect.after,
        commit=effect.commit,
        last=effect.last,
        count=effect.count,
        payload=padded(merge(effect.entries), size),
    )


def average(reports: list[bytes]) -> bytes:
    """One for all: here simply all of them, so that a wrong one is seen."""
    return b"".join(reports)


class SimSum:
    """Some commits of others that wait for a trainer, as one."""

    __slots__ = ("_count", "theta")

    def __init__(self) -> None:
        self.theta: Theta = [0] * SIZE
        self._count = 0

    def add_update(self, update: Committed) -> bool:
        """Add one; False where there are as many as it can take."""
        if self._count == SUM_UPDATES_MAX:
            return False
        add(self.theta, update.payload)
        self._count += 1
        return True


class SimReplica:
    """theta as integers; ``own``: what its trainer added and has not seen committed.

    ``chunk_bytes``: how long its chunks are at least, but that of the buffers.
    """

    __slots__ = ("_chunk_bytes", "buffers", "commit", "own", "theta")

    def __init__(self, chunk_bytes: int = 0, *, whole: bool = True) -> None:
        self._chunk_bytes = chunk_bytes
        self.theta: Theta = list(INITIAL) if whole else [0] * SIZE
        self.commit = 0
        self.own: deque[bytes] = deque()
        self.buffers = b""

    def apply_update(self, update: Committed) -> None:
        """Add the next commit of somebody else."""
        add(self.theta, update.payload)
        self.commit = update.commit

    def take_buffers(self, buffers: bytes, commit: int) -> None:
        """The next commit is the average of all workers' buffers."""
        self.buffers, self.commit = buffers, commit

    def publish_buffers(self) -> None:
        """Buffers of its own are under way: they add nothing."""
        self.own.append(b"")

    def publish(self, payload: bytes) -> None:
        """Add an update of its own."""
        add(self.theta, payload)
        self.own.append(payload)

    def passed(self, commit: int) -> None:
        """Its oldest own update is committed."""
        self.own.popleft()
        self.commit = commit

    def apply_merged(self, merged: Merged[SimSum]) -> None:
        """Add many of somebody else's commits, summed here, with its own among them."""
        self._add_sum(merged.total.theta, merged.passed, merged.commit)

    def apply_range(self, item: DeliverMerged) -> None:
        """Add many commits at once, less its own."""
        total_of_own = total(update.payload for update in item.own)
        merged = SUM.unpack_from(item.merged.payload)
        others = [all_of_it - mine for all_of_it, mine in zip(merged, total_of_own, strict=True)]
        self._add_sum(others, len(item.own), item.merged.commit)

    def _add_sum(self, others: Theta, passed: int, commit: int) -> None:
        for i in range(SIZE):
            self.theta[i] += others[i]
        for _ in range(passed):
            self.own.popleft()
        self.commit = commit

    def install(self, install: Install) -> None:
        """Take a snapshot, what each chunk of it lacks, and the node's own uncommitted updates."""
        *cells, buffers = install.chunks[:CHUNKS]  # what follows is there for its length
        self.theta = [value for chunk in cells for value in CELL.unpack_from(chunk.payload)]
        self.buffers = buffers.payload
        has = [chunk.commit for chunk in cells]
        for committed in install.held:
            if isinstance(committed, MergedRange):
                for index, amount in enumerate(SUM.unpack_from(committed.payload)):
                    if committed.after >= has[index // CHUNK]:
                        self.theta[index] += amount
                continue
            if committed.form == BUFFERS:
                newer = committed.commit > buffers.commit
                self.buffers = committed.payload if newer else self.buffers
                continue
            for index, amount in PAIR.iter_unpack(committed.payload):
                if not amount:
                    break
                if committed.commit > has[index // CHUNK]:
                    self.theta[index] += amount
        self.own = deque(b"" if u.form == BUFFERS else u.payload for u in install.own)
        for payload in self.own:
            add(self.theta, payload)
        self.commit = install.commit

    def begin(self) -> None:
        """It goes on from the parameters that it was made with."""

    def hold_back(self) -> None:
        """What was learnt stays with its learner."""

    def chunk(self, index: int) -> Chunk:
        """Part of this replica as of its commit: without its own uncommitted updates."""
        size = self._chunk_bytes
        if index >= CHUNKS:
            return Chunk(index=index, commit=self.commit, payload=padded(b"", size))
        if index == CHUNKS - 1:
            return Chunk(index=index, commit=self.commit, payload=self.buffers)
        mine = total(self.own)
        cells = range(index * CHUNK, (index + 1) * CHUNK)
        part = [self.theta[i] - mine[i] for i in cells]
        return Chunk(index=index, commit=self.commit, payload=padded(CELL.pack(*part), size))

    def digest(self) -> str:
        """A hash of theta and buffers."""
        return hashlib.sha256(repr(self.theta).encode() + self.buffers).hexdigest()


class SimLearner:
    """What a trainer learns and has not sent: the residual, in whole numbers."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.residual: Theta = [0] * SIZE
        self.learnt = 0
        self.sent = 0

    def step(self) -> None:
        """Learn something."""
        for _ in range(self._chance.randint(1, 4)):
            amount = self._chance.choice((-3, -2, 2, 3))
            self.residual[self._chance.randrange(SIZE)] += amount
            self.learnt += amount

    def publish(self) -> bytes:
        """The payload of what reached the threshold, perhaps empty."""
        out = []
        for index, value in enumerate(self.residual):
            if abs(value) >= TAU:
                sign = TAU if value > 0 else -TAU
                self.residual[index] -= sign
                self.sent += sign
                out.append(PAIR.pack(index, sign))
        return b"".join(out)

    def add(self, residual: Theta) -> None:
        """What another fit left: residuals add."""
        self.residual = [a + b for a, b in zip(self.residual, residual, strict=True)]
        self.learnt += sum(residual)

    def conserves(self) -> bool:
        """I1: all that came in was sent or is still here."""
        return self.learnt == self.sent + sum(self.residual)


def mass(residual: Theta) -> float:
    """Sum of absolute values."""
    return float(sum(map(abs, residual)))
