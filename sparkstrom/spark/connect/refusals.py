"""Refusals: what Spark Connect cannot do, by name and with what to do instead."""

from __future__ import annotations

from typing import Any

from sparkstrom.base.errors import UsageError
from sparkstrom.spark.data.partitioning import check_data, is_dataframe
from sparkstrom.spark.driver.averaging_master import (
    IF_DIFFERENT,
    ParameterAveragingTrainingMaster,
    TrainingMaster,
)
from sparkstrom.spark.driver.controller_choice import parse_controller
from sparkstrom.spark.driver.training_master import SharedTrainingMaster

CLASSIC = "or start the program with spark-submit, without .remote(...)"


def check_options(master: TrainingMaster) -> None:
    """Raise UsageError for options that need RDDs, or a place that cannot be asked for."""
    if master.rdd_training_approach == "export":
        raise UsageError(
            "rdd_training_approach='export' writes and reads by RDDs, which a Spark Connect session"
            " does not have: leave it out (and write the DataFrame to Parquet yourself, where it is"
            f" expensive to make), {CLASSIC}"
        )
    if not isinstance(master, SharedTrainingMaster):
        _check_rounds(master)
    elif parse_controller(master.void.controller).host:
        raise UsageError(
            f"controller={master.void.controller!r}: a Spark Connect session cannot ask for a host;"
            f" write controller='executor', {CLASSIC}"
        )


def _check_rounds(master: ParameterAveragingTrainingMaster) -> None:
    if master.repartition == IF_DIFFERENT:
        raise UsageError(
            f"repartition={IF_DIFFERENT!r} asks how many partitions there are, which a Spark"
            f" Connect session is not told: write repartition='always' or 'never', {CLASSIC}"
        )


def need_frame(data: Any, session: Any) -> None:
    """Raise UsageError for what is no DataFrame of this session."""
    if not is_dataframe(data):
        if hasattr(data, "mapPartitions"):
            raise UsageError(
                "data is an RDD, which a Spark Connect session cannot take: pass a DataFrame with"
                f" features=... and label=... columns, {CLASSIC}"
            )
        check_data(data)
    if data.sparkSession is not session:
        raise UsageError(
            "data is a DataFrame of another session than the network's: make both with one session"
        )


def refuse(what: str, instead: str) -> UsageError:
    """Of a feature that is not there."""
    return UsageError(f"{what} is not there over Spark Connect: {instead}, {CLASSIC}")
