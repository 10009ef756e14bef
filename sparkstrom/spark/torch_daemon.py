"""Spark's Python daemon with torch in it, so that workers which train torch models start sooner.

Spark forks an executor's Python workers from one daemon. Each worker of a torch model would import
torch, which takes more than two seconds of processor time; with

    --conf spark.python.daemon.module=sparkstrom.spark.torch_daemon

the daemon does so once for all. sparkstrom and torch must be installed where executors run Python:
what ``--py-files`` adds reaches workers only, not their daemon.
"""

from __future__ import annotations

import torch._dynamo  # noqa: F401  # torch, and what its optimizers import when they are made
from pyspark.daemon import manager

if __name__ == "__main__":
    manager()
