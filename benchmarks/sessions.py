"""Spark applications for benchmarks, with executor processes on one machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]  # from which executors import modules of the benchmarks


@contextmanager
def local_cluster(workers: int, conf: Mapping[str, str] | None = None) -> Iterator[Any]:
    """Yield a session with a task slot for each worker, and an executor for each two workers.

    ``conf`` is additional configuration.
    """
    from pyspark.sql import SparkSession

    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    executors, cores = (1, workers) if workers < 3 else (-(-workers // 2), 2)
    builder = (
        SparkSession.builder.master(f"local-cluster[{executors},{cores},1024]")
        .appName("sparkstrom benchmark")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.executorEnv.PYTHONPATH", str(ROOT))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
    )
    for name, value in (conf or {}).items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    try:
        yield session
    finally:
        session.stop()
