"""Tests of several networks that are made of one model object, which contains the buffers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from sparkstrom import ParallelWrapper
from sparkstrom.local import rounds as local_rounds
from sparkstrom.models.base import FlatModel
from sparkstrom.models.torch import TorchModel
from tests.unit.rounds.in_process_fits import InProcessWorkers

X = np.random.default_rng(0).normal(5, 3, (60, 4)).astype(np.float32)
Y = (X[:, 0] > 5).astype(np.int64)

Start = Callable[[FlatModel], ParallelWrapper]


class MaskLayer(nn.Module):
    """Multiplies by a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.mask


def make_model(layer: nn.Module | None = None) -> TorchModel:
    """Return a small network with this layer, or else with BatchNorm."""
    module = nn.Sequential(nn.Linear(4, 8), layer or nn.BatchNorm1d(8), nn.Linear(8, 2))
    return TorchModel(module, nn.CrossEntropyLoss(), torch.optim.SGD)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that makes a wrapper, whose worker trains in this process."""
    monkeypatch.setattr(local_rounds, "ActiveWorkers", InProcessWorkers)
    made: list[ParallelWrapper] = []

    def make(model: FlatModel) -> ParallelWrapper:
        options = {"training_mode": "AVERAGING", "batch_size_per_worker": 10}
        made.append(ParallelWrapper(model, 1, progress=False, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def fit(network: ParallelWrapper) -> list[str]:
    """Train an epoch; return the warnings about buffers."""
    warnings = network.fit((X, Y), 1, run_log="").warnings
    return [each for each in warnings if "buffers" in each]


def test_fit_with_buffers_of_another_network_warns(start: Start) -> None:
    """Each change of networks is reported, also for a copy of the model that was made too late."""
    model = make_model()
    one, two = start(model), start(model)
    assert fit(one) == []
    (warning,) = fit(two)
    assert "copy.deepcopy(model)" in warning
    assert fit(two) == []
    assert len(fit(one)) == 1
    assert len(fit(start(copy.deepcopy(model)))) == 1


def test_networks_without_shared_trained_buffers_get_no_warning(start: Start) -> None:
    """Copies, constant buffers and another module's head are not a reason to warn."""
    model, constant = make_model(), make_model(MaskLayer())
    for each in (copy.deepcopy(model), model, constant, constant):
        assert fit(start(each)) == []


def test_network_with_parameters_of_another_gets_no_buffer_warning(
    start: Start, tmp_path: Path
) -> None:
    """Assigning its parameters, or loading them, is a reason to share its buffers."""
    model = make_model()
    one, two = start(model), start(model)
    fit(one)
    two.parameters = one.parameters
    assert fit(two) == []
    two.save(tmp_path / "two")
    loaded = ParallelWrapper.load(tmp_path / "two", model=model, workers=1, progress=False)
    assert loaded._state.shared_buffers_warning() is None
    loaded.close()


def test_load_copies_model_that_another_network_uses(start: Start, tmp_path: Path) -> None:
    """The given model is copied if a network uses it, else its buffers would be replaced."""
    model = make_model()
    one = start(model)
    one.save(tmp_path / "one")
    fit(one)
    before = np.array(one.predict(X))
    loaded = ParallelWrapper.load(tmp_path / "one", model=model, workers=1, progress=False)
    assert loaded.module[1].num_batches_tracked == 0
    np.testing.assert_array_equal(one.predict(X), before)
    loaded.close()
    other = make_model()
    given = ParallelWrapper.load(tmp_path / "one", model=other, workers=1, progress=False)
    assert given.model is other
    given.close()
