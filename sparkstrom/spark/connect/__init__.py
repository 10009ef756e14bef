"""The ``Application`` of a Spark Connect session, which reads and runs everything by DataFrames.

Spark Connect has neither RDDs nor broadcast variables, and reports little about tasks and
executors. Each module here replaces one that uses a SparkContext.
"""
