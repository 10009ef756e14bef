"""Train on a stream of files, with a fit per micro-batch: spark-submit examples/stream.py"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import findspark

try:
    import pyspark  # noqa: F401
except ImportError:
    findspark.init()  # the cluster's own Spark

import numpy as np
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

from sparkstrom import SharedTrainingMaster, SparkNetwork
from sparkstrom.models import DenseNetwork, Sgd
from sparkstrom.streams import each_batch

FILES = 6
ACCURACY_WANTED = 0.9


def main(folder: str) -> int:
    digits = load_digits()
    features, labels = (digits.data / 16).astype(np.float32), digits.target
    order = np.random.default_rng(0).permutation(len(labels))
    train, held_out = order[:1437], order[1437:]

    spark = SparkSession.builder.appName("stream").getOrCreate()
    for part in np.array_split(train, FILES):  # files that would arrive over time
        rows = [(features[i].tolist(), int(labels[i])) for i in part]
        frame = spark.createDataFrame(rows, "features array<float>, label int").coalesce(1)
        frame.write.mode("append").parquet(f"{folder}/arriving")

    model = DenseNetwork([64, 128, 10], updater=Sgd(0.1), seed=1)
    network = SparkNetwork(spark, model, SharedTrainingMaster(), progress=False)

    def tell(batch: int, summary: object) -> None:
        print(f"batch {batch}: {summary.rows} rows, loss {summary.loss:.3f}", flush=True)

    stream = spark.readStream.schema("features array<float>, label int")
    query = (
        stream.option("maxFilesPerTrigger", 1)
        .parquet(f"{folder}/arriving")
        .writeStream.foreachBatch(each_batch(network, tell, epochs=10, run_log=""))
        .option("checkpointLocation", f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    accuracy = float((network.predict(features[held_out]).argmax(1) == labels[held_out]).mean())
    network.close()
    spark.stop()
    print(f"held-out accuracy {accuracy:.4f}")
    return 0 if accuracy >= ACCURACY_WANTED else 1


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        sys.exit(main(str(Path(folder))))
