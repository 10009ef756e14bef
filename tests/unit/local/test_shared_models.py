"""Networks of one model object: each has its own buffers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sparkstrom import ParallelWrapper
from sparkstrom.fit.network_state import hand_over
from sparkstrom.models.torch import TorchModel

X = np.random.default_rng(0).normal(5, 3, (16, 4)).astype(np.float32)


@pytest.fixture
def model() -> TorchModel:
    module = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    return TorchModel(module, nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1))


@pytest.fixture
def wrappers(model: TorchModel) -> Iterator[list[ParallelWrapper]]:
    """Two of the same model object; others that the test makes can be added."""
    made = [ParallelWrapper(model, 1, progress=False) for _ in range(2)]
    yield made
    for wrapper in made:
        wrapper.close()


def learn(wrapper: ParallelWrapper, mean: float) -> np.ndarray:
    """End a fit that changed only the running mean; return the outputs for X afterwards."""
    other = copy.deepcopy(wrapper.model)
    other.module[1].running_mean.fill_(mean)
    theta: Any = SimpleNamespace(to_host=lambda: wrapper.parameters, buffers=other.buffers_bytes())
    wrapper._state.keep_interrupted(theta, SimpleNamespace(first_epoch=0), 1)
    return np.array(wrapper.predict(X))


def test_each_network_of_a_model_keeps_its_own_buffers(
    model: TorchModel, wrappers: list[ParallelWrapper], tmp_path: Path
) -> None:
    one, two = wrappers
    fresh = np.array(two.predict(X))
    first = learn(one, 3)
    assert not np.array_equal(first, fresh)
    assert np.array_equal(two.predict(X), fresh)
    second = learn(two, 5)
    assert np.array_equal(one.predict(X), first)
    assert one._state.theta({}).buffers != two._state.theta({}).buffers
    one.save(tmp_path / "one.npz")
    loaded = ParallelWrapper.load(tmp_path / "one.npz", model=model, workers=1, progress=False)
    later = ParallelWrapper(model, 1, progress=False)
    wrappers += loaded, later
    assert np.array_equal(two.predict(X), second)
    assert np.array_equal(loaded.predict(X), first)
    assert np.array_equal(later.predict(X), fresh)
    assert hand_over(model) == later._state.buffers  # for an estimator's copy


def test_buffers_that_the_user_changes_stay_changed(wrappers: list[ParallelWrapper]) -> None:
    one, two = wrappers
    one.module[1].running_mean.fill_(7)
    two.predict(X)
    assert one.module[1].running_mean.tolist() == [7] * 8
