"""Replica: model, theta, encoder: what one worker's training step does to its memory.

``train_on="local"``: the model works on ``local = theta + residual``; there is no residual array.
``train_on="replica"``: the model works on a copy of theta, and what it changed goes to the
encoder's residual (Strom 2015; DL4J's EncodedGradientsAccumulator).

All of it is memory of theta's backend, on the host or on a device; the model is bound to it there.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from sparkstrom.base.errors import TrainingError
from sparkstrom.codec.messages import BUFFERS, Chunk, Committed, Update
from sparkstrom.codec.payload import Bitmap
from sparkstrom.encoding.encoded import Encoded
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.totals import Hits, Total
from sparkstrom.models.base import Batch, Buffered, Flat, FlatModel
from sparkstrom.models.outputs import measured
from sparkstrom.protocol.common.events import DeliverMerged, Install
from sparkstrom.runtime.theta import Theta
from sparkstrom.runtime.trainer_inbox import Merged


@dataclass(slots=True)
class Own:
    """An update of its own that has no commit yet; read only if somebody wants a copy of theta."""

    update: Encoded | Update | None  # None: buffers, which add nothing
    hits: Hits | None = None


class Replica:
    """One worker's parameters. Every method runs in its trainer's thread, but for ``chunk``.

    theta is all commits up to its own plus ``own``: what the trainer published since, oldest first.
    """

    def __init__(self, model: FlatModel, theta: Theta, encoder: Encoder, *, local: bool) -> None:
        self.model, self.theta, self.encoder = model, theta, encoder
        self._memory = theta.backend.memory
        self._working = theta.open_local() if local else theta.copy()  # the model changes it
        self._delta = None if local else self._memory.zeros(theta.n_params, np.float32)
        self._own: deque[Own] = deque()
        self._installed = False
        self._lock = threading.Lock()  # theta and the commit that it is at change together
        model.bind(self._working)

    @property
    def local(self) -> Flat | None:
        """theta + residual, where the model trains on it; memory of theta's backend."""
        return self.theta.local

    @property
    def commit(self) -> int:
        """Up to where theta has all commits."""
        return self.theta.commit

    def digest(self) -> str:
        """A hash of theta and its buffers."""
        return self.theta.digest()

    def chunk(self, index: int) -> Chunk:
        """Part of a snapshot of theta, for a neighbour; from any thread."""
        with self._lock:
            adding = [own for own in self._own if own.update is not None]
            return self.theta.chunk(index, [self._read(own) for own in adding])

    def _read(self, own: Own) -> Hits:
        if own.hits is None:
            assert own.update is not None, "it adds nothing"
            own.hits = self.theta.decode(own.update)
        return own.hits

    def apply(self, hits: Hits | Bitmap, commit: int) -> None:
        """Somebody else's update."""
        with self._lock:
            self.theta.add(hits)
            self.theta.commit = commit

    def apply_update(self, update: Committed) -> None:
        """The same, as it came."""
        self.apply(self.theta.read(update), update.commit)

    def passed(self, commit: int) -> None:
        """The oldest own update is committed."""
        with self._lock:
            self._own.popleft()
            self.theta.commit = commit

    def apply_merged(self, merged: Merged[Total]) -> None:
        """Many of somebody else's updates, summed here, and own ones among them."""
        self._apply_sum(merged.total, merged.passed, merged.commit)

    def apply_range(self, item: DeliverMerged) -> None:
        """Many updates, summed by a neighbour, with own ones among them."""
        self._apply_sum(self.theta.read_merged(item), len(item.own), item.merged.commit)

    def _apply_sum(self, total: Total, passed: int, commit: int) -> None:
        with self._lock:
            self.theta.add_sum(total)
            for _ in range(passed):
                self._own.popleft()
            self.theta.commit = commit

    def install(self, install: Install) -> None:
        """Take another theta; the residual stays."""
        with self._lock:
            self.theta.install(install.chunks, install.held, install.own, install.commit)
            self._own = deque(
                Own(None if update.form == BUFFERS else update) for update in install.own
            )
        self.begin()

    def begin(self) -> None:
        """theta is there: the model takes its buffers, unless it goes on with its own."""
        if isinstance(self.model, Buffered) and self.theta.buffers and not self._installed:
            self.model.load_buffers_bytes(self.theta.buffers)
        self._installed = True

    def take_buffers(self, buffers: bytes, commit: int) -> None:
        """The average of all workers' buffers; the model goes on with its own."""
        with self._lock:
            self.theta.buffers, self.theta.commit = buffers, commit

    def report_buffers(self) -> bytes:
        """The model's buffers as they are, to be published; empty where it has none."""
        buffers = self.model.buffers_bytes() if isinstance(self.model, Buffered) else b""
        if buffers:
            with self._lock:
                self._own.append(Own(None))
        return buffers

    def step(self, batch: Batch) -> float:
        """Train on one minibatch; return its mean loss. Raise TrainingError where it is none."""
        if self._delta is not None:
            self.theta.copy_to(self._working)
        loss = self.model.step(batch)
        if not np.isfinite(loss):
            raise TrainingError(NOT_FINITE_LOSS.format(loss))
        if self._delta is not None:
            self.theta.subtract_from(self._working, self._delta)
        return loss

    def measure(self, batches: Iterable[Batch], metric: str) -> tuple[float, float]:
        """(sum of weight x loss, or of weights of hits; sum of weights) of rows under theta.

        What the model has learnt beyond theta is set aside meanwhile, and is there again after.
        """
        learnt = self._memory.copy(self._working)
        self.theta.copy_to(self._working)
        try:
            figures = [measured(self.model, batch, metric) for batch in batches]
        finally:
            self._memory.assign(self._working, learnt)
        sums, weights = zip(*figures, strict=True) if figures else ((), ())
        return math.fsum(sums), math.fsum(weights)

    def hold_back(self) -> None:
        """Keep what the last step changed for a later publication."""
        if self._delta is not None:
            self.encoder.accumulate(self._delta)

    def publish(self) -> Encoded | None:
        """Take out of the residual what reached the threshold and put it into theta."""
        with self._lock:
            encoded = self.theta.publish(self.encoder, self._delta)
            if encoded is not None:
                self._own.append(Own(encoded))
        return encoded

    # -- between fits ----------------------------------------------------------------------------

    def residual(self) -> Flat:
        """A copy of what was learnt and not sent."""
        return self.theta.residual(self.encoder)

    def unsent_mass(self) -> float:
        """Sum of absolute values of what it has learnt and no commit has (parameter units)."""
        adding = [own for own in self._own if own.update is not None]
        quanta = sum(int(np.abs(self._read(own)[1].astype(np.int64)).sum()) for own in adding)
        return quanta * self.theta.q + float(np.abs(self.residual().astype(np.float64)).sum())

    def add_residual(self, residual: Flat) -> None:
        """What another fit left: residuals add."""
        self.theta.add_residual(self.encoder, residual)

    def residual_mass(self) -> float:
        """Sum of absolute values, in parameter units: one pass over it."""
        return self.theta.residual_norms(self.encoder)[0]

    def residual_norm(self) -> float:
        """Euclidean, in parameter units."""
        return self.theta.residual_norms(self.encoder)[1]


NOT_FINITE_LOSS = (
    "the loss is {}: training diverges or the data hold such values; lower the learning rate, "
    "clip gradients, or look at the features' scale"
)
