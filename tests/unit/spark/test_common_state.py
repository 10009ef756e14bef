"""What the workers' next round begins with: schedules, buffers, and what is no parameter."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from sparkstrom import ParameterAveragingTrainingMaster
from sparkstrom.models import Adam, DenseNetwork
from sparkstrom.models.base import Batch
from sparkstrom.runtime.averaging import averaged, is_summed
from sparkstrom.runtime.lent_state import LentStates
from sparkstrom.runtime.round_step import Alone, Beginning, Turn, train_alone
from sparkstrom.spark.averaging.common_state import CommonState
from sparkstrom.spark.averaging.round_job import RoundReport

CHANCE = np.random.default_rng(0)


def master_of(**options: Any) -> ParameterAveragingTrainingMaster:
    return ParameterAveragingTrainingMaster(**options)


def turns(count: int) -> Iterator[Turn]:
    for number in range(count):
        features = CHANCE.normal(size=(8, 4)).astype(np.float32)
        yield Turn(Batch(features, CHANCE.integers(0, 2, 8)), (0, number, count))


def report_of(worker: int, done: Alone) -> RoundReport:
    rest = {name: value for name, value in done.updater.items() if not is_summed(value)}
    counts: Any = {"steps": done.steps, "weight": done.weight}
    return RoundReport(worker, "h", "e", 0, **counts, buffers=done.buffers, rest=rest)


def a_round(model: Any, common: CommonState, steps: Sequence[int]) -> None:
    """So many steps of each worker, as their tasks and sums make them."""
    reports, parameters = [], []
    for worker, count in enumerate(steps):
        twin = copy.deepcopy(model)
        state = {k: np.copy(v) if is_summed(v) else v for k, v in common.updater.items()}
        beginning = Beginning(common.parameters.copy(), common.buffers, state, common.steps)
        done = train_alone(twin, beginning, turns(count))
        reports.append(report_of(worker, done))
        parameters.append(done.parameters)
    mean = averaged(parameters, [one.weight for one in reports])
    common.advance(mean, reports, {})


@pytest.mark.parametrize(
    ("scheduler", "options"),
    [
        ("StepLR", {"step_size": 4, "gamma": 0.1}),
        ("CosineAnnealingLR", {"T_max": 40}),
        ("ExponentialLR", {"gamma": 0.9}),
        ("OneCycleLR", {"max_lr": 0.3, "total_steps": 40}),
    ],
)
def test_a_schedule_is_where_one_that_is_stepped_alone_is(scheduler: str, options: Any) -> None:
    """Rates come from the rate before: one that is a mean of two places would stay wrong."""
    torch = pytest.importorskip("torch")
    from sparkstrom.models.torch import TorchModel

    make = partial(getattr(torch.optim.lr_scheduler, scheduler), **options)
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    model = TorchModel(torch.nn.Linear(4, 2), torch.nn.CrossEntropyLoss(), sgd, scheduler=make)
    common = CommonState(model, master_of(), model.initial(), LentStates(), 0)
    alone = sgd([torch.nn.Parameter(torch.zeros(1))])
    schedule = make(alone)
    for each in ((4, 3), (2, 4), (4, 4), (3, 4)):
        a_round(model, common, each)
        for _ in range(4):
            alone.step()
            schedule.step()
        assert common.updater["scheduler/last_epoch"] == schedule.last_epoch
        assert common.updater["groups/0/lr"] == pytest.approx(alone.param_groups[0]["lr"])


def test_a_saved_state_that_is_no_worker_s_own_is_nobody_s() -> None:
    """Files of before have one of partition -1; it would stay for ever."""
    model, master = DenseNetwork([4, 2], updater=Adam()), master_of(save_updater="own")
    (fresh,) = CommonState(model, master, model.initial(), LentStates(), 0).copies()
    saved = LentStates(fresh, {-1: fresh, 1: fresh})
    assert [*CommonState(model, master, model.initial(), saved, 0).own] == [1]
