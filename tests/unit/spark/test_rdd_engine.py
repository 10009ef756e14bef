"""Tests, without Spark, that rounds by RDDs request nothing from Spark once a fit is aborted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparkstrom import ParameterAveragingTrainingMaster
from sparkstrom.data.row_blocks import read_row_blocks
from sparkstrom.fit.supervisor import FitCancelled
from sparkstrom.models import DenseNetwork
from sparkstrom.models.base import FitLength
from sparkstrom.options.parameter_averaging import PER_WORKER
from sparkstrom.planning.memory import PieceSizes
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.rounds.averaging import RoundOptions, RoundState
from sparkstrom.rounds.backend import DOWNLOADED, EpochPlan, RoundOrder
from sparkstrom.rounds.worker_round import RoundPace
from sparkstrom.runtime.optimizer_states import OptimizerStates
from sparkstrom.spark.data.partitioning import PartitionedData
from sparkstrom.spark.rounds.rdd import RddRecords, RddRoundsBackend
from sparkstrom.spark.rounds.tasks import SparkRoundsJob


class Spark:
    """A fake context and RDD that records requests and aborts the fit after some of them."""

    def __init__(self, given_up_after: int = 0) -> None:
        self.asked, self.destroyed = list[str](), 0
        self._left = given_up_after
        self.ctx = self
        self.abort: Callable[[], None] = lambda: None

    def abort_if_due(self) -> None:
        if len(self.asked) >= self._left:
            self.abort()

    def mapPartitionsWithIndex(self, run: Any) -> Any:
        return self

    def collect(self) -> list[Any]:
        self.asked.append("collect")
        self.abort_if_due()
        return []

    def runJob(self, *given: Any) -> list[Any]:
        self.asked.append("runJob")
        return []

    def broadcast(self, part: bytes) -> Any:
        self.asked.append("broadcast")
        self.abort_if_due()
        return SimpleNamespace(destroy=self._destroy)

    def _destroy(self, *, blocking: bool) -> None:
        self.destroyed += 1


def make_backend(spark: Spark) -> RddRoundsBackend:
    """Return the rounds of a fit, which the fake context aborts after some requests."""
    model = DenseNetwork([6, 3])
    spec = FitSpec(2, 1, model.n_params, "test")
    job = SparkRoundsJob(spec, model, ParameterAveragingTrainingMaster(), (), PieceSizes())
    rdd: Any = spark
    backend = RddRoundsBackend(spark, job, PartitionedData(rdd, read_row_blocks, 2))
    spark.abort = backend.abort
    spark.abort_if_due()
    return backend


def inspect(spark: Spark) -> None:
    make_backend(spark).inspect(lambda *given: iter(()))


def collect(spark: Spark) -> None:
    rdd: Any = spark
    RddRecords(rdd, make_backend(spark).check_aborted).collect(lambda *given: iter(()))


def fetch(spark: Spark) -> None:
    rdd: Any = spark
    records = RddRecords(rdd, make_backend(spark).check_aborted)
    with records.results(lambda *given: iter(())) as fetched:
        fetched([0])


def send(spark: Spark) -> None:
    make_backend(spark).send_parts(2, iter([b"a", b"b"]))


@pytest.mark.parametrize("ask", [inspect, collect, fetch, send])
def test_aborted_fit_sends_no_request_to_spark(ask: Any) -> None:
    """An aborted fit raises FitCancelled before any request; one that is not aborted continues."""
    spark = Spark()
    with pytest.raises(FitCancelled, match="nobody waits for its rounds"):
        ask(spark)
    assert spark.asked == []
    waited_for = Spark(given_up_after=9)
    ask(waited_for)
    assert waited_for.asked


def test_abort_between_broadcasts_destroys_earlier_broadcasts() -> None:
    """If a fit is aborted between two broadcasts, those made so far are destroyed."""
    spark = Spark(given_up_after=2)
    parts = iter([b"a", b"b", b"c"])
    with pytest.raises(FitCancelled):
        make_backend(spark).send_parts(3, parts)
    assert (spark.asked, spark.destroyed) == (["broadcast"] * 2, 2)


def test_a_workers_own_state_counts_for_the_host_that_reads_it() -> None:
    """Before, each worker's state counted as many times as there are hosts."""
    backend = make_backend(Spark(given_up_after=100))
    hosts: Any = [SimpleNamespace(host="a"), SimpleNamespace(host="b"), SimpleNamespace(host="b")]
    backend._facts, model = hosts, DenseNetwork([6, 3])
    state = RoundState(
        model, RoundOptions(1, PER_WORKER), model.initial(), OptimizerStates(), steps=0
    )
    state.own = {partition: {"moment": np.zeros(50, np.float32)} for partition in range(3)}
    plan, pace = EpochPlan(0, 1, (0,) * 3, (1,) * 3, False), RoundPace(0, 3, 3, FitLength(1, 3))
    traffic = Counter[str]()
    with ExitStack() as sent:
        backend._send_start(RoundOrder(plan, 0, pace), state, sent, traffic)
    assert traffic == {DOWNLOADED: 2 * 4 * model.n_params + 3 * 200}
