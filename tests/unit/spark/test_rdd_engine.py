"""Rounds by RDDs ask Spark for nothing once nobody waits for the fit; without Spark."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sparkstrom import ParameterAveragingTrainingMaster
from sparkstrom.spark.averaging.rdd_engine import RddEngine, RddRecords
from sparkstrom.spark.averaging.round_job import PieceSizes
from sparkstrom.spark.data.partitioning import Spread
from sparkstrom.spark.data.row_blocks import blocks_of_rows
from sparkstrom.spark.driver.fitting import FitCancelled


class Spark:
    """A context and an RDD of it: what they were asked for, and when the fit is given up."""

    def __init__(self, given_up_after: int = 0) -> None:
        self.asked, self.destroyed = list[str](), 0
        self._left = given_up_after
        self.ctx = self

    def gone(self) -> bool:
        return len(self.asked) >= self._left

    def mapPartitionsWithIndex(self, run: Any) -> Any:
        return self

    def collect(self) -> list[Any]:
        self.asked.append("collect")
        return []

    def runJob(self, *given: Any) -> list[Any]:
        self.asked.append("runJob")
        return []

    def broadcast(self, part: bytes) -> Any:
        self.asked.append("broadcast")
        return SimpleNamespace(destroy=self._destroy)

    def _destroy(self, *, blocking: bool) -> None:
        self.destroyed += 1


def engine_of(spark: Spark) -> RddEngine:
    job: Any = SimpleNamespace(master=ParameterAveragingTrainingMaster(), sizes=PieceSizes())
    rdd: Any = spark
    return RddEngine(spark, job, Spread(rdd, blocks_of_rows, 2), spark.gone)


def look(spark: Spark) -> None:
    engine_of(spark).look(lambda *given: iter(()))


def answer(spark: Spark) -> None:
    rdd: Any = spark
    RddRecords(rdd, spark.gone).answers(lambda *given: iter(()))


def fetch(spark: Spark) -> None:
    rdd: Any = spark
    with RddRecords(rdd, spark.gone).results(lambda *given: iter(())) as fetched:
        fetched([0])


def send(spark: Spark) -> None:
    engine_of(spark).sent(2, iter([b"a", b"b"]))


@pytest.mark.parametrize("ask", [look, answer, fetch, send])
def test_nothing_is_asked_for_a_fit_that_was_given_up(ask: Any) -> None:
    spark = Spark()
    with pytest.raises(FitCancelled, match="nobody waits for its rounds"):
        ask(spark)
    assert spark.asked == []
    waited_for = Spark(given_up_after=9)
    ask(waited_for)
    assert waited_for.asked


def test_what_is_on_its_way_then_is_let_go() -> None:
    spark = Spark(given_up_after=2)
    parts = iter([b"a", b"b", b"c"])
    with pytest.raises(FitCancelled):
        engine_of(spark).sent(3, parts)
    assert (spark.asked, spark.destroyed) == (["broadcast"] * 2, 2)
