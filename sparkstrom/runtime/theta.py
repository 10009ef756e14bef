"""Theta: the shared parameters as one process holds them, on the exact grid.

Whoever holds one applies every commit once, in any order, and has the same bits, whichever backend
it is on. Its memory is the backend's: the host asks for operations, and for copies.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from sparkstrom.base.identity import CommitNo
from sparkstrom.codec.messages import Chunk, Committed, MergedRange, Payload, Update
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
from sparkstrom.encoding.encoded import Encoded
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.forms import Form
from sparkstrom.encoding.grid import quantum
from sparkstrom.encoding.layers import Layers
from sparkstrom.encoding.totals import Hits, Total
from sparkstrom.models.base import Flat
from sparkstrom.protocol.common.events import DeliverMerged, SendMerged

CHUNK_PARAMS = 65_536  # 256 KiB of parameters in one chunk of a snapshot
MERGED_QUANTA_MAX = 2**30  # sums of thresholds beyond this could overflow an int32


def chunk_count(n_params: int) -> int:
    """Chunks in a snapshot: of parameters, and one of buffers."""
    return -(-n_params // CHUNK_PARAMS) + 1


class Theta:
    """f32[n_params], every value a multiple of 2^-k; and local, where a model trains on it.

    ``local``, f32[n_params], moves with theta, so that their difference, the residual, stays.
    """

    def __init__(
        self, n_params: int, k: int, layers: Layers | None = None, backend: Backend | None = None
    ) -> None:
        """All 0. ``backend``: where it lies; None: on the host."""
        self.backend = backend or host()
        self._kernels, self._memory = self.backend.kernels, self.backend.memory
        self.n_params, self.layers = n_params, layers  # of which thresholds are multiples of tau
        self._values: Flat = self._memory.zeros(n_params, np.float32)
        self._read_part = self._memory.reader(self._values)
        self.local: Flat | None = None
        self.k, self.q = k, quantum(k)
        self.commit = CommitNo(0)  # newest commit applied
        self.overflows = 0  # parameters that left the exact range, counted
        self.first_overflow = -1
        self.buffers = b""  # arrays beside the parameters, as the model lays them out
        self._scratch = np.empty(SCRATCH_BYTES, np.uint8)

    # -- whole vectors ---------------------------------------------------------------------------

    def load(self, values: Flat) -> None:
        """Become these, f32[n_params] on the host and on the grid."""
        self._memory.assign(self._values, values)

    def to_host(self) -> Flat:
        """A copy for the host."""
        return self._memory.to_host(self._values).copy()

    def copy(self) -> Flat:
        """A copy where theta lies."""
        return self._memory.copy(self._values)

    def copy_to(self, target: Flat) -> None:
        """target := theta; it lies where theta does."""
        self._memory.assign(target, self._values)

    def subtract_from(self, values: Flat, out: Flat) -> None:
        """out := values - theta; both lie where theta does."""
        self._memory.subtract(out, values, self._values)

    def open_local(self) -> Flat:
        """Have ``local`` from now on, equal to theta at first."""
        self.local = self.copy()
        return self.local

    def digest(self) -> str:
        """SHA-256 of parameters and buffers, as hex."""
        values = self._memory.to_host(self._values)
        return hashlib.sha256(values.tobytes() + self.buffers).hexdigest()

    # -- what is learnt here ---------------------------------------------------------------------

    def publish(self, encoder: Encoder, delta: Flat | None = None) -> Encoded | None:
        """Let the encoder take the next update out of ``local``, or out of what a step changed."""
        return encoder.publish(self._learnt(delta), self._values)

    def residual(self, encoder: Encoder) -> Flat:
        """A copy for the host of what was learnt and not sent."""
        return encoder.residual(self._learnt(self._values), self._values)

    def residual_norms(self, encoder: Encoder) -> tuple[float, float]:
        """Its sum of absolute values, and its Euclidean norm."""
        return encoder.residual_norms(self._learnt(self._values), self._values)

    def add_residual(self, encoder: Encoder, saved: Flat) -> None:
        """Add what another fit left, f32[n_params] on the host."""
        encoder.add_residual(saved, self._learnt(self._values))

    def _learnt(self, otherwise: Flat | None) -> Flat:
        """``local``; without one, an encoder has the residual, and needs no more than this."""
        learnt = otherwise if self.local is None else self.local
        assert learnt is not None, "who has no local publishes what a step changed"
        return learnt

    # -- updates ---------------------------------------------------------------------------------

    def decode(self, payload: Payload) -> Hits:
        """The update's indices and quanta. Raise WireError where it is none."""
        return decode_update_untrusted(*_described(payload), self.n_params, self.layers)

    def read(self, payload: Payload) -> Hits | Bitmap:
        """The update as ``add`` takes it soonest. Raise WireError where it is none."""
        if self.layers is not None or payload.form not in BITMAPS:
            return self.decode(payload)
        return read_bitmap_untrusted(*_described(payload), self.n_params)

    def add(self, hits: Hits | Bitmap) -> None:
        """theta, and local where there is one, move by the hits."""
        self._add(hits, self.local)

    def _add(self, hits: Hits | Bitmap, local: Flat | None) -> None:
        kernels, put = self._kernels, self._memory.from_host
        if isinstance(hits, Bitmap):
            step = hits.tau_quanta * self.q
            rest = (put(hits.packed), hits.side, step, self.q, self._scratch)
            if local is None:
                self.count(kernels.bitmap_add(self._values, *rest))
            else:
                self.count(kernels.bitmap_add_both(self._values, local, *rest))
            return
        indices, quanta = put(hits[0]), put(hits[1])
        if local is None:
            self.count(kernels.apply_hits(self._values, indices, quanta, self.q))
        else:
            self.count(kernels.apply_hits_both(self._values, local, indices, quanta, self.q))

    def add_sum(self, total: Total) -> None:
        """theta, and local where there is one, move by merged updates."""
        self.overflows += total.overflows
        if total.array is None:
            self.add(total.hits)
            return
        array = self._memory.from_host(total.array)
        if self.local is None:
            self.count(self._kernels.add_quanta(self._values, array, self.q))
        else:
            self.count(self._kernels.add_quanta_both(self._values, self.local, array, self.q))

    def count(self, overflows: tuple[int, int]) -> None:
        """Take note of parameters that left the exact range."""
        number, first = overflows
        if number and not self.overflows:
            self.first_overflow = first
        self.overflows += number

    # -- snapshots -------------------------------------------------------------------------------

    def chunk(self, index: int, less: Iterable[Hits] = ()) -> Chunk:
        """Part of a snapshot, as of ``commit``: without updates that no commit has yet.

        For any thread, while nothing changes theta.
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
        held: Sequence[Committed | MergedRange],
        own: Sequence[Update],
        commit: CommitNo,
    ) -> None:
        """Become the snapshot, plus what each chunk lacks of ``held``, plus ``own``.

        local moves by as much as theta does.
        A chunk has all of a sum or nothing: no sum of ``held`` goes past its commit.
        """
        before = None if self.local is None else self.copy()
        has = np.zeros(chunk_count(self.n_params), np.int64)
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
        """The sum of these commits; looks at no parameter."""
        total = Total(self.n_params)
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

    def begin_sum(self) -> BoundedTotal:
        """Of commits that wait for this theta; none is in it yet."""
        return BoundedTotal(self)

    def read_merged(self, item: DeliverMerged) -> Total:
        """What others did in a sum of commits: all of it less the node's own updates."""
        total = decode_quanta_untrusted(item.merged.payload, self.n_params)
        for update in item.own:
            indices, quanta = self.decode(update.payload)
            total.add((indices, -quanta))
        return total


def _described(payload: Payload) -> tuple[bytes, int, int, int]:
    """As ``codec.payload`` takes it."""
    return payload.data, payload.form, payload.count, payload.tau_quanta


class BoundedTotal(Total):
    """A sum of whole updates that cannot overflow."""

    def __init__(self, theta: Theta) -> None:
        super().__init__(theta.n_params)
        self._decode = theta.decode
        self._quanta = 0  # sum of the updates' largest entries: none can be larger

    def add_update(self, update: Committed) -> bool:
        """Add an update of somebody else; False if the sum could overflow then."""
        hits = self._decode(update.payload)
        quanta = self._quanta + int(np.abs(hits[1]).max())
        if self._quanta and quanta > MERGED_QUANTA_MAX:
            return False
        self._quanta = quanta
        self.add(hits)
        return True
