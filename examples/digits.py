"""Handwritten digits on a Spark cluster: spark-submit examples/digits.py --epochs 20"""

import argparse
import sys

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

ACCURACY_WANTED = 0.95  # at the default settings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--workers-per-node", type=int, default=-1, help="-1: all task slots")
    parser.add_argument("--port", type=int, help="the controller's UDP port")
    parser.add_argument("--mask", help="network to use, such as 10.0.0.0/16")
    parser.add_argument("--controller", help="the driver's address")
    parser.add_argument("--hidden", type=int, nargs="*", default=[256, 256])
    args = parser.parse_args()

    digits = load_digits()
    features, labels = (digits.data / 16).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, held_out = order[:1437], order[1437:]

    spark = SparkSession.builder.appName("digits").getOrCreate()
    data = spark.sparkContext.parallelize([(features[i], int(labels[i])) for i in train])
    model = DenseNetwork([64, *args.hidden, 10], hidden="relu", updater=Sgd(0.1), seed=1)
    void = VoidConfiguration(
        unicast_port=args.port, network_mask=args.mask, controller_address=args.controller
    )
    master = SharedTrainingMaster(void, workers_per_node=args.workers_per_node)
    network = SparkNetwork(spark, model, master)
    summary = network.fit(data, epochs=args.epochs)
    accuracy = float((network.predict(features[held_out]).argmax(1) == labels[held_out]).mean())
    network.close()
    spark.stop()
    print(f"{'held-out accuracy':<20}{accuracy:.4f}\n{summary.table()}")
    as_wanted = accuracy >= ACCURACY_WANTED or args.epochs < 40 or args.hidden != [256, 256]
    return 0 if summary.replicas_equal and as_wanted else 1


if __name__ == "__main__":
    sys.exit(main())
