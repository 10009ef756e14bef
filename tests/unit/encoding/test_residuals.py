"""Tests of the residual's post-processors: clipping, and a user's own."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparkstrom.encoding import backends
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.residual import (
    PublicationArrays,
    Residual,
    ResidualClipping,
    create_residual,
)
from sparkstrom.encoding.thresholds import FixedThreshold


def make_residual(*values: float) -> tuple[Residual, PublicationArrays]:
    """Return a residual of local training with these values."""
    local = np.array(values, np.float32)
    return create_residual("local", local.size, backends.backend()), PublicationArrays(
        local, 0 * local
    )


@dataclass(frozen=True)
class FirstResidualDropper:
    """A user's post-processor that drops the first parameter's residual."""

    def process(
        self, residual: Residual, at: PublicationArrays, publication: int, tau: float
    ) -> float:
        lost = abs(float(at.learnt[0] - at.theta[0]))
        at.learnt[0] = at.theta[0]
        return lost


def test_clipping_cuts_residual_to_multiple_of_tau_when_due() -> None:
    residual, at = make_residual(4, -3, 0.5)
    clipping = ResidualClipping(2.0, 3)
    assert [clipping.process(residual, at, number, 0.5) for number in (1, 2, 3)] == [0, 0, 3 + 2]
    assert at.learnt.tolist() == [1, -1, 0.5]


def test_encoder_runs_custom_post_processor() -> None:
    encoder = Encoder(5, 3, FixedThreshold(0.5), FirstResidualDropper())
    theta, local = np.zeros(5, np.float32), np.array([4, 0, 0, 0, 0], np.float32)
    encoder.publish(local, theta)
    assert encoder.residual(local, theta).tolist() == [0, 0, 0, 0, 0]
    assert encoder.counters.mass_clipped == 3.5
