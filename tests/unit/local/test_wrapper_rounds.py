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
from tests.unit.rounds.in_process_fits import InProcessWorkers

CHANCE = np.random.default_rng(0)
X = CHANCE.normal(size=(200, 6)).astype(np.float32)
Y = (X[:, 0] > X[:, 1]).astype(int)


@pytest.fixture
def make_rounds_wrapper(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., ParallelWrapper]]:
    """Return ``make_rounds_wrapper(**options)``: a wrapper in rounds with one worker."""
    monkeypatch.setattr(local_rounds, "ActiveWorkers", InProcessWorkers)
    made: list[ParallelWrapper] = []

    def make(kind: type[DenseNetwork] = DenseNetwork, **options: Any) -> ParallelWrapper:
        model = kind([6, 12, 2], updater=Sgd(0.3), seed=3)
        given = {"training_mode": "AVERAGING", "progress": False, "batch_size_per_worker": 10}
        made.append(ParallelWrapper(model, 1, **given | options))
        return made[-1]

    yield make
    for each in made:
        each.close()


class LimitRecordingNetwork(DenseNetwork):
    """A network that records the time limits of its steps and measurements."""

    seen: ClassVar[set[tuple[str, float]]] = set()

    def step(self, batch: Any) -> float:
        self.seen.add(("step", step_limit.seconds))
        return super().step(batch)

    def loss(self, batch: Any) -> tuple[float, float]:
        self.seen.add(("loss", step_limit.seconds))
        return super().loss(batch)


def test_step_timeout_applies_to_steps_and_measurements(
    make_rounds_wrapper: Callable[..., ParallelWrapper],
) -> None:
    make_rounds_wrapper(LimitRecordingNetwork, step_timeout=77.0).fit(
        (X, Y), validation=0.3, run_log=""
    )
    assert LimitRecordingNetwork.seen == {("step", 77.0), ("loss", 77.0)}


class WorkersLosingProcess(InProcessWorkers):
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


class NoisyNetwork(DenseNetwork):
    """A network that multiplies features by random numbers in training."""

    def place(self, share: Share) -> None:
        self.chance = np.random.default_rng(share.seed)

    def step(self, batch: Any) -> float:
        noise = self.chance.random(batch.features.shape, np.float32)
        return super().step(batch._replace(features=batch.features * noise))


@pytest.mark.parametrize("kind", [DenseNetwork, NoisyNetwork])
def test_round_of_lost_process_is_repeated_with_same_result(
    make_rounds_wrapper: Callable[..., ParallelWrapper],
    monkeypatch: pytest.MonkeyPatch,
    kind: type[DenseNetwork],
) -> None:
    """The result has the same bits, the loss is reported, and no minibatch counts twice."""
    found = []
    for workers in (InProcessWorkers, WorkersLosingProcess):
        monkeypatch.setattr(local_rounds, "ActiveWorkers", workers)
        made = make_rounds_wrapper(kind, average_updaters=False, averaging_frequency=3)
        summary = made.fit((X, Y), 2, run_log="")
        found.append(made.parameters)
        assert summary.minibatches == summary.minibatches_expected == 40
        assert summary.examples == 2 * len(X)
        assert summary.replicas_equal
    np.testing.assert_array_equal(*found)
    assert "its process was killed by SIGKILL" in summary.departures[0]
    assert len(summary.faults) == 1


def test_outer_optimizer_works_only_in_rounds(
    make_rounds_wrapper: Callable[..., ParallelWrapper],
) -> None:
    """An outer SGD with rate 1 and without momentum gives the mean, like averaging without one."""
    mean, outer = make_rounds_wrapper(), make_rounds_wrapper(outer=Sgd(1.0))
    for made in (mean, outer):
        made.fit((X, Y), run_log="")
    np.testing.assert_allclose(mean.parameters, outer.parameters, atol=1e-6)
    with pytest.raises(UsageError, match=r"outer=0.7: must be None or an updater"):
        make_rounds_wrapper(outer=0.7)
    with pytest.raises(UsageError, match=r"outer=.* workers do not meet with training_mode=SHARED"):
        make_rounds_wrapper(training_mode="SHARED_GRADIENTS", outer=Sgd(1.0))


