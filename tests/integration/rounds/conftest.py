"""Rounds by RDDs run on the Spark session that other tests share."""

from tests.integration.spark.conftest import spark  # noqa: F401
