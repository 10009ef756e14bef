"""The Spark session of tests/integration/spark, for rounds by RDDs."""

from tests.integration.spark.conftest import spark  # noqa: F401
