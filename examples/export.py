"""Compute expensive rows once, and train on them twice: python examples/export.py

The rows are images. They have weights by class, and a tenth of them is held out.
"""

import io
import sys

import numpy as np
from PIL import Image
from pyspark.sql import SparkSession
from pyspark.sql import functions as sql
from sklearn.datasets import load_digits

from sparkstrom import SharedTrainingMaster, SparkNetwork
from sparkstrom.models import DenseNetwork, Sgd


def png(pixels: np.ndarray) -> bytes:
    out = io.BytesIO()
    Image.fromarray((pixels * 15).astype(np.uint8)).save(out, "PNG")
    return out.getvalue()


def decoded(image: bytes) -> list[float]:
    """Decode an image; an example of a slow Python function that Spark calls for each row."""
    return (np.asarray(Image.open(io.BytesIO(image))).ravel() / 240).tolist()


def main() -> int:
    digits = load_digits()
    spark = SparkSession.builder.appName("export").getOrCreate()
    rows = [(png(i), int(y)) for i, y in zip(digits.images, digits.target, strict=True)]
    images = spark.createDataFrame(rows, "image binary, digit int")
    frame = images.select(
        sql.udf(decoded, "array<float>")("image").alias("pixels"),
        "digit",
        sql.when(sql.col("digit") == 8, 2.0).otherwise(1.0).alias("weight"),
        (sql.hash("image") % 10 == 0).alias("held_out"),
    )
    master = SharedTrainingMaster(
        rdd_training_approach="export",
        batch_memory_bytes=64 << 20,
    )
    network = SparkNetwork(spark, DenseNetwork([64, 64, 10], updater=Sgd(0.1), seed=1), master)
    columns = {"features": "pixels", "label": "digit", "weight": "weight", "validation": "held_out"}
    for _ in range(2):
        summary = network.fit(frame, epochs=8, **columns)
        print(f"prepared in {summary.phase_seconds['prepare']:.1f} s, loss {summary.loss:.3f}")
    print(f"rows in {summary.export_directory}\n{summary.table()}")
    figures = network.evaluate(frame.where("held_out"), features="pixels", label="digit")
    network.close()  # removes the files
    spark.stop()
    print(figures.table())
    return 0 if summary.replicas_equal and figures.classification.accuracy > 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
