"""Classify breast cancer by a cross-validated pipeline: spark-submit examples/pipeline.py"""

import sys

import findspark

try:
    import pyspark  # noqa: F401
except ImportError:
    findspark.init()  # the cluster's own Spark

from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import BinaryClassificationEvaluator
from pyspark.ml.feature import StandardScaler
from pyspark.ml.linalg import Vectors
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import SparkSession
from sklearn.datasets import load_breast_cancer

from sparkstrom import SharedTrainingMaster
from sparkstrom.ml import SparkstromEstimator
from sparkstrom.models import DenseNetwork, Sgd

AREA_WANTED = 0.97


def network(rate: float) -> DenseNetwork:
    return DenseNetwork([30, 16, 2], hidden="tanh", updater=Sgd(rate), seed=1)


def main(folder: str) -> int:
    table = load_breast_cancer()
    rows = [(Vectors.dense(row), int(y)) for row, y in zip(table.data, table.target, strict=True)]
    spark = SparkSession.builder.appName("pipeline").getOrCreate()
    frame = spark.createDataFrame(rows, ["measured", "label"]).cache()
    train, test = frame.randomSplit([0.8, 0.2], seed=1)

    # One worker per executor, so that there are task slots for two fits at the same time.
    master = SharedTrainingMaster(workers_per_node=1)
    estimator = SparkstromEstimator(featuresCol="scaled", epochs=5, batchSize=16, master=master)
    scaler = StandardScaler(inputCol="measured", outputCol="scaled", withMean=True)
    pipeline = Pipeline(stages=[scaler, estimator])
    evaluator = BinaryClassificationEvaluator()
    grid = ParamGridBuilder().addGrid(estimator.model, [network(0.001), network(0.1)]).build()
    search = CrossValidator(
        estimator=pipeline, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2, parallelism=2
    )
    found = search.fit(train)
    found.bestModel.write().overwrite().save(folder)
    area = evaluator.evaluate(PipelineModel.load(folder).transform(test))
    areas = ", ".join(f"{one:.4f}" for one in found.avgMetrics)
    print(f"area under ROC by rate: {areas}\nheld out: {area:.4f}")
    last = found.bestModel.stages[-1].summary  # of the fit on all rows
    phases = " + ".join(f"{name} {seconds:.1f}" for name, seconds in last.phase_seconds.items())
    print(f"seconds of the last fit: {last.seconds:.1f} = {phases}")
    spark.stop()
    return 0 if area >= AREA_WANTED else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "pipeline-model"))
