"""Tests of the control of a fit in rounds: consistent checkpoints, a barrier at epochs' ends."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparkstrom import ParameterAveragingTrainingMaster
from sparkstrom.base.identity import Position
from sparkstrom.checkpoint.directory import CheckpointDirectory
from sparkstrom.checkpoint.writer import parse_checkpoint_every
from sparkstrom.codec.messages import Phase
from sparkstrom.codec.optimizer_state_codec import decode_state_untrusted
from sparkstrom.fit.checkpoints import (
    CheckpointConfig,
    CheckpointListener,
    FitKey,
    read_resume_point,
)
from sparkstrom.models import DenseNetwork, Nesterov
from sparkstrom.observe.epoch_history import EpochHistory
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.rounds.averaging import RoundResults, RoundState
from sparkstrom.rounds.backend import PartitionFacts
from sparkstrom.rounds.control import EpochBarrier, RoundsControl
from sparkstrom.rounds.worker_round import RoundReport
from sparkstrom.runtime.optimizer_states import OptimizerStates


class AdvancingControl(RoundsControl):
    """A control that trains a round and takes a snapshot whenever optimizer states are copied."""

    def train_round(self) -> None:
        n_params = self.spec.n_params
        values: Any = {"velocity": np.full(n_params, self.state.rounds + 1.0, np.float32)}
        results = RoundResults([RoundReport(0, steps=1, weight=1.0)], values["velocity"].copy())
        if self.saves == "own":
            results.own = {0: values}
        else:
            results.updater = values
        self.end_round(results, {})

    saves: Any = True

    def copy_optimizer_states(self, *, everybody: bool) -> Future[tuple[bytes, ...]]:
        self.train_round()
        self.snapshot()
        return super().copy_optimizer_states(everybody=everybody)


@pytest.mark.parametrize("save_updater", [True, "own"])
def test_checkpoint_has_optimizer_states_of_its_round(tmp_path: Path, save_updater: Any) -> None:
    """Later rounds and snapshots do not change the states in a checkpoint, nor the outer step's."""
    model, outer = DenseNetwork([6, 5, 3], updater=Nesterov(0.1), seed=1), Nesterov(0.7, 0.9)
    master = ParameterAveragingTrainingMaster(save_updater=save_updater, outer=outer)
    spec = FitSpec(1, 1, model.n_params, "test")
    state = RoundState(model, master, model.initial(), OptimizerStates(), 0)
    control = AdvancingControl(spec, state, has_observer=False, abort=lambda: None)
    control.saves = save_updater
    control.begin_training([PartitionFacts(0, 10, 0, 1, 10, 0, "h")])
    directory = CheckpointDirectory(str(tmp_path), 9)
    due, updaters = parse_checkpoint_every("1 updates"), master.checkpoint_updaters
    kept = CheckpointConfig(
        directory, due, FitKey(1), model, "None", 20, OptimizerStates(), {}, updaters
    )
    watch: Any = SimpleNamespace(best=None, copy=None)
    keeper = CheckpointListener(
        kept, control, book=EpochHistory(), stopping=watch, notify=print, say=print
    )
    keeper.on_fit_begin(spec)
    keeper.on_phase(Phase.RUNNING)
    control.train_round()
    velocity = state.outer.state["velocity"].copy()
    keeper.on_progress(control.progress)
    keeper.close_failed()  # waits until it is written
    found = read_resume_point(*directory.read_newest(pytest.fail), model)
    stored = decode_state_untrusted(found.states.one)
    assert (found.commit, stored["round/steps"], stored["updater/velocity"][0]) == (1, 1, 1.0)
    assert (stored["outer/velocity"] == velocity).all()
    assert state.rounds == 2


def test_workers_with_zero_weight_rows_count_as_trained() -> None:
    """Workers count as trained, with executors and steps, also if their rows have weight 0."""
    model = DenseNetwork([6, 5, 3], seed=1)
    state = RoundState(
        model, ParameterAveragingTrainingMaster(), model.initial(), OptimizerStates(), 0
    )
    control = RoundsControl(
        FitSpec(2, 1, model.n_params, "test"), state, has_observer=False, abort=lambda: None
    )
    control.begin_training([PartitionFacts(i, 8, 0, 2, 8, 0, "host") for i in range(2)])
    reports = [
        RoundReport(i, host="host", executor=f"executor {i}", steps=2, examples=8) for i in range(2)
    ]
    control.end_round(RoundResults(reports), {i: Position(0, 2) for i in range(2)})
    outcome = control.outcome()
    assert outcome.executors == {"executor 0", "executor 1"}
    trained = [each.training for each in outcome.stats.values()]
    assert [(each.steps, each.examples) for each in trained if each is not None] == [(2, 8)] * 2
    assert (outcome.commits, state.steps) == (0, 2)


class BarrierWaiter:
    """A thread that waits at the end of the first epoch."""

    def __init__(self, barrier: EpochBarrier) -> None:
        self._thread = threading.Thread(target=barrier.wait, args=(1,), daemon=True)
        self._thread.start()

    def has_passed(self, within_s: float = 10.0) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()


def test_epoch_barrier_waits_for_second_acknowledgement() -> None:
    """The wait ends when progress with the epoch is acknowledged twice: received, then handled."""
    barrier = EpochBarrier(has_observer=True)
    rounds = BarrierWaiter(barrier)
    for epochs in (0, 0, 0, 1):  # progress from before the epoch's end does not end the wait
        barrier.acknowledge(epochs)
        assert not rounds.has_passed(0.05)
    barrier.acknowledge(1)
    assert rounds.has_passed()


def test_epoch_barrier_is_open_without_observer_or_after_cancel() -> None:
    """Without an observer, or after the fit was given up, nothing waits."""
    assert BarrierWaiter(EpochBarrier(has_observer=False)).has_passed()
    barrier = EpochBarrier(has_observer=True)
    rounds = BarrierWaiter(barrier)
    assert not rounds.has_passed(0.05)
    barrier.open()
    assert rounds.has_passed()
    assert BarrierWaiter(barrier).has_passed()
