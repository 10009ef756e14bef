"""Classify handwritten digits with a LightningModule: spark-submit examples/lightning_digits.py"""

import sys
from typing import Any

import findspark

try:
    import pyspark  # noqa: F401
except ImportError:
    findspark.init()  # the cluster's own Spark

import numpy as np
import pytorch_lightning as pl
import torch
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from sparkstrom import SparkNetwork
from sparkstrom.models.lightning import LightningModel

ACCURACY_WANTED = 0.93
FIELDS = "pixels array<float>, digit int"


class Digits(pl.LightningModule):
    """A LightningModule as for Lightning's own Trainer."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Any) -> Any:
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        pixels, digit = batch
        return functional.cross_entropy(self(pixels), digit)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pixels, digit = batch
        self.log("val_loss", functional.cross_entropy(self(pixels), digit))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5)]


def main() -> int:
    digits = load_digits()
    features, labels = (digits.data / 16).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, held_out = order[:1437], order[1437:]

    spark = SparkSession.builder.appName("digits with Lightning").getOrCreate()
    rows = [(features[i].tolist(), int(labels[i])) for i in train]
    torch.manual_seed(1)
    network = SparkNetwork(spark, LightningModel(Digits(lr=5e-3)))
    summary = network.fit(
        spark.createDataFrame(rows, FIELDS),
        epochs=8,
        features="pixels",
        label="digit",
        validation=0.1,
    )

    module = network.module.eval()  # the trained LightningModule
    with torch.inference_mode():
        guesses = module(torch.from_numpy(features[held_out])).argmax(1).numpy()
    accuracy = float((guesses == labels[held_out]).mean())
    network.close()
    spark.stop()
    print(f"{'held-out accuracy':<20}{accuracy:.4f}\n{summary.table()}")
    return 0 if summary.replicas_equal and accuracy >= ACCURACY_WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
