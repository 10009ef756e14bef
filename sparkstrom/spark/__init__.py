"""Train, predict and evaluate on Spark, with a SparkContext or a Spark Connect session.

Importing this package does not import pyspark; its modules import it when they need it.
"""
