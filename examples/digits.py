"""Classify handwritten digits on a Spark cluster: spark-submit examples/digits.py --epochs 20

With Spark Connect: SPARK_REMOTE=sc://host:15002 python examples/digits.py
"""

import argparse
import sys
from typing import Any

import findspark

try:
    import pyspark  # noqa: F401
except ImportError:
    findspark.init()  # the cluster's own Spark

import numpy as np
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

from sparkstrom import SharedTrainingMaster, SparkNetwork, VoidConfiguration
from sparkstrom.models import DenseNetwork, Sgd

ACCURACY_WANTED = 0.95  # with the default settings


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--epochs", type=int, default=40)
    made.add_argument("--workers-per-node", type=int, help="default: all task slots")
    made.add_argument("--port", type=int, help="the controller's UDP port")
    made.add_argument("--mask", help="network to use, such as 10.0.0.0/16")
    made.add_argument("--controller", help="the driver's address")
    made.add_argument("--hidden", type=int, nargs="*", default=[256, 256])
    return made


def master_of(args: argparse.Namespace) -> SharedTrainingMaster:
    """Return the options on the command line; others can be set by --conf spark.sparkstrom.…"""
    void = {
        "unicast_port": args.port,
        "network_mask": args.mask,
        "controller_address": args.controller,
    }
    master = {"workers_per_node": args.workers_per_node}
    return SharedTrainingMaster(VoidConfiguration(**said(void)), **said(master))


def said(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are given."""
    return {name: value for name, value in options.items() if value is not None}


def main() -> int:
    args = parser().parse_args()

    digits = load_digits()
    features, labels = (digits.data / 16).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, held_out = order[:1437], order[1437:]

    spark = SparkSession.builder.appName("digits").getOrCreate()
    rows = [(features[i].tolist(), int(labels[i])) for i in train]
    data = spark.createDataFrame(rows, "features array<float>, label int")
    model = DenseNetwork([64, *args.hidden, 10], hidden="relu", updater=Sgd(0.1), seed=1)
    network = SparkNetwork(spark, model, master_of(args))
    summary = network.fit(data, epochs=args.epochs)
    accuracy = float((network.predict(features[held_out]).argmax(1) == labels[held_out]).mean())
    network.close()
    spark.stop()
    print(f"{'held-out accuracy':<20}{accuracy:.4f}\n{summary.table()}")
    as_wanted = accuracy >= ACCURACY_WANTED or args.epochs < 40 or args.hidden != [256, 256]
    return 0 if summary.replicas_equal and as_wanted else 1


if __name__ == "__main__":
    sys.exit(main())
