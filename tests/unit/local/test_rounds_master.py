"""Synchronous rounds, by workers that answer in this process: what of a fit is left to chance."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

from sparkstrom import EarlyStopping, ParallelWrapper, SetupError, UsageError
from sparkstrom.base.identity import Position
from sparkstrom.local import rounds_master
from sparkstrom.local.orders import WorkerAnswer, WorkerOrder
from sparkstrom.local.step_limit import limit
from sparkstrom.local.worker_main import answer_to
from sparkstrom.models import DenseNetwork, Sgd

CHANCE = np.random.default_rng(0)
X = CHANCE.normal(size=(200, 6)).astype(np.float32)
Y = (X[:, 0] > X[:, 1]).astype(int)


class InProcess:
    """A worker's orders are carried out here, at once."""

    def __init__(self, pool: Any) -> None:
        self.attempts = Counter[int]()
        self._answers: dict[int, WorkerAnswer] = {}

    def begin(self) -> range:
        return range(1)

    def send(self, partition: int, order: WorkerOrder) -> None:
        self._answers[partition] = answer_to(order)

    def answers(self, of: Any) -> Iterator[tuple[int, WorkerAnswer]]:
        yield from ((partition, self._answers.pop(partition)) for partition in list(of))

    def drop(self, partitions: Any) -> None:
        pass


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ParallelWrapper]]:
    """``alone(**options)``: a wrapper in rounds, of one worker."""
    monkeypatch.setattr(rounds_master, "WorkersAtWork", InProcess)
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
    """Notes what each of its steps, and each measurement, may take."""

    seen: ClassVar[set[tuple[str, float]]] = set()

    def step(self, batch: Any) -> float:
        self.seen.add(("step", limit.seconds))
        return super().step(batch)

    def loss(self, batch: Any) -> tuple[float, float]:
        self.seen.add(("loss", limit.seconds))
        return super().loss(batch)


def test_steps_and_measurements_may_take_as_long_as_step_timeout_says(
    alone: Callable[..., ParallelWrapper],
) -> None:
    alone(Watched, step_timeout=77.0).fit((X, Y), validation=0.3, run_log="")
    assert Watched.seen == {("step", 77.0), ("loss", 77.0)}


class Looking(DenseNetwork):
    """Looks at how far a checkpoint would be, whenever it is measured."""

    seen: ClassVar[list[Position]] = []

    def loss(self, batch: Any) -> tuple[float, float]:
        (master,) = (t for t in threading.enumerate() if isinstance(t, rounds_master.RoundsMaster))
        self.seen += [partition.position for partition in master.snapshot().partitions]
        return super().loss(batch)


def test_an_epoch_that_is_being_measured_is_not_over(alone: Callable[..., ParallelWrapper]) -> None:
    """A checkpoint of that moment has it measured again, instead of never."""
    summary = alone(Looking).fit((X, Y), 2, validation=0.3, run_log="")
    rounds = -(-(len(X) - summary.rows_held_out) // 10)
    assert Counter(Looking.seen).keys() == {Position(0, rounds), Position(1, rounds)}
    assert summary.minibatches == 2 * rounds


def test_the_same_fit_stops_at_the_same_epoch_with_the_same_bits(
    alone: Callable[..., ParallelWrapper],
) -> None:
    """However short its epochs are: rounds wait for who judges them."""
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


def test_an_iterator_that_a_fit_has_used_up_is_refused(
    alone: Callable[..., ParallelWrapper],
) -> None:
    """Whatever the mode: nothing is begun."""
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
    table = pa.table({"features": list(X), "label": Y, "held": np.ones(len(X), bool)})
    with pytest.raises(UsageError, match="all 1 partitions are empty: there are no rows to train"):
        alone().fit(table, validation="held", run_log="")


def test_held_out_rows_may_be_data_of_their_own(alone: Callable[..., ParallelWrapper]) -> None:
    """The same rows in one table, with a column that says which: equal figures."""
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
    def full(descriptor: int, offset: int, n_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    made = alone()
    n_bytes = 2 * 4 * made.parameters.size
    with pytest.raises(SetupError, match=f"parameters does not take {n_bytes} bytes: No space"):
        made.fit((X, Y), run_log="")
