"""Rounds and their control, in one process: what a checkpoint has of them, whenever it is taken."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparkstrom import ParameterAveragingTrainingMaster
from sparkstrom.base.identity import Position
from sparkstrom.checkpoint.cadence import parse_every
from sparkstrom.checkpoint.checkpoint_directory import CheckpointDirectory
from sparkstrom.codec.messages import Phase
from sparkstrom.codec.states import decode_state_untrusted
from sparkstrom.models import DenseNetwork, Nesterov
from sparkstrom.observe.epochs import Epoch, EpochBook
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.lent_state import LentStates
from sparkstrom.spark.averaging import common_state
from sparkstrom.spark.averaging.common_state import CommonState
from sparkstrom.spark.averaging.round_job import RoundReport, RowFacts
from sparkstrom.spark.averaging.rounds_control import RoundsControl
from sparkstrom.spark.driver.checkpoint_content import FitKey, resumption_of
from sparkstrom.spark.driver.checkpoint_keeper import CheckpointKeeper, Kept
from tests.unit.spark.rounds_here import Engine, Fit, Rows

EPOCHS, WORKERS = 3, 2
MASTER = ParameterAveragingTrainingMaster(batch_size_per_worker=4, averaging_frequency=2)


def network() -> DenseNetwork:
    return DenseNetwork([6, 5, 3], updater=Nesterov(0.1), seed=1)


def rows_of(counts: tuple[int, ...]) -> list[Rows]:
    chance = np.random.default_rng(0)
    return [
        [(chance.normal(size=6).astype(np.float32), int(chance.integers(3))) for _ in range(count)]
        for count in counts
    ]


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(rows_of((45, 30)), tmp_path, monkeypatch)


def history(fit: Fit, book: EpochBook) -> list[Epoch]:
    book.close([json.loads(said)["epochs"] for said in fit.run()])
    return book.history()


class Ending(Exception):
    """The program ends here."""


def saved_at(engine: Engine, epoch: int) -> Any:
    """What a checkpoint has in the moment before this epoch is measured."""
    fit, book, saved = Fit(engine, network(), MASTER, epochs=EPOCHS, fraction=0.2), EpochBook(), []

    def look(measured: int) -> None:
        book.follow(fit.control.progress.stats.values())
        if measured == epoch:
            snapshot = fit.control.snapshot(updaters=True)
            states = LentStates.of(fit.control.copy_updaters(everybody=False).result())
            at = {index: one.position.epoch for index, one in enumerate(snapshot.partitions)}
            saved.append((snapshot, states, json.loads(json.dumps(book.report(at)))))
            raise Ending

    engine.on_measure = look
    with pytest.raises(Ending):
        fit.run()
    engine.on_measure = lambda measured: None
    return saved[0]


@pytest.mark.parametrize("epoch", [0, 1, 2])
def test_an_epoch_that_is_trained_and_not_measured_is_measured_when_it_goes_on(
    engine: Engine, epoch: int
) -> None:
    """To the same bits and figures as if the program had not ended there; no row counts twice."""
    whole = Fit(engine, network(), MASTER, epochs=EPOCHS, fraction=0.2)
    expected = history(whole, EpochBook())
    snapshot, states, figures = saved_at(engine, epoch)
    book = EpochBook()
    book.go_on(figures)
    assert book.epochs_before == epoch
    options: dict[str, Any] = {"starts": snapshot.partitions, "epochs": EPOCHS, "fraction": 0.2}
    again = Fit(engine, network(), MASTER, snapshot.parameters, states, **options)
    found = history(again, book)
    assert [one.validation for one in found] == [one.validation for one in expected]
    assert [one.epoch for one in found] == [1, 2, 3]
    assert (again.common.parameters == whole.common.parameters).all()
    outcome = again.control.outcome()
    assert outcome.minibatches == outcome.minibatches_expected
    assert outcome.minibatches_resumed * EPOCHS == outcome.minibatches * (epoch + 1)
    trained = sum(one.training.steps for one in outcome.stats.values() if one.training)
    assert trained == outcome.minibatches - outcome.minibatches_resumed


def test_who_looks_has_an_epoch_s_figures_before_a_snapshot_has_it_behind_it(
    engine: Engine,
) -> None:
    """So that what a checkpoint says of epochs is what has been heard, and judged, of them."""
    fit = Fit(engine, network(), MASTER, epochs=1, fraction=0.2)
    positions = []

    def seen() -> list[Position]:
        return [one.position for one in fit.control.snapshot().partitions]

    end_epoch = fit.control.end_epoch

    def ended(*given: Any) -> None:
        end_epoch(*given)
        positions.append(seen())
        assert all(one.training.epochs for one in fit.control.progress.stats.values())
        positions.append(seen())

    fit.control.end_epoch = ended  # type: ignore[method-assign]
    fit.run()
    batches = [one.batches for one in fit.control.partitions]
    assert positions == [[Position(0, b) for b in batches], [Position(1, 0)] * WORKERS]


def test_without_held_out_rows_epochs_end_all_the_same(engine: Engine) -> None:
    fit = Fit(engine, network(), MASTER, epochs=2)
    found = history(fit, EpochBook())
    assert [one.examples for one in found] == [75, 75]
    assert [one.position for one in fit.control.partitions] == [Position(2, 0)] * WORKERS


class Advancing(RoundsControl):
    """One round further, and asked by a listener, whenever somebody wants optimizers' states."""

    def round(self) -> None:
        number = self.common.rounds + 1.0
        model = network()
        values = {"velocity": np.full(model.n_params, number, np.float32)}
        report = RoundReport(0, "h", "e", 0, steps=1, weight=1.0)
        mean = np.full(model.n_params, number, np.float32)
        self.advance(mean, [report], {"0/": values, "": values}, {})

    def copy_updaters(self, *, everybody: bool) -> Future[tuple[bytes, ...]]:
        self.round()
        self.snapshot()
        return super().copy_updaters(everybody=everybody)


