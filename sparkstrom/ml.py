"""Spark ML's side of sparkstrom: ``from sparkstrom.ml import SparkstromEstimator``."""

from sparkstrom.spark.ml import SparkstromEstimator as SparkstromEstimator
from sparkstrom.spark.ml import SparkstromModel as SparkstromModel

__all__ = ["SparkstromEstimator", "SparkstromModel"]
