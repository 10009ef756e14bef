"""Public import path for the Spark ML estimator and for the model that it returns."""

from sparkstrom.spark.ml.estimator import SparkstromEstimator as SparkstromEstimator
from sparkstrom.spark.ml.estimator import SparkstromModel as SparkstromModel

__all__ = ["SparkstromEstimator", "SparkstromModel"]
