"""Submitted by test_packed_environment.py: says which Python driver and executors run, and with
which sparkstrom; then runs the program that is its argument."""

from __future__ import annotations

import json
import os
import runpy
import sys

from pyspark.sql import SparkSession


def where(_: int = 0) -> dict[str, str]:
    """Of this process."""
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
    context = SparkSession.builder.appName("packed").getOrCreate().sparkContext
    there = context.parallelize(range(4), 4).map(where).collect()
    print(json.dumps({"driver": where(), "executors": there}), flush=True)
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
