"""Hold the shared parameters in one process (``Theta``), and a worker's replica of them.

Parameters are exact: all are multiples of one grid step, or quantum, so sums need no rounding.
Decoded updates are pairs of arrays (indices, quanta), with the quanta to add at each index. A
commit is an update that the master has numbered. Two processes that have applied the same commits,
each commit once, have parameters that are equal to the bit, whatever the order of the commits and
the backend. Arrays are in the memory of theta's backend (host or GPU); some methods return copies
on the host.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from sparkstrom.base.errors import TrainingError
from sparkstrom.base.identity import CommitNo
from sparkstrom.codec.messages import BUFFERS, Chunk, Commit, MergedRange, Payload, Update
from sparkstrom.codec.payload import (
    BITMAPS,
    Bitmap,
    decode_quanta_untrusted,
    decode_theta_untrusted,
    decode_update_untrusted,
    encode_quanta,
    encode_theta,
    read_bitmap_untrusted,
)
from sparkstrom.encoding.backends import SCRATCH_BYTES, Backend, host
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.forms import Encoded, Form
from sparkstrom.encoding.grid import quantum
from sparkstrom.encoding.layers import Layers
from sparkstrom.encoding.update_sum import Hits, UpdateSum
from sparkstrom.models.base import Batch, Flat, FlatModel, get_buffers, load_buffers
from sparkstrom.models.output_interpretation import measure_batch
from sparkstrom.protocol.common.events_and_effects import (
    ApplyMergedRange,
    InstallSnapshot,
    SendMerged,
)
from sparkstrom.runtime.training_loop import MergedCommits

CHUNK_PARAMS = 65_536  # 256 KiB of parameters in one chunk of a snapshot
MERGED_QUANTA_SAFE_MAX = 2**30  # larger sums of thresholds could overflow an int32


def snapshot_chunk_count(n_params: int) -> int:
    """Return the number of chunks in a snapshot: those of parameters, and one of buffers."""
    return -(-n_params // CHUNK_PARAMS) + 1


class Theta:
    """The shared parameters, f32[n_params], every value a multiple of 2^-k.

    With ``train_on="local"``, the model trains on a second array, ``local``, f32[n_params], and the
    residual (what it has learned but not sent) is ``local`` - theta. Other workers' updates are
    added to both arrays, so the residual stays the same.
    """

    def __init__(
        self, n_params: int, k: int, layers: Layers | None = None, backend: Backend | None = None
    ) -> None:
        """Start with zeros, in the memory of ``backend`` (None: the host).

        ``layers``: layers whose threshold is a multiple of tau, the threshold of all others.
        """
        self.backend = backend or host()
        self._kernels, self._memory = self.backend.kernels, self.backend.memory
        self.n_params, self.layers = n_params, layers
        self._values: Flat = self._memory.zeros(n_params, np.float32)
        self._read_part = self._memory.reader(self._values)
        self.local: Flat | None = None
        self.k, self.q = k, quantum(k)
        self.commit = CommitNo(0)  # number of the newest commit in theta
        self.overflows = 0  # number of times that a parameter left the exact range
        self.first_overflow = -1  # index of the first such parameter
        self.buffers = b""  # the model's other arrays, encoded by the model
        self._scratch = np.empty(SCRATCH_BYTES, np.uint8)

    def load(self, values: Flat) -> None:
        """Set the parameters to ``values``, f32[n_params] on the host and on the grid."""
        self._memory.assign(self._values, values)

    def to_host(self) -> Flat:
        """Return a copy of the parameters on the host."""
        return self._memory.to_host(self._values).copy()

    def sample(self, size_max: int) -> Flat:
        """Return a copy, on the host, of up to ``size_max`` parameters, evenly spaced."""
        # odd, so that matrices with a power of two of columns are sampled in all of these
        stride = -(-self.n_params // size_max) | 1
        return self._memory.to_host(self._values[::stride]).copy()

    def copy(self) -> Flat:
        """Return a copy of the parameters in the backend's memory."""
        return self._memory.copy(self._values)

    def copy_to(self, target: Flat) -> None:
        """Copy the parameters to ``target``, f32[n_params] in the backend's memory."""
        self._memory.assign(target, self._values)

    def subtract_from(self, values: Flat, out: Flat) -> None:
        """Set ``out`` to ``values`` - theta; both are in the backend's memory."""
        self._memory.subtract(out, values, self._values)

    def create_local(self) -> Flat:
        """Create ``local``, equal to theta, and return it."""
        self.local = self.copy()
        return self.local

    def digest(self) -> str:
        """Return the SHA-256 of parameters and buffers as hex."""
        values = self._memory.to_host(self._values)
        return hashlib.sha256(values.tobytes() + self.buffers).hexdigest()

    def publish(
        self, encoder: Encoder, delta: Flat | None = None, *, is_last: bool = False
    ) -> Encoded | None:
        """Encode residuals that reach the threshold as an update, add it to theta and return it.

        Return None if no residual does. ``delta`` is the last step's change, which is needed if
        ``local`` is None. ``is_last``: whether the worker has trained all its minibatches.
        """
        return encoder.publish(self._local_or(delta), self._values, is_last=is_last)

    def residual(self, encoder: Encoder) -> Flat:
        """Return a copy of the residual on the host."""
        return encoder.residual(self._local_or(self._values), self._values)

    def residual_norms(self, encoder: Encoder) -> tuple[float, float]:
        """Return the residual's L1 and Euclidean norms."""
        return encoder.residual_norms(self._local_or(self._values), self._values)

    def add_residual(self, encoder: Encoder, saved: Flat) -> None:
        """Add a residual that an earlier fit saved, f32[n_params] on the host, to this one."""
        encoder.add_residual(saved, self._local_or(self._values))

    def _local_or(self, otherwise: Flat | None) -> Flat:
        """Return ``local`` or, without one, ``otherwise``, which only ``Encoder.publish`` uses."""
        learnt = otherwise if self.local is None else self.local
        assert learnt is not None, "without local, publish needs the change that a step made"
        return learnt

    def decode(self, payload: Payload) -> Hits:
        """Decode an update to (indices, quanta to add there); raise WireError if it is invalid."""
        return decode_update_untrusted(*_payload_arguments(payload), self.n_params, self.layers)

    def read(self, payload: Payload) -> Hits | Bitmap:
        """Decode an update to the form that ``add`` applies fastest; raise WireError if invalid."""
        if self.layers is not None or payload.form not in BITMAPS:
            return self.decode(payload)
        return read_bitmap_untrusted(*_payload_arguments(payload), self.n_params)

    def add(self, hits: Hits | Bitmap) -> None:
        """Add a decoded update to theta and, unless that is None, to ``local`` (see the class)."""
        self._add(hits, self.local)

    def _add(self, hits: Hits | Bitmap, local: Flat | None) -> None:
        """Add a decoded update to theta and, unless that is None, to the second array ``local``."""
        kernels, put = self._kernels, self._memory.from_host
        if isinstance(hits, Bitmap):
            step = hits.tau_quanta * self.q
            rest = (put(hits.packed), hits.side, step, self.q, self._scratch)
            if local is None:
                self.count_overflows(kernels.bitmap_add(self._values, *rest))
            else:
                self.count_overflows(kernels.bitmap_add_both(self._values, local, *rest))
            return
        indices, quanta = put(hits[0]), put(hits[1])
        if local is None:
            self.count_overflows(kernels.apply_hits(self._values, indices, quanta, self.q))
        else:
            self.count_overflows(
                kernels.apply_hits_both(self._values, local, indices, quanta, self.q)
            )

    def add_sum(self, total: UpdateSum) -> None:
        """Add a sum of updates to theta and, unless that is None, to ``local``."""
        self.overflows += total.overflows
        if total.array is None:
            self.add(total.hits)
            return
        array = self._memory.from_host(total.array)
        if self.local is None:
            self.count_overflows(self._kernels.add_quanta(self._values, array, self.q))
        else:
            self.count_overflows(
                self._kernels.add_quanta_both(self._values, self.local, array, self.q)
            )

    def count_overflows(self, overflows: tuple[int, int]) -> None:
        """Add a kernel's result to the counters of parameters that left the exact range.

        ``overflows``: (number of such parameters, index of the first).
        """
        number, first = overflows
        if number and not self.overflows:
            self.first_overflow = first
        self.overflows += number

    def chunk(self, index: int, less: Iterable[Hits] = ()) -> Chunk:
        """Return part ``index`` of a snapshot as of ``commit``; the last part has the buffers.

        ``less``: this worker's own uncommitted updates, which theta contains and the snapshot must
        not. Thread-safe while nothing changes theta.
        """
        begin = index * CHUNK_PARAMS
        if begin >= self.n_params:
            return Chunk(index=index, commit=self.commit, payload=self.buffers)
        part = self._read_part(begin, min(begin + CHUNK_PARAMS, self.n_params))
        for indices, quanta in less:
            first, last = np.searchsorted(indices, (begin, begin + part.size))
            part = part.copy()
            hits = indices[first:last] - np.int32(begin), -quanta[first:last]
            host().kernels.apply_hits(part, *hits, self.q)
        return Chunk(index=index, commit=self.commit, payload=encode_theta(part))

    def install(
        self,
        chunks: Sequence[Chunk],
        held: Sequence[Commit | MergedRange],
        own: Sequence[Update],
        commit: CommitNo,
    ) -> None:
        """Replace theta by a snapshot, plus what each chunk lacks of ``held``, plus ``own``.

        ``local`` changes by the same amounts as theta, so the residual stays the same. A chunk
        contains either all commits of a merged range in ``held`` or none of them.

        Args:
            chunks: all chunks of a snapshot, the last one with buffers; each as of its own commit.
            held: commits that arrived during the transfer, single or merged.
            own: this worker's own uncommitted updates.
            commit: the commit that theta is at afterwards.
        """
        before = None if self.local is None else self.copy()
        has = np.zeros(snapshot_chunk_count(self.n_params), np.int64)
        *of_parameters, of_buffers = chunks
        self.buffers = of_buffers.payload
        for chunk in of_parameters:
            begin = chunk.index * CHUNK_PARAMS
            part = self._values[begin : min(begin + CHUNK_PARAMS, self.n_params)]
            self._memory.assign(part, decode_theta_untrusted(chunk.payload, part.size, self.k))
            has[chunk.index] = chunk.commit
        for committed in held:
            if isinstance(committed, MergedRange):
                indices, quanta = decode_quanta_untrusted(committed.payload, self.n_params).hits
                lacking = has[indices // CHUNK_PARAMS] <= committed.after
                self._add((indices[lacking], quanta[lacking]), None)
                continue
            if committed.payload.form == Form.BUFFERS:
                if committed.commit > of_buffers.commit:
                    self.buffers = committed.payload.data
                continue
            indices, quanta = self.decode(committed.payload)
            lacking = has[indices // CHUNK_PARAMS] < committed.commit
            self._add((indices[lacking], quanta[lacking]), None)
        for update in own:
            if update.payload.form != Form.BUFFERS:
                self._add(self.read(update.payload), None)
        self.commit = commit
        if before is not None:
            assert self.local is not None, "there was one before"
            self._memory.subtract(before, self._values, before)
            self._memory.add(self.local, before)

    def merge(self, wanted: SendMerged) -> MergedRange:
        """Return the encoded sum of the commits in ``wanted``. No parameter is read."""
        total = UpdateSum(self.n_params)
        for entry in wanted.entries:
            if isinstance(entry, MergedRange):
                total.add_total(decode_quanta_untrusted(entry.payload, self.n_params))
            else:
                total.add(self.decode(entry.payload))
        self.overflows += total.overflows
        return MergedRange(
            after=wanted.after,
            commit=wanted.commit,
            last=wanted.last,
            count=wanted.count,
            payload=encode_quanta(total),
        )

    def new_sum(self) -> BoundedTotal:
        """Return an empty sum, for adding up commits until they are added to theta."""
        return BoundedTotal(self)

    def read_merged(self, item: ApplyMergedRange) -> UpdateSum:
        """Return the sum of merged commits without this node's own updates."""
        total = decode_quanta_untrusted(item.merged.payload, self.n_params)
        for update in item.own:
            indices, quanta = self.decode(update.payload)
            total.add((indices, -quanta))
        return total


def _payload_arguments(payload: Payload) -> tuple[bytes, int, int, int]:
    """Return a payload's data, form, count and tau in quanta, as ``codec.payload`` takes them."""
    return payload.data, payload.form, payload.count, payload.tau_quanta


class BoundedTotal(UpdateSum):
    """A sum of updates that rejects an update if an entry, an int32, could then overflow."""

    def __init__(self, theta: Theta) -> None:
        super().__init__(theta.n_params)
        self._decode = theta.decode
        self._quanta = 0  # sum of the updates' largest entries: no entry's sum can be larger

    def add_update(self, update: Commit) -> bool:
        """Add an update; add nothing and return False if a non-empty sum could overflow."""
        hits = self._decode(update.payload)
        quanta = self._quanta + int(np.abs(hits[1]).max())
        if self._quanta and quanta > MERGED_QUANTA_SAFE_MAX:
            return False
        self._quanta = quanta
        self.add(hits)
        return True


@dataclass(slots=True)
class PendingUpdate:
    """One of this worker's own uncommitted updates."""

    payload: Payload | None  # None for buffers, which do not change parameters
    hits: Hits | None = None  # the decoded payload; None until it is needed


class Replica:
    """One worker's model, parameters and encoder. Only ``chunk`` is called from other threads.

    theta is the sum of the initial parameters, all commits up to ``commit``, and this worker's own
    uncommitted updates (``_pending``, oldest first). If ``local`` is true, the model trains on
    an array with the values theta + residual. Otherwise it trains on a copy of theta, and the
    change of each step is added to the encoder's residual array (Strom 2015; DL4J's
    EncodedGradientsAccumulator).

    Args:
        model: the model, which is bound to the working copy.
        theta: the shared parameters.
        encoder: encoder with the residual and threshold state.
        local: train on theta + residual instead of a copy of theta.
    """

    def __init__(self, model: FlatModel, theta: Theta, encoder: Encoder, *, local: bool) -> None:
        self.model, self.theta, self.encoder = model, theta, encoder
        self._memory = theta.backend.memory
        # the model trains on this in place
        self._working = theta.create_local() if local else theta.copy()
        self._delta = None if local else self._memory.zeros(theta.n_params, np.float32)
        self._pending: deque[PendingUpdate] = deque()
        self._installed = False
        self._lock = threading.Lock()  # theta and its commit number change together
        model.bind(self._working)

    @property
    def commit(self) -> CommitNo:
        """The number of the newest commit in theta."""
        return self.theta.commit

    def digest(self) -> str:
        """Return the SHA-256 of theta and its buffers as hex."""
        return self.theta.digest()

    def chunk(self, index: int) -> Chunk:
        """Return part ``index`` of a snapshot of all commits up to ``commit``. Thread-safe."""
        with self._lock:
            adding = [each for each in self._pending if each.payload is not None]
            return self.theta.chunk(index, [self._decode(each) for each in adding])

    def _decode(self, update: PendingUpdate) -> Hits:
        """Return the indices and quanta of one of this worker's updates, decoded on first use."""
        if update.hits is None:
            assert update.payload is not None, "it adds nothing"
            update.hits = self.theta.decode(update.payload)
        return update.hits

    def apply(self, hits: Hits | Bitmap, commit: CommitNo) -> None:
        """Add another worker's decoded update, which is number ``commit``, to theta."""
        with self._lock:
            self.theta.add(hits)
            self.theta.commit = commit

    def apply_update(self, update: Commit) -> None:
        """Decode another worker's update and add it to theta."""
        self.apply(self.theta.read(update.payload), update.commit)

    def mark_committed(self, commit: CommitNo) -> None:
        """Record that this worker's oldest uncommitted update has been given number ``commit``."""
        with self._lock:
            self._pending.popleft()
            self.theta.commit = commit

    def apply_merged(self, merged: MergedCommits[UpdateSum]) -> None:
        """Add a sum of other workers' commits, which this worker's inbox has merged."""
        self._apply_sum(merged.total, merged.own_commits, merged.commit)

    def apply_range(self, item: ApplyMergedRange) -> None:
        """Add a sum of commits that a neighbour merged, minus this worker's own updates in it."""
        self._apply_sum(self.theta.read_merged(item), len(item.own), item.merged.commit)

    def _apply_sum(self, total: UpdateSum, own_commits: int, commit: CommitNo) -> None:
        """Add a sum to theta; mark this worker's ``own_commits`` oldest updates as committed."""
        with self._lock:
            self.theta.add_sum(total)
            for _ in range(own_commits):
                self._pending.popleft()
            self.theta.commit = commit

    def install(self, install: InstallSnapshot) -> None:
        """Set theta to a snapshot plus this worker's uncommitted updates; the residual stays."""
        with self._lock:
            self.theta.install(install.chunks, install.held, install.own, install.commit)
            self._pending = deque(
                PendingUpdate(None if update.payload.form == BUFFERS else update.payload)
                for update in install.own
            )
        self.begin()

    def begin(self) -> None:
        """Load theta's buffers into the model; do nothing at further calls."""
        if not self._installed:
            load_buffers(self.model, self.theta.buffers)
        self._installed = True

    def take_buffers(self, buffers: bytes, commit: CommitNo) -> None:
        """Set theta's buffers to the workers' average, which is commit number ``commit``.

        The model keeps its own buffers.
        """
        with self._lock:
            self.theta.buffers, self.theta.commit = buffers, commit

    def publish_buffers(self) -> bytes:
        """Return the model's buffers, which count as an uncommitted update; b"" if it has none."""
        buffers = get_buffers(self.model)
        if buffers:
            with self._lock:
                self._pending.append(PendingUpdate(None))
        return buffers

    def step(self, batch: Batch) -> float:
        """Train on one minibatch; return its mean loss, or raise TrainingError if not finite."""
        if self._delta is not None:
            self.theta.copy_to(self._working)
        loss = self.model.step(batch)
        if not np.isfinite(loss):
            raise TrainingError(NON_FINITE_LOSS.format(loss))
        if self._delta is not None:
            self.theta.subtract_from(self._working, self._delta)
        return loss

    def measure(self, batches: Iterable[Batch], metric: str) -> tuple[float, float]:
        """Evaluate theta on batches; return the weighted sum of the metric and the sum of weights.

        The parameters that the model trains on are restored afterwards. ``metric`` is "loss" or
        "accuracy".
        """
        working = self._memory.copy(self._working)
        self.theta.copy_to(self._working)
        try:
            figures = [measure_batch(self.model, batch, metric) for batch in batches]
        finally:
            self._memory.assign(self._working, working)
        sums, weights = zip(*figures, strict=True) if figures else ((), ())
        return math.fsum(sums), math.fsum(weights)

    def accumulate_delta(self) -> None:
        """Add the last step's change to the residual, for a later publication."""
        if self._delta is not None:
            self.encoder.accumulate(self._delta)

    def publish(self, *, is_last: bool = False) -> Payload | None:
        """Move residuals that reach the threshold to theta; return them, or None if there are none.

        ``is_last``: whether the worker has trained all its minibatches.
        """
        with self._lock:
            encoded = self.theta.publish(self.encoder, self._delta, is_last=is_last)
            if encoded is None:
                return None
            payload = Payload(int(encoded.form), encoded.tau_quanta, encoded.count, encoded.payload)
            self._pending.append(PendingUpdate(payload))
        return payload

    def residual(self) -> Flat:
        """Return a copy of the residual (learned but not sent), f32[n_params] on the host."""
        return self.theta.residual(self.encoder)

    def uncommitted_mass(self) -> float:
        """Return the sum of the L1 norms of the residual and this worker's uncommitted updates."""
        adding = [each for each in self._pending if each.payload is not None]
        quanta = sum(int(np.abs(self._decode(each)[1].astype(np.int64)).sum()) for each in adding)
        return quanta * self.theta.q + float(np.abs(self.residual().astype(np.float64)).sum())

    def add_residual(self, residual: Flat) -> None:
        """Add a residual that an earlier fit saved, f32[n_params] on the host, to this one."""
        self.theta.add_residual(self.encoder, residual)

    def residual_mass(self) -> float:
        """Return the residual's L1 norm in parameter units, in one pass over it."""
        return self.theta.residual_norms(self.encoder)[0]

    def residual_norm(self) -> float:
        """Return the residual's Euclidean norm in parameter units."""
        return self.theta.residual_norms(self.encoder)[1]


NON_FINITE_LOSS = (
    "the loss is {}: training diverges or the data hold such values; lower the learning rate, "
    "clip gradients, or look at the features' scale"
)