@pytest.mark.parametrize("save_updater", [True, "own"])
def test_a_checkpoint_has_the_states_of_its_own_round(tmp_path: Path, save_updater: Any) -> None:
    """Whatever rounds end and whoever takes snapshots meanwhile; of the outer step, too."""
    model, outer = network(), Nesterov(0.7, 0.9)
    master = ParameterAveragingTrainingMaster(save_updater=save_updater, outer=outer)
    spec = FitSpec(1, 1, model.n_params, "test")
    common = CommonState(model, master, model.initial(), LentStates(), 0)
    control = Advancing(spec, common, judged=False)
    control.begin([RowFacts(0, 10, 0, 1, 10, 0, "h")])
    directory = CheckpointDirectory(str(tmp_path), 9)
    due, updaters = parse_every("1 updates"), master.checkpoint_updaters
    kept = Kept(directory, due, FitKey(1), model, "None", 20, LentStates(), {}, updaters)
    watch: Any = SimpleNamespace(best=None, copy=None)
    keeper = CheckpointKeeper(kept, control, book=EpochBook(), watch=watch, tell=print, say=print)
    keeper.on_fit_begin(spec)
    keeper.on_phase(Phase.RUNNING)
    control.round()
    velocity = common.outer.state["velocity"].copy()
    keeper.on_progress(control.progress)
    keeper.failed()  # once it is written
    found = resumption_of(*directory.newest(pytest.fail), model)
    told = decode_state_untrusted(found.states.one)
    assert (found.commit, told["round/steps"], told["updater/velocity"][0]) == (1, 1, 1.0)
    assert (told["outer/velocity"] == velocity).all()
    assert common.rounds == 2


def test_who_wants_parameters_alone_has_no_states_encoded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rounds wait meanwhile: early stopping takes a snapshot of each better epoch."""
    fit = Fit(engine, network(), MASTER)
    fit.run()
    with monkeypatch.context() as patch:
        patch.setattr(common_state, "encode_state", lambda state: pytest.fail("encoded"))
        assert (fit.control.snapshot().parameters == fit.common.parameters).all()
    assert fit.control.copy_updaters(everybody=True).result() == ()


def test_a_partition_whose_rows_are_all_held_out_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a split by time makes one, which has no rows to train on."""
    for seed in range(20):
        here = Engine(rows_of((45, 1)), tmp_path, monkeypatch)
        fit = Fit(here, network(), replace(MASTER, rng_seed=seed), epochs=2, fraction=0.6)
        found = history(fit, EpochBook())
        facts = [tally.facts for tally in fit.control._tallies.values()]
        if facts[1].held_out:
            break
    assert (facts[1].rows, facts[1].held_out) == (0, 1)
    assert [one.held_weight for one in found] == [facts[0].held_out + 1] * 2
