"""Access to Spark through a Spark Connect session, which offers only DataFrames.

Spark Connect has neither RDDs nor broadcast variables, and it reports little about tasks and
executors. Each module here replaces a module that uses a SparkContext.
"""
