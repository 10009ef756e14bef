"""A fit in rounds with an engine in this process: everything but Spark is the real thing."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.lent_state import LentStates
from sparkstrom.spark.averaging import round_tasks
from sparkstrom.spark.averaging.common_state import CommonState
from sparkstrom.spark.averaging.round_job import AveragingJob, PieceSizes, RoundInput, RowFacts
from sparkstrom.spark.averaging.round_tasks import EpochCut
from sparkstrom.spark.averaging.rounds import Rounds
from sparkstrom.spark.averaging.rounds_control import RoundsControl
from sparkstrom.spark.data.row_blocks import blocks_of_rows
from sparkstrom.spark.driver.averaging_master import ParameterAveragingTrainingMaster
from sparkstrom.spark.executor.task_place import TaskPlace

Rows = list[tuple[np.ndarray, int]]

_numbers = itertools.count(1)  # of fits: by it a process keeps their jobs


class Records:
    def __init__(self, each: Sequence[list[bytes]], at: Callable[[int], None]) -> None:
        self._each, self._at = each, at

    def answers(self, run: Any) -> list[Any]:
        found: list[Any] = []
        for index, records in enumerate(self._each):
            self._at(index)
            found += run(index, records)
        return found


class Cut:
    def __init__(self, engine: Engine, cut: EpochCut, targets: list[list[bytes]]) -> None:
        self._engine, self._cut, self._targets = engine, cut, targets

    def of_round(self, number: int, given: RoundInput, *, measures: bool = False) -> Records:
        if measures:
            self._engine.on_measure(self._cut.epoch)
        first = self._cut.first_target(number)
        return Records(self._targets[first : first + self._cut.workers], self._engine.stand_at)


class Parts:
    def __init__(self, parts: Iterator[bytes]) -> None:
        self._parts = [*parts]

    def contents(self, records: Iterator[bytes]) -> Iterator[bytes]:
        yield from self._parts

    def destroy(self) -> None:
        self._parts.clear()


class Engine:
    """``on_measure(epoch)`` is called before held-out rows are measured."""

    def __init__(self, rows: Sequence[Rows], scratch: Path, patch: pytest.MonkeyPatch) -> None:
        self._rows, self._scratch, self._partition = rows, scratch, 0
        self.on_measure: Callable[[int], None] = lambda epoch: None
        patch.setattr(round_tasks, "here", self._here)
        patch.setattr(round_tasks, "again", lambda: 0)
        patch.setattr(round_tasks, "spare_collections", lambda: None)

    def stand_at(self, partition: int) -> None:
        self._partition = partition

    def _here(self) -> TaskPlace:
        return TaskPlace(self._partition, 0, "host", "jvm", self._scratch)

    def _of_all(self, run: Any) -> list[Any]:
        whole = Records([[]] * len(self._rows), self.stand_at)
        return whole.answers(lambda index, _: run(blocks_of_rows, index, iter(self._rows[index])))

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        yield

    def look(self, look: Any) -> list[Any]:
        return self._of_all(look)

    def rounds_at_once(self, facts: Sequence[RowFacts]) -> int:
        return 2

    @contextlib.contextmanager
    def cut(self, cut: EpochCut, cutting: Any) -> Iterator[Cut]:
        targets: list[list[bytes]] = [[] for _ in range(cut.targets)]
        for target, record in self._of_all(cutting):
            targets[target].append(record)
        yield Cut(self, cut, targets)

    def sent(self, nbytes: int, parts: Iterator[bytes]) -> Parts:
        return Parts(parts)


class Fit:
    """One fit; ``run`` goes through all its rounds in this thread."""

    def __init__(
        self,
        engine: Engine,
        model: Any,
        master: ParameterAveragingTrainingMaster,
        parameters: Any = None,
        states: LentStates | None = None,
        *,
        judged: bool = False,
        **spec: Any,
    ) -> None:
        given = {"workers": len(engine._rows), "epochs": 1, "job": next(_numbers), **spec}
        self.spec = FitSpec(n_params=model.n_params, version="test", **given)
        began = model.initial() if parameters is None else parameters
        self.common = CommonState(model, master, began, states or LentStates(), 0)
        self.control = RoundsControl(self.spec, self.common, judged=judged)
        job = AveragingJob(self.spec, model, master, (), PieceSizes())
        self._rounds = Rounds(engine, job, self.control)  # type: ignore[arg-type]

    def run(self) -> list[str]:
        """The workers' last words. Raise what failed."""
        said = self._rounds.run()
        if self.control.failure is not None:
            raise self.control.failure
        return said
