"""Tests of the summary's rescaled momentum, and of warnings if it could not be rescaled."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.fit.accuracy_warnings import horizon_warnings, scaled_hyperparameters
from sparkstrom.models.dense import DenseNetwork
from sparkstrom.models.updaters import Nesterov, Sgd
from sparkstrom.options.gradient_sharing import SharedTrainingMaster

FIT, WORKER = SharedTrainingMaster(), SharedTrainingMaster(horizon="worker")
MOVING = DenseNetwork([2, 2], updater=Nesterov(0.1, 0.9))


class OpaqueModel(DenseNetwork):
    """A model whose optimizer has a part that cannot be inspected."""

    def horizons(self, workers: int) -> dict[str, str]:
        return {"unseen": "PjitFunction"}


@pytest.mark.parametrize(
    ("master", "model", "rows", "expected"),
    [
        (FIT, MOVING, [5, 5, 0, 5], {"workers": 3, "momentum": "0.9 -> 0.729"}),
        (FIT, MOVING, [5, 0], {}),
        (
            SharedTrainingMaster(scaling="limited"),
            MOVING,
            [5] * 16,
            {"workers": 16, "momentum": "0.9 -> 0.4305", "weight of an update": "1 -> 0.5"},
        ),
        (FIT, DenseNetwork([2, 2], updater=Sgd()), [5] * 8, {}),
        (FIT, DenseNetwork([2, 2], updater=Sgd()), [5, 5], {}),
        (WORKER, MOVING, [5, 5], {}),
        (FIT, object(), [5, 5], {}),
    ],
)
def test_summary_lists_rescaled_momentum_and_weight(
    master: Any, model: Any, rows: list[int], expected: Any
) -> None:
    """The summary has rescaled momentum and weights if several workers train with momentum."""
    assert scaled_hyperparameters(master, model, rows) == expected


def test_final_summed_workers_determine_momentum_and_weight() -> None:
    """The number of summed workers at the end determines momentum and the weight of updates."""
    expected = {"workers": 16, "momentum": "0.9 -> 0.81", "weight of an update": "1 -> 0.125"}
    assert scaled_hyperparameters(FIT, MOVING, [5] * 16, summed=2) == expected


def test_warns_if_momentum_cannot_be_rescaled() -> None:
    """A warning is given if momentum counts each worker's own steps or cannot be inspected."""
    (said,) = horizon_warnings(FIT, object(), [5, 5])  # type: ignore[arg-type]
    assert said.startswith("a object counts each worker's own steps")
    opaque = OpaqueModel([2, 2])
    (said,) = horizon_warnings(FIT, opaque, [5, 5])
    assert "cannot be inspected (PjitFunction)" in said
    assert horizon_warnings(WORKER, object(), [5, 5]) == []  # type: ignore[arg-type]
    assert horizon_warnings(FIT, MOVING, [5, 5]) == []
    assert horizon_warnings(FIT, object(), [5, 0]) == []  # type: ignore[arg-type]
