"""Spark ML's side of sparkstrom: ``from sparkstrom.ml import SparkstromEstimator``."""

from sparkstrom.spark.ml.estimator import SparkstromEstimator as SparkstromEstimator
from sparkstrom.spark.ml.estimator import SparkstromModel as SparkstromModel

__all__ = ["SparkstromEstimator", "SparkstromModel"]
