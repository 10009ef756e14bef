"""Replica: model, theta, encoder: what one worker's training step does to its memory.

``train_on="local"``: the model works on ``local = theta + residual``; there is no residual array.
``train_on="replica"``: the model works on a copy of theta, and what it changed goes to the
encoder's residual (Strom 2015; DL4J's EncodedGradientsAccumulator).
"""

from __future__ import annotations

import numpy as np

from sparkstrom.base.errors import TrainingError
from sparkstrom.encoding.encoder import Encoded, Encoder
from sparkstrom.models.base import Batch, Flat, FlatModel
from sparkstrom.protocol.events import Install
from sparkstrom.runtime.inbox import Merged
from sparkstrom.runtime.theta import Hits, Theta


class Replica:
    """One worker's parameters. Every method runs in its trainer's thread."""

    def __init__(self, model: FlatModel, theta: Theta, encoder: Encoder, *, local: bool) -> None:
        self.model, self.theta, self.encoder = model, theta, encoder
        self._trains_local = local
        self._working: Flat = theta.values.copy()  # what the model changes in place
        self._delta: Flat | None = None if local else np.zeros_like(self._working)
        model.bind(self._working)

    @property
    def local(self) -> Flat | None:
        """theta + residual, where the model trains on it."""
        return self._working if self._trains_local else None

    def apply(self, hits: Hits, commit: int) -> None:
        """Somebody else's update."""
        self.theta.add(hits, self.local)
        self.theta.commit = commit

    def apply_merged(self, merged: Merged) -> None:
        """Many of somebody else's updates, summed."""
        self.theta.add_sum(merged.total, self.local)
        self.theta.commit = merged.commit

    def install(self, install: Install) -> None:
        """Take another theta; the residual stays."""
        before = self.theta.values.copy()
        self.theta.install(install.chunks, install.held, install.own, install.commit)
        if self._trains_local:
            self._working += self.theta.values - before

    def step(self, batch: Batch) -> float:
        """Train on one minibatch; return its mean loss. Raise TrainingError where it is none."""
        if not self._trains_local:
            self._working[:] = self.theta.values
        loss = self.model.step(batch)
        if not np.isfinite(loss):
            raise TrainingError(NOT_FINITE_LOSS.format(loss))
        if self._delta is not None:
            self._delta += self._working - self.theta.values
        return loss

    def publish(self) -> Encoded | None:
        """Take out of the residual what reached the threshold and put it into theta.

        In ``"replica"`` mode what several steps changed is published together.
        """
        try:
            encoded = self.encoder.publish(
                self._working if self._delta is None else self._delta, self.theta.values
            )
        except TrainingError as error:
            raise TrainingError(self._with_layer(error)) from None
        if self._delta is not None:
            self._delta[:] = 0.0
        return encoded

    def _with_layer(self, error: TrainingError) -> str:
        """The encoder knows the index of a bad parameter, the model where that is."""
        index = getattr(error, "index", None)
        working = self._working if self._delta is None else self._delta
        bad = np.flatnonzero(~np.isfinite(working))
        if index is None and bad.size:
            index = int(bad[0])
        where = "" if index is None else f" ({self.model.layer_of(index)})"
        return f"{error.reason}{where}"

    # -- between fits ----------------------------------------------------------------------------

    def residual(self) -> Flat:
        """A copy of what was learnt and not sent."""
        if self._trains_local:
            return self._working - self.theta.values
        return self.encoder.residual.copy()

    def add_residual(self, residual: Flat) -> None:
        """What another fit left: residuals add."""
        if self._trains_local:
            self._working += residual
        else:
            self.encoder.residual += residual


NOT_FINITE_LOSS = (
    "the loss is {}: training diverges or the data hold such values; lower the learning rate, "
    "clip gradients, or look at the features' scale"
)