def test_early_stopping_is_reproducible(
    make_rounds_wrapper: Callable[..., ParallelWrapper],
) -> None:
    """A fit waits after each epoch for the decision to stop, however short the epoch is."""
    rule, found = EarlyStopping(patience=2), []
    for _ in range(2):
        made = make_rounds_wrapper()
        summary = made.fit((X, Y), 400, validation=0.3, early_stopping=rule, run_log="")
        assert summary.best is not None
        rounds = -(-(len(X) - summary.rows_held_out) // 10)
        assert len(summary.history) == summary.best.epoch + 2
        assert summary.best.commit == summary.best.epoch * rounds
        assert summary.minibatches == len(summary.history) * rounds
        found.append(made.parameters)
    np.testing.assert_array_equal(*found)


class FailingNetwork(DenseNetwork):
    """A network whose steps fail while ``fails`` is True."""

    fails: ClassVar[bool] = False

    def step(self, batch: Any) -> float:
        if self.fails:
            raise ZeroDivisionError("a bug of the model")
        return super().step(batch)


def fail(*given: Any, **named: Any) -> Any:
    raise ZeroDivisionError("it cannot be made")


@pytest.mark.parametrize("begins", [True, False])
def test_failed_fit_keeps_optimizer_state_of_last_complete_fit(
    make_rounds_wrapper: Callable[..., ParallelWrapper],
    monkeypatch: pytest.MonkeyPatch,
    begins: bool,
) -> None:
    """After a failed fit, momentum and schedule continue from the last complete fit."""
    made = make_rounds_wrapper(FailingNetwork)
    made.fit((X, Y), run_log="")
    before, minibatches = made._state.value, made._state.minibatches_before
    assert before.states.one
    with monkeypatch.context() as patched:
        if begins:
            patched.setattr(FailingNetwork, "fails", True)
        else:
            patched.setattr("sparkstrom.local.parallel_wrapper.LocalRounds", fail)
        with pytest.raises((ZeroDivisionError, TrainingError)):
            made.fit((X, Y), run_log="")
    after = made._state.value
    assert (after.states, after.states_workers) == (before.states, before.states_workers)
    assert made._state.minibatches_before == minibatches == 20
    assert made.fit((X, Y), run_log="").minibatches == 20
    assert made._state.value.minibatches == 40


def test_exhausted_iterator_is_refused(
    make_rounds_wrapper: Callable[..., ParallelWrapper],
) -> None:
    """In both modes, a fit on an exhausted iterator is refused before it starts."""
    rows, made = zip(X, Y, strict=True), make_rounds_wrapper()
    assert made.fit(rows, run_log="").minibatches == 20
    for each in (made, make_rounds_wrapper(training_mode="SHARED_GRADIENTS")):
        with pytest.raises(
            UsageError, match=r"the data have no rows to train on: .* an earlier fit"
        ):
            each.fit(rows, run_log="")


def test_fit_with_all_rows_held_out_is_refused(
    make_rounds_wrapper: Callable[..., ParallelWrapper],
) -> None:
    """A fit whose rows are all held out is refused."""
    table = pa.table({"features": list(X), "label": Y, "held": np.ones(len(X), bool)})
    with pytest.raises(UsageError, match="all 1 partitions are empty: there are no rows to train"):
        make_rounds_wrapper().fit(table, validation="held", run_log="")


def test_held_out_table_gives_same_figures_as_marked_column(
    make_rounds_wrapper: Callable[..., ParallelWrapper],
) -> None:
    """A separate table of held-out rows gives the same figures as a column that marks them."""
    held = np.arange(len(X)) % 4 == 3
    one = pa.table({"features": list(X), "label": Y, "held": held})
    both = [one.filter(pa.array(flags)).drop_columns(["held"]) for flags in (~held, held)]
    ordered = pa.concat_tables([one.filter(pa.array(flags)) for flags in (~held, held)])
    rule = EarlyStopping(patience=3)
    by_column = make_rounds_wrapper().fit(
        ordered, 5, validation="held", early_stopping=rule, run_log=""
    )
    by_table = make_rounds_wrapper().fit(
        both[0], 5, validation=both[1], early_stopping=rule, run_log=""
    )
    assert by_table.rows_held_out == by_column.rows_held_out == held.sum()
    assert by_table.history == by_column.history
    assert np.isfinite(by_table.history[-1].validation)


def test_full_disk_error_names_size_of_parameters_file(
    make_rounds_wrapper: Callable[..., ParallelWrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk raises ``SetupError`` with the size of the parameters' file."""

    def full(descriptor: int, offset: int, n_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    made = make_rounds_wrapper()
    n_bytes = 2 * 4 * made.parameters.size
    with pytest.raises(SetupError, match=f"parameters does not take {n_bytes} bytes: No space"):
        made.fit((X, Y), run_log="")
