"""Tests of synchronous rounds on one machine: results, deaths, early stopping, schedules."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

from sparkstrom import EarlyStopping, ParallelWrapper, TrainingError
from sparkstrom.models import DenseNetwork, Sgd
from sparkstrom.models.base import Batch
from sparkstrom.models.updaters import Adam, Nesterov

torch = pytest.importorskip(
    "torch", reason="torch is not here: the tests pin it for CPython 3.11, whose build is CPU only"
)
from torch import nn  # noqa: E402

from sparkstrom.models.torch import TorchModel  # noqa: E402

ROWS, WORKERS, BATCH, EPOCHS = 101, 2, 10, 3
LEASE_S = 4.0  # longer than any process waits for a processor on a busy machine
CHANCE = np.random.default_rng(4)
X = CHANCE.normal(size=(ROWS, 6)).astype(np.float32)
Y = (X[:, 0] > X[:, 1]).astype(int)


def network(updater: Any) -> DenseNetwork:
    return DenseNetwork([6, 12, 2], updater=updater, seed=3)


class RecordingAccumulator:
    """An accumulator that records each worker's rows per round, and returns the weighted mean."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []

    def __call__(self, before: Any, after: Any, rows: Any) -> Any:
        self.rows.append(rows.tolist())
        return (rows / rows.sum() @ after.astype(np.float64)).astype(np.float32)


class Killer:
    """A listener that kills or stops a worker process in the middle of a fit."""

    def __init__(self, sign: int) -> None:
        self._sign = sign
        self.killed: list[int] = []
        self.wrapper: Any = None

    def on_iteration(self, event: Any) -> None:
        if not self.killed and event.minibatches >= 4:
            self.killed.append(self.wrapper.worker_pids()[0])
            os.kill(self.killed[0], self._sign)


@pytest.mark.slow
def test_rounds_of_one_minibatch_equal_training_on_all_rows(wrapper: Any) -> None:
    """With one minibatch of all rows per worker, SGD equals one machine's SGD on all rows.

    A worker's weight in the average is the sum of its rows' weights.
    """
    weights = CHANCE.integers(0, 4, ROWS).astype(np.float32)
    made = wrapper(
        network(Sgd(0.3)), WORKERS, training_mode="AVERAGING", batch_size_per_worker=ROWS,
        progress=False,
    )  # fmt: skip
    summary = made.fit((X, Y, weights), epochs=20)
    alone = network(Sgd(0.3))
    params = alone.initial()
    alone.bind(params)
    for _ in range(20):
        alone.step(Batch(X, Y, weights))
    assert np.abs(made.parameters - params).max() < 1e-6
    assert np.abs(params - alone.initial()).max() > 0.01
    assert summary.replicas_equal
    assert len(summary.hashes) == WORKERS + 1
    assert summary.minibatches == summary.minibatches_expected == 20 * WORKERS
    assert summary.warnings == []
    print(summary)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("averages", "sign", "how"),
    [
        (True, signal.SIGKILL, "was killed by SIGKILL"),
        (False, signal.SIGSTOP, "gave no sign of life for 4 s"),
    ],
)
def test_killed_or_stopped_worker_does_not_change_result(
    wrapper: Any, averages: bool, sign: int, how: str
) -> None:
    """A killed or stopped worker's replacement gets its optimizer state, so results are equal."""
    killer, rounds, found = Killer(sign), RecordingAccumulator(), []
    for listeners in ([], [killer]):
        made = killer.wrapper = wrapper(
            network(Adam(0.01)), WORKERS, training_mode="CUSTOM", accumulator=rounds,
            averaging_frequency=2, average_updaters=averages, batch_size_per_worker=BATCH,
            debug_longer_iterations=50, progress=False, lease_s=LEASE_S,
        )  # fmt: skip
        summary = made.fit((X, Y), epochs=EPOCHS, listeners=listeners)
        found.append(made.parameters)
        assert summary.replicas_equal
        assert summary.minibatches == summary.minibatches_expected
        assert [round(epoch.epoch) for epoch in summary.history] == [1, 2, 3]
        assert summary.history[-1].examples == ROWS
    np.testing.assert_array_equal(*found)
    assert len(killer.killed) == len(summary.faults) == 1
    assert how in summary.departures[0]
    half = len(rounds.rows) // 2
    assert rounds.rows[:half] == rounds.rows[half:]
    assert sum(map(sum, rounds.rows[:half])) == EPOCHS * ROWS
    assert max(map(max, rounds.rows)) == 2 * BATCH


@pytest.mark.slow
def test_step_longer_than_lease_does_not_replace_worker(wrapper: Any) -> None:
    """A worker is not replaced if its step takes longer than its lease."""
    made = wrapper(
        network(Sgd(0.3)), 1, training_mode="AVERAGING", batch_size_per_worker=ROWS,
        debug_longer_iterations=int(1000 * LEASE_S) + 1000, lease_s=LEASE_S, progress=False,
    )  # fmt: skip
    assert made.fit((X, Y)).departures == []


class HangingNetwork(DenseNetwork):
    """A network whose third step never ends, although its process lives."""

    def step(self, batch: Batch) -> float:
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 3:
            threading.Event().wait()
        return super().step(batch)


