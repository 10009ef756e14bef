"""Tests of the state with which a round starts: schedules, buffers and diverged parameters."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from sparkstrom import ParameterAveragingTrainingMaster
from sparkstrom.base.errors import TrainingError
from sparkstrom.models import Adam, DenseNetwork, Nesterov
from sparkstrom.models.base import Batch
from sparkstrom.rounds.averaging import (
    RoundResults,
    RoundState,
    average_states,
    is_averaged,
    weighted_mean,
)
from sparkstrom.rounds.worker_round import (
    LocalRoundResult,
    RoundBatch,
    RoundReport,
    RoundStart,
    train_locally,
)
from sparkstrom.runtime.optimizer_states import OptimizerStates

CHANCE = np.random.default_rng(0)


def make_training_master(**options: Any) -> ParameterAveragingTrainingMaster:
    return ParameterAveragingTrainingMaster(**options)


def make_round_batches(count: int) -> Iterator[RoundBatch]:
    """Yield this many random minibatches of a round."""
    for number in range(count):
        features = CHANCE.normal(size=(8, 4)).astype(np.float32)
        yield RoundBatch(Batch(features, CHANCE.integers(0, 2, 8)), (0, number, count))


def make_report(worker: int, done: LocalRoundResult) -> RoundReport:
    counts: Any = {"steps": done.steps, "weight": done.weight}
    return RoundReport(worker, **counts, buffers=done.buffers)


def train_round(model: Any, common: RoundState, steps: Sequence[int]) -> None:
    """Train a round with this many steps per worker, and advance the common state."""
    reports, parameters, states = [], [], []
    for worker, count in enumerate(steps):
        twin = copy.deepcopy(model)
        state = {k: np.copy(v) if is_averaged(v) else v for k, v in common.updater.items()}
        beginning = RoundStart(common.parameters.copy(), common.buffers, state, common.steps)
        done = train_locally(twin, beginning, make_round_batches(count))
        reports.append(make_report(worker, done))
        parameters.append(done.parameters)
        states.append(done.updater)
    weights = [one.weight for one in reports]
    state = average_states(states, weights, steps)
    common.advance(RoundResults(reports, weighted_mean(parameters, weights), state))


@pytest.mark.parametrize(
    ("scheduler", "options"),
    [
        ("StepLR", {"step_size": 4, "gamma": 0.1}),
        ("CosineAnnealingLR", {"T_max": 40}),
        ("ExponentialLR", {"gamma": 0.9}),
        ("OneCycleLR", {"max_lr": 0.3, "total_steps": 40}),
    ],
)
def test_averaged_scheduler_state_equals_scheduler_stepped_alone(
    scheduler: str, options: Any
) -> None:
    """Schedulers multiply the previous rate, so a mean of rates at two places would stay wrong."""
    torch = pytest.importorskip("torch")
    from sparkstrom.models.torch import TorchModel

    make = partial(getattr(torch.optim.lr_scheduler, scheduler), **options)
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    model = TorchModel(
        torch.nn.Linear(4, 2),
        torch.nn.CrossEntropyLoss(),
        sgd,
        scheduler=make,
        scheduler_interval="step",
    )
    common = RoundState(model, make_training_master(), model.initial(), OptimizerStates(), 0)
    alone = sgd([torch.nn.Parameter(torch.zeros(1))])
    schedule = make(alone)
    for each in ((4, 3), (2, 4), (4, 4), (3, 4)):
        train_round(model, common, each)
        for _ in range(4):
            alone.step()
            schedule.step()
        assert common.updater["scheduler/last_epoch"] == schedule.last_epoch
        assert common.updater["groups/0/lr"] == pytest.approx(alone.param_groups[0]["lr"])


def test_saved_state_of_partition_minus_one_is_ignored() -> None:
    """The state of partition -1 in older checkpoints is ignored, or it would be kept for ever."""
    model, master = DenseNetwork([4, 2], updater=Adam()), make_training_master(save_updater="own")
    (fresh,) = (
        RoundState(model, master, model.initial(), OptimizerStates(), 0).copy_states().encoded()
    )
    saved = OptimizerStates(fresh, {-1: fresh, 1: fresh})
    assert [*RoundState(model, master, model.initial(), saved, 0).own] == [1]


def make_batch_norm_model(mean: float, seen: int) -> Any:
    """Return a model as a worker has it after minibatches with this mean."""
    torch = pytest.importorskip("torch")
    from sparkstrom.models.torch import TorchModel

    norm = torch.nn.BatchNorm1d(1)
    norm.running_mean.fill_(mean)
    norm.num_batches_tracked.fill_(seen)
    return TorchModel(norm, torch.nn.MSELoss(), torch.optim.SGD)


def make_buffers_report(model: Any, worker: int, weight: float) -> RoundReport:
    options: Any = {"steps": 1, "weight": weight, "buffers": model.buffers_bytes()}
    return RoundReport(worker, **options)


def test_buffers_are_averaged_with_row_weights() -> None:
    """Buffers are averaged with the rows' weights, like parameters."""
    model = make_batch_norm_model(0.0, 0)
    common = RoundState(model, make_training_master(), model.initial(), OptimizerStates(), 0)
    few, many, none = (
        make_batch_norm_model(8.0, 5),
        make_batch_norm_model(4.0, 3),
        make_batch_norm_model(99.0, 99),
    )
    weights = {few: 1.0, many: 3.0, none: 0.0}
    reports = [
        make_buffers_report(one, at, weight) for at, (one, weight) in enumerate(weights.items())
    ]
    common.advance(RoundResults(reports, model.initial()))
    mean, variance = np.frombuffer(common.buffers, np.float32, 2)
    assert (mean, variance) == (5.0, 1.0)
    assert np.frombuffer(common.buffers, np.int64, 1, 8) == 5


class BufferedNetwork(DenseNetwork):
    """A user's network whose ``average_buffers`` takes no weights."""

    def buffers_bytes(self) -> bytes:
        return b"bytes"

    def load_buffers_bytes(self, buffers: bytes) -> None:
        pass

    def average_buffers(self, reports: list[bytes]) -> bytes:
        return b"+".join(reports)


def test_model_without_weighed_buffers_averages_unweighted() -> None:
    """Models without ``weighed_buffers`` average their buffers without weights."""
    model = BufferedNetwork([4, 2])
    common = RoundState(model, make_training_master(), model.initial(), OptimizerStates(), 0)
    reports = [make_buffers_report(model, at, at + 1.0) for at in (0, 1)]
    common.advance(RoundResults(reports, model.initial()))
    assert common.buffers == b"bytes+bytes"


@pytest.mark.parametrize("outer", [None, Nesterov(0.7, 0.9)])
def test_nonfinite_parameters_end_fit_naming_layer(outer: Any) -> None:
    """Parameters that diverge in a worker's last step appear in no loss."""
    model = DenseNetwork([4, 3, 2])
    common = RoundState(
        model, make_training_master(outer=outer), model.initial(), OptimizerStates(), 0
    )
    began, mean = common.parameters, model.initial()
    mean[[3, 14]] = -np.inf, np.nan
    words = r"layer 1 weights is -?inf after round 1: training diverges.*lower the learning rate"
    with pytest.raises(TrainingError, match=words), np.errstate(all="ignore"):
        common.advance(RoundResults([RoundReport(0, steps=1, weight=1.0)], mean))
    assert common.parameters is began
