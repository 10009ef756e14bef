"""Train, predict and evaluate on Spark, with a SparkContext or a Spark Connect session.

Importing this package does not import pyspark; the functions that need pyspark import it.
"""
