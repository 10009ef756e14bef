"""Submitted by test_packed_environment.py: prints which Python and which sparkstrom the driver and
the executors use; then trains a small network."""

from __future__ import annotations

import json
import os
import sys

import numpy as np
from pyspark.sql import SparkSession

from sparkstrom import SparkNetwork
from sparkstrom.models import DenseNetwork


def find_locations(_: int = 0) -> dict[str, str]:
    """Return the locations of this process's Python, sparkstrom and Aeron library."""
    import sparkstrom
    from sparkstrom.transport.aeron.library import (
        LIBRARY_VARIABLE,
        fetched_library_path,
        load_library,
    )

    load_library()
    return {
        "prefix": sys.prefix,
        "sparkstrom": sparkstrom.__file__,
        "named library": os.environ.get(LIBRARY_VARIABLE, ""),
        "fetched library": str(fetched_library_path()),
    }


if __name__ == "__main__":
    spark = SparkSession.builder.appName("packed").getOrCreate()
    there = spark.sparkContext.parallelize(range(4), 4).map(find_locations).collect()
    print(json.dumps({"driver": find_locations(), "executors": there}), flush=True)
    features = np.random.default_rng(0).normal(size=(400, 4)).astype(np.float32)
    rows = [(row, int(row.sum() > 0)) for row in features]
    with SparkNetwork(spark, DenseNetwork([4, 8, 2], seed=1)) as network:
        print(network.fit(spark.sparkContext.parallelize(rows), epochs=5).table())
    spark.stop()
