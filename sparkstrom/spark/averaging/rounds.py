"""Rounds: a fit as one Spark job after another, in the thread of its job.

First the rows are looked at; in each epoch every worker's minibatches are sent to their rounds, by
one shuffle; a round's job reads the rows of that round alone, trains, and adds up. An executor that
dies costs what Spark makes again: a round gives the same bits whoever makes it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from sparkstrom.base.errors import SparkstromError, TrainingError, UsageError
from sparkstrom.base.identity import Position
from sparkstrom.models.base import State
from sparkstrom.protocol.master.admission import different_rows
from sparkstrom.protocol.master.phases import NO_ROWS
from sparkstrom.spark.averaging.common_state import CommonState
from sparkstrom.spark.averaging.round_engine import CutRows, RoundEngine
from sparkstrom.spark.averaging.round_job import (
    BUFFERS,
    PARAMETERS,
    UPDATER,
    AveragingJob,
    Measure,
    PackedJob,
    RoundInput,
    RoundReport,
    RowFacts,
    fit_is_over,
)
from sparkstrom.spark.averaging.round_results import Results, fetched
from sparkstrom.spark.averaging.round_tasks import (
    EpochCut,
    cut_epoch,
    look_at_rows,
    measure_round,
)
from sparkstrom.spark.averaging.rounds_control import DOWN, RoundsControl
from sparkstrom.spark.averaging.shipment import Shipment, shipped


class Rounds:
    """One fit's; ``run`` goes through all of them."""

    def __init__(self, engine: RoundEngine, job: AveragingJob, control: RoundsControl) -> None:
        self._engine, self._job, self._control = engine, job, control
        self._job_packed = PackedJob.of(job)
        self._facts: tuple[RowFacts, ...] = ()
        self._fresh: Shipment | None = None

    @property
    def _packed(self) -> PackedJob:
        return self._job_packed.now()

    @property
    def _common(self) -> CommonState:
        return self._control.common

    def run(self) -> list[str]:
        """In the Spark job's thread; return the workers' last words."""
        control = self._control
        try:
            with self._engine.opened():
                self._all_epochs()
            return [] if control.given_up else control.finish()
        except SparkstromError as error:
            control.fail(error)
            return []
        finally:
            fit_is_over(self._job.spec.job)

    def _all_epochs(self) -> None:
        try:
            self._look()
            self._control.begin(self._facts)
            for epoch in range(self._job.spec.epochs):
                if self._control.goes_on and self._is_left(epoch):
                    self._epoch(epoch)
        finally:
            if self._fresh is not None:
                self._fresh.destroy()

    # -- rows ------------------------------------------------------------------------------------

    def _look(self) -> None:
        facts = []
        for one in self._engine.look(partial(look_at_rows, self._packed)):
            if not isinstance(one, RowFacts):
                raise one
            facts.append(one)
        self._facts = tuple(sorted(facts, key=lambda one: one.partition))
        for one in self._facts:
            partition = self._control.partitions[one.partition]
            if not partition.seen_before(one.rows, one.checksum, one.batches):
                raise UsageError(different_rows(partition, one.rows, one.batches, one.checksum))
        if not any(one.rows for one in self._facts):
            raise UsageError(NO_ROWS.format(len(self._facts)))

    def _is_left(self, epoch: int) -> bool:
        """Has anybody something to train in it?"""
        partitions = self._control.partitions
        return any(p.rows and p.position.epoch <= epoch for p in partitions)

    def _first_of(self, epoch: int, index: int) -> int:
        """A worker's first minibatch that is not trained yet."""
        position = self._control.partitions[index].position
        if position.epoch == epoch:
            return position.batch
        return 0 if position.epoch < epoch else self._facts[index].batches

    def _cuts(self, epoch: int) -> Iterator[EpochCut]:
        """All rounds of an epoch, as many at once as one shuffle is for."""
        each, workers = self._job.master.averaging_frequency, len(self._facts)
        firsts = tuple(self._first_of(epoch, index) for index in range(workers))
        left = max(one.batches - first for one, first in zip(self._facts, firsts, strict=True))
        rounds, most = -(-left // each), self._engine.rounds_at_once(self._facts)
        checksums = tuple(one.checksum for one in self._facts)
        held_out = any(one.held_out for one in self._facts)
        # where all is trained and the fit before had not measured it yet, that alone is left
        for first in range(0, max(rounds, held_out), most):
            end = min(rounds, first + most)
            last = held_out and end == rounds
            yield EpochCut(epoch, range(first, end), firsts, checksums, last)

    # -- an epoch --------------------------------------------------------------------------------

    def _epoch(self, epoch: int) -> None:
        measures: dict[int, Measure] = {}
        for cut in self._cuts(epoch):
            with self._engine.cut(cut, partial(cut_epoch, self._packed, cut)) as rows:
                for number in cut.rounds:
                    if not self._control.goes_on:
                        return
                    self._round(rows, cut, number)
                if cut.held_out:
                    measures = self._measure(rows, cut)
        self._control.end_epoch(epoch, measures)

    def _ends(self, cut: EpochCut, number: int) -> dict[int, Position]:
        """How far each partition is after this round; whole epochs end when they are measured."""
        each, ends = self._job.master.averaging_frequency, dict[int, Position]()
        for index, one in enumerate(self._facts):
            batch = min(cut.firsts[index] + (number + 1) * each, one.batches)
            if one.rows:
                ends[index] = Position(cut.epoch, batch)
        return ends

    def _round(self, rows: CutRows, cut: EpochCut, number: int) -> None:
        with contextlib.ExitStack() as sent:
            steps, (parameters, updater, *own) = self._common.steps, self._ship(sent)
            whose = dict(zip(sorted(self._common.own), own, strict=True))
            given = RoundInput(steps, cut.epoch, steps, parameters, updater, whose)
            records = rows.of_round(number, given)
            found = fetched(records, self._packed, self._job, given)
        self._take(found, self._ends(cut, number))

    def _take(self, found: Results, ends: dict[int, Position]) -> None:
        self._hear(found.reports)
        if PARAMETERS not in found.arrays:
            self._control.skip(ends)
            return
        mean, sums = found.arrays.pop(PARAMETERS), dict[str, State]()
        for name, array in found.arrays.items():
            owner, _, own_name = name.partition(UPDATER)
            sums.setdefault(owner, {})[own_name] = array
        self._control.advance(mean, found.reports, sums, ends)

    def _hear(self, reports: Sequence[RoundReport | Measure]) -> None:
        """What workers' code has said. Raise what it failed of."""
        self._control.hear(reports)
        for one in reports:
            if one.error is not None:
                reason, trace, is_usage = one.error
                if is_usage:
                    raise UsageError(reason)
                raise TrainingError(reason, one.host, one.partition, trace, one.doing)

    # -- what travels ----------------------------------------------------------------------------

    def _ship(self, sent: contextlib.ExitStack) -> list[Shipment]:
        """Parameters and buffers, the updater's state for all, and those of each."""
        common = self._common
        everybody = max(1, len({one.host for one in self._facts}))
        ways = [self._ship_parameters, self._ship_common]
        ways += [partial(self._ship_state, common.own[index]) for index in sorted(common.own)]
        made = []
        for ship in ways:
            made.append(one := ship())
            if one is not self._fresh:  # which goes once
                sent.callback(one.destroy)
                self._control.traffic.by_kind[DOWN] += everybody * one.nbytes
        return made

    def _ship_parameters(self) -> Shipment:
        common = self._common
        arrays: dict[str, Any] = {PARAMETERS: common.parameters}
        if common.buffers:
            arrays[BUFFERS] = np.frombuffer(common.buffers, np.uint8)
        return shipped(self._engine.sent, arrays, {}, self._job.sizes.part)

    def _ship_common(self) -> Shipment:
        """A fresh one goes once."""
        common = self._common
        if common.updater is not common.fresh:
            return self._ship_state(common.updater)
        if self._fresh is None:
            self._fresh = self._ship_state(common.fresh)
        return self._fresh

    def _ship_state(self, state: State) -> Shipment:
        arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
        plain = {name: value for name, value in state.items() if name not in arrays}
        return shipped(self._engine.sent, arrays, plain, self._job.sizes.part)

    # -- held-out rows ---------------------------------------------------------------------------

    def _measure(self, rows: CutRows, cut: EpochCut) -> dict[int, Measure]:
        """By partition."""
        sent = self._ship_parameters()
        try:
            steps = self._common.steps
            given = RoundInput(steps, cut.epoch, steps, sent, sent)
            records = rows.of_round(cut.rounds.stop, given, measures=True)
            found = records.answers(partial(measure_round, self._packed, given))
        finally:
            sent.destroy()
        self._hear(sorted(found, key=lambda one: one.partition))
        return {one.partition: one for one in found}
