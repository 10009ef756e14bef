"""What workers of a round say is heard, also of the round that fails; and where it failed."""

from __future__ import annotations

import contextlib
import itertools
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom import ParameterAveragingTrainingMaster
from sparkstrom.base.errors import TrainingError, UsageError
from sparkstrom.models import DenseNetwork, Sgd
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.lent_state import LentStates
from sparkstrom.spark.averaging import round_tasks
from sparkstrom.spark.averaging.common_state import CommonState
from sparkstrom.spark.averaging.pieces import RowsMissing, SentAll, Told, packed_record
from sparkstrom.spark.averaging.round_job import (
    PARAMETERS,
    AveragingJob,
    ModelFailure,
    PackedJob,
    PieceSizes,
    RoundInput,
    RoundReport,
    RowPiece,
)
from sparkstrom.spark.averaging.round_tasks import measure_round
from sparkstrom.spark.averaging.rounds import Rounds
from sparkstrom.spark.averaging.rounds_control import RoundsControl
from sparkstrom.spark.averaging.shipment import shipped
from sparkstrom.spark.data.row_blocks import blocks_of_rows
from sparkstrom.spark.executor.task_place import TaskPlace

ROWS = [(np.full(6, i, np.float32), i % 3) for i in range(20)]
NUMBERS = itertools.count(1)


class Telling(DenseNetwork):
    """Says what it measures, and fails of ``wrong``."""

    wrong: type[Exception] | None = None

    def loss(self, batch: Any) -> tuple[float, float]:
        print("measured", batch.rows)
        if self.wrong is not None:
            raise self.wrong("this loss of a user's\nis wrong")
        return super().loss(batch)


class Wrong(Telling):
    wrong = ValueError


class Refused(Telling):
    wrong = UsageError


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    place = TaskPlace(0, 5, "host7", "jvm", Path("/nowhere"))
    monkeypatch.setattr(round_tasks, "here", lambda: place)
    monkeypatch.setattr(round_tasks, "again", lambda: 0)


def job_of(model: DenseNetwork) -> AveragingJob:
    spec = FitSpec(1, 1, model.n_params, "test", job=next(NUMBERS), fraction=0.5)
    return AveragingJob(spec, model, ParameterAveragingTrainingMaster(), (), PieceSizes())


class InMemory:
    """Shipments' parts."""

    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts

    def contents(self, records: Iterator[bytes]) -> Iterator[bytes]:
        yield from self._parts

    def destroy(self) -> None:
        pass


class Here:
    """An engine, and all that it makes: one worker, whose tasks run here."""

    def __init__(self, report: RoundReport | None = None) -> None:
        self._report = report  # in place of a round's

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        yield

    def look(self, look: Any) -> list[Any]:
        return list(look(blocks_of_rows, 0, ROWS))

    def rounds_at_once(self, facts: Any) -> int:
        return 100

    @contextlib.contextmanager
    def cut(self, cut: Any, cutting: Any) -> Iterator[Here]:
        self._cut = cut
        self._rows = list(cutting(blocks_of_rows, 0, ROWS))
        yield self

    def of_round(self, number: int, given: Any, *, measures: bool = False) -> Here:
        self._number, self._measures = number, measures
        return self

    def answers(self, run: Any) -> list[Any]:
        if self._report is not None and not self._measures:
            return [packed_record(Told(0, self._report)), packed_record(SentAll(0, 1))]
        target = self._cut.first_target(self._number)
        return list(run(0, [content for to, content in self._rows if to == target]))

    def sent(self, nbytes: int, parts: Iterator[bytes]) -> InMemory:
        return InMemory(list(parts))


def run_of(model: DenseNetwork, report: RoundReport | None = None) -> RoundsControl:
    job, states = job_of(model), LentStates()
    common = CommonState(model, job.master, model.initial(), states, 0)
    control = RoundsControl(job.spec, common, judged=False)
    engine: Any = Here(report)
    Rounds(engine, job, control).run()
    return control


def report_of(**said: Any) -> RoundReport:
    lines = [("training", "class 7 is nan")]
    return replace(RoundReport(0, "host7", "e", 0, lines=lines, skipped=4), **said)


def test_what_was_printed_in_the_round_that_fails_is_heard() -> None:
    report = report_of(doing="training", error=ModelFailure("ValueError: no", "trace", False))
    control = run_of(Telling([6, 3]), report)
    assert isinstance(control.failure, TrainingError)
    [line] = control.progress.heard
    assert (line.partition, line.host, line.phase) == (0, "host7", "training")
    assert line.text == "class 7 is nan"
    assert control.progress.unheard == 4


def test_what_was_printed_in_a_round_without_weight_is_heard() -> None:
    control = run_of(Telling([6, 3]), report_of())
    assert control.failure is None
    assert {line.text for line in control.progress.heard} >= {"class 7 is nan"}


def test_what_is_printed_while_measuring_is_heard() -> None:
    control = run_of(Telling([6, 3], updater=Sgd(0.1)))
    assert control.failure is None
    [line] = control.progress.heard
    assert (line.host, line.phase) == ("host7", "measuring")
    assert line.text.startswith("measured ")
    assert control.progress.stats[1].training.epochs


def test_what_a_loss_raises_while_measuring_has_its_place() -> None:
    control = run_of(Wrong([6, 3], updater=Sgd(0.1)))
    error = control.failure
    assert isinstance(error, TrainingError)
    assert str(error) == "ValueError: this loss of a user's (partition 0 on host7, measuring)"
    assert "is wrong" in error.trace
    assert [line.phase for line in control.progress.heard] == ["measuring"]
    assert isinstance(run_of(Refused([6, 3])).failure, UsageError)


def test_held_out_rows_that_break_off_are_asked_for_again() -> None:
    """By Spark, which tries a task again that fails."""
    model = DenseNetwork([6, 3])
    arrays = {PARAMETERS: model.initial()}
    ship = shipped(lambda nbytes, parts: InMemory(list(parts)), arrays, {}, 1 << 20)
    given = RoundInput(0, 0, 0, ship, ship)
    with pytest.raises(RowsMissing, match="0 minibatches of a round arrived"):
        list(measure_round(PackedJob.of(job_of(model)), given, 0, [pickle.dumps(RowPiece(1))]))