@pytest.mark.slow
def test_step_timeout_ends_fit(wrapper: Any) -> None:
    made = wrapper(
        HangingNetwork([6, 12, 2]), 1, training_mode="AVERAGING", batch_size_per_worker=BATCH,
        step_timeout=2.0, progress=False,
    )  # fmt: skip
    with pytest.raises(TrainingError, match="one training step took longer than 2 s") as error:
        made.fit((X, Y))
    assert error.value.partition == 0
    assert "threading.Event().wait()" in error.value.trace


@pytest.mark.slow
def test_early_stopping_and_checkpoints_work_in_rounds(wrapper: Any, tmp_path: Any) -> None:
    """In rounds, early stopping ends the fit, and its checkpoint restores the parameters."""
    options = {
        "training_mode": "AVERAGING", "checkpoint_directory": str(tmp_path),
        "batch_size_per_worker": BATCH, "progress": False, "checkpoint_every": "1 epochs",
    }  # fmt: skip
    made = wrapper(network(Adam(0.01)), WORKERS, **options)
    rule = EarlyStopping(patience=2, metric="accuracy")
    summary = made.fit((X, Y), epochs=400, validation=0.3, early_stopping=rule)
    assert summary.stopped
    assert summary.best.metric == "accuracy"
    assert summary.rows_held_out > 10
    assert summary.checkpoint is not None
    again = wrapper(network(Adam(0.01)), WORKERS, **(options | {"checkpoint_directory": None}))
    again.restore(summary.checkpoint)
    np.testing.assert_array_equal(again.parameters, made.parameters)


@pytest.mark.slow
def test_accumulator_error_or_wrong_result_ends_fit(wrapper: Any) -> None:
    from sparkstrom.observe.early_stopping import MaxEpochsTerminationCondition

    for accumulator, why in (
        (lambda before, after, rows: before[:3], "accumulator returned float32.3., or values"),
        (lambda before, after, rows: 1 / 0, "accumulator raised ZeroDivisionError"),
    ):
        made = wrapper(
            network(Sgd(0.1)), 1, training_mode="CUSTOM", accumulator=accumulator, progress=False
        )
        with pytest.raises(TrainingError, match=why):
            made.fit((X, Y))
    made = wrapper(network(Sgd(0.1)), 1, training_mode="AVERAGING", progress=False)
    summary = made.fit((X, Y), 9, early_stopping=MaxEpochsTerminationCondition(2))
    assert summary.epochs == 2  # however short its epochs are
    assert (
        summary.stopped == "early stopping: MaxEpochsTerminationCondition(max_epochs=2) is met"
        " in epoch 2"
    )


class LearningRateSum(nn.Module):
    """A module that sums its learning rates, because the gradient is 1 in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Any) -> Any:
        return self.weight + 0 * x[:, :1]


@pytest.mark.slow
def test_one_cycle_schedule_spans_minibatches_of_all_workers(wrapper: Any) -> None:
    """OneCycleLR spans the minibatches of all workers in a fit, and restarts in the next fit."""
    sgd = partial(torch.optim.SGD, lr=0.01)
    cycle = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, cycle_momentum=False)
    model = TorchModel(LearningRateSum(), lambda output, _: output.mean(), sgd, scheduler=cycle)
    options: dict[str, Any] = {"training_mode": "AVERAGING", "averaging_frequency": 3}
    made = wrapper(model, WORKERS, batch_size_per_worker=BATCH, progress=False, **options)
    for fits in (1, 2):
        summary = made.fit((X[:100], Y[:100]), epochs=EPOCHS)
        optimizer = sgd([nn.Parameter(torch.zeros(1))])
        plain, rates = cycle(optimizer, total_steps=summary.minibatches), list[float]()
        for _ in range(summary.minibatches):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            plain.step()
        assert made.parameters[0] == pytest.approx(-fits * sum(rates[::WORKERS]), rel=1e-5)


@pytest.mark.parametrize(
    ("workers", "options"),
    [(1, {}), (2, {}), (4, {"outer": Nesterov(0.7, 0.9), "average_updaters": False})],
    ids=["alone", "averaged", "diloco"],
)
def test_rehearsal_of_rounds_equals_real_fit(workers: int, options: Any) -> None:
    """If the sample has all rows, the rehearsed fit is the real one; two fits in a row as well."""
    given = {"training_mode": "AVERAGING", "averaging_frequency": 3, "batch_size_per_worker": BATCH}
    model = network(Nesterov(0.05, 0.9))
    with ParallelWrapper(model, workers, progress=False, **given, **options) as wrapper:
        for _ in range(2):
            result = wrapper.rehearse(
                (X, Y), workers=workers, epochs=EPOCHS, validation=0.2, step="5ms"
            )
            summary = wrapper.fit((X, Y), epochs=EPOCHS, validation=0.2)
            rehearsed = result.runs[1]
            assert rehearsed.digest == hashlib.sha256(wrapper.parameters.tobytes()).hexdigest()
            assert rehearsed.minibatches == summary.minibatches
            assert rehearsed.loss == pytest.approx(summary.history[-1].validation)
