"""Bugs that are planted in plain fits and in meshes alike."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sparkstrom.simulation.replica import SIZE, SimLearner

Plant = Callable[[pytest.MonkeyPatch], None]
SEEDS = range(60)  # one of them must catch it; most bugs show in the first


def drops_a_residual(patch: pytest.MonkeyPatch) -> None:
    publish = SimLearner.publish

    def lossy(self: SimLearner) -> bytes:
        payload = publish(self)
        self.residual = [0] * SIZE
        return payload

    patch.setattr(SimLearner, "publish", lossy)
