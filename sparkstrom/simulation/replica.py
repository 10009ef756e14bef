"""A toy replica and trainer with integer parameters, and messages padded to realistic sizes.

A replica is a process's copy of the shared parameters (theta). Integers suffice to detect lost,
repeated and misplaced updates. An update's payload is a sequence of (index u8, amount i8) pairs;
adding it is exact, like the real arithmetic. Payloads are padded with zeros to the size that they
have for a model with a given number of parameters. All byte counts are therefore those of a real
fit. A commit is an update that the master has numbered. A residual is what a trainer has learned
and not sent yet.
"""

from __future__ import annotations

import hashlib
import random
import struct
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from sparkstrom.base.identity import CommitNo
from sparkstrom.codec.messages import BUFFERS, Chunk, Commit, MergedRange
from sparkstrom.protocol.common.events_and_effects import (
    ApplyMergedRange,
    InstallSnapshot,
    SendMerged,
)
from sparkstrom.protocol.common.flow_control import SUM_ENTRY_BYTES
from sparkstrom.runtime.optimizer_states import CHUNK_BYTES as UPDATER_CHUNK_BYTES
from sparkstrom.runtime.training_loop import MergedCommits

ENTRY_BITS = 10  # about; of an update's entry: sign, and distance from the previous index
PARAM_BYTES = 4
STATE_BYTES = 8  # per parameter, of an optimizer like Adam
CHUNK_BYTES = 256 << 10  # of one part of a snapshot


