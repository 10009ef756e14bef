"""Rounds on the driver: what a checkpoint has at each moment, and what a fit goes on with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sparkstrom import ParameterAveragingTrainingMaster
from sparkstrom.base.errors import TrainingError
from sparkstrom.base.identity import Position
from sparkstrom.models import Adam, DenseNetwork, Nesterov
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.partitions import Partitions
from sparkstrom.runtime.lent_state import LentStates, partition_in, steps_in
from sparkstrom.spark.averaging.common_state import CommonState
from sparkstrom.spark.averaging.round_job import (
    AveragingJob,
    Measure,
    PieceSizes,
    RoundInput,
    RoundReport,
    RowFacts,
)
from sparkstrom.spark.averaging.round_results import Results
from sparkstrom.spark.averaging.round_tasks import EpochCut
from sparkstrom.spark.averaging.rounds import Rounds
from sparkstrom.spark.averaging.rounds_control import RoundsControl

MODEL = DenseNetwork([6, 3], updater=Adam(), seed=1)
FACTS = [RowFacts(0, 70, 8, 5, 3, 0, "here"), RowFacts(1, 60, 8, 6, 2, 0, "here")]
SPEC = FitSpec(workers=2, epochs=2, n_params=MODEL.n_params, version="test")


def common_of(states: LentStates | None = None, **options: Any) -> CommonState:
    master = ParameterAveragingTrainingMaster(**options)
    return CommonState(MODEL, master, MODEL.initial(), states or LentStates(), 0)


def report_of(partition: int = 0, steps: int = 1) -> RoundReport:
    return RoundReport(partition, "h", "e", 0, steps=steps, examples=8, weight=8.0)


class Engine:
    """Of two workers, in this process; it hears what is asked, and may look at that moment."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.measured: list[tuple[Position, ...]] = []  # where the partitions are meanwhile
        self.control: RoundsControl | None = None

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        yield

    def look(self, look: Any) -> list[RowFacts]:
        return FACTS

    def rounds_at_once(self, facts: Sequence[RowFacts]) -> int:
        return 100

    @contextlib.contextmanager
    def cut(self, cut: EpochCut, cutting: Any) -> Iterator[Any]:
        self.asked.append(f"epoch {cut.epoch}: {len(cut.rounds)} rounds")
        yield self

    def of_round(self, number: int, given: RoundInput, *, measures: bool = False) -> Any:
        return self

    def answers(self, run: Any) -> list[Measure]:
        assert self.control is not None
        self.asked.append("measuring")
        self.measured.append(tuple(p.position for p in self.control.snapshot().partitions))
        return [Measure(one.partition, 1.0, 8.0, 0.0) for one in FACTS]

    def sent(self, nbytes: int, parts: Iterator[bytes]) -> Any:
        raise AssertionError("what is shipped is replaced")


def run(monkeypatch: pytest.MonkeyPatch, spec: FitSpec) -> tuple[Engine, RoundsControl]:
    """All rounds of a fit; each brings what the parameters were."""
    module = "sparkstrom.spark.averaging.rounds"
    monkeypatch.setattr(f"{module}.shipped", lambda *_: Shipped())
    monkeypatch.setattr(
        f"{module}.fetched",
        lambda rows, packed, job, given: Results(
            [report_of(0), report_of(1)], {"parameters": MODEL.initial()}
        ),
    )
    master = ParameterAveragingTrainingMaster(averaging_frequency=2)
    job = AveragingJob(spec, MODEL, master, (), PieceSizes())
    control, engine = RoundsControl(spec, common_of(), judged=False), Engine()
    engine.control = control
    Rounds(engine, job, control).run()  # type: ignore[arg-type]
    assert control.failure is None
    return engine, control


class Shipped:
    nbytes = 0

    def destroy(self) -> None: ...


def test_an_epoch_is_over_when_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, control = run(monkeypatch, SPEC)
    rounds = ["epoch 0: 2 rounds", "measuring", "epoch 1: 2 rounds", "measuring"]
    assert engine.asked == rounds
    assert engine.measured == [
        (Position(0, 3), Position(0, 2)),
        (Position(1, 3), Position(1, 2)),
    ]
    assert [p.position for p in control.partitions] == [Position(2, 0), Position(2, 0)]
    assert control.partitions.minibatches == control.partitions.minibatches_expected == 10


def test_who_goes_on_from_between_measures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = run(monkeypatch, SPEC)
    known = zip(engine.measured[0], FACTS, strict=True)
    whole = Partitions.of(SPEC, 0.0).as_starts()
    starts = tuple(
        replace(start, position=position, rows=f.rows, checksum=f.checksum, batches=f.batches)
        for start, (position, f) in zip(whole, known, strict=True)
    )
    again, control = run(monkeypatch, replace(SPEC, starts=starts))
    assert again.asked == ["epoch 0: 0 rounds", "measuring", "epoch 1: 2 rounds", "measuring"]
    assert control.outcome().minibatches_resumed == 5
    # who measures on the way, as workers of a mesh, has that behind it
    assert {p.position for p in Partitions.of(replace(SPEC, starts=starts), 0.0)} == {
        Position(1, 0)
    }


def test_states_before_the_first_round_are_nobody_s() -> None:
    fresh = common_of(save_updater="own").states().copies()
    assert [partition_in(copy) for copy in fresh] == [-1]
    assert LentStates.of(fresh).own == {}
    written_before = LentStates(fresh[0], {-1: fresh[0]})
    assert common_of(written_before, save_updater="own").own == {}


def test_states_of_a_snapshot_are_those_of_its_round() -> None:
    """Encoded when they are asked for, whatever rounds came in between."""
    common = common_of(save_updater="own", outer=Nesterov(0.7, 0.9))
    control = RoundsControl(SPEC, common, judged=False)
    assert control.updater_copies == ()
    sums = {"0/": {"mean": np.ones(MODEL.n_params, np.float32)}}
    control.advance(MODEL.initial() + 1, [report_of()], sums, {})
    at_that_time = common.states().copies()
    control.snapshot()
    control.advance(MODEL.initial() + 2, [report_of(1)], {}, {})
    assert control.copy_updaters(everybody=True).result(0) == at_that_time
    assert control.updater_copies == at_that_time
    assert [partition_in(copy) for copy in at_that_time] == [0]
    assert steps_in(at_that_time[0], 0) == 1


def test_what_is_not_finite_is_not_delivered() -> None:
    common = common_of(outer=Nesterov(3e38, 0.9))
    before = common.parameters
    with (
        np.errstate(over="ignore"),
        pytest.raises(TrainingError, match=r"parameter 0 \(.*\) became -?inf in a round"),
    ):
        common.advance(before + 10, [report_of()], {})
    assert common.parameters is before
