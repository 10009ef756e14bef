"""Classify handwritten digits with PyTorch: spark-submit examples/torch_digits.py"""

import sys
from functools import partial

import findspark

try:
    import pyspark  # noqa: F401
except ImportError:
    findspark.init()  # the cluster's own Spark

import numpy as np
import torch
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits
from torch import nn

from sparkstrom import SparkNetwork
from sparkstrom.models.torch import TorchModel

ACCURACY_WANTED = 0.95


def make_module() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(144, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)),
    )


def main() -> int:
    digits = load_digits()
    features, labels = (digits.data / 16).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, held_out = order[:1437], order[1437:]

    spark = SparkSession.builder.appName("digits with PyTorch").getOrCreate()
    data = spark.sparkContext.parallelize([(features[i], int(labels[i])) for i in train])
    optimizer = partial(torch.optim.Adam, lr=2e-3)
    model = TorchModel(make_module(), nn.CrossEntropyLoss(), optimizer, clip_norm=5.0)
    network = SparkNetwork(spark, model)
    summary = network.fit(data, epochs=10)

    module = network.module.eval()  # the trained module
    with torch.inference_mode():
        guesses = module(torch.from_numpy(features[held_out])).argmax(1).numpy()
    accuracy = float((guesses == labels[held_out]).mean())
    network.close()
    spark.stop()
    print(f"{'held-out accuracy':<20}{accuracy:.4f}\n{summary.table()}")
    return 0 if summary.replicas_equal and accuracy >= ACCURACY_WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
