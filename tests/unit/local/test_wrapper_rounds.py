"""Tests of synchronous rounds of a ``ParallelWrapper``, whose workers run in this process."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

from sparkstrom import EarlyStopping, ParallelWrapper, SetupError, TrainingError, UsageError
from sparkstrom.local import rounds as local_rounds
from sparkstrom.local.worker_pool import WorkerAnswer, step_limit
from sparkstrom.models import DenseNetwork, Sgd
from sparkstrom.models.base import Share
from sparkstrom.rounds.worker_round import RoundReport
from tests.unit.rounds.fits_here import WorkersHere

CHANCE = np.random.default_rng(0)
X = CHANCE.normal(size=(200, 6)).astype(np.float32)
Y = (X[:, 0] > X[:, 1]).astype(int)


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ParallelWrapper]]:
    """Return ``alone(**options)``, which creates a wrapper in rounds with one worker."""
    monkeypatch.setattr(local_rounds, "ActiveWorkers", WorkersHere)
    made: list[ParallelWrapper] = []

    def make(kind: type[DenseNetwork] = DenseNetwork, **options: Any) -> ParallelWrapper:
        model = kind([6, 12, 2], updater=Sgd(0.3), seed=3)
        given = {"training_mode": "AVERAGING", "progress": False, "batch_size_per_worker": 10}
        made.append(ParallelWrapper(model, 1, **given | options))
        return made[-1]

    yield make
    for each in made:
        each.close()


class Watched(DenseNetwork):
    """A network that records the time limits of its steps and measurements."""

    seen: ClassVar[set[tuple[str, float]]] = set()

    def step(self, batch: Any) -> float:
        self.seen.add(("step", step_limit.seconds))
        return super().step(batch)

    def loss(self, batch: Any) -> tuple[float, float]:
        self.seen.add(("loss", step_limit.seconds))
        return super().loss(batch)


def test_steps_and_measurements_may_take_as_long_as_step_timeout_says(
    alone: Callable[..., ParallelWrapper],
) -> None:
    alone(Watched, step_timeout=77.0).fit((X, Y), validation=0.3, run_log="")
    assert Watched.seen == {("step", 77.0), ("loss", 77.0)}


class Losing(WorkersHere):
    """Workers of which one loses its process after its second round."""

    def __init__(self, pool: Any) -> None:
        super().__init__(pool)
        self._rounds = 0

    def answers(self, of: Any) -> Iterator[tuple[int, WorkerAnswer | None]]:  # type: ignore[override]
        for partition, answer in super().answers(of):
            self._rounds += isinstance(answer.report, RoundReport)
            lost = self._rounds == 2 and not self.attempts[partition]
            yield partition, None if lost else answer

    def replace(self, partition: int) -> str:
        self.attempts[partition] += 1
        self._there[partition].clear()
        return "was killed by SIGKILL"


class Noisy(DenseNetwork):
    """A network that multiplies features by random numbers in training."""

    def place(self, share: Share) -> None:
        self.chance = np.random.default_rng(share.seed)

    def step(self, batch: Any) -> float:
        noise = self.chance.random(batch.features.shape, np.float32)
        return super().step(batch._replace(features=batch.features * noise))


@pytest.mark.parametrize("kind", [DenseNetwork, Noisy])
def test_a_process_that_is_lost_is_replaced_and_its_round_repeated(
    alone: Callable[..., ParallelWrapper],
    monkeypatch: pytest.MonkeyPatch,
    kind: type[DenseNetwork],
) -> None:
    """The result has the same bits, the loss is reported, and no minibatch counts twice."""
    found = []
    for workers in (WorkersHere, Losing):
        monkeypatch.setattr(local_rounds, "ActiveWorkers", workers)
        made = alone(kind, average_updaters=False, averaging_frequency=3)
        summary = made.fit((X, Y), 2, run_log="")
        found.append(made.parameters)
        assert summary.minibatches == summary.minibatches_expected == 40
        assert summary.examples == 2 * len(X)
        assert summary.replicas_equal
    np.testing.assert_array_equal(*found)
    assert "its process was killed by SIGKILL" in summary.departures[0]
    assert len(summary.faults) == 1


def test_an_outer_optimizer_is_for_rounds(alone: Callable[..., ParallelWrapper]) -> None:
    """An outer SGD with rate 1 and without momentum gives the mean, like averaging without one."""
    mean, outer = alone(), alone(outer=Sgd(1.0))
    for made in (mean, outer):
        made.fit((X, Y), run_log="")
    np.testing.assert_allclose(mean.parameters, outer.parameters, atol=1e-6)
    with pytest.raises(UsageError, match=r"outer=0.7: must be None or an updater"):
        alone(outer=0.7)
    with pytest.raises(UsageError, match=r"outer=.* workers do not meet with training_mode=SHARED"):
        alone(training_mode="SHARED_GRADIENTS", outer=Sgd(1.0))


def test_the_same_fit_stops_at_the_same_epoch_with_the_same_bits(
    alone: Callable[..., ParallelWrapper],
) -> None:
    """A fit waits after each epoch for the decision to stop, however short the epoch is."""
    rule, found = EarlyStopping(patience=2), []
    for _ in range(2):
        made = alone()
        summary = made.fit((X, Y), 400, validation=0.3, early_stopping=rule, run_log="")
        assert summary.best is not None
        rounds = -(-(len(X) - summary.rows_held_out) // 10)
        assert len(summary.history) == summary.best.epoch + 2
        assert summary.best.commit == summary.best.epoch * rounds
        assert summary.minibatches == len(summary.history) * rounds
        found.append(made.parameters)
    np.testing.assert_array_equal(*found)


class Failing(DenseNetwork):
    """A network whose steps fail while ``fails`` is True."""

    fails: ClassVar[bool] = False

    def step(self, batch: Any) -> float:
        if self.fails:
            raise ZeroDivisionError("a bug of the model")
        return super().step(batch)


def fail(*given: Any, **named: Any) -> Any:
    raise ZeroDivisionError("it cannot be made")


@pytest.mark.parametrize("begins", [True, False])
def test_a_fit_that_fails_uses_no_optimizer_state_up(
    alone: Callable[..., ParallelWrapper], monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    """After a failed fit, momentum and schedule continue from the last complete fit."""
    made = alone(Failing)
    made.fit((X, Y), run_log="")
    before, minibatches = made._state.value, made._state.minibatches_before
    assert before.states.one
    with monkeypatch.context() as patched:
        if begins:
            patched.setattr(Failing, "fails", True)
        else:
            patched.setattr("sparkstrom.local.parallel_wrapper.LocalRounds", fail)
        with pytest.raises((ZeroDivisionError, TrainingError)):
            made.fit((X, Y), run_log="")
    after = made._state.value
    assert (after.states, after.states_workers) == (before.states, before.states_workers)
    assert made._state.minibatches_before == minibatches == 20
    assert made.fit((X, Y), run_log="").minibatches == 20
    assert made._state.value.minibatches == 40


def test_an_iterator_that_a_fit_has_used_up_is_refused(
    alone: Callable[..., ParallelWrapper],
) -> None:
    """In both modes, a fit on an exhausted iterator is refused before it starts."""
    rows, made = zip(X, Y, strict=True), alone()
    assert made.fit(rows, run_log="").minibatches == 20
    for each in (made, alone(training_mode="SHARED_GRADIENTS")):
        with pytest.raises(
            UsageError, match=r"the data have no rows to train on: .* an earlier fit"
        ):
            each.fit(rows, run_log="")


def test_where_all_rows_are_held_out_nothing_is_trained(
    alone: Callable[..., ParallelWrapper],
) -> None:
    """A fit whose rows are all held out is refused."""
    table = pa.table({"features": list(X), "label": Y, "held": np.ones(len(X), bool)})
    with pytest.raises(UsageError, match="all 1 partitions are empty: there are no rows to train"):
        alone().fit(table, validation="held", run_log="")


def test_held_out_rows_may_be_data_of_their_own(alone: Callable[..., ParallelWrapper]) -> None:
    """A separate table of held-out rows gives the same figures as a column that marks them."""
    held = np.arange(len(X)) % 4 == 3
    one = pa.table({"features": list(X), "label": Y, "held": held})
    both = [one.filter(pa.array(flags)).drop_columns(["held"]) for flags in (~held, held)]
    ordered = pa.concat_tables([one.filter(pa.array(flags)) for flags in (~held, held)])
    rule = EarlyStopping(patience=3)
    by_column = alone().fit(ordered, 5, validation="held", early_stopping=rule, run_log="")
    by_table = alone().fit(both[0], 5, validation=both[1], early_stopping=rule, run_log="")
    assert by_table.rows_held_out == by_column.rows_held_out == held.sum()
    assert by_table.history == by_column.history
    assert np.isfinite(by_table.history[-1].validation)


def test_parameters_without_room_on_the_disk_are_refused(
    alone: Callable[..., ParallelWrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk raises ``SetupError`` with the size of the parameters' file."""

    def full(descriptor: int, offset: int, n_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    made = alone()
    n_bytes = 2 * 4 * made.parameters.size
    with pytest.raises(SetupError, match=f"parameters does not take {n_bytes} bytes: No space"):
        made.fit((X, Y), run_log="")
