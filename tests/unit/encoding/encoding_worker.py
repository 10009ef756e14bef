"""A worker's encoder together with a remote replica that receives its messages."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.codec.payload import decode_update_untrusted
from sparkstrom.encoding import backends
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.forms import Encoded
from sparkstrom.encoding.grid import quantum

K = 20  # exponent of the grid


class Worker:
    """An encoder with its arrays, and a remote replica that applies the decoded messages."""

    def __init__(
        self, threshold: Any, train_on: str = "local", n: int = 200_000, **options: Any
    ) -> None:
        self.encoder = Encoder(n, K, threshold, train_on=train_on, **options)
        self.theta, self.local, self.elsewhere = np.zeros((3, n), np.float32)

    def learn(
        self, delta: NDArray[np.float32], *, publish: bool = True, is_last: bool = False
    ) -> Encoded | None:
        """Add changes and publish, if wanted; check that the remote replica equals theta."""
        learnt = self.local
        if self.encoder.train_on == "local":
            self.local += delta
        else:
            learnt = delta.copy()
        if not publish:
            if self.encoder.train_on == "replica":
                self.encoder.accumulate(delta)
            return None
        update = self.encoder.publish(learnt, self.theta, is_last=is_last)
        if update is not None:
            hits = decode_update_untrusted(
                update.payload,
                update.form,
                update.count,
                update.tau_quanta,
                self.theta.size,
                self.encoder.layers,
            )
            backends.kernels().apply_hits(self.elsewhere, *hits, quantum(K))
        np.testing.assert_array_equal(self.elsewhere, self.theta)
        return update

    def held(self) -> NDArray[np.float32]:
        """Return theta plus the residual: everything learnt so far."""
        return self.theta + self.encoder.residual(self.local, self.theta)
