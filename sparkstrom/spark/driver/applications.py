"""Applications: which way this program talks to Spark, by what a user hands over."""

from __future__ import annotations

from typing import Any

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import shown
from sparkstrom.spark.driver.application import Application
from sparkstrom.spark.driver.classic_application import ClassicApplication


def is_connect(thing: Any) -> bool:
    """A session or DataFrame of Spark Connect?"""
    return type(thing).__module__.startswith("pyspark.sql.connect")


def application_of(spark: Any) -> Application:
    """Return that of a SparkSession, classic or of Spark Connect, or a SparkContext.

    Raises UsageError for anything else.
    """
    if is_connect(spark):
        from sparkstrom.spark.connect.connect_application import ConnectApplication

        return ConnectApplication(spark)
    context = context_of(spark)
    if isinstance(context, type) or not callable(getattr(context, "getConf", None)):
        raise UsageError(
            f"spark={shown(spark)}: must be a SparkSession or SparkContext, such as"
            " SparkSession.builder.getOrCreate()"
        )
    return ClassicApplication(context)


def context_of(spark: Any) -> Any:
    """The SparkContext of a classic session; a session of Spark Connect itself, which has none.

    It is not asked for one: Spark 3.5 raises no AttributeError then.
    """
    return spark if is_connect(spark) else getattr(spark, "sparkContext", spark)
