"""What the backends of rounds run on: Spark, a Spark Connect server, and processes."""

from tests.integration.connect.conftest import client, server  # noqa: F401
from tests.integration.spark.conftest import spark  # noqa: F401
