"""Post-processors of the residual: alone, and several in turn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from sparkstrom.encoding import backends
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.error_feedback import Operands, Residual, residual_of
from sparkstrom.encoding.residuals import InTurn, ResidualClipping
from sparkstrom.encoding.thresholds import FixedThreshold


def kept(*values: float) -> tuple[Residual, Operands]:
    """A residual of local training."""
    local = np.array(values, np.float32)
    return residual_of("local", local.size, backends.backend()), Operands(local, 0 * local)


@dataclass(frozen=True)
class Forget:
    """Somebody else's post-processor: drops the first parameter's residual."""

    def process(self, residual: Residual, at: Operands, publication: int, tau: float) -> float:
        lost = abs(float(at.learnt[0] - at.theta[0]))
        at.learnt[0] = at.theta[0]
        return lost


def test_clipping_cuts_to_a_multiple_of_tau_when_it_is_due() -> None:
    residual, at = kept(4, -3, 0.5)
    clipping = ResidualClipping(2.0, 3)
    assert [clipping.process(residual, at, number, 0.5) for number in (1, 2, 3)] == [0, 0, 3 + 2]
    assert at.learnt.tolist() == [1, -1, 0.5]


@pytest.mark.parametrize(
    ("order", "left", "destroyed"),
    [
        ((ResidualClipping(1.0, 1), Forget()), [0, -1], (3 + 2) + 1),
        ((Forget(), ResidualClipping(1.0, 1)), [0, -1], 4 + 2),
        ((), [4, -3], 0),
    ],
)
def test_in_turn_each_works_on_what_the_others_left_and_all_is_counted(
    order: tuple[ResidualClipping | Forget, ...], left: list[float], destroyed: float
) -> None:
    residual, at = kept(4, -3)
    assert InTurn(order).process(residual, at, 1, 1.0) == destroyed
    assert at.learnt.tolist() == left


@pytest.mark.parametrize("train_on", ["local", "replica"])
def test_an_encoder_runs_them_after_the_message_and_counts_what_they_destroy(
    train_on: str,
) -> None:
    both = InTurn((ResidualClipping(2.0, 1), ResidualClipping(1.0, 1)))
    encoder = Encoder(5, 3, FixedThreshold(0.5), both, train_on=train_on)
    theta, learnt = np.zeros(5, np.float32), np.array([4, 0, 0, 0, 0], np.float32)
    encoder.publish(learnt, theta)
    assert theta[0] == 0.5
    assert encoder.residual(learnt, theta)[0] == 0.5
    assert encoder.counters.mass_clipped == 2.5 + 0.5