@dataclass(frozen=True, slots=True)
class MessageSizes:
    """Sizes in bytes that messages have in a fit of a model with ``params`` parameters."""

    params: int = 0  # 0: messages are not padded
    density: float = 0.0  # share of the parameters that an update changes

    @property
    def entries(self) -> int:
        """Number of parameters that an update changes."""
        return round(self.density * self.params)

    @property
    def update_bytes(self) -> int:
        """Size of an encoded update."""
        return self.entries * ENTRY_BITS // 8

    def sum_bytes(self, count: int) -> int:
        """Return the size of a sum of commits that changes ``count`` parameters."""
        return min(int(SUM_ENTRY_BYTES * count), PARAM_BYTES * self.params)

    @property
    def chunks(self) -> int:
        """Number of chunks (parts) in which a replica is sent; the last one has the buffers."""
        return -(-PARAM_BYTES * self.params // CHUNK_BYTES) + 1

    @property
    def chunk_bytes(self) -> int:
        """Size of a chunk of a replica; 0 without padding."""
        return CHUNK_BYTES if self.params else 0

    @property
    def optimizer_chunks(self) -> int:
        """Number of chunks (parts) in which an optimizer state is sent; 0 without padding."""
        return -(-STATE_BYTES * self.params // UPDATER_CHUNK_BYTES)

    @property
    def longest_bytes(self) -> int:
        """Size of a chunk of a replica or of an update, whichever is longer."""
        return max(CHUNK_BYTES if self.params else 0, self.update_bytes)


@lru_cache(maxsize=64)
def _zeros(size: int) -> bytes:
    """Return ``size`` zero bytes; cached, because few sizes occur."""
    return bytes(size)


def pad_payload(payload: bytes, size: int) -> bytes:
    """Return a payload padded with zeros to at least ``size`` bytes; even lengths stay even."""
    lacking = size - len(payload)
    return payload + _zeros(lacking + lacking % 2) if lacking > 0 else payload


N_PARAMS = 12
CHUNK_PARAMS = 4  # parameters in one chunk of a replica
CHUNKS = N_PARAMS // CHUNK_PARAMS + 1  # the last one contains the buffers
PAIR_STRUCT = struct.Struct("<Bb")
CHUNK_STRUCT = struct.Struct(f"<{CHUNK_PARAMS}q")
SUM_STRUCT = struct.Struct(f"<{N_PARAMS}q")

TAU = 3  # the amount that an update adds; smaller changes stay in the residual
SUM_UPDATES_MAX = 5  # few, so that some sums are followed by another

IntTheta = list[int]
INITIAL_THETA = tuple(range(1, N_PARAMS + 1))  # the parameters that a fit begins with


def add_update(theta: IntTheta, payload: bytes) -> None:
    """Add an encoded update to the parameters ``theta``, in place."""
    for index, amount in PAIR_STRUCT.iter_unpack(payload):
        if not amount:
            break  # only padding follows
        theta[index] += amount


def sum_updates(payloads: Iterable[bytes]) -> IntTheta:
    """Return the sum of encoded updates, for each parameter."""
    theta = [0] * N_PARAMS
    for payload in payloads:
        add_update(theta, payload)
    return theta


def merge_commits(entries: Iterable[Commit | MergedRange]) -> bytes:
    """Return the encoded sum of commits and of earlier sums of commits."""
    theta = [0] * N_PARAMS
    for entry in entries:
        if isinstance(entry, MergedRange):
            theta = [
                a + b for a, b in zip(theta, SUM_STRUCT.unpack_from(entry.payload), strict=True)
            ]
        else:
            add_update(theta, entry.payload.data)
    return SUM_STRUCT.pack(*theta)


def make_merged_range(effect: SendMerged, size: int = 0) -> MergedRange:
    """Return the sum of commits that an effect requests, padded to at least ``size`` bytes."""
    return MergedRange(
        after=effect.after,
        commit=effect.commit,
        last=effect.last,
        count=effect.count,
        payload=pad_payload(merge_commits(effect.entries), size),
    )


def join_reports(reports: list[bytes]) -> bytes:
    """Return all workers' buffers, concatenated so that a lost or repeated one shows."""
    return b"".join(reports)


class SimSum:
    """A sum of other workers' commits, which waits until the trainer adds it to the replica."""

    __slots__ = ("_count", "theta")

    def __init__(self) -> None:
        self.theta: IntTheta = [0] * N_PARAMS
        self._count = 0

    def add_update(self, update: Commit) -> bool:
        """Add a commit; return False, without adding it, if the sum is full."""
        if self._count == SUM_UPDATES_MAX:
            return False
        add_update(self.theta, update.payload.data)
        self._count += 1
        return True


class SimReplica:
    """A process's copy of the shared parameters, ``theta``, which are a few integers.

    ``own`` holds the uncommitted updates of the process's trainer, which theta contains already. A
    replica is sent to other processes in chunks (parts). These are padded to ``chunk_bytes``,
    except that of the buffers. ``whole``: start with the fit's initial parameters; otherwise with
    zeros, until a snapshot of another replica is installed.
    """

    __slots__ = ("_chunk_bytes", "buffers", "commit", "own", "theta")

    def __init__(self, chunk_bytes: int = 0, *, whole: bool = True) -> None:
        self._chunk_bytes = chunk_bytes
        self.theta: IntTheta = list(INITIAL_THETA) if whole else [0] * N_PARAMS
        self.commit = CommitNo(0)
        self.own: deque[bytes] = deque()
        self.buffers = b""

    def apply_update(self, update: Commit) -> None:
        """Add the next commit, which is another worker's."""
        add_update(self.theta, update.payload.data)
        self.commit = update.commit

    def take_buffers(self, buffers: bytes, commit: CommitNo) -> None:
        """Apply the next commit, which contains the combined buffers of all workers."""
        self.buffers, self.commit = buffers, commit

    def publish_buffers(self) -> None:
        """Record that the worker published its buffers, which do not change theta."""
        self.own.append(b"")

    def publish(self, payload: bytes) -> None:
        """Add an update of this worker to theta, and record it as uncommitted."""
        add_update(self.theta, payload)
        self.own.append(payload)

    def mark_committed(self, commit: CommitNo) -> None:
        """Record that this worker's oldest uncommitted update is committed."""
        self.own.popleft()
        self.commit = commit

    def apply_merged(self, merged: MergedCommits[SimSum]) -> None:
        """Add a sum of others' commits; drop own updates committed between them from ``own``."""
        self._add_sum(merged.total.theta, merged.own_commits, merged.commit)

    def apply_range(self, item: ApplyMergedRange) -> None:
        """Add a received sum of commits, minus this worker's own, which theta already has."""
        total_of_own = sum_updates(update.payload.data for update in item.own)
        merged = SUM_STRUCT.unpack_from(item.merged.payload)
        others = [all_of_it - mine for all_of_it, mine in zip(merged, total_of_own, strict=True)]
        self._add_sum(others, len(item.own), item.merged.commit)

    def _add_sum(self, others: IntTheta, own_count: int, commit: CommitNo) -> None:
        """Add others' commits; drop the ``own_count`` oldest own updates, committed with them."""
        for i in range(N_PARAMS):
            self.theta[i] += others[i]
        for _ in range(own_count):
            self.own.popleft()
        self.commit = commit

    def install(self, install: InstallSnapshot) -> None:
        """Set theta to a snapshot, plus the commits it lacks, plus own uncommitted updates."""
        *cells, buffers = install.chunks[:CHUNKS]  # the others are only padding
        self.theta = [value for chunk in cells for value in CHUNK_STRUCT.unpack_from(chunk.payload)]
        self.buffers = buffers.payload
        has = [chunk.commit for chunk in cells]
        for committed in install.held:
            if isinstance(committed, MergedRange):
                for index, amount in enumerate(SUM_STRUCT.unpack_from(committed.payload)):
                    if committed.after >= has[index // CHUNK_PARAMS]:
                        self.theta[index] += amount
                continue
            if committed.payload.form == BUFFERS:
                newer = committed.commit > buffers.commit
                self.buffers = committed.payload.data if newer else self.buffers
                continue
            for index, amount in PAIR_STRUCT.iter_unpack(committed.payload.data):
                if not amount:
                    break
                if committed.commit > has[index // CHUNK_PARAMS]:
                    self.theta[index] += amount
        self.own = deque(b"" if u.payload.form == BUFFERS else u.payload.data for u in install.own)
        for payload in self.own:
            add_update(self.theta, payload)
        self.commit = install.commit

    def begin(self) -> None:
        """Do nothing: training starts from the parameters that this replica already has."""

    def accumulate_delta(self) -> None:
        """Do nothing: unpublished learning stays in the learner."""

    def chunk(self, index: int) -> Chunk:
        """Return chunk ``index`` of this replica, without own uncommitted updates."""
        size = self._chunk_bytes
        if index >= CHUNKS:
            return Chunk(index=index, commit=self.commit, payload=pad_payload(b"", size))
        if index == CHUNKS - 1:
            return Chunk(index=index, commit=self.commit, payload=self.buffers)
        mine = sum_updates(self.own)
        cells = range(index * CHUNK_PARAMS, (index + 1) * CHUNK_PARAMS)
        part = [self.theta[i] - mine[i] for i in cells]
        return Chunk(
            index=index, commit=self.commit, payload=pad_payload(CHUNK_STRUCT.pack(*part), size)
        )

    def digest(self) -> str:
        """Return the SHA-256 of theta and buffers, in hexadecimal."""
        return hashlib.sha256(repr(self.theta).encode() + self.buffers).hexdigest()


class SimLearner:
    """A toy trainer that learns random integers and keeps what it has not sent as residual."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.residual: IntTheta = [0] * N_PARAMS
        self.learnt = 0  # sum of all amounts learned or added
        self.sent = 0  # sum of all amounts published

    def step(self) -> None:
        """Learn: add random amounts to random entries of the residual."""
        for _ in range(self._rng.randint(1, 4)):
            amount = self._rng.choice((-3, -2, 2, 3))
            self.residual[self._rng.randrange(N_PARAMS)] += amount
            self.learnt += amount

    def publish(self) -> bytes:
        """Move TAU out of each entry that reached it; return the update, empty if none did."""
        out = []
        for index, value in enumerate(self.residual):
            if abs(value) >= TAU:
                sign = TAU if value > 0 else -TAU
                self.residual[index] -= sign
                self.sent += sign
                out.append(PAIR_STRUCT.pack(index, sign))
        return b"".join(out)

    def add(self, residual: IntTheta) -> None:
        """Add the residual of an earlier fit."""
        self.residual = [a + b for a, b in zip(self.residual, residual, strict=True)]
        self.learnt += sum(residual)

    def is_mass_conserved(self) -> bool:
        """Return whether all that was learned was sent or is in the residual (I1)."""
        return self.learnt == self.sent + sum(self.residual)


def residual_mass(residual: IntTheta) -> float:
    """Return the sum of the absolute values of a residual."""
    return float(sum(map(abs, residual)))
