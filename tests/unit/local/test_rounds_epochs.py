"""Local rounds in one process: what a checkpoint has of them, and what ends them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray

from sparkstrom.base.errors import TrainingError
from sparkstrom.codec.states import decode_state_untrusted
from sparkstrom.local.dealt_rows import dealt
from sparkstrom.local.local_data import blocks_of_data
from sparkstrom.local.rounds_session import EndEpoch, TrainRound
from sparkstrom.local.wrapper_options import RoundRule
from sparkstrom.models import DenseNetwork, Nesterov, Sgd
from sparkstrom.models.base import Batch
from sparkstrom.observe.epochs import Epoch, EpochBook
from sparkstrom.runtime.lent_state import LentStates
from sparkstrom.spark.data.columns import Chosen
from tests.unit.local.rounds_here import Fit

CHANCE = np.random.default_rng(4)
DATA = CHANCE.normal(size=(75, 6)).astype(np.float32), CHANCE.integers(0, 3, 75)
RULE, EPOCHS = RoundRule(2, True, None), 3


def network() -> DenseNetwork:
    return DenseNetwork([6, 5, 3], updater=Nesterov(0.1), seed=1)


def history(fit: Fit, book: EpochBook) -> list[Epoch]:
    book.close([json.loads(said)["epochs"] for said in fit.run()])
    return book.history()


def held_out_where_dealt_to(worker: int, workers: int, directory: Path) -> NDArray[np.bool_]:
    directory.mkdir()
    files = dealt(blocks_of_data(DATA, Chosen()), workers, 0, directory)
    there = [number for block in files[worker].blocks() for number in block.numbers]
    return np.isin(np.arange(75), there)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_partition_of_held_out_rows_alone_is_measured_at_each_epochs_end(
    tmp_path: Path, workers: int
) -> None:
    """A worker that trains on nothing has no epoch end of its own."""
    held = held_out_where_dealt_to(workers - 1, workers, tmp_path / "dealt")
    table = pa.table({"features": DATA[0].tolist(), "label": DATA[1], "held": held})
    options: dict[str, Any] = {"epochs": EPOCHS, "chosen": Chosen(validation="held")}
    fit = Fit(table, network(), RULE, tmp_path / "fit", workers=workers, **options)
    measured: list[NDArray[np.float32]] = []

    def look(partition: int, order: Any) -> None:
        if isinstance(order, EndEpoch) and partition == workers - 1:
            measured.append(fit.theta.to_host())

    fit.workers.before = look
    found = history(fit, EpochBook())
    assert fit.master._partitions[-1].rows == 0
    assert [one.held_weight for one in found] == [held.sum()] * EPOCHS
    alone = network()
    for one, parameters in zip(found, measured, strict=True):
        alone.bind(parameters)
        total, weight = alone.loss(Batch(DATA[0][held], DATA[1][held]))
        assert one.validation == pytest.approx(total / weight, rel=1e-5)
    assert (measured[-1] == fit.theta.to_host()).all()


class Ending(Exception):
    """The program ends here."""


def saved_at(directory: Path, epoch: int, asked: int) -> Any:
    """What a checkpoint has in the moment in which this partition is asked to measure an epoch."""
    fit, book = Fit(DATA, network(), RULE, directory, epochs=EPOCHS, fraction=0.2), EpochBook()
    saved = []

    def look(partition: int, order: Any) -> None:
        book.follow(fit.master.progress.stats.values())
        if isinstance(order, EndEpoch) and (partition, order.epoch) == (asked, epoch):
            snapshot = fit.master.snapshot(updaters=True)
            states = LentStates.of(fit.master.updater_copies)
            at = {index: one.position.epoch for index, one in enumerate(snapshot.partitions)}
            saved.append((snapshot, states, json.loads(json.dumps(book.report(at)))))
            raise Ending

    fit.workers.before = look
    with pytest.raises(Ending):
        fit.run()
    return saved[0]


@pytest.mark.parametrize(("epoch", "asked"), [(0, 0), (1, 1), (2, 0), (2, 1)])
def test_an_epoch_that_is_trained_and_not_measured_is_measured_when_it_goes_on(
    tmp_path: Path, epoch: int, asked: int
) -> None:
    """To the same bits and figures as if the program had not ended there; no row counts twice."""
    whole = Fit(DATA, network(), RULE, tmp_path / "whole", epochs=EPOCHS, fraction=0.2)
    expected = history(whole, EpochBook())
    assert [partition.batches for partition in whole.master._partitions] == [6, 7]
    snapshot, states, figures = saved_at(tmp_path / "saved", epoch, asked)
    book = EpochBook()
    book.go_on(figures)
    assert book.epochs_before == epoch
    options: dict[str, Any] = {"starts": snapshot.partitions, "epochs": EPOCHS, "fraction": 0.2}
    begun = snapshot.parameters, states
    again = Fit(DATA, network(), RULE, tmp_path / "again", *begun, **options)
    found = history(again, book)
    assert [one.validation for one in found] == [one.validation for one in expected]
    assert [one.epoch for one in found] == [1, 2, 3]
    assert (again.theta.to_host() == whole.theta.to_host()).all()
    outcome = again.master.outcome()
    assert outcome.minibatches == outcome.minibatches_expected == 13 * EPOCHS
    trained = sum(one.training.steps for one in outcome.stats.values() if one.training)
    assert trained == outcome.minibatches - outcome.minibatches_resumed


def test_who_wants_parameters_alone_changes_no_states_that_are_set_aside(tmp_path: Path) -> None:
    """Or a checkpoint would have parameters of one round and states of another."""
    fit, taken = Fit(DATA, network(), RULE, tmp_path / "fit", epochs=1), list[tuple[bytes, ...]]()

    def look(partition: int, order: Any) -> None:
        taken.append(fit.master.updater_copies)
        if isinstance(order, TrainRound) and order.steps_before == 2:
            fit.master.snapshot(updaters=True)
        fit.master.snapshot()

    fit.workers.before = look
    fit.run()
    assert len(set(taken)) == 2
    assert taken[0] == ()
    (of_round_1,) = fit.master.copy_updaters(everybody=True).result()
    assert decode_state_untrusted(of_round_1)["round/steps"] == 2
    assert fit.master.updater_copies == ()


def test_parameters_that_are_none_are_told_as_that_where_there_is_no_accumulator(
    tmp_path: Path,
) -> None:
    wild = DenseNetwork([6, 5, 3], updater=Sgd(3e38), seed=1)
    data = 50 * DATA[0], DATA[1]
    once = Fit(data, wild, RULE, tmp_path / "mean", epochs=1, batch_rows=99)
    with np.errstate(all="ignore"):
        words = r"layer . \w+ is -?(inf|nan) after round 1: "
        with pytest.raises(TrainingError, match=words) as told:
            once.run()
        assert "accumulator" not in str(told.value)
        own = RoundRule(2, True, lambda before, after, rows: before * np.inf)
        with pytest.raises(TrainingError, match=r"accumulator returned .* that are not finite"):
            Fit(DATA, network(), own, tmp_path / "own", epochs=1).run()


class Weighing(DenseNetwork):
    """Buffers are the weights by which they were averaged last."""

    last = b"-"

    def buffers_bytes(self) -> bytes:
        return self.last

    def load_buffers_bytes(self, buffers: bytes) -> None:
        self.last = buffers

    def average_buffers(self, reports: list[bytes]) -> bytes:
        return b"equally"

    def weighed_buffers(self, reports: list[bytes], weights: Sequence[float]) -> bytes:
        return repr([*weights]).encode()


def test_buffers_count_by_rows(tmp_path: Path) -> None:
    fit = Fit(DATA, Weighing([6, 3]), RULE, tmp_path / "fit", epochs=1, batch_rows=99)
    fit.theta.buffers = b"-"
    fit.run()
    assert fit.theta.buffers == b"[37.0, 38.0]"
