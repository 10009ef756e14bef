"""Theta: the shared parameters as one process holds them, on the exact grid.

Whoever holds one applies every commit once, in any order, and has the same bits.
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
from sparkstrom.encoding.backends import SCRATCH_BYTES, kernels
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
    """f32[n_params], every value a multiple of 2^-k."""

    def __init__(self, n_params: int, k: int, layers: Layers | None = None) -> None:
        self.values: Flat = np.zeros(n_params, np.float32)
        self.layers = layers  # whose thresholds are multiples of an update's tau
        self.k, self.q = k, quantum(k)
        self.commit = CommitNo(0)  # newest commit applied
        self.breaches = 0  # parameters that left the exact range, counted
        self.first_breach = -1
        self.buffers = b""  # arrays beside the parameters, as the model lays them out
        self._scratch = np.empty(SCRATCH_BYTES, np.uint8)

    @property
    def n_params(self) -> int:
        return self.values.size

    def decode(self, payload: Payload) -> Hits:
        """The update's indices and quanta. Raise WireError where it is none."""
        return decode_update_untrusted(*_described(payload), self.n_params, self.layers)

    def read(self, payload: Payload) -> Hits | Bitmap:
        """The update as ``add`` takes it soonest. Raise WireError where it is none."""
        if self.layers is not None or payload.form not in BITMAPS:
            return self.decode(payload)
        return read_bitmap_untrusted(*_described(payload), self.n_params)

    def add(self, hits: Hits | Bitmap, local: Flat | None = None) -> None:
        """theta, and local where there is one, move by the hits."""
        kernel = kernels()
        if isinstance(hits, Bitmap):
            step = hits.tau_quanta * self.q
            rest = (hits.packed, hits.side, step, self.q, self._scratch)
            if local is None:
                self.count(kernel.bitmap_add(self.values, *rest))
            else:
                self.count(kernel.bitmap_add_both(self.values, local, *rest))
        elif local is None:
            self.count(kernel.apply_hits(self.values, *hits, self.q))
        else:
            self.count(kernel.apply_hits_both(self.values, local, *hits, self.q))

    def add_sum(self, total: Total, local: Flat | None = None) -> None:
        """theta, and local where there is one, move by merged updates."""
        kernel = kernels()
        self.breaches += total.overflows
        if total.array is None:
            self.add(total.hits, local)
        elif local is None:
            self.count(kernel.add_quanta(self.values, total.array, self.q))
        else:
            self.count(kernel.add_quanta_both(self.values, local, total.array, self.q))

    def count(self, breaches: tuple[int, int]) -> None:
        """Take note of parameters that left the exact range."""
        number, first = breaches
        if number and not self.breaches:
            self.first_breach = first
        self.breaches += number

    def chunk(self, index: int, less: Iterable[Hits] = ()) -> Chunk:
        """Part of a snapshot, as of ``commit``: without updates that no commit has yet."""
        begin = index * CHUNK_PARAMS
        if begin >= self.n_params:
            return Chunk(index=index, commit=self.commit, payload=self.buffers)
        part = self.values[begin : begin + CHUNK_PARAMS]
        for indices, quanta in less:
            first, last = np.searchsorted(indices, (begin, begin + part.size))
            part = part.copy()
            hits = indices[first:last] - np.int32(begin), -quanta[first:last]
            kernels().apply_hits(part, *hits, self.q)
        return Chunk(index=index, commit=self.commit, payload=encode_theta(part))

    def install(
        self,
        chunks: Sequence[Chunk],
        held: Sequence[Committed | MergedRange],
        own: Sequence[Update],
        commit: CommitNo,
    ) -> None:
        """Become the snapshot, plus what each chunk lacks of ``held``, plus ``own``.

        A chunk has all of a sum or nothing: no sum of ``held`` goes past its commit.
        """
        has = np.zeros(chunk_count(self.n_params), np.int64)
        *of_parameters, of_buffers = chunks
        self.buffers = of_buffers.payload
        for chunk in of_parameters:
            part = self.values[chunk.index * CHUNK_PARAMS : (chunk.index + 1) * CHUNK_PARAMS]
            part[:] = decode_theta_untrusted(chunk.payload, part.size, self.k)
            has[chunk.index] = chunk.commit
        for committed in held:
            if isinstance(committed, MergedRange):
                indices, quanta = decode_quanta_untrusted(committed.payload, self.n_params).hits
                lacking = has[indices // CHUNK_PARAMS] <= committed.after
                self.add((indices[lacking], quanta[lacking]))
                continue
            if committed.payload.form == Form.BUFFERS:
                if committed.commit > of_buffers.commit:
                    self.buffers = committed.payload.data
                continue
            indices, quanta = self.decode(committed.payload)
            lacking = has[indices // CHUNK_PARAMS] < committed.commit
            self.add((indices[lacking], quanta[lacking]))
        for update in own:
            if update.payload.form != Form.BUFFERS:
                self.add(self.read(update.payload))
        self.commit = commit

    def merge(self, wanted: SendMerged) -> MergedRange:
        """The sum of these commits; looks at no parameter."""
        total = Total(self.n_params)
        for entry in wanted.entries:
            if isinstance(entry, MergedRange):
                total.add_total(decode_quanta_untrusted(entry.payload, self.n_params))
            else:
                total.add(self.decode(entry.payload))
        self.breaches += total.overflows
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

    def digest(self) -> str:
        """SHA-256 of parameters and buffers, as hex."""
        return hashlib.sha256(self.values.tobytes() + self.buffers).hexdigest()


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
